"""Who did what when: boxes on lanes, from a recording or from a simulation.

A rank has one lane of compute, one of communication per group, and one per direction of its messages. A box of
communication lasts from the call to the end of its wait (where nobody waited, to the end of the call): when the bytes
really moved in between, a rank cannot see. Where two are under way at once on one lane, the lane has rows.
"""
from dataclasses import dataclass
from typing import NamedTuple

from dtlab.errors import ConfigError

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
    """

    lane: Lane
    label: str
    start_s: float
    end_s: float
    kind: str
    text: str = ""


class Timeline:
    """Boxes on lanes; a notebook shows it as a picture.

    Attributes:
        boxes: list of ``Box``; those of one compute lane do not overlap.
        lanes: list of ``Lane``: by rank, compute first.
    """

    def __init__(self, boxes):
        self.boxes = sorted(boxes, key=lambda box: (box.lane, box.start_s))
        self.lanes = list(dict.fromkeys(box.lane for box in self.boxes))

    @classmethod
    def of(cls, recording):
        """The timeline of a live recording.

        Raises:
            ConfigError: the recording is dry: its events have no times.
        """
        if recording.meta.get("dry"):
            raise ConfigError("a dry recording has no times (its tensors were fake), so there is no timeline of it: "
                              "record it live with ranks.record(fn)")
        return cls([box for rank, events in recording.events.items()
                    for box in (*_compute(rank, events), *_communication(rank, events))])

    @property
    def start_s(self):
        """When the first box begins (seconds)."""
        return min((box.start_s for box in self.boxes), default=0.0)

    @property
    def step_time_s(self):
        """From the beginning of the first box to the end of the last one, over all ranks (seconds)."""
        return max((box.end_s for box in self.boxes), default=0.0) - self.start_s

    def seconds(self, rank):
        """How long a rank was busy with each kind of box, ``{kind: seconds}``; calls under way at once count once."""
        spent, seen = dict.fromkeys(BOX_KINDS, 0.0), dict.fromkeys(BOX_KINDS, float("-inf"))
        for box in sorted(self.boxes, key=lambda box: box.start_s):
            if box.lane.rank == rank and box.end_s > seen[box.kind]:
                spent[box.kind] += box.end_s - max(box.start_s, seen[box.kind])
                seen[box.kind] = box.end_s
        return {kind: time_s for kind, time_s in spent.items() if time_s}

    def __repr__(self):
        lines = [f"Timeline: {self.step_time_s * 1e3:.4g} ms"]
        for rank in dict.fromkeys(lane.rank for lane in self.lanes):
            spent = (f"{kind} {time_s * 1e3:.4g} ms" for kind, time_s in self.seconds(rank).items())
            lines.append(f"rank {rank}: {', '.join(spent)}")
        return "\n".join(lines)

    def _repr_svg_(self):
        from dtlab.plots.timeline import timeline

        return str(timeline(self))


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


def _look(event):
    """``(label, kind, text)`` of an event on the compute lane; what looks the same is one box."""
    if event.kind == "wait":
        return f"waits for {event.op}" + (f" {_channel(event)}" if event.peer >= 0 else ""), "idle", ""
    details = {name: value for name, value in event.phase.items() if name != "name"}
    name = event.phase.get("name", "compute")
    label = ", ".join([name, *(f"{key.replace('micro_batch', 'micro-batch')} {v}" for key, v in details.items())])
    return label, _kind(name), str(details.get("micro_batch", ""))


def _compute(rank, events):
    """Boxes of the compute lane: phases, operations and waits lie inside each other; the innermost is seen."""
    spans = sorted(((e.start_s, e.end_s, _look(e)) for e in events if e.kind in ("phase", "compute", "wait")),
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

    for start, end, look in spans:
        run_to(start)
        now = max(now, start)
        opened.append((end, look))
    run_to(float("inf"))
    return boxes


def _channel(event):
    """The lane of a communication event."""
    if "send" in event.op or "recv" in event.op:
        peer = f"rank {event.peer}" if event.peer >= 0 else "any rank"
        return f"{'from' if 'recv' in event.op else 'to'} {peer}"
    return event.group


def _communication(rank, events):
    """Boxes of the communication lanes, each from a call to the end of its wait."""
    boxes, under_way = [], {}
    for event in events:
        key = (_channel(event), event.group, event.op, event.tag, event.seq)
        if event.kind == "issue":
            box = Box(Lane(rank, key[0] or "group"), event.op, event.start_s, event.end_s, "communication",
                      str(event.phase.get("micro_batch", "")))
            boxes.append(box)
            under_way.setdefault(key, []).append(box)
        elif event.kind == "wait" and under_way.get(key):
            box = under_way[key].pop(0)
            box.end_s = max(box.end_s, event.end_s)
    return boxes
