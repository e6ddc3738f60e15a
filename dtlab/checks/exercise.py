"""Exercises and their verdicts: shape, value, agreement between ranks, budget; the known mistake first."""
import ast
import contextlib
import importlib
import random
import re
import types
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from dtlab import shell
from dtlab.checks import compare
from dtlab.checks.evidence import SHOWN_CHARS, Answer, Evidence, functions_of, gather
from dtlab.errors import ConfigError

LABS = {lab: f"dtlab.checks.{lab}" for lab in ("lab01", "lab02", "lab03", "lab04")}  # lab -> module with its EXERCISES


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


def when(test):
    """A ``seen`` that looks at results: ``test(evidence, expected)`` where every rank returned something."""
    return lambda evidence, expected: evidence.results is not None and test(evidence, expected)


def in_a_try(test):
    """A ``seen`` that finds the first try that is wrong, and looks at that one: ``test(evidence of it, right)``.

    Tries are ``Case``s in ``case["tries"]``; a result is a dict by their names.
    """
    def seen(evidence, expected):
        for one in evidence.case["tries"]:
            theirs, right = ([its[one.name] for its in results] for results in (evidence.results, expected))
            if compare.difference(theirs, right):
                return test(replace(evidence, case=one, results=theirs), right)
        return False
    return when(seen)


def failed(*kinds, says=""):
    """A ``seen`` for programs that did not come to their end."""
    def seen(evidence, _expected):
        found = re.search(says, evidence.text) if evidence.failed in kinds else None
        return found and (found.group(0) or True)
    return seen


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
        forbidden: collectives (plain names) that the recording may not show.
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
    """Of one exercise.

    Attributes:
        key: ``"lab01.2"``.
        state: "passed", "not yet", "failed"; "reference" where ``dtlab catch-up`` has put one; in a grade also
            "not judged", for reasons that are not the learner's.
        text: what was shown, or why it is not so.
        mistake: name of a known mistake.
        note: what else is to be known: a reference stood in for an earlier exercise.
    """

    key: str
    state: str
    text: str = ""
    mistake: str = ""
    note: str = ""

    def __repr__(self):
        rest = [line for line in (self.text, self.note) if line]
        return "\n".join([f"{self.key}: {self.state}", *rest])


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
    if whole := _whole_key(key):
        raise ConfigError(f'the keys of exercises begin with the lab: write "{whole}"')
    known = exercises(lab)
    if key not in known:
        raise ConfigError(f"there is no exercise {key!r}; {lab} has {', '.join(known)}")
    return known[key]


def _whole_key(said):
    """``lab01.2`` of ``1.2``, as headings have it; None for anything else."""
    number = re.fullmatch(r"(?:[Ee]xercise\s*)?0?(\d)\.(\d+)", str(said).strip())
    return number and f"lab0{number[1]}.{number[2]}"


def earlier(exercise):
    """What an exercise builds on: ``[(earlier Exercise, {name: reference}), ...]``, in the lab's order."""
    known, found, open_ = exercises(exercise.key.split(".")[0]), {}, [exercise]
    for one in open_:
        for owner in known.values():
            mine = {name: one.references[name] for name in owner.names if name in one.references}
            if mine and owner.key != one.key:
                open_ += [owner] * (owner.key not in found)
                found.setdefault(owner.key, {}).update(mine)
    return [(known[key], found[key]) for key in known if key in found]


def reference(lab, name):
    """The function that stands in for a learner's; what ``dtlab catch-up`` puts into exercise cells calls this.

    Raises:
        ConfigError: nothing of the lab builds on such a name.
    """
    known = {name: one for exercise in exercises(lab).values() for name, one in exercise.references.items()}
    if name not in known:
        there = f"there are {', '.join(known)}" if known else "there are none"
        raise ConfigError(f"{lab} has no reference of {name}, since no later exercise uses it; {there}")
    return known[name]


