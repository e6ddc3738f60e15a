"""The rows of the live ranks, beside ipyparallel, torch.multiprocessing and torchrun."""
from benchmarks.registry import at_most, row, times_faster

TENSOR_BYTES = 64 * 2**20
SPAWN, TORCHRUN, IPYPARALLEL = "torch.multiprocessing.spawn", "torchrun", "ipyparallel"


def _cold(bench, peers, what):
    """One of the figures of a fresh start; all of them come from the same starts."""
    found = bench.cold(["dtlab", *peers])
    return {engine: [x for x in found[engine][what] if x is not None] for engine in ("dtlab", *peers)}


@row("cold start: fresh process to first result (dtlab: and its first DDP())", "s",
     {IPYPARALLEL: times_faster(4), TORCHRUN: times_faster(2)})
def cold_start(bench, peers):
    return _cold(bench, peers, "cold_start")


@row("first DistributedDataParallel(), slowest rank", "ms", {TORCHRUN: None, IPYPARALLEL: None})
def first_ddp(bench, peers):
    return _cold(bench, peers, "first_ddp")


@row("memory per idle rank (PSS; dtlab's zygote included)", "MiB", {IPYPARALLEL: at_most(1 / 3, "<= 1/3")})
def memory(bench, peers):
    return _cold(bench, peers, "pss")


@row("warm start: 4 ranks again, end of the old ones to first result", "s",
     {SPAWN: times_faster(50), IPYPARALLEL: times_faster(50)})
def warm_start(bench, peers):
    return bench.in_turn("relaunch", ["dtlab", *peers], rounds=5)


@row("empty cell on 4 ranks, beyond the kernel's round trip", "ms", {IPYPARALLEL: times_faster(5)})
def empty_cell(bench, peers):
    return bench.in_turn("empty_cell", ["dtlab", *peers], rounds=10, times=20)


@row("64 MiB tensor back to the notebook, every page read", "ms", {IPYPARALLEL: times_faster(5)})
def tensor_back(bench, peers):
    return bench.in_turn("pull", ["dtlab", *peers], rounds=10, times=3, before=("make_tensor", TENSOR_BYTES))
