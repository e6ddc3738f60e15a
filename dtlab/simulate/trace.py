"""A recording as a trace in the Trace Event Format, which Perfetto and chrome://tracing read."""
import json

from dtlab.simulate.events import plain
from dtlab.simulate.tables import live_bytes
from dtlab.simulate.timeline import Timeline, rows


def write_chrome_trace(recording, path):
    """Write the trace of a live recording: a process per rank, a thread per lane, a counter of live bytes.

    Times are microseconds. Communication under way at once on one lane stands on further threads of the same name.

    Raises:
        ConfigError: the recording is dry: its events have no times.
    """
    timeline = Timeline.of(recording)
    entries = [entry for rank, events in recording.events.items() for entry in _rank(rank, events, timeline)]
    document = {"traceEvents": entries, "displayTimeUnit": "ms", "otherData": {"world_size": recording.world_size}}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(document, file, default=plain)


def _rank(rank, events, timeline):
    yield _named("process_name", rank, 0, f"rank {rank}")
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
    yield _named("thread_name", rank, 0, "compute")
    for event in events:
        if event.kind in ("phase", "compute", "wait", "issue"):
            name = {"phase": event.op, "wait": f"wait for {event.op}", "issue": f"call {event.op}"}.get(event.kind)
            details = {key: getattr(event, key) for key in ("flops", "bytes", "where", "phase") if getattr(event, key)}
            yield _stretch(name or event.op, event.kind, rank, 0, event, details)
    lanes = [lane for lane in timeline.lanes if lane.rank == rank and lane.channel]
    tracks = [(lane, row) for lane in lanes for row in rows([box for box in timeline.boxes if box.lane == lane])]
    for tid, (lane, row) in enumerate(tracks, start=1):
        yield _named("thread_name", rank, tid, str(lane))
        for box in row:
            yield _stretch(box.label, box.kind, rank, tid, box, {"micro_batch": box.text} if box.text else {})
    for event, live in live_bytes(events):
        yield {"ph": "C", "name": "live bytes", "pid": rank, "tid": 0, "ts": event.start_s * 1e6, "args": dict(live)}


def _named(what, rank, tid, name):
    return {"ph": "M", "name": what, "pid": rank, "tid": tid, "args": {"name": name}}


def _stretch(name, category, rank, tid, timed, details):
    start, end = (round(time_s * 1e6, 3) for time_s in (timed.start_s, timed.end_s))  # whole ns: threads still nest
    return {"ph": "X", "name": name, "cat": category, "pid": rank, "tid": tid, "ts": start,
            "dur": round(end - start, 3), "args": details}
