"""Where a rank's memory goes: states, activations, what stage 3 gathers, buckets. In bytes. Pure.

Counts are of tensors. What an allocator rounds up, keeps for later or cannot use is not in them, nor are a device's
context and its libraries' workspaces: a device has to have room for those too.
"""
from collections.abc import Sequence

from dtlab.errors import ConfigError
from dtlab.theory.flops import RECOMPUTE
from dtlab.theory.models import ModelShape, layer_params, transformer_params
from dtlab.validate import amount, at_least, divisible, index_below, one_of

_ADAM = {"momentum": 4, "variance": 4}
_MASTER = {"master weights": 4, **_ADAM}

# recipe -> bytes a parameter, part by part. Master weights count as optimizer states, as in ZeRO's K.
RECIPES = {
    "adam_mixed": {"weights": 2, "grads": 2, **_MASTER},
    "adam_mixed_fp32_grads": {"weights": 2, "fp32 grads": 4, **_MASTER},
    "adam_mixed_both_grads": {"weights": 2, "grads": 2, "fp32 grads": 4, **_MASTER},
    "adam_fp32": {"weights": 4, "grads": 4, **_ADAM},
    "adam_fp64": {"weights": 8, "grads": 8, "momentum": 8, "variance": 8},
    "sgd_fp32": {"weights": 4, "grads": 4},
}
CATEGORIES = ("params", "grads", "optimizer_states")  # sharded from stage 3, 2 and 1 on


def recipe_bytes(recipe: str) -> dict[str, int]:
    """Bytes a parameter of ``RECIPES[recipe]`` by category: params, grads, optimizer_states.

    Example:
        >>> recipe_bytes("adam_mixed"), sum(recipe_bytes("adam_mixed_both_grads").values())
        ({'params': 2, 'grads': 2, 'optimizer_states': 12}, 20)
    """
    one_of("recipe", recipe, RECIPES)
    found = dict.fromkeys(CATEGORIES, 0)
    for part, its_bytes in RECIPES[recipe].items():
        found["params" if part == "weights" else "grads" if part.endswith("grads") else "optimizer_states"] += its_bytes
    return found


def model_state_bytes(num_params, *, recipe: str = "adam_mixed") -> dict[str, float]:
    """Bytes of params, grads and optimizer_states on a rank that holds them whole.

    Example:
        >>> {name: its_bytes / 1e9 for name, its_bytes in model_state_bytes(6.7e9).items()}
        {'params': 13.4, 'grads': 13.4, 'optimizer_states': 80.4}
    """
    return zero_states(num_params, dp_size=1, zero_stage=0, optimizer=recipe)


def zero_states(num_params, *, dp_size, zero_stage: int, optimizer: str = "adam_mixed", padding: int = 0,
                step_tensors: int = 0) -> dict[str, float]:
    """Bytes of params, grads and optimizer_states on one of ``dp_size`` ranks.

    Args:
        num_params: Psi (count); a number or a numpy array, as ``dp_size``.
        zero_stage: 0 shards nothing, 1 optimizer states, 2 + gradients, 3 + parameters.
        optimizer: one of ``RECIPES``.
        padding: elements added so that every rank's shard is of one length: the sum over flat tensors (a bucket's, a
            unit's) of ``padding_elements``. Whole flat tensors hold them too.
        step_tensors: 4-byte step counters of Adam on this rank (count): one for each tensor that it updates.

    Raises:
        ConfigError: a recipe or a stage that is not there, a number below 0.

    Example:
        >>> {name: round(b / 1e9, 1) for name, b in zero_states(7.5e9, dp_size=64, zero_stage=1).items()}
        {'params': 15.0, 'grads': 15.0, 'optimizer_states': 1.4}

    Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 5 and figure 1.
    """
    one_of("zero_stage", zero_stage, (0, 1, 2, 3))
    whole = amount("num_params", num_params) + at_least("padding", padding, 0)
    shard = whole / amount("dp_size", dp_size, minimum=1)
    sharded = CATEGORIES[3 - int(zero_stage):]
    states = {name: size * (shard if name in sharded else whole) for name, size in recipe_bytes(optimizer).items()}
    states["optimizer_states"] += 4 * at_least("step_tensors", step_tensors, 0)
    return states


