"""On a rank: publish every communication call on the board, and wait in Python instead of in C++.

``install`` (once, in the zygote) puts a Python kernel under every ``c10d`` operator at the BackendSelect key. That
key is always active, so calls are seen from ``dist.*``, functional collectives, DDP's reducer, FSDP2 and user threads,
with and without autograd, at no cost to other operators. ``Work.wait`` is replaced by a gate: it polls until all
members have published the matching call, then lets torch wait. So nobody enters C++ behind a call that never comes,
signals interrupt a wait at once, and the board always knows who waits for whom.

Not seen: a wait that C++ makes by itself (DDP's reducer at the end of backward); the call it waits for is published.
"""
import contextlib
import datetime
import functools
import threading
import time
import weakref
import zlib

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from dtlab.errors import ConfigError
from dtlab.ranks import guard_buffers
from dtlab.ranks.board import ANY, CLOSED, COLLECTIVE, DROPPED, OPEN, RECV_ANY, SEND, Call, rank_list
from dtlab.ranks.guard import Guard
from dtlab.ranks.guard_facts import FAMILY, Operands, facts_without_tensors, flat
from dtlab.ranks.guard_order import here


class Stopped(BaseException):
    """Raised inside a rank's code to stop it. Not an Exception, so that ``except Exception`` does not swallow it.

    ``call`` is the text of the communication call it was stopped in, empty elsewhere.
    """

    def __init__(self, text, call=""):
        super().__init__(text)
        self.call = call


