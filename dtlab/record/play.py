"""In the process that plays ranks dry: the fake world of one rank, and what a function does in it."""
import contextlib
import functools
import io
import types

import torch
import torch.distributed as dist
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from dtlab.errors import ConfigError
from dtlab.ranks import calls
from dtlab.record import recorder

_READS_VALUES = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)
_NO_VALUES = (
    "cannot be recorded dry: it reads the value of a tensor ({error}), and fake tensors have none. Pass the value as an "
    "argument, leave .item(), printing and branches on values out, or record it live (ranks.record)"
)
_NOT_FAKE = (
    "cannot be recorded dry: {kind}: {error}. Fake tensors have no memory, and some modules in C++ (such as "
    "DistributedDataParallel's reducer) need it; record it live (ranks.record)"
)


class _Publisher(calls.Publisher):
    """Knows groups and peers; publishes nothing and waits for nobody."""

    def __init__(self):
        self._groups, self._by_tensor, self._works, self._last = {}, {}, {}, None
        self.guard = types.SimpleNamespace(on=False, buffers=None, catch_up=lambda index: None)

    def publish(self, *_, **__):
        return 0

    def remember(self, work, index):
        self._last = work

    def gate_work(self, work, timeout=None):
        """No wait."""

    def gate(self, index, work=None, timeout=None):
        """No wait."""


def play(run, roots, rank, world_size):
    """Call ``run(fakes)`` as ``rank`` of a fake world: ``(what it printed, *record's answer)``.

    ``roots`` are the function, its args and kwargs; ``run`` gets the same with fake tensors in them.
    """
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    _observe_fake_waits()
    _keep_meshes_real()
    if dist.is_initialized():
        calls.current = None
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    calls.current = _Publisher()
    said = io.StringIO()
    function, args, kwargs = roots
    args, kwargs = tree_map(lambda x: fake_mode.from_tensor(x) if isinstance(x, torch.Tensor) else x, (args, kwargs))
    with fake_mode, contextlib.redirect_stdout(said):
        try:
            _, events, groups = recorder.record(lambda: run(args, kwargs), (function, args, kwargs), fake_mode)
        except _READS_VALUES as error:
            raise ConfigError(_NO_VALUES.format(error=error)) from error
        except (RuntimeError, NotImplementedError) as error:
            if "ake" not in str(error) and "data pointer" not in str(error) and "meta" not in str(error):
                raise
            raise ConfigError(_NOT_FAKE.format(kind=type(error).__name__, error=error)) from error
    return said.getvalue(), None, events, groups


def _observe_fake_waits():
    """``FakeWork`` has a ``wait`` of its own. Once a process."""
    work_type = torch._C._distributed_c10d.FakeWork
    wait = work_type.wait
    if hasattr(wait, "__wrapped__"):
        return

    @functools.wraps(wait)
    def waited(self, *args, **kwargs):
        done = wait(self, *args, **kwargs)
        if calls.observer is not None:
            calls.observer.waited(self, 0.0)
        return done

    work_type.wait = waited


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
        if isinstance(method, types.FunctionType) and (not name.startswith("__") or name in ("__init__", "__getitem__")):
            setattr(DeviceMesh, name, _without_modes(method))


def _without_modes(method):
    @functools.wraps(method)
    def real(self, *args, **kwargs):
        ranks = kwargs.get("_rank_map")
        with _disable_current_modes():
            if isinstance(ranks, fake_tensor.FakeTensor):  # init_device_mesh's own 0, 1, 2, ...
                kwargs["_rank_map"] = torch.arange(ranks.numel(), dtype=torch.int)
            return method(self, *args, **kwargs)

    return real


def _unrecorded(method):
    @functools.wraps(method)
    def quietly(self, *args, **kwargs):
        with recorder.quiet():
            return method(self, *args, **kwargs)

    return quietly