def check(key, *functions):
    """Check one exercise: on live ranks, with inputs drawn anew each time.

    Args:
        key: ``"lab01.2"``.
        functions: the learner's; those of the notebook by name if not given.

    Returns:
        Verdict, which a notebook shows.

    Raises:
        ConfigError: no such exercise, or something is given that is not of it.
    """
    exercise = find(key)
    answer = _answer(exercise, functions)
    if isinstance(answer, Verdict):
        return answer
    verdict = judge(exercise, answer)
    _last[key] = answer.functions, verdict
    used = {name: one for name, one in answer.references.items() if name in _read_by(answer.functions.values())}
    judged = _judged(answer.functions)
    return with_note(verdict, used, *[f"judged: {judged}"] * bool(judged))


def picture(key, *functions):
    """The picture of an exercise: the target beside what the learner's functions do, also while there are none."""
    exercise = find(key)
    if exercise.draw is None:
        return None
    case = exercise.cases(random.Random(0))[0]
    answer = _answer(exercise, functions)
    evidence = (Evidence(case, failed="not yet", text=answer.text) if isinstance(answer, Verdict)
                else gather(exercise.program, answer, exercise.names, case))  # fmt: skip
    return exercise.draw(case, exercise.spec(case), evidence)


def _judged(functions):
    """Which functions of the notebook these are, ``"double of cell [12]"``: an old one shows by its cell."""
    from dtlab.ranks.notebook import cell_sources

    files = {name: code.co_filename for name, function in functions.items() for code in _codes(function)[:1]}
    cells = cell_sources(set(files.values()))
    return ", ".join(f"{name} of {cells[file][0]}" for name, file in files.items() if file in cells)


def _codes(thing):
    return [function.__code__ for function in functions_of(thing)]


def _read_by(functions):
    """Names that functions read, and what they call of their own place too."""
    names, open_ = set(), [one for function in functions for one in functions_of(function)]
    for one in open_:
        codes = [one.__code__]
        for code in codes:
            codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
        new = {name for code in codes for name in code.co_names} - names
        names |= new
        open_ += [each for name in new for each in functions_of(one.__globals__.get(name))
                  if each.__module__ == one.__module__]  # fmt: skip
    return names


