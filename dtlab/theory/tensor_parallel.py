"""Tensor, sequence and context parallelism: legal degrees, parameters of a rank, collectives, bytes. Pure.

Counts are those of ``dtlab.parallel``'s layers. Letters: b micro-batch, s sequence, h hidden, t tp_size, n cp_size.
"""
import math

from dtlab.errors import ConfigError
from dtlab.theory.communication import wire_bytes
from dtlab.theory.models import LlamaShape, ModelShape
from dtlab.validate import at_least, divisible, one_of

LAYOUTS, METHODS = ("contiguous", "zigzag"), ("ring", "ulysses")


def legal_tp_sizes(shape, max_size: int | None = None) -> tuple[int, ...]:
    """Degrees of tensor parallelism at which each rank has whole heads and an equal part of every cut matrix.

    Args:
        shape: ``ModelShape``, or another object with its sizes, such as a ``dtlab.models.GPTConfig``.
        max_size: the largest to list (count); None: all there are.

    Example:
        >>> legal_tp_sizes(ModelShape(num_layers=4, hidden_size=192, num_heads=12, seq_length=128, vocab_size=256))
        (1, 2, 3, 4, 6, 12)
    """
    most = shape.num_heads if max_size is None else min(shape.num_heads, at_least("max_size", max_size, 1))
    return tuple(size for size in range(1, most + 1) if _uncut(shape, size) is None)


def why_not_tp(shape, tp_size: int) -> str | None:
    """Why a degree is not legal, with the numbers and the legal ones; None: it is legal.

    Heads, the MLP's width and the hidden size divide by t; heads of keys and values divide by t, or t by them: then
    t / kv ranks share one, each with a copy. The vocabulary need not divide: it is padded.

    Example:
        >>> why_not_tp(ModelShape(num_layers=4, hidden_size=192, num_heads=12, seq_length=128, vocab_size=256), 8)
        'num_heads (12) does not divide by tp_size (8); legal are 1, 2, 3, 4, 6, 12'
    """
    reason = _uncut(shape, at_least("tp_size", tp_size, 1))
    return reason and f"{reason}; legal are {', '.join(map(str, legal_tp_sizes(shape)))}"


def _uncut(shape, tp_size):
    """The first size that cannot be cut, in words; None."""
    for name in ("num_heads", "ffn_hidden_size", "hidden_size"):
        if getattr(shape, name) % tp_size:
            return f"{name} ({getattr(shape, name)}) does not divide by tp_size ({tp_size})"
    shared = num_kv_heads(shape)
    if shared % tp_size and tp_size % shared:
        return f"num_kv_heads ({shared}) does not divide by tp_size ({tp_size}), nor tp_size by num_kv_heads"
    return None


def num_kv_heads(shape) -> int:
    """Heads of keys and values (count): num_heads where a shape says nothing else."""
    return getattr(shape, "num_kv_heads", None) or shape.num_heads


def _legal(shape, tp_size):
    """``tp_size``, or ConfigError."""
    if reason := why_not_tp(shape, tp_size):
        raise ConfigError(reason)
    return tp_size


