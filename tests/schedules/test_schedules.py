"""Every schedule against the rules, the closed forms, published values, and a second evaluator."""
import doctest
import importlib

import pytest
from naive import EQUAL, MAKERS, is_allowed, last_ends, most_in_flight

from dtlab import schedules, theory
from dtlab.errors import ConfigError
from dtlab.schedules import Action, Backward, BackwardInput, BackwardWeight, Forward

P, M = range(1, 9), range(1, 33)
# idle shares that independent simulators agree on: of the step, and of the longest stage from its first action to its
# last where that differs; by (p, m), with F = 1 and B = 2, of split backwards F = I = W
AGREED = {
    "gpipe": ([.2727, .1579, .0857, .4667, .3043, .1795], None),
    "one_f_one_b": ([.2727, .1579, .0857, .4667, .3043, .1795], None),
    "interleaved_2": ([.1579, .0857, .0448, .3043, .1795, .0986], None),
    "interleaved_4": ([.0857, .0448, .0229, .1795, .0986, .0519], None),
    "zero_bubble_h1": ([.1111, .0588, .0303, .2258, .1273, .0680], None),
    "zero_bubble_h2": ([.1111, .0588, .0303, .2258, .1273, .0680], [0, 0, 0, .2258, 0, 0]),
    "zero_bubble_v": ([.0588, .0303, .0154, .1273, .0680, .0352], [0, 0, 0, .1273, 0, 0]),
    "dualpipe_v": ([.1111, .0588, .0303, None, .1273, .0680], None),
}  # fmt: skip


def closed_form(name, p, m, **times):
    """Seconds of a step by formula; None where none is known."""
    base, _, chunks = name.partition("interleaved_")
    schedule = "interleaved_one_f_one_b" if chunks else base
    try:
        return theory.pipeline_step_s(schedule, pp_size=p, num_micro_batches=m, num_chunks=int(chunks or 1), **times)
    except ConfigError as error:
        assert "closed form" in str(error)
        return None


@pytest.mark.parametrize("name", MAKERS)
def test_it_keeps_all_rules_and_takes_as_long_as_by_formula_or_by_a_second_evaluator(name):
    formulas = 0
    for p in P:
        for m in filter(lambda m: is_allowed(name, p, m), M):
            schedule = MAKERS[name](p, m).check()
            timeline = schedule.simulate(forward_s=1, backward_s=2)
            expected = closed_form(name, p, m)
            formulas += expected is not None
            expected = max(last_ends(schedule)) if expected is None else expected
            assert timeline.step_time_s == pytest.approx(expected), (p, m)
            work = 3 * m * schedule.num_stages
            assert timeline.bubble_fraction == pytest.approx(1 - work / (p * expected)), (p, m)
            assert timeline.peak_in_flight == [most_in_flight(actions) for actions in schedule.actions]
    assert formulas > 100


@pytest.mark.parametrize("name", MAKERS)
def test_a_second_evaluator_agrees_on_uneven_times_at_the_end_of_each_rank(name):
    for p, m in ((1, 2), (3, 6), (4, 9), (5, 10)):
        if is_allowed(name, p, m):
            schedule = MAKERS[name](p, m)
            timeline = schedule.simulate(forward_s=1.25, backward_s=2.5, weight_s=1)
            seconds = {Forward: 1.25, Backward: 2.5, BackwardInput: 1.5, BackwardWeight: 1}
            ends = [max(box.end_s for box in timeline.boxes if box.lane.rank == rank) for rank in range(p)]
            assert ends == pytest.approx(last_ends(schedule, seconds))
            formula = closed_form(name, p, m, forward_s=1.25, backward_s=2.5, weight_s=1)
            assert formula is None or timeline.step_time_s == pytest.approx(formula)


@pytest.mark.parametrize("name", AGREED)
def test_idle_shares_are_those_that_independent_simulators_agree_on(name):
    of_step, of_stage = AGREED[name]
    for at, (p, m) in enumerate((p, m) for p in (4, 8) for m in (8, 16, 32)):
        if of_step[at] is None:
            with pytest.raises(ConfigError):
                MAKERS[name](p, m)
            continue
        timeline = MAKERS[name](p, m).simulate(forward_s=1, backward_s=2)
        assert timeline.bubble_fraction == pytest.approx(of_step[at], abs=5e-5), (p, m)
        assert timeline.stage_bubble_fraction == pytest.approx((of_stage or of_step)[at], abs=5e-5), (p, m)


