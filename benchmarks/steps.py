"""The rows of a training step: guarded, and with the guard off, on the same ranks in turns."""
from benchmarks.registry import at_most, row

UNGUARDED = "unguarded"
BARE = "unguarded, calls not published"
UNRECORDED = "unrecorded"
NUM_RANKS = 2


def make_ddp_step(width):
    """On a rank: a step of DDP on six linear layers."""
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, width) for _ in range(6)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(32, width)

    def step():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def make_gpt_step():
    """On a rank: a step of DDP on the lessons' GPT."""
    import torch

    from dtlab.models import GPT, GPTConfig

    config = GPTConfig(vocab_size=128, seq_length=64, num_layers=4, hidden_size=192, num_heads=12)
    return training_step(torch.nn.parallel.DistributedDataParallel(GPT(config)), torch.randint(0, 128, (8, 64)))


def training_step(model, tokens):
    """On a rank: a step that trains a language model on one batch of tokens."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        logits = model(tokens)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def make_async_step():
    """On a rank: eight asynchronous all_reduces, with matrix products while they run."""
    import torch
    import torch.distributed as dist

    tensors, a = [torch.ones(1 << 18) for _ in range(8)], torch.randn(256, 256)

    def step():
        works = [dist.all_reduce(t, async_op=True) for t in tensors]
        for _ in range(20):
            a @ a
        for work in works:
            work.wait()

    return step


def keep_step(make, *args):
    """On a rank: make a step and keep it for the rounds."""
    import __main__

    __main__.guard_bench_step = make(*args)


def time_steps(times, is_bare):
    """On a rank: seconds of each step, between barriers."""
    import time

    import torch.distributed as dist

    import __main__
    from dtlab.ranks import calls

    step, publisher, seconds = __main__.guard_bench_step, calls.current, []
    dist.barrier()
    try:
        calls.current = None if is_bare else publisher
        for _ in range(times):
            started = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - started)
    finally:
        calls.current = publisher
    dist.barrier()
    return sorted(seconds)[times // 2]


def compare(make, *args, rounds=15, times=15):
    """Median step of the slowest rank in each round: ``{"dtlab": guarded, UNGUARDED: ..., BARE: ...}``."""
    import dtlab

    samples = {"dtlab": [], UNGUARDED: [], BARE: []}
    with dtlab.launch(NUM_RANKS) as ranks:
        ranks.run(keep_step, make, *args)
        ranks.run(time_steps, times, False)
        for _ in range(rounds):
            for name, seconds in samples.items():
                seconds.append(max(ranks.run(time_steps, times, name == BARE, guard=name == "dtlab")))
    return samples


@row("DDP step, 6 x Linear(256), 2 ranks, guarded", "s", {UNGUARDED: at_most(1.3), BARE: at_most(1.3)})
def guarded_small_step(bench, peers):
    return compare(make_ddp_step, 256, rounds=1 if bench.quick else 15)


@row("DDP step of the lessons' GPT (hidden 192, 4 layers), 2 ranks, guarded", "s",
     {UNGUARDED: at_most(1.5), BARE: at_most(1.5)})
def guarded_gpt_step(bench, peers):
    return compare(make_gpt_step, rounds=1 if bench.quick else 10, times=5)


@row("GPT step (hidden 192, 4 layers), 2 ranks, recorded", "s", {UNRECORDED: at_most(1.5)})
def recorded_gpt_step(bench, peers):
    """Median step of the slowest rank in each round."""
    import dtlab

    samples, times = {"dtlab": [], UNRECORDED: []}, 5
    with dtlab.launch(NUM_RANKS, guard=False) as ranks:
        ranks.run(keep_step, make_gpt_step)
        ranks.run(time_steps, times, False)
        for _ in range(1 if bench.quick else 10):
            samples[UNRECORDED].append(max(ranks.run(time_steps, times, False)))
            samples["dtlab"].append(max(ranks.record(time_steps, times, False).results))
    return samples


@row("8 asynchronous all_reduces of 1 MiB beside matrix products, 2 ranks, guarded", "s", {UNGUARDED: None, BARE: None})
def guarded_asynchronous(bench, peers):
    return compare(make_async_step, rounds=1 if bench.quick else 15)
