"""Who did what when: boxes on lanes, from a recording or from a simulation."""
from dataclasses import dataclass
from typing import NamedTuple


class Lane(NamedTuple):
    """A row of a timeline: a rank's compute (no channel), or one of its channels of communication."""

    rank: int
    channel: str = ""


@dataclass(slots=True)
class Box:
    """A stretch of time on a lane."""

    lane: Lane
    label: str
    start_s: float
    end_s: float
    kind: str
    text: str = ""


class Timeline:
    """Boxes on lanes."""

    def __init__(self, boxes):
        self.boxes = list(boxes)
