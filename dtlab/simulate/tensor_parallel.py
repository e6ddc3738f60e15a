"""A layer cut by tensor parallelism, and attention cut by context parallelism, on named hardware. Pure.

Only matrix products take time, at the FLOP/s that the hardware reaches. What the calls are is ``theory``'s to say:
``tp_layer_collectives``, ``ring_attention_wire_bytes``, ``ulysses_wire_bytes``.
"""
from dtlab.errors import ConfigError
from dtlab.simulate.boxes import boxes_of_run
from dtlab.simulate.engine import Transfer, simulate
from dtlab.simulate.hardware import Hardware
from dtlab.simulate.replay import replay
from dtlab.simulate.timeline import Timeline
from dtlab.theory import Link, LlamaShape, ModelShape, batch_flops, causal_blocks, tp_layer_collectives
from dtlab.theory.tensor_parallel import chunks_of, num_kv_heads, piece_bytes

_FORWARD, _BACKWARD, _CALL = ("forward", "forward", ""), ("backward", "backward", ""), ("call", "compute", "")


def tensor_parallel_layer(shape: ModelShape, hardware: Hardware, *, tp_size: int, micro_batch_size: int = 1,
                          sequence_parallel: bool = False, overlap: bool = True,
                          algorithm: str | None = "ring") -> Timeline:
    """The timeline of forward and backward of one layer, one rank drawn for all.

    Backward has twice forward's matrix products: no flash attention, as in ``theory.batch_flops``.

    Args:
        shape: ``theory.ModelShape``; elements are of 16 bits.
        hardware: ``Hardware`` with at least ``tp_size`` devices.
        micro_batch_size: sequences (count); all ranks of the group work on the same ones.
        sequence_parallel: all_gathers and reduce_scatters in the place of all_reduces.
        overlap: backward sends a column-parallel matrix's input gradient while that of the weight is computed (and
            with sequence parallelism gathers the input while its gradient is computed).
        algorithm: of the collectives; None: for each the fastest, which across nodes is the hierarchical.

    Raises:
        ConfigError: a degree that is not legal for the shape, with the legal ones; more ranks than devices.

    Example:
        >>> from dtlab.simulate import Hardware
        >>> from dtlab.theory import GPT_7_5B
        >>> for tp_size in (4, 8, 16):
        ...     layers = [tensor_parallel_layer(GPT_7_5B, Hardware.preset("64xA100-80GB"), tp_size=tp_size, overlap=o)
        ...               for o in (False, True)]
        ...     print(*(f"{layer.exposed_communication_s / layer.step_time_s:.0%}" for layer in layers))
        10% 5%
        24% 13%
        86% 86%
    """
    calls = tp_layer_collectives(shape, micro_batch_size=micro_batch_size, tp_size=tp_size,
                                 sequence_parallel=sequence_parallel)
    cost_s = {op: hardware.collective_s(op, size, range(tp_size), algorithm) for _, op, size in calls}
    blocks, program = _matrices_s(shape, tp_size, micro_batch_size, hardware), _Program(1)

    def call(op, seconds=0.0, overlap=overlap):
        """A collective, where there is one, with a part of backward beside it or behind it."""
        started = [program.collective(op, cost_s[op])] if op in cost_s else []
        program.wait(0, *started * (not overlap))
        program.run(0, _BACKWARD, seconds)
        program.wait(0, *started * overlap)

    for column_s, inner_s, row_s in blocks:
        call("all_gather")
        program.run(0, _FORWARD, column_s + inner_s + row_s)
        call("reduce_scatter" if sequence_parallel else "all_reduce")
    for column_s, inner_s, row_s in reversed(blocks):
        call("all_gather")
        program.run(0, _BACKWARD, 2 * (row_s + inner_s))
        call("all_gather", column_s)  # the gradient of its input
        call("reduce_scatter" if sequence_parallel else "all_reduce", column_s)  # and of its weight
    return program.timeline()


def _matrices_s(shape, tp_size, micro_batch_size, hardware):
    """Seconds of forward on one rank: (column-parallel, what is between, row-parallel) of attention and of the MLP."""
    tokens, h, f = micro_batch_size * shape.seq_length, shape.hidden_size, shape.ffn_hidden_size / tp_size
    width = shape.num_heads * shape.head_size / tp_size
    qkv = width + 2 * max(num_kv_heads(shape) / tp_size, 1) * shape.head_size
    flop_s = 2 * tokens / (hardware.peak_flops * hardware.gemm_efficiency)
    columns = 2 * f if isinstance(shape, LlamaShape) else f
    return [(h * qkv * flop_s, 2 * shape.seq_length * width * flop_s, h * width * flop_s),
            (h * columns * flop_s, 0.0, h * f * flop_s)]  # fmt: skip


