"""Grading a workshop: every notebook under a folder, each judged in a process of its own with limits.

The grading process reads notebooks as text and the judges' answers as JSON; nothing of a submission runs in it. A judge
that ends, for whatever reason, costs the exercise it was at; another one goes on with the next.
"""
import contextlib
import csv
import ctypes
import html
import io
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from dtlab.checks import notebook
from dtlab.checks.evidence import limit_memory
from dtlab.checks.exercise import LABS, Verdict, exercises
from dtlab.errors import ConfigError, DtlabError

LIMIT_S = 60.0  # of one exercise on the average; a submission may take that for each of its exercises
JUDGE_BYTES = 4 * 10**9  # of memory that a judge may take beyond what it has at its start
JUDGE = [sys.executable, "-c", """
import sys
sys.path[:] = filter(None, sys.path)  # nothing from where ranks write
from dtlab.ranks.nursery import nursery
nursery()  # imports torch while we do
from dtlab.checks import grading
grading.judge()"""]
COLUMNS = ("submission", "lab", "exercise", "state", "mistake", "reason", "note")
_ZIP_BYTES = 20 * 10**6  # of one notebook in a zip file
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


def grade(folder, out, course):
    """Judge every notebook under ``folder``.

    Args:
        folder: notebooks, also in nested folders and in zip files.
        out: path of the CSV, a row per submission and exercise.
        course: the checkout with the pristine labs.

    Returns:
        Path of the instructor's page beside it.

    Raises:
        ConfigError: no such folder, no notebook in it, or the table cannot be written.
    """
    if out.suffix != ".csv":
        raise ConfigError(f"{out} is to be a table: name it {out.with_suffix('.csv')}")
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder: name the one that holds the submissions")
    with tempfile.TemporaryDirectory(prefix="dtlab-grade-") as scratch:
        found = list(_submissions(folder, Path(scratch)))
        if not found:
            raise ConfigError(f"no notebook (.ipynb) and no zip file with one is under {folder}")
        try:
            out.write_text("")
        except OSError as error:
            raise ConfigError(f"{out} cannot be written: {error.strerror}") from None
        rows = []
        for number, (name, path) in enumerate(found, 1):
            began = time.monotonic()
            lab, verdicts = _grade_one(path, course, scratch)
            rows += [(name, lab, verdict) for verdict in verdicts]
            print(f"[{number}/{len(found)}] {name}: {lab or 'no lab'}, {_passed(verdicts)} of {len(verdicts)} passed "
                  f"({time.monotonic() - began:.0f} s)", flush=True)  # fmt: skip
            _write_table(rows, out)
    page = out.with_suffix(".html")
    page.write_text(_page(rows), encoding="utf-8")
    return page


