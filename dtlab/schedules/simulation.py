"""A schedule in time. Its programs have no choice, so that no queue of events is needed: a rank runs on until it waits.

The answer is that of ``dtlab.simulate.engine`` for the same programs (a test compares them): an action begins when the
one before it on its rank has ended and what it needs is there. A message leaves when its action ends, or when the one
before it on the same way, from one rank to another, has arrived; nothing else shares that way.
"""
import functools
from collections.abc import Iterable
from operator import sub

import numpy as np

from dtlab.errors import ConfigError
from dtlab.schedules.schedule import Backward, BackwardInput, BackwardWeight, Forward, parts
from dtlab.simulate.boxes import Box, Lane
from dtlab.simulate.timeline import Timeline
from dtlab.validate import amount

_KINDS = {Forward: "forward", Backward: "backward", BackwardInput: "backward", BackwardWeight: "weight"}


def simulate(schedule, *, forward_s=1.0, backward_s=2.0, weight_s=None, overlap_s=None, link=None, message_bytes=0,
             activation_bytes=1, weight_bytes=None, memory_cap=None):
    """The timeline of a schedule, and what each rank holds in flight.

    A number holds for every stage; a list has one for each.

    Args:
        schedule: ``Schedule``; what ``check`` refuses for another reason than a deadlock is taken as it stands.
        forward_s: seconds of a stage's forward.
        backward_s: seconds of its backward.
        weight_s: seconds of them for the weights' gradients, the rest is for the input's; None: half.
        overlap_s: seconds of a pair; None: of both its parts.
        link: ``theory.Link`` between ranks; None: messages take no time.
        message_bytes: of an activation or a gradient between two stages.
        activation_bytes: what a stage's forward leaves for its backward; 1: count micro-batches.
        weight_bytes: what of it the weights' backward needs, and so stays until then; None: all.
        memory_cap: the most that a rank may hold, in the unit of ``activation_bytes``.

    Returns:
        PipelineTimeline.

    Raises:
        ConfigError: times or sizes that cannot be; ranks that wait for ever; more in flight than ``memory_cap``.
    """
    each = functools.partial(_each_stage, num_stages=schedule.num_stages)
    backward_s, held = each("backward_s", backward_s), each("activation_bytes", activation_bytes)
    weight_s = [its / 2 for its in backward_s] if weight_s is None else each("weight_s", weight_s)
    kept = held if weight_bytes is None else each("weight_bytes", weight_bytes)
    for names, part, whole in (("weight_s, a part of backward_s", weight_s, backward_s),
                               ("weight_bytes, a part of activation_bytes", kept, held)):  # fmt: skip
        for stage in range(schedule.num_stages):
            if part[stage] > whole[stage]:
                raise ConfigError(f"{names}: {part[stage]} of {whole[stage]} in stage {stage}")
    hop_s = 0.0 if link is None else link.time_s(amount("message_bytes", message_bytes))
    overlap_s = overlap_s if overlap_s is None else amount("overlap_s", overlap_s)
    try:
        ran = run(schedule, each("forward_s", forward_s), backward_s, weight_s, held, kept, hop_s, overlap_s)
    except (IndexError, KeyError, TypeError):  # actions of no known stage, micro-batch or kind
        schedule.check()
        raise
    if ran.blocked:
        schedule.check()
    timeline = PipelineTimeline(schedule, ran)
    if memory_cap is not None and max(timeline.peak_in_flight) > amount("memory_cap", memory_cap):
        raise ConfigError(timeline.too_much(memory_cap))
    return timeline


def _each_stage(name, value, num_stages):
    values = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value] * num_stages
    if len(values) != num_stages:
        raise ConfigError(f"{name} has {len(values)} values: it needs one, or one for each of {num_stages} stages")
    return [float(amount(name, its)) for its in values]