class Publisher:
    """Publishes the calls of one rank on one board and holds its waits. One for the life of a process group."""

    def __init__(self, board, present):
        self.board, self.rank = board, board.rank
        self.present = present  # ranks that take part in the running cell
        self.stopped_at = 0.0  # when something was last ended by the poison
        self._seqs = {}  # (channel, kind) -> next number
        self._groups = {}  # group name -> (global ranks, hash of name and ranks)
        self._works = {}  # id(Work) -> (weak reference to it, index of its call)
        self._done = {}  # the same of handles of messages that were awaited
        self._waited = -1  # index of the latest call that was awaited
        self._last = None  # the last Work: pybind keeps one Python object of it, but nobody holds that one yet
        self._by_tensor = {}  # storage address of a functional collective's result -> index of its call
        self.guard = Guard(board, label_of)
        self._lock = threading.Lock()  # threads of the reader's may call too

    def group_facts(self, group):
        """``(global ranks, key)`` of a process group; the key is equal on all its members."""
        name = group.group_name
        if name not in self._groups:
            ranks = tuple(dist.get_process_group_ranks(group))
            self._groups[name] = ranks, f"{name}|{ranks}"
        return self._groups[name]

    def publish(self, op, kind, members, key, peer=ANY, tag=0, what="", facts="", site=None):
        """Publish a call before torch gets it; its index. Refuses a call that an absent rank would have to join."""
        site = site or here()
        where = f"{label_of(site.where[0])}, line {site.where[1]}" if site.where[1] else site.where[0]
        wanted = members if kind == COLLECTIVE else (peer,) if peer != ANY else ()
        if absent := [r for r in wanted if r not in self.present]:
            raise ConfigError(
                f"{op} needs {rank_list(absent)}, not in this cell (it runs on {rank_list(self.present)}): "
                f"run the cell on {rank_list(members)}, or use a group of those that run"
            )
        if self.board.poisoned:
            self.stop(str(Call(-1, 0, 0, kind, peer, tag, op, where, what, members)))
        if kind == COLLECTIVE:  # unguarded, another collective on a peer is not the matching call
            channel = _number(key if self.guard.on else f"{key}|{FAMILY.get(op, op)}")
        else:
            ends = (self.rank, peer) if kind == SEND else (peer, self.rank)
            channel = _number(f"{key}|{ends[0]}>{ends[1]}|{tag}")
        with self._lock:
            seq = self._seqs.get((channel, kind), 0)
            self._seqs[channel, kind] = seq + 1
            fields = (channel, seq, kind, peer, tag, op, where, what, members, facts, site.label)
            index = self.board.publish(*fields)
        if self.guard.on and kind != RECV_ANY:
            self.guard.compare(Call(index, *fields), wanted)
        return index

    def remember(self, work, index, is_readers=False):
        """Tie a handle to its call, until it is waited for. ``is_readers``: it goes to the reader's code."""
        key = id(work)
        gone = functools.partial(self._gone, key, index, is_readers)
        self._works[key] = weakref.ref(work, gone), index  # a Work holds its tensors
        self._last = work
        if self.guard.on:
            self.guard.refuse_dropped()

    def _gone(self, key, index, is_readers, _):
        """A handle was thrown away. This may happen at any moment, so what follows from it is left for later."""
        self._works.pop(key, None)
        if is_readers and current is self and self.board.fate(self.rank, index) == OPEN:
            self.board.set_fate(index, DROPPED)
            if self.guard.on:
                self.guard.dropped.append((index, self._waited > index))

    def close(self, index):
        """A call is known to be done."""
        self._waited = max(self._waited, index)
        self.board.set_fate(index, CLOSED)
        self.guard.buffers.close(index)

    def gate_work(self, work, timeout=None):
        """Poll until the peers have published what this handle waits for; the index of its call."""
        key = id(work)
        _, index = self._works.pop(key, (None, None))
        self._last = None if work is self._last else self._last
        if index is None and key in self._done:
            index = self._done[key][1]
            self.guard.refuse_second_wait(index)
        elif index is not None:
            call = self.board.call(self.rank, index)
            if call is not None and call.kind != COLLECTIVE:
                self._done[key] = weakref.ref(work, lambda _: self._done.pop(key, None)), index
            self.gate(index, work, timeout)
        return index

    def gate(self, index, work=None, timeout=None):
        """Poll until all members of call ``index`` have published it, or the board is poisoned."""
        self.guard.refuse_dropped()
        call = self.board.call(self.rank, index)
        if call is not None and self._closed(call):
            self._poll(index, call, work if call.kind == COLLECTIVE else None, timeout)
        self.guard.catch_up(index)

    def gate_barrier(self, index, timeout_ms):
        """Poll as ``monitored_barrier`` does, which tells who has not come."""
        self.gate(index, timeout=datetime.timedelta(milliseconds=timeout_ms))
        if missing := self.board.missing(self.rank, self.board.call(self.rank, index)):
            text = f"{rank_list(missing)} did not arrive within {timeout_ms / 1000:g} s"
            raise RuntimeError(f"monitored_barrier: {text}")

    def _poll(self, index, call, work, timeout):
        deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
        self.board.set_waiting(index, alone=_is_alone())
        try:
            pause = 2e-5
            while self._closed(call) and not (work is not None and work.is_completed()):
                if self.board.poisoned:
                    self.stop(str(call))
                if deadline is not None and time.monotonic() > deadline:
                    return  # torch's own wait reports the time-out the caller asked for
                time.sleep(pause)
                pause = min(pause * 1.5, 2e-3)
        finally:
            self.board.set_waiting(None)

    @contextlib.contextmanager
    def in_torch(self, index):
        """Say that torch waits for call ``index``, which all members have made."""
        if index is not None:
            self.board.set_waiting(index, _is_alone(), in_torch=True)
        try:
            yield
        finally:
            if index is not None:
                self.board.set_waiting(None)

    def stop(self, call=""):
        """End what this rank does, with the board's text; ``call``: what it waits in."""
        self.stopped_at = time.monotonic()
        raise Stopped(self.board.poison_text(), call)

    def _closed(self, call):
        self.board.pump()
        return bool(self.board.missing(self.rank, call))


def _is_alone():
    """Whether no other thread of the reader's could make the call that this one waits for."""
    return not any(t is not threading.current_thread() and not t.daemon for t in threading.enumerate())


