"""One cell on the ranks, seen from the notebook: collect, watch, stop what must be stopped, report."""
import codecs
import os
import selectors
import time

from dtlab.errors import RanksInterrupted
from dtlab.ranks import parcels, report
from dtlab.ranks.board import rank_list
from dtlab.ranks.monitor import Monitor
from dtlab.ranks.relay import Relay

TICK_S = 0.02
GRACE_S = 0.4  # after the first failure: time for the others to fail by themselves, or to come to the same wait
SOCKETS_AFTER_S = 0.3  # ladder: a signal at once, then gloo's sockets, then the process
KILL_AFTER_S = 1.5
KILL_COPY_AFTER_S = 10  # a push or pull is only a copy: it ends by itself


class CellRun:
    """Runs until every chosen rank has answered, died, or been stopped."""

    def __init__(self, pool, ranks, number, limit_s, interrupts, kill_after_s=KILL_AFTER_S):
        self.pool, self.ranks, self.number, self.interrupts = pool, list(ranks), number, interrupts
        self.kill_after_s = kill_after_s
        self.relay = Relay(self.ranks, pool.kept_chars)
        self.values, self.failures, self.stopped, self.dead = {}, {}, [], []
        self._decoders = {r: codecs.getincrementaldecoder("utf-8")("replace") for r in self.ranks}
        self.order = []  # ranks in the order in which they failed
        self.waits = {}  # rank -> where it was stopped: in a call, or at a line
        self.monitor = Monitor(pool.board, self.ranks, pool.pids, limit_s, lambda rank: pool.where(rank)[2])
        self.hang = None  # (stuck, look, limit_s) when a wait could not end
        self.verdict = None  # (text, is_hanging, rank) of a mistake that the guard has seen
        self.interrupted = False
        self._stop_at, self._steps, self._stuck_at = None, set(), None
        self._failed_at = None
        self._started = time.monotonic()

    @property
    def pending(self):
        done = (*self.values, *self.failures, *self.stopped, *self.dead)
        return [r for r in self.ranks if r not in done]

    def finish(self):
        """Wait for the ranks; their values in rank order, or the error that tells what happened."""
        with selectors.DefaultSelector() as selector:
            for rank in self.ranks:
                selector.register(self.pool._channels[rank], selectors.EVENT_READ, ("cells", rank))
                selector.register(self.pool._raw[rank], selectors.EVENT_READ, ("raw", rank))
            self._collect(selector)
        self._drain_raw()
        if not (self.failures or self.dead or self.stopped):
            self._find_open_calls()
        kept = self._repair()
        self.relay.finish()
        if self.interrupted:
            raise RanksInterrupted("\n".join(["the ranks were interrupted", *([kept] if kept else [])])) from None
        if self.failures or self.dead or self.hang or self.stopped:
            raise self._error(kept)
        return [self.values[r] for r in self.ranks]

    # collect

    def _collect(self, selector):
        while self.pending:
            for key, _ in selector.select(TICK_S):
                kind, rank = key.data
                if kind == "raw":
                    if not self._read_raw(rank):
                        selector.unregister(key.fileobj)
                elif not self._read_cells(rank):
                    selector.unregister(key.fileobj)
            self._find_dead()
            if self.interrupts.take():
                self._interrupt()
            self._watch()
            self.relay.tick()

    def _find_dead(self):
        """A rank may end while a process that it left behind keeps its socket open: its exit tells."""
        self.pool._nursery.poll()
        for rank in self.pending:
            if self.pool.pids[rank] in self.pool._nursery.exits:
                self._read_cells(rank)
                if rank in self.pending:
                    self._take_death(rank)

    def _interrupt(self):
        if self.interrupted:
            self.pool.kill(self.pending)  # asked twice
        self.interrupted = True
        self._begin_stop("interrupted")

    def _read_cells(self, rank):
        channel = self.pool._channels[rank]
        for message, fds in channel.receive_ready():
            if message[0] == "output":
                self.monitor.moved(rank)
                self.relay.add(rank, *message[1:])
            elif message[0] == "done" and message[1] == self.number:
                self._take_result(rank, message, fds)
        if channel.closed and rank in self.pending:
            self._take_death(rank)
        return not channel.closed

    def _take_result(self, rank, message, fds):
        _, _, status, value, names = message
        if names is not None:
            self.pool.names[rank] = names
        if status == "ok":
            value.fd = fds[0] if fds else None
            self._take_value(rank, value)
        elif status == "stopped":
            self.stopped.append(rank)
            place = f"at {value['place']}" if value["place"] else self.waits.get(rank)
            self.waits[rank] = f"in {value['call']}" if value["call"] else place
        else:
            self._take_failure(rank, value)

    def _take_value(self, rank, parcel):
        try:
            self.values[rank] = parcels.unpack(parcel)[0]
        except Exception as error:
            self._take_failure(rank, report.unreadable(error))

    def _take_failure(self, rank, failure):
        if failure["lost_peer"] and (call := self._last_call(rank)):
            self.waits.setdefault(rank, f"in {call}")
        if failure["lost_peer"] and self._stop_at is not None:
            self.stopped.append(rank)  # its sockets were shut to stop it
            return
        self.failures[rank] = failure
        self.order.append(rank)
        self._failed_at = self._failed_at or time.monotonic()

    def _take_death(self, rank):
        self.dead.append(rank)
        if self._stop_at is None:
            status = self.pool._nursery.exit_status(self.pool.pids[rank])
            calls = {r: self._last_call(r) for r in self.ranks} if status in (-6, -11) else {}  # C++ gave up
            self.failures[rank] = report.died_text(status) + report.last_calls_text(rank, calls)
            self.order.append(rank)
            self._failed_at = self._failed_at or time.monotonic()

    def _read_raw(self, rank):
        try:
            data = os.read(self.pool._raw[rank], 1 << 16)
        except BlockingIOError:
            return True
        if data:
            self.monitor.moved(rank)
            self.relay.add(rank, "stdout", self._decoders[rank].decode(data))
        return bool(data)

    def _drain_raw(self):
        for rank in self.ranks:
            for _ in range(4):  # more than a pipe holds; a process that the rank left behind may write for ever
                self._read_raw(rank)

    # watch

    def _watch(self):
        now = time.monotonic()
        if self._stop_at is not None:
            return self._climb(now - self._stop_at)
        self.verdict = None if self.failures else self.pool.board.given_verdict()
        if self.verdict:
            return self._begin_stop(self.verdict[0])
        ended, failed = list(self.values), [*self.failures, *self.dead]
        self.monitor.watch_progress(ended, failed)
        stuck = self.monitor.verdict(ended, failed) if now - self._started > TICK_S else {}
        self._stuck_at = (self._stuck_at or now) if stuck else None
        if stuck and self.monitor.look(ended, failed).running and now - self._stuck_at < GRACE_S:
            return  # the others may be on their way to the same call
        if stuck and self._failed_at is None:
            look = self.monitor.look(ended, failed)
            self._begin_hang(stuck, look, None)
        elif self._failed_at is not None and (stuck or now - self._failed_at > GRACE_S):
            self._begin_stop(f"stopped because {rank_list(self.order[:1])} failed")
        elif self.monitor.limit_reached(ended, failed) and not self._any_importing():
            waits, look = self._overdue(ended, failed)
            if waits:  # else somebody has gone on just now
                self._begin_hang(waits, look, self.monitor.limit_s)
        elif now - self._started > 2:
            self.relay.status = self._status(now)

    def _overdue(self, ended, failed):
        look = self.monitor.look(ended, failed)
        waits = dict(look.waits)
        for rank in look.running:
            if opened := self.monitor.open_calls(rank) or self.monitor.wait_in_torch(rank):
                waits[rank] = opened[0]
        return waits, look

    def _any_importing(self):
        for rank in self.pending:
            if self.pool.where(rank)[1]:
                self.monitor.moved(rank)
                return True
        return False

    def _status(self, now):
        look = self.monitor.look(list(self.values), [])
        waits = [(rank, wait) for rank, wait in sorted(look.waits.items()) if wait.missing]
        parts = [f"rank {rank} waits in {wait.call.op} for {rank_list(wait.missing)}" for rank, wait in waits]
        return f"running for {now - self._started:.0f} s" + (": " + "; ".join(parts[:4]) if parts else "")

    def _find_open_calls(self):
        """A cell that ended well but for a call that some member never made: the next cell would meet it."""
        stuck = {rank: waits[0] for rank in self.ranks if (waits := self.monitor.open_calls(rank))}
        if stuck and self.hang is None:
            self.hang, self.places = (stuck, self.monitor.look(self.ranks, []), None), {}

    # stop

    def _begin_hang(self, stuck, look, limit_s):
        self.hang = stuck, look, limit_s
        self.places = {r: self.pool.where(r)[0] for r in look.running}
        self._begin_stop("stopped: the wait could not end")

    def _begin_stop(self, text):
        if self._stop_at is not None:
            return
        for rank in self.pending:
            if opened := self.monitor.open_calls(rank):
                self.waits[rank] = f"in {opened[0].call}"
        look = self.monitor.look(list(self.values), [*self.failures, *self.dead])
        self.waits.update({r: f"in {w.call}" for r, w in look.waits.items()})
        self._stop_at = time.monotonic()
        self.pool.board.poison(text)
        for rank in self.pending:
            self.pool._controls[rank].send("stop", self.number, text)

    def _climb(self, seconds):
        """The ladder: after the signal, gloo's sockets; then the process."""
        for step, after in (("sockets", SOCKETS_AFTER_S), ("kill", self.kill_after_s)):
            if seconds > after and step not in self._steps:
                self._steps.add(step)
                if step == "sockets":
                    for rank in self.pending:
                        self.pool._controls[rank].send("sockets", self.number)
                else:
                    self.pool.kill(self.pending)

    # after

    def _repair(self):
        """Make the ranks usable again; a sentence on what that cost, empty if nothing."""
        if not (self.failures or self.dead or self.stopped or self.interrupted or self.hang):
            return ""
        if self.pool.is_for_once:
            for rank in self.dead:
                self.pool._drop(rank)
            return ""
        is_hanging = self.verdict is not None and self.verdict[1]
        ended = any(not isinstance(f, str) and f["group_ended"] for f in self.failures.values())
        regroup = "sockets" in self._steps or is_hanging or ended or not is_settled(self.pool.board)
        dead = self.pool.repair(sorted({*self.dead, *self.pool.gone()}), regroup)
        if not self.pool.alive:
            return "All ranks have ended: run the launch cell again."
        return report.kept_text(self.pool.size, dead, regroup, self.pool.lost_groups)

    def _error(self, kept):
        if self.verdict:
            return report.guarded(self.verdict, kept)
        if self.hang and not self.failures:
            stuck, look, limit_s = self.hang
            return report.hang(stuck, look, self._last_calls(look), self.places, kept, limit_s)
        if not self.order:
            return report.failure(self.pool.size, {self.dead[0]: "stopped"}, self.dead[0], self.stopped, {}, kept)
        root = self._root()
        stopped = sorted({*self.stopped, *(r for r in self.dead if r not in self.failures)})
        victims = [r for r, f in self.failures.items() if r != root and not isinstance(f, str) and f["lost_peer"]]
        failures = {r: f for r, f in self.failures.items() if r not in victims}
        return report.failure(
            self.pool.size, failures, root, sorted([*stopped, *victims]), self.waits, kept, self._hint(failures[root])
        )

    def _root(self):
        """The rank that failed first; one that only lost its peer is not the cause."""
        causes = [r for r in self.order if isinstance(self.failures[r], str) or not self.failures[r]["lost_peer"]]
        died = [r for r in causes if isinstance(self.failures[r], str)]
        return (died or causes or self.order)[0]

    def _hint(self, failure):
        from dtlab.ranks.notebook import missing_name_hint

        return "" if isinstance(failure, str) or not failure["name"] else missing_name_hint(failure["name"])

    def _last_call(self, rank):
        board = self.monitor.board
        board.pump()
        last = board.readers[rank].last
        return board.call(rank, max(last.values())) if last else None

    def _last_calls(self, look):
        texts = {}
        for rank in range(self.pool.size):
            if rank in look.waits:
                continue
            call = self._last_call(rank)
            texts[rank] = f"its last call was {call}" if call else "it has made no call"
        return texts


def is_settled(board):
    """Whether every published call has met its partners, so that nothing hangs in the group."""
    board.pump()
    for rank, reader in enumerate(board.readers):
        if reader.lost:
            return False
        for index in reader.last.values():
            call = board.call(rank, index)
            if call is None or board.missing(rank, call):
                return False
    return True
