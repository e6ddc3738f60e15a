"""Context parallel: each rank has a part of every sequence; only attention, where tokens meet, talks.

Each query needs the keys and values of all tokens before it. A ring brings them, rank by rank; Ulysses gives each rank
all tokens of some heads instead.

    ring, step 0   rank r: its queries with its own keys and values, while those of rank r - 1 arrive
          step 1           with those of rank r - 1, while those of rank r - 2 arrive
          ...              n steps; backward the same, and the gradients of keys and values follow them

    causal, 4 ranks, which chunks are whose     contiguous  0 1 2 3            rank 3 has 7 times the pairs of rank 0
                                                zigzag      0 1 2 3 3 2 1 0    all have equally many, in each step

Parameters are the same on all ranks, so that for them this is data parallel: ``DistributedDataParallel``.

Letters: n ranks of the group, B batch_size, S seq_length, a num_heads, k num_kv_heads, d head size.
"""
import functools
import weakref

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dtlab.errors import ConfigError
from dtlab.models.gpt import GPT
from dtlab.parallel.context_parallel_ring import RingAttention
from dtlab.parallel.mappings import all_to_all_region, gather_from_sequence_region
from dtlab.parallel.shared import (
    is_dry,
    kind_of,
    place_in,
    refuse_different_rows,
    refuse_group_of_parts,
    refuse_what_is_no_model,
)
from dtlab.theory.tensor_parallel import METHODS, chunks_of
from dtlab.validate import at_least, divisible, one_of

_AGREED = weakref.WeakKeyDictionary()  # group -> its last call: arguments as text, set of is a gradient needed


class _Partial(functools.partial):
    """With a group, which cannot be copied: ``copy.deepcopy`` of the model keeps it."""

    def __deepcopy__(self, memo):
        return self


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

    Shapes on one rank: q [B, a, S/n, d]; k, v [B, k, S/n, d] with k = a, or fewer heads that each serve a/k of q's;
    output [B, a, S/n, d].

    Communication on each rank: with K bytes of k and v, sends (n-1) K in forward. Backward sends them again, and their
    gradients, n - 1 times too, in float32 or float64: 2 (n-1) K, or 3 (n-1) K for 16 bits. The next ones arrive while a
    block is computed. A call unlike the one before, in shapes or options, first compares them over the ranks.

    Memory on each rank: O(S/n), and the scores of at most 1024 x 1024 pairs of tokens in each head.

    Raises:
        ConfigError: shapes, dtypes or options that do not fit, an odd number of tokens for a zigzag, no layout; such
            that differ between ranks, on every rank the same where all differ from their last call (a rank that alone
            does is found by the guard; without it ranks wait); this rank is not in the group.

    Not here: dropout on the weights, gradients of gradients, messages that the mask makes needless (contiguous), ranks
    that share a GPU (gloo sends messages from the CPU's memory only).

    Source: Liu et al. 2023, arXiv:2310.01889, section 3; the zigzag as in Llama 3, arXiv:2407.21783, section 3.3.2;
    online softmax and its backward pass: Dao et al. 2022, arXiv:2205.14135, sections 3.1 and B.2.
    """
    _refuse_what_differs(q, k, v, causal=causal, layout=layout, group=group)
    with torch.autocast(q.device.type, enabled=False):  # it would undo the float32 of 16-bit inputs
        return RingAttention.apply(q, k, v, causal, layout, group)


def ulysses_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True,
                      layout: str = "zigzag", group=None) -> torch.Tensor:
    """softmax(q k^T / sqrt(d)) v over the whole sequence: each rank does all tokens of its share of the heads.

    Shapes on one rank: q [B, a, S/n, d]; k, v [B, k, S/n, d]; in between [B, a/n, S, d] and [B, k/n, S, d]; output
    [B, a, S/n, d].

    Communication: all_to_all of q, k, v and of the output, (n-1)/n of each; backward the same. A rank holds whole
    sequences, though of fewer heads. A call unlike the one before first compares, as in ``ring_attention``.

    Raises:
        ConfigError: as ``ring_attention``; a or k is not divisible by n.

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
    mine = {name: f"{kind_of(x)} {list(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
            for name, x in inputs.items()}  # fmt: skip
    mine |= {name: repr(value) for name, value in options.items()}
    needs_grad = torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in inputs.values())
    last, agreed = _AGREED.get(group or dist.group.WORLD, (None, ()))
    if mine == last and needs_grad in agreed:
        return
    if not is_dry(group):
        refuse_different_rows([*mine.items(), ("a gradient needed", str(needs_grad))], group, "other arguments",
                              "split_sequence gives each rank equally many tokens")
    _refuse_what_does_not_fit(mine, **inputs)
    _positions(q.size(2) * dist.get_world_size(group), dist.get_world_size(group), options["layout"], "cpu")
    # Subtle: only the last call. Were an older one taken as known, a rank that alone goes back to it would not compare
    _AGREED[group or dist.group.WORLD] = mine, {needs_grad, *agreed} if mine == last else {needs_grad}


