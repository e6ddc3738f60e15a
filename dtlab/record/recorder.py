"""The recorder: one dispatch mode below every API turns what a rank does into events.

``aten`` operators come from the mode, communication from ``dtlab.ranks.calls`` (see ``communication``), storages from
``memory``. The mode is on only while a recording runs.
"""
import contextlib
import itertools
import sys
import time

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from dtlab.errors import ConfigError
from dtlab.ranks import calls
from dtlab.ranks.guard_facts import flat
from dtlab.ranks.guard_order import LIBRARY, USERS, owner
from dtlab.record import flops, pipelines
from dtlab.record.communication import Calls
from dtlab.record.memory import Memory

_CALLS = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem", "prim", "profiler")
_WRITE_ONLY = ("copy_", "zero_", "fill_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_")
_SPARSE_READS = ("embedding", "index", "index_select", "gather")  # read only what they return
_NO_BYTES = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "resize_", "set_")
_FORWARD, _BACKWARD, _OPTIMIZER = ({"name": name} for name in ("forward", "backward", "optimizer"))
_in_backward = torch._C._current_graph_task_id
_wait_tensor = torch.ops._c10d_functional.wait_tensor.default
_view, _call, _compute = "view", "call", "compute"

current = None  # the Recorder while one records


class _Operator:
    """What derives from an operator alone."""

    def __init__(self, func):
        name = func._schema.name.split("::")[1]
        self.name = str(func).rpartition(".")[0]
        arguments = func._schema.arguments
        written = [(i, a.name) for i, a in enumerate(arguments) if a.alias_info and a.alias_info.is_write]
        self.written = frozenset(place for pair in written for place in pair)  # positions and names
        self.flops = flops.formula(func)
        self.write_only = name in _WRITE_ONLY or "out" in self.written
        self.reads_what_it_returns = name in _SPARSE_READS
        self.has_bytes = name not in _NO_BYTES
        is_view = (func.is_view or name == "_unsafe_view") and not self.written
        self.hides_others = (func.namespace == "aten" and not func.is_view
                             and func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))
        self.kind = _call if func.namespace in _CALLS else _view if is_view else _compute


