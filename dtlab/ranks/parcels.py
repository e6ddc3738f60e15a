"""Values on their way between notebook and ranks: code by value, tensors through shared memory.

``pack`` turns an object into a ``Parcel``: a pickle and one anonymous file with the bytes of every tensor and array.
Functions, lambdas, closures and classes from cells travel by value (cloudpickle), with the notebook's globals they
use. Tensors arrive as private copies (changes on one side never show on the other) and without their graph.
"""
import ctypes
import io
import mmap
import os
import pickle
import sys
import types
import weakref
from dataclasses import dataclass

import cloudpickle
from cloudpickle import cloudpickle as _cloudpickle

from dtlab.errors import ConfigError
from dtlab.ranks import wire

_ALIGN = 64  # bytes; tensors start on a cache line
_MMAP_ARGUMENTS = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_MMAP_FAILED = ctypes.c_void_p(-1).value


@dataclass
class Parcel:
    """A packed value: ``body`` inline or, if ``fd`` is set, the first ``size`` bytes of that file; then the tensors."""

    body: bytes
    size: int
    fd: int | None = None
    filenames: frozenset = frozenset()  # of code that travels by value

    def close(self):
        """Close the file, after it was sent."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file, pieces):
        super().__init__(file, protocol=5, buffer_callback=self._keep_buffer)
        self.pieces = pieces  # list of objects with the buffer protocol
        self._storages = {}  # storage's address and size -> index in pieces.tensors, which keeps it alive

    def _keep_buffer(self, buffer):
        raw = buffer.raw()
        if raw.nbytes < 1024:
            return True  # inside the pickle
        self.pieces.append(raw)
        return False

    def reducer_override(self, obj):
        if isinstance(obj, types.CodeType):
            self.pieces.filenames.add(obj.co_filename)
            make, args = _cloudpickle._code_reduce(obj)
            return _named_code, (obj.co_filename, make, args)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor):
            return self._reduce_tensor(torch, obj)
        return super().reducer_override(obj)

    def _reduce_tensor(self, torch, tensor):
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return NotImplemented
        plain = tensor.layout == torch.strided and not tensor.is_quantized and tensor.device.type != "meta"
        if not plain:
            return NotImplemented
        data = tensor.detach().cpu().resolve_conj().resolve_neg()
        storage = data.untyped_storage()
        if data.numel() * data.element_size() * 2 < storage.nbytes():
            data = data.contiguous().clone()  # a small view does not drag its whole storage along
            storage = data.untyped_storage()
        index = self._index(storage)
        where = (data.dtype, data.storage_offset(), tuple(data.size()), data.stride())
        return _rebuild_tensor, (index, where, tensor.requires_grad, isinstance(tensor, torch.nn.Parameter))

    def _index(self, storage):
        key = storage.data_ptr(), storage.nbytes()  # two tensors may begin at one address of a NumPy array
        if key[0] == 0 or key not in self._storages:  # empty storages share the address 0
            self._storages[key] = len(self.pieces.tensors)
            self.pieces.tensors.append(storage)
        return self._storages[key]


def _named_code(filename, make, args):
    """Code by value keeps the file name of its cell, so that messages can name the line (cloudpickle drops it)."""
    return make(*args).replace(co_filename=filename)


class _Pieces(list):
    """Buffers of arrays; beside them the storages of tensors and the file names of code that travels by value."""

    def __init__(self):
        super().__init__()
        self.tensors, self.filenames = [], set()


def _storage_bytes(storage):
    import torch

    if storage.nbytes() == 0:
        return b""
    return memoryview(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())


def pack(obj):
    """Pack ``obj`` for the way to another process.

    Raises:
        ConfigError: a part of it cannot travel; the message says which and what to do instead.
    """
    body, pieces = io.BytesIO(), _Pieces()
    try:
        _Pickler(body, pieces).dump(obj)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(explain_unpackable(obj, error)) from None
    buffers = [memoryview(p).cast("B") for p in pieces]
    buffers += [memoryview(_storage_bytes(s)).cast("B") for s in pieces.tensors]
    payload = pickle.dumps((body.getvalue(), [b.nbytes for b in buffers], len(pieces)), protocol=5)
    if not buffers and len(payload) <= wire.INLINE_BYTES:
        return Parcel(payload, len(payload), None, frozenset(pieces.filenames))
    fd = wire.anonymous_file()
    _write_all(fd, [payload, *buffers])
    return Parcel(b"", len(payload), fd, frozenset(pieces.filenames))


def _write_all(fd, buffers):
    offset = 0
    for data in buffers:
        view = memoryview(data)
        while view.nbytes:
            done = os.pwrite(fd, view[: 1 << 30], offset)
            view, offset = view[done:], offset + done
        offset += -offset % _ALIGN


def explain_unpackable(obj, error):
    """One sentence: which part of ``obj`` cannot travel between notebook and ranks, why, and the cure."""
    why = f"{type(error).__name__}: {error}".splitlines()[0]
    function = obj[0] if isinstance(obj, tuple) and obj and callable(obj[0]) else obj
    for name in sorted(_globals_used(function)):
        value = function.__globals__[name]
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


def _globals_used(function):
    code = getattr(function, "__code__", None)
    used = set(_cloudpickle._extract_code_globals(code)) if code else set()
    return used & set(getattr(function, "__globals__", {}))


def _packs(value):
    try:
        _Pickler(io.BytesIO(), _Pieces()).dump(value)
        return True
    except Exception:
        return False


class _Unpickler(pickle.Unpickler):
    """Unpickles a body; ``function_globals`` collects the globals of every function that came by value."""

    def __init__(self, body, buffers, storages):
        super().__init__(io.BytesIO(body), buffers=buffers)
        self.storages, self.function_globals = storages, []

    def find_class(self, module, name):
        if module == __name__ and name == "_rebuild_tensor":
            return self._rebuild_tensor
        found = super().find_class(module, name)
        return self._make_function if found is _cloudpickle._make_function else found

    def _make_function(self, code, function_globals, *rest):
        if not any(function_globals is g for g in self.function_globals):
            self.function_globals.append(function_globals)
        return _cloudpickle._make_function(code, function_globals, *rest)

    def _rebuild_tensor(self, index, where, requires_grad, is_parameter):
        import torch

        dtype, offset, size, stride = where
        data = self.storages[index]
        flat = torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
        tensor = torch.empty(0, dtype=dtype).set_(flat.untyped_storage(), offset, size, stride)
        if is_parameter:
            return torch.nn.Parameter(tensor, requires_grad=requires_grad)
        return tensor.requires_grad_(requires_grad)


def _rebuild_tensor(*_):
    raise AssertionError("only named in the pickle; _Unpickler rebuilds tensors")


def _map_private(fd):
    """The file in memory, privately: each receiver may change its copy; pages are copied only when it does.

    Subtle: ``mmap.mmap`` would keep a descriptor open for each value that the reader keeps.
    """
    libc, length = ctypes.CDLL(None, use_errno=True), os.fstat(fd).st_size
    libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, _MMAP_ARGUMENTS
    address = libc.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, fd, 0)
    if address in (None, _MMAP_FAILED):
        raise OSError(ctypes.get_errno(), f"{os.strerror(ctypes.get_errno())}, for {length} bytes of a value")
    array = (ctypes.c_char * length).from_address(address)
    unmap = weakref.finalize(array, _unmap, address, length)
    unmap.atexit = False  # tensors may be used until the very end
    return memoryview(array).cast("B")


def _unmap(address, length):
    ctypes.CDLL(None).munmap(ctypes.c_void_p(address), ctypes.c_size_t(length))


def unpack(parcel):
    """``(object, list of the globals dicts of functions that came by value)``; closes the parcel's file."""
    if parcel.fd is None:
        whole = memoryview(bytearray(parcel.body))
    else:
        whole = _map_private(parcel.fd)
        parcel.close()
    body, sizes, num_arrays = pickle.loads(whole[: parcel.size])
    buffers, offset = [], parcel.size
    for size in sizes:
        offset += -offset % _ALIGN
        buffers.append(whole[offset : offset + size])
        offset += size
    unpickler = _Unpickler(body, buffers[:num_arrays], buffers[num_arrays:])
    return unpickler.load(), unpickler.function_globals
