"""Timelines: boxes on lanes, what they measure, and the path that decides the step time."""
import functools
from typing import NamedTuple

from dtlab.errors import ConfigError
from dtlab.simulate.boxes import BOX_KINDS, Lane, communication_boxes, compute_boxes


class Timeline:
    """Boxes on lanes and what they measure; a notebook shows it as a picture.

    A rank is *busy* while a box other than idle lies on its compute lane, else *idle*, whether it waits or has not
    begun or has ended. All times are seconds.

    Args:
        boxes: ``Box``es; those of one compute lane do not overlap.
        tokens: tokens that all ranks together process; for ``tokens_per_s``.
        model_flops: FLOPs that the model needs for them, by formula; for ``mfu``.
        peak_flops: FLOP/s of all devices together; for ``mfu``.

    Attributes:
        boxes: list of ``Box``, lane by lane, by start.
        lanes: list of ``Lane``: by rank, compute first.
        ranks: list of the ranks that have a lane.
    """

    def __init__(self, boxes, *, tokens=None, model_flops=None, peak_flops=None):
        by_lane = {}
        for box in boxes:
            by_lane.setdefault(box.lane, []).append(box)
        self.lanes = sorted(by_lane)
        self._by_lane = {lane: sorted(by_lane[lane], key=lambda box: box.start_s) for lane in self.lanes}
        self.boxes = [box for its in self._by_lane.values() for box in its]
        self.ranks = list(dict.fromkeys(lane.rank for lane in self.lanes))
        self.tokens, self.model_flops, self.peak_flops = tokens, model_flops, peak_flops

    @classmethod
    def of(cls, recording):
        """The timeline of a live recording.

        Raises:
            ConfigError: the recording is dry: its events have no times.
        """
        if recording.meta.get("dry"):
            raise ConfigError("a dry recording has no times (its tensors were fake), so there is no timeline of it: "
                              'give it times with replay(recording, Hardware.preset("8xH100")), '
                              "or record it live with ranks.record(fn)")
        boxes = [box for rank, events in recording.events.items() for box in compute_boxes(rank, events)]
        boxes += communication_boxes(recording.events)
        return cls(boxes, tokens=recording.meta.get("tokens"), model_flops=recording.meta.get("model_flops"))

    @functools.cached_property
    def start_s(self):
        """When the first box begins (seconds)."""
        return min((box.start_s for box in self.boxes), default=0.0)

    @functools.cached_property
    def step_time_s(self):
        """From the beginning of the first box to the end of the last one, over all ranks (seconds)."""
        return max((box.end_s for box in self.boxes), default=0.0) - self.start_s

    @property
    def exposed_communication_s(self):
        """How long a rank waits while communication of its own is under way, on the rank where it is most (seconds).

        In a simulation communication is under way while its bytes move; in a recording from the call to the end of
        the wait, so that it includes waiting for ranks that call later.
        """
        return max((spent.exposed_s for spent in self._spent.values()), default=0.0)

    @property
    def bubble_fraction(self):
        """Idle share of all ranks' time: idle / (ranks x step time), 0 to 1; for 1F1B (p-1) / (m+p-1)."""
        total = len(self.ranks) * self.step_time_s
        return 1 - self._busy_s / total if total else 0.0

    @property
    def bubble_overhead(self):
        """Idle time for each second of work: idle / busy, over all ranks; for 1F1B (p-1) / m."""
        return len(self.ranks) * self.step_time_s / self._busy_s - 1 if self._busy_s else 0.0

    @property
    def stage_bubble_fraction(self):
        """Idle share of the rank with the longest span from its first work to the end of its last, 0 to 1.

        Idle before and after does not count: the measure of the zero-bubble papers.
        """
        shares = [(spent.span_s, 1 - spent.busy_s / spent.span_s) for spent in self._spent.values() if spent.span_s]
        return max(shares, default=(0.0, 0.0))[1]

    @property
    def tokens_per_s(self):
        """Tokens / step time, of all ranks together.

        Raises:
            ConfigError: the tokens are not known.
        """
        return self._per_s("tokens_per_s", tokens=self.tokens)

    @property
    def mfu(self):
        """Model FLOPs utilisation: model_flops / (step time x peak FLOP/s of all devices), 0 to 1.

        Raises:
            ConfigError: the model's FLOPs or the hardware are not known.
        """
        return self._per_s("mfu", model_flops=self.model_flops, hardware=self.peak_flops) / self.peak_flops

    def _per_s(self, name, **needs):
        for need, value in needs.items():
            if value is None:
                cure = ("replay(recording, hardware)" if need == "hardware" else
                        f"ranks.record(fn, {need}=...), record_dry(fn, {need}=...) or recording.meta[{need!r}] = ...")
                raise ConfigError(f"{name} needs {need}, which events cannot know: {cure}")
        if not self.step_time_s:
            raise ConfigError(f"{name}: the timeline has no length")
        return next(iter(needs.values())) / self.step_time_s

    @functools.cached_property
    def critical_path(self):
        """What the step time is made of: ``[Box, ...]`` in order of time, each of which held up the next.

        Compute boxes are cut where the path leaves them for a call. In a simulation the boxes follow each other without
        a gap; in a recording there are gaps where nothing was recorded.
        """
        from dtlab.simulate.path import critical_path

        return critical_path(self._by_lane)

    def by_rank(self):
        """A DataFrame with one row per rank, in seconds.

        Columns: busy_s, idle_s (their sum is the step time), communication_s (under way; calls at once count once),
        exposed_communication_s (part of it in which the rank waited).
        """
        import pandas as pd

        rows = [(spent.busy_s, self.step_time_s - spent.busy_s, spent.communication_s, spent.exposed_s)
                for spent in self._spent.values()]
        columns = ["busy_s", "idle_s", "communication_s", "exposed_communication_s"]
        return pd.DataFrame(rows, index=pd.Index(self.ranks, name="rank"), columns=columns)

    def seconds(self, rank):
        """How long a rank was busy with each kind of box, ``{kind: seconds}``; calls under way at once count once."""
        spans = {kind: [] for kind in BOX_KINDS}
        for lane in self.lanes:
            for box in self._by_lane[lane] if lane.rank == rank else ():
                spans[box.kind].append((box.start_s, box.end_s))
        spent = {kind: sum(end - start for start, end in _union(its)) for kind, its in spans.items()}
        return {kind: time_s for kind, time_s in spent.items() if time_s}

    @functools.cached_property
    def _spent(self):
        """Rank -> _Spent."""
        spent = {}
        for rank in self.ranks:
            compute = self._by_lane.get(Lane(rank), [])
            work = [box for box in compute if box.kind != "idle"]
            waits = [(box.start_s, box.end_s) for box in compute if box.kind == "idle"]
            calls = _union([(box.start_s, box.end_s) for lane in self.lanes if lane.rank == rank and lane.channel
                            for box in self._by_lane[lane]])
            spent[rank] = _Spent(sum(box.end_s - box.start_s for box in work),
                                 max(box.end_s for box in work) - work[0].start_s if work else 0.0,
                                 sum(end - start for start, end in calls), _common(_union(waits), calls))
        return spent

    @functools.cached_property
    def _busy_s(self):
        return sum(spent.busy_s for spent in self._spent.values())

    def to_chrome_trace(self, path):
        """Write a trace for https://ui.perfetto.dev or chrome://tracing."""
        from dtlab.simulate.trace import write_chrome_trace

        write_chrome_trace(self, path)

    def __repr__(self):
        unit, size = unit_of(self.step_time_s)
        total = f"{self.step_time_s / size:.4g} {unit}"
        lines = [f"Timeline: {total}"]
        for rank, spent in self._spent.items():
            parts = {**self.seconds(rank), "idle": self.step_time_s - spent.busy_s}
            parts.pop("communication", None)
            line = " + ".join(f"{kind} {time_s / size:.4g}" for kind, time_s in parts.items())
            lines.append(f"rank {rank}: {line} = {total}")
            if spent.communication_s:
                exposed, moving = spent.exposed_s / size, spent.communication_s / size
                lines[-1] += (f"; communication: exposed {exposed:.4g} + hidden {moving - exposed:.4g} = "
                              f"{moving:.4g} {unit}")  # fmt: skip
        return "\n".join(lines)

    def _repr_svg_(self):
        from dtlab.plots.timeline import timeline

        return str(timeline(self))


def unit_of(time_s):
    """The unit to tell a time in: ``(name, seconds)``."""
    return next(((name, size) for name, size in (("s", 1), ("ms", 1e-3)) if time_s >= size), ("us", 1e-6))


class _Spent(NamedTuple):
    """Of one rank, in seconds; the span is from its first work to the end of its last."""

    busy_s: float
    span_s: float
    communication_s: float
    exposed_s: float


def _union(spans):
    """``(start, end)`` spans as ones that do not touch, in order."""
    joined = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            if end > joined[-1][1]:
                joined[-1] = joined[-1][0], end
        else:
            joined.append((start, end))
    return joined


def _common(first, second):
    """How long two lists of joined spans meet (seconds)."""
    total, at = 0.0, 0
    for start, end in first:
        while at < len(second) and second[at][1] <= start:
            at += 1
        for begin, stop in second[at:]:
            if begin >= end:
                break
            total += min(end, stop) - max(start, begin)
    return total