def zero_state_bytes(num_params, *, dp_size, zero_stage: int, optimizer: str = "adam_mixed", padding: int = 0,
                     step_tensors: int = 0):
    """Bytes of model states on one rank, all together; arguments as in ``zero_states``. Model states only.

    Example:
        >>> [round(zero_state_bytes(7.5e9, dp_size=64, zero_stage=stage) / 1e9, 1) for stage in (0, 1, 2, 3)]
        [120.0, 31.4, 16.6, 1.9]
    """
    return sum(zero_states(num_params, dp_size=dp_size, zero_stage=zero_stage, optimizer=optimizer, padding=padding,
                           step_tensors=step_tensors).values())


def padding_elements(num_elements: int, dp_size: int) -> int:
    """Elements that a flat tensor grows by so that ``dp_size`` ranks hold equal shards of it.

    Example:
        >>> padding_elements(10, 4), padding_elements(12, 4)
        (2, 0)
    """
    return -at_least("num_elements", num_elements, 0) % at_least("dp_size", dp_size, 1)


def zero_wire_elements(num_params, *, dp_size, zero_stage: int):
    """Elements that one rank sends in a step: (n-1)/n x 2 Psi, at stage 3 x 3 Psi.

    Gradients are reduced by a reduce_scatter and parameters gathered once (the two halves of stage 0's all_reduce), at
    stage 3 once more for backward. On rings.

    Example:
        >>> [zero_wire_elements(100, dp_size=4, zero_stage=stage) for stage in (0, 1, 2, 3)]
        [150.0, 150.0, 150.0, 225.0]

    Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 7.
    """
    one_of("zero_stage", zero_stage, (0, 1, 2, 3))
    ring = 1 - 1 / amount("dp_size", dp_size, minimum=1)
    return (3 if zero_stage == 3 else 2) * ring * amount("num_params", num_params)


def activation_bytes_per_layer(*, seq_length, micro_batch_size: int, hidden_size: int, num_heads: int,
                               tp_size: int = 1, sequence_parallel: bool = False, recompute: str | None = None,
                               flash_attention: bool = False):
    """Bytes of what one layer keeps for backward: 16-bit elements and 1-byte dropout masks, nothing to be multiplied.

    s b h (34 + 5 a s / h). Tensor parallelism splits 24 of the 34 and the scores' term, sequence parallelism the other
    10. The scores' term goes with flash_attention or ``recompute="selective"``; "full" keeps the layer's input alone.

    Args:
        seq_length, micro_batch_size, hidden_size, num_heads: s (a number or a numpy array), b, h, a.
        recompute: None, "selective" (the scores and what follows up to their product with V), "full" (the layer).

    Raises:
        ConfigError: another ``recompute``; ``num_heads`` not divisible by ``tp_size``.

    Example:
        >>> sizes = {"micro_batch_size": 1, "hidden_size": 4096, "num_heads": 32}
        >>> for flash in (False, True):
        ...     print([activation_bytes_per_layer(seq_length=s, flash_attention=flash, **sizes) / 2**20
        ...            for s in (2048, 8192)])
        [912.0, 11328.0]
        [272.0, 1088.0]

    Source: Korthikanti et al. 2022, arXiv:2205.05198, table 2. With heads of h / a and an MLP of 4h.
    """
    one_of("recompute", recompute, RECOMPUTE)
    divisible("num_heads", num_heads, "tp_size", at_least("tp_size", tp_size, 1))
    split = tp_size if sequence_parallel else 1
    tokens = amount("seq_length", seq_length) * at_least("micro_batch_size", micro_batch_size, 1)
    hidden_size, num_heads = at_least("hidden_size", hidden_size, 1), at_least("num_heads", num_heads, 1)
    if recompute == "full":
        return 2 * tokens * hidden_size / split
    scores = 0 if flash_attention or recompute else 5 * num_heads * seq_length
    return tokens * (hidden_size * (10 / split + 24 / tp_size) + scores / tp_size)