# Megatron-LM 2019, weak scaling: tp_size -> hidden_size, num_heads, num_layers, published efficiency (percent)
MEGATRON_2019 = {1: (1536, 16, 40, 100), 2: (1920, 20, 54, 95), 4: (2304, 24, 64, 82), 8: (3072, 32, 72, 77)}
# A DGX-2H, whose 16 GPUs share one switched network. That half of the data sheet's is reached is the presets'
# assumption of matrix products; of links it was chosen to fit this table. With the presets' 5/6 the row of 4 is more
# than 5 points off.
DGX_2H = Hardware.preset("16xV100-32GB", node_size=16, inside=Link(
    "NVLink 2, half", 75e9, 3.4e-6, "V100 data sheet, NVIDIA 2020: 300 GB/s, both ways; half of it was chosen to fit"))


def megatron_2019_efficiency(recordings: dict, hardware: Hardware = DGX_2H):
    """The paper's efficiency beside a replay's: a DataFrame with one row for each tp_size.

    Efficiency is FLOP/s of a GPU in a layer, in percent of the first row's: embeddings, loss and optimizer are left
    out. One machine and one set of shares of its peaks for all rows.

    Args:
        recordings: tp_size -> dry recording of a layer of that row of ``MEGATRON_2019``, forward and backward in
            ``dtlab.phase("layer")``: micro-batches of 8, 1,024 tokens, 16 bits, dropout 0.1, attention written out,
            the layer recomputed in backward (else the first row does not fit its GPU), no all_reduce beside a product.
        hardware: ``Hardware``.

    Source: Shoeybi et al. 2019, arXiv:1909.08053, table 1 and figure 5.
    """
    import pandas as pd

    rows = {}
    for tp_size, recording in recordings.items():
        hidden_size, num_heads, num_layers, published = MEGATRON_2019[tp_size]
        shape = ModelShape(num_layers=1, hidden_size=hidden_size, num_heads=num_heads, seq_length=1024, vocab_size=1)
        timeline = replay(recording, hardware, algorithm="ring")
        began_s = min(box.start_s for box in timeline.boxes if box.label == "layer")
        layer_s = timeline.start_s + timeline.step_time_s - began_s
        flops_per_s = batch_flops(shape, batch_size=8, recompute="full") / tp_size / layer_s
        rows[tp_size] = {"hidden_size": hidden_size, "num_layers": num_layers, "flops_per_s": flops_per_s,
                         "exposed_percent": 100 * timeline.exposed_communication_s / layer_s,
                         "published_percent": published}  # fmt: skip
    table = pd.DataFrame.from_dict(rows, orient="index").rename_axis("tp_size")
    table["replay_percent"] = 100 * table.flops_per_s / table.flops_per_s.iloc[0]
    return table