class Run:
    """What happened when.

    Attributes:
        starts, ends: for each rank the seconds of its actions, the parts of a pair one by one.
        held: for each rank what it holds after each action (a forward's share from its start, others' to their end).
        messages: ``(source, destination, sent_s, begin_s, end_s, action that sent it)`` of those that take time.
        arrivals: ``[kind][stage][micro_batch]``: when what an action needs is on its rank.
        blocked: rank -> the action that it never begins, of a pair the part that waits.
    """

    def __init__(self, schedule):
        stages, numbers = range(schedule.num_stages), schedule.num_micro_batches
        self.starts, self.ends, self.held = ([[] for _ in schedule.actions] for _ in range(3))
        forward, gradient = ([[None] * numbers for _ in stages] for _ in range(2))
        forward[0] = [0.0] * numbers
        at_once = [[0.0] * numbers] * len(stages)
        self.arrivals = {Forward: forward, Backward: gradient, BackwardInput: gradient, BackwardWeight: at_once}
        self.messages, self.blocked = [], {}

    def arrival(self, part):
        return self.arrivals[part.kind][part.stage][part.micro_batch]


def run(schedule, forward_s, backward_s, weight_s, held, kept, hop_s=0.0, overlap_s=None):
    """Run a schedule; ``simulate`` says what the arguments are, here one number for each stage.

    Returns:
        Run.
    """
    ran, todo = Run(schedule), list(range(schedule.num_ranks))
    table = _table(schedule, ran, forward_s, backward_s, weight_s, held, kept, hop_s)
    ranks = [_rank(rank, actions, table, ran, todo, hop_s, overlap_s) for rank, actions in enumerate(schedule.actions)]
    while todo:
        next(ranks[todo.pop()], None)
    for rank, its in enumerate(ranks):
        if its.gi_frame is not None:  # it has not ended
            rest = list(parts(schedule.actions[rank]))[len(ran.ends[rank]):]
            ran.blocked[rank] = next(part for part in rest if ran.arrival(part).__class__ is int)
    return ran


def _rank(rank, actions, table, ran, todo, hop_s, overlap_s):
    """Run a rank; it yields when it waits, and is put on ``todo`` when it can go on.

    In the row that it waits at stands its number; who has the answer finds it there.
    """
    start, end, hold, clock, holds = ran.starts[rank].append, ran.ends[rank].append, ran.held[rank].append, 0.0, 0.0
    for action in actions:
        kind, stage, micro_batch, both = action
        if both:
            rows = [table[part.kind][part.stage] for part in both]
            for part, (needs, *_) in zip(both, rows):
                if needs[part.micro_batch] is None:
                    needs[part.micro_batch] = rank
                    yield
                clock = max(clock, needs[part.micro_batch])
            whole = sum(seconds for _, _, seconds, _, _ in rows)
            longer = 1.0 if overlap_s is None or not whole else overlap_s / whole
            for _, _, seconds, more, _ in rows:
                start(clock)
                clock += seconds * longer
                end(clock)
                holds += more
                hold(holds)
            for part, (_, gives, _, _, way) in zip(both, rows):
                _give(gives, part, clock, way, hop_s, ran.messages, todo)
            continue
        needs, gives, seconds, more, way = table[kind][stage]
        ready = needs[micro_batch]
        if ready is None:
            needs[micro_batch] = rank
            yield
            ready = needs[micro_batch]
        if ready > clock:
            clock = ready
        start(clock)
        clock += seconds
        end(clock)
        holds += more
        hold(holds)
        if way is None:  # as _give, without the call
            waiter = gives[micro_batch]
            gives[micro_batch] = clock
            if waiter.__class__ is int:
                todo.append(waiter)
        else:
            _give(gives, action, clock, way, hop_s, ran.messages, todo)


def _give(row, part, now, way, hop_s, messages, todo):
    """An action has ended at ``now``: its message is sent and arrives, and who waits for it goes on."""
    if way is not None:
        begin = max(now, way[0])
        way[0] = begin + hop_s
        messages.append((*way[1:], now, begin, way[0], part))
        now = way[0]
    waiter, row[part.micro_batch] = row[part.micro_batch], now
    if waiter.__class__ is int:
        todo.append(waiter)


