"""A matrix product cut over ranks, by the columns of the matrix or by its rows.

    Y = X A    by columns  A = [A0 A1]   Y = [X A0, X A1]      each rank has all of X and some columns of Y
               by rows     A = [A0; A1]  Y = X0 A0 + X1 A1     each rank has some columns of X; the parts of Y are added

One after the other they need one sum: what the first gives is what the second takes.

Letters: t ranks of the group; in, out as in ``nn.Linear``; B batch_size, S seq_length. torch stores A^T, so that
columns of A are rows, dim 0, of ``weight``.
"""
import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dtlab.errors import ConfigError
from dtlab.models.init import ParameterShard, init_by_name
from dtlab.parallel.mappings import (
    gather_from_tp_region,
    reduce_from_tp_region,
    reduce_scatter_to_sequence_region,
    scatter_to_tp_region,
    start_all_gather,
    start_reduce_scatter,
)
from dtlab.parallel.shared import KeepsGroup, kind_of, place_in
from dtlab.validate import at_least, divisible


class ColumnParallelLinear(KeepsGroup, nn.Module):
    """y = x A + b with the columns of A over the ranks: this rank has some of y's columns, and all of x.

    In backward the gradient of x is summed over the ranks while the weight's is computed. No ``copy_to_tp_region`` is
    needed before it. In a group of one rank it is ``nn.Linear``.

    Args:
        in_features, out_features: Of the whole layer (count).
        bias: Whether there is one; cut as the columns are.
        gather_output: True gives every rank all columns of y; what follows must then be the same on all ranks.
        sequence_parallel: x is this rank's tokens, and all ranks' are gathered here. Only the own ones are kept for
            backward, and gathered a second time under the product that gives x's gradient.
        async_grad_all_reduce: False waits for each collective of backward where it starts.
        group: The ranks that have a part each; None for all.
        seed: Initialisation by name: the parts together are ``init_by_name(nn.Linear(in_features, out_features),
            seed)``, whatever t is.
        dtype, device: Of the parameters.
        shard: Which columns are this rank's: a function from rows of the whole (of ``weight``, or elements of ``bias``)
            to the rank's, in any number and with repeats or zeros if need be; None takes the rank's run of out / t. Of
            rows that several ranks have each gets a part of the gradient: their sum is up to you.

    Shapes on one rank:
        x      [.., in]; with ``sequence_parallel`` [B, S/t, in]
        weight [out/t, in], bias [out/t]   cut as ``parameter_shards`` says
        y      [.., out/t]; with ``sequence_parallel`` [B, S, out/t]; with ``gather_output`` [.., out]

    Communication: backward all_reduce of x's gradient. ``sequence_parallel``: forward all_gather of x; backward the
    same, and reduce_scatter of x's gradient. What needs no gradient is not sent. ``gather_output``: forward all_gather
    of y. Under ``torch.autocast`` all of it has autocast's dtype.

    Raises:
        ConfigError: a size below 1; ``out_features`` not divisible by t (without ``shard``); this rank is not in the
            group; in forward: x of another last dimension or dtype than the weight, or, with ``sequence_parallel``,
            without a dimension for the sequence.

    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3; sequence parallel: Korthikanti et al. 2022,
    arXiv:2205.05198, section 4.2.2; the overlap: Megatron-core's LinearWithGradAccumulationAndAsyncCommunication.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True, gather_output: bool = False,
                 sequence_parallel: bool = False, async_grad_all_reduce: bool = True, group=None, seed: int = 0,
                 dtype: torch.dtype = torch.float32, device="cpu", shard=None):
        super().__init__()
        self.in_features, self.out_features = (at_least(name, size, 1) for name, size in (
            ("in_features", in_features), ("out_features", out_features)))
        self.group, (rank, self.tp_size) = group, place_in(group)
        self.gather_output, self.sequence_parallel = gather_output, sequence_parallel
        self.async_grad_all_reduce = async_grad_all_reduce
        if shard is None:
            divisible("out_features", out_features, "tp_size", self.tp_size)
            shard = functools.partial(_part, dim=0, rank=rank, size=self.tp_size)
        shapes = {"weight": (out_features, in_features), "bias": (out_features,)}
        self.parameter_shards = {name: ParameterShard(shape, shard) for name, shape in shapes.items()}
        _make_parameters(self, bias, seed, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[.., in] -> [.., out/t]."""
        x, weight, bias = _as_autocast_does(x, self.weight, self.bias)
        _refuse_other_input(x, weight, self.in_features, self.sequence_parallel)
        if self.tp_size == 1:
            return F.linear(x, weight, bias)
        y = _ColumnLinear.apply(x, weight, bias, self.group, self.sequence_parallel, self.async_grad_all_reduce)
        return gather_from_tp_region(y, self.group) if self.gather_output else y

    def extra_repr(self) -> str:
        """Sizes of the whole layer and its degree, for print(module)."""
        return _sizes(self)


