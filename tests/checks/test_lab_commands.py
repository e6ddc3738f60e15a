"""``dtlab check``, ``reset``, ``catch-up``, ``grade``, ``release``: tables, files, exit codes, on a toy lab."""
import json

import pytest
import toy_lab

from dtlab import cli
from dtlab.checks import grading, release
from dtlab.checks.notebook import Submission, load
from dtlab.cli import bootstrap, working_copies


@pytest.fixture
def run(course, monkeypatch):
    """Runs a command in the toy course."""
    monkeypatch.setattr(bootstrap, "ROOT", course)
    monkeypatch.setattr(bootstrap, "prepare", lambda extra: None)
    working_copies.make_all(course)
    return lambda *args: cli.main(args)


@pytest.fixture
def copy(run, course):
    return course / "work" / "labs" / "lab90_toy" / "lab.ipynb"


def write(copy, **by_number):
    """Write cells of the working copy, by number."""
    content = load(copy)
    for cell in content["cells"]:
        text = by_number.get("_" + cell["source"][len("# Exercise lab90."):][:1])
        cell["source"] = text or cell["source"]
    copy.write_text(json.dumps(content))


def cells(copy):
    return [(cell["cell_type"], cell["metadata"]["tags"], cell["source"]) for cell in load(copy)["cells"]]


def test_make_lab_makes_copies_of_labs_whose_links_still_lead_there(run, course, copy):
    assert copy.exists()
    lab = course / "labs" / "lab90_toy" / "lab.ipynb"
    lab.write_text(lab.read_text().replace("import torch", "[x](../../notebooks/00_x.ipynb)"))
    copy.unlink()
    working_copies.make_all(course)
    assert "](../../../notebooks/00_x.ipynb)" in copy.read_text() and (copy.parent / "../../../notebooks").exists()


@pytest.mark.ranks
def test_check_prints_a_table_writes_the_result_and_fails_until_all_pass(run, copy, capsys):
    write(copy, _1=toy_lab.RIGHT["lab90.1"], _2=toy_lab.RIGHT["lab90.2"])
    assert run("check", "lab90") == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0].split()[:3] == ["exercise", "state", "minutes"] and out[1].split() == ["lab90.1", "passed", "5"]
    assert out[3].split() == ["lab90.3", "not", "yet", "Exercise", "90.3:", "x", "+", "1"]
    result = json.loads(copy.with_name("lab.result.json").read_text())["exercises"]
    assert [one["state"] for one in result.values()] == ["passed", "passed", "not yet"]
    write(copy, _3=toy_lab.RIGHT["lab90.3"])
    assert run("check", "lab90", "--exercise", "3") == 0
    result = json.loads(copy.with_name("lab.result.json").read_text())["exercises"]
    assert [one["state"] for one in result.values()] == ["passed"] * 3


@pytest.mark.ranks
def test_check_takes_another_notebook_and_any_name_of_an_exercise(run, course, tmp_path, capsys):
    other = tmp_path / "other.ipynb"
    other.write_text(json.dumps(toy_lab.notebook(toy_lab.RIGHT["lab90.1"])))
    assert run("check", "lab90_toy", str(other), "--exercise", "lab90.1") == 0
    assert (tmp_path / "other.result.json").exists() and "lab90.2" not in capsys.readouterr().out
    assert run("check", "lab90.1", str(other)) == 0 and "lab90.2" not in capsys.readouterr().out


@pytest.mark.ranks
def test_catch_up_fills_cells_keeps_the_own_ones_and_is_noted(run, course, copy):
    own = "# Exercise lab90.1\ndef double(x):\n    return 'mine'"
    write(copy, _1=own, _2=toy_lab.RIGHT["lab90.2"])
    assert run("catch-up", "lab90", "--to", "1") == 0
    kinds = [(kind, tags) for kind, tags, _ in cells(copy)[1:4]]
    assert kinds == [("code", ["exercise", "catch-up"]), ("raw", ["kept"]), ("code", ["exercise"])]
    assert cells(copy)[2][2] == own and "return x * 2" not in copy.read_text()
    mine = Submission("lab90", copy, course)
    assert mine.check("lab90.1").state == "reference"
    assert mine.check("lab90.2").state == "passed" and "reference of double" in mine.check("lab90.2").note
    names = {}
    exec(cells(copy)[1][2], names)
    assert names["double"] is toy_lab.ref_double
    write(copy, _1=toy_lab.RIGHT["lab90.1"])  # written over the filled one: the learner's own again
    assert Submission("lab90", copy, course).check("lab90.1").state == "passed"


