"""The rows of data parallelism: a step of our DistributedDataParallel and of torch's, on the same ranks in turns."""
from benchmarks.registry import at_most, row
from benchmarks.steps import training_step

PEER = "torch DistributedDataParallel"


def make_gpt_steps(batch_size):
    """On a rank: ``{name: a training step}`` of the lessons' GPT, wrapped by each."""
    import torch

    from dtlab.models import GPT, GPTConfig
    from dtlab.parallel import DistributedDataParallel

    def make_step(wrap):
        return training_step(wrap(GPT(GPTConfig())), torch.randint(0, 256, (batch_size, 128)))

    return {"dtlab": make_step(DistributedDataParallel), PEER: make_step(torch.nn.parallel.DistributedDataParallel)}


def keep_steps(make, *args):
    """On a rank: make the steps and keep them for the rounds."""
    import __main__

    __main__.steps = make(*args)


def time_step(name, times):
    """On a rank: the median step in seconds, between barriers."""
    import time

    import torch.distributed as dist

    import __main__

    step, seconds = __main__.steps[name], []
    for _ in range(times):
        dist.barrier()
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    dist.barrier()
    return sorted(seconds)[times // 2]


def compare(num_ranks, batch_size, rounds, times=5):
    """Median step of the slowest rank in each round."""
    import dtlab

    samples = {"dtlab": [], PEER: []}
    with dtlab.launch(num_ranks, guard=False) as ranks:
        ranks.run(keep_steps, make_gpt_steps, batch_size)
        for name in samples:
            ranks.run(time_step, name, times)
        for number in range(rounds):
            for name in list(samples)[:: 1 if number % 2 else -1]:
                samples[name].append(max(ranks.run(time_step, name, times)))
    return samples


@row("DistributedDataParallel step of the lessons' GPT, 2 ranks", "s", {PEER: at_most(1.1)})
def data_parallel_2_ranks(bench, peers):
    return compare(2, 4, rounds=1 if bench.quick else 12)


@row("DistributedDataParallel step of the lessons' GPT, 4 ranks", "s", {PEER: at_most(1.1)})
def data_parallel_4_ranks(bench, peers):
    return compare(4, 2, rounds=1 if bench.quick else 12)
