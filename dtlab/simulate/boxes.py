"""Boxes on lanes: who did what when, read off a recording or off a run of the simulator.

A rank has one lane of compute, one of communication per group, and one per direction of its messages. In a recording a
box of communication lasts from the call to the end of its wait (where nobody waited, to the end of the call): when the
bytes really moved in between, a rank cannot see. In a simulation it lasts while they move.
"""
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

BOX_KINDS = ("forward", "backward", "weight", "optimizer", "compute", "communication", "idle")


class Lane(NamedTuple):
    """A row of a timeline: a rank's compute (no channel), or one of its channels: a group's id or a message's way."""

    rank: int
    channel: str = ""

    def __str__(self):
        if "#" not in self.channel:
            return self.channel or f"rank {self.rank}"
        ranks, _, rest = self.channel.partition("#")
        ordinal, _, name = rest.partition(":")
        return f"{ranks} {name if name not in ('', 'undefined') else '#' + ordinal}"


@dataclass(slots=True)
class Box:
    """A stretch of time on a lane.

    Attributes:
        lane: where it lies.
        label: what it was, in words: ``"forward, stage 1, micro-batch 3"``, ``"all_reduce"``.
        start_s, end_s: seconds.
        kind: one of ``BOX_KINDS``.
        text: what to print in the box beside the kind's letter, mostly the micro-batch's number.
        after: communication and waits for it: ``(rank, time)`` of the last call that it needed, where that is known.
    """

    lane: Lane
    label: str
    start_s: float
    end_s: float
    kind: str
    text: str = ""
    after: tuple = ()


def rows(boxes):
    """Boxes of one lane, in order of their start, in as few rows as keep those of a row apart."""
    packed = []
    for box in boxes:
        row = next((row for row in packed if row[-1].end_s <= box.start_s), None)
        if row is None:
            packed.append(row := [])
        row.append(box)
    return packed


def _kind(name):
    """The kind of box for a phase's name, spelled ``backward_weight`` or ``BackwardWeight``."""
    name = name.lower()
    if "weight" in name:
        return "weight"
    return next((kind for kind in ("forward", "backward", "optimizer") if name.startswith(kind)), "compute")


def look(event):
    """``(label, kind, text)`` of an event on the compute lane; what looks the same is one box."""
    if event.kind == "wait":
        return f"waits for {event.op}" + (f" {channel(event)}" if event.peer >= 0 else ""), "idle", ""
    details = {name: value for name, value in event.phase.items() if name != "name"}
    name = event.phase.get("name", "compute")
    label = ", ".join([name, *(f"{key.replace('micro_batch', 'micro-batch')} {v}" for key, v in details.items())])
    return label, _kind(name), str(details.get("micro_batch", ""))


def compute_boxes(rank, events):
    """Boxes of the compute lane: phases, operations and waits lie inside each other; the innermost is seen."""
    spans = sorted(((e.start_s, e.end_s, look(e)) for e in events if e.kind in ("phase", "compute", "wait")),
                   key=lambda span: (span[0], -span[1]))
    boxes, opened, now = [], [], 0.0

    def run_to(time_s):
        """Draw the innermost open spans up to a time."""
        nonlocal now
        while opened and now < time_s:
            end, (label, kind, text) = opened[-1]
            stop = min(end, time_s)
            last = boxes[-1] if boxes else None
            if stop > now and last and (last.end_s, last.label, last.kind) == (now, label, kind):
                last.end_s = stop
            elif stop > now:
                boxes.append(Box(Lane(rank), label, now, stop, kind, text))
            now = max(now, stop)
            if end <= time_s:
                opened.pop()

    for start, end, its_look in spans:
        run_to(start)
        now = max(now, start)
        opened.append((end, its_look))
    run_to(float("inf"))
    return boxes


def channel(event):
    """The lane of a communication event."""
    if "send" in event.op or "recv" in event.op:
        peer = f"rank {event.peer}" if event.peer >= 0 else "any rank"
        return f"{'from' if 'recv' in event.op else 'to'} {peer}"
    return event.group


def calls(rank, events):
    """Yield ``(event, call)`` for each issue of a rank and the wait that ends it.

    A call is equal on all ranks that take part: ``(group, how many on it before)`` of a collective, ``(group, source,
    destination, tag, how many before)`` of a message.
    """
    counts, under_way = Counter(), {}
    for event in events:
        own = event.op, event.group, event.peer, event.tag, event.seq
        if event.kind == "issue":
            ends = {"to": (rank, event.peer, event.tag), "from": (event.peer, rank, event.tag)}
            way = event.group, *ends.get(channel(event).partition(" ")[0], ())
            call = *way, counts[way]
            counts[way] += 1
            under_way.setdefault(own, []).append(call)
            yield event, call
        elif event.kind == "wait" and under_way.get(own):
            yield event, under_way[own].pop(0)


def communication_boxes(events):
    """Boxes of the communication lanes, each from a call to the end of its wait."""
    boxes = {}  # call -> rank -> box
    for rank, its in events.items():
        for event, call in calls(rank, its):
            members = boxes.setdefault(call, {})
            if event.kind == "issue":
                members[rank] = Box(Lane(rank, channel(event) or "group"), event.op, event.start_s, event.end_s,
                                    "communication", str(event.phase.get("micro_batch", "")))
            else:
                members[rank].end_s = max(members[rank].end_s, event.end_s)
    for members in boxes.values():
        last = max(members, key=lambda rank: members[rank].start_s)
        for box in members.values():
            box.after = last, members[last].start_s
    return [box for members in boxes.values() for box in members.values()]


def boxes_of_run(run, programs, looks, shows):
    """The boxes of ``engine.simulate``'s answer.

    Args:
        run: ``engine.Run``.
        programs: as given to ``simulate``.
        looks: rank -> for each step ``(label, kind, text)``; neighbours of the same object are one box.
        shows: for each transfer ``{rank: (channel, label, text)}``: where and how it is seen.

    Returns:
        list of ``Box``.
    """
    boxes = []
    for rank, ends in run.ended.items():
        lane, last, seen, clock, steps = Lane(rank), None, None, 0.0, zip(ends, programs[rank], looks[rank])
        for ended, (_, action), its_look in steps:
            if ended > clock and last is not None and seen is its_look:
                last.end_s = ended
            elif ended > clock:
                seen, (label, kind, text) = its_look, its_look
                last = Box(lane, label, clock, ended, kind, text)
                boxes.append(last)
            clock = ended
            if action is not None and action < 0 and run.moved[~action][1] > clock:
                name, label, _ = shows[~action][rank]
                label = f"waits for {label}" + (f" {name}" if name.startswith(("to ", "from ")) else "")
                boxes.append(Box(lane, label, clock, run.moved[~action][1], "idle", "", run.called[~action]))
                last, clock = None, run.moved[~action][1]
    for moved, called, seen in zip(run.moved, run.called, shows):
        if moved and moved[0] < moved[1]:
            boxes += [Box(Lane(rank, name), label, *moved, "communication", text, called)
                      for rank, (name, label, text) in seen.items()]
    return boxes
