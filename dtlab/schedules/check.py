"""What a schedule must fulfil before ranks execute it; the first broken rule is named."""
from dtlab.errors import ConfigError
from dtlab.schedules.schedule import NAMES, Action, Backward, BackwardInput, BackwardWeight, Forward, Overlap, parts
from dtlab.schedules.simulation import run

# what an action does: a Backward does the work of both of its halves
_DOES = {Forward: (Forward,), Backward: (BackwardInput, BackwardWeight), BackwardInput: (BackwardInput,),
         BackwardWeight: (BackwardWeight,)}  # fmt: skip


class ScheduleError(ConfigError):
    """A schedule that cannot be executed.

    Attributes:
        rule: the broken rule: "known", "place", "once", "complete", "order", "messages" or "deadlock".
        rank, stage, micro_batch: where.
    """

    def __init__(self, rule, rank, action, message):
        super().__init__(f"{rule}: {message}")
        self.rule, self.rank, self.stage, self.micro_batch = rule, rank, action.stage, action.micro_batch


def check(schedule):
    """Raise ScheduleError for the first rule of ``Schedule.check`` that is broken."""
    places = {}  # (kind, stage, micro-batch) -> place in its rank's list
    for rank, actions in enumerate(schedule.actions):
        for place, action in enumerate(actions):
            _check_pair(rank, action)
            for part in action.parts or (action,):
                _check_part(schedule, rank, part)
                for kind in _DOES[part.kind]:
                    work = kind, part.stage, part.micro_batch
                    if work in places:
                        raise ScheduleError("once", rank, part, f"rank {rank} computes {part.words}, which it has "
                                            "computed before")
                    places[work] = place
    _check_complete(schedule, places)
    _check_order(schedule, places)
    _check_messages(schedule, places)
    _check_deadlock(schedule)


def _check_pair(rank, action):
    kinds = tuple(part.kind for part in action.parts)
    if action.kind == Overlap and kinds != (Forward, Backward) or action.kind != Overlap and kinds:
        raise ScheduleError("known", rank, action, f"rank {rank} has {action!r}: a pair is a forward and a backward, "
                            "in this order")


def _check_part(schedule, rank, part):
    kind, stage, micro_batch = part[:3]
    is_known = stage in range(schedule.num_stages) and micro_batch in range(schedule.num_micro_batches)
    if kind not in NAMES or not is_known:
        raise ScheduleError("known", rank, part, f"rank {rank} has {part!r}: kinds are {', '.join(NAMES)}, stages 0 to "
                            f"{schedule.num_stages - 1}, micro-batches 0 to {schedule.num_micro_batches - 1}")
    home = schedule.stage_to_rank[stage]
    if home != rank:
        raise ScheduleError("place", rank, part, f"rank {rank} computes {part.words}, but rank {home} has that stage")


def _check_complete(schedule, places):
    for micro_batch in range(schedule.num_micro_batches):
        for stage, rank in enumerate(schedule.stage_to_rank):
            for kind in (Forward, BackwardInput, BackwardWeight):
                if (kind, stage, micro_batch) not in places:
                    raise ScheduleError("complete", rank, missing := Action(kind, stage, micro_batch),
                                        f"rank {rank} never computes {missing.words}")


def _check_order(schedule, places):
    for rank, actions in enumerate(schedule.actions):
        for part in parts(actions):
            kind, stage, micro_batch = part[:3]
            needed = {BackwardWeight: BackwardInput}.get(kind, Forward)
            if kind != Forward and places[_DOES[kind][0], stage, micro_batch] <= places[needed, stage, micro_batch]:
                raise ScheduleError("order", rank, part, f"rank {rank} computes {part.words} before "
                                    f"{Action(needed, stage, micro_batch).words}")


def _check_messages(schedule, places):
    """Between two stages messages are received in the order in which they were sent."""
    numbers = range(schedule.num_micro_batches)
    for stage in range(schedule.num_stages - 1):
        for kind, source, to in ((Forward, stage, stage + 1), (BackwardInput, stage + 1, stage)):
            rank = schedule.stage_to_rank[to]
            if rank == schedule.stage_to_rank[source]:
                continue
            sent, received = (sorted(numbers, key=lambda n: places[kind, its, n]) for its in (source, to))
            for comes, wanted in zip(sent, received):
                if comes != wanted:
                    action = Action(kind, to, wanted)
                    raise ScheduleError("messages", rank, action, f"rank {rank} computes {action.words} when stage "
                                        f"{source} sends it micro-batch {comes}")


def _check_deadlock(schedule):
    blocked = run(schedule, *[[0.0] * schedule.num_stages] * 5).blocked
    waits = []
    for rank, part in blocked.items():
        source = part.stage + (-1 if part.kind == Forward else 1)
        waits.append(f"rank {rank} waits with {part.words} for stage {source} on rank {schedule.stage_to_rank[source]}")
    if blocked:
        raise ScheduleError("deadlock", *next(iter(blocked.items())), "; ".join(waits))
