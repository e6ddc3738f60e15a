"""Who waits for whom. Reads the board; decides by logic, not by a clock, that a wait can never end.

A rank is *stuck* if it waits in a call that some rank will never publish: one that has ended its cell, failed, or is
stuck itself. A rank that runs is never stuck, however long it computes. The verdict counts when two looks in a row
see the same calls and the same waits.
"""
import contextlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from dtlab.ranks.board import COLLECTIVE, RECV_ANY, SEND, Call

QUIET_S = 0.4  # no processor time for so long: the rank sleeps or waits outside Python
PROGRESS_EVERY_S = 0.25
_LOOK_BACK_S = 1.0  # in which a rank must have used the processor


@dataclass
class Wait:
    """One rank's wait: in ``call``, for the ranks in ``missing``; not ``alone`` if other threads of it are at work."""

    call: Call
    missing: list[int]
    alone: bool = True

    def is_hopeless(self, never):
        """Whether it cannot end if the ranks in ``never`` make no more calls; a receive from anybody needs only one."""
        test = all if self.call.kind == RECV_ANY else any
        return test(m in never for m in self.missing)


@dataclass
class Look:
    """The ranks of a cell at one moment."""

    waits: dict[int, Wait]
    running: list[int]
    ended: list[int]
    failed: list[int]
    signature: tuple = field(repr=False, default=())

    def stuck(self):
        """Ranks whose wait can never end -> that wait."""
        never = {*self.ended, *self.failed}
        hopeless = {r for r, wait in self.waits.items() if any(m in never for m in wait.missing)}
        stuck = {r: wait for r, wait in self.waits.items() if wait.missing and (wait.alone or r in hopeless)}
        while True:
            free = [r for r, w in stuck.items() if not w.is_hopeless({*never, *stuck})]
            if not free:
                return stuck
            for rank in free:
                del stuck[rank]


