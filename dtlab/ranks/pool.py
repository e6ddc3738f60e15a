"""``dtlab.launch``: live ranks that the notebook talks to."""
import contextlib
import os
import sys
import threading
import time
from multiprocessing import connection

from dtlab.errors import ConfigError, RankError
from dtlab.ranks import interrupts, notebook, parcels, report, wire
from dtlab.ranks.board import Board, rank_list
from dtlab.ranks.nursery import READY_WITHIN_S, nursery
from dtlab.ranks.relay import KEPT_CHARS
from dtlab.ranks.run import KILL_AFTER_S, KILL_COPY_AFTER_S, CellRun
from dtlab.ranks.settings import PREDEFINED, check_place, check_size, check_timeout, num_threads, rank_environ
from dtlab.ranks.zygote import kill_group
from dtlab.record.results import join

DEFAULT_TIMEOUT_S = 20
REGROUP_WITHIN_S = 30
_current = None  # the ranks of the last launch


def launch(world_size, *, device="auto", guard=True, timeout=DEFAULT_TIMEOUT_S, share_gpu=False):
    """Start live processes joined in one ``torch.distributed`` group; ranks of an earlier launch end.

    Args:
        world_size: number of ranks (count, >= 1). More ranks than cores is fine, they take turns.
        device: ``"auto"`` (NCCL where there is a GPU for each rank, else gloo on CPU), ``"cpu"`` or ``"cuda"``.
        guard: stop all ranks, with both lines, where gloo would give wrong numbers or wait for ever; False for timing.
        timeout: seconds without progress of any rank while some wait; slow work does not count. None: no limit.
        share_gpu: several ranks on one GPU, through gloo.

    Returns:
        Ranks: also a context manager that shuts them down at its end.

    Raises:
        ConfigError: an argument that cannot work, or more ranks than memory holds.
        RankError: the processes could not be started.

    Example:
        >>> with launch(2) as ranks:                                                      # doctest: +SKIP
        ...     ranks.run(lambda: dist.get_rank())
        [0, 1]
    """
    global _current
    check_place()
    check_size(world_size, _current.size if current_ranks() else 0)
    check_timeout(timeout)
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device={device!r}: choose 'auto', 'cpu' or 'cuda'")
    if _current is not None:
        _current.shutdown()
    _current = Ranks(world_size, device, timeout, share_gpu, bool(guard))
    return _current


def current_ranks():
    """The ranks of the last ``launch``, or None if there are none."""
    return _current if _current is not None and _current.alive else None


