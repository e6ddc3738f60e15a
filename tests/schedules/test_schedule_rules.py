"""Broken schedules are refused, and the first broken rule is named with rank, stage and micro-batch."""
import copy

import pytest
from naive import MAKERS, is_allowed, last_ends

from dtlab.schedules import Action, Backward, BackwardInput, BackwardWeight, Forward, ScheduleError, one_f_one_b

CASES = [(name, p, m) for name in MAKERS for p, m in ((2, 4), (3, 6), (4, 3)) if is_allowed(name, p, m)]


def broken(schedule):
    """The rule that check finds broken: ``(rule, rank, stage, micro_batch)``; None: none is."""
    try:
        schedule.check()
    except ScheduleError as error:
        assert str(error).startswith(f"{error.rule}: rank {error.rank} ")
        return error.rule, error.rank, error.stage, error.micro_batch


def edited(schedule, rank, edit):
    schedule = copy.deepcopy(schedule)
    edit(schedule.actions[rank])
    return schedule


def places(schedule):
    return [(rank, place) for rank, actions in enumerate(schedule.actions) for place in range(len(actions))]


@pytest.mark.parametrize("name, p, m", CASES)
def test_an_action_left_out_is_missed(name, p, m):
    schedule = MAKERS[name](p, m)
    for rank, place in places(schedule):
        lost = schedule.actions[rank][place]
        rule, at, *which = broken(edited(schedule, rank, lambda actions, place=place: actions.pop(place)))
        assert (rule, at) == ("complete", rank)
        assert which in [[part.stage, part.micro_batch] for part in lost.parts or (lost,)]


@pytest.mark.parametrize("name, p, m", CASES)
def test_an_action_done_twice_is_refused(name, p, m):
    schedule = MAKERS[name](p, m)
    for rank, place in places(schedule):
        twice = schedule.actions[rank][place]
        part = (twice.parts or (twice,))[0]
        found = broken(edited(schedule, rank, lambda actions, twice=twice: actions.append(twice)))
        assert found == ("once", rank, part.stage, part.micro_batch)


@pytest.mark.parametrize("name, p, m", CASES)
def test_neighbours_swapped_are_refused_just_where_their_order_matters(name, p, m):
    """Where what an action needs now comes too late, or messages between two stages overtake each other."""
    schedule, refused, swaps = MAKERS[name](p, m), set(), 0
    for rank, place in places(schedule):
        if place + 1 < len(schedule.actions[rank]):
            swapped = edited(schedule, rank, lambda its, at=place: its.insert(at, its.pop(at + 1)))
            found, swaps = broken(swapped), swaps + 1
            assert (found is not None) == (never_ends(swapped) or overtakes(swapped)), (rank, place)
            if found:
                refused.add(found[0])
                its = [part for action in swapped.actions[rank][place:place + 2] for part in action.parts or (action,)]
                near = 1 if found[0] == "messages" else 0  # the fault may be the sender's
                assert found[0] == "deadlock" or found[3] in {part.micro_batch for part in its}
                assert found[0] == "deadlock" or any(abs(found[2] - part.stage) <= near for part in its)
    assert refused >= {"messages"} and swaps > 10


def never_ends(schedule):
    try:
        last_ends(schedule)
    except RecursionError:
        return True


def overtakes(schedule):
    """Whether two stages on different ranks compute micro-batches in different orders."""
    orders = {}
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            for part in action.parts or (action,):
                if part.kind != BackwardWeight:
                    key = part.kind == Forward, part.stage
                    orders.setdefault(key, (rank, []))[1].append(part.micro_batch)
    both = [(orders[way, stage], orders[way, stage + 1]) for way, stage in orders if (way, stage + 1) in orders]
    return any(rank != other and numbers != others for (rank, numbers), (other, others) in both)


