"""The rows of tensor parallelism: a layer of ours, of Megatron-core's linears and of DTensors, in turns."""
from benchmarks.registry import at_most, row
from benchmarks.zero import kept_steps

MEGATRON, DTENSOR = "Megatron-core", "DTensor"


def make_passes(peers, hidden_size, batch_size):
    """On a rank: ``{name: forward and backward of a transformer layer}``; all have the same weights and input."""
    import torch

    from dtlab.data.recordings import with_megatron_linears
    from dtlab.models import GPT, GPTConfig
    from dtlab.parallel import apply_tensor_parallel

    config = GPTConfig(hidden_size=hidden_size, num_layers=1)
    x = torch.randn(batch_size, config.seq_length, hidden_size, generator=torch.Generator().manual_seed(0))

    def make_pass(layer):
        mine = x.clone().requires_grad_()

        def one_pass():
            layer(mine).square().mean().backward()
            layer.zero_grad()
            mine.grad = None

        return one_pass

    ours, theirs = (apply_tensor_parallel(GPT(config)).layers[0] for _ in range(2))
    passes = {"dtlab": ours, DTENSOR: by_dtensor(GPT(config).layers[0])}
    if MEGATRON in peers:
        passes[MEGATRON] = with_megatron_linears(theirs)
    return {name: make_pass(layer) for name, layer in passes.items()}


def by_dtensor(layer):
    """On a rank: the serial layer, parallelised by torch."""
    import torch.distributed as dist
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    size = dist.get_world_size()
    layer.self_attention.num_heads //= size  # what it sees of a cut weight
    layer.self_attention.num_kv_heads //= size
    return parallelize_module(layer, dist.init_device_mesh("cpu", (size,)), {
        "self_attention.linear_qkv": ColwiseParallel(), "self_attention.linear_proj": RowwiseParallel(),
        "mlp.linear_fc1": ColwiseParallel(), "mlp.linear_fc2": RowwiseParallel()})  # fmt: skip


def time_in_turns(times):
    """On a rank: ``{name: seconds of each pass}``, between barriers; each is as often the first as others."""
    import time

    import torch.distributed as dist

    import __main__
    from benchmarks.bench import _rotated

    found = {name: [] for name in __main__.steps}
    for number in range(times):
        for name in _rotated(found, number):
            dist.barrier()
            started = time.perf_counter()
            __main__.steps[name]()
            found[name].append(time.perf_counter() - started)
    dist.barrier()
    return found


def compare(bench, peers, *sizes):
    """Each pass's slowest rank, in seconds."""
    with kept_steps(make_passes, peers, *sizes) as (ranks, names):
        answers = ranks.run(time_in_turns, 3 if bench.quick else 60)
    return {name: [max(one) for one in zip(*(its[name] for its in answers))] for name in names}


@row("tensor-parallel layer of the lessons' GPT, forward and backward, 2 ranks", "s",
     {MEGATRON: at_most(1.1), DTENSOR: at_most(0.8)})
def tensor_parallel_layer(bench, peers):
    return compare(bench, peers, 192, 4)


@row("tensor-parallel layer of hidden size 768, forward and backward, 2 ranks", "s",
     {MEGATRON: at_most(1.1), DTENSOR: None})
def tensor_parallel_large_layer(bench, peers):
    """What DTensor does in Python for each operation counts less, the larger these are."""
    return compare(bench, peers, 768, 1)
