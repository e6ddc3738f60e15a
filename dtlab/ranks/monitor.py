"""Who waits for whom. Reads the board; decides by logic, not by a clock, that a wait can never end.

A rank is *stuck* if it waits in a call that some rank will never publish: one that has ended its cell, failed, or is
stuck itself. A rank that runs is never stuck, however long it computes. The verdict counts when two looks in a row
see the same calls and the same waits.
"""
import contextlib
import time
from dataclasses import dataclass, field

import psutil

from dtlab.ranks.board import COLLECTIVE, RECV_ANY, Call

QUIET_S = 0.4  # no processor time for so long: the rank sleeps or waits outside Python
PROGRESS_EVERY_S = 0.25


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
        self._cpu_s = dict.fromkeys(ranks, 0.0)
        self._children_s = {}  # rank -> processor seconds of the processes it has started
        self._moved_at = dict.fromkeys(ranks, time.monotonic())  # last time a rank used the processor or issued a call
        self._heads = {}
        self._checked_at = 0.0
        self._last = None

    def look(self, ended, failed):
        """The ranks now; ``ended`` and ``failed`` are what the notebook knows of this cell."""
        self.board.pump()
        absent = [r for r in range(self.board.world_size) if r not in self.ranks]
        waits, running, signature = {}, [], []
        for rank in self.ranks:
            head, waiting, alone = self.board.state(rank)
            signature.append((head, waiting))
            if rank in ended or rank in failed:
                continue
            wait = self._wait(rank, waiting, alone) or self._wait_in_c(rank, {*absent, *ended, *failed})
            if wait:
                waits[rank] = wait
            else:
                running.append(rank)
        return Look(waits, running, [*ended, *absent], list(failed), (tuple(signature), tuple(ended), tuple(failed)))

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
        """``[wait]`` of a rank that sits in torch though all members have made its last call; else empty."""
        call = self.board.last_call(rank)
        return [Wait(call, [])] if call and self._sits_in_communication(rank) else []

    def verdict(self, ended, failed):
        """Stuck ranks -> their waits, once two looks agree; else empty."""
        look = self.look(ended, failed)
        stuck = look.stuck()
        agreed = stuck and self._last is not None and self._last == (look.signature, sorted(stuck))
        self._last = look.signature, sorted(stuck)
        return stuck if agreed else {}

    def watch_progress(self):
        """Note which ranks use the processor or issue calls."""
        now = time.monotonic()
        if now - self._checked_at < PROGRESS_EVERY_S:
            return
        self._checked_at = now
        for rank in self.ranks:
            head, cpu_s = self.board.state(rank)[0], self._cpu(rank)
            works = not self._is_waiting(rank) and (cpu_s > self._cpu_s[rank] + 0.02 or self._children_work(rank))
            if head != self._heads.get(rank) or works:
                self._moved_at[rank] = now
            self._heads[rank], self._cpu_s[rank] = head, cpu_s

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

    def _cpu(self, rank):
        try:
            times = psutil.Process(self._pids[rank]).cpu_times()
            return times.user + times.system
        except psutil.Error:
            return self._cpu_s[rank]

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
