"""One cell on the ranks, seen from the notebook: collect, watch, stop what must be stopped, report."""
import codecs
import os
import selectors
import time

from dtlab.errors import RanksInterrupted
from dtlab.ranks import notebook, parcels, report
from dtlab.ranks.board import rank_list
from dtlab.ranks.monitor import Monitor
from dtlab.ranks.relay import Relay

TICK_S = 0.02
ASK_EVERY_S = 0.1  # whether a process has ended
GRACE_S = 0.4  # after the first failure: time for the others to fail by themselves, or to come to the same wait
SOCKETS_AFTER_S = 0.3  # ladder: a signal at once, then gloo's sockets, then the process
KILL_AFTER_S = 1.5
LONG_WAIT_S = 2  # is shown while a cell runs
KILL_COPY_AFTER_S = 10  # a push or pull is only a copy: it ends by itself


class CellRun:
    """Runs until every chosen rank has answered, died, or been stopped."""

    def __init__(self, pool, ranks, number, limit_s, interrupts, kill_after_s=KILL_AFTER_S):
        self.pool, self.ranks, self.number, self.interrupts = pool, list(ranks), number, interrupts
        self.kill_after_s = kill_after_s
        self.relay = Relay(self.ranks, pool.kept_chars)
        self.values, self.stopped, self.dead = {}, [], []
        self.failures = {}  # rank -> description of its error or death, in the order in which they failed
        self._decoders = {r: codecs.getincrementaldecoder("utf-8")("replace") for r in self.ranks}
        self.waits = {}  # rank -> where it was stopped: in a call, or at a line
        self.monitor = Monitor(pool.board, self.ranks, pool.pids, limit_s, lambda rank: pool.where(rank)[2])
        self.places, self.thrown_away = {}, {}  # rank -> where it runs; its send that nobody can await
        self.hang = None  # (stuck, look, limit_s) when a wait could not end
        self.verdict = None  # (text, is_hanging, rank) of a mistake that the guard has seen
        self.interrupted = False
        self._started = self._asked_at = time.monotonic()
        self._stop_at = self._stuck_at = self._failed_at = None
        self._has_shut_sockets = False

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
        if time.monotonic() - self._asked_at < ASK_EVERY_S:
            return
        self._asked_at, exits = time.monotonic(), self.pool._nursery.exits()
        for rank in self.pending:
            if self.pool.pids[rank] in exits:
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
        self.monitor.moved(rank)  # to end is progress too: others may be about to follow
        _, _, status, value, names = message
        if names is not None:
            self.pool.names[rank] = names
        if status == "ok":
            value.fds = fds
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
            why = f"its value cannot be read in the notebook ({type(error).__name__}: {error})"
            cure = "return tensors, numbers, text, lists or dicts"
            self._take_failure(rank, report.described("ConfigError", f"{why}; {cure}"))

    def _take_failure(self, rank, failure):
        if failure["lost_peer"] and (call := self.monitor.board.last_call(rank)):
            self.waits.setdefault(rank, f"in {call}")
        if failure["lost_peer"] and self._stop_at is not None:
            self.stopped.append(rank)  # its sockets were shut to stop it
            return
        self.failures[rank] = failure
        self._failed_at = self._failed_at or time.monotonic()

    def _take_death(self, rank):
        self.dead.append(rank)
        if self._stop_at is None:
            status = self.pool._nursery.exit_status(self.pool.pids[rank])
            calls = {r: self.monitor.board.last_call(r) for r in self.ranks} if status in (-6, -11) else {}  # C++
            text = report.died_text(status) + report.last_calls_text(rank, calls)
            self._take_failure(rank, report.described(report.DIED, text))

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
        self.monitor.watch_progress(self.pending)
        ended, failed = list(self.values), [*self.failures, *self.dead]
        stuck = self.monitor.verdict(ended, failed) if now - self._started > TICK_S else {}
        self._stuck_at = (self._stuck_at or now) if stuck else None
        if stuck and self._look().running and now - self._stuck_at < GRACE_S:
            return  # the others may be on their way to the same call
        if stuck and self._failed_at is None:
            self._begin_hang(stuck, self._look(), None)
        elif self._failed_at is not None and (stuck or now - self._failed_at > GRACE_S):
            self._begin_stop(f"stopped because rank {next(iter(self.failures))} failed")
        elif self.monitor.limit_reached(ended, failed) and not self._any_importing():
            look = self._look()
            if waits := self._overdue(look):  # else somebody has gone on just now
                self._begin_hang(waits, look, self.monitor.limit_s)
        elif now - self._started > 2:
            self.relay.status = self._status(now)

    def _look(self):
        return self.monitor.look(list(self.values), [*self.failures, *self.dead])

    def _overdue(self, look):
        waits = dict(look.waits)
        for rank in look.running:
            if opened := self.monitor.open_calls(rank) or self.monitor.wait_in_torch(rank):
                waits[rank] = opened[0]
        return waits

    def _any_importing(self):
        for rank in self.pending:
            if self.pool.where(rank)[1]:
                self.monitor.moved(rank)
                return True
        return False

    def _status(self, now):
        waits = [(r, w, self.monitor.waited_s(r, w)) for r, w in sorted(self._look().waits.items()) if w.missing]
        parts = [
            f"rank {rank} waits in {wait.call.op} for {rank_list(wait.missing)}, for {seconds:.0f} s"
            for rank, wait, seconds in waits
            if seconds > LONG_WAIT_S  # shorter ones are how ranks work together
        ]
        return f"running for {now - self._started:.0f} s" + (": " + "; ".join(parts[:4]) if parts else "")

    def _find_open_calls(self):
        """A cell that ended well but for a call that some member never made: the next cell would meet it."""
        stuck = {rank: waits[0] for rank in self.ranks if (waits := self.monitor.open_calls(rank))}
        if stuck and self.hang is None:
            self.hang = stuck, self.monitor.look(self.ranks, []), None

    # stop

    def _begin_hang(self, stuck, look, limit_s):
        self.hang = stuck, look, limit_s
        self.places = {r: self.pool.where(r)[0] for r in look.running}
        self.thrown_away = self.monitor.thrown_away(stuck)
        self._begin_stop("stopped: the wait could not end")

    def _begin_stop(self, text):
        if self._stop_at is not None:
            return
        for rank in self.pending:
            if opened := self.monitor.open_calls(rank):
                self.waits[rank] = f"in {opened[0].call}"
        self.waits.update({r: f"in {w.call}" for r, w in self._look().waits.items()})
        self._stop_at = time.monotonic()
        self.pool.board.poison(text)
        for rank in self.pending:
            self.pool._controls[rank].send("stop", self.number)

    def _climb(self, seconds):
        """The ladder: after the signal, gloo's sockets; then the process."""
        if seconds > SOCKETS_AFTER_S and not self._has_shut_sockets:
            self._has_shut_sockets = True
            for rank in self.pending:
                self.pool._controls[rank].send("sockets", self.number)
        if seconds > self.kill_after_s:
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
        ended = any(failure["group_ended"] for failure in self.failures.values())
        regroup = self._has_shut_sockets or is_hanging or ended or not is_settled(self.pool.board)
        dead = self.pool.repair(sorted({*self.dead, *self.pool.gone()}), regroup)
        if not self.pool.alive:
            return "All ranks have ended: run the launch cell again."
        return report.kept_text(self.pool.size, dead, regroup, self.pool.lost_groups)

    def _error(self, kept):
        if self.verdict:
            return report.guarded(self.verdict, kept)
        if self.hang and not self.failures:
            stuck, look, limit_s = self.hang
            return report.hang(stuck, look, self._last_calls(look), self.places, kept, limit_s, self.thrown_away)
        root = self._root()
        victims = [r for r, failure in self.failures.items() if r != root and failure["lost_peer"]]
        failures = {r: failure for r, failure in self.failures.items() if r not in victims}
        stopped = sorted({*self.stopped, *victims, *(r for r in self.dead if r not in failures)})
        hint = notebook.missing_name_hint(failures[root]["name"])
        return report.failure(self.pool.size, failures, root, stopped, self.waits, kept, hint)

    def _root(self):
        """The rank that failed first; one that only lost its peer is not the cause, one that died rather is."""
        causes = [r for r, failure in self.failures.items() if not failure["lost_peer"]]
        died = [r for r in causes if r in self.dead]
        return next(iter(died or causes or self.failures))

    def _last_calls(self, look):
        # Subtle: of the board that the cell ran on; a repair has given the pool a new one by now
        calls = {r: self.monitor.board.last_call(r) for r in range(self.pool.size) if r not in look.waits}
        return {r: f"its last call was {call}" if call else "it has made no call" for r, call in calls.items()}


def is_settled(board):
    """Whether every published call has met its partners, so that nothing hangs in the group."""
    board.pump()
    for rank, reader in enumerate(board.readers):
        calls = [board.call(rank, index) for index in reader.last.values()]
        if reader.lost or any(call is None or board.missing(rank, call) for call in calls):
            return False
    return True
