"""The critical path of a timeline: what would have to be shorter for the step to be shorter."""
from bisect import bisect_left
from dataclasses import replace


def critical_path(by_lane):
    """Walk back from the end of the last box, and from what waited to what it waited for.

    Args:
        by_lane: lane -> its boxes by start.

    Returns:
        list of boxes in order of time, cut where the path enters or leaves in the middle of one.
    """
    boxes = [box for its in by_lane.values() for box in its]
    compute = {lane.rank: its for lane, its in by_lane.items() if not lane.channel}
    calls = {(box.lane.rank, box.end_s): box for box in boxes if box.kind == "communication"}
    on_lane = {(box.lane, box.end_s): box for box in boxes if box.start_s < box.end_s}
    starts = {rank: [box.start_s for box in its] for rank, its in compute.items()}
    last = max(boxes, key=lambda box: box.end_s, default=None)
    if last is None:
        return []
    rank, now, call = last.lane.rank, last.end_s, last if last.kind == "communication" else None
    path, met = [], set()
    while True:
        if call is None:  # on the compute lane
            place = bisect_left(starts.get(rank, ()), now) - 1
            if place < 0:
                return path[::-1]
            box = compute[rank][place]
            call = calls.get((rank, box.end_s)) if box.kind == "idle" and box.end_s <= now else None
            called = (call or box).after
            if called and called[1] == box.end_s == now and (rank, now) not in met:  # the call took no time
                met.add((rank, now))
                rank, call = called[0], None
                continue
            if call is None or called and called[1] >= box.end_s:
                path.append(replace(box, end_s=min(box.end_s, now)))
                now, call = box.start_s, None
                continue
        rank, called = call.after or (rank, call.start_s)
        path.append(replace(call, start_s=max(call.start_s, min(called, call.end_s))))
        now = path[-1].start_s
        call = on_lane.get((call.lane, now)) if called < now else None
