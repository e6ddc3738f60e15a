"""The row of our ring all-reduce beside gloo's own, on the same ranks in turns. Bandwidth is S / time (algbw)."""
from benchmarks.registry import at_least, row

NUM_RANKS, TENSOR_BYTES = 4, 16 * 2**20
GLOO, GUARDED = "gloo's dist.all_reduce", "dtlab, guarded"


def time_in_turns(names, times):
    """On a rank: ``{name: seconds of each call}``; one call of each in turn, between barriers."""
    import time

    import torch
    import torch.distributed as dist

    from dtlab.parallel import ring_all_reduce

    calls, tensor = {"dtlab": ring_all_reduce, GLOO: dist.all_reduce}, torch.empty(TENSOR_BYTES // 4)
    seconds = {name: [] for name in names}
    for number in range(times + 1):
        for name in list(seconds)[:: 1 if number % 2 else -1]:
            tensor.fill_(1.0)
            dist.barrier()
            started = time.perf_counter()
            calls[name](tensor)
            seconds[name].append(time.perf_counter() - started)
    return {name: some[1:] for name, some in seconds.items()}  # the first makes connections


def bandwidths(on_ranks, name):
    """Bytes a second in each call, of the slowest rank in it."""
    return [TENSOR_BYTES / max(call) for call in zip(*(seconds[name] for seconds in on_ranks))]


@row("ring all-reduce of 16 MiB, 4 ranks", "GB/s", {GLOO: at_least(0.8), GUARDED: None})
def ring_all_reduce(bench, peers):
    import dtlab

    samples = {"dtlab": [], GLOO: [], GUARDED: []}
    with dtlab.launch(NUM_RANKS) as ranks:
        for _ in range(1 if bench.quick else 12):
            answers = ranks.run(time_in_turns, ["dtlab", GLOO], 5, guard=False)
            for name in ("dtlab", GLOO):
                samples[name] += bandwidths(answers, name)
            samples[GUARDED] += bandwidths(ranks.run(time_in_turns, ["dtlab"], 5), "dtlab")
    return samples
