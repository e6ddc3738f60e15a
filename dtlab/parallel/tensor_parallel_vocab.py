"""The vocabulary cut over ranks: the embedding, and the loss of logits of which each rank has some columns.

Letters: t ranks of the group, V vocab_size, h hidden_size, r = ceil(V / t) rows of the vocabulary on each rank; the
last ranks' may be padding, past V.
"""
import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dtlab.errors import ConfigError
from dtlab.models.init import Shard, init_by_name
from dtlab.parallel.mappings import reduce_from_tp_region
from dtlab.parallel.shared import is_dry, place_in
from dtlab.validate import at_least, one_of


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


class VocabParallelEmbedding(nn.Module):
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
            0 .. V - 1.

    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """

    def __init__(self, vocab_size: int, hidden_size: int, *, group=None, seed: int = 0,
                 dtype: torch.dtype = torch.float32, device="cpu"):
        super().__init__()
        shape = vocab_size, at_least("hidden_size", hidden_size, 1)
        self.vocab_size, self.hidden_size, self.group = *shape, group
        self.shards = {"weight": Shard(shape, vocab_shard(vocab_size, group))}
        self.first_token, num_rows = (self.shards["weight"].take.keywords[key] for key in ("start", "rows"))
        self.weight = nn.Parameter(torch.empty(num_rows, hidden_size, dtype=dtype, device=device))
        init_by_name(self, seed)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[..] -> [.., h]."""
        raise NotImplementedError


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

    Communication, N tokens: forward three all_reduces of N numbers; backward nothing. Kept for backward: the softmax
    [.., r].

    Raises:
        ConfigError: unknown ``reduction``; shapes that do not fit; V below t; a target that is not in 0 .. V - 1; this
            rank is not in the group.

    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3 (logits fused with the loss).
    """
    raise NotImplementedError
