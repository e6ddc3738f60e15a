"""Context parallel: each rank has a part of every sequence; only attention, where tokens meet, talks.

Each query needs the keys and values of all tokens before it. A ring brings them, rank by rank; Ulysses gives each rank
all tokens of some heads instead.

    ring, step 0   rank r: its queries with its own keys and values, while those of rank r - 1 arrive
          step 1           with those of rank r - 1, while those of rank r - 2 arrive
          ...              n steps; backward the same, and the gradients of keys and values follow them

    causal, 4 ranks, which chunks are whose     contiguous  0 1 2 3            rank 3 has 7 times the pairs of rank 0
                                                zigzag      0 1 2 3 3 2 1 0    all have equally many, in each step

Parameters are the same on all ranks, so that for them this is data parallel: ``DistributedDataParallel``.

Letters: n ranks of the group, B batch_size, S seq_length, a num_heads, g num_kv_heads, d head size.
"""
import functools
import weakref

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dtlab.errors import ConfigError
from dtlab.parallel.context_parallel_ring import RingAttention
from dtlab.parallel.mappings import all_to_all_region, gather_from_sequence_region
from dtlab.parallel.shared import is_dry, place_in
from dtlab.theory.tensor_parallel import chunks_of
from dtlab.validate import at_least, divisible, one_of

_AGREED = weakref.WeakKeyDictionary()  # group -> arguments, as text, that all its ranks have called with


# which tokens are whose


def sequence_positions(seq_length: int, *, layout: str = "zigzag", group=None, device="cpu") -> torch.Tensor:
    """[S/n] where this rank's tokens stand in the sequence: what ``GPT.forward`` takes as ``positions``.

    Args:
        seq_length: S, tokens of the whole sequence.
        layout: "contiguous": chunk r of n is rank r's. "zigzag": chunks r and 2n - 1 - r of 2n are.
        group: The ranks that share the sequence; None for all.
        device: Where the numbers are to be.

    Raises:
        ConfigError: S is not divisible by n, or by 2n for a zigzag; no layout; this rank is not in the group.

    Example: rank 0 of 2 has the first and the last of four chunks
        >>> sequence_positions(8)                                                          # doctest: +SKIP
        tensor([0, 1, 6, 7])
    """
    rank, size = place_in(group)
    return _positions(seq_length, size, layout, device)[rank]


def _positions(seq_length, size, layout, device):
    """[n, S/n]: each rank's positions."""
    one_of("layout", layout, ("contiguous", "zigzag"))
    chunks = chunks_of(size, layout)
    parts = size * len(chunks[0])
    if at_least("seq_length", seq_length, 1) % parts:
        below = seq_length // parts * parts
        raise ConfigError(f"seq_length ({seq_length}) must be divisible by {parts}: on {size} ranks a {layout} layout "
                          f"has {parts} chunks of equal length. Use seq_length "
                          f"{f'{below} or ' if below else ''}{below + parts}" + (
                              ", or layout='contiguous'" if layout == "zigzag" and seq_length % size == 0 else ""))
    return torch.arange(seq_length, device=device).view(parts, -1)[torch.tensor(chunks, device=device)].flatten(1)


def split_sequence(x: torch.Tensor, *, dim: int = 1, layout: str = "zigzag", group=None) -> torch.Tensor:
    """This rank's tokens [.., S/n, ..] of all [.., S, ..], which every rank has: nothing is sent.

    Raises:
        ConfigError: as ``sequence_positions``.
    """
    return x.index_select(dim, sequence_positions(x.size(dim), layout=layout, group=group, device=x.device))


def join_sequence(x: torch.Tensor, *, dim: int = 1, layout: str = "zigzag", group=None) -> torch.Tensor:
    """All tokens [.., S, ..] in their order, from each rank's [.., S/n, ..]: the inverse of ``split_sequence``.

    A token's gradient is the sum over the ranks, whose losses ``DistributedDataParallel`` averages.

    Communication: all_gather, (n-1)/n of the whole; backward reduce_scatter, the same.

    Raises:
        ConfigError: as ``sequence_positions``.
    """
    positions = _positions(x.size(dim) * place_in(group)[1], place_in(group)[1], layout, x.device)
    return gather_from_sequence_region(x, group, dim).index_select(dim, positions.flatten().argsort())