def test_a_backward_before_its_forward_is_named():
    schedule = one_f_one_b(4, 8)
    schedule.actions[3][:2] = reversed(schedule.actions[3][:2])
    assert broken(schedule) == ("order", 3, 3, 0)
    with pytest.raises(ScheduleError, match="order: rank 3 computes backward, stage 3, micro-batch 0 before forward"):
        schedule.check()


def test_weights_before_the_input_are_named():
    schedule = MAKERS["zero_bubble_h1"](2, 2)
    at = schedule.actions[0].index(Action(BackwardInput, 0, 1))
    schedule.actions[0][at:at + 2] = reversed(schedule.actions[0][at:at + 2])
    assert broken(schedule) == ("order", 0, 0, 1)


def test_ranks_that_wait_for_each_other_are_named():
    """Rank 0 wants micro-batch 0's gradient before it sends 1; rank 1 wants 1 before it computes 0's gradient."""
    schedule = one_f_one_b(2, 2)
    schedule.actions[0][1:3] = reversed(schedule.actions[0][1:3])
    schedule.check()
    schedule.actions[1][1:3] = reversed(schedule.actions[1][1:3])
    rule, *where = broken(schedule)
    assert rule == "deadlock" and tuple(where) in {(0, 0, 0), (1, 1, 1)}
    with pytest.raises(ScheduleError) as error:
        schedule.check()
    assert "rank 0 waits with backward, stage 0, micro-batch 0 for stage 1 on rank 1" in str(error.value)
    assert "rank 1 waits with forward, stage 1, micro-batch 1 for stage 0 on rank 0" in str(error.value)
    with pytest.raises(ScheduleError, match="deadlock"):
        schedule.simulate()


def test_of_a_pair_that_never_begins_the_part_that_waits_is_named():
    """Stage 0 pairs a forward with a backward that waits for stage 1, which waits for that forward."""
    pair = Action.pair(Action(Forward, 0, 1), Action(Backward, 0, 0))
    schedule = edited(one_f_one_b(2, 2), 0, lambda actions: actions.__setitem__(slice(1, 3), [pair]))
    schedule.check()
    schedule.actions[1][1:3] = reversed(schedule.actions[1][1:3])
    with pytest.raises(ScheduleError, match="rank 0 waits with backward, stage 0, micro-batch 0 for stage 1") as error:
        schedule.check()
    assert error.value.rule == "deadlock" and "rank 0 waits with forward" not in str(error.value)


def test_an_action_on_another_rank_is_named():
    schedule = one_f_one_b(3, 2)
    schedule.actions[0].append(schedule.actions[2].pop())
    assert broken(schedule) == ("place", 0, 2, 1)


@pytest.mark.parametrize("action", [Action(Forward, 2, 0), Action(Forward, 0, 2), Action(Forward, -1, 0),
                                    Action("X", 0, 0), Action(Forward, 0, 0, (Action(Forward, 0, 0),)),
                                    Action.pair(Action(Backward, 0, 0), Action(Forward, 0, 0))])  # fmt: skip
def test_what_no_schedule_knows_is_named(action):
    schedule = edited(one_f_one_b(2, 2), 0, lambda actions: actions.insert(0, action))
    assert broken(schedule) == ("known", 0, action.stage, action.micro_batch)


def test_a_pair_of_one_micro_batch_at_one_stage_is_refused():
    schedule = one_f_one_b(1, 1)
    schedule.actions[0] = [Action.pair(*schedule.actions[0])]
    assert broken(schedule) == ("order", 0, 0, 0)


def test_both_kinds_of_backward_of_one_micro_batch_are_one_too_many():
    schedule = edited(one_f_one_b(2, 2), 1, lambda actions: actions.append(Action(BackwardInput, 1, 0)))
    assert broken(schedule) == ("once", 1, 1, 0)


def test_what_is_simulated_unchecked_is_refused_with_the_rule_it_breaks():
    schedule = edited(one_f_one_b(2, 2), 1, lambda actions: actions.append(Action(Forward, 5, 0)))
    with pytest.raises(ScheduleError, match="known: rank 1 has 5F0"):
        schedule.simulate()
