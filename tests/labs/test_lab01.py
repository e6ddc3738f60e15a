"""Lab 01: wrong answers are rejected for the right reason, right ones pass however they are written."""
import random
from pathlib import Path

import pytest
from lab_answers import answers, name_of, verdict_on

from dtlab.checks import lab01_serial as serial
from dtlab.checks.evidence import Answer, Case, Evidence, gather
from dtlab.checks.exercise import exercises, find
from dtlab.checks.lab01_programs import CHOICES, LETTERS, is_right

SOLUTION = Path(__file__).resolve().parents[2] / "labs" / "lab01_ring_all_reduce" / "solution.py"
ranks = pytest.mark.ranks


@ranks
@pytest.mark.parametrize("key, title, source", answers("lab01_wrong.py"))
def test_a_wrong_answer_is_told_its_mistake(key, title, source):
    verdict = verdict_on(key, source)
    assert (verdict.state, verdict.mistake) == ("failed", name_of(title)), verdict.text


@ranks
@pytest.mark.parametrize("key, title, source", answers("lab01_right.py"))
def test_a_right_answer_passes(key, title, source):
    verdict = verdict_on(key, source)
    assert verdict.state == "passed", verdict.text


@ranks
@pytest.mark.parametrize("key", exercises("lab01"))
def test_the_solution_passes(key):
    verdict = verdict_on(key, SOLUTION.read_text(encoding="utf-8"), seed=1)
    assert verdict.state == "passed", verdict.text


@pytest.mark.parametrize("key", ["lab01.1", "lab01.2", "lab01.3", "lab01.4"])
def test_a_picture_is_drawn_while_nothing_is_solved(key):
    exercise = find(key)
    case = exercise.cases(random.Random(0))[0]
    picture = exercise.draw(case, exercise.spec(case), Evidence(case, failed="not yet"))
    assert str(picture).startswith("<svg") and "not yet: the stub is still there" in picture.text
    assert 'aria-label=""' not in str(picture) and "<title></title>" not in str(picture)


@ranks
def test_the_picture_says_whose_parts_are_where():
    source = next(its.values[2] for its in answers("lab01_wrong.py") if its.values[1] == "another chunk finished")
    exercise = find("lab01.2")
    case = exercise.cases(random.Random(0))[0]
    answer = Answer(source=[("answer", source)], references=exercise.references)
    evidence = gather(exercise.program, answer, exercise.names, case)
    yours = exercise.draw(case, exercise.spec(case), evidence).text.split("yours")[1]
    assert "rank 0: 0, 0+1+2+3, 0+2+3, 0+3; rank 1: 0+1, 1, 0+1+2+3, 0+1+3" in yours
    assert "sent by each rank: 0.75 S" in yours


@ranks
def test_the_programs_are_seen_from_outside():
    exercise = find("lab01.5")
    case = exercise.cases(random.Random(0))[0]
    parts = exercise.draw(case, None, None).text.split("Program ")
    assert [part[0] for part in parts[1:]] == list(LETTERS)
    seen = {part[0]: part for part in parts[1:]}
    assert "rank 1: sum of 2, sum of 3" in seen["A"]
    assert "sent by each rank: 3 S" in seen["B"]
    assert "rank 0: sum, sum, sum, sum, 0, 0, 0" in seen["D"]
    assert "wait for each other: 0 -> 1 -> 2 -> 3 -> 0" in seen["E"]
    assert "rank 0: sum, sum, 10 parts, 10 parts, 7 parts, 7 parts, sum+0" in seen["F"]
    assert not [letter for letter in "ABCDF" if "other" in seen[letter]]
    assert not [choice for choice in CHOICES if choice in "".join(parts)]


@ranks
def test_the_picture_of_the_programs_is_short_and_compares_with_the_right_one():
    exercise = find("lab01.5")
    case = exercise.cases(random.Random(0))[0]
    picture = exercise.draw(case, None, None)
    assert float(str(picture).split('height="')[1].split('"')[0]) < 1300
    assert picture.text.count("(right: 1.43, 1.43, 1.57, 1.57 S; ") == 5


def test_each_program_has_one_name_and_no_two_the_same():
    names = [[choice for choice in CHOICES if is_right(letter, choice)] for letter in LETTERS]
    assert all(len(its) == 1 for its in names) and len({its[0] for its in names}) == len(LETTERS)


def test_the_key_is_nowhere_in_the_notebook():
    text = SOLUTION.with_name("lab.ipynb").read_text(encoding="utf-8")
    assert not [choice for letter in LETTERS for choice in CHOICES if f'{letter}\\": \\"{choice}' in text]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("length", [0, 1, 3, 7, 8])
def test_the_serial_ring_gives_the_sums(length, size):
    case = Case(size, "", {"lengths": [length], "seed": 3})
    for name in (serial.SCATTER, serial.GATHER, serial.REDUCE):
        held = serial.ring(name, serial.before(name, case, length))
        for theirs, right in zip(held, serial.after(name, case, length)):
            wanted = right == right  # NaN: anything
            assert abs(theirs - right)[wanted].max(initial=0.0) < 1e-9


def test_bytes_around_a_ring_by_hand():
    case = Case(4, "", {"lengths": [7]})  # chunks of 2, 2, 2, 1 elements
    assert [serial.ring_bytes(serial.REDUCE, case, rank)[0] // 8 for rank in range(4)] == [10, 10, 11, 11]
    assert [serial.ring_bytes(serial.REDUCE, case, rank)[1] // 8 for rank in range(4)] == [11, 10, 10, 11]
    assert [serial.ring_bytes(serial.SCATTER, case, rank)[0] // 8 for rank in range(4)] == [5, 5, 5, 6]
