"""Lab 04: wrong answers are rejected for the right reason, right ones pass however they are written."""
import random
import re
from pathlib import Path

import pytest
from lab_answers import answers, name_of, verdict_on

from dtlab.checks import lab04_layers, lab04_loss, lab04_regions
from dtlab.checks.compare import difference
from dtlab.checks.evidence import Evidence
from dtlab.checks.exercise import exercises

SOLUTION = Path(__file__).resolve().parents[2] / "labs" / "lab04_tensor_parallel" / "solution.py"

ranks = pytest.mark.ranks


@ranks
@pytest.mark.parametrize("key, title, source", answers("lab04_wrong.py"))
def test_a_wrong_answer_is_told_its_mistake(key, title, source):
    verdict = verdict_on(key, source)
    assert (verdict.state, verdict.mistake) == ("failed", name_of(title)), verdict.text
    # no clause is empty, no step is a bare number, no value is told to be another that looks the same, no hint misleads
    blurred = r": [.:](?!\.)| \(\)|rank \d: \[|(?<![\d.])([\d.]+) (instead of|where) \1 |Hint"
    assert not re.search(blurred, verdict.text), verdict.text


@ranks
@pytest.mark.parametrize("key, title, source", answers("lab04_right.py"))
def test_a_right_answer_passes(key, title, source):
    verdict = verdict_on(key, source)
    assert verdict.state == "passed", verdict.text


@ranks
@pytest.mark.parametrize("key", exercises("lab04"))
def test_the_solution_passes(key):
    verdict = verdict_on(key, SOLUTION.read_text(encoding="utf-8"), seed=1)
    assert verdict.state == "passed", verdict.text


@ranks
@pytest.mark.parametrize("name, unit", [("no f", "% off on rank 0"), ("g reduces again", "4 times the right one")])
def test_the_mistake_is_measured(name, unit):
    ((key, _, source), *_) = (param.values for param in answers("lab04_wrong.py")
                              if name_of(param.values[1]) == name and param.values[0] == "lab04.3")  # fmt: skip
    assert unit in verdict_on(key, source).text


@pytest.mark.parametrize("key", exercises("lab04"))
def test_a_picture_is_drawn_while_nothing_is_solved(key):
    exercise = exercises("lab04")[key]
    case = exercise.cases(random.Random(0))[0]
    picture = exercise.draw(case, exercise.spec(case), Evidence(case, failed="not yet"))
    assert str(picture).startswith("<svg") and "not yet: the stub is still there" in picture.text


# mistakes are told from t ranks in one process: with nothing changed these give what one process with everything does


def test_cut_layers_in_one_process_are_the_whole_ones():
    cases = [*lab04_layers.mlp_cases(random.Random(2)), *lab04_layers.attention_cases(random.Random(2))]
    for case in cases:
        assert difference(lab04_layers.simulated(case), lab04_layers.layer_spec(case)) is None, case


def test_losses_of_ranks_in_one_process_are_those_of_the_whole_vocabulary():
    for case in lab04_loss.loss_cases(random.Random(2)):
        right = lab04_loss.lose_spec(case)
        for one in case["tries"]:
            assert difference(lab04_loss.simulated(one), [its[one.name] for its in right]) is None, one


@pytest.mark.parametrize("name", lab04_regions.FLOWS)
def test_a_flow_on_ranks_in_one_process_is_that_of_one_rank_with_everything(name):
    (case, *_), same = lab04_regions.region_cases(random.Random(2)), lambda x: x
    case.data["flows"] = (name,)
    case["c"][:] = case["c"][0]  # one rank has one of it
    a, b = case["a"].transpose(0, 1).flatten(1), case["b"].flatten(0, 1)
    whole = {"x": case["x"], "a": a, "b": b, "c": case["c"][0]}
    inputs = {key: its.clone().requires_grad_() for key, its in whole.items()}
    out = lab04_regions.FLOWS[name][0](same, same, **inputs)
    (out * case["weights"][:, : out.shape[-1]]).sum().backward()
    for its in lab04_regions.simulated(case):
        assert difference(its[name]["output"], out.detach()) is None
        assert difference(its[name]["gradient of x"], inputs["x"].grad) is None
