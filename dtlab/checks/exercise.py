"""Exercises and their verdicts: shape, value, agreement between ranks, budget; the known mistake first."""
import importlib
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from dtlab import shell
from dtlab.checks import compare
from dtlab.checks.evidence import Answer, Case, Evidence, gather
from dtlab.errors import ConfigError

LABS = {"lab01": "dtlab.checks.lab01", "lab02": "dtlab.checks.lab02"}  # lab -> module with its EXERCISES


@dataclass(frozen=True)
class Mistake:
    """A known wrong answer.

    Attributes:
        name: short, unique in its lab: ``"sum for mean"``.
        says: what the learner is told; ``seen`` may return a text to put for ``{}``.
        seen: function of ``(Evidence, expected by rank)``: whether the evidence shows it (True or a text), or not.
    """

    name: str
    says: str
    seen: Callable


@dataclass(frozen=True)
class Exercise:
    """One exercise of a lab.

    Attributes:
        key: ``"lab01.2"``.
        title: what is to be done, in words.
        names: functions or classes that the learner's cell defines.
        cases: function of a ``random.Random`` to the list of ``Case``s: inputs chosen to trap, the simplest first.
        program: runs on every rank, ``program(case, **{name: function})``; what it returns is compared.
        spec: function of a case to what the program must return, by rank.
        budget: functions of ``(case, recording)`` to None, or what was spent beside what may be.
        forbidden: collectives (plain names) that the recording may not show; ``"dtlab.parallel"`` forbids to borrow.
        mistakes: ``Mistake``s, the most special first.
        hint: hint 1, told when no known mistake fits.
        replicated: all ranks must return the same to the last bit.
        draw: function of ``(case, expected, Evidence)`` to the picture, target beside yours.
        references: name -> the function that stands in for a name of an earlier exercise which this one uses.
        minutes: how long it takes.
    """

    key: str
    title: str
    names: tuple
    cases: Callable
    program: Callable
    spec: Callable
    budget: tuple = ()
    forbidden: tuple = ()
    mistakes: tuple = ()
    hint: str = ""
    replicated: bool = False
    draw: Callable | None = None
    references: dict = field(default_factory=dict)
    minutes: int = 0


@dataclass(frozen=True)
class Verdict:
    """Of one exercise: ``state`` is "passed", "not yet" or "failed"; ``text`` says why, ``mistake`` names a known one."""

    key: str
    state: str
    text: str = ""
    mistake: str = ""

    def __repr__(self):
        return f"{self.key}: {self.state}" + (f"\n{self.text}" if self.text else "")


def exercises(lab):
    """The exercises of one lab, in order: key -> Exercise.

    Raises:
        ConfigError: no such lab.
    """
    if lab not in LABS:
        raise ConfigError(f"there is no lab {lab!r}; there are {', '.join(LABS)}")
    return {exercise.key: exercise for exercise in importlib.import_module(LABS[lab]).EXERCISES}


def find(key):
    """The exercise of a key, ``"lab01.2"``."""
    lab, _, _ = str(key).partition(".")
    known = exercises(lab)
    if key not in known:
        raise ConfigError(f"there is no exercise {key!r}; {lab} has {', '.join(known)}")
    return known[key]


def check(key, *functions):
    """Check one exercise: on live ranks, with inputs drawn anew each time.

    Args:
        key: ``"lab01.2"``.
        functions: the learner's; those of the notebook by name if not given.

    Returns:
        Verdict, which a notebook shows.
    """
    exercise = find(key)
    answer = _answer(exercise, functions)
    return answer if isinstance(answer, Verdict) else judge(exercise, answer)


def picture(key, *functions):
    """The picture of an exercise: the target beside what the learner's functions do, also while there are none."""
    exercise = find(key)
    case = exercise.cases(random.Random(0))[0]
    answer = _answer(exercise, functions)
    evidence = (Evidence(case, failed="not yet", text=answer.text) if isinstance(answer, Verdict)
                else gather(exercise.program, answer, exercise.names, case))  # fmt: skip
    return exercise.draw(case, exercise.spec(case), evidence)


def _answer(exercise, functions):
    """The learner's functions as an Answer; a Verdict where a cell was not run."""
    found = {function.__name__: function for function in functions}
    notebook = shell.notebook_shell()
    place = notebook.user_ns if notebook is not None else {}
    found = {**{name: place[name] for name in exercise.names if name in place}, **found}
    missing = [name for name in exercise.names if name not in found]
    if missing:
        return Verdict(exercise.key, "not yet", f"{missing[0]} is not there: run the cell of exercise {exercise.key} "
                                                "first, the one that defines it, then this one again")  # fmt: skip
    return Answer({**exercise.references, **found})


def judge(exercise, answer, rng=None):
    """The verdict on an answer; ``rng`` draws the inputs (another one each time if not given)."""
    for case in exercise.cases(rng or random.SystemRandom()):
        evidence = gather(exercise.program, answer, exercise.names, case)
        verdict = judge_case(exercise, evidence)
        if verdict is not None:
            return verdict
    return Verdict(exercise.key, "passed", exercise.title)


def judge_case(exercise, evidence):
    """None if all is right in this case, else the Verdict."""
    if evidence.failed == "not yet":
        return Verdict(exercise.key, "not yet", _own_words(evidence.text))
    expected = exercise.spec(evidence.case)
    wrong = _what_is_wrong(exercise, evidence, expected)
    if wrong is None:
        return None
    for mistake in exercise.mistakes:
        seen = mistake.seen(evidence, expected)
        if seen:
            told = mistake.says.format(seen if isinstance(seen, str) else "")
            return Verdict(exercise.key, "failed", f"{evidence.case}: {told}\n{wrong}", mistake.name)
    hint = f"\nHint 1: {exercise.hint}" if exercise.hint else ""
    return Verdict(exercise.key, "failed", f"{evidence.case}: {wrong}{hint}")


def _what_is_wrong(exercise, evidence, expected):
    if evidence.failed:
        return evidence.text
    for rank, (theirs, right) in enumerate(zip(evidence.results, expected)):
        wrong = compare.difference(theirs, right)
        if wrong:
            return f"rank {rank}: {wrong}"
    if exercise.replicated:
        for rank, theirs in enumerate(evidence.results):
            wrong = compare.difference(theirs, evidence.results[0], rtol=0.0, atol=0.0)
            if wrong:
                return f"rank {rank} is not equal to rank 0 to the last bit: {wrong.replace('should be', 'rank 0 has')}"
    used = compare.collectives_used(evidence.recording) & set(exercise.forbidden)
    if used:
        return f"the values are right, but {', '.join(sorted(used))} was called, which this exercise is to do without"
    for rule in exercise.budget:
        over = rule(evidence.case, evidence.recording)
        if over:
            return f"the values are right, but {over}"
    return None


def _own_words(text):
    """``NotImplementedError: Exercise ...`` without the ranks that said it."""
    said = re.search(r"NotImplementedError: (.*)", text)
    return said.group(1) if said else text
