"""The rows of tensor parallelism: a layer of ours, of Megatron-core's linears and of DTensors, in turns."""
from benchmarks.registry import at_most, row
from benchmarks.zero import seconds

MEGATRON, DTENSOR = "Megatron-core", "DTensor"
REACHES = {MEGATRON: at_most(1.1), DTENSOR: at_most(0.8)}


def make_passes(peers, hidden_size, batch_size):
    """On a rank: ``{name: forward and backward of a transformer layer}``; all have the same weights and input."""
    import torch

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
        passes[MEGATRON] = of_megatrons_linears(theirs, config)
    return {name: make_pass(layer) for name, layer in passes.items()}


def of_megatrons_linears(layer, config):
    """On a rank: our layer with each linear replaced by Megatron-core's, with its values; attention stays ours."""
    import torch

    from dtlab.data.recordings import megatron_linears

    class OutputOnly(torch.nn.Module):
        """They return a bias beside the output, here None."""

        def __init__(self, linear):
            super().__init__()
            self.linear = linear

        def forward(self, x):
            return self.linear(x)[0]

    attention, mlp = layer.self_attention, layer.mlp
    for part, name, width, which in (
        (attention, "linear_qkv", 3 * config.hidden_size, 0), (attention, "linear_proj", config.hidden_size, 1),
        (mlp, "linear_fc1", config.ffn_hidden_size, 0), (mlp, "linear_fc2", config.ffn_hidden_size, 1),
    ):  # fmt: skip
        linear = megatron_linears(config.hidden_size, width, torch.float32)[which]  # column, row
        linear.load_state_dict(getattr(part, name).state_dict(), strict=False)
        setattr(part, name, OutputOnly(linear))
    return layer


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


@row("tensor-parallel layer of the lessons' GPT, forward and backward, 2 ranks", "s", REACHES)
def tensor_parallel_layer(bench, peers):
    return seconds(bench, make_passes, peers, 192, 4)


@row("tensor-parallel layer of hidden size 768, forward and backward, 2 ranks", "s", REACHES)
def tensor_parallel_large_layer(bench, peers):
    return seconds(bench, make_passes, peers, 768, 1)
