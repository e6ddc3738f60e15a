"""Grading a folder: what a submission does costs one exercise of it, and no other submission anything."""
import csv
import json
import sys
import zipfile
from pathlib import Path

import psutil
import pytest
import toy_lab
from toy_lab import notebook

from dtlab.checks import grading
from dtlab.checks.exercise import Verdict
from dtlab.errors import ConfigError

HERE = str(Path(__file__).resolve().parent)
DOUBLE = "# Exercise lab90.1\ndef double(x):\n    "
KILLS_THE_JUDGE = DOUBLE + ("import psutil\n    for one in psutil.Process().parents()[:2] * (rank == 0):\n"
                            "        one.kill()\n    return 2 * x")  # one rank: a later one's parent is this test


@pytest.fixture
def grade(course, tmp_path, monkeypatch):
    """Grades ``tmp_path / "all"``: rows by (submission, exercise), and the page."""
    toy = "import toy_lab\ngrading.judge()"
    program = grading.JUDGE[2].replace("grading.judge()", toy)
    monkeypatch.setattr(grading, "JUDGE", [sys.executable, "-c", f"import sys; sys.path.append({HERE!r})\n{program}"])

    def grade():
        page = grading.grade(tmp_path / "all", tmp_path / "grades.csv", course)
        with open(tmp_path / "grades.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        return {(row["submission"], row["exercise"]): row for row in rows}, page.read_text()

    return grade


@pytest.mark.ranks
def test_each_submission_is_judged_by_itself(grade, write, tmp_path, capsys):
    before = set(psutil.Process().children(recursive=True))
    write("all/anna/lab.ipynb", _1=KILLS_THE_JUDGE)
    write("all/=bob.ipynb", _1=DOUBLE + "import subprocess, os\n    subprocess.Popen(['sleep', '98.5'], "
          "start_new_session=True)\n    os._exit(0)", _3=toy_lab.STUBS["lab90.3"])  # fmt: skip
    write("all/anna/.ipynb_checkpoints/lab.ipynb")
    with zipfile.ZipFile(tmp_path / "all" / "c.zip", "w") as archive:
        archive.write(write("good.ipynb"), "deep/lab.ipynb")
    (tmp_path / "all" / "broken.ipynb").write_text("{")
    (tmp_path / "all" / "broken.zip").write_text("{")
    (tmp_path / "all" / "notes.ipynb").write_text(json.dumps(notebook("x = 1")))
    rows, page = grade()
    states = {key: row["state"] for key, row in rows.items()}
    assert states == {
        ("'=bob.ipynb", "lab90.1"): "failed", ("'=bob.ipynb", "lab90.2"): "passed",
        ("'=bob.ipynb", "lab90.3"): "not yet",
        ("anna/lab.ipynb", "lab90.1"): "failed", ("anna/lab.ipynb", "lab90.2"): "passed",
        ("anna/lab.ipynb", "lab90.3"): "passed",
        ("c.zip/deep/lab.ipynb", "lab90.1"): "passed", ("c.zip/deep/lab.ipynb", "lab90.2"): "passed",
        ("c.zip/deep/lab.ipynb", "lab90.3"): "passed",
        ("broken.ipynb", ""): "failed", ("broken.zip", ""): "failed", ("notes.ipynb", ""): "failed",
    }  # fmt: skip
    assert "the process that judged it ended" in rows[("anna/lab.ipynb", "lab90.1")]["reason"]
    assert "with the reference of double" in rows[("anna/lab.ipynb", "lab90.2")]["note"]
    assert "no cell begins with" in rows[("notes.ipynb", "")]["reason"]
    assert "[6/6] notes.ipynb: no lab, 0 of 1 passed" in capsys.readouterr().out
    assert "<td>lab90.1</td><td>1</td>" in page
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.mark.ranks
def test_a_submission_has_a_total_time(grade, write, monkeypatch):
    monkeypatch.setattr(grading, "LIMIT_S", 0.2)
    write("all/slow.ipynb")
    rows, _ = grade()
    reasons = [row["reason"] for row in rows.values()]
    assert len(reasons) == 3 and "its time was over" in reasons[0] and all("time was over" in each for each in reasons)


@pytest.mark.parametrize("folder, out, says", [
    ("nowhere", "grades.csv", "is no folder"), (".", "grades.csv", "no notebook"), (".", "grades.html", "name it"),
])  # fmt: skip
def test_wrong_arguments_are_told_with_the_cure(tmp_path, folder, out, says):
    with pytest.raises(ConfigError, match=says):
        grading.grade(tmp_path / folder, tmp_path / out, tmp_path)


def test_a_table_that_cannot_be_written_is_told_before_anybody_is_judged(tmp_path):
    (tmp_path / "a.ipynb").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be written"):
        grading.grade(tmp_path, tmp_path / "nowhere" / "grades.csv", tmp_path)


def test_a_larger_notebook_in_a_zip_file_is_refused_and_not_unpacked(tmp_path):
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("../../lab.ipynb", b" " * 10**8)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    ((name, path),) = grading._submissions(tmp_path, scratch)
    assert path.parent == scratch and path.stat().st_size == grading._ZIP_BYTES + 1
    assert grading._grade_one(path, tmp_path, scratch)[1][0].text.endswith("clear its outputs and save it")


def test_the_page_tells_what_catch_up_has_put_there():
    rows = [("a", "lab90", Verdict("lab90.1", "reference")), ("a", "lab90", Verdict("lab90.2", "passed")),
            ("b", "lab90", Verdict("lab90.1", "reference")), ("b", "lab90", Verdict("lab90.2", "failed", "wrong"))]
    page = grading._page(rows)
    assert "<td>a</td><td>lab90</td><td>1 of 2, 1 by reference</td><td></td><td>by reference</td>" in page
    assert "<td>b</td><td>lab90</td><td>0 of 2, 1 by reference</td><td>lab90.2</td><td>wrong</td>" in page


def test_the_page_counts_and_escapes():
    rows = [("<b>", "lab90", Verdict("lab90.1", "failed", "<script>", "squares")),
            ("x", "lab90", Verdict("lab90.1", "failed", "", "squares")), ("x", "lab90", Verdict("lab90.2", "passed"))]
    page = grading._page(rows)
    assert "<td>squares</td><td>2</td>" in page and "&lt;b&gt;" in page and "<script>" not in page
    assert page.index("&lt;b&gt;") < page.index("<td>x</td>")  # who has least comes first
