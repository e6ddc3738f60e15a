"""The vocabulary cut over ranks: the embedding, and the loss of logits of which each rank has some columns.

Letters: t ranks of the group, V vocab_size, h hidden_size, B batch_size, S seq_length, r = ceil(V / t) rows of the
vocabulary on each rank; the last ranks' may be padding, past V.
"""
import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dtlab.errors import ConfigError
from dtlab.models.init import ParameterShard, init_by_name
from dtlab.parallel.mappings import reduce_from_tp_region
from dtlab.parallel.shared import KeepsGroup, is_dry, place_in
from dtlab.validate import at_least, one_of

_REDUCTIONS = "sum", "mean", "none"
_IGNORED = -100  # a target that does not count, as in torch's cross_entropy


def vocab_shard(vocab_size: int, group=None):
    """The function that takes this rank's r rows of a whole [V, ..] tensor, with zeros where they are past V.

    It is what ``ColumnParallelLinear(h, V, bias=False, shard=vocab_shard(V, group))`` needs to be an output layer; its
    weight may be the embedding's: ``output_layer.weight = token_embedding.weight``.

    Raises:
        ConfigError: ``vocab_size`` is below t, or this rank is not in the group.
    """
    rank, size = place_in(group)
    if at_least("vocab_size", vocab_size, 1) < size:
        raise ConfigError(f"vocab_size ({vocab_size}) is below tp_size ({size}): some ranks would have no token; use "
                          f"tp_size {vocab_size} at most")
    rows = -(-vocab_size // size)
    return functools.partial(_take_rows, start=rank * rows, rows=rows)


def _take_rows(whole, start, rows):
    mine = whole[start : start + rows]
    return torch.cat([mine, mine.new_zeros(rows - len(mine), *whole.shape[1:])])


class VocabParallelEmbedding(KeepsGroup, nn.Module):
    """Rows of the embedding of h numbers for each token, over the ranks: each looks up the tokens that it has.

    A rank has zeros for the others' tokens, and the ranks' results are summed.

    Args:
        vocab_size: V, tokens (count); t need not divide it.
        hidden_size: h (count).
        group: The ranks that have a part each; None for all.
        seed: Initialisation by name: the parts together are ``init_by_name(nn.Embedding(V, h), seed)``.
        dtype, device: Of the weight.

    Shapes on one rank:
        tokens [..] token ids, the same on every rank
        weight [r, h]: of tokens rank * r and following; rows past V are 0, and get no gradient
        y      [.., h], the same on every rank

    Communication: forward all_reduce of y; backward nothing.

    Raises:
        ConfigError: a size below 1, V below t; this rank is not in the group; in forward: a token that is not in
            0 .. V - 1 (looked for in each call: a GPU is waited for).

    Not here: a look at the other ranks' tokens; ``vocab_parallel_cross_entropy`` compares the targets.

    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """

    def __init__(self, vocab_size: int, hidden_size: int, *, group=None, seed: int = 0,
                 dtype: torch.dtype = torch.float32, device="cpu"):
        super().__init__()
        shape = vocab_size, at_least("hidden_size", hidden_size, 1)
        self.vocab_size, self.hidden_size, self.group = *shape, group
        self.parameter_shards = {"weight": ParameterShard(shape, vocab_shard(vocab_size, group))}
        self.first_token, num_rows = (self.parameter_shards["weight"].take.keywords[key] for key in ("start", "rows"))
        self.weight = nn.Parameter(torch.empty(num_rows, hidden_size, dtype=dtype, device=device))
        init_by_name(self, seed)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[..] -> [.., h]."""
        if not is_dry(self.group):
            _refuse_other_ids("tokens", tokens, (tokens < 0) | (tokens >= self.vocab_size), self.vocab_size)
        mine, is_mine = _of_this_rank(tokens, self.first_token, len(self.weight))
        y = F.embedding(mine, self.weight).masked_fill(~is_mine.unsqueeze(-1), 0)
        return reduce_from_tp_region(y, self.group)

    def extra_repr(self) -> str:
        """Sizes of the whole embedding and of this rank's part, for print(module)."""
        return f"{self.vocab_size}, {self.hidden_size}, here {len(self.weight)} from {self.first_token}"


def _of_this_rank(ids, first, rows):
    """The ids counted from this rank's first one, 0 for those of other ranks, and which are this rank's."""
    mine = ids - first
    is_mine = (mine >= 0) & (mine < rows)
    return mine.masked_fill(~is_mine, 0), is_mine


def _refuse_other_ids(name, ids, is_wrong, vocab_size):
    """Raise ConfigError on every rank, as all have the same ids; each alone would take them for another rank's."""
    if is_wrong.any():
        first = tuple(is_wrong.nonzero()[0].tolist())
        raise ConfigError(f"{name}{list(first)} is {ids[first].item()}, which is no token: they are 0 to "
                          f"{vocab_size - 1} (vocab_size {vocab_size})")


def vocab_parallel_cross_entropy(logits: torch.Tensor, targets: torch.Tensor, *, vocab_size: int, reduction: str,
                                 group=None) -> torch.Tensor:
    """``models.cross_entropy`` of logits of which each rank has some columns: no rank ever has a whole row.

    The largest logit, the target's and the sum of the exponentials are found by three all_reduces. Logits past V take
    no part: padding has probability 0 and gets no gradient.

    Args:
        logits: [.., r]: this rank's columns; 16-bit ones are widened to float32 first.
        targets: [..] token ids, the same on every rank; -100 marks a token that does not count.
        vocab_size: V, without padding.
        reduction: "sum", "mean" (over the tokens that count; NaN if there is none) or "none".
        group: The ranks that have a part each; None for all.

    Returns:
        A scalar, or [..] for "none"; the same on every rank.

    Communication: forward three all_reduces of one number a token, the first with two more, which tell whether all
    ranks have the same targets; backward nothing. Kept for backward: the softmax [.., r].

    Raises:
        ConfigError: unknown ``reduction``; shapes that do not fit; V below t; this rank is not in the group; on every
            rank: targets, ``vocab_size`` or ``reduction`` that differ between ranks; a target that is not in
            0 .. V - 1. (A GPU is waited for, once.)

    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3 (logits fused with the loss).
    """
    one_of("reduction", reduction, _REDUCTIONS)
    rows = vocab_shard(vocab_size, group).keywords["rows"]
    if logits.shape != (*targets.shape, rows):
        raise ConfigError(f"logits {list(logits.shape)} must be {[*targets.shape, rows]} for targets "
                          f"{list(targets.shape)}: a rank has {rows} columns of vocab_size ({vocab_size})")
    losses = _CrossEntropy.apply(logits, targets, vocab_size, group, reduction)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (targets != _IGNORED).sum()


class _CrossEntropy(torch.autograd.Function):
    """The loss of each token, from this rank's columns of the logits."""

    @staticmethod
    def forward(ctx, logits, targets, vocab_size, group, reduction):
        """[.., r] -> [..]; one buffer [.., r] holds logits, then exponentials, then probabilities."""
        ctx.dtype, ctx.first = logits.dtype, place_in(group)[0] * logits.shape[-1]
        dtype = torch.promote_types(logits.dtype, torch.float32)
        buffer = logits.to(dtype, copy=True, memory_format=torch.contiguous_format)
        buffer[..., max(vocab_size - ctx.first, 0) :] = float("-inf")  # padding
        largest = _largest(buffer.amax(-1), targets, vocab_size, group, reduction)
        buffer -= largest.unsqueeze(-1)  # no exponential overflows
        mine, is_mine = _of_this_rank(targets, ctx.first, logits.shape[-1])
        target_logit = buffer.gather(-1, mine.unsqueeze(-1)).squeeze(-1).masked_fill(~is_mine, 0)
        _all_reduce(target_logit, dist.ReduceOp.SUM, group)
        total = _all_reduce(buffer.exp_().sum(-1), dist.ReduceOp.SUM, group)
        buffer /= total.unsqueeze(-1)
        ctx.save_for_backward(buffer, targets)
        return (total.log() - target_logit).masked_fill(targets == _IGNORED, 0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        """Probability minus 1 for the target, minus 0 for others, times the token's gradient. No communication."""
        softmax, targets = ctx.saved_tensors
        grad = grad.masked_fill(targets == _IGNORED, 0).unsqueeze(-1)
        mine, is_mine = (t.unsqueeze(-1) for t in _of_this_rank(targets, ctx.first, softmax.shape[-1]))
        logits_grad = softmax * grad
        logits_grad.scatter_add_(-1, mine, -grad.masked_fill(~is_mine, 0))
        return logits_grad.to(ctx.dtype), None, None, None, None


def _largest(numbers, targets, vocab_size, group, reduction):
    """The largest over the ranks of one number a token; targets that do not fit are refused on every rank.

    Two numbers go along, s and -s: their largest add up to 0 if s, a sum over targets and options, is the same on all.
    """
    flat = targets.flatten().long()
    weights = (torch.arange(1, flat.numel() + 1, device=flat.device) * 0x9E3779B1).remainder(2**31 - 1)
    options = len(_REDUCTIONS) * vocab_size + _REDUCTIONS.index(reduction)
    total = ((flat * weights).sum() + options).remainder(2**24 - 3).to(numbers.dtype)  # float32 has it exactly
    sent = _all_reduce(torch.cat([numbers.flatten(), total.view(1), -total.view(1)]), dist.ReduceOp.MAX, group)
    if not is_dry(group):
        wrong = (targets != _IGNORED) & ((targets < 0) | (targets >= vocab_size))
        is_other, is_wrong = torch.stack([sent[-2:].sum(), wrong.any()]).tolist()
        if is_other:
            raise ConfigError("targets, vocab_size or reduction differ between the ranks of the tensor-parallel group, "
                              "which compute one loss together: give all of them the same batch. A sampler takes the "
                              "rank among the data-parallel ranks, not among all")
        if is_wrong:
            _refuse_other_ids("targets", targets, wrong, vocab_size)
    return sent[:-2].view(numbers.shape)


def _all_reduce(numbers, op, group):
    """In place, of one number a token, and returned."""
    if dist.get_world_size(group) > 1:
        dist.all_reduce(numbers, op, group=group)  # all_reduce, 2 (t-1)/t BS*itemsize
    return numbers
