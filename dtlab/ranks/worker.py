"""The process of one rank: joins the group, then runs what the notebook sends until the notebook is gone.

The main thread runs cells. A second thread takes out-of-band commands while a cell runs: stop it (a signal that raises
``Stopped``), shut the sockets that gloo waits on, say where the main thread is.
"""
import contextlib
import ctypes
import datetime
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback

import torch
import torch.distributed as dist

import dtlab
from dtlab.errors import ConfigError
from dtlab.ranks import calls, cells, console, parcels
from dtlab.ranks.board import Board
from dtlab.ranks.guard_order import USERS, owner
from dtlab.ranks.leaving import leave_groups, shut_sockets
from dtlab.ranks.store import MemoryStore
from dtlab.ranks.wire import Channel
from dtlab.ranks.zygote import die_with_parent
from dtlab.record.names import global_names

_STOP_SIGNAL = signal.SIGUSR2
_ENGINE_FILES = tuple(f"/dtlab/{name}.py" for name in (
    "ranks/wire", "ranks/board", "ranks/calls", "ranks/console", "ranks/worker", "ranks/parcels",
    "record/memory"))  # fmt: skip  (what is raised in a weak reference's callback, Python prints and forgets)
_WAITING_FILES = ("/torch/autograd/", "/torch/distributed/", "/torch/nn/parallel/", "/dtlab/ranks/calls.py")
_NEVER = datetime.timedelta(days=1)  # dtlab's own limit decides, and says who waits for whom
_STOP_AGAIN_S = 0.5  # code that swallowed the first stop gets another


