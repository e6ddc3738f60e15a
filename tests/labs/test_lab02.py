"""Lab 02: wrong answers are rejected for the right reason, right ones pass however they are written."""
import random
from pathlib import Path

import pytest
from lab_answers import answers, name_of, verdict_on

from dtlab.checks import lab02_programs
from dtlab.checks.evidence import Evidence
from dtlab.checks.exercise import exercises
from dtlab.checks.lab02_pictures import programs_seen
from dtlab.checks.lab02_programs import CHOICES, LETTERS, Net, is_right, named_tensors

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


def test_the_picture_of_the_start_has_a_row_for_every_tensor_of_the_model():
    exercise = exercises("lab02")["lab02.1"]
    case = exercise.cases(random.Random(0))[0]
    picture = str(exercise.draw(case, exercise.spec(case), Evidence(case, failed="not yet")))
    assert [name for name in named_tensors(Net(0)) if f">{name}<" not in picture] == []


def test_a_recorded_program_ends_with_its_optimizer(monkeypatch):
    monkeypatch.setattr(lab02_programs, "LETTERS", ("A",))
    for program in programs_seen().values():
        events = [e for e in program.recording.events[0] if e.kind == "compute" and "name" in e.phase]
        last = next(number for number, e in enumerate(events) if e.phase["name"] == "optimizer")
        assert {e.phase["name"] for e in events[last:]} == {"optimizer"}
        assert sum(e.end_s - e.start_s for e in events[last:]) >= lab02_programs.SLEEP_S / 2


def test_each_program_has_one_name_and_no_two_the_same():
    names = [[choice for choice in CHOICES if is_right(letter, choice)] for letter in LETTERS]
    assert all(len(its) == 1 for its in names) and len({its[0] for its in names}) == len(LETTERS)


def test_the_key_is_nowhere_in_the_notebook():
    text = SOLUTION.with_name("lab.ipynb").read_text(encoding="utf-8")
    assert not [choice for letter in LETTERS for choice in CHOICES if f'{letter}\\": \\"{choice}' in text]
