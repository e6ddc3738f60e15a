"""In the notebook: what the ranks recorded becomes one Recording."""
from dtlab.simulate.events import Event, Recording


def join(answers, ranks, world_size, **meta):
    """A Recording of ``record``'s answers, one for each of ``ranks``; of ``meta`` what is not None is kept."""
    events = {rank: [Event(*row) for row in rows] for rank, (_, rows, _) in zip(ranks, answers)}
    groups = {name: list(members) for _, _, groups in answers for name, members in groups.items()}
    meta = {name: value for name, value in meta.items() if value is not None}
    results = [value for value, _, _ in answers]
    return Recording(events, world_size=world_size, results=results, meta={"dry": False, "groups": groups, **meta})
