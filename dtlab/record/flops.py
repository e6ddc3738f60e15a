"""Floating-point operations of an operator: torch's registry, and what it lacks.

A multiply and an add are 2. Counted are matrix products, convolutions and attention; elementwise operators count 0, as
in ``torch.utils.flop_counter``. Attention counts the full S x S matrix, causal or not, and its backward computes the
scores again (5 products against 2), as flash attention does.
"""
from math import prod

import torch
from torch.utils import flop_counter

_aten = torch.ops.aten
_PRODUCTS = {  # operator -> position of the left factor; the right one follows
    _aten.mm: 0, _aten.bmm: 0, _aten.mv: 0, _aten.dot: 0, _aten.vdot: 0,
    _aten.addmm: 1, _aten.baddbmm: 1, _aten.addmv: 1, _aten.addbmm: 1,
}  # fmt: skip
_MORE = {  # torch has no formula for attention on the CPU
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_counter.sdpa_flop,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_counter.sdpa_backward_flop,
}


def formula(func):
    """``f(args, kwargs, out)`` -> FLOPs of an ``OpOverload``; None where it has none."""
    packet = func._overloadpacket
    if packet in _PRODUCTS:
        at = _PRODUCTS[packet]
        return lambda args, kwargs, out: _product(args[at].shape, args[at + 1].shape)
    counted = _MORE.get(packet) or flop_counter.flop_registry.get(packet)
    return counted and (lambda args, kwargs, out: int(counted(*args, **kwargs, out_val=out)))


def _product(left, right):
    """[.., m, k] x [.., k, n]: 2 m k n for each of the batch."""
    return int(2 * prod(left) * (right[-1] if len(right) > 1 else 1))