@functools.lru_cache(4096)
def _number(channel):
    """64 bits for the name of a channel, equal on all ranks."""
    return zlib.crc32(channel.encode()) | zlib.adler32(channel.encode()) << 32


_labels = {}  # file name -> how it is called in messages; cells are added as they arrive


def name_file(filename, label):
    """Call a file ``label`` in messages."""
    _labels[filename] = label


def label_of(filename):
    """How a file is called in messages: its cell, or the last part of its path."""
    return _labels.get(filename) or filename.rsplit("/", 1)[-1]


current = None  # the Publisher of this rank, None where there is none
observer = None  # while a recording runs, its record.communication.Calls: it is told of every call and wait


def install():
    """Put the publishing kernel under every c10d operator and the gate before ``Work.wait``. Once a process."""
    if hasattr(install, "library"):
        return
    install.library = library = torch.library.Library("c10d", "IMPL")
    after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    for full_name in torch._C._dispatch_get_all_op_names():
        namespace, name = full_name.split("::")
        if namespace == "c10d" and name != "check_for_nan":
            op = getattr(torch.ops.c10d, name).default
            library.impl(op, _kernel(op, after), "BackendSelect", with_keyset=True)
    functional = install.functional = torch.library.Library("_c10d_functional", "IMPL")
    wait = torch.ops._c10d_functional.wait_tensor.default
    functional.impl(wait, _wait_kernel(wait, after), "BackendSelect", with_keyset=True)
    work_type = distributed_c10d.Work
    gate_wait(work_type)
    for name in ("is_completed", "get_future"):
        setattr(work_type, name, _closing(getattr(work_type, name)))
    _gate_new_group()
    _explain_group_ranks()
    guard_buffers.install(lambda: current and current.guard.buffers)


def _kernel(op, after):
    operands, work_at = Operands(op), None if len(op._schema.returns) == 1 else -1
    public, kind = operands.public, operands.kind

    def kernel(keyset, *args):
        publisher = current
        if publisher is None:
            return op.redispatch(keyset & after, *args)
        started, group = time.perf_counter(), dist.ProcessGroup.unbox(args[operands.group])
        members, key = publisher.group_facts(group)
        peer = ANY if operands.peer is None else members[args[operands.peer]]
        tag = 0 if operands.tag is None else args[operands.tag]
        site, guard, facts = here(), publisher.guard, ""
        name = site.called if kind != COLLECTIVE and site.called else public
        if guard.on:
            facts, *tensors = guard.examine(operands, name, args, members, site)
        what = "" if operands.shown is None else _describe(flat(args[operands.shown]))
        index = publisher.publish(name, kind, members, key, peer, tag, what, facts, site)
        if public == "monitored_barrier":  # it has no handle, and waits with sends and receives of its own
            publisher.gate_barrier(index, args[3])
            return op.redispatch(keyset & after, *args)
        out = op.redispatch(keyset & after, *args)
        work = distributed_c10d.Work.unbox(out if work_at is None else out[work_at])
        is_readers = work is not None and site.direct and operands.gives_handle(args)
        if work is None:  # NCCL gives no handle for a synchronous call, so nothing else would wait in Python
            publisher.gate(index)
        else:
            publisher.remember(work, index, is_readers)
        if guard.on and is_readers:
            guard.buffers.open(work, index, *tensors)
        if observer is not None:
            observer.issued(started, index, operands, group, members, peer, tag, args)
        if kind == COLLECTIVE:
            _note_results(publisher, flat(args[0]), index)
        return out

    return kernel


def _note_results(publisher, tensors, index):
    """Functional collectives wait by tensor, not by handle: note which call fills which storage."""
    for tensor in tensors:
        if tensor.layout == torch.strided:
            publisher._by_tensor[tensor.untyped_storage()._cdata] = index
    while len(publisher._by_tensor) > 256:
        publisher._by_tensor.pop(next(iter(publisher._by_tensor)))


