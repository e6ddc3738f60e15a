"""What ``dtlab test``, ``run`` and ``lab`` start, without starting it."""

import subprocess
import sys
from pathlib import Path

import pytest

from dtlab import cli
from dtlab.cli import bootstrap, lab, working_copies
from dtlab.examine import Finding

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def course(tmp_path, monkeypatch):
    """Every process that would start is recorded, and ends with the next of ``codes``."""
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    calls, codes = [], []

    def call(command, **kwargs):
        calls.append((command, kwargs.get("env") or {}))
        return codes.pop(0) if codes else 0

    monkeypatch.setattr(subprocess, "call", call)
    return calls, codes


@pytest.mark.parametrize("code", [0, 1, 5])
def test_test_runs_everything_but_peers_and_returns_pytests_code(course, code):
    calls, queue = course
    queue.append(code)
    assert cli._test([]) == code
    assert [command for command, _ in calls] == [[sys.executable, "-m", "pytest", "-m", "not peers"]]


def test_the_lessons_are_part_of_what_pytest_runs_by_itself():
    settings = (ROOT / "pyproject.toml").read_text().split("[tool.pytest.ini_options]")[1]
    assert 'testpaths = ["tests", "notebooks"]' in settings


def test_all_leaves_nothing_out_and_says_so_to_the_tests(course):
    calls, _ = course
    cli._test(["--all"])
    assert calls[0][0][1:] == ["-m", "pytest"] and calls[0][1]["DTLAB_TEST_ALL"] == "1"


def test_what_is_named_is_what_runs(course):
    calls, queue = course
    queue.append(4)
    assert cli._test(["tests/test_tour.py", "-x"]) == 4
    assert calls[0][0][1:] == ["-m", "pytest", "tests/test_tour.py", "-x"] and len(calls) == 1


def test_run_hands_over_its_arguments_and_exit_code(course):
    calls, queue = course
    queue.append(7)
    assert cli._run(["--extra", "bench", "benchmarks/run.py", "--quick"]) == 7
    assert calls[0][0] == [sys.executable, "benchmarks/run.py", "--quick"]


def test_run_without_anything_is_refused():
    with pytest.raises(bootstrap.SetupError, match="needs something to run"):
        cli._run([])


@pytest.mark.parametrize("argv, extra", [
    (["lab"], "course"), (["tour"], "course"), (["test", "-x"], "test"), (["doctor"], None), (["reset", "00"], None),
    (["run", "-m", "ruff"], "test"), (["run", "--extra", "bench", "x.py"], "bench"),
])  # fmt: skip
def test_each_command_sets_up_no_more_than_it_needs(monkeypatch, argv, extra):
    asked = []
    monkeypatch.setattr(bootstrap, "prepare", lambda extra: asked.append(extra) or "elsewhere/bin/python")
    monkeypatch.setattr(bootstrap, "hand_over", lambda python, argv: 0)
    assert cli.main(argv) == 0 and asked == [extra]


def test_an_interrupted_command_ends_like_a_shell_expects(monkeypatch, capsys):
    def interrupt(extra):
        raise KeyboardInterrupt

    monkeypatch.setattr(bootstrap, "prepare", interrupt)
    assert cli.main(["lab"]) == 130 and capsys.readouterr().err == "dtlab: stopped\n"


def test_lab_makes_the_copies_and_opens_lesson_00(tmp_path, monkeypatch, capsys):
    copies = [tmp_path / "work" / "01_later.ipynb", tmp_path / "work" / "00_ranks.ipynb"]
    started = []
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    monkeypatch.setattr(working_copies, "make_all", lambda: copies)
    monkeypatch.setattr(bootstrap, "become", lambda command, env: started.append((command, env)) or 0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lab, "system_finding", lambda: Finding("system", "problem", "Windows 11", "install WSL2"))
    assert lab.main(["--no-browser"]) == 0
    command, env = started[0]
    assert "--LabApp.default_url=/lab/tree/work/00_ranks.ipynb" in command and "--no-browser" in command
    assert env["JUPYTERLAB_SETTINGS_DIR"].startswith(str(tmp_path / "work"))
    assert "install WSL2" in capsys.readouterr().out
