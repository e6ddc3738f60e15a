"""Schedules the slow way: an action's end is the longest path to it. Shares no code with dtlab.schedules.simulation."""
import sys

from dtlab import schedules
from dtlab.schedules import Backward, BackwardInput, BackwardWeight, Forward

MAKERS = {
    "gpipe": schedules.gpipe,
    "one_f_one_b": schedules.one_f_one_b,
    "zero_bubble_h1": schedules.zero_bubble_h1,
    "zero_bubble_h2": schedules.zero_bubble_h2,
    "zero_bubble_v": schedules.zero_bubble_v,
    "dualpipe_v": schedules.dualpipe_v,
}
for chunks in (2, 3, 4):
    MAKERS[f"interleaved_{chunks}"] = lambda p, m, chunks=chunks: schedules.interleaved_one_f_one_b(p, chunks, m)
EQUAL = {Forward: 1, Backward: 2, BackwardInput: 1, BackwardWeight: 1}


def is_allowed(name, p, m):
    """Which micro-batches a schedule takes: those of torch.distributed.pipelining."""
    return m % max(1, m // p) == 0 if name.startswith("interleaved") else m >= 2 * p or name != "dualpipe_v"


def last_ends(schedule, seconds=EQUAL):
    """When each rank's last action ends; RecursionError if an action needs itself."""
    where = {}
    for rank, actions in enumerate(schedule.actions):
        for place, action in enumerate(actions):
            for part in action.parts or (action,):
                kind = BackwardInput if part.kind == Backward else part.kind
                where[kind, part.stage, part.micro_batch] = rank, place
    ends, under_way = {}, set()

    def end(rank, place):
        if place < 0:
            return 0
        if (rank, place) not in ends:
            if (rank, place) in under_way:
                raise RecursionError(f"rank {rank}, action {place} needs itself")
            under_way.add((rank, place))
            action = schedule.actions[rank][place]
            its = action.parts or (action,)
            needed = [where[need] for part in its for need in needs(part, schedule.num_stages)]
            start = max([end(rank, place - 1), *(end(*need) for need in needed)])
            ends[rank, place] = start + sum(seconds[part.kind] for part in its)
        return ends[rank, place]

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        return [end(rank, len(actions) - 1) for rank, actions in enumerate(schedule.actions)]
    finally:
        sys.setrecursionlimit(limit)


def needs(part, num_stages):
    """What must have been computed: on another rank, and on its own."""
    stage, number = part.stage, part.micro_batch
    if part.kind == Forward:
        return [(Forward, stage - 1, number)] if stage else []
    if part.kind == BackwardWeight:
        return [(BackwardInput, stage, number)]
    return [(Forward, stage, number), *([(BackwardInput, stage + 1, number)] if stage < num_stages - 1 else [])]


def most_in_flight(actions):
    """Forwards less backwards at the most, a split one until its weights' part; of one rank."""
    most = held = 0
    for action in actions:
        for part in action.parts or (action,):
            held += {Forward: 1, BackwardInput: 0}.get(part.kind, -1)
            most = max(most, held)
    return most
