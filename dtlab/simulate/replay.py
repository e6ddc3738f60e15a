"""Replay: when the events of a recording would happen on named hardware. Pure: numpy.

Computing takes ``hardware.compute_s``; a sleep lasts as long as it did, and takes no core; a wait ends when the
transfer that it waits for does; what a transfer takes is ``hardware.collective_s`` or ``p2p_s``, stretched by others
on its link. Calls of a group go one after the other, and so do messages from one rank to another. Each rank has a
link inside its node and one to other nodes, in and out: a collective fills both ways, a message the way out of its
source and the way in at its destination. A group that spans nodes is on the link between them. Ranks of a group that
were not recorded are as quick as the recorded ones.
"""
from typing import NamedTuple

import numpy as np

from dtlab.errors import ConfigError
from dtlab.simulate.boxes import Lane, boxes_of_run, calls, channel, look
from dtlab.simulate.engine import Transfer, simulate
from dtlab.simulate.events import Recording
from dtlab.simulate.hardware import Hardware
from dtlab.simulate.timeline import Timeline
from dtlab.theory import ALGORITHMS, base_op
from dtlab.validate import one_of


def replay(recording, hardware, *, algorithm=None):
    """The timeline of a recording on other hardware, live or dry.

    What does not depend on the hardware is kept with the recording: replaying it again takes milliseconds.

    Args:
        recording: ``Recording``; its times are not used, except sleeps, and thread-CPU times where
            ``hardware.cores`` is a number.
        hardware: ``Hardware`` with a device for each rank of the recording's world.
        algorithm: of the collectives that know it, ``"ring"`` (``"hierarchical"``: where the group spans nodes); the
            fastest for each other one, and for all if not given.

    Returns:
        Timeline.

    Raises:
        ConfigError: a recording without events or with more ranks than devices; an algorithm that no collective of it
            knows; ranks that made different calls; a receive that names no source; programs that wait for each other
            for ever.

    Example:
        >>> replay(ranks.record(step), Hardware.preset("8xH100")).step_time_s          # doctest: +SKIP
        0.0123
    """
    if not isinstance(recording, Recording):
        raise ConfigError(f"recording ({recording!r}) must be what ranks.record, record_dry or Recording.load returned")
    if not isinstance(hardware, Hardware):
        raise ConfigError(f"hardware ({hardware!r}) must be Hardware, such as Hardware.preset(\"8xH100\")")
    if recording.world_size > hardware.num_devices:
        raise ConfigError(f"a recording of {recording.world_size:,} ranks does not fit {hardware.name}, which has "
                          f"{hardware.num_devices:,} devices: record as many ranks, or choose hardware with more")
    if recording.prepared is None:
        recording.prepared = _Prepared(recording)
    prepared = recording.prepared
    prepared.check(algorithm)
    programs, transfers = prepared.programs(hardware), prepared.transfers(hardware, algorithm)
    run = simulate(programs, transfers, cores=hardware.cores, asleep=prepared.asleep)
    devices = min(recording.world_size, hardware.cores or recording.world_size)
    return Timeline(boxes_of_run(run, programs, prepared.looks, prepared.shows),
                    tokens=recording.meta.get("tokens"), model_flops=recording.meta.get("model_flops"),
                    peak_flops=devices * hardware.peak_flops)  # fmt: skip


class _Kind(NamedTuple):
    """What calls have in common. ``ranks``: the whole group, or source and destination; ``members``: the recorded."""

    op: str
    ranks: tuple
    members: tuple


class _Prepared:
    """What a replay needs of a recording, whatever the hardware."""

    def __init__(self, recording):
        self.amounts, self.slept, self.ends, self.actions, self.looks, self.asleep = {}, {}, {}, {}, {}, {}
        numbers, issues = {}, []  # call -> its number; number -> [(rank, issue), ...]
        for rank, events in recording.events.items():
            its_calls = {id(event): call for event, call in calls(rank, events)}
            for call in its_calls.values():
                if call not in numbers:
                    numbers[call] = len(issues)
                    issues.append([])
            steps = []
            *self.amounts[rank], self.slept[rank] = _amounts(rank, events, its_calls, numbers, issues, steps)
            self.asleep[rank] = {at for at, (end, *_) in enumerate(steps) if end and self.slept[rank][end - 1]}
            self.ends[rank], self.actions[rank], self.looks[rank] = map(list, zip(*steps)) if steps else ([], [], [])
        if not any(self.actions.values()):
            raise ConfigError(f"the recording of ranks {recording.ranks} has neither operations nor calls to replay: "
                              "record a function that computes on tensors")
        kinds, groups = {}, recording.meta.get("groups", {})
        self.calls = []  # (name, members, lane, number of its kind, bytes)
        for call, its in zip(numbers, issues):
            name, lane, num_bytes, kind = _described(call, its, groups, recording.events)
            self.calls.append((name, kind.members, lane, kinds.setdefault(kind, len(kinds)), num_bytes))
        self.kinds = list(kinds)
        self.shows = [{rank: (channel(issue) or "group", issue.op, str(issue.phase.get("micro_batch", "")))
                       for rank, issue in its} for its in issues]  # fmt: skip

    def check(self, algorithm):
        known = {name for kind in self.kinds for name in ALGORITHMS.get(kind.op, ())}
        if algorithm is not None:
            one_of("algorithm", algorithm, sorted(known) or sorted({name for op in ALGORITHMS.values() for name in op}))

    def programs(self, hardware):
        """Rank -> steps for ``simulate``."""
        programs = {}
        for rank, amounts in self.amounts.items():
            slept = self.slept[rank]
            seconds = np.where(slept > 0, slept, hardware.compute_s(*amounts))
            done = np.concatenate([[0.0], np.cumsum(seconds)])
            seconds = np.diff(done[self.ends[rank]], prepend=0.0)
            programs[rank] = list(zip(seconds.tolist(), self.actions[rank]))
        return programs

    def transfers(self, hardware, algorithm):
        """``Transfer``s in the order of their numbers."""
        sizes = [set() for _ in self.kinds]
        for *_, kind, num_bytes in self.calls:
            sizes[kind].add(num_bytes)
        costs = [_costs(kind, sorted(its), hardware, algorithm) for kind, its in zip(self.kinds, sizes)]
        return [Transfer(name, members, lane, *costs[kind][num_bytes])
                for name, members, lane, kind, num_bytes in self.calls]  # fmt: skip