class Worker:
    """One rank."""

    def __init__(self, settings, rank, fds):
        self.settings, self.rank, self.world_size = settings, rank, settings["world_size"]
        self.cells_channel, self.control_channel = (Channel(socket.socket(fileno=fd)) for fd in fds[:2])
        self.store_fd, self.board_fd = fds[3:5]
        self.running = False  # a cell runs, so a stop may be raised
        self.must_stop = False
        self.stop_is_due = False  # it came at a moment when nothing may be raised
        self.cell_number = 0
        self.number_lock = threading.Lock()  # a late order for an earlier cell must not touch the next one
        self.send_lock = threading.Lock()
        self.namespace = cells.Namespace()
        self.known_names = []

    # start

    def start(self):
        """Join the group and say so."""
        self._streams = {name: console.Stream(name, self.send_output) for name in ("stdout", "stderr")}
        sys.stdout, sys.stderr = self._streams["stdout"], self._streams["stderr"]
        os.register_at_fork(after_in_child=_forget_rank)
        signal.signal(_STOP_SIGNAL, self._raise_stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the notebook decides what an interrupt means
        torch.set_num_threads(self.settings["threads"])
        self.device = self._device()
        self.join_group()
        self.namespace.predefine(
            rank=self.rank, world_size=self.world_size, device=self.device,
            dist=dist, torch=torch, dtlab=dtlab, display=self.display,
        )
        threading.Thread(target=self._control, daemon=True, name="dtlab-control").start()
        self._finish(self.settings["number"], *self._attempt(lambda: False))  # no group of the reader's was lost

    def _device(self):
        if self.settings["device"] != "cuda":
            return torch.device("cpu")
        local = self.rank % torch.cuda.device_count()
        torch.cuda.set_device(local)
        return torch.device("cuda", local)

    def join_group(self):
        """Make the process group and the publisher on the current store and board."""
        self.store = MemoryStore(self.store_fd)
        dist.init_process_group(
            self.settings["backend"], store=self.store, rank=self.rank, world_size=self.world_size, timeout=_NEVER
        )
        self.board = Board(self.board_fd, self.world_size, self.rank)
        self.publisher = calls.current = calls.Publisher(self.board, present=range(self.world_size))

    # talk

    def reply(self, *message, fds=()):
        with self.send_lock:
            self.cells_channel.send(*message, fds=fds)

    def send_output(self, kind, data):
        self.reply("output", kind, data)
        if self.stop_is_due and self.running and threading.current_thread() is threading.main_thread():
            self.stop_is_due = False
            self.publisher.stop()

    def display(self, *values):
        """Show values in the notebook, labelled with this rank."""
        for value in values:
            cells.show_value(value, self.send_output)

    # commands

    def serve(self):
        """Take commands until the notebook's end closes."""
        while True:
            frame = self.cells_channel.receive()
            if frame is None:
                end_with_children()
            message, fds = frame
            getattr(self, "on_" + message[0])(*message[1:], fds=fds)

    def on_cell(self, number, present, context, code, label, fds):
        """Run the text of a cell."""
        run = lambda: cells.run_code(code, label, self.namespace, self.display)
        self._run(number, present, context, lambda: self._maybe_record(context, run, code))

    def on_call(self, number, present, context, parcel, files, fds):
        """Call a function that came from the notebook; its value goes back."""

        def call():
            for filename, (label, source) in files.items():
                cells.remember_source(filename, label, source)
            parcel.fds = fds
            (function, args, kwargs), all_globals = parcels.unpack(parcel)
            if "dry" in context:
                return self._play(context["dry"], function, args, kwargs, all_globals)
            run = lambda: cells.run_function(function, args, kwargs, all_globals, self.namespace)
            return self._maybe_record(context, run, function, args, kwargs)

        self._run(number, present, context, call)

    def _maybe_record(self, context, run, code, *held):
        if not context["record"]:
            return run()
        from dtlab.record.recorder import record

        used = [self.namespace.vars[name] for name in global_names(code) if name in self.namespace.vars]
        return record(run, [code, *held, *used])

    def _play(self, played, function, args, kwargs, all_globals):
        from dtlab.record.play import play

        self.namespace.predefine(rank=played[0], world_size=played[1])
        run = lambda args, kwargs: cells.run_function(function, args, kwargs, all_globals, self.namespace)
        return play(run, (function, args, kwargs), *played)

    def on_push(self, number, present, parcel, fds):
        """Put values into the namespace."""
        parcel.fds = fds
        self._answer(number, lambda: self.namespace.push(parcels.unpack(parcel)[0]))

    def on_pull(self, number, present, name, fds):
        """Send a variable's value back."""

        def value():
            if name not in self.namespace.vars:
                names = ", ".join(self.namespace.names()) or "none yet"
                raise ConfigError(f"the ranks have no variable {name!r}; their variables: {names}")
            return self.namespace.vars[name]

        self._answer(number, value)

    def on_regroup(self, number, fds):
        """Leave the old group, with whatever hangs in it, and join a new one; variables stay."""
        self.publisher.guard.buffers.forget()
        had_groups = holds_groups(self.namespace.vars.values())
        calls.current = None
        self._number(number)
        shut_sockets()
        leave_groups()
        self.store.close()
        os.close(self.board_fd)
        self.store_fd, self.board_fd = fds
        self._finish(number, *self._attempt(lambda: self.join_group() or had_groups))

    def _run(self, number, present, context, action):
        def whole():
            value = action()
            console.show_open_figures(self.send_output)
            if not dist.is_initialized():
                raise ConfigError("this cell has ended the ranks' process group: leave destroy_process_group() out")
            for call in self.publisher.guard.finish(True):
                print(f"not awaited yet: {call}", file=sys.stderr)
            return value

        self._enter(number, present, context)
        grad_is_on = torch.is_grad_enabled()
        status, answer = self._attempt(whole)
        if status != "ok":
            self.publisher.guard.finish(False)
            torch.set_grad_enabled(grad_is_on)  # a stop may have come while no_grad() was being left
        for stream in self._streams.values():
            stream.finish()
        ctypes.CDLL(None).fflush(None)  # what C code has printed
        self._finish(number, status, answer)

    def _attempt(self, action):
        """``("ok", parcel of its value)``, or ``"error"`` or ``"stopped"`` with a description."""
        try:
            try:
                self.running = True
                return "ok", parcels.pack(action())
            finally:
                self.running = False
        except BaseException as error:  # noqa: B036  (SystemExit and Stopped end a cell, not the rank)
            return ("stopped" if isinstance(error, calls.Stopped) else "error"), cells.describe_error(error)

    def _answer(self, number, action):
        self._number(number)
        self._finish(number, *self._attempt(action))

    def _number(self, number):
        """Begin a command: orders to stop an earlier one do not touch it."""
        with self.number_lock:
            self.must_stop = self.stop_is_due = False
            self.publisher.stopped_at = 0.0
            self.cell_number = number

    def _enter(self, number, present, context):
        self._number(number)
        self.publisher.present = present
        self.publisher.guard.enter(context["guard"])
        sys.path[:] = context["path"]
        with contextlib.suppress(OSError):
            os.chdir(context["cwd"])
        self.board.pump()
        if changed := self.namespace.put_back():
            print(f"{', '.join(changed)}: the ranks' own names, put back as they were", file=sys.stderr)

    def _finish(self, number, status, answer):
        names = self.namespace.names()
        changed = None if names == self.known_names else names
        self.known_names = names
        fds = answer.fds if status == "ok" else ()
        self.reply("done", number, status, answer, changed, fds=fds)
        for fd in fds:
            os.close(fd)

    # out of band

    def _control(self):
        while True:
            frame = self.control_channel.receive(timeout=0.05 if self.must_stop else None)
            if frame is None:
                if self.control_channel.closed:
                    end_with_children()  # the notebook is gone
            elif frame[0][0] in ("stop", "sockets"):
                self._obey(*frame[0])
            elif frame[0][0] == "where":
                self.control_channel.send("where", frame[0][1], where_is_main_thread())
            if self.must_stop and self.running:
                if time.monotonic() - self.publisher.stopped_at > _STOP_AGAIN_S:
                    signal.pthread_kill(threading.main_thread().ident, _STOP_SIGNAL)

    def _obey(self, order, number):
        with self.number_lock:
            if number == self.cell_number and order == "stop":
                self.must_stop = True
            elif number == self.cell_number:
                shut_sockets()

    def _raise_stop(self, _signal, frame):
        """Raise ``Stopped`` in the cell, but not where it would break something; there it is raised a little later."""
        if not self.running or not self.must_stop or is_importing(frame):
            return
        self.stop_is_due = is_in_engine(frame)
        if not self.stop_is_due:
            self.publisher.stop()


def is_in_engine(frame):
    """Whether dtlab's own code is at work, of which half would break the rank or its recording: a message, a call."""
    for code in (f.f_code for f, _ in traceback.walk_stack(frame)):
        is_engine = code.co_filename.endswith(_ENGINE_FILES)
        if is_engine or code is cells.run_function.__code__ or owner(code.co_filename) == USERS:
            return is_engine
    return False


def is_importing(frame):
    """Whether a frame or one of its callers is Python's import machinery, which a stop would leave half done."""
    return any(f.f_code.co_filename.startswith("<frozen importlib") for f, _ in traceback.walk_stack(frame))


def where_is_main_thread():
    """``(cell [3], line 4, importing, in communication code of torch)`` of the main thread, from another thread."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    stack = [(f.f_code.co_filename, line) for f, line in traceback.walk_stack(frame)]
    places = [f"{calls.label_of(filename)}, line {line}" for filename, line in stack if owner(filename) == USERS]
    communicates = any(part in stack[0][0] for part in _WAITING_FILES)
    return next(iter(places), None), is_importing(frame), communicates


def holds_groups(values):
    """Whether a reader has made process groups, or keeps modules that hold one; they end with the group."""
    modules = (torch.nn.parallel.DistributedDataParallel, torch.distributed.fsdp.FSDPModule)
    return len(dist.distributed_c10d._world.pg_map) > 1 or any(isinstance(v, modules) for v in values)


def end_with_children():
    """End this rank and the processes it has started."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _forget_rank():
    """In a process forked by the rank (DataLoader): it is not a rank."""
    calls.current = calls.observer = None
    signal.signal(_STOP_SIGNAL, signal.SIG_DFL)


_worker = None


def main(settings, rank, fds):
    """Become a rank; never returns."""
    global _worker
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)  # its own process group: the kernel's interrupts do not reach it, its children end with it
    die_with_parent(signal.SIGKILL)
    os.environ.update(settings["environ"])
    faulthandler.enable(all_threads=False)  # a crash in C++ prints its Python line
    os.dup2(fds[2], 1)
    os.dup2(fds[2], 2)
    os.close(fds[2])
    for fd in (*fds[:2], *fds[3:]):
        os.set_inheritable(fd, False)  # not for programs that the reader's code starts
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    sys.stdin = open(0, closefd=False)
    _worker = Worker(settings, rank, fds)
    try:
        _worker.start()
    except Exception as error:
        _worker.reply("done", 0, "error", cells.describe_error(error), None)
        os._exit(1)
    _worker.serve()


def from_shell():
    """Start as a program (where fork is not safe): settings, rank and descriptors stand in the arguments."""
    import json

    from dtlab.ranks import zygote

    settings, rank, fds = json.loads(sys.argv[2])
    zygote.preload()
    main(settings, rank, fds)