# attention


def ring_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True, layout: str = "zigzag",
                   group=None) -> torch.Tensor:
    """softmax(q k^T / sqrt(d)) v over the whole sequence, while keys and values go round the ranks.

    The softmax is *online*: for each query the largest score so far, the sum of exponentials so far and the output so
    far, all three scaled down when a larger score comes. What is saved for backward is this rank's q, k, v, output and
    logarithm of that sum. Blocks that the causal mask hides are not computed. 16-bit inputs are computed in float32.

    Shapes on one rank: q [B, a, S/n, d]; k, v [B, g, S/n, d] with g = a, or fewer heads that each serve a/g of q's;
    output [B, a, S/n, d].

    Communication on each rank: with K bytes of k and v, sends (n-1) K in forward. Backward sends them again, and their
    gradients, n - 1 times too, in float32 or float64: 2 (n-1) K, or 3 (n-1) K for 16 bits. The next ones arrive while a
    block is computed. The first call with new shapes compares them over the ranks.

    Memory on each rank: O(S/n), and the scores of at most 1024 x 1024 pairs of tokens in each head.

    Raises:
        ConfigError: on every rank the same: shapes, dtypes or options that differ between ranks or do not fit, an odd
            number of tokens for a zigzag, no layout; this rank is not in the group.

    Not here: dropout on the weights, gradients of gradients, messages that the mask makes needless (contiguous).

    Source: Liu et al. 2023, arXiv:2310.01889, section 3; the zigzag as in Llama 3, arXiv:2407.21783, section 3.3.2;
    online softmax and its backward pass: Dao et al. 2022, arXiv:2205.14135, sections 3.1 and B.2.
    """
    _refuse_what_differs(q, k, v, causal=causal, layout=layout, group=group)
    with torch.autocast(q.device.type, enabled=False):  # it would undo the float32 of 16-bit inputs
        return RingAttention.apply(q, k, v, causal, layout, group)


def ulysses_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True,
                      layout: str = "contiguous", group=None) -> torch.Tensor:
    """softmax(q k^T / sqrt(d)) v over the whole sequence: each rank does all tokens of its share of the heads.

    Shapes on one rank: q [B, a, S/n, d]; k, v [B, g, S/n, d]; in between [B, a/n, S, d] and [B, g/n, S, d]; output
    [B, a, S/n, d].

    Communication: all_to_all of q, k, v and of the output, (n-1)/n of each; backward the same. A rank holds whole
    sequences, though of fewer heads. The first call with new shapes compares them over the ranks.

    Raises:
        ConfigError: as ``ring_attention``; a or g is not divisible by n.

    Not here: dropout on the weights, which the ranks would have to draw from different streams.

    Source: Jacobs et al. 2023, arXiv:2309.14509, section 3.1.
    """
    _refuse_what_differs(q, k, v, causal=causal, layout=layout, group=group)
    size, positions = place_in(group)[1], None
    if q.size(1) % size or k.size(1) % size:
        legal = [n for n in range(1, k.size(1) + 1) if q.size(1) % n == k.size(1) % n == 0]
        raise ConfigError(f"Ulysses gives each rank whole heads, so that num_heads ({q.size(1)}) and num_kv_heads "
                          f"({k.size(1)}) must be divisible by cp_size ({size}): use cp_size "
                          f"{', '.join(map(str, legal))}; or a ring, which takes any number of ranks")
    q, k, v = (all_to_all_region(x, group, scatter_dim=1, gather_dim=2) for x in (q, k, v))
    if layout == "zigzag":  # the pieces came rank by rank
        positions = _positions(q.size(2), size, layout, q.device).flatten()
        q, k, v = (x.index_select(2, positions.argsort()) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.size(1) // k.size(1), dim=1) if q.size(1) > k.size(1) else x for x in (k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    y = y.index_select(2, positions) if positions is not None else y
    return all_to_all_region(y, group, scatter_dim=2, gather_dim=1)


def _refuse_what_differs(q, k, v, *, group, **options):
    """On every rank the same ConfigError for arguments that differ between ranks or do not fit one another."""
    place_in(group)
    inputs = {"q": q, "k": k, "v": v}
    mine = {name: f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" if isinstance(x, torch.Tensor) else
            type(x).__name__ for name, x in inputs.items()}  # fmt: skip
    needs_grad = torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in inputs.values())
    mine |= {name: repr(value) for name, value in options.items()} | {"a gradient needed": str(needs_grad)}
    known = _AGREED.setdefault(group or dist.group.WORLD, set())
    if tuple(mine.values()) in known:
        return
    if not is_dry(group):
        _refuse_other_ranks(mine, group)
    _refuse_what_does_not_fit(mine, **inputs)
    _positions(q.size(2) * dist.get_world_size(group), dist.get_world_size(group), options["layout"], "cpu")
    known.add(tuple(mine.values()))