def _wait_kernel(op, after):
    def kernel(keyset, tensor):
        started, index, publisher = time.perf_counter(), None, current
        if publisher is not None:
            publisher._last = None
            index = publisher._by_tensor.pop(tensor.untyped_storage()._cdata, None)
            if index is not None:
                publisher.gate(index)
        with publisher.in_torch(index) if publisher is not None else contextlib.nullcontext():
            out = op.redispatch(keyset & after, tensor)
        _has_waited(publisher, index, started)
        return out

    return kernel


def _describe(tensors):
    """``4x3 float32`` of the tensor a call sends; the first of several, with the number of the rest."""
    if not tensors:
        return ""
    more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    shape = "x".join(map(str, tensors[0].shape)) or "scalar"
    return f"{shape} {str(tensors[0].dtype).removeprefix('torch.')}{more}"


def _has_waited(publisher, index, started):
    """A wait for a call has ended, which began at ``started``."""
    if index is not None:
        publisher.close(index)
        if observer is not None:
            observer.waited(index, started)


def gate_wait(work_type):
    """Put the gate before ``wait`` of a kind of handle."""
    original = work_type.wait

    @functools.wraps(original)
    def wait(self, *args, **kwargs):
        started, index, publisher = time.perf_counter(), None, current
        if publisher is not None:
            index = publisher.gate_work(self, (args[0] if args else kwargs.get("timeout")))
            publisher.guard.buffers.close(index)  # gloo's reduce_scatter copies its result while it waits
        with publisher.in_torch(index) if publisher is not None else contextlib.nullcontext():
            done = original(self, *args, **kwargs)
        _has_waited(publisher, index, started)
        return done

    work_type.wait = wait


def _closing(method):
    """A handle whose call is known to be done, or whose future is taken, need not be awaited."""

    @functools.wraps(method)
    def ask(self):
        answer = method(self)
        if answer and current is not None and (entry := current._works.get(id(self))):
            current.close(entry[1])
        return answer

    return ask


def _gate_new_group():
    """``new_group`` blocks inside torch's store; publish it on the default group and wait for the others here first."""
    original = distributed_c10d._new_group_with_tag

    @functools.wraps(original)
    def new_group_with_tag(ranks=None, *args, **kwargs):
        if current is not None:
            members, key = current.group_facts(dist.group.WORLD)
            name = ""
            if ranks is not None and kwargs.get("use_local_synchronization", False):  # only the members call it
                members = tuple(sorted({*ranks, current.rank}))
                key, name = f"{key}|{members}", str(len(distributed_c10d._world.pg_names))
            what = f"ranks={list(ranks)}" if ranks is not None else ""
            wanted = tuple(sorted(members if ranks is None else ranks))
            facts = facts_without_tensors("new_group", ranks=wanted, name=name)
            index = current.publish("new_group", COLLECTIVE, members, key, what=what, facts=facts)
            current.gate(index)
        return original(ranks, *args, **kwargs)

    distributed_c10d._new_group_with_tag = new_group_with_tag


def _explain_group_ranks():
    """torch says that a rank is not part of a group; add what to write."""
    original = distributed_c10d.get_group_rank

    @functools.wraps(original)
    def get_group_rank(group, global_rank):
        try:
            return original(group, global_rank)
        except ValueError as error:
            ranks = dist.get_process_group_ranks(group)
            cure = f"src and dst are global ranks, in this group one of {ranks}; {_cure(ranks, global_rank)}"
            raise ValueError(f"{error}. {cure}") from None

    distributed_c10d.get_group_rank = dist.get_group_rank = get_group_rank


def _cure(ranks, number):
    if isinstance(number, int) and 0 <= number < len(ranks):
        return f"its rank {number} is global rank {ranks[number]}"
    return "group_src and group_dst take ranks of the group"
