"""In the notebook: what the ranks recorded becomes one Recording."""
from dtlab.simulate.events import Event, Recording


def join(answers, ranks, world_size, **meta):
    """A Recording of ``record``'s answers, one for each of ``ranks``; of ``meta`` what is not None is kept.

    The ranks' times get one zero: when the first of them began. A dry recording has no times.
    """
    first = min(began for *_, began in answers)
    late = [0.0 if meta.get("dry") else began - first for *_, began in answers]
    events = {rank: [_event(row, by) for row in rows] for rank, by, (_, rows, *_) in zip(ranks, late, answers)}
    groups = {name: list(members) for _, _, groups, _ in answers for name, members in groups.items()}
    meta = {name: value for name, value in meta.items() if value is not None}
    results = [value for value, *_ in answers]
    return Recording(events, world_size=world_size, results=results, meta={"dry": False, "groups": groups, **meta})


def _event(row, late):
    kind, op, start_s, end_s, *rest = row
    return Event(kind, op, start_s + late, end_s + late, *rest)
