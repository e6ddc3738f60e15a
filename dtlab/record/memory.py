"""Live memory of one rank: every storage once, from its first sight until it is freed, with a category.

A storage's end is seen by a weak reference, also when only autograd or C++ held it. Categories are found out as the
program runs; the highest of this list wins, and holds for the whole life of the storage:

- ``params``: storages of ``nn.Parameter``, and of what an optimizer updates.
- ``grads``: what stands in a parameter's ``.grad``.
- ``optimizer_states``: tensors in ``optimizer.state`` after a step, Adam's 4-byte step counters included.
- ``activations``: what autograd saved for backward; and what a checkpoint computes again during backward.
- ``other``: the rest: inputs, buffers, gradients on their way, temporaries.

``tag`` decides where this cannot know.
"""
import functools
import gc
import sys
import traceback
import types
import weakref

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dtlab.record.names import global_names

_ORDER = {"other": 0, "activations": 1, "optimizer_states": 2, "grads": 3, "params": 4}
_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)
_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, torch.dtype, torch.device)
_storage_id = getattr(torch._C, "_storage_id", lambda tensor: tensor.untyped_storage()._cdata)


class Storage(weakref.ref):
    """One storage of the recorded program; ``category`` is final when the recording ends."""

    __slots__ = ("id", "address", "size", "category", "counted", "fixed")


