"""The discrete-event simulator: what ranks that compute and talk would do when. Pure Python, deterministic.

A rank's *program* is a list of steps ``(seconds, action)``: run for so long on the compute lane, then start transfer
number ``action``, wait for it if it is ``~action``, or go on if it is None. The rules:

- A transfer is ready when all its members that have a program have started it; the others count as ready.
- Transfers of one *lane* go one after the other, in the order in which they became ready; one that takes no time
  (a group of one) is over at once and passes them by.
- A transfer takes its latency, then its transfer time at the full rate of its *links*. Of k that are on a link at once
  each gets 1/k of it (over several links: of the fullest), reckoned anew whenever one comes or goes. Latency is not
  shared.
- A rank computes on a device of its own; with ``cores``, of more ranks than cores each that runs gets an equal part,
  and a step that is asleep takes none.
- What happens at one time goes by number: ranks ascending, transfers as listed. Nothing depends on the clock or on the
  order in which ranks are given.

Between two waits a rank with a device of its own needs no event: it runs ahead to the next wait that is not over.
Only transfers that take time, and steps on shared cores, pass through the queue of events.
"""
from collections import deque
from heapq import heappop, heappush
from itertools import chain
from typing import NamedTuple

from dtlab.errors import ConfigError

_END, _FLOW, _READY, _WAKE = range(4)  # events of a transfer, and of a rank; of several at one time ends come first


class Transfer(NamedTuple):
    """A collective or a message.

    Attributes:
        name: for messages about a program that never ends.
        members: ranks that start it; who has no program is not waited for.
        lane: transfers of one lane follow each other (hashable).
        latency_s: the part of its time that no other transfer stretches.
        transfer_s: the other part, at the full rate of the links.
        links: the links that it fills (hashable); none: nothing is shared.
    """

    name: str
    members: tuple
    lane: object
    latency_s: float = 0.0
    transfer_s: float = 0.0
    links: tuple = ()


class Run:
    """What happened when.

    Attributes:
        ended: rank -> for each step, when its run ended (seconds); the next begins then, or when its wait is over.
        end_s: rank -> when its program ended, with its last wait.
        moved: for each transfer ``(begin, end)`` of its time, latency included; None if it was never ready.
        called: for each transfer ``(rank, time)`` of the last start, the first of them in a tie; None: nobody did.
    """

    def __init__(self, programs, transfers):
        self.ended = {rank: [] for rank in programs}
        self.end_s = dict.fromkeys(programs, 0.0)
        self.moved, self.called = [None] * len(transfers), [None] * len(transfers)


def simulate(programs, transfers, *, cores=None, asleep=None):
    """Run programs, one a rank.

    Args:
        programs: rank -> ``[(seconds, action), ...]``; the module's docstring says what an action is.
        transfers: list of ``Transfer``; an action is a place in it. Each member starts it once.
        cores: how many ranks can compute at once; None: all of them.
        asleep: rank -> places of the steps that need no core.

    Returns:
        Run.

    Raises:
        ConfigError: ranks wait for what can never happen; the message says who for what.

    Example:
        >>> message = Transfer("message", (0, 1), "0 to 1", latency_s=1, transfer_s=2)
        >>> run = simulate({0: [(3, 0)], 1: [(1, 0), (0, ~0), (4, None)]}, [message])
        >>> run.moved, run.end_s
        ([(3.0, 6.0)], {0: 3.0, 1: 10.0})
    """
    engine = _Engine({rank: programs[rank] for rank in sorted(programs)}, transfers, cores, asleep or {})
    engine.go()
    return engine.run


