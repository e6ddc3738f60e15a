"""Closed forms of pipelines: by hand, and where they are not known. tests/schedules compares them with simulations."""
import doctest

import pytest

from dtlab.errors import ConfigError
from dtlab.schedules import dualpipe_v, zero_bubble_h1, zero_bubble_h2, zero_bubble_v
from dtlab.theory import bubble_fraction, pipeline, pipeline_step_s, zero_bubble_activations

TIMES = ({}, {"forward_s": 1, "backward_s": 2.5, "weight_s": 1}, {"forward_s": 1.5, "backward_s": 2, "weight_s": 0.5})


def test_gpipe_idles_p_less_1_of_m_plus_p_less_1():
    for p in range(1, 9):
        for m in range(1, 33):
            for schedule in ("gpipe", "one_f_one_b"):
                idle = bubble_fraction(schedule, pp_size=p, num_micro_batches=m)
                assert idle == pytest.approx((p - 1) / (m + p - 1))
                uneven = bubble_fraction(schedule, pp_size=p, num_micro_batches=m, forward_s=3, backward_s=0.5)
                assert uneven == pytest.approx(idle)


def test_the_rule_of_four_micro_batches_a_stage_leaves_a_sixth():
    assert bubble_fraction("gpipe", pp_size=4, num_micro_batches=16) == pytest.approx(3 / 19)
    assert bubble_fraction("gpipe", pp_size=4, num_micro_batches=28) < 0.1
    assert bubble_fraction("gpipe", pp_size=4, num_micro_batches=27) == pytest.approx(0.1)


def test_interleaving_divides_idle_over_work_by_the_chunks():
    for chunks in (1, 2, 4):
        idle = bubble_fraction("interleaved_one_f_one_b", pp_size=4, num_micro_batches=8, num_chunks=chunks)
        assert idle / (1 - idle) == pytest.approx(3 / (chunks * 8))


def test_the_zero_bubble_papers_table():
    """Idle time of table 2, p = 5, m = 12, F, I, W = 3, 4, 2."""
    times = {"pp_size": 5, "num_micro_batches": 12, "forward_s": 3, "backward_s": 6, "weight_s": 2}
    for schedule, idle_s in (("one_f_one_b", 4 * (3 + 4 + 2)), ("zero_bubble_h1", 4 * (3 + 4 - 2)),
                             ("zero_bubble_h2", 4 * (3 + 4 - 2 * 2))):  # fmt: skip
        assert pipeline_step_s(schedule, longest_stage=True, **times) == 12 * 9 + idle_s


def test_few_micro_batches_end_with_one_weights_gradient():
    """The paper: (m + p - 1) (F + I) + W for m of at most p."""
    for m in range(1, 7):
        for schedule in ("zero_bubble_h1", "zero_bubble_h2"):
            assert pipeline_step_s(schedule, pp_size=6, num_micro_batches=m) == (m + 5) * 2 + 1


@pytest.mark.parametrize("name, make", [("zero_bubble_h1", zero_bubble_h1), ("zero_bubble_h2", zero_bubble_h2),
                                        ("zero_bubble_v", zero_bubble_v), ("dualpipe_v", dualpipe_v)])
def test_the_longest_stage_is_as_long_as_simulated(name, make):
    found = 0
    for p in (1, 2, 3, 5):
        for m, times in ((m, times) for m in (1, 2, 3, 4, 6, 8, 9, 10, 13) for times in TIMES):
            try:
                expected = pipeline_step_s(name, pp_size=p, num_micro_batches=m, longest_stage=True, **times)
            except ConfigError:
                continue
            timeline = make(p, m).simulate(**times)
            work = [[box for box in timeline.boxes if (box.lane.rank, box.kind == "idle") == (rank, False)]
                    for rank in range(p)]  # fmt: skip
            assert max(its[-1].end_s - its[0].start_s for its in work) == pytest.approx(expected), (p, m)
            found += 1
    assert found > 15


@pytest.mark.parametrize("arguments", [
    {"schedule": "interleaved_one_f_one_b", "num_chunks": 2, "num_micro_batches": 3},
    {"schedule": "zero_bubble_h1", "num_micro_batches": 8, "weight_s": 1.5},
    {"schedule": "zero_bubble_h2", "num_micro_batches": 8, "forward_s": 2},
    {"schedule": "zero_bubble_v", "num_micro_batches": 3},
    {"schedule": "zero_bubble_v", "num_micro_batches": 6, "longest_stage": True},
    {"schedule": "dualpipe_v", "num_micro_batches": 7},
])  # fmt: skip
def test_what_has_no_closed_form_is_refused(arguments):
    with pytest.raises(ConfigError, match="closed form is known for"):
        pipeline_step_s(pp_size=4, **arguments)


@pytest.mark.parametrize("arguments, said", [
    ({"schedule": "chimera"}, "schedule"), ({"pp_size": 0}, "pp_size"), ({"num_micro_batches": 0}, "num_micro_batches"),
    ({"num_chunks": 2}, "num_chunks"), ({"forward_s": -1}, "forward_s"), ({"weight_s": "1"}, "weight_s"),
])  # fmt: skip
def test_numbers_that_cannot_be_are_refused(arguments, said):
    with pytest.raises(ConfigError, match=said):
        bubble_fraction(**{"schedule": "gpipe", "pp_size": 4, "num_micro_batches": 8, **arguments})


def test_the_examples_in_the_docstrings_are_true():
    result = doctest.testmod(pipeline)
    assert result.attempted and not result.failed


def test_every_schedule_has_a_formula_and_a_source():
    for schedule, source in pipeline.SOURCES.items():
        assert "arXiv" in source or "github.com" in source
        assert 0 < bubble_fraction(schedule, pp_size=4, num_micro_batches=16) < 0.2
        assert bubble_fraction(schedule, pp_size=1, num_micro_batches=2) == 0


def test_activations_of_zero_bubble_are_level_where_weights_need_them_all():
    assert [zero_bubble_activations("zero_bubble_h1", pp_size=4, pp_rank=r) for r in range(4)] == [4] * 4
    assert [zero_bubble_activations("zero_bubble_h2", pp_size=4, pp_rank=r) for r in range(4)] == [7] * 4
    assert [zero_bubble_activations("zero_bubble_h1", pp_size=4, pp_rank=r, activation_bytes=10, weight_bytes=4)
            for r in range(4)] == [40, 34, 28, 22]  # fmt: skip
    with pytest.raises(ConfigError, match="pp_rank"):
        zero_bubble_activations("zero_bubble_h1", pp_size=4, pp_rank=4)
