"""Values on their way between notebook and ranks: code by value, tensors through shared memory.

``pack`` turns an object into a ``Parcel``: a pickle and one anonymous file with the bytes of every tensor and array.
Functions, lambdas, closures and classes from cells travel by value (cloudpickle), with the notebook's globals they
use. Tensors arrive as private copies (changes on one side never show on the other) and without their graph.
"""
import io
import os
import pickle
import sys
import types
from dataclasses import dataclass

import cloudpickle
from cloudpickle import cloudpickle as _cloudpickle

from dtlab.errors import ConfigError
from dtlab.ranks import wire
from dtlab.record.names import global_names

_ALIGN = 64  # bytes; tensors start on a cache line


@dataclass
class Parcel:
    """A packed value: its pickle inline; or a file with the pickle and the buffers, whose ``sizes`` are given.

    A message carries the file's descriptor beside the parcel: whoever receives them sets ``fds``.
    """

    pickled: bytes = b""
    fds: tuple = ()  # of the file, if there is one
    sizes: tuple = ()  # bytes of each piece in it
    filenames: frozenset = frozenset()  # of code that travels by value

    def close(self):
        """Close the file, after it was sent."""
        for fd in self.fds:
            os.close(fd)
        self.fds = ()


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file):
        self.buffers, self.filenames = [], set()
        super().__init__(file, protocol=5, buffer_callback=self.buffers.append)
        self._bytes_of = {}  # storage's address and size -> its bytes, which keep it alive

    def reducer_override(self, obj):
        if isinstance(obj, types.CodeType):
            self.filenames.add(obj.co_filename)
            make, args = _cloudpickle._code_reduce(obj)
            return _named_code, (obj.co_filename, make, args)
        torch = sys.modules.get("torch")
        if torch is not None and type(obj) in (torch.Tensor, torch.nn.Parameter):
            if obj.layout == torch.strided and not obj.is_quantized and obj.device.type != "meta":
                return self._reduce_tensor(torch, obj)
        return super().reducer_override(obj)

    def _reduce_tensor(self, torch, tensor):
        data = tensor.detach().cpu().resolve_conj().resolve_neg()
        if data.numel() * data.element_size() * 2 < data.untyped_storage().nbytes():
            data = data.contiguous().clone()  # a small view does not drag its whole storage along
        storage = data.untyped_storage()
        key = storage.data_ptr(), storage.nbytes()  # two tensors may begin at one address of a NumPy array
        if key not in self._bytes_of:
            self._bytes_of[key] = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        where = data.dtype, data.storage_offset(), tuple(data.size()), data.stride()
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        return _rebuild_tensor, (self._bytes_of[key], *where, tensor.requires_grad, is_parameter)


def _rebuild_tensor(storage_bytes, dtype, offset, size, stride, requires_grad, is_parameter):
    import torch

    storage = torch.from_numpy(storage_bytes).untyped_storage()
    tensor = torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


def _named_code(filename, make, args):
    """Code by value keeps the file name of its cell, so that messages can name the line (cloudpickle drops it)."""
    return make(*args).replace(co_filename=filename)


def pack(obj):
    """Pack ``obj`` for the way to another process.

    Raises:
        ConfigError: a part of it cannot travel; the message says which and what to do instead.
    """
    body = io.BytesIO()
    pickler = _Pickler(body)
    try:
        pickler.dump(obj)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(_explain_unpackable(obj, error)) from None
    filenames = frozenset(pickler.filenames)
    if not pickler.buffers and len(body.getbuffer()) <= wire.INLINE_BYTES:
        return Parcel(body.getvalue(), filenames=filenames)
    pieces = [body.getbuffer(), *(buffer.raw() for buffer in pickler.buffers)]
    fd = wire.anonymous_file()
    _write_all(fd, pieces)
    return Parcel(fds=(fd,), sizes=tuple(piece.nbytes for piece in pieces), filenames=filenames)


def _write_all(fd, pieces):
    offset = 0
    for view in pieces:
        while view.nbytes:
            done = os.pwrite(fd, view[: 1 << 30], offset)
            view, offset = view[done:], offset + done
        offset += -offset % _ALIGN


def _explain_unpackable(obj, error):
    """One sentence: which part of ``obj`` cannot travel between notebook and ranks, why, and the cure."""
    why = f"{type(error).__name__}: {error}".splitlines()[0]
    function = obj[0] if isinstance(obj, tuple) and obj and callable(obj[0]) else obj
    notebook = getattr(function, "__globals__", {})
    for name in sorted(global_names(function) & set(notebook)):
        value = notebook[name]
        if not _packs(value):
            return (
                f"{getattr(function, '__name__', 'the function')}() uses {name!r} ({type(value).__name__}) of the "
                f"notebook, which cannot travel to the ranks ({why}). Make it inside the function, or pass what you "
                "need of it as an argument."
            )
    return (
        f"{type(function).__name__} cannot travel between the notebook and the ranks ({why}). Send what it is made of: "
        "tensors, numbers, text, lists, dicts, state_dict()."
    )


def _packs(value):
    try:
        _Pickler(io.BytesIO()).dump(value)
        return True
    except Exception:
        return False


class _Unpickler(pickle.Unpickler):
    """``function_globals`` collects the globals of every function that came by value."""

    def __init__(self, body, buffers):
        super().__init__(io.BytesIO(body), buffers=buffers)
        self.function_globals = []

    def find_class(self, module, name):
        found = super().find_class(module, name)
        return self._make_function if found is _cloudpickle._make_function else found

    def _make_function(self, code, function_globals, *rest):
        if not any(function_globals is g for g in self.function_globals):
            self.function_globals.append(function_globals)
        return _cloudpickle._make_function(code, function_globals, *rest)


def _map_private(fd):
    """The file in memory, privately: each receiver may change its copy; pages are copied only when it does.

    Subtle: ``mmap.mmap`` would keep a descriptor open for each value that the reader keeps.
    """
    import torch

    storage = torch.UntypedStorage.from_file(f"/dev/fd/{fd}", False, os.fstat(fd).st_size)
    return memoryview(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())


def unpack(parcel):
    """``(object, list of the globals dicts of functions that came by value)``; closes the parcel's file."""
    body, buffers = parcel.pickled, []
    if parcel.fds:
        whole, offset = _map_private(parcel.fds[0]), 0
        parcel.close()
        for size in parcel.sizes:
            buffers.append(whole[offset : offset + size])
            offset += size + -size % _ALIGN
        body = buffers.pop(0)
    unpickler = _Unpickler(body, buffers)
    return unpickler.load(), unpickler.function_globals