def test_gpipe_and_1f1b_take_equally_long_and_differ_in_what_they_hold():
    gpipe, one_f_one_b = (MAKERS[name](8, 32).simulate(forward_s=1, backward_s=1) for name in ("gpipe", "one_f_one_b"))
    assert gpipe.step_time_s == one_f_one_b.step_time_s == 78
    assert gpipe.peak_in_flight == [32] * 8
    assert one_f_one_b.peak_in_flight == [8, 7, 6, 5, 4, 3, 2, 1]


def test_in_flight_are_as_many_as_theory_says():
    for p in P:
        for m in (1, 2, p, p + 1, 2 * p - 1, 3 * p):
            for chunks in (1, 2, 3):
                peaks = schedules.interleaved_one_f_one_b(p, chunks, m).simulate().peak_in_flight
                if chunks == 1 or m % p == 0:
                    assert peaks == [chunks * theory.micro_batches_in_flight(
                        pp_size=p, pp_rank=rank, num_chunks=chunks, num_micro_batches=m) for rank in range(p)]
            assert schedules.one_f_one_b(p, m).simulate().peak_in_flight == [min(m, p - s) for s in range(p)]
            assert schedules.zero_bubble_v(p, m).simulate().peak_in_flight == [2 * min(m, p)] * p
            if m >= 2 * p:
                assert schedules.dualpipe_v(p, m).simulate().peak_in_flight == [2 * p + 1] * p


def test_zero_bubble_schedules_hold_what_their_paper_says():
    for name in ("zero_bubble_h1", "zero_bubble_h2"):
        for p in P:
            timeline = MAKERS[name](p, 2 * p).simulate(activation_bytes=10, weight_bytes=7)
            assert timeline.peak_in_flight == [theory.zero_bubble_activations(
                name, pp_size=p, pp_rank=rank, activation_bytes=10, weight_bytes=7) for rank in range(p)]


def test_one_chunk_is_1f1b():
    assert schedules.interleaved_one_f_one_b(3, 1, 5) == schedules.one_f_one_b(3, 5)


def test_pairs_carry_their_parts():
    pairs = [action for actions in schedules.dualpipe_v(3, 8).actions for action in actions if action.parts]
    assert pairs and all([part.kind for part in pair.parts] == [Forward, Backward] for pair in pairs)
    assert pairs[0] == Action.pair(*pairs[0].parts) and pairs[0].stage is None


def test_what_a_schedule_does_not_allow_is_refused_with_what_it_does():
    with pytest.raises(ConfigError, match=r"num_micro_batches \(9\) must be divisible by its 2 groups.*use 8 or 10"):
        schedules.interleaved_one_f_one_b(4, 2, 9)
    with pytest.raises(ConfigError, match=r"num_micro_batches \(7\) must be at least 2 num_ranks \(8\)"):
        schedules.dualpipe_v(4, 7)
    for make in (schedules.gpipe, schedules.one_f_one_b, schedules.zero_bubble_h1, schedules.zero_bubble_v):
        with pytest.raises(ConfigError, match=r"num_micro_batches \(0\) must be at least 1"):
            make(2, 0)
    with pytest.raises(ConfigError, match="num_chunks"):
        schedules.interleaved_one_f_one_b(2, 0, 4)
    for p in P:
        for m in M:
            for name in ("interleaved_2", "dualpipe_v"):
                try:
                    MAKERS[name](p, m)
                    assert is_allowed(name, p, m)
                except ConfigError:
                    assert not is_allowed(name, p, m)


@pytest.mark.parametrize("module", ["schedule", "one_f_one_b", "zero_bubble"])
def test_the_examples_in_the_docstrings_are_true(module):
    result = doctest.testmod(importlib.import_module(f"dtlab.schedules.{module}"))
    assert result.attempted and not result.failed


def test_the_second_evaluator_knows_a_step_worked_out_by_hand():
    """Two stages, two micro-batches: F0 F1 . . B0 B0 . B1 B1 | . F0 B0 B0 F1 B1 B1."""
    assert last_ends(schedules.one_f_one_b(2, 2), EQUAL) == [9, 7]