def _amounts(rank, events, its_calls, numbers, issues, steps):
    """FLOPs, bytes, CPU seconds and sleep of a rank's operations, four arrays; and its ``(end, action, look)`` steps.

    A step is one sleep, or a run of operations that look the same: up to operation number ``end``, then the action.
    """
    amounts, its_look = [], None
    for event in events:
        if event.kind == "compute":
            seen = look(event)
            sleep_s = event.end_s - event.start_s if event.op == "sleep" else 0.0
            is_new = amounts and (seen != its_look or sleep_s or amounts[-1][3])
            if is_new and (not steps or steps[-1][0] < len(amounts)):
                steps.append((len(amounts), None, its_look))
            its_look = its_look if seen == its_look else seen
            amounts.append((event.flops, event.bytes, event.cpu_s, sleep_s))
        elif id(event) in its_calls:
            number = numbers[its_calls[id(event)]]
            steps.append((len(amounts), number if event.kind == "issue" else ~number, its_look))
            if event.kind == "issue":
                issues[number].append((rank, event))
    if amounts and (not steps or steps[-1][0] < len(amounts)):
        steps.append((len(amounts), None, its_look))
    return np.array(amounts, dtype=float).reshape(-1, 4).T


def _described(call, issues, groups, recorded):
    """``(name, lane, bytes, _Kind)`` of what ranks issued under one key of ``boxes.calls``."""
    group, *ends, count = call
    callers = tuple(sorted(rank for rank, _ in issues))
    num_bytes, op = max(issue.bytes for _, issue in issues), base_op(issues[0][1].op)
    if not ends:
        if other := next((its for its in issues if base_op(its[1].op) != op), None):
            raise ConfigError(f"call {count} of {Lane(-1, group)} is {op} on rank {issues[0][0]} and "
                              f"{base_op(other[1].op)} on rank {other[0]} ({other[1].where or 'place not known'}): "
                              "these ranks would not have met; record a program in which all make the same calls")
        ranks = tuple(groups.get(group, callers))
        kind = _Kind(op, ranks, tuple(rank for rank in ranks if rank in recorded))
        return f"{op} {count} of {Lane(-1, group)}", group, num_bytes, kind
    source, destination, tag = ends
    if min(source, destination) < 0:
        raise ConfigError(f"rank {callers[0]} receives from any rank ({issues[0][1].where or 'recv'}): from which one "
                          "depends on the hardware, so it cannot be replayed; name the source of the receive")
    sent = [issue.bytes for rank, issue in issues if rank == source]  # the receiver's buffer may be larger
    name = f"message {count} from rank {source} to rank {destination}" + (f", tag {tag}" if tag else "")
    kind = _Kind("send", (source, destination), tuple(rank for rank in (source, destination) if rank in recorded))
    return name, (group, source, destination), max(sent, default=num_bytes), kind


def _costs(kind, sizes, hardware, algorithm):
    """``bytes -> (latency_s, transfer_s, links)``: a cost grows linearly in the bytes; the rest is latency."""
    sizes = np.array(sizes, dtype=float)
    near = sizes * (1 - 2.0**-10)
    if kind.op == "send":
        times, less = (np.array([hardware.p2p_s(size, *kind.ranks) for size in some]) for some in (sizes, near))
    else:
        is_known = algorithm in ALGORITHMS.get(kind.op, ())
        chosen = algorithm if is_known and (algorithm, _where(kind, hardware)) != ("hierarchical", "inside") else None
        times, less = (hardware.collective_s(kind.op, some, kind.ranks, chosen) + 0 * some for some in (sizes, near))
    moving, links = np.clip((times - less) * 2.0**10, 0, times), _links(kind, hardware)
    return {int(size): (time_s - part_s, part_s, links)
            for size, time_s, part_s in zip(sizes, times.tolist(), moving.tolist())}  # fmt: skip


def _where(kind, hardware):
    return "inside" if len({rank // hardware.node_size for rank in kind.ranks}) == 1 else "between"


def _links(kind, hardware):
    """The links that a call fills, of recorded ranks only: ``(rank, where, way)``."""
    where = _where(kind, hardware)
    if kind.op == "send":
        return tuple((rank, where, way) for rank, way in zip(kind.ranks, ("out", "in")) if rank in kind.members)
    return tuple((rank, where, way) for rank in kind.members for way in ("out", "in"))
