"""torch.multiprocessing.spawn, from a program that has imported torch."""
import os
import sys
import tempfile

import work

num_ranks = int(sys.argv[1])


def rank_program(rank, store):
    """Join, give the first result, leave."""
    work.join(rank, num_ranks, store)
    assert work.first_result() == num_ranks


def relaunch():
    """spawn() until all ranks have given their result and ended."""
    import torch

    with tempfile.TemporaryDirectory(prefix="dtlab-bench-") as folder:
        torch.multiprocessing.spawn(rank_program, (os.path.join(folder, "store"),), nprocs=num_ranks)


if __name__ == "__main__":
    import talk
    import torch  # noqa: F401

    talk.say(value=True)
    talk.serve(relaunch=lambda times: talk.time_calls(relaunch, times))
