"""The rows of the live ranks, beside ipyparallel, torch.multiprocessing and torchrun."""
from benchmarks.registry import at_most, row, times_faster

TENSOR_BYTES = 64 * 2**20
SPAWN, TORCHRUN, IPYPARALLEL = "torch.multiprocessing.spawn", "torchrun", "ipyparallel"
# The same peers, measured another way; without a goal
TORCHRUN_AND_DDP = f"{TORCHRUN}, and its first DDP()"
BEFORE_DDP = f"{IPYPARALLEL}, before any DDP()"
WITH_CONTROLLER = f"{IPYPARALLEL}, with its controller and nannies"
AS_ARRAY = f"{IPYPARALLEL}, as a NumPy array"


def _questions(peers, question, **other):
    """Who is asked what, ``{peer: (engine, question)}``: the same question, except where ``other`` has another one."""
    return {peer: (peer.split(",")[0], other.get(peer, question)) for peer in ("dtlab", *peers)}


@row("cold start: fresh process to first result (dtlab: and its first DDP())", "s",
     {IPYPARALLEL: times_faster(4), TORCHRUN: times_faster(2), TORCHRUN_AND_DDP: None})
def cold_start(bench, peers):
    return bench.cold(_questions(peers, "cold_start", **{TORCHRUN_AND_DDP: "cold_start_and_ddp"}))


@row("first DistributedDataParallel(), slowest rank", "s", {TORCHRUN: None, IPYPARALLEL: None})
def first_ddp(bench, peers):
    return bench.cold(_questions(peers, "first_ddp"))


@row("memory per idle rank after a first DDP() (PSS; dtlab: zygote included)", "MiB",
     {IPYPARALLEL: at_most(1 / 3, "<= 1/3"), BEFORE_DDP: None, WITH_CONTROLLER: None})
def memory(bench, peers):
    return bench.cold(_questions(peers, "pss", **{BEFORE_DDP: "pss_before_ddp", WITH_CONTROLLER: "pss_all"}))


@row("warm start: 4 ranks again, end of the old ones to first result", "s",
     {SPAWN: times_faster(50), IPYPARALLEL: times_faster(50)})
def warm_start(bench, peers):
    return bench.in_turn(_questions(peers, "relaunch"), rounds=5)


@row("empty cell on 4 ranks, beyond the kernel's round trip", "s", {IPYPARALLEL: times_faster(5)})
def empty_cell(bench, peers):
    return bench.in_turn(_questions(peers, "empty_cell"), rounds=10, times=20)


@row("64 MiB tensor back to the notebook, every page read", "s", {IPYPARALLEL: times_faster(5), AS_ARRAY: None})
def tensor_back(bench, peers):
    questions = _questions(peers, "pull", **{AS_ARRAY: "pull_array"})
    return bench.in_turn(questions, rounds=10, times=3, before=("make_tensor", TENSOR_BYTES))