def test_reset_of_an_exercise_makes_its_stub_anew_and_keeps_the_old_cell(run, copy, capsys):
    write(copy, _1=toy_lab.RIGHT["lab90.1"], _2=toy_lab.RIGHT["lab90.2"])
    assert run("reset", "lab90", "--exercise", "1") == 0
    assert [text for _, _, text in cells(copy)[1:4]] == [
        toy_lab.STUBS["lab90.1"], toy_lab.RIGHT["lab90.1"], toy_lab.RIGHT["lab90.2"]]
    assert cells(copy)[2][:2] == ("raw", ["kept"]) and "reload its tab" in capsys.readouterr().out
    assert run("reset", "lab90", "--exercise", "1") == run("catch-up", "lab90", "--to", "1") == 0
    assert run("reset", "lab90.1") == 0
    ids = [cell["id"] for cell in load(copy)["cells"]]
    assert len(set(ids)) == len(ids) == 5  # neither a stub nor the course's own is kept


def test_reset_of_a_lab_keeps_the_old_notebook(run, copy):
    write(copy, _1="mine")
    copy.with_name("lab.result.json").write_text("old")
    assert run("reset", "lab90") == 0
    assert copy.with_name("lab_kept_1.result.json").read_text() == "old"
    assert not copy.with_name("lab.result.json").exists()
    assert "mine" in copy.with_name("lab_kept_1.ipynb").read_text() and "mine" not in copy.read_text()


@pytest.mark.parametrize("args, says", [
    (["check"], "for example: dtlab check lab01"), (["check", "00"], "is no lab"),
    (["check", "lab55"], "no lab 'lab55'; there are lab90_toy"),
    (["check", "lab90", "--exercise", "9"], "there are lab90.1"), (["check", "lab90", "nowhere.ipynb"], "there is no"),
    (["check", "lab90", "--fast"], "for example"), (["catch-up", "lab90"], "--to"),
    (["catch-up", "lab90", "--to", "2"], "no reference of total"), (["reset"], "for example: dtlab reset 00"),
    (["reset", "00", "lab90", "--exercise", "1"], "goes with one lab"),
    (["reset", "lab90", "--exercise", "9"], "there are"),
    (["grade"], "for example: dtlab grade"), (["grade", "nowhere"], "is no folder"), (["release"], "for example"),
])  # fmt: skip
def test_wrong_arguments_are_one_sentence_with_the_cure(run, capsys, args, says):
    assert run(*args) == 1
    error = capsys.readouterr().err
    assert says in error and len(error.splitlines()) == 1


def test_what_is_wrong_leaves_the_copy_alone(run, copy, capsys):
    before = copy.read_bytes()
    run("catch-up", "lab90", "--to", "2")
    assert copy.read_bytes() == before


def test_grade_and_release_hand_on_their_arguments(run, course, monkeypatch, capsys, tmp_path):
    calls = []
    monkeypatch.setattr(grading, "grade", lambda *args: calls.append(args) or args[1].with_suffix(".html"))
    monkeypatch.setattr(release, "release", lambda *args: calls.append(args) or (12, 34))
    assert run("grade", "all", "--out", "a.csv") == run("release", str(tmp_path / "copy")) == 0
    assert [str(each[0]) for each in calls] == ["all", str(tmp_path / "copy")] and calls[1][1] == course
    assert "a.csv and a.html" in (out := capsys.readouterr().out) and "34 files; none of 12 lines" in out


def test_one_exercise_alone_asks_for_an_environment(monkeypatch):
    asked = []
    monkeypatch.setattr(bootstrap, "prepare", lambda extra: asked.append(extra) or "elsewhere/bin/python")
    monkeypatch.setattr(bootstrap, "hand_over", lambda python, argv: 0)
    for args in (["reset", "lab90"], ["reset", "lab90", "--exercise", "1"], ["check", "lab90"]):
        cli.main(args)
    assert asked == [None, "course", "course"]