def tp_layer_params(shape: ModelShape, *, tp_size: int) -> int:
    """Parameters of one layer on one rank (count): matrices and column biases cut, norms and row biases whole.

    A head of keys and values that several ranks share counts on each of them.

    Example:
        >>> shape = ModelShape(num_layers=4, hidden_size=192, num_heads=12, seq_length=128, vocab_size=256)
        >>> [tp_layer_params(shape, tp_size=t) for t in (1, 2, 4)]
        [444864, 223008, 112080]
    """
    t, h, f = _legal(shape, tp_size), shape.hidden_size, shape.ffn_hidden_size
    width = shape.num_heads * shape.head_size // t
    keys_values = 2 * max(num_kv_heads(shape) // t, 1) * shape.head_size
    if isinstance(shape, LlamaShape):
        return h * (2 * width + keys_values) + 3 * h * f // t + 2 * h
    qkv, fc1 = width + keys_values, f // t
    return (h + 1) * (qkv + fc1) + h * (width + fc1) + 2 * h + 4 * h


def tp_params(shape: ModelShape, *, tp_size: int) -> int:
    """Parameters of a whole model on one rank (count).

    Of a ModelShape those of ``dtlab.parallel.apply_tensor_parallel``; a LlamaShape has no biases and no positions, and
    dtlab's GPT has, with kv heads and SwiGLU too. The vocabulary is padded to a multiple of t and cut; positions and
    the final norm are whole.

    Example:
        >>> from dtlab.theory import GPT_7_5B
        >>> [round(tp_params(GPT_7_5B, tp_size=t) / 1e9, 2) for t in (1, 2, 4, 8)]
        [7.47, 3.74, 1.87, 0.94]
    """
    if shape.vocab_size < tp_size:
        raise ConfigError(f"vocab_size ({shape.vocab_size}) is below tp_size ({tp_size}): a rank would have no token")
    h, tables = shape.hidden_size, 1 if shape.tie_embeddings else 2
    rest = h if isinstance(shape, LlamaShape) else 2 * h + shape.seq_length * h
    layers = shape.num_layers * tp_layer_params(shape, tp_size=tp_size)
    return layers + tables * math.ceil(shape.vocab_size / tp_size) * h + rest


def tp_layer_collectives(shape: ModelShape, *, micro_batch_size: int, tp_size: int, sequence_parallel: bool = False,
                         bytes_per_element: int = 2) -> list[tuple[str, str, int]]:
    """What a rank calls in forward and backward of one layer, in order: ``[(phase, op, tensor_bytes), ...]``.

    All of b s h elements. Without sequence parallelism an all_reduce of the output of each row-parallel matrix, and
    in backward one of the input gradient of each column-parallel matrix: 2 + 2. With it each all_reduce becomes an
    all_gather and a reduce_scatter, 4 + 4, which send as much; that is the paper's count. But each rank keeps only its
    piece of the column-parallel inputs, so that backward gathers them once more for the weights' gradients: 2
    all_gathers that the paper does not count (its text says that they are hidden under a matrix product).

    Beside them, once in a backward pass of the model, the gradients of parameters that no rank has whole are summed:
    norms and row biases with sequence parallelism, shared heads of keys and values. They are not in the list.

    Args:
        bytes_per_element: of activations and their gradients.

    Example:
        >>> from dtlab.theory import GPT_7_5B
        >>> for call in tp_layer_collectives(GPT_7_5B, micro_batch_size=1, tp_size=8):
        ...     print(*call)
        forward all_reduce 16777216
        forward all_reduce 16777216
        backward all_reduce 16777216
        backward all_reduce 16777216

    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3; Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.
    """
    if _legal(shape, tp_size) == 1:
        return []
    tokens = at_least("micro_batch_size", micro_batch_size, 1) * shape.seq_length
    size = tokens * shape.hidden_size * at_least("bytes_per_element", bytes_per_element, 1)
    if not sequence_parallel:
        return [(phase, "all_reduce", size) for phase in ("forward", "forward", "backward", "backward")]
    if shape.seq_length % tp_size:
        legal = [size for size in legal_tp_sizes(shape) if shape.seq_length % size == 0]
        raise ConfigError(f"seq_length ({shape.seq_length}) must be divisible by tp_size ({tp_size}) with sequence "
                          f"parallelism: use tp_size {', '.join(map(str, legal))}")
    forward = [("forward", op, size) for op in ("all_gather", "reduce_scatter")]
    backward = [("backward", op, size) for op in ("all_gather", "all_gather", "reduce_scatter")]
    return 2 * forward + 2 * backward


def tp_layer_wire_bytes(shape: ModelShape, *, micro_batch_size: int, tp_size: int, sequence_parallel: bool = False,
                        bytes_per_element: int = 2) -> dict[str, float]:
    """Bytes that a rank sends for one layer on rings, ``{"forward": ..., "backward": ...}``.

    Arguments as in ``tp_layer_collectives``.

    Example:
        >>> from dtlab.theory import GPT_7_5B
        >>> for sequence_parallel in (False, True):
        ...     sent = tp_layer_wire_bytes(GPT_7_5B, micro_batch_size=1, tp_size=8, sequence_parallel=sequence_parallel)
        ...     print({phase: round(its_bytes / 2**20) for phase, its_bytes in sent.items()})
        {'forward': 56, 'backward': 56}
        {'forward': 56, 'backward': 84}
    """
    sent = {"forward": 0.0, "backward": 0.0}
    for phase, op, size in tp_layer_collectives(shape, micro_batch_size=micro_batch_size, tp_size=tp_size,
                                                sequence_parallel=sequence_parallel,
                                                bytes_per_element=bytes_per_element):  # fmt: skip
        sent[phase] += wire_bytes(op, size, tp_size)
    return sent


def chunks_of(num_ranks: int, layout: str) -> list[tuple[int, ...]]:
    """The chunks of the sequence that each rank holds: of n in a contiguous layout, of 2n in a zigzag.

    Example:
        >>> chunks_of(3, "contiguous"), chunks_of(3, "zigzag")
        ([(0,), (1,), (2,)], [(0, 5), (1, 4), (2, 3)])
    """
    one_of("layout", layout, LAYOUTS)
    ranks = range(at_least("num_ranks", num_ranks, 1))
    return [(rank,) if layout == "contiguous" else (rank, 2 * num_ranks - 1 - rank) for rank in ranks]


def causal_blocks(num_ranks: int, layout: str) -> list[list[float]]:
    """Share of all pairs that the causal mask keeps, for the queries of each rank with the keys of each.

    In the limit of long sequences: the diagonal counts half.

    Example:
        >>> causal_blocks(2, "contiguous"), causal_blocks(2, "zigzag")
        ([[0.25, 0.0], [0.5, 0.25]], [[0.25, 0.25], [0.25, 0.25]])
    """
    chunks = chunks_of(num_ranks, layout)
    pairs = [[sum((key < query) + (key == query) / 2 for query in its for key in others) for others in chunks]
             for its in chunks]
    total = sum(map(sum, pairs))
    return [[count / total for count in row] for row in pairs]


def causal_work(num_ranks: int, layout: str = "contiguous") -> list[float]:
    """Share of causal attention's pairs that each rank computes.

    Contiguous, the last of n ranks has 2n - 1 times the first one's; a zigzag gives each an early chunk and the late
    one that makes up for it.

    Example:
        >>> [16 * share for share in causal_work(4)], causal_work(4, "zigzag")
        ([1.0, 3.0, 5.0, 7.0], [0.25, 0.25, 0.25, 0.25])
    """
    return [sum(row) for row in causal_blocks(num_ranks, layout)]


def ring_attention_wire_bytes(shape: ModelShape, *, cp_size: int, micro_batch_size: int = 1,
                              bytes_per_element: int = 2) -> dict[str, float]:
    """Bytes that a rank sends for one layer's ring attention, ``{"forward": ..., "backward": ...}``.

    Keys and values visit the n - 1 other ranks in forward, and once more in backward. There their gradients start at
    the first rank that they visit and end at home: n - 1 steps too, in 32 bits at least, in which they are summed.

    Example:
        >>> from dtlab.theory import GPT_7_5B
        >>> {phase: its_bytes / 2**20 for phase, its_bytes in ring_attention_wire_bytes(GPT_7_5B, cp_size=4).items()}
        {'forward': 24.0, 'backward': 72.0}

    Source: Liu et al. 2023, arXiv:2310.01889, section 3.
    """
    _, keys_values = piece_bytes(shape, cp_size=cp_size, micro_batch_size=micro_batch_size,
                                 bytes_per_element=bytes_per_element)
    forward = (cp_size - 1) * keys_values
    return {"forward": float(forward), "backward": forward * (1 + max(bytes_per_element, 4) / bytes_per_element)}


def ulysses_wire_bytes(shape: ModelShape, *, cp_size: int, micro_batch_size: int = 1,
                       bytes_per_element: int = 2) -> dict[str, float]:
    """Bytes that a rank sends for one layer's Ulysses attention, ``{"forward": ..., "backward": ...}``.

    All_to_alls of queries, keys, values and the output, each of a rank's piece; backward the same.

    Raises:
        ConfigError: heads, or heads of keys and values, that do not divide by ``cp_size``.

    Example:
        >>> from dtlab.theory import GPT_7_5B
        >>> {phase: its_bytes / 2**20 for phase, its_bytes in ulysses_wire_bytes(GPT_7_5B, cp_size=4).items()}
        {'forward': 12.0, 'backward': 12.0}

    Source: Jacobs et al. 2023, arXiv:2309.14509, section 3.2.
    """
    queries, keys_values = piece_bytes(shape, cp_size=cp_size, method="ulysses", micro_batch_size=micro_batch_size,
                                       bytes_per_element=bytes_per_element)
    sent = wire_bytes("all_to_all", 2 * queries + keys_values, cp_size)
    return {"forward": float(sent), "backward": float(sent)}


def piece_bytes(shape: ModelShape, *, cp_size: int, method: str = "ring", micro_batch_size: int = 1,
                bytes_per_element: int = 2) -> tuple[int, int]:
    """Bytes of a rank's piece of the queries, and of the keys and values together; refuses what Ulysses cannot cut."""
    one_of("method", method, METHODS)
    heads, kv_heads, length = shape.num_heads, num_kv_heads(shape), shape.seq_length
    at_least("cp_size", cp_size, 1), at_least("bytes_per_element", bytes_per_element, 1)
    if method == "ulysses":
        legal = [n for n in range(1, kv_heads + 1) if heads % n == kv_heads % n == length % n == 0]
        for name, size in (("num_heads", heads), ("num_kv_heads", kv_heads), ("seq_length", length)):
            if size % cp_size:
                raise ConfigError(f"{name} ({size}) must be divisible by cp_size ({cp_size}): use cp_size "
                                  f"{', '.join(map(str, legal))}, or a ring")
    tokens = divisible("seq_length", length, "cp_size", cp_size)
    head = tokens * at_least("micro_batch_size", micro_batch_size, 1) * shape.head_size * bytes_per_element
    return head * heads, 2 * head * kv_heads