class _ColumnLinear(torch.autograd.Function):
    """x A + b, whose backward talks while it computes.

    compute    [ x's gradient ][ weight's gradient ]
    network                    [ its sum           ]     sequence_parallel: x is gathered again under x's gradient
    """

    @staticmethod
    def forward(ctx, x, weight, bias, group, sequence_parallel, overlap):
        """[.., in] -> [.., out/t]; with ``sequence_parallel`` [B, S/t, in] -> [B, S, out/t]."""
        ctx.save_for_backward(x, weight)
        ctx.how = group, sequence_parallel, overlap
        return F.linear(start_all_gather(x, group, 1)() if sequence_parallel else x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        """Gradients of x, weight and bias: of those that are asked for; no other costs a product or a collective."""
        (x, weight), (group, sequence_parallel, overlap) = ctx.saved_tensors, ctx.how
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        whole, summed, weight_grad = lambda: x, lambda: None, None
        with torch.autocast(grad.device.type, enabled=False):  # in forward's dtype, wherever backward() is called
            if for_weight and sequence_parallel:
                whole = _under_way(start_all_gather(x, group, 1), overlap)
            if for_x:
                x_grad = grad @ weight  # [.., out/t] @ [out/t, in] -> [.., in]
                start = start_reduce_scatter if sequence_parallel else _start_all_reduce
                summed = _under_way(start(x_grad, group, 1), overlap)
            rows = grad.reshape(-1, grad.shape[-1])
            if for_weight:
                weight_grad = rows.T @ whole().reshape(-1, x.shape[-1])  # [out/t, BS] @ [BS, in]
            bias_grad = rows.sum(0) if for_bias else None
            return summed(), weight_grad, bias_grad, None, None, None


def _start_all_reduce(x, group, _dim):
    """Begin an all_reduce of a tensor that is nobody else's; returns a function that waits for it and gives the sum."""
    x = x.contiguous()
    work = dist.all_reduce(x, group=group, async_op=True)  # all_reduce, 2 (t-1)/t BS*in*itemsize

    def finish():
        work.wait()
        return x

    return finish


def _under_way(finish, overlap):
    """``finish``, to be called when its result is needed; without ``overlap`` it is called at once."""
    if overlap:
        return finish
    result = finish()
    return lambda: result


class RowParallelLinear(KeepsGroup, nn.Module):
    """y = x A + b with the rows of A over the ranks: this rank has some of x's columns, and all of y.

    The ranks' products are summed, then the bias is added, once: added before, it would count t times.

    Args:
        in_features, out_features: Of the whole layer (count).
        bias: Whether there is one; whole on every rank.
        input_is_parallel: x is this rank's columns, as ``ColumnParallelLinear`` gives them; False: x has all columns,
            the same on every rank, and the rank takes its own.
        sequence_parallel: y is this rank's tokens of the sum. The bias' gradient is then a part, of these tokens: the
            ranks' parts have to be summed.
        group, seed, dtype, device: As for ``ColumnParallelLinear``.

    Shapes on one rank:
        x      [.., in/t]; without ``input_is_parallel`` [.., in]
        weight [out, in/t], bias [out]     cut as ``parameter_shards`` says
        y      [.., out], the same on every rank; with ``sequence_parallel`` [B, S/t, out]

    Communication: forward all_reduce of y, backward nothing. ``sequence_parallel``: forward reduce_scatter of y,
    backward all_gather of its gradient. Without ``input_is_parallel``: backward all_gather of x's gradient.

    Raises:
        ConfigError: a size below 1; ``in_features`` not divisible by t; this rank is not in the group; in forward: x of
            another last dimension or dtype than the weight; with ``sequence_parallel`` tokens that t does not divide.

    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True, input_is_parallel: bool = True,
                 sequence_parallel: bool = False, group=None, seed: int = 0, dtype: torch.dtype = torch.float32,
                 device="cpu"):
        super().__init__()
        self.in_features, self.out_features = (at_least(name, size, 1) for name, size in (
            ("in_features", in_features), ("out_features", out_features)))
        self.group, (rank, self.tp_size) = group, place_in(group)
        self.input_is_parallel, self.sequence_parallel = input_is_parallel, sequence_parallel
        divisible("in_features", in_features, "tp_size", self.tp_size)
        columns = functools.partial(_part, dim=1, rank=rank, size=self.tp_size)
        self.parameter_shards = {"weight": ParameterShard((out_features, in_features), columns)}
        _make_parameters(self, bias, seed, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[.., in/t] -> [.., out]."""
        x, weight, bias = _as_autocast_does(x, self.weight, self.bias)
        width = self.in_features // (self.tp_size if self.input_is_parallel else 1)
        _refuse_other_input(x, weight, width, self.sequence_parallel)
        if not self.input_is_parallel:
            x = scatter_to_tp_region(x, self.group)
        reduce = reduce_scatter_to_sequence_region if self.sequence_parallel else reduce_from_tp_region
        y = reduce(F.linear(x, weight), self.group)
        return y if bias is None else y + bias

    def extra_repr(self) -> str:
        """Sizes of the whole layer and its degree, for print(module)."""
        return _sizes(self)


def _part(whole, dim, rank, size):
    """One of ``size`` equal runs of a tensor's ``dim``."""
    return whole.chunk(size, dim)[rank]


def _make_parameters(layer, bias, seed, **factory):
    """Register weight and bias in the shapes of their shards, with values by name."""
    shapes = {"weight": (layer.out_features, layer.in_features), "bias": (layer.out_features,)}
    for name, shape in shapes.items():
        if name == "bias" and not bias:
            layer.register_parameter(name, None)
        else:
            whole = torch.empty(shape, device="meta")
            mine = layer.parameter_shards[name].take(whole).shape if name in layer.parameter_shards else shape
            layer.register_parameter(name, nn.Parameter(torch.empty(mine, **factory)))
    init_by_name(layer, seed)


def _as_autocast_does(*tensors):
    """x, weight and bias in the dtype that ``nn.Linear`` would compute in: a Function of one's own is not cast."""
    kind = tensors[0].device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return [t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors]


def _refuse_other_input(x, weight, width, sequence_parallel):
    """Raise ConfigError before this rank computes what the others' tensors do not fit, or sends it."""
    if x.shape[-1:] != (width,) or x.dtype != weight.dtype:
        raise ConfigError(f"x {list(x.shape)}, {kind_of(x)}, must be [.., {width}], {kind_of(weight)} as the weight is")
    if sequence_parallel and x.dim() != 3:
        raise ConfigError(f"x {list(x.shape)} must be [batch, sequence, {width}]: sequence_parallel=True cuts dim 1")


def _sizes(layer):
    return f"in_features={layer.in_features}, out_features={layer.out_features}, tp_size={layer.tp_size}"