class Ranks:
    """Live ranks. Made by ``launch``; ``run``, ``push``, ``pull`` and the ``%%ranks`` magic talk to them."""

    kept_chars = KEPT_CHARS  # of each rank's output in one cell
    is_for_once = False  # not repaired after a failed cell: shut down next

    def __init__(self, world_size, device, timeout, share_gpu, guard):
        self.size, self.timeout, self.guard = world_size, timeout, guard
        self.alive = False
        self.names = {}  # rank -> names of its variables
        self.lost_groups = False  # whether the last repair has ended groups of the reader's
        self.pids = {}
        self._lock = threading.RLock()
        self._cell_number = self._questions = 0
        self._channels, self._controls, self._raw = {}, {}, {}
        self._fds = []  # of the store and the board
        self._nursery = nursery()
        self._settings = self._choose_backend(device, share_gpu)
        try:
            self._new_board()
            self._start(range(world_size))
            self._await_joined(range(world_size))
        except BaseException:
            self._close()
            raise
        self.alive = True

    def _choose_backend(self, device, share_gpu):
        self._nursery.wait_ready()
        gpus = self._nursery.num_gpus
        if device == "auto":
            device = "cuda" if 0 < gpus >= self.size else "cpu"
        if device == "cuda" and (gpus == 0 or (gpus < self.size and not share_gpu)):
            cure = "device='cpu'"
            if gpus:
                cure = f"launch {gpus}, or share_gpu=True (several ranks on one GPU), or {cure}"
            raise ConfigError(f"{self.size} ranks on CUDA need {self.size} GPUs, and {gpus} are visible: {cure}")
        backend = "gloo" if device == "cpu" or share_gpu else "cpu:gloo,cuda:nccl"
        threads = num_threads(self.size)
        environ = {**os.environ, **rank_environ(threads)}
        return {"world_size": self.size, "device": device, "backend": backend, "threads": threads, "environ": environ}

    # processes

    def _new_board(self):
        self._close_board()
        self._fds = [wire.anonymous_file("dtlab-store"), Board.make_file(self.size)]
        self.board = Board(self._fds[1], self.size)

    def _close_board(self):
        while self._fds:
            os.close(self._fds.pop())

    def _start(self, ranks):
        fds = {}
        for rank in ranks:
            (cells, cells_there), (control, control_there) = wire.channel_pair(), wire.channel_pair()
            self._raw[rank], raw_there = os.pipe()
            os.set_blocking(self._raw[rank], False)
            self._channels[rank], self._controls[rank] = wire.Channel(cells), wire.Channel(control)
            fds[rank] = [cells_there.detach(), control_there.detach(), raw_there]
        settings = {**self._settings, "number": self._cell_number}
        try:
            self.pids.update(self._nursery.start(settings, {rank: [*there, *self._fds] for rank, there in fds.items()}))
        finally:
            for there in fds.values():
                for fd in there:
                    os.close(fd)

    def _await_joined(self, ranks):
        """Wait until ranks are in the group. If one cannot join, or ends, the others would wait for it for ever."""
        spawned = self._nursery.method == "spawn"  # each new process imports torch
        deadline = time.monotonic() + (READY_WITHIN_S if spawned else REGROUP_WITHIN_S)
        waiting = {self._channels[rank]: rank for rank in ranks}
        while waiting:
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._cannot_join(min(waiting.values()), "no answer")
            for channel in ready:
                if self._has_joined(waiting[channel]):
                    del waiting[channel]

    def _has_joined(self, rank):
        channel = self._channels[rank]
        for message, _ in channel.receive_ready():
            if message[0] != "done":
                continue
            _, number, status, value, _ = message
            if status != "ok":
                raise self._cannot_join(rank, value["message"])
            if number == self._cell_number:
                self.lost_groups |= parcels.unpack(value)[0]
                return True
        if channel.closed:
            raise self._cannot_join(rank, "its process has ended")
        return False

    def _cannot_join(self, rank, why):
        return RankError(f"rank {rank} of {self.size} did not join the group: {why}. Try `dtlab doctor`.", rank=rank)

    def _drop(self, rank):
        """Forget a process that has ended."""
        self._channels.pop(rank).close()
        self._controls.pop(rank).close()
        os.close(self._raw.pop(rank))
        self.names.pop(rank, None)

    def kill(self, ranks):
        """Kill the processes of ranks."""
        self._nursery.kill([self.pids[r] for r in ranks if r in self.pids])

    def gone(self):
        """Ranks whose process has ended."""
        exits = self._nursery.exits()
        closed = [r for r, channel in self._channels.items() if channel.has_ended()]
        return sorted({*closed, *(r for r, pid in self.pids.items() if pid in exits)})

    def where(self, rank):
        """``(place of the rank's main thread, is it importing, is it in torch's communication code)``."""
        self._questions += 1
        control, deadline = self._controls[rank], time.monotonic() + 0.3
        control.send("where", self._questions)
        while frame := control.receive(timeout=max(0.0, deadline - time.monotonic())):
            if frame[0][1] == self._questions:  # not a late answer to an earlier question
                return frame[0][2]
        return None, False, False

    def repair(self, dead, regroup):
        """After a failed cell: replace dead ranks and join a new group if calls are left hanging in the old one.

        Returns:
            list: the ranks that are new processes; all of them if those that were left could not join again.
        """
        if not self._nursery.alive:
            self._close()
        elif dead or regroup:
            try:
                self._regroup(dead)
            except RankError:
                dead = list(range(self.size))
                self._start_anew(dead)
        return dead

    def _start_anew(self, everybody):
        self.kill(everybody)
        try:
            self._regroup(everybody)
        except RankError:
            self._close()

    def _regroup(self, dead):
        self._new_board()
        self.lost_groups = False
        for rank in dead:
            self._drop(rank)
        self._cell_number += 1
        for channel in self._channels.values():
            channel.send("regroup", self._cell_number, fds=self._fds)
        self._start(dead)
        self._await_joined(range(self.size))

    # what the notebook calls

    def run(self, fn, *args, ranks=None, timeout=..., guard=None, **kwargs):
        """Call ``fn(*args, **kwargs)`` on ranks at the same time.

        The function may be a lambda, a closure or use names of the notebook: they travel by value. Names that the
        notebook does not have are those of the rank.

        Args:
            fn: any callable. On a rank ``rank``, ``world_size``, ``device``, ``dist`` and ``torch`` are there.
            ranks: on which ranks; all by default.
            timeout: seconds without progress while ranks wait; as in ``launch`` by default.
            guard: whether calls are compared; as in ``launch`` by default.

        Returns:
            list: what each rank returned, in rank order. Tensors are private copies on the CPU.

        Raises:
            RankError: a rank failed; HangError: ranks waited for a call that never came; GuardError: the guard saw a
                mistake, see ``dtlab.ranks.guard``.
            ConfigError: an argument, or a name that the function uses, cannot travel.
        """
        return self._call(fn, args, kwargs, ranks, timeout, self._context(guard=guard))

    def record(self, fn, *args, ranks=None, timeout=..., guard=None, tokens=None, model_flops=None, **kwargs):
        """Call ``fn`` as ``run`` does, and record what the ranks do.

        Args:
            tokens: tokens that the function processes on all ranks together; for tokens/s.
            model_flops: FLOPs that the model needs for them, by formula; for MFU.

        Returns:
            Recording: ``results`` is what ``run`` returns; ``communication()``, ``memory()``, ``flops()``,
            ``timeline()``, ``save(path)``. What a recording cannot see stands in ``dtlab.record``.
        """
        answers = self._call(fn, args, kwargs, ranks, timeout, self._context(record=True, guard=guard))
        return join(answers, self._chosen(ranks), self.size, tokens=tokens, model_flops=model_flops)

    def run_cell(self, code, label, ranks=None, timeout=..., record=False):
        """Run the text of a cell on ranks, what the ``%%ranks`` magic does; a Recording if it is to be recorded."""
        answers = self._talk("cell", (self._context(record=record), code, label), ranks, timeout)
        return join(answers, self._chosen(ranks), self.size) if record else None

    def push(self, *nameless, **values):
        """Set variables on every rank; each rank gets its own copy."""
        if nameless or not values:
            raise ConfigError("push takes names and values: ranks.push(x=5)")
        if own := [name for name in values if name in PREDEFINED]:
            raise ConfigError(f"{', '.join(own)}: the ranks' own names; choose another, for example my_{own[0]}")
        parcel = parcels.pack(values)
        self._talk("push", (parcel,), None, None, parcel)

    def pull(self, name, ranks=None):
        """Values of a variable, in rank order."""
        return self._talk("pull", (name,), ranks, None)

    def shutdown(self):
        """End the processes. Again does nothing."""
        with self._lock:
            self._close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.shutdown()

    def __len__(self):
        return self.size

    def __repr__(self):
        state = "alive" if self.alive else "shut down"
        return f"Ranks({self.size}, {self._settings['device']}, {state})"

    def __reduce__(self):
        raise ConfigError("ranks live in the notebook: code on a rank uses rank, world_size and dist instead")

    # inside

    def _require_alive(self):
        if not self.alive:
            raise ConfigError("these ranks were shut down (by shutdown() or a later launch): run the launch cell again")
        if not self._nursery.alive:
            self._close()
            raise ConfigError("the ranks' processes have ended: run the launch cell again")
        dead = self.gone()
        if dead:
            pid = self.pids[dead[0]]
            ours = pid in self._nursery.killed
            how = "ended by dtlab" if ours else report.died_text(self._nursery.exits().get(pid))
            kept = report.kept_text(self.size, self.repair(dead, regroup=True), True, self.lost_groups)
            if not self.alive:
                raise ConfigError("all ranks have ended: run the launch cell again")
            print(f"{rank_list(dead)} had ended since the last cell ({how}). {kept}", file=sys.stderr)

    def _chosen(self, ranks):
        if ranks is None:
            return list(range(self.size))
        chosen = [ranks] if isinstance(ranks, int) else sorted(set(ranks))
        wrong = [r for r in chosen if isinstance(r, bool) or not isinstance(r, int) or not 0 <= r < self.size]
        if wrong or not chosen:
            raise ConfigError(f"ranks={ranks!r}: there are {rank_list(range(self.size))}")
        return chosen

    def _call(self, fn, args, kwargs, ranks, timeout, context):
        if not callable(fn):
            raise ConfigError(f"run takes a function, not {type(fn).__name__}: ranks.run(fn, *args)")
        parcel = parcels.pack((fn, args, kwargs))
        content = (context, parcel, notebook.cell_sources(parcel.filenames))
        return self._talk("call", content, ranks, timeout, parcel)

    def _talk(self, kind, content, ranks, timeout, parcel=None):
        """Send one message to ranks and collect their answers; the parcel in it is closed."""
        with self._exclusively(parcel) as held:
            chosen = self._chosen(ranks)
            timeout = self.timeout if timeout is ... else timeout
            check_timeout(timeout)
            self._require_alive()
            self._cell_number += 1
            self.board.clear_poison()
            for rank in chosen:
                fds = parcel.fds if parcel else ()
                self._channels[rank].send(kind, self._cell_number, chosen, *content, fds=fds)
            patience = KILL_COPY_AFTER_S if kind in ("push", "pull") else KILL_AFTER_S
            return CellRun(self, chosen, self._cell_number, timeout, held, patience).finish()

    @contextlib.contextmanager
    def _exclusively(self, parcel=None):
        """One cell at a time, with interrupts held; closes the parcel."""
        try:
            if not self._lock.acquire(blocking=False):
                raise ConfigError("the ranks are busy with another cell: wait for it to end, or interrupt it")
            try:
                with interrupts.held() as held:
                    yield held
            finally:
                self._lock.release()
        finally:
            if parcel:
                parcel.close()

    def _context(self, record=False, guard=None):
        guard = self.guard if guard is None else bool(guard)
        return {"path": list(sys.path), "cwd": os.getcwd(), "record": record, "guard": guard}

    def _close(self):
        self.alive = False
        if not self._nursery.alive and self._nursery.owner == os.getpid():
            for pid in self.pids.values():
                kill_group(pid)  # what ranks have started; the zygote, who would do it, is gone
        if self._nursery.alive and self._channels:
            self.kill(self._channels)
            for rank in list(self._channels):
                if rank in self.pids:
                    self._nursery.exit_status(self.pids[rank], wait_s=3)
        for rank in list(self._channels):
            self._drop(rank)
        self._close_board()