def _refuse_what_does_not_fit(mine, q, k, v):
    shapes = f"q {mine['q']}, k {mine['k']}, v {mine['v']}"
    if not all(isinstance(x, torch.Tensor) and x.dim() == 4 and x.size(1) and x.is_floating_point() and not x.is_meta
               for x in (q, k, v)):  # fmt: skip
        raise ConfigError(f"{shapes}: give tensors of floating-point numbers, [batch_size, heads, tokens, head size], "
                          "with a head at least, and not on the meta device")
    if k.shape != v.shape or q[:, 0].shape != k[:, 0].shape or not q.dtype == k.dtype == v.dtype:
        raise ConfigError(f"{shapes}: dtype and all sizes must be equal, but that q may have more heads than k and v")
    divisible("heads of q", q.size(1), "heads of k and v", k.size(1))
    if mine["causal"] not in ("True", "False"):
        raise ConfigError(f"causal ({mine['causal']}) must be True or False")


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
        model: A ``dtlab.models.GPT``, or another with modules that have ``attend(q, k, v)`` as its, and no dropout.
        method: "ring" or "ulysses".
        layout: As in ``sequence_positions``. In a ring only a zigzag gives all ranks equal work.
        group: The ranks that share a sequence; None for all. With tensor parallelism, one of each of its groups.

    Raises:
        ConfigError: no such method or layout; a model without ``attend``, one that was changed already, or one with
            dropout on attention's weights, of which no rank has a whole row; tensor parallelism over the same ranks;
            this rank is not in the group. In a GPT's forward pass: positions that are missing or not those of the
            layout, a sequence longer than ``config.seq_length``; on every rank the same in the first call with so many
            tokens. (A dry recording has no positions to compare.)
    """
    place_in(group)
    refuse_what_is_no_model(model)
    one_of("method", method, METHODS)
    chunks_of(1, layout)  # refuses no layout
    parts = [part for part in model.modules() if hasattr(part, "attend")]
    _refuse_what_cannot_share(model, parts, group)
    attention = ring_attention if method == "ring" else ulysses_attention
    for part in parts:
        part.attend = _Partial(attention, causal=True, layout=layout, group=group)
    for part in model.modules():
        if isinstance(part, GPT):
            check = _Partial(_refuse_other_positions, set(), layout, group)
            part.register_forward_pre_hook(check, with_kwargs=True)
    return model


def _refuse_what_cannot_share(model, parts, group):
    if not parts:
        raise ConfigError(f"{type(model).__name__} has no module with attend(q, k, v): give a dtlab.models.GPT")
    if any("attend" in vars(part) for part in parts):
        raise ConfigError(f"attention of this {type(model).__name__} has been replaced already: give a new model")
    if dropout := max(getattr(part, "dropout", 0) for part in parts):
        raise ConfigError(f"dropout ({dropout}) on attention weights: no rank has all weights of a query. Make the "
                          "model with GPTConfig(dropout=0)")
    refuse_group_of_parts(model, group)


def _refuse_other_positions(agreed, layout, group, model, args, kwargs):
    """Before a GPT's forward pass; ``agreed``: numbers of tokens with which the ranks have compared what they found."""
    tokens, positions = (lambda tokens, positions=None: (tokens, positions))(*args, **kwargs)
    count, reason = tokens.shape[-1], _why_not(tokens, positions, model.config.seq_length, layout, group)
    if count not in agreed and not is_dry(group):
        reasons = [None] * dist.get_world_size(group)
        dist.all_gather_object(reasons, reason, group=group)
        reason = next(filter(None, reasons), None)
    if reason:
        raise ConfigError(reason)
    agreed.add(count)


def _why_not(tokens, positions, longest, layout, group):
    """Why a rank cannot have these tokens at these positions, in words; None: it can."""
    size, count = dist.get_world_size(group), tokens.shape[-1]
    if size * count > longest:
        return (f"the sequence is {size * count} tokens long, {count} on each of {size} ranks, but the model has "
                f"seq_length ({longest}): cut it, or make the model with seq_length={size * count}")
    try:
        right = sequence_positions(size * count, layout=layout, group=group, device=tokens.device)
    except ConfigError as error:
        return str(error)
    cure = f"give positions=sequence_positions({size * count}, layout={layout!r}, group=group)"
    if not isinstance(positions, torch.Tensor) or positions.shape != right.shape:
        got = list(positions.shape) if isinstance(positions, torch.Tensor) else positions
        return f"positions ({got}) must say where in the sequence each of a rank's {count} tokens stands: {cure}"
    if is_dry(group) or torch.equal(positions.to(right), right):
        return None
    at = (positions.to(right) != right).nonzero()[0].item()
    return (f"token {at} of rank {dist.get_rank()} stands at position {positions[at]}, but attention takes it to be at "
            f"{right[at]}: for tokens by split_sequence(..., layout={layout!r}) {cure}")
