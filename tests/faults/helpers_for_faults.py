"""What the fault tests share: live ranks, and what must be true after every fault."""
import os
import tempfile

import psutil
import pytest
import torch

import dtlab

in_test_all = pytest.mark.long
_every_rank = set()  # process ids of all ranks there have been

def live(size, **kwargs):
    """Ranks of this size: those that live, or new ones."""
    ranks = dtlab.current_ranks()
    return ranks if ranks is not None and ranks.size == size and not kwargs else dtlab.launch(size, **kwargs)


def sum_of_ranks():
    """The cell after a fault: every rank gets the right sum."""
    x = torch.tensor([float(rank), 1.0])  # noqa: F821  (rank, dist: names of the rank)
    dist.all_reduce(x)  # noqa: F821
    return x.tolist()


sum_of_ranks.__module__ = "__main__"  # as in a notebook: it travels by value


def assert_works(ranks):
    """The next cell is right on every rank, without a restart."""
    _every_rank.update(ranks.pids.values())
    total = ranks.size * (ranks.size - 1) / 2
    assert ranks.run(sum_of_ranks) == [[total, float(ranks.size)]] * ranks.size


def open_fds():
    return len(os.listdir("/proc/self/fd"))


def shared_files():
    """Names in shared memory and our temporary files: a fault must leave none."""
    ours = f"torch_{os.getpid()}_"
    in_memory = {n for n in os.listdir("/dev/shm") if "dtlab" in n or n.startswith(ours)}
    return in_memory | {n for n in os.listdir(tempfile.gettempdir()) if n.startswith(("dtlab-store", "dtlab-board"))}


def stray_processes(ranks):
    """Ranks that should be gone, and what they had started: each rank and its children are a process group."""
    _every_rank.update(ranks.pids.values())
    dead = _every_rank - set(ranks.pids.values())
    return [p for p in psutil.process_iter() if _group(p.pid) in dead and p.status() != "zombie"]


def _group(pid):
    try:
        return os.getpgid(pid)
    except OSError:
        return None
