"""Replay: when the events of a recording would happen on named hardware. Pure: numpy.

Computing takes ``hardware.compute_s``; a wait ends when the transfer that it waits for does; what a transfer takes is
``hardware.collective_s`` or ``p2p_s``, stretched by others on its link. Calls of a group go one after the other, and so
do messages from one rank to another. Each rank has a link inside its node and one to other nodes, in and out: a
collective fills both ways, a message the way out of its source and the way in at its destination. A group that spans
nodes is on the link between them. Ranks of a group that were not recorded are as quick as the recorded ones.
"""
from typing import NamedTuple

import numpy as np

from dtlab.errors import ConfigError
from dtlab.simulate.boxes import Lane, boxes_of_run, calls, channel, look
from dtlab.simulate.engine import Transfer, simulate
from dtlab.simulate.timeline import Timeline
from dtlab.theory import ALGORITHMS, base_op
from dtlab.validate import one_of


def replay(recording, hardware, *, algorithm=None):
    """The timeline of a recording on other hardware, live or dry.

    What does not depend on the hardware is kept with the recording: replaying it again takes milliseconds.

    Args:
        recording: ``Recording``; its times are not used, except thread-CPU times where ``hardware.cores`` is a number.
        hardware: ``Hardware`` with a device for each rank of the recording's world.
        algorithm: of the collectives that know it, ``"ring"``; the fastest for each if not given.

    Returns:
        Timeline.

    Raises:
        ConfigError: a recording without events or with more ranks than devices; an algorithm that no collective of it
            knows; a receive that names no source; programs that wait for each other for ever.

    Example:
        >>> replay(ranks.record(step), Hardware.preset("8xH100")).step_time_s          # doctest: +SKIP
        0.0123
    """
    if recording.world_size > hardware.num_devices:
        raise ConfigError(f"a recording of {recording.world_size:,} ranks does not fit {hardware.name}, which has "
                          f"{hardware.num_devices:,} devices: record as many ranks, or choose hardware with more")
    if recording.prepared is None:
        recording.prepared = _Prepared(recording)
    prepared = recording.prepared
    prepared.check(algorithm)
    programs, transfers = prepared.programs(hardware), prepared.transfers(hardware, algorithm)
    run = simulate(programs, transfers, cores=hardware.cores)
    devices = min(recording.world_size, hardware.cores or recording.world_size)
    return Timeline(boxes_of_run(run, programs, prepared.looks, prepared.shows),
                    tokens=recording.meta.get("tokens"), model_flops=recording.meta.get("model_flops"),
                    peak_flops=devices * hardware.peak_flops)  # fmt: skip


class _Call(NamedTuple):
    """A collective or a message, on any hardware; ``ranks`` are all members, or source and destination."""

    name: str
    op: str
    bytes: int
    ranks: tuple
    members: tuple
    lane: tuple

    @property
    def is_message(self):
        return self.op in ("send", "recv")


class _Prepared:
    """What a replay needs of a recording, whatever the hardware."""

    def __init__(self, recording):
        self.amounts, self.ends, self.actions, self.looks = {}, {}, {}, {}
        numbers, issues = {}, []  # call -> its number; number -> [(rank, issue), ...]
        for rank, events in recording.events.items():
            its_calls = {id(event): call for event, call in calls(rank, events)}
            for call in its_calls.values():
                if call not in numbers:
                    numbers[call] = len(issues)
                    issues.append([])
            steps = []
            self.amounts[rank] = _amounts(rank, events, its_calls, numbers, issues, steps)
            self.ends[rank], self.actions[rank], self.looks[rank] = map(list, zip(*steps)) if steps else ([], [], [])
        if not any(self.actions.values()):
            raise ConfigError(f"the recording of ranks {recording.ranks} has neither operations nor calls to replay: "
                              "record a function that computes on tensors")
        groups = recording.meta.get("groups", {})
        self.calls = [_call(call, its, groups) for call, its in zip(numbers, issues)]
        self.shows = [{rank: (channel(issue) or "group", issue.op, str(issue.phase.get("micro_batch", "")))
                       for rank, issue in its} for its in issues]  # fmt: skip

    def check(self, algorithm):
        known = {name for call in self.calls for name in ALGORITHMS.get(call.op, ())}
        if algorithm is not None:
            one_of("algorithm", algorithm, sorted(known) or sorted({name for op in ALGORITHMS.values() for name in op}))

    def programs(self, hardware):
        """Rank -> steps for ``simulate``."""
        programs = {}
        for rank, amounts in self.amounts.items():
            done = np.concatenate([[0.0], np.cumsum(hardware.compute_s(*amounts))])
            seconds = np.diff(done[self.ends[rank]], prepend=0.0)
            programs[rank] = list(zip(seconds.tolist(), self.actions[rank]))
        return programs

    def transfers(self, hardware, algorithm):
        """``Transfer``s in the order of their numbers."""
        kinds, costs = {}, {}
        for call in self.calls:
            kinds.setdefault((call.op, call.ranks), set()).add(call.bytes)
        for (op, ranks), sizes in kinds.items():
            costs.update(_costs(op, ranks, sorted(sizes), hardware, algorithm))
        links = {key: _links(*key, hardware) for key in {(call.is_message, call.ranks, call.members): 0
                                                         for call in self.calls}}  # fmt: skip
        return [Transfer(call.name, call.members, call.lane, *costs[call.op, call.ranks, call.bytes],
                         links[call.is_message, call.ranks, call.members]) for call in self.calls]  # fmt: skip


