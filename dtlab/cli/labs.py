"""``dtlab check | reset | catch-up`` for learners, ``dtlab grade | release`` for instructors."""
import argparse
import json
import os
import re
import time
from dataclasses import asdict
from pathlib import Path

from dtlab.cli import bootstrap, working_copies
from dtlab.errors import ConfigError

_CATCH_UP = '''# Exercise {key}
# Put here by `dtlab catch-up`: the course's own, and the grade says so. What you had written stands below, kept.
import dtlab.checks

{lines}'''


def check(args):
    """Judge a notebook, print the table, write the result beside it; 0 if all that was asked for passes."""
    options = _options("dtlab check lab01 --exercise 2", args, "LAB", "--exercise", "[NOTEBOOK]")
    from dtlab.checks.notebook import Submission

    number = options.exercise or _exercise_in(options.LAB)
    name, _, copy = _lab(options.LAB)
    path = Path(options.NOTEBOOK or copy)
    submission = Submission(name[:5], path, bootstrap.ROOT, tell=lambda line: print(line, flush=True))
    keys = [_key(name, number, submission.known)] if number else list(submission.known)
    print(f"{'exercise':<9} {'state':<8} {'minutes':>7}  what to mend", flush=True)
    for key in keys:
        verdict = submission.check(key)
        why = [line for line in (verdict.text * (verdict.state != "passed"), verdict.note) if line]
        minutes = submission.known[key].minutes or ""
        mend = f"\n{'':28}".join("\n".join(why).splitlines())
        print(f"{key:<9} {verdict.state:<8} {minutes:>7}  {mend}", flush=True)
    _write_result(path, submission.verdicts)
    return 0 if all(submission.verdicts[key].state == "passed" for key in keys) else 1


def _write_result(path, verdicts):
    """Keep the verdicts in a small file; those of exercises that were not asked for now stay as they were."""
    target = path.with_suffix(".result.json")
    try:
        old = json.loads(target.read_text(encoding="utf-8"))["exercises"]
    except (OSError, ValueError, KeyError, TypeError):
        old = {}
    new = {key: {**asdict(verdict), "checked": time.strftime("%Y-%m-%d %H:%M:%S")} for key, verdict in verdicts.items()}
    result = {"notebook": path.name, "exercises": dict(sorted({**old, **new}.items()))}
    try:
        target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"written: {_short(target)}")
    except OSError as error:
        print(f"not written: {_short(target)} ({error.strerror})")


def reset(args):
    """Keep the reader's copy of each named lesson or lab, or one exercise's cell, aside and make a fresh one."""
    options = _options("dtlab reset 00", args, "NAMES", "--exercise")
    if len(options.NAMES) == 1 and (number := options.exercise or _exercise_in(options.NAMES[0])):
        return _reset_exercise(options.NAMES[0], number)
    if options.exercise:
        raise bootstrap.SetupError("--exercise goes with one lab, for example: dtlab reset lab01 --exercise 2")
    for name in options.NAMES:
        fresh, kept = (path and _short(path) for path in working_copies.reset(name, bootstrap.ROOT))
        print(f"fresh copy: {fresh}" + (f", your old one: {kept}" if kept else ""))
        if kept:
            print("if it is open in JupyterLab: reload its tab and restart its kernel")
    return 0


def _reset_exercise(name, number):
    from dtlab.checks import notebook

    name, unsolved, copy = _lab(name)
    unsolved = notebook.load(unsolved)
    stubs = notebook.exercise_cells(unsolved, unsolved)
    key = _key(name, number, stubs)
    _replace(copy, unsolved, {key: stubs[key][-1]["source"]}, tag=None)
    return 0


def catch_up(args):
    """Put references into the first exercise cells of the working copy; the learner's own stay beside them."""
    options = _options("dtlab catch-up lab01 --to 2", args, "LAB", "--to")
    from dtlab import checks
    from dtlab.checks import notebook
    from dtlab.checks.exercise import exercises

    name, unsolved, copy = _lab(options.LAB)
    lab, cells = name[:5], {}
    known = exercises(lab)
    last = _key(name, options.to, known)
    for key in list(known)[: list(known).index(last) + 1]:
        for each in known[key].names:
            checks.reference(lab, each)  # or say that there is none
        lines = "\n".join(f'{each} = dtlab.checks.reference("{lab}", "{each}")' for each in known[key].names)
        cells[key] = _CATCH_UP.format(key=key, lines=lines)
    _replace(copy, notebook.load(unsolved), cells, tag=notebook.CATCH_UP)
    return 0