def _submissions(folder, scratch):
    """``(name, path)`` of every notebook, those of zip files copied to ``scratch``; or ``(name, what is wrong)``."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.suffix == ".ipynb" and path.is_file() and _counts(name):
            yield name, path
        elif path.suffix == ".zip" and path.is_file():
            yield from _in_zip(name, path, scratch)


def _in_zip(name, path, scratch):
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if entry.filename.endswith(".ipynb") and _counts(entry.filename):
                    target = scratch / f"{len(os.listdir(scratch))}.ipynb"
                    with archive.open(entry) as file:
                        target.write_bytes(file.read(_ZIP_BYTES + 1))  # a larger one is refused when it is read
                    yield f"{name}/{entry.filename}", target
    except (zipfile.BadZipFile, OSError, RuntimeError, NotImplementedError) as error:
        yield name, ConfigError(f"this zip file cannot be read: {error}")


def _counts(name):
    return ".ipynb_checkpoints" not in name and "__MACOSX" not in name and "_kept_" not in name


def _grade_one(path, course, scratch):
    """(lab, Verdicts) of one notebook."""
    try:
        lab = _lab_of(path)
        known = exercises(lab)
    except DtlabError as error:
        return "", [Verdict("", "failed", str(error))]
    verdicts, end = {}, time.monotonic() + LIMIT_S * len(known)
    while left := [key for key in known if key not in verdicts]:
        if time.monotonic() > end:
            verdicts.update({key: Verdict(key, "failed", "not judged: the submission's time was over") for key in left})
            break
        request = {"lab": lab, "path": str(path), "course": str(course), "keys": left,
                   "done": {key: asdict(verdict) for key, verdict in verdicts.items()}}  # fmt: skip
        ended = _run_judge(request, end - time.monotonic(), verdicts, scratch)
        lost = next((key for key in left if key not in verdicts), None)
        if lost:
            verdicts[lost] = Verdict(lost, "failed", f"the process that judged it ended ({ended})")
    return lab, [verdicts[key] for key in known]


def _lab_of(path):
    """The lab that most exercise cells of a notebook are of."""
    if isinstance(path, Exception):
        raise path
    keys = notebook.exercise_cells(notebook.load(path), {"cells": []})
    labs = Counter(key.split(".")[0] for key in keys if key.split(".")[0] in LABS)
    if not labs:
        raise ConfigError(f"no cell begins with a line such as `# Exercise {next(iter(LABS))}.1`")
    return labs.most_common(1)[0][0]


def _run_judge(request, limit_s, verdicts, scratch):
    """Take a judge's verdicts as they come; how it ended. Nothing that it or its ranks started is left."""
    import psutil

    me = psutil.Process()
    before = set(me.children(recursive=True))
    _adopt(1)
    paths = os.pathsep.join([str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        judge = subprocess.Popen(JUDGE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                 cwd=folder, text=True, env={**os.environ, "PYTHONPATH": paths})  # fmt: skip
        timer = threading.Timer(limit_s, judge.kill)
        timer.start()
        try:
            with judge.stdin as pipe:
                pipe.write(json.dumps(request))
            for line in judge.stdout:
                verdict = Verdict(**json.loads(line))
                verdicts[verdict.key] = verdict
        except (OSError, ValueError, TypeError):  # it has ended amid a word
            pass
        finally:
            judge.kill()
            status, late = judge.wait(), timer.finished.is_set()
            timer.cancel()
            left = set(me.children(recursive=True)) - before
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=5)
            _adopt(0)
    return "its time was over" if late else f"exit code {status}"


def _adopt(flag):
    """Whether what a killed judge leaves behind becomes a child of this process, so that it can be found; Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SUBREAPER, flag)


def judge():
    """What a judge's process does: a request on its input, a verdict a line on its output."""
    from dtlab.ranks.nursery import nursery

    request, out = json.load(sys.stdin), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    nursery().wait_ready()  # before the limit, which the ranks' own process would inherit
    limit_memory(JUDGE_BYTES)
    done = {key: Verdict(**verdict) for key, verdict in request["done"].items()}
    submission = notebook.Submission(request["lab"], request["path"], request["course"], done)
    for key in request["keys"]:
        try:
            verdict = submission.check(key)
        except Exception as error:
            verdict = Verdict(key, "not judged", f"{type(error).__name__}: {error}")
        print(json.dumps(asdict(verdict)), file=out, flush=True)
    os._exit(0)


def _passed(verdicts):
    return sum(verdict.state == "passed" for verdict in verdicts)


def _by_reference(verdicts):
    count = sum(verdict.state == "reference" for verdict in verdicts)
    return f", {count} by reference" if count else ""


def _write_table(rows, out):
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for name, lab, verdict in rows:
        reason = "" if verdict.state == "passed" else verdict.text
        cells = (name, lab, verdict.key, verdict.state, verdict.mistake, reason, verdict.note)
        writer.writerow([f"'{cell}" if cell[:1] in tuple("=+-@") else cell for cell in cells])  # no formulas
    out.write_text(text.getvalue(), encoding="utf-8")


def _page(rows):
    """The instructor's page: how many passed each exercise, which known mistakes how often, who needs help."""
    states = ("passed", "reference", "not yet", "failed", "not judged")
    by_exercise, mistakes, people = {}, Counter(), {}
    for name, lab, verdict in rows:
        by_exercise.setdefault(verdict.key or "not readable", Counter())[verdict.state] += 1
        mistakes[(verdict.key, verdict.mistake)] += bool(verdict.mistake)
        people.setdefault((name, lab), []).append(verdict)
    needing = sorted(people.items(), key=lambda item: _passed(item[1]))
    done = ("passed", "reference")
    tables = [
        ("Exercises", ("exercise", *states), [(key, *(count[state] for state in states))
                                              for key, count in sorted(by_exercise.items())]),
        ("Known mistakes", ("exercise", "mistake", "times"), [(*which, times) for which, times in
                                                              mistakes.most_common() if times]),
        ("Who needs help", ("submission", "lab", "passed", "first to mend", "why"), [
            (name, lab, f"{_passed(mine)} of {len(mine)}{_by_reference(mine)}", first.key, first.mistake or first.text)
            for (name, lab), mine in needing if any(v.state != "passed" for v in mine)
            for first in [*(v for v in mine if v.state not in done), Verdict("", "", "by reference")][:1]]),
    ]  # fmt: skip
    parts = ["<!doctype html><meta charset='utf-8'><title>Grades</title><style>body{font:15px sans-serif;margin:2em}"
             "td,th{padding:.2em .8em;text-align:left;vertical-align:top;border-bottom:1px solid #ccc}</style>",
             f"<h1>{len(people)} submissions</h1>"]  # fmt: skip
    for title, head, body in tables:
        lines = ["".join(f"<th>{cell}</th>" for cell in head)]
        lines += ["".join(f"<td>{html.escape(str(cell)[:300])}</td>" for cell in row) for row in body]
        parts.append(f"<h2>{title}</h2><table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>")
    return "\n".join(parts) + "\n"
