"""A recording or a timeline as a trace in the Trace Event Format, which Perfetto and chrome://tracing read."""
import json

from dtlab.simulate.boxes import Lane, rows
from dtlab.simulate.events import plain
from dtlab.simulate.tables import live_bytes
from dtlab.simulate.timeline import Timeline


def write_chrome_trace(source, path):
    """Write the trace of a live recording or a timeline: a process per rank, a thread per lane.

    Times are microseconds. Communication under way at once on one lane stands on further threads of the same name. A
    recording's trace has every operation and a counter of live bytes; a timeline's, the boxes.

    Raises:
        ConfigError: the recording is dry: its events have no times.
    """
    timeline = source if isinstance(source, Timeline) else Timeline.of(source)
    recorded = {} if source is timeline else source.events
    entries = [entry for rank in recorded or timeline.ranks for entry in _rank(rank, recorded.get(rank), timeline)]
    document = {"traceEvents": entries, "displayTimeUnit": "ms"}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(document, file, default=plain)


def _rank(rank, events, timeline):
    yield _named("process_name", rank, 0, f"rank {rank}")
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
    yield _named("thread_name", rank, 0, "compute")
    for event in events or ():
        if event.kind in ("phase", "compute", "wait", "issue"):
            name = {"phase": event.op, "wait": f"wait for {event.op}", "issue": f"call {event.op}"}.get(event.kind)
            details = {key: getattr(event, key) for key in ("flops", "bytes", "where", "phase") if getattr(event, key)}
            yield _stretch(name or event.op, event.kind, rank, 0, event, details)
    for tid, (lane, row) in enumerate(_tracks(rank, timeline)):
        if lane.channel:
            yield _named("thread_name", rank, tid, str(lane))
        for box in row if lane.channel or events is None else ():
            yield _stretch(box.label, box.kind, rank, tid, box, {"micro_batch": box.text} if box.text else {})
    for event, live in live_bytes(events or ()):
        yield {"ph": "C", "name": "live bytes", "pid": rank, "tid": 0, "ts": event.start_s * 1e6, "args": dict(live)}


def _tracks(rank, timeline):
    """``(lane, boxes)`` by thread of a rank; the first is compute."""
    by_lane = {lane: [] for lane in (Lane(rank), *timeline.lanes) if lane.rank == rank}
    for box in timeline.boxes:
        if box.lane.rank == rank:
            by_lane[box.lane].append(box)
    return [(lane, row) for lane, its in by_lane.items() for row in (rows(its) if lane.channel else [its])]


def _named(what, rank, tid, name):
    return {"ph": "M", "name": what, "pid": rank, "tid": tid, "args": {"name": name}}


def _stretch(name, category, rank, tid, timed, details):
    start, end = (round(time_s * 1e6, 3) for time_s in (timed.start_s, timed.end_s))  # whole ns: threads still nest
    return {"ph": "X", "name": name, "cat": category, "pid": rank, "tid": tid, "ts": start,
            "dur": round(end - start, 3), "args": details}