def logits_bytes(shape: ModelShape, *, micro_batch_size: int, tp_size: int = 1):
    """Bytes of the logits in 32 bits, once: 4 s b V / t. The cross entropy keeps them (or the probabilities).

    Example:
        >>> from dtlab.theory import GPT_7_5B
        >>> round(logits_bytes(GPT_7_5B, micro_batch_size=1) / 1e9, 2)
        0.42
    """
    tokens = shape.seq_length * at_least("micro_batch_size", micro_batch_size, 1)
    return 4 * tokens * shape.vocab_size / at_least("tp_size", tp_size, 1)


def micro_batches_in_flight(*, pp_size: int = 1, pp_rank: int = 0, num_chunks: int = 1, num_micro_batches=None):
    """How many micro-batches' activations of its layers a rank of a 1F1B pipeline holds at its peak.

    min(m, p - r) on rank r of p; interleaved, with v chunks a rank, 2 (p - r - 1) + (v - 1) p + 1 chunks, which is
    1 + (p - 1) / (p v) times all L layers on the first rank.

    Args:
        num_micro_batches: m of a step (count); None: as many as the pipeline holds.

    Example:
        >>> [micro_batches_in_flight(pp_size=4, pp_rank=r, num_micro_batches=3) for r in range(4)]
        [3.0, 3.0, 2.0, 1.0]

    Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.3.
    """
    after = at_least("pp_size", pp_size, 1) - index_below("pp_rank", pp_rank, "pp_size", pp_size) - 1
    chunks = after + 1 if at_least("num_chunks", num_chunks, 1) == 1 else 2 * after + (num_chunks - 1) * pp_size + 1
    if num_micro_batches is not None:
        chunks = min(chunks, num_chunks * at_least("num_micro_batches", num_micro_batches, 1))
    return chunks / num_chunks


def activation_bytes(shape: ModelShape, *, micro_batch_size: int, recompute: str | None = None,
                     flash_attention: bool = False, tp_size: int = 1, sequence_parallel: bool = False,
                     pp_size: int = 1, pp_rank: int = 0, num_chunks: int = 1, num_micro_batches: int | None = None):
    """Bytes of a rank's activations at their peak: its layers, for all micro-batches in flight, and the model's ends.

    The first pipeline stage also keeps the embedding's dropout mask, the last one the inputs of the final norm and of
    the output layer, and the logits. Other arguments as in ``activation_bytes_per_layer``, ``micro_batches_in_flight``.

    Example:
        >>> from dtlab.theory import GPT_7_5B
        >>> [round(activation_bytes(GPT_7_5B, micro_batch_size=1, recompute=r) / 1e9, 1)
        ...  for r in (None, "selective", "full")]
        [34.9, 10.7, 1.1]

    Source: Korthikanti et al. 2022, arXiv:2205.05198, sections 4.3 and 5.
    """
    layer = activation_bytes_per_layer(
        seq_length=shape.seq_length, micro_batch_size=micro_batch_size, hidden_size=shape.hidden_size,
        num_heads=shape.num_heads, tp_size=tp_size, sequence_parallel=sequence_parallel, recompute=recompute,
        flash_attention=flash_attention)
    in_flight = micro_batches_in_flight(pp_size=pp_size, pp_rank=pp_rank, num_chunks=num_chunks,
                                        num_micro_batches=num_micro_batches)
    per_stage = divisible("num_layers", shape.num_layers, "pp_size x num_chunks", pp_size * num_chunks) * num_chunks
    total = per_stage * in_flight * layer
    token_bytes = shape.seq_length * micro_batch_size * shape.hidden_size / (tp_size if sequence_parallel else 1)
    if pp_rank == 0:
        total += token_bytes * min(pp_size, num_micro_batches or pp_size)
    if pp_rank == pp_size - 1:
        total += 4 * token_bytes + logits_bytes(shape, micro_batch_size=micro_batch_size, tp_size=tp_size)
    return total