class Recorder(TorchDispatchMode):
    """Records one rank: ``with Recorder(...) as r: ...``, then ``r.finish()``.

    Args:
        roots: what the recorded function holds: its parameters, gradients and states count from the start.
        fake_mode: the FakeTensorMode of a dry recording; times are 0 then.
    """

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # the wrapper costs more than the recorder, and under a mode nothing is compiled

    def __init__(self, roots=(), fake_mode=None):
        super().__init__()
        self.rows, self.roots, self.fake_mode = [], roots, fake_mode
        self.memory = Memory(self.rows, self.now, fake_mode)
        self.calls = Calls(self)
        self.phase = {}  # what dtlab.phase said
        self.last_end = 0.0  # when the last operator or call ended
        self._operators = {}  # OpOverload -> _Operator
        self._wrappers = {}  # type -> whether it stands for other tensors (DTensor, AsyncCollectiveTensor)
        self._labels = {}  # file -> how it is called; in a tuple if it is a library's, "" if torch's or dtlab's own
        self._quiet = False
        self._began = None

    # begin and end

    def __enter__(self):
        self._began = time.perf_counter()
        with contextlib.ExitStack() as undo:  # what is interrupted in between leaves no hooks
            undo.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
            torch.backends.mha.set_fastpath_enabled(False)  # one operator for a whole layer would hide its products
            undo.callback(self.memory.stop)
            self.memory.look_around(self.roots)
            self.roots = ()
            self.memory.start()
            undo.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack))
            undo.callback(_observe, None, None)
            _observe(self.calls, self)
            self.last_end = self._began = time.perf_counter()
            super().__enter__()
            undo.push(super().__exit__)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *error):
        self._undo.__exit__(*error)

    def finish(self):
        """The events as tuples, in the order of ``Event``'s fields."""
        rows = [*self.memory.before, *self.rows]
        rows = [r if r[15] == "" else (*r[:15], r[15].category if r[0] == "alloc" else "", *r[16:]) for r in rows]
        self.rows.clear()
        self.memory.before.clear()
        return rows

    # events

    def now(self):
        """Seconds since the recording began; 0 in a dry one."""
        return 0.0 if self.fake_mode is not None else time.perf_counter() - self._began

    def add(self, kind, op, started, *, bytes=0, wire_bytes=0.0, call=("", "", -1, -1, 0), reads=(), writes=(),
            differentiable=False):
        """Append an event of communication, or a sleep, that began at ``started`` (perf_counter) and ends now."""
        _, group, seq, peer, tag = call
        end = self.now()
        start = min(end, max(0.0, started - self._began)) if self.fake_mode is None else 0.0
        self.last_end = time.perf_counter()
        self.rows.append((kind, op, start, end, 0.0, 0, bytes, wire_bytes, group, seq, peer, tag, reads, writes, -1, "",
                          self._where(sys._getframe(1)), self._phase(differentiable)))  # fmt: skip

    def _phase(self, differentiable):
        if self.phase:
            return self.phase
        if _in_backward() != -1:
            return _BACKWARD
        if self.memory.in_optimizer():
            return _OPTIMIZER
        return _FORWARD if differentiable else {}

    def _where(self, frame):
        """The nearest line of the reader's; else of the library that is at work."""
        library, label_of = "", self._labels.get
        while frame is not None:
            label = label_of(frame.f_code.co_filename)
            if label is None:
                label = self._label(frame.f_code.co_filename)
            if label:
                if type(label) is str:
                    return f"{label}, line {frame.f_lineno}"
                library = library or f"{label[0]}, line {frame.f_lineno}"
            frame = frame.f_back
        return library or "torch"

    def _label(self, filename):
        whose, label = owner(filename), calls.label_of(filename)
        self._labels[filename] = label if whose == USERS else (label,) if whose == LIBRARY else ""
        return self._labels[filename]

    # autograd

    def _pack(self, tensor):
        """Autograd saves a tensor. Its version is kept: with hooks, torch no longer finds in-place changes."""
        self.memory.label(tensor, "activations")
        if tensor.is_leaf:
            return tensor, tensor, tensor._version
        quiet, self._quiet = self._quiet, True
        detached = tensor.detach()  # the tensor itself would hold the graph that holds it
        self._quiet = quiet
        return detached, None, tensor._version

    @staticmethod
    def _unpack(packed):
        tensor, _, version = packed
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{tuple(tensor.shape)} is at version {tensor._version}; expected version {version} instead"
            )
        return tensor

    # operators

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if types and self._stand_for_others(types):
            self._meet_parameters(args, wrapped=True)
            return NotImplemented  # so that the local operators are seen
        operator = self._operators.get(func)
        if operator is None:
            operator = self._operators[func] = _Operator(func)
        if operator.hides_others and not self._quiet and torch.is_inference_mode_enabled():
            out = self._decomposed(func, args, kwargs or {})
            if out is not NotImplemented:
                return out
        if operator.kind is _compute and not self._quiet:
            return self._compute(func, operator, args, kwargs or {})
        if self.fake_mode is not None and func is _wait_tensor:
            self.calls.waited_for(args[0], 0.0)
            return args[0]  # a fake one would be a new tensor; a real one is the same
        out = func(*args, **kwargs) if kwargs else func(*args)
        if not self._quiet:
            if operator.kind is _view:
                self._meet_parameters(args[:1])
            else:
                for tensor in flat(out):
                    self.memory.of(tensor)
                if self.fake_mode is not None and func.namespace == "_c10d_functional":
                    self.calls.functional(func, args, out)
        return out

    def _decomposed(self, func, args, kwargs):
        """Run an operator that is made of others so that those are seen: in inference mode autograd does not do it."""
        TorchDispatchMode.__enter__(self)
        try:
            return func.decompose(*args, **kwargs)
        finally:
            TorchDispatchMode.__exit__(self, None, None, None)

    def _stand_for_others(self, types):
        for kind in types:
            wraps = self._wrappers.get(kind)
            if wraps is None:
                wraps = self._wrappers[kind] = hasattr(kind, "__tensor_flatten__") and not issubclass(kind, FakeTensor)
            if wraps:
                return True
        return False

    def _meet_parameters(self, tensors, wrapped=False):
        for tensor in tensors:
            if type(tensor) is not torch.Tensor and isinstance(tensor, torch.nn.Parameter):
                self._refuse_real_parameter(tensor)
                self.memory.meet_parameter(tensor, None if wrapped else self.memory.of(tensor))

    def _refuse_real_parameter(self, tensor):
        """In a dry recording a parameter that is not fake was captured, and would not be counted."""
        if self.fake_mode is not None and type(tensor) is torch.nn.Parameter:
            raise ConfigError(
                f"the function cannot be recorded dry: {self._where(sys._getframe(1))} uses a parameter of shape "
                f"{tuple(tensor.shape)} that it captured, with real memory: pass the model or make it inside"
            )

    def _compute(self, func, operator, args, kwargs):
        memory, written, in_flight = self.memory, operator.written, self.calls.in_flight
        reads, writes, sizes, changed, differentiable = [], [], 0, [], False
        for place, arg in itertools.chain(enumerate(args), kwargs.items()) if kwargs else enumerate(args):
            if isinstance(arg, torch.Tensor):
                arg = (arg,)
            elif type(arg) is not list and type(arg) is not tuple:
                continue
            is_written = place in written
            for tensor in arg:
                storage = memory.of(tensor) if isinstance(tensor, torch.Tensor) else None
                if storage is None:
                    self._refuse_real_parameter(tensor)
                    continue
                if type(tensor) is not torch.Tensor and isinstance(tensor, torch.nn.Parameter):
                    memory.meet_parameter(tensor, storage)
                if in_flight and storage.id in in_flight:
                    self.calls.touched(storage, tensor)
                size = min(tensor.nbytes, storage.size)
                if is_written:
                    writes.append(storage.id)
                    changed.append(tensor)
                    sizes += size
                if not is_written or not operator.write_only:
                    reads.append(storage.id)
                    sizes += size
                    if not is_written and (storage.category == "params" or tensor.requires_grad):
                        differentiable = True
        began, cpu = time.perf_counter(), time.thread_time()
        out = func(*args, **kwargs)
        cpu, ended = time.thread_time() - cpu, time.perf_counter()
        made = 0
        for tensor in flat(out):
            storage = memory.of(tensor)
            if storage is not None and storage.id not in writes:
                writes.append(storage.id)
                made += min(tensor.nbytes, storage.size)
                if differentiable and _in_backward() != -1 and torch.is_grad_enabled():
                    memory.label(tensor, "activations")  # a checkpoint computes again
        for tensor in changed:
            memory.resized(tensor.untyped_storage())
        self.last_end = ended
        if reads or writes:
            sizes = 0 if not operator.has_bytes else 2 * made if operator.reads_what_it_returns else sizes + made
            count = operator.flops(args, kwargs, out) if operator.flops else 0
            start, end = (began - self._began, ended - self._began) if self.fake_mode is None else (0.0, 0.0)
            self.rows.append(("compute", operator.name, start, end, cpu if end else 0.0, count, sizes, 0.0, "", -1, -1,
                              0, tuple(reads), tuple(writes), -1, "", self._where(sys._getframe(2)),
                              self._phase(differentiable)))  # fmt: skip
        return out


