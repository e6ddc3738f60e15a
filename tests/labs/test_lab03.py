"""Lab 03: wrong answers are rejected for the right reason, right ones pass however they are written."""
import random
import re
from pathlib import Path

import pytest
from lab_answers import answers, name_of, verdict_on

from dtlab.checks.evidence import Evidence
from dtlab.checks.exercise import exercises

SOLUTION = Path(__file__).resolve().parents[2] / "labs" / "lab03_zero" / "solution.py"

ranks = pytest.mark.ranks


@ranks
@pytest.mark.parametrize("key, title, source", answers("lab03_wrong.py"))
def test_a_wrong_answer_is_told_its_mistake(key, title, source):
    verdict = verdict_on(key, source)
    assert (verdict.state, verdict.mistake) == ("failed", name_of(title)), verdict.text
    # no clause is empty, no step is a bare number, no value is told to be another that looks the same, no hint misleads
    blurred = r": [.:](?!\.)| \(\)|rank \d: \[|(?<![\d.])([\d.]+) (instead of|where) \1 |Hint"
    assert not re.search(blurred, verdict.text), verdict.text


@ranks
@pytest.mark.parametrize("key, title, source", answers("lab03_right.py"))
def test_a_right_answer_passes(key, title, source):
    verdict = verdict_on(key, source)
    assert verdict.state == "passed", verdict.text


@ranks
@pytest.mark.parametrize("key", exercises("lab03"))
def test_the_solution_passes(key):
    verdict = verdict_on(key, SOLUTION.read_text(encoding="utf-8"), seed=1)
    assert verdict.state == "passed", verdict.text


@pytest.mark.parametrize("key", exercises("lab03"))
def test_a_picture_is_drawn_while_nothing_is_solved(key):
    exercise = exercises("lab03")[key]
    case = exercise.cases(random.Random(0))[0]
    picture = exercise.draw(case, exercise.spec(case), Evidence(case, failed="not yet"))
    assert str(picture).startswith("<svg") and "not yet: the stub is still there" in picture.text