def names_in(text):
    """Names that the code of a cell reads; words of comments and texts do not count."""
    try:
        return {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    except SyntaxError:  # a magic
        return set(re.findall(r"\w+", text))


_last = {}  # key -> (the functions that were checked, their Verdict), in this notebook


def _answer(exercise, functions=()):
    """The learner's functions as an Answer; a Verdict where a cell was not run."""
    found = {getattr(function, "__name__", repr(function)): function for function in functions}
    strange = [name for name in found if name not in exercise.names]
    if strange:
        raise ConfigError(f"{strange[0]} is not of exercise {exercise.key}, which is about {', '.join(exercise.names)}")
    notebook = shell.notebook_shell()
    place = notebook.user_ns if notebook is not None else {}
    found = {**{name: place[name] for name in exercise.names if name in place}, **found}
    missing = [name for name in exercise.names if name not in found]
    if missing:
        return Verdict(exercise.key, "not yet", f"{missing[0]} is not there: run the cell of exercise {exercise.key} "
                                                "first, the one that defines it, then this one again")  # fmt: skip
    references = {name: one for name, one in exercise.references.items() if name not in exercise.names}
    for before, names in earlier(exercise):
        references.update(names)
        if _stands(before):
            references = {name: one for name, one in references.items() if name not in names}
    return Answer(found, (), references)


def _stands(exercise):
    """Whether the notebook's own functions pass an exercise; they are checked again only if they are new."""
    answer = _answer(exercise)
    if isinstance(answer, Verdict):
        return False
    functions, verdict = _last.get(exercise.key, ({}, None))
    if verdict is None or any(functions.get(name) is not one for name, one in answer.functions.items()):
        verdict = judge(exercise, answer, shown_chars=0)
        _last[exercise.key] = answer.functions, verdict
    return verdict.state == "passed"


def with_note(verdict, references, *more):
    """A Verdict that says which references stood in, where that matters."""
    names = ", ".join(sorted(references))
    used = f"with the reference of {names}: yours is not there or does not pass"
    return replace(verdict, note="; ".join([used] * (bool(names) and verdict.state != "not yet") + [*more]))


def judge(exercise, answer, rng=None, shown_chars=SHOWN_CHARS):
    """The verdict on an answer; ``rng`` draws the inputs (others each time if not given).

    Nothing passes without proof: each case needs a result of every rank and what the ranks were recorded to do.
    """
    cases = exercise.cases(rng or random.SystemRandom())
    for case in cases:
        evidence = gather(exercise.program, answer, exercise.names, case, shown_chars)
        verdict = judge_case(exercise, evidence)
        if verdict is not None:
            return verdict
    assert cases, f"{exercise.key} has no cases"
    return Verdict(exercise.key, "passed", exercise.title)


def judge_case(exercise, evidence):
    """None if all is right in this case, else the Verdict."""
    if evidence.failed == "not yet":
        return Verdict(exercise.key, "not yet", _own_words(evidence.text))
    expected = exercise.spec(evidence.case)
    try:
        wrong = _what_is_wrong(exercise, evidence, expected)
    except Exception as error:  # a result that nobody thought of
        wrong = f"what came cannot be judged ({type(error).__name__}: {error})"
    if wrong is None:
        return None
    for mistake in exercise.mistakes:
        seen = None
        with contextlib.suppress(Exception):  # it looks for one mistake, and may meet results of any kind
            seen = mistake.seen(evidence, expected)
        if seen:
            told = mistake.says.format(seen if isinstance(seen, str) else "")
            return Verdict(exercise.key, "failed", f"{evidence.case}: {told}\n{wrong}", mistake.name)
    if any(map(_is_missing, evidence.results or [], expected)):
        return Verdict(exercise.key, "failed", f"{evidence.case}: nothing came back (is there a return?)\n{wrong}",
                       "no return")  # fmt: skip
    hint = f"\nHint 1: {exercise.hint}" if exercise.hint and evidence.failed in _OF_THE_EXERCISE else ""
    return Verdict(exercise.key, "failed", f"{evidence.case}: {wrong}{hint}")


_OF_THE_EXERCISE = ("", "hang", "guard")  # values, budget or calls are wrong: no error of Python, no end, no loop


def _is_missing(theirs, right):
    """Whether None stands for a result, or for one of several."""
    if isinstance(theirs, dict) and isinstance(right, dict):
        return any(its is None and right.get(key) is not None for key, its in theirs.items())
    return theirs is None and right is not None


def _what_is_wrong(exercise, evidence, expected):
    if evidence.failed:
        return evidence.text + _OUT_OF_ORDER * ("NameError:" in evidence.text)
    size = evidence.case.world_size
    results, recording = evidence.results or [], evidence.recording
    if recording is None or not len(results) == len(expected) == len(recording.ranks) == size:
        return f"{len(results)} of {size} ranks gave a result and were recorded"
    for rank, (theirs, right) in enumerate(zip(results, expected)):
        wrong = compare.difference(theirs, right)
        if wrong:
            return f"rank {rank}: {wrong}" if size > 1 else wrong
    if exercise.replicated:
        for rank, theirs in enumerate(results):
            wrong = compare.difference(theirs, results[0], rtol=0.0, atol=0.0)
            if wrong:
                return f"rank {rank} is not equal to rank 0 to the last bit: {wrong.replace('should be', 'rank 0 has')}"
    used = compare.collectives_used(recording) & set(exercise.forbidden)
    if used:
        return f"the values are right, but {', '.join(sorted(used))} was called, which this exercise is to do without"
    for rule in exercise.budget:
        over = rule(evidence.case, recording)
        if over:
            return f"the values are right, but {over}"
    return None


_OUT_OF_ORDER = "\nIf it is not a typing error: run the cells above, from the imports on, then this one again"


def _own_words(text):
    """``NotImplementedError: Exercise ...`` without the ranks that said it."""
    said = re.search(r"NotImplementedError: (.*)", text)
    return said.group(1) if said else text
