"""dtlab's ranks, driven from a plain program."""
import sys

import talk
import work

import dtlab

num_ranks = int(sys.argv[1])
ranks = dtlab.launch(num_ranks)
assert ranks.run(work.first_result) == [num_ranks] * num_ranks
ddp_s = max(ranks.run(work.first_ddp))  # inside dtlab's cold start: it shows that everything is preloaded
talk.say(value=True)


def first_ddp():
    return ddp_s


def pss():
    """Zygote and ranks: the zygote's share is counted."""
    return work.pss_per_rank(work.all_pids(), num_ranks)


def relaunch():
    """The old ranks end, new ones start and give their first result."""
    global ranks
    ranks = dtlab.launch(num_ranks)
    assert ranks.run(work.first_result) == [num_ranks] * num_ranks


def make_tensor(num_bytes):
    ranks.run_cell(f"import work; tensor = work.make_tensor({num_bytes})", "cell [1]")
    import torch  # noqa: F401  as a notebook that gets tensors has


def pull():
    work.read_tensor(ranks.pull("tensor", ranks=[0])[0])


talk.serve(
    first_ddp=first_ddp,
    pss=pss,
    relaunch=lambda times: talk.time_calls(relaunch, times),
    empty_cell=lambda times: talk.time_calls(lambda: ranks.run_cell("", "cell [1]"), times),
    make_tensor=make_tensor,
    pull=lambda times: talk.time_calls(pull, times),
)
dtlab.current_ranks().shutdown()