def context_parallel_attention(shape: ModelShape, hardware: Hardware, *, cp_size: int, layout: str = "zigzag",
                               method: str = "ring", causal: bool = True) -> Timeline:
    """The timeline of forward and backward of one layer's attention on one sequence, between the projections.

    Scores are not kept: backward computes them again, five products for forward's two, as flash attention does.

    A ring's rank sends keys and values on while it computes with them; a block that the causal mask hides takes no
    time. In backward their gradients, summed in 32 bits, follow when the block is done, and go home in the end. Ulysses
    exchanges before and after, with nothing to compute beside it.

    Args:
        shape: ``theory.ModelShape``; elements are of 16 bits.
        hardware: ``Hardware`` with at least ``cp_size`` devices.
        cp_size: ranks that share the sequence (count).
        layout: "contiguous" or "zigzag": which chunks of the sequence a rank has; for Ulysses it changes nothing.
        method: "ring" or "ulysses".
        causal: the half of the scores that the mask hides takes no time.

    Raises:
        ConfigError: a sequence that does not divide by ``cp_size`` (a zigzag: by twice that), or with Ulysses heads
            that do not; no such layout or method; more ranks than devices.

    Example:
        >>> from dtlab.simulate import Hardware
        >>> from dtlab.theory import GPT_7_5B
        >>> for layout in ("contiguous", "zigzag"):
        ...     layer = context_parallel_attention(GPT_7_5B, Hardware.preset("8xA100"), cp_size=4, layout=layout)
        ...     print([round(1e6 * busy_s) for busy_s in layer.by_rank().busy_s])
        [48, 145, 241, 337]
        [193, 193, 193, 193]
    """
    queries, keys_values = piece_bytes(shape, cp_size=cp_size, method=method)
    if shape.seq_length % (chunks := cp_size * len(chunks_of(cp_size, layout)[0])):
        raise ConfigError(f"seq_length ({shape.seq_length}) must be divisible by {chunks}: with cp_size {cp_size} a "
                          f"{layout} layout has so many chunks of equal length")
    ranks, program = range(cp_size), _Program(cp_size)
    reached = hardware.peak_flops * hardware.gemm_efficiency
    whole_s = 4 * shape.seq_length**2 * shape.num_heads * shape.head_size / reached / (2 if causal else 1)
    blocks = causal_blocks(cp_size, layout) if causal else [[1 / cp_size**2] * cp_size] * cp_size
    if method == "ring":
        hop_s = [[hardware.p2p_s(size, rank, (rank + 1) % cp_size) for rank in ranks]
                 for size in (keys_values, 2 * keys_values)]  # gradients have 32 bits
        for look, factor in ((_FORWARD, whole_s), (_BACKWARD, 2.5 * whole_s)):
            program.ring(look, [[share * factor for share in row] for row in blocks], *hop_s)
        return program.timeline()
    exchange_s = lambda size: hardware.collective_s("all_to_all", size, ranks)
    for look, seconds, before, behind in ((_FORWARD, whole_s, queries + keys_values, queries),
                                          (_BACKWARD, 2.5 * whole_s, queries, queries + keys_values)):  # fmt: skip
        for size, its_s in ((before, seconds / cp_size), (behind, 0.0)):
            exchange = program.collective("all_to_all", exchange_s(size))
            for rank in ranks:
                program.wait(rank, exchange)
                program.run(rank, look, its_s)
    return program.timeline()


class _Program:
    """What ranks do, while it is written: their steps, how those look, and what they send."""

    def __init__(self, num_ranks):
        self.ranks = range(num_ranks)
        self.steps, self.looks = {rank: [] for rank in self.ranks}, {rank: [] for rank in self.ranks}
        self.transfers, self.shows = [], []

    def run(self, rank, look, seconds, action=None):
        self.steps[rank].append((seconds, action))
        self.looks[rank].append(look)

    def wait(self, rank, *transfers):
        for transfer in transfers:
            self.run(rank, _CALL, 0.0, ~transfer)

    def start(self, transfer, shows):
        """All members start a transfer; gives what to wait for."""
        self.transfers.append(transfer)
        self.shows.append(shows)
        for rank in transfer.members:
            self.run(rank, _CALL, 0.0, len(self.transfers) - 1)
        return len(self.transfers) - 1

    def collective(self, op, time_s):
        return self.start(Transfer(op, tuple(self.ranks), "group", 0.0, time_s),
                          dict.fromkeys(self.ranks, ("group", op, "")))  # fmt: skip

    def hop(self, hop_s):
        """A message from each rank to the next: for each rank the two that it waits for."""
        sent = []
        for rank in self.ranks:
            to = (rank + 1) % len(self.ranks)
            sent.append(self.start(Transfer(f"message to rank {to}", (rank, to), (rank, to), 0.0, hop_s[rank]),
                                   {rank: (f"to rank {to}", "send", ""), to: (f"from rank {rank}", "recv", "")}))
        return [(sent[rank - 1], sent[rank]) for rank in self.ranks]

    def ring(self, look, seconds, hop_s, home_s):
        """Each rank's block with the keys of each, seconds of it; in backward with others' gradients, going home."""
        going_home = [()] * len(self.ranks)
        for step in self.ranks:
            hops = self.hop(hop_s) if step < len(self.ranks) - 1 else [()] * len(self.ranks)
            for rank in self.ranks:
                source = (rank - step) % len(self.ranks)
                self.run(rank, (*look[:2], str(source)), seconds[rank][source])
                self.wait(rank, *hops[rank], *going_home[rank])
            if look is _BACKWARD and step > 0:
                going_home = self.hop(home_s)
        for rank in self.ranks:
            self.wait(rank, *going_home[rank])

    def timeline(self):
        return Timeline(boxes_of_run(simulate(self.steps, self.transfers), self.steps, self.looks, self.shows))