def _observe(observer, recorder):
    global current
    calls.observer, current = observer, recorder


def record(run, roots, fake_mode=None):
    """Call ``run()`` under a Recorder: ``(its value, the events as tuples, group id -> global ranks, when it began)``.

    ``when it began`` is perf_counter's, which on Linux is one clock for all processes of a machine.
    """
    with pipelines.name_chunks(phase), Recorder(roots, fake_mode) as recorder:
        value = run()
    groups = {group.id: group.ranks for group in recorder.calls.groups.values()}
    return value, recorder.finish(), groups, recorder._began


@contextlib.contextmanager
def quiet():
    """Record no operators inside."""
    recorder = current
    if recorder is None:
        yield
        return
    before, recorder._quiet = recorder._quiet, True
    try:
        yield
    finally:
        recorder._quiet = before


@contextlib.contextmanager
def phase(name, **labels):
    """Name what happens inside: ``with dtlab.phase("forward", stage=1, micro_batch=3): ...``.

    The timeline shows the name, and micro-batch and stage numbers in its boxes. Inside another phase the labels add up.
    Without one, operators are "forward" where a differentiable tensor is used, "backward" inside autograd,
    "optimizer" inside ``step()``. Does nothing while nothing is recorded.
    """
    recorder = current
    if recorder is None:
        yield
        return
    outer, started = recorder.phase, time.perf_counter()
    recorder.phase = {**outer, **labels, "name": name}
    try:
        yield
    finally:
        recorder.add("phase", name, started)
        recorder.phase = outer


def sleep(seconds):
    """``time.sleep``, recorded as an operation that takes time but no core; for layers that imitate work."""
    started = time.perf_counter()
    time.sleep(seconds)
    if current is not None:
        current.add("compute", "sleep", started, differentiable=True)


def tag(tensor, category):
    """Say what the storage of a tensor is, where the recorder cannot know: a flat buffer, an optimizer made by hand.

    Args:
        category: ``"params"``, ``"grads"``, ``"optimizer_states"``, ``"activations"`` or ``"other"``.

    Returns:
        The tensor. Does nothing while nothing is recorded.

    Raises:
        ConfigError: another category.
    """
    from dtlab.simulate.events import CATEGORIES

    if category not in CATEGORIES:
        raise ConfigError(f"category={category!r}: choose one of {', '.join(CATEGORIES)}")
    if current is not None:
        current.memory.label(tensor, category, fixed=True)
    return tensor