class _Engine:
    def __init__(self, programs, transfers, cores, asleep):
        self.programs, self.transfers, self.run = programs, transfers, Run(programs, transfers)
        self.steps = {rank: iter(program) for rank, program in programs.items()}  # those to come
        self.over = {}  # rank -> the action of its step, whose run on a shared core is over
        self.missing = [sum(map(programs.__contains__, t.members)) for t in transfers]
        self.quick = [n == 1 and not (t.latency_s or t.transfer_s) for n, t in zip(self.missing, transfers)]
        self.start_s = [0.0] * len(transfers)  # of those under way
        self.sleepers = {}  # transfer -> [(rank, since when it waits), ...]
        self.queues = {}  # lane -> transfers that are ready, the first one under way
        self.users = {}  # link -> transfers on it
        self.flows = {}  # transfer on links -> [seconds left at full rate, since when, rate, version]
        self.events = []  # (time, what, transfer, version)
        self.todo = deque((rank, 0.0) for rank in programs)  # (rank, time) that can go on
        self.cores = cores if cores is not None and cores < len(programs) else None
        self.asleep = asleep
        self.runs = []  # on shared cores: (work at its end, rank)
        self.work, self.work_at = 0.0, 0.0  # seconds of work that a rank running since 0 has done, and when

    def go(self):
        while self.todo or self.events or self.runs:
            while self.todo:
                self.advance(*self.todo.popleft())
            if self.runs and (not self.events or self.next_run() <= self.events[0][0]):
                self.finish_run()
            elif self.events:
                now, what, transfer, version = heappop(self.events)
                if what == _READY:
                    self.queue(transfer, now)
                elif what == _FLOW:
                    self.flow(transfer, now)
                elif what == _WAKE:
                    self.todo.append((transfer, now))
                elif transfer in self.flows and self.flows[transfer][3] == version:
                    self.leave(transfer, now)
        if self.sleepers:
            raise ConfigError(self.deadlock())

    def advance(self, rank, clock):
        """Let a rank go on at a time, to a wait that is not over, to a shared core, or to its end."""
        steps, ended, on_cores = self.steps[rank], self.run.ended[rank], self.cores is not None
        moved, called, quick, sleepers = self.run.moved, self.run.called, self.quick, self.sleepers
        if rank in self.over:
            steps = chain([(0.0, self.over.pop(rank))], steps)
        for seconds, action in steps:
            if not on_cores:
                clock += seconds
            elif seconds > 0:
                self.over[rank] = action
                self.start_run(rank, seconds, clock)
                return
            ended.append(clock)
            if action is None:
                continue
            if action >= 0:
                if quick[action]:  # as start() and end(), without the calls: free messages come by ten thousands
                    moved[action], called[action] = (clock, clock), (rank, clock)
                    if action in sleepers:
                        self.wake(action, clock)
                else:
                    self.start(action, rank, clock)
                continue
            awaited = moved[~action]
            if awaited is None:
                sleepers.setdefault(~action, []).append((rank, clock))
                return
            if awaited[1] > clock:
                clock = awaited[1]
        self.run.end_s[rank] = clock

    def start(self, transfer, rank, now):
        """A member starts a transfer; the last one makes it ready."""
        called, self.missing[transfer] = self.run.called[transfer], self.missing[transfer] - 1
        if called is None or now > called[1]:
            called = self.run.called[transfer] = rank, now
        if self.missing[transfer]:
            return
        now, (_, _, _, latency_s, transfer_s, _) = called[1], self.transfers[transfer]
        if latency_s or transfer_s:
            heappush(self.events, (now, _READY, transfer, 0))
        else:
            self.end(transfer, now, now)

    # transfers

    def queue(self, transfer, now):
        """A transfer is ready."""
        queue = self.queues.setdefault(self.transfers[transfer].lane, deque())
        queue.append(transfer)
        if len(queue) == 1:
            self.begin(transfer, now)

    def begin(self, transfer, now):
        latency_s = self.transfers[transfer].latency_s
        self.start_s[transfer] = now
        if latency_s > 0:
            heappush(self.events, (now + latency_s, _FLOW, transfer, 0))
        else:
            self.flow(transfer, now)

    def flow(self, transfer, now):
        """Its latency is over: it comes onto its links."""
        _, _, _, _, transfer_s, links = self.transfers[transfer]
        crowd = set()
        for link in links:
            users = self.users.setdefault(link, [])
            crowd.update(users)
            users.append(transfer)
        self.flows[transfer] = [transfer_s, now, 1.0, 0]
        if crowd:
            self.share({transfer, *crowd}, now)
        if self.flows[transfer][3] == 0:
            heappush(self.events, (now + transfer_s, _END, transfer, 0))

    def leave(self, transfer, now):
        """Its bytes are there."""
        del self.flows[transfer]
        crowd = set()
        for link in self.transfers[transfer].links:
            users = self.users[link]
            users.remove(transfer)
            crowd.update(users)
        if crowd:
            self.share(crowd, now)
        queue = self.queues[self.transfers[transfer].lane]
        queue.popleft()
        self.end(transfer, self.start_s[transfer], now)
        if queue:
            self.begin(queue[0], now)

    def share(self, crowd, now):
        """Reckon anew how fast transfers go, and when they end."""
        for transfer in crowd:  # the order does not matter: the queue sorts by time and number
            flow, links = self.flows[transfer], self.transfers[transfer].links
            rate = 1 / max([len(self.users[link]) for link in links], default=1)
            if rate != flow[2]:
                left, since, old, version = flow
                left -= (now - since) * old
                flow[:] = left, now, rate, version + 1
                heappush(self.events, (now + max(0.0, left) / rate, _END, transfer, version + 1))

    def end(self, transfer, began, now):
        self.run.moved[transfer] = began, now
        self.wake(transfer, now)

    def wake(self, transfer, now):
        """Let those go on that wait for it."""
        for rank, since in self.sleepers.pop(transfer, ()):
            self.todo.append((rank, now if now > since else since))

    # shared cores: all that run are equally fast, so one count of work serves them all

    def rate(self):
        return min(1.0, self.cores / len(self.runs)) if self.runs else 1.0

    def start_run(self, rank, seconds, now):
        if len(self.run.ended[rank]) in self.asleep.get(rank, ()):
            heappush(self.events, (now + seconds, _WAKE, rank, 0))
            return
        self.work, self.work_at = self.work + (now - self.work_at) * self.rate(), now
        heappush(self.runs, (self.work + seconds, rank))

    def next_run(self):
        """When the first of the running steps ends."""
        return self.work_at + max(0.0, self.runs[0][0] - self.work) / self.rate()

    def finish_run(self):
        now = self.next_run()
        self.work, rank = max(self.work, self.runs[0][0]), self.runs[0][1]
        self.work_at = now
        heappop(self.runs)
        self.todo.append((rank, now))

    # what never ends

    def deadlock(self):
        """Who waits for what, and who has not come."""
        lines = []
        for transfer, sleepers in self.sleepers.items():
            name, members = self.transfers[transfer][:2]
            absent = [rank for rank in members if rank in self.programs and not self.has_started(rank, transfer)]
            lines += [f"rank {rank} waits for {name}, which {_ranks(absent)} never started" for rank, _ in sleepers]
        return f"the programs never end: {'; '.join(sorted(lines))}"

    def has_started(self, rank, transfer):
        return any(action == transfer for _, action in self.programs[rank][:len(self.run.ended[rank])])


def _ranks(ranks):
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
