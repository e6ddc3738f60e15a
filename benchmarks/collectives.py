"""The rows of our ring all-reduce beside gloo's own, on the same ranks in turns. Bandwidth is S / time (algbw)."""
from benchmarks.registry import at_least, row

NUM_RANKS, TENSOR_BYTES = 4, 16 * 2**20
GLOO, GUARDED = "gloo's dist.all_reduce", "dtlab, guarded"


def time_in_turns(names, times, is_bare):
    """On a rank: ``{name: seconds of each call}``; one call of each in turn, between barriers."""
    import time

    import torch
    import torch.distributed as dist

    from dtlab.parallel import ring_all_reduce
    from dtlab.ranks import calls

    functions, tensor = {"dtlab": ring_all_reduce, GLOO: dist.all_reduce}, torch.empty(TENSOR_BYTES // 4)
    publisher, seconds = calls.current, {name: [] for name in names}
    dist.barrier()
    try:
        calls.current = None if is_bare else publisher
        for number in range(times + 1):
            for name in list(seconds)[:: 1 if number % 2 else -1]:
                tensor.fill_(1.0)
                dist.barrier()
                started = time.perf_counter()
                functions[name](tensor)
                seconds[name].append(time.perf_counter() - started)
    finally:
        calls.current = publisher
    dist.barrier()
    return {name: some[1:] for name, some in seconds.items()}  # the first one warms up


def measure(bench, is_bare, *, with_guard):
    """Samples, in bytes a second."""
    import dtlab

    samples = {"dtlab": [], GLOO: [], GUARDED: []}
    with dtlab.launch(NUM_RANKS) as ranks:
        for _ in range(1 if bench.quick else 12):
            answers = ranks.run(time_in_turns, ["dtlab", GLOO], 5, is_bare, guard=False)
            samples["dtlab"] += bandwidths(answers, "dtlab")
            samples[GLOO] += bandwidths(answers, GLOO)
            if with_guard:
                samples[GUARDED] += bandwidths(ranks.run(time_in_turns, ["dtlab"], 5, False), "dtlab")
    return samples


def bandwidths(answers, name):
    """S over the time of the slowest rank in each call."""
    return [TENSOR_BYTES / max(call) for call in zip(*(seconds[name] for seconds in answers))]


@row("ring all-reduce of 16 MiB, 4 ranks", "GB/s", {GLOO: at_least(0.8), GUARDED: None})
def ring_all_reduce(bench, peers):
    return measure(bench, is_bare=False, with_guard=True)


@row("ring all-reduce of 16 MiB, 4 ranks, calls not published", "GB/s", {GLOO: at_least(0.8)})
def ring_all_reduce_bare(bench, peers):
    """As under torchrun: the ring's twelve messages cost their publishing, gloo's one call hardly does."""
    return measure(bench, is_bare=True, with_guard=False)