class Monitor:
    """Follows one cell on the board."""

    def __init__(self, board, ranks, pids, limit_s, communicates=lambda rank: False):
        self.board, self.ranks, self.limit_s = board, list(ranks), limit_s
        self._communicates = communicates  # asks a rank whether its main thread is inside torch's communication code
        self._answers = {}  # rank -> (time, answer)
        self._pids = pids
        self._used = {}  # rank -> ((processor seconds, bytes written), when): at most that long ago
        self._children_s = {}  # rank -> processor seconds of the processes it has started
        self._moved_at = dict.fromkeys(ranks, time.monotonic())  # last time a rank used the processor or issued a call
        self._heads = {}
        self._since = {}  # (rank, index of the call it waits in) -> when that was first seen
        self._checked_at = 0.0
        self._last = None

    def look(self, ended, failed):
        """The ranks now; ``ended`` and ``failed`` are what the notebook knows of this cell."""
        self.board.pump()
        absent = [r for r in range(self.board.world_size) if r not in self.ranks]
        waits, running, signature, now = {}, [], [], time.monotonic()
        for rank in self.ranks:
            head, waiting, alone, in_torch = self.board.state(rank)
            waiting = None if in_torch else waiting  # what all have made can end
            signature.append((head, waiting))
            if rank in ended or rank in failed:
                continue
            wait = self._wait(rank, waiting, alone) or self._wait_in_c(rank, {*absent, *ended, *failed})
            if wait:
                waits[rank] = wait
            else:
                running.append(rank)
        keys = ((rank, wait.call.index) for rank, wait in waits.items())
        self._since = {key: self._since.get(key, now) for key in keys}
        return Look(waits, running, [*ended, *absent], list(failed), (tuple(signature), tuple(ended), tuple(failed)))

    def waited_s(self, rank, wait):
        """Seconds for which a rank has been seen in a wait."""
        return time.monotonic() - self._since[rank, wait.call.index]

    def _wait(self, rank, index, alone=True):
        call = None if index is None else self.board.call(rank, index)
        return call and Wait(call, self.board.missing(rank, call), alone)

    def _wait_in_c(self, rank, never):
        """The wait of a rank that does nothing while a collective of its own can no longer complete.

        That is so if a member has ended, or if the rank sits in torch's communication code and does not come back.
        """
        if time.monotonic() - self._moved_at[rank] < QUIET_S:
            return None
        opened = self.open_calls(rank)
        hopeless = [w for w in opened if any(m in never for m in w.missing)]
        if opened and not hopeless and self._sits_in_communication(rank):
            return opened[0]
        return hopeless[0] if hopeless else None

    def _sits_in_communication(self, rank):
        now = time.monotonic()
        if rank not in self._answers or now - self._answers[rank][0] > QUIET_S:
            self._answers[rank] = now, self._communicates(rank)
        return self._answers[rank][1]

    def open_calls(self, rank):
        """Collectives that this rank has published and some member has not, oldest first."""
        self.board.pump()
        reader = self.board.readers[rank]
        indices = sorted(i for (_, kind), i in reader.last.items() if kind == COLLECTIVE)
        waits = [self._wait(rank, i) for i in indices]
        return [w for w in waits if w and w.missing]

    def wait_in_torch(self, rank):
        """``[wait]`` of a rank that sits in torch for a call that all members have made; else empty."""
        _, waiting, _, in_torch = self.board.state(rank)
        if in_torch and (wait := self._wait(rank, waiting)):
            return [wait]
        call = self.board.last_call(rank)
        return [Wait(call, [])] if call and self._sits_in_communication(rank) else []

    def thrown_away(self, stuck):
        """Rank -> its send to or from a stuck rank that was not taken, and whose handle nobody can await any more.

        Subtle: gloo then stops the pair, in both directions.
        """
        found = {}
        for rank in self.ranks:
            for call in self.board.dropped(rank):
                if call.kind == SEND and {rank, call.peer} & set(stuck) and not self.board.is_taken(call):
                    found.setdefault(rank, call)
        return found

    def verdict(self, ended, failed):
        """Stuck ranks -> their waits, once two looks agree; else empty."""
        look = self.look(ended, failed)
        stuck = look.stuck()
        agreed = stuck and self._last is not None and self._last == (look.signature, sorted(stuck))
        self._last = look.signature, sorted(stuck)
        return stuck if agreed else {}

    def watch_progress(self, pending):
        """Note which of the ranks that have not ended use the processor, move bytes or issue calls.

        Waiting is no work, however it is done.
        """
        now = time.monotonic()
        if now - self._checked_at < PROGRESS_EVERY_S:
            return
        missed_s = max(0.0, now - self._checked_at - 2 * PROGRESS_EVERY_S) if self._checked_at else 0.0
        if missed_s:  # nobody gave this process the processor: the ranks need not have had it either
            self._moved_at = {rank: min(now, at + missed_s) for rank, at in self._moved_at.items()}
        self._checked_at = now
        for rank in pending:
            head, waiting, alone, _ = self.board.state(rank)
            (before, since), used = self._used.get(rank, ((0.0, 0), now)), self._use(rank)
            may_compute = waiting is None or not alone
            works = may_compute and (used[0] > before[0] + 0.02 or self._children_work(rank))
            moves = head != self._heads.get(rank) or used[1] > before[1] or works
            if moves:
                self._moved_at[rank] = now
            if moves or now - since >= _LOOK_BACK_S:  # a rank that others leave little time moves slowly
                self._used[rank] = used, now
            self._heads[rank] = head

    def _children_work(self, rank):
        """Whether processes of a quiet rank (data loaders, a download) have used the processor since the last look."""
        quiet_s = time.monotonic() - self._moved_at[rank]
        if self.limit_s is None or quiet_s < self.limit_s / 2:
            return False
        before, self._children_s[rank] = self._children_s.get(rank), 0.0
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(self._pids[rank]).children(recursive=True)
            self._children_s[rank] = sum(sum(c.cpu_times()[:2]) for c in children)
        return before is not None and self._children_s[rank] > before + 0.02

    def _is_waiting(self, rank):
        return self.board.state(rank)[1] is not None

    def _use(self, rank):
        """``(processor seconds, bytes written)`` of a rank so far.

        Subtle: gloo's event loop is left out, because it runs in circles once the handle of a send was thrown away; the
        bytes it moves count. macOS tells neither its seconds nor the bytes.
        """
        try:
            process = psutil.Process(self._pids[rank])
            seconds = sum(process.cpu_times()[:2]) - _event_loop_s(process.pid)
            return seconds, process.io_counters().write_chars if hasattr(process, "io_counters") else 0
        except psutil.Error:
            return self._used.get(rank, ((0.0, 0), 0.0))[0]

    def moved(self, rank):
        """Say that a rank makes progress (it is importing, or sent output)."""
        self._moved_at[rank] = time.monotonic()

    def limit_reached(self, ended, failed):
        """Whether ranks wait and no rank has made progress for the time limit."""
        pending = [r for r in self.ranks if r not in ended and r not in failed]
        if self.limit_s is None or not pending:
            return False
        if time.monotonic() - max(self._moved_at[r] for r in self.ranks) < self.limit_s:
            return False
        return any(self._is_waiting(r) or self.open_calls(r) or self.wait_in_torch(r) for r in pending)


def _event_loop_s(pid):
    """Processor seconds of gloo's event loops in a process; 0 where the system, or an older torch, does not tell."""
    ticks = 0
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            name, _, fields = (thread / "stat").read_text().partition("(")[2].rpartition(")")
            ticks += sum(map(int, fields.split()[11:13])) if name == "gloo_tcp_loop" else 0
    return ticks / os.sysconf("SC_CLK_TCK")