def _refuse_other_ranks(mine, group):
    calls, ranks = [None] * dist.get_world_size(group), dist.get_process_group_ranks(group or dist.group.WORLD)
    dist.all_gather_object(calls, mine, group=group)
    for rank, its in zip(ranks, calls):
        for name, value in its.items():
            if value != calls[0][name]:
                raise ConfigError(f"ranks must call alike, but {name} is {calls[0][name]} on rank {ranks[0]} and "
                                  f"{value} on rank {rank}. split_sequence gives each rank equally many tokens")


def _refuse_what_does_not_fit(mine, q, k, v):
    shapes = f"q {mine['q']}, k {mine['k']}, v {mine['v']}"
    if not all(isinstance(x, torch.Tensor) and x.dim() == 4 and x.is_floating_point() for x in (q, k, v)):
        raise ConfigError(f"{shapes}: give tensors of floating-point numbers, [batch_size, heads, tokens, head size]")
    if k.shape != v.shape or q[:, 0].shape != k[:, 0].shape or not q.dtype == k.dtype == v.dtype:
        raise ConfigError(f"{shapes}: dtype and all sizes must be equal, but that q may have more heads than k and v")
    divisible("heads of q", q.size(1), "heads of k and v", k.size(1))


# a model


def apply_context_parallel(model: nn.Module, *, method: str = "ring", layout: str = "zigzag", group=None) -> nn.Module:
    """``model``, changed in place: its attention sees the tokens of all ranks. Names and parameters stay as they are.

    Each rank calls it with its tokens and where they stand, and takes the mean loss over its own tokens; what averages
    gradients over ``group`` then makes them those of the mean over all tokens.

    Example:
        >>> model = apply_context_parallel(GPT(config), group=group)                       # doctest: +SKIP
        >>> ddp = DistributedDataParallel(model, group=group)                              # doctest: +SKIP
        >>> positions = sequence_positions(tokens.shape[1], group=group)                   # doctest: +SKIP
        >>> logits = ddp(split_sequence(tokens, group=group), positions=positions)         # doctest: +SKIP

    Args:
        model: With modules that have ``attend(q, k, v)``, as ``dtlab.models.GPT``'s.
        method: "ring" or "ulysses".
        layout: As in ``sequence_positions``. In a ring only a zigzag gives all ranks equal work.
        group: The ranks that share a sequence; None for all.

    Raises:
        ConfigError: no such method or layout; a model without ``attend``, or with dropout on attention's weights, of
            which no rank has a whole row; this rank is not in the group.
    """
    place_in(group)
    one_of("method", method, ("ring", "ulysses"))
    one_of("layout", layout, ("contiguous", "zigzag"))
    parts = [part for part in model.modules() if hasattr(part, "attend")]
    if not parts:
        raise ConfigError(f"{type(model).__name__} has no module with attend(q, k, v): give a dtlab.models.GPT")
    if dropout := max(part.dropout for part in parts):
        raise ConfigError(f"dropout ({dropout}) on attention weights: no rank has all weights of a query. Make the "
                          "model with GPTConfig(dropout=0)")
    attention = ring_attention if method == "ring" else ulysses_attention
    for part in parts:
        part.attend = functools.partial(attention, causal=True, layout=layout, group=group)
    return model
