"""In the process that plays ranks dry: the fake world of one rank, and what a function does in it."""
import contextlib
import functools
import io
import itertools
import types

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from dtlab.errors import ConfigError
from dtlab.ranks import calls, cells
from dtlab.ranks.guard_buffers import Buffers
from dtlab.record import recorder

_READS_VALUES = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)
_NO_VALUES = (
    "{name} cannot be recorded dry: {place} reads the value of a tensor ({error}), and fake tensors have none. Pass "
    "the value as an argument, leave out .item(), printing and branches on values; or record it live: ranks.record"
)
_NOT_FAKE = (
    "{name} cannot be recorded dry: {place} needs the memory of a tensor, and fake tensors have none ({error}). C++ "
    "modules such as DistributedDataParallel do; record it live: ranks.record"
)
_NOT_PLAYED = (
    "{name} cannot be recorded dry: {place} asks what the fake process group does not know ({error}). Name the source "
    "of a receive and leave out monitored_barrier and the store; or record it live: ranks.record"
)
_OF_VALUES = (".numpy() is not supported", "FakeTensor.__format__")  # signs in errors of torch
_OF_THE_GROUP = ("sourceRank()", "monitored_barrier is only", "torch/csrc/distributed")
_OF_MEMORY = ("data is not allocated", "data pointer", "FakeTensor", "fake tensor", "meta tensor")
_TEXTS = {_OF_VALUES: _NO_VALUES, _OF_THE_GROUP: _NOT_PLAYED, _OF_MEMORY: _NOT_FAKE}


class _Publisher(calls.Publisher):
    """Knows groups, peers and handles; publishes nothing and waits for nobody."""

    def __init__(self):
        self._groups, self._by_tensor, self._works, self._last = {}, {}, {}, None
        self._indices = itertools.count()
        self.guard = types.SimpleNamespace(on=False, buffers=Buffers(None))

    def publish(self, *_, **__):
        return next(self._indices)

    def gate_work(self, work, timeout=None):
        """No wait; the index of the handle's call."""
        return self._works.pop(id(work), (None, None))[1]

    def gate(self, index, work=None, timeout=None):
        """No wait."""

    def gate_barrier(self, index, timeout_ms):
        """No wait."""

    def in_torch(self, index):
        """No wait."""
        return contextlib.nullcontext()

    def close(self, index):
        """Nobody looks."""

    def _gone(self, key, *_):
        self._works.pop(key, None)


def play(run, roots, rank, world_size):
    """Call ``run(fakes)`` as ``rank`` of a fake world: ``(what it printed, *record's answer)``.

    ``roots`` are the function, its args and kwargs; ``run`` gets the same with fake tensors in them.
    """
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    if not hasattr(FakeWork.wait, "__wrapped__"):  # it has a wait of its own
        calls.gate_wait(FakeWork)
    _keep_meshes_real()
    if dist.is_initialized():
        calls.current = None
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    calls.current = _Publisher()
    said = io.StringIO()
    function, args, kwargs = roots
    args, kwargs = tree_map(lambda value: _fake(value, fake_mode), (args, kwargs))
    with fake_mode, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            _, *answer = recorder.record(lambda: run(args, kwargs), (function, args, kwargs), fake_mode)
        except _READS_VALUES as error:
            raise _explained(_NO_VALUES, error, function, str(error)) from error
        except (RuntimeError, TypeError, ValueError) as error:
            text = next((text for signs, text in _TEXTS.items() if any(sign in str(error) for sign in signs)), None)
            if text is None or isinstance(error, ConfigError):
                raise
            raise _explained(text, error, function, f"{type(error).__name__}: {error}".splitlines()[0]) from error
    return said.getvalue(), None, *answer


def _fake(value, fake_mode):
    """A fake tensor for a tensor; a module with fake parameters and buffers for a module; all else as it is."""
    if isinstance(value, torch.nn.Module):
        for module in value.modules():
            for tensors in (module._parameters, module._buffers):
                tensors.update((name, _fake(tensor, fake_mode)) for name, tensor in tensors.items())
    return fake_mode.from_tensor(value) if isinstance(value, torch.Tensor) else value


def _explained(text, error, function, what):
    frames = cells.describe_error(error)["frames"]
    place = f"{frames[0][0]}, line {frames[0][1]}" if frames else "it"
    for label, line, *_ in frames[:-1]:
        place = f"{label}, line {line}"
    return ConfigError(text.format(name=_name(function), place=place, error=what))


def _name(function):
    while isinstance(function, functools.partial):
        function = function.func
    return f"{getattr(function, '__name__', type(function).__name__)}()"


def _keep_meshes_real():
    """A DeviceMesh computes with a small tensor of ranks and reads it: fake tensors are off in there. Once a process.

    DTensor finds out shapes by running operators on fake tensors; those are no part of the program.
    """
    if hasattr(DeviceMesh.__init__, "__wrapped__"):
        return
    for name in ("_propagate_tensor_meta", "_propagate_tensor_meta_non_cached"):
        method = getattr(ShardingPropagator, name, None)
        if method is not None:
            setattr(ShardingPropagator, name, _unrecorded(method))
    for name, method in list(vars(DeviceMesh).items()):
        is_ours = not name.startswith("__") or name in ("__init__", "__getitem__")
        if is_ours and isinstance(method, types.FunctionType):
            setattr(DeviceMesh, name, _without_modes(method))


def _without_modes(method):
    @functools.wraps(method)
    def real(self, *args, **kwargs):
        with _disable_current_modes():
            args, kwargs = tree_map(_real_ranks, (args, kwargs))
            return method(self, *args, **kwargs)

    return real


def _real_ranks(value):
    """The tensor 0, 1, 2, ... that init_device_mesh has made, for a fake one."""
    if not isinstance(value, fake_tensor.FakeTensor):
        return value
    return torch.arange(value.numel(), dtype=torch.int).view(value.shape)


def _unrecorded(method):
    @functools.wraps(method)
    def quietly(self, *args, **kwargs):
        with recorder.quiet():
            return method(self, *args, **kwargs)

    return quietly