def unit_sizes(shape: ModelShape, num_units: int) -> list[int]:
    """Parameters of stage 3's units (counts): the root's, then those of ``num_units`` runs of whole layers in order.

    The root's are what is in no layer: embeddings, positions, the final norm.

    Example:
        >>> from dtlab.theory import GPT_7_5B
        >>> [round(params / 1e9, 2) for params in unit_sizes(GPT_7_5B, 4)]
        [0.22, 1.81, 1.81, 1.81, 1.81]
    """
    layers = divisible("num_layers", shape.num_layers, "num_units", at_least("num_units", num_units, 1))
    units = [layers * layer_params(shape)] * num_units
    return [transformer_params(shape) - sum(units), *units]


def gathered_bytes(unit_params: Sequence[int], *, held: int = 1, root_params: int = 0, bytes_per_param: int = 2):
    """Bytes of whole parameters that stage 3 holds at its peak: the largest ``held`` units that follow one another.

    Args:
        unit_params: parameters of each unit (counts), in the order of their use.
        held: units gathered at once (count): 1; 2 where the next one is fetched while one computes.
        root_params: parameters that stay whole from the first use to the last (count), beside all units.

    Raises:
        ConfigError: no units, or ``held`` below 1.

    Example:
        >>> [round(gathered_bytes([7.47e9 / n] * n) / 1e9, 1) for n in (1, 4, 36)]
        [14.9, 3.7, 0.4]
    """
    sizes = [amount("unit_params", params) for params in unit_params]
    held, root_params = at_least("held", held, 1), amount("root_params", root_params)
    if not sizes:
        raise ConfigError("unit_params ([]) must hold the parameters of at least one unit")
    return bytes_per_param * (root_params + max(sum(sizes[i : i + held]) for i in range(len(sizes))))


def step_memory(shape: ModelShape, *, micro_batch_size: int = 1, dp_size: int = 1, zero_stage: int = 0,
                optimizer: str = "adam_mixed", recompute: str | None = None, flash_attention: bool = False,
                num_units: int | None = None, prefetch: bool = True, bucket_bytes: int = 25 * 2**20):
    """What a rank holds in a step, row by row (bytes): the three model states, activations, gathered, buckets.

    ``gathered`` is what stage 3 holds whole: the root's weights and one unit's, two units' with ``prefetch``.
    ``buckets`` is where whole gradients wait until they are reduced: a bucket at stage 2 (of one tensor, where that is
    larger), a unit at stage 3.
    Rows peak at different times, so that their sum is no peak but what suffices.

    Args:
        num_units: units of stage 3 (count); None: one for each layer.

    Example:
        >>> from dtlab.theory import GPT_7_5B
        >>> rows = step_memory(GPT_7_5B, dp_size=64, zero_stage=3, recompute="full")
        >>> {name: round(its_bytes / 1e9, 2) for name, its_bytes in rows.items()}
        {'params': 0.23, 'grads': 0.23, 'optimizer_states': 1.4, 'activations': 1.07, 'gathered': 1.24, 'buckets': 0.44}
    """
    params, per_param = transformer_params(shape), recipe_bytes(optimizer)
    root, *units = unit_sizes(shape, shape.num_layers if num_units is None else num_units)
    at_least("bucket_bytes", bucket_bytes, 1)
    largest = shape.hidden_size * max(shape.vocab_size, shape.ffn_hidden_size, 3 * shape.num_heads * shape.head_size)
    waiting = {2: min(params, max(bucket_bytes / per_param["grads"], largest)), 3: max(root, *units)}
    return {
        **zero_states(params, dp_size=dp_size, zero_stage=zero_stage, optimizer=optimizer),
        "activations": activation_bytes(shape, micro_batch_size=micro_batch_size, recompute=recompute,
                                        flash_attention=flash_attention),
        "gathered": gathered_bytes(units, held=1 + prefetch, root_params=root,
                                   bytes_per_param=per_param["params"] if zero_stage == 3 else 0),
        "buckets": per_param["grads"] * waiting.get(zero_stage, 0),
    }
