"""Pairs of collectives at the borders of a split region: what one does in forward, its partner does in backward.

    x --copy-->[ region: each rank has its own part of the work ]--reduce--> y      forward: the second one talks
    x <-reduce-[                                                ]<--copy---- y      backward: the first one talks

A plain ``dist.all_reduce`` is no part of the graph that autograd keeps: the gradient would pass as if it were not
there. Each function leaves its input as it is, takes any strides, and in a group of one rank does nothing: what comes
out is not to be changed in place. All ranks of the group call together, with tensors of one shape and dtype.

Letters: t ranks of the group, N bytes of the larger of the two tensors (input, output); a collective is named with its
bytes for each rank on a ring. B batch_size, S seq_length, h hidden_size.
"""
import contextlib
import weakref

import torch
import torch.distributed as dist

from dtlab.parallel.shared import all_gather_single, is_dry, place_in, reduce_scatter_single, refuse_different_rows
from dtlab.validate import divisible

_SEEDED_ALIKE = weakref.WeakSet()  # groups


def copy_to_tp_region(x: torch.Tensor, group=None) -> torch.Tensor:
    """x; the gradient is summed over the ranks. The paper's f.

    Where a tensor that all ranks have enters a split region, each rank's gradient is that of its part only.

    Communication: forward nothing; backward all_reduce, 2 (t-1)/t N.

    Raises:
        ConfigError: this rank is not in the group.

    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """
    return _apply(_identity, _all_reduce, x, group)


def reduce_from_tp_region(x: torch.Tensor, group=None) -> torch.Tensor:
    """The sum over the ranks; the gradient is passed on as it is. The paper's g.

    What follows is done by all ranks alike, so that the gradient that comes back is whole on each.

    Communication: forward all_reduce, 2 (t-1)/t N; backward nothing.

    Raises:
        ConfigError: this rank is not in the group.

    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """
    return _apply(_all_reduce, _identity, x, group)


def scatter_to_tp_region(x: torch.Tensor, group=None, dim: int = -1) -> torch.Tensor:
    """This rank's piece, 1/t of ``dim``, of a tensor that all ranks have; the pieces of the gradient are gathered.

    Communication: forward nothing; backward all_gather, (t-1)/t N.

    Raises:
        ConfigError: ``dim`` is not divisible by t, or this rank is not in the group.
    """
    return _apply(_piece, _all_gather, x, group, dim)


def gather_from_tp_region(x: torch.Tensor, group=None, dim: int = -1) -> torch.Tensor:
    """All ranks' pieces side by side along ``dim``; of the gradient, whole on each rank, this rank's piece.

    Communication: forward all_gather, (t-1)/t N; backward nothing.

    Raises:
        ConfigError: this rank is not in the group.
    """
    return _apply(_all_gather, _piece, x, group, dim)


def scatter_to_sequence_region(x: torch.Tensor, group=None, dim: int = 1) -> torch.Tensor:
    """This rank's tokens [B, S/t, h] of all [B, S, h], as ``scatter_to_tp_region``: after the embedding.

    Communication: forward nothing; backward all_gather, (t-1)/t N.

    Raises:
        ConfigError: ``dim`` is not divisible by t, or this rank is not in the group.
    """
    return _apply(_piece, _all_gather, x, group, dim)


def gather_from_sequence_region(x: torch.Tensor, group=None, dim: int = 1) -> torch.Tensor:
    """All tokens [B, S, h] from each rank's [B, S/t, h]; a piece's gradient is the sum over the ranks.

    For what enters a split region, where ``copy_to_tp_region`` stands without sequence parallelism.

    Communication: forward all_gather, (t-1)/t N; backward reduce_scatter, (t-1)/t N.

    Raises:
        ConfigError: this rank is not in the group.

    Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2 (g of figure 5).
    """
    return _apply(_all_gather, _reduce_scatter, x, group, dim)


def reduce_scatter_to_sequence_region(x: torch.Tensor, group=None, dim: int = 1) -> torch.Tensor:
    """This rank's tokens [B, S/t, h] of the sum over the ranks [B, S, h]; gradients of all tokens are gathered.

    For what leaves a split region, where ``reduce_from_tp_region`` stands without sequence parallelism.

    Communication: forward reduce_scatter, (t-1)/t N; backward all_gather, (t-1)/t N.

    Raises:
        ConfigError: ``dim`` is not divisible by t, or this rank is not in the group.

    Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2 (g-bar of figure 5).
    """
    return _apply(_reduce_scatter, _all_gather, x, group, dim)