def _table(schedule, ran, forward_s, backward_s, weight_s, held, kept, hop_s):
    """``[kind][stage]``: the row of what it needs, the row of what it gives, seconds, what more is held, its way."""
    ranks, last, ways = schedule.stage_to_rank, schedule.num_stages - 1, {}
    table, nobody = {kind: [] for kind in ran.arrivals}, [None] * schedule.num_micro_batches

    def way(stage, other):
        """``[when it is free, source, destination]``; None: a message takes no time."""
        if not hop_s or not 0 <= other <= last or ranks[stage] == ranks[other]:
            return None
        return ways.setdefault((ranks[stage], ranks[other]), [0.0, ranks[stage], ranks[other]])

    needs, gradients = ran.arrivals, ran.arrivals[Backward]
    for s in range(last + 1):
        onward = needs[Forward][s + 1] if s < last else gradients[s]  # the last stage's backward needs its forward
        back, way_back = gradients[s - 1] if s else nobody, way(s, s - 1)
        table[Forward].append((needs[Forward][s], onward, forward_s[s], held[s], way(s, s + 1)))
        table[Backward].append((gradients[s], back, backward_s[s], -held[s], way_back))
        table[BackwardInput].append((gradients[s], back, backward_s[s] - weight_s[s], kept[s] - held[s], way_back))
        table[BackwardWeight].append((needs[BackwardWeight][s], nobody, weight_s[s], -kept[s], None))
    return table


class PipelineTimeline(Timeline):
    """The timeline of a simulated schedule; its boxes are made when they are asked for.

    Attributes:
        ranks: list of ranks.
        peak_in_flight: for each rank the most that it holds, in the unit of ``activation_bytes``.
    """

    def __init__(self, schedule, ran):
        self.ranks = list(range(schedule.num_ranks))
        self.tokens = self.model_flops = self.peak_flops = None
        self._schedule, self._actions, self._ran = schedule, [list(its) for its in schedule.actions], ran
        self.peak_in_flight = [max(its, default=0.0) for its in ran.held]

    @functools.cached_property
    def _drawn(self):
        return Timeline(_boxes(self._actions, self._schedule.stage_to_rank, self._ran))

    boxes = property(lambda self: self._drawn.boxes)
    lanes = property(lambda self: self._drawn.lanes)
    _by_lane = property(lambda self: self._drawn._by_lane)

    @functools.cached_property
    def start_s(self):
        """When the first action begins (seconds)."""
        return min((its[0] for its in self._ran.starts if its), default=0.0)

    @functools.cached_property
    def step_time_s(self):
        """From the beginning of the first action to the end of the last one, over all ranks (seconds)."""
        return max((its[-1] for its in self._ran.ends if its), default=0.0) - self.start_s

    @functools.cached_property
    def _busy_s(self):
        return sum(sum(map(sub, *times)) for times in zip(self._ran.ends, self._ran.starts))

    def in_flight(self, rank):
        """What a rank holds over time: ``(seconds, held)``, two arrays, each value from its time to the next."""
        starts, ends, held = (np.array(its[rank]) for its in (self._ran.starts, self._ran.ends, self._ran.held))
        return np.where(np.diff(held, prepend=0.0) > 0, starts, ends), held

    def too_much(self, memory_cap):
        """Since when the fullest rank holds more than ``memory_cap``, in words."""
        rank = self.peak_in_flight.index(max(self.peak_in_flight))
        at = next(at for at, held in enumerate(self._ran.held[rank]) if held > memory_cap)
        return (f"memory_cap ({memory_cap}): rank {rank} holds more from {self._ran.starts[rank][at]:g} s on, with "
                f"{list(parts(self._actions[rank]))[at].words}; this schedule needs {self.peak_in_flight[rank]:g}")


def _boxes(programs, stage_to_rank, ran):
    """Yield the boxes of all ranks."""
    for rank, program in enumerate(programs):
        times, clock = zip(ran.starts[rank], ran.ends[rank]), 0.0
        for action in program:
            its = action.parts or (action,)
            for part in its:
                ready = ran.arrival(part)
                if ready > clock:
                    source = stage_to_rank[part.stage + (-1 if part.kind == Forward else 1)]
                    label = f"waits for recv from rank {source}"
                    yield Box(Lane(rank), label, clock, ready, "idle", "", (source, ready))
                    clock = ready
            for part, (start, clock) in zip(its, times):
                if clock > start:
                    yield Box(Lane(rank), part.words, start, clock, _KINDS[part.kind], str(part.micro_batch))
    for source, to, sent, begin, end, part in ran.messages:
        text, after = str(part.micro_batch), (source, sent)
        yield Box(Lane(source, f"to rank {to}"), "send", begin, end, "communication", text, after)
        yield Box(Lane(to, f"from rank {source}"), "recv", begin, end, "communication", text, after)
