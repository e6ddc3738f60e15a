"""On a rank: nobody touches the buffers of a call that is not awaited yet.

A send buffer may be read, not written; the buffer of a receive or a collective neither. What aten operators touch is
seen by a dispatch mode, which costs some microseconds an operator; so it is on only while a handle of the reader's own
code is open. It is put at the bottom of the stack of modes, so that other modes end in their own order.
"""
import functools
import types
import weakref
from typing import NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dtlab.ranks.guard_order import here

_NO_DATA = ("empty", "new_empty", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")
_NO_DATA += ("new_zeros", "new_ones", "new_full", "set_", "resize_", "sym_size", "is_same_size", "randint_like")
_ANYWHERE = 1 << 40  # an address for layouts that are only compared


class Span(NamedTuple):
    """Bytes of one storage that an open call uses."""

    first: int
    end: int
    is_read: bool  # the call reads them: others may too
    index: int  # of the call


class Buffers:
    """The open handles of one rank."""

    def __init__(self, refuse):
        self.refuse = refuse  # called with (index of the call in flight, "writes" or "reads", where)
        self.handles = {}  # index of a call -> its Work, weakly: a Work holds its tensors
        self._spans = {}  # address of a storage -> [Span, ...]
        self._lent = {}  # index of a call -> [(its tensor, weakly; the storage, kept alive; address), ...]
        self.mode = _Watch(self)

    def open(self, work, index, read, written):
        """A handle went to the reader's code: watch what its call reads and writes."""
        self.handles[index] = weakref.ref(work)
        self._lent[index] = []
        for is_read, tensors in ((True, read), (False, written)):
            for tensor in tensors:
                if tensor.layout == torch.strided and tensor.numel():
                    self._lend(tensor, is_read, index)
        self.sync()

    def _lend(self, tensor, is_read, index):
        storage = tensor.untyped_storage()
        self._lent[index].append((weakref.ref(tensor), storage, tensor.data_ptr()))
        if tensor.is_contiguous():  # else its bytes are not one run
            first = tensor.storage_offset() * tensor.itemsize
            span = Span(first, first + tensor.nbytes, is_read, index)
            self._spans.setdefault(storage._cdata, []).append(span)

    def close(self, index):
        """The call is done."""
        lent = self._lent.pop(index, ())
        if self.handles.pop(index, None) is not None:
            rest = {key: [s for s in spans if s.index != index] for key, spans in self._spans.items()}
            self._spans = {key: spans for key, spans in rest.items() if spans}
            self.sync()
        for tensor, _, address in lent:
            if (tensor := tensor()) is not None and tensor.data_ptr() != address:
                self.refuse(index, "has given other memory to", here())

    def forget(self):
        """Stop watching everything."""
        self.handles.clear()
        self._lent.clear()
        self._spans.clear()
        self.sync()

    def sync(self):
        """Put the mode on the stack, or take it off, as the open handles ask for."""
        size = torch._C._len_torch_dispatch_stack()
        stack = [torch._C._get_dispatch_stack_at(i) for i in range(size)]
        is_on = self.mode in stack
        if self.mode.busy or is_on == bool(self._spans):
            return
        if any(getattr(mode, "_mode_key", None) is not None for mode in stack):
            return  # fake tensors and tracing: nothing is in flight
        for _ in stack:
            torch._C._pop_torch_dispatch_stack(None)
        for mode in [m for m in stack if m is not self.mode] if is_on else [self.mode, *stack]:
            torch._C._push_on_torch_dispatch_stack(mode)

    def touch(self, tensor, writes, site=None):
        """Refuse an access to a tensor whose bytes are in flight."""
        if tensor.layout != torch.strided or not self._spans:
            return
        for s in self._spans.get(tensor.untyped_storage()._cdata, ()):
            if (writes or not s.is_read) and touches(tensor, s.first, s.end):
                self.refuse(s.index, "writes" if writes else "reads", site or here())


def touches(tensor, first, end):
    """Whether any element of a tensor lies in bytes ``first`` to ``end`` of its storage. Exact for strided views."""
    size = tensor.itemsize
    start, strides = tensor.storage_offset() * size, tuple(stride * size for stride in tensor.stride())
    if tensor.is_contiguous():
        return start < end and first < start + tensor.nbytes and tensor.nbytes > 0
    elements = _layout(start, tuple(tensor.shape), strides, size)
    return np.shares_memory(elements, _layout(first, (end - first,), (1,), 1))


def _layout(start, shape, strides, size):
    """An array of elements that lie so, in bytes. NumPy compares where they are, and reads none."""
    interface = {"data": (_ANYWHERE + start, True), "shape": shape, "strides": strides, "typestr": f"|V{size}"}
    return np.asarray(types.SimpleNamespace(__array_interface__={**interface, "version": 3}))


@functools.lru_cache(4096)
def accesses(func):
    """``((position, name, writes), ...)`` of the arguments whose data an operator touches."""
    schema = func._schema
    if func.namespace in ("c10d", "_c10d_functional") or schema.name.split("::")[1] in _NO_DATA:
        return ()  # communication is checked when it is published
    if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
        return ()  # a view
    return tuple(
        (None if a.kwarg_only else i, a.name, a.alias_info is not None and a.alias_info.is_write)
        for i, a in enumerate(schema.arguments)
        if "Tensor" in str(a.type)
    )


class _Watch(TorchDispatchMode):
    """Looks at every operator while a handle is open."""

    def __init__(self, buffers):
        super().__init__()
        self.buffers, self.busy = buffers, False

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # torch would put two frames around every operator

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(t.__name__ == "DTensor" for t in types):
            return NotImplemented  # its own dispatch comes first; the operators inside are seen
        kwargs = kwargs or {}
        for at, name, writes in accesses(func):
            value = args[at] if at is not None and at < len(args) else kwargs.get(name)
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, torch.Tensor):
                    self.buffers.touch(tensor, writes)
        try:
            self.busy = True  # taken off the stack while it runs
            return func(*args, **kwargs)
        finally:
            self.busy = False


def install(buffers_of):
    """Once a process: keep the mode in backward passes, which restore the stack; see reads that no operator makes."""
    original = torch.autograd.graph._engine_run_backward

    @functools.wraps(original)
    def run_backward(*args, **kwargs):
        try:
            return original(*args, **kwargs)
        finally:
            if (buffers := buffers_of()) is not None:
                buffers.sync()

    for module in (torch.autograd.graph, torch.autograd):
        module._engine_run_backward = run_backward
    for name in ("tolist", "numpy"):
        setattr(torch.Tensor, name, _checked(getattr(torch.Tensor, name), buffers_of))


def _checked(method, buffers_of):
    @functools.wraps(method)
    def read(self, *args, **kwargs):
        buffers = buffers_of()
        if buffers is not None and buffers._spans:
            buffers.touch(self, False)
        return method(self, *args, **kwargs)

    return read