def all_to_all_region(x: torch.Tensor, group=None, *, scatter_dim: int, gather_dim: int) -> torch.Tensor:
    """Cut ``scatter_dim`` in t pieces, one to each rank, and join what comes along ``gather_dim``; back the other way.

    From all heads of some tokens to some heads of all tokens: [B, a, S/t, d] with ``scatter_dim=1, gather_dim=2``
    gives [B, a/t, S, d].

    Communication: forward and backward all_to_all, (t-1)/t N each.

    Raises:
        ConfigError: ``scatter_dim`` is not divisible by t, or this rank is not in the group.

    Source: Jacobs et al. 2023, arXiv:2309.14509, section 3.1.
    """
    return _apply(_all_to_all, _all_to_all, x, group, (scatter_dim, gather_dim), (gather_dim, scatter_dim))


def _apply(forward, backward, x, group, dims=None, dims_back=None):
    _, size = place_in(group)
    if size == 1:
        return x
    return _Pair.apply(x, group, (forward, dims), (backward, dims_back or dims))


class _Pair(torch.autograd.Function):
    """One collective in forward and its partner in backward, for which it is the partner in turn."""

    @staticmethod
    def forward(ctx, x, group, ahead, back):
        """What ``ahead``, a function and its dims, makes of ``x``."""
        ctx.pair = group, back, ahead
        function, dims = ahead
        return function(x, group, dims)

    @staticmethod
    def backward(ctx, grad):
        """The partner, so that the gradient of a gradient is right too."""
        return _Pair.apply(grad, *ctx.pair), None, None, None


# what the pairs are made of: each gives a new tensor, or a view, and leaves x as it is


def _identity(x, group, dims):
    return x.view_as(x)


def _all_reduce(x, group, dims):
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)  # all_reduce, 2 (t-1)/t N
    return total


def _pieces(x, group, dim):
    size = dist.get_world_size(group)
    divisible(f"x.shape[{dim}]", x.size(dim), "the ranks of the group", size)
    return x.chunk(size, dim)


def _piece(x, group, dim):
    return _pieces(x, group, dim)[dist.get_rank(group)].contiguous()


def _all_gather(x, group, dim):
    return start_all_gather(x, group, dim)()


def _reduce_scatter(x, group, dim):
    return start_reduce_scatter(x, group, dim)()


def _all_to_all(x, group, dims):
    scatter_dim, gather_dim = dims
    pieces = torch.stack(_pieces(x, group, scatter_dim))  # [t, ..], contiguous
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces, group=group)  # all_to_all, (t-1)/t N
    return torch.cat(received.unbind(), gather_dim)


def start_all_gather(x: torch.Tensor, group, dim: int):
    """Begin an all_gather along ``dim``; returns a function that waits for it and gives the whole tensor."""
    size = dist.get_world_size(group)
    parts = x.new_empty((size * x.shape[0], *x.shape[1:]))  # one below the other
    work = all_gather_single(parts, x.contiguous(), group=group, async_op=True)  # all_gather, (t-1)/t N

    def finish():
        work.wait()
        return parts if dim == 0 else torch.cat(parts.chunk(size), dim)

    return finish


def start_reduce_scatter(x: torch.Tensor, group, dim: int):
    """Begin a reduce_scatter along ``dim``; returns a function that waits for it and gives this rank's piece."""
    pieces = _pieces(x, group, dim)
    parts, piece = torch.cat(pieces), x.new_empty(pieces[0].shape)  # one below the other
    work = reduce_scatter_single(piece, parts, group=group, async_op=True)  # reduce_scatter, (t-1)/t N

    def finish():
        work.wait()
        return piece

    return finish


@contextlib.contextmanager
def split_region_rng(group=None):
    """Random numbers inside differ by rank, as dropout in a split region must; those after it are equal again.

    One number is drawn from the CPU's default generator, equal on all ranks of the group if they are seeded alike. It
    and the rank's place in the group seed the default generators, of the CPU and of the current GPU, until the end of
    the block; then they go on where they were. There is no other state: what saves and restores torch's generators
    (``recompute``, a checkpoint) restores these streams too. In a group of one rank, and in a dry recording, nothing is
    done. The ranks of a group come here together, and compare the number the first time.

    Raises:
        ConfigError: this rank is not in the group; on every rank: the first number is another on some.

    Example: of a tensor that is split by columns, each rank drops others
        >>> with split_region_rng(group):                                                  # doctest: +SKIP
        ...     y = F.dropout(y, 0.1)

    Source: Shoeybi et al. 2019, arXiv:1909.08053, appendix B.2 (another generator in the place of another seed).
    """
    rank, size = place_in(group)
    if size == 1 or is_dry(group):
        yield
        return
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    seed = int(torch.randint(2**62, (), device="cpu"))
    if (key := group or dist.group.WORLD) not in _SEEDED_ALIKE:
        refuse_different_rows([("random number", str(seed))], group, "another state of torch's default generator",
                              "What is outside of split regions needs the same: torch.manual_seed(number), with one "
                              "number for all ranks of the tensor-parallel group")
        _SEEDED_ALIKE.add(key)
    seed += rank
    with torch.random.fork_rng(gpus):
        torch.default_generator.manual_seed(seed)
        if gpus:
            torch.cuda.manual_seed(seed)
        yield