def _replace(copy, unsolved, cells, tag):
    """Give exercise cells of a working copy a new text; what its reader wrote follows as a raw cell tagged ``kept``."""
    from dtlab.checks import notebook

    mine = notebook.load(copy)
    found = notebook.exercise_cells(mine, unsolved)
    stubs = notebook.exercise_cells(unsolved, unsolved)
    for key, text in cells.items():
        if key not in found:
            raise ConfigError(f"{_short(copy)} has no cell that begins with `# Exercise {key}`: dtlab reset {key[:5]}")
        cell = found[key][-1]
        own = cell["source"].strip() != stubs[key][-1]["source"].strip() and not notebook.is_reference(cell["source"])
        if own:
            old = {"cell_type": "raw", "metadata": {"tags": [notebook.KEPT]}, "source": cell["source"]}
            if "id" in cell:
                old["id"] = f"kept-{time.time_ns():x}-{key.replace('.', '-')}"
            mine["cells"].insert(mine["cells"].index(cell) + 1, old)
        tags = [each for each in cell["metadata"]["tags"] if each != notebook.CATCH_UP]
        cell["metadata"]["tags"] = [*tags, *([tag] if tag else [])]
        cell.update(source=text, outputs=[], execution_count=None)
        print(f"{key}: a new cell" + ", and your old one below it, kept" * own)
    notebook.save(mine, copy)
    print(f"if {_short(copy)} is open in JupyterLab: reload its tab and run the cells again")


def grade(args):
    """Judge every notebook under a folder; write the table and the page for the instructor."""
    options = _options("dtlab grade submissions --out grades.csv", args, "FOLDER", "--out")
    from dtlab.checks import grading

    out = Path(options.out or "grades.csv")
    page = grading.grade(Path(options.FOLDER), out, bootstrap.ROOT)
    print(f"written: {_short(out)} and {_short(page)}")
    return 0


def release(args):
    """Make the learners' copy of the course."""
    options = _options("dtlab release ../course", args, "DIR")
    from dtlab.checks import release as releasing

    lines, files = releasing.release(Path(options.DIR), bootstrap.ROOT)
    print(f"{options.DIR}: {files} files; none of {lines} lines of solutions is in it")
    return 0


class _Parser(argparse.ArgumentParser):
    """Its errors are one sentence with an example."""

    def error(self, message):
        raise bootstrap.SetupError(f"{message}, for example: {self.epilog}")


def _options(example, args, *names):
    """argparse with these arguments: ``LAB``, ``NAMES`` (several), ``[NOTEBOOK]`` (may be left out), ``--to``."""
    parser = _Parser(prog=" ".join(example.split()[:2]), epilog=example)
    for name in names:
        count = {"NAMES": "+", "[NOTEBOOK]": "?"}.get(name)
        parser.add_argument(name.strip("[]"), help=_HELP[name], **({"nargs": count} if count else {}),
                            **({"required": True} if name == "--to" else {}))  # fmt: skip
    return parser.parse_args(args)


_HELP = {
    "LAB": "for example lab01; lab01.2 is one exercise",
    "NAMES": "lessons or labs, for example 00 lab01",
    "[NOTEBOOK]": "your notebook; your working copy under work/labs if none is given",
    "--exercise": "number of one exercise, for example 2",
    "--to": "number of the last exercise to be filled, for example 2",
    "FOLDER": "notebooks, also in folders and zip files: each is one submission",
    "--out": "the table to write (grades.csv); the page for the instructor stands beside it",
    "DIR": "a new or empty folder",
}


def _lab(name):
    """As ``working_copies.find``, labs only."""
    if not re.match(r"lab\d\d", str(name)):
        raise ConfigError(f"{name!r} is no lab: say for example lab01")
    return working_copies.find(name[:5] if _exercise_in(name) else name, bootstrap.ROOT)


def _exercise_in(name):
    """``2`` of ``lab01.2``, as cells spell it; None for a lab."""
    found = re.fullmatch(r"lab\d\d\.(\d+)", name)
    return found and found[1]


def _key(name, number, known):
    """``2``, ``lab01.2`` -> ``lab01.2``, one of ``known``."""
    key = number if str(number).startswith("lab") else f"{name[:5]}.{number}"
    if key not in known:
        raise ConfigError(f"there is no exercise {number!r} in {name[:5]}; there are {', '.join(known)}")
    return key


def _short(path):
    return os.path.relpath(path, bootstrap.ROOT) if Path(path).is_relative_to(bootstrap.ROOT) else str(path)