def _amounts(rank, events, its_calls, numbers, issues, steps):
    """FLOPs, bytes and CPU seconds of a rank's operations, three arrays; and its ``(end, action, look)`` steps.

    A step is a run of operations that look the same: up to operation number ``end``, then the action.
    """
    amounts, its_look = [], None
    for event in events:
        if event.kind == "compute":
            seen = look(event)
            if amounts and seen != its_look and (not steps or steps[-1][0] < len(amounts)):
                steps.append((len(amounts), None, its_look))
            its_look = its_look if seen == its_look else seen
            amounts.append((event.flops, event.bytes, event.cpu_s))
        elif id(event) in its_calls:
            number = numbers[its_calls[id(event)]]
            steps.append((len(amounts), number if event.kind == "issue" else ~number, its_look))
            if event.kind == "issue":
                issues[number].append((rank, event))
    if amounts and (not steps or steps[-1][0] < len(amounts)):
        steps.append((len(amounts), None, its_look))
    return np.array(amounts, dtype=float).reshape(-1, 3).T


def _call(call, issues, groups):
    """The ``_Call`` of what ranks issued under one key of ``boxes.calls``."""
    group, *ends, count = call
    members = tuple(sorted(rank for rank, _ in issues))
    num_bytes, op = max(issue.bytes for _, issue in issues), base_op(issues[0][1].op)
    if not ends:
        ranks = tuple(groups.get(group, members))
        return _Call(f"{op} {count} of {Lane(-1, group)}", op, num_bytes, ranks, members, (group,))
    source, destination, tag = ends
    if min(source, destination) < 0:
        raise ConfigError(f"rank {members[0]} receives from any rank ({issues[0][1].where or 'recv'}): from which one "
                          "depends on the hardware, so it cannot be replayed; name the source of the receive")
    name = f"message {count} from rank {source} to rank {destination}" + (f", tag {tag}" if tag else "")
    sent = [issue.bytes for rank, issue in issues if rank == source]  # the receiver's buffer may be larger
    return _Call(name, "send", max(sent, default=num_bytes), (source, destination), members,
                 (group, source, destination))  # fmt: skip


def _costs(op, ranks, sizes, hardware, algorithm):
    """``(op, ranks, bytes) -> (latency_s, transfer_s)``: a cost grows linearly in the bytes; the rest is latency."""
    sizes = np.array(sizes, dtype=float)
    near = sizes * (1 - 2.0**-10)
    if op == "send":
        times, less = (np.array([hardware.p2p_s(size, *ranks) for size in some]) for some in (sizes, near))
    else:
        chosen = algorithm if algorithm in ALGORITHMS.get(op, ()) else None
        times, less = (hardware.collective_s(op, some, ranks, algorithm=chosen) + 0 * some for some in (sizes, near))
    moving = np.clip((times - less) * 2.0**10, 0, times)
    return {(op, ranks, int(size)): cost for size, *cost in zip(sizes, (times - moving).tolist(), moving.tolist())}


def _links(is_message, ranks, members, hardware):
    """The links that a call fills: of its recorded members only."""
    nodes = {rank // hardware.node_size for rank in ranks}
    where = "inside" if len(nodes) == 1 else "between"
    ways = zip(ranks, ("out", "in")) if is_message else ((rank, way) for rank in members for way in ("out", "in"))
    return tuple((rank, where, way) for rank, way in ways if rank in members)