def plain(tensor):
    """The tensors that hold a tensor's data: itself, or those inside a DTensor or another wrapper."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    inside = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [t for part in inside if isinstance(part, torch.Tensor) for t in plain(part)]


class Memory:
    """The storages of one rank during one recording. ``rows`` takes the alloc and free events."""

    def __init__(self, rows, now, fake_mode):
        self.rows, self.now, self.fake_mode = rows, now, fake_mode
        self.before = []  # alloc events of storages that lived when the recording began and were used
        self._step = None  # the code of the optimizer's step() under way
        self._known = {}  # address -> Storage
        self._params = {}  # id of a parameter -> (weak reference to it, handle of its hook or None)
        self._next_id = 0
        self._handles, self._resize = [], torch.UntypedStorage.resize_

    # storages

    def of(self, tensor):
        """The storage of a plain tensor, met now if it was not known; None where nothing is held (meta, sparse)."""
        try:
            storage = self._known.get(_storage_id(tensor))
        except RuntimeError:  # sparse tensors have no storage
            return None
        if storage is None:
            return self._meet(tensor)
        if not storage.counted:
            self._count(storage, self.before, 0.0)
        return storage

    def _meet(self, tensor, counted=True):
        if not self.holds_bytes(tensor):
            return None
        untyped = tensor.untyped_storage()
        storage = Storage(untyped, self._gone)
        storage.id, storage.address, storage.size = self._next_id, untyped._cdata, untyped.nbytes()
        storage.category, storage.counted, storage.fixed = "other", False, False
        self._next_id += 1
        self._known[storage.address] = storage
        if counted:
            self._count(storage, self.rows, self.now())
        return storage

    def holds_bytes(self, tensor):
        """Whether a tensor is real here: not on the meta device; in a dry recording one of its own fake tensors."""
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode is self.fake_mode and tensor.device.type != "meta"
        return self.fake_mode is None and tensor.device.type != "meta"

    def _count(self, storage, rows, when):
        storage.counted = True
        if storage.size:
            rows.append(_row("alloc", storage, when))

    def _gone(self, storage):
        self._known.pop(storage.address, None)
        if storage.counted and storage.size:
            self.rows.append(_row("free", storage, self.now()))

    def resized(self, untyped):
        """Note that a storage may have changed its size."""
        storage, size = self._known.get(untyped._cdata), untyped.nbytes()
        if storage is None or storage.size == size:
            return
        if not storage.counted:
            self._count(storage, self.before, 0.0)  # with the size that it had until now
        if storage.counted and not size:
            self.rows.append(_row("free", storage, self.now()))  # of the size it had
        storage.size = size
        if storage.counted and size:
            self.rows.append(_row("alloc", storage, self.now()))

    # categories

    def label(self, tensor, category, fixed=False):
        """Give the storage of a tensor a category, if it has none that stands above."""
        for part in (tensor,) if type(tensor) in _PLAIN else plain(tensor):
            storage = self.of(part)
            if storage is not None and (fixed or not storage.fixed and _ORDER[category] > _ORDER[storage.category]):
                storage.category, storage.fixed = category, fixed

    def meet_parameter(self, param, storage=None):
        """Label a parameter (whose storage may be another than before) and its gradients, those to come included."""
        if storage is not None and storage.category != "params":
            self.label(param, "params")
        if id(param) in self._params:
            return
        key, handle = id(param), None
        self.label(param, "params")
        if param.is_leaf and param.requires_grad:
            self.label_grad(param)
            handle = param.register_post_accumulate_grad_hook(self.label_grad)
        self._params[key] = weakref.ref(param, lambda _: self._params.pop(key, None)), handle

    def label_grad(self, param):
        """Label what stands in ``.grad``."""
        if param.is_leaf and param.grad is not None:
            self.label(param.grad, "grads")

    # what was there before

    def look_around(self, roots):
        """Note every tensor that lives now, to be counted when it is used; count what the function holds."""
        for obj in gc.get_objects():
            if issubclass(type(obj), torch.Tensor):
                for part in plain(obj):
                    self._note(part)
                    with torch._C.DisableTorchFunctionSubclass():  # a class may refuse to show its .grad
                        grads = plain(part.grad) if part.is_leaf and part.grad is not None else ()
                    for grad in grads:
                        self._note(grad)
        self._walk(roots, 4, set())

    def _note(self, tensor):
        try:
            if _storage_id(tensor) not in self._known:
                self._meet(tensor, counted=False)
        except RuntimeError:
            pass

    def _walk(self, obj, depth, seen):
        if id(obj) in seen or depth < 0 or isinstance(obj, _LEAVES):
            return
        seen.add(id(obj))
        if isinstance(obj, torch.nn.Parameter):
            self.meet_parameter(obj)
        elif isinstance(obj, torch.Tensor):
            self.label(obj, "other")
        elif isinstance(obj, torch.nn.Module):
            for part in obj.modules():  # Subtle: .parameters() of a part of a sharded model is refused
                for tensor in (*part._parameters.values(), *part._buffers.values()):
                    self._walk(tensor, 0, seen)
        elif isinstance(obj, torch.optim.Optimizer):
            self.meet_optimizer(obj)
        elif isinstance(obj, types.FunctionType):
            inside = [c.cell_contents for c in obj.__closure__ or () if _is_full(c)]
            names = [obj.__globals__[n] for n in global_names(obj) if n in obj.__globals__]
            for item in (*inside, *names, obj.__defaults__):
                self._walk(item, depth - 1, seen)
        elif isinstance(obj, functools.partial):
            for item in (obj.func, obj.args, obj.keywords):
                self._walk(item, depth, seen)
        elif isinstance(obj, types.MethodType):
            self._walk(obj.__self__, depth, seen)
            self._walk(obj.__func__, depth, seen)
        elif isinstance(obj, (list, tuple, set, dict)):
            for item in obj.values() if isinstance(obj, dict) else obj:
                self._walk(item, depth - isinstance(obj, (set, dict)), seen)
        elif hasattr(obj, "__dict__") and not type(obj).__module__.startswith(("torch", "builtins")):
            self._walk(vars(obj), depth, seen)

    # optimizers

    def meet_optimizer(self, optimizer, *_):
        """Label an optimizer's parameters, their gradients and its states."""
        for group in optimizer.param_groups:
            for param in group["params"]:
                self.meet_parameter(param)
                self.label(param, "params")
                self.label_grad(param)
        todo = list(optimizer.state.values())
        while todo:
            value = todo.pop()
            if isinstance(value, torch.Tensor):
                self.label(value, "optimizer_states")
            elif isinstance(value, (list, tuple, dict)):
                todo += value.values() if isinstance(value, dict) else value

    def in_optimizer(self):
        """Whether an optimizer's ``step()`` is under way; one that failed is not."""
        if self._step is None:
            return False
        is_running = any(frame.f_code is self._step for frame, _ in traceback.walk_stack(sys._getframe(1)))
        if not is_running:
            self._step = None
        return is_running

    def _before_step(self, optimizer, *_):
        self._step = sys._getframe(1).f_code
        self.meet_optimizer(optimizer)

    def _after_step(self, optimizer, *_):
        self._step = None
        self.meet_optimizer(optimizer)

    # hooks

    def start(self):
        """Hook what torch's dispatcher does not show."""
        register_parameter_hook = torch.nn.modules.module.register_module_parameter_registration_hook
        self._handles.append(register_optimizer_step_pre_hook(self._before_step))
        self._handles.append(register_optimizer_step_post_hook(self._after_step))
        self._handles.append(register_parameter_hook(self._registered))
        resize = self._resize

        def resize_(untyped, size):
            resize(untyped, size)
            self.resized(untyped)
            return untyped

        torch.UntypedStorage.resize_ = resize_  # FSDP2 frees by it, and it is not dispatched

    def _registered(self, _module, _name, param):
        if param is not None:
            self.meet_parameter(param)

    def stop(self):
        """Take the hooks away; categories are final."""
        torch.UntypedStorage.resize_ = self._resize
        for handle in [*self._handles, *(handle for _, handle in self._params.values() if handle)]:
            handle.remove()
        self._params.clear()
        for storage in list(self._known.values()):
            storage.counted = False  # what is freed from now on is no event
        self._known.clear()


def _is_full(cell):
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _row(kind, storage, when):
    return kind, kind, when, when, 0.0, 0, storage.size, 0.0, "", -1, -1, 0, (), (), storage.id, storage, "", {}
