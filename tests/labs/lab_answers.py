"""Answers to the labs, right and wrong, as text: ``labNN_wrong.py`` and ``labNN_right.py`` beside this file.

A cell begins with ``# %% lab01.2: what it is`` and defines what the exercise asks for; what stands before the first
cell belongs to each of them. In a file of wrong answers the title is the name of the mistake that the check must tell,
with what tells two of one name apart in parentheses.
"""
import collections
import random
import re
from pathlib import Path

import pytest

from dtlab.checks import Answer
from dtlab.checks.exercise import find, judge

HERE = Path(__file__).parent
SHORT = 5  # so many wrong answers to an exercise are judged by ``make test``; ``make test-all`` adds the rest


def answers(file):
    """``pytest.param(key, title, source)`` for each cell of a file of answers; wrong ones past the first few: long."""
    head, *cells = re.split(r"(?m)^# %% ", (HERE / file).read_text(encoding="utf-8"))
    params, seen = [], collections.Counter()
    for cell in cells:
        title, source = cell.split("\n", 1)
        key, title = title.split(": ", 1)
        seen[key] += 1
        marks = [pytest.mark.long] if "wrong" in file and seen[key] > SHORT else []
        params.append(pytest.param(key, title, f"{head}\n{source}", id=f"{key}, {title}", marks=marks))
    return params


def verdict_on(key, source, seed=0):
    """The verdict on an answer."""
    exercise = find(key)
    answer = Answer(source=[("answer", source)], references=exercise.references)
    return judge(exercise, answer, random.Random(seed))


def name_of(title):
    """The mistake of a title."""
    return title.partition(" (")[0]
