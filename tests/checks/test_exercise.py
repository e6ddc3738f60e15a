"""Verdicts without proof, cells out of order, references: what does not depend on one lab."""
from types import SimpleNamespace

import pytest
import torch
import toy_lab

import dtlab
from dtlab.checks import Case, Evidence, Mistake, Verdict, compare, reference
from dtlab.checks import exercise as exercises
from dtlab.checks.exercise import earlier, find, judge_case
from dtlab.errors import ConfigError

CASE = Case(2, "length 3", {"base": 5, "length": 3})
RECORDING = SimpleNamespace(ranks=[0, 1], communication=lambda: {"op": []})


@pytest.fixture
def notebook(course, monkeypatch):
    """The names of a notebook; ``notebook(text)`` runs a cell."""
    names = {"__name__": "__main__"}
    mine = SimpleNamespace(user_ns=names)  # for the checks alone: ranks, if imported only now, keep what they see
    monkeypatch.setattr(exercises, "shell", SimpleNamespace(notebook_shell=lambda: mine))
    return lambda text: exec(text, names)


@pytest.mark.parametrize("results, recording", [
    (None, None), (None, RECORDING), (toy_lab.doubled(CASE), None), (toy_lab.doubled(CASE)[:1], RECORDING),
    ([], RECORDING), (toy_lab.doubled(CASE), SimpleNamespace(ranks=[0])),
])  # fmt: skip
def test_nothing_passes_without_results_and_recording_of_every_rank(course, results, recording):
    assert judge_case(find("lab90.1"), Evidence(CASE, results, recording)).state == "failed"


def test_the_same_evidence_with_all_of_it_passes(course):
    assert judge_case(find("lab90.1"), Evidence(CASE, toy_lab.doubled(CASE), RECORDING)) is None


@pytest.mark.parametrize("result", [3, None, "x", [1], {"a": 1}, torch.ones(2), torch.ones(3), 10**400,
                                    torch.ones(3, dtype=torch.float64).to_sparse()])  # fmt: skip
@pytest.mark.parametrize("right", [torch.ones(3, dtype=torch.float64), 2.5, 7, "text", [1, 2.5], {"a": 1.5}, None])
def test_results_of_every_type_are_compared_with_every_other(course, monkeypatch, result, right):
    strict = exercises.replace(find("lab90.1"), spec=lambda case: [right, right])
    verdict = judge_case(strict, Evidence(CASE, [result, result], RECORDING))
    assert verdict is None if result is None and right is None else verdict.state == "failed"


def test_a_number_in_a_tensor_is_that_number():
    assert compare.difference(torch.tensor(2.5), 2.5) is None and compare.difference(torch.tensor(2.4), 2.5)


def test_a_mistake_that_cannot_be_looked_for_is_not_seen(course):
    broken = Mistake("broken", "", lambda evidence, right: evidence.results[0].nothing)
    strict = exercises.replace(find("lab90.1"), mistakes=(broken,))
    verdict = judge_case(strict, Evidence(CASE, [1, 2], RECORDING))
    assert (verdict.state, verdict.mistake) == ("failed", "") and "Hint 1" in verdict.text


def test_a_verdict_reads_well():
    verdict = Verdict("lab90.1", "failed", "length 3: 1 should be 2\nHint 1: look", note="with a reference")
    assert repr(verdict) == "lab90.1: failed\nlength 3: 1 should be 2\nHint 1: look\nwith a reference"


@pytest.mark.parametrize("call, says", [
    (lambda: dtlab.check("lab77.1"), "there are lab01"), (lambda: dtlab.check("lab90.7"), "lab90.1, lab90.2"),
    (lambda: dtlab.check(3), "there is no lab"), (lambda: dtlab.check("1.2"), 'write "lab01.2"'),
    (lambda: dtlab.check("Exercise 2.1"), 'write "lab02.1"'),
    (lambda: dtlab.check("lab90.1", len), "which is about double"),
    (lambda: dtlab.check("lab90.1", 3), "which is about double"),
    (lambda: reference("lab90", "total"), "no later exercise"),
])  # fmt: skip
def test_wrong_arguments_are_told_with_the_cure(course, call, says):
    with pytest.raises(ConfigError, match=says):
        call()


def test_what_an_exercise_builds_on(course):
    assert [(one.key, list(names)) for one, names in earlier(find("lab90.2"))] == [("lab90.1", ["double"])]
    assert earlier(find("lab90.1")) == [] and reference("lab90", "double") is toy_lab.ref_double


def test_a_check_before_its_cell_says_what_to_run(notebook):
    verdict = dtlab.check("lab90.1")
    assert verdict.state == "not yet" and "run the cell of exercise lab90.1 first" in verdict.text


@pytest.mark.parametrize("failed, results, told", [
    ("raised", None, False), ("died", None, False), ("time", None, False), ("hang", None, True), ("guard", None, True),
    ("", [None, None], False), ("", [torch.zeros(3, dtype=torch.float64)] * 2, True),
])  # fmt: skip
def test_hint_1_is_told_where_values_or_calls_are_wrong_and_not_where_python_stopped(course, failed, results, told):
    verdict = judge_case(find("lab90.1"), Evidence(CASE, results, RECORDING, failed, "says"))
    assert ("Hint 1" in verdict.text) is told
    assert ("is there a return?" in verdict.text) is (results == [None, None]) is (verdict.mistake == "no return")


@pytest.mark.ranks
def test_a_reference_that_no_code_asks_for_is_not_mentioned(notebook):
    notebook("import torch.distributed as dist")
    notebook("def helper(x):\n    return x + x")
    notebook(toy_lab.RIGHT["lab90.2"].replace("double", "helper"))
    assert "reference" not in dtlab.check("lab90.2").note
    notebook("def helper(x):\n    return double(x)")
    assert "with the reference of double" in dtlab.check("lab90.2").note


@pytest.mark.ranks
def test_a_cell_whose_imports_were_not_run_says_what_to_run(notebook):
    notebook("def double(x):\n    return helper(x)")
    verdict = dtlab.check("lab90.1")
    assert verdict.state == "failed" and "run the cells above, from the imports on" in verdict.text


@pytest.mark.ranks
@pytest.mark.parametrize("first, with_reference", [
    (toy_lab.RIGHT["lab90.1"], False), (toy_lab.STUBS["lab90.1"], True), ("", True),
    ("def double(x):\n    return 3 * x", True),
])  # fmt: skip
def test_earlier_exercises_come_from_the_learner_if_they_pass(notebook, first, with_reference):
    notebook("import torch.distributed as dist")
    notebook(first)
    notebook(toy_lab.RIGHT["lab90.2"])
    verdict = dtlab.check("lab90.2")
    assert verdict.state == "passed", verdict
    assert ("with the reference of double" in verdict.note) is with_reference


@pytest.mark.ranks
def test_a_picture_is_drawn_also_without_an_answer(notebook, monkeypatch):
    drawn = exercises.replace(find("lab90.1"), draw=lambda case, right, evidence: (evidence.failed, evidence.results))
    monkeypatch.setattr(exercises, "find", lambda key: drawn)
    assert dtlab.picture("lab90.1") == ("not yet", None)
    notebook(toy_lab.RIGHT["lab90.1"])
    assert dtlab.picture("lab90.1")[0] == ""
