"""Lab 02: wrong answers are rejected for the right reason, right ones pass however they are written."""
import random
from pathlib import Path

import pytest
from lab_answers import answers, name_of, verdict_on

from dtlab.checks.evidence import Evidence
from dtlab.checks.exercise import exercises
from dtlab.checks.lab02_programs import CHOICES, LETTERS, is_right

SOLUTION = Path(__file__).resolve().parents[2] / "labs" / "lab02_data_parallel" / "solution.py"

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("key, title, source", answers("lab02_wrong.py"))
def test_a_wrong_answer_is_told_its_mistake(key, title, source):
    verdict = verdict_on(key, source)
    assert (verdict.state, verdict.mistake) == ("failed", name_of(title)), verdict.text


@pytest.mark.parametrize("key, title, source", answers("lab02_right.py"))
def test_a_right_answer_passes(key, title, source):
    verdict = verdict_on(key, source)
    assert verdict.state == "passed", verdict.text


@pytest.mark.parametrize("key", exercises("lab02"))
def test_the_solution_passes(key):
    verdict = verdict_on(key, SOLUTION.read_text(encoding="utf-8"), seed=1)
    assert verdict.state == "passed", verdict.text


@pytest.mark.parametrize("key", exercises("lab02"))
def test_a_picture_is_drawn_while_nothing_is_solved(key):
    exercise = exercises("lab02")[key]
    case = exercise.cases(random.Random(0))[0]
    picture = exercise.draw(case, exercise.spec(case), Evidence(case, failed="not yet"))
    assert str(picture).startswith("<svg") and picture.text


def test_each_program_has_one_name_and_no_two_the_same():
    names = [[choice for choice in CHOICES if is_right(letter, choice)] for letter in LETTERS]
    assert all(len(its) == 1 for its in names) and len({its[0] for its in names}) == len(LETTERS)


def test_the_key_is_nowhere_in_the_notebook():
    text = SOLUTION.with_name("lab.ipynb").read_text(encoding="utf-8")
    assert not [choice for letter in LETTERS for choice in CHOICES if f'{letter}\\": \\"{choice}' in text]
