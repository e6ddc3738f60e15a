"""What counts of a learner's notebook, whoever saved it: its exercise cells, and nothing else."""
import json

import pytest
import toy_lab
from toy_lab import code, notebook

from dtlab.checks.notebook import Submission, definitions, exercise_cells, load, pristine
from dtlab.errors import ConfigError

ONE, OTHER = toy_lab.RIGHT["lab90.1"], "# Exercise lab90.1\ndef double(x):\n    return 'other'"


def texts(course, tmp_path, *cells, minor=5, change=None):
    path = tmp_path / "mine.ipynb"
    content = notebook(*cells, minor=minor)
    path.write_text((change or json.dumps)(content), encoding="utf-8-sig")
    found = exercise_cells(load(path), load(pristine("lab90", course)))
    return {key: [cell["source"] for cell in cells] for key, cells in found.items()}


@pytest.mark.parametrize("cell", [
    code(ONE, "exercise"), code(ONE), code(ONE.splitlines(True)), code("\n" + ONE), code("%%time\n" + ONE),
    code(ONE.replace("# Exercise", "#  Exercise")), {"cell_type": "code", "source": ONE},
    {"cell_type": "code", "source": ONE, "metadata": {"tags": None}, "id": 7},
])  # fmt: skip
@pytest.mark.parametrize("minor", [0, 4, 5])
def test_the_first_line_marks_an_exercise_in_every_4_x_copy(course, tmp_path, cell, minor):
    found = texts(course, tmp_path, "x = 1", dict(cell), minor=minor)
    assert list(found) == ["lab90.1"] and found["lab90.1"][0].strip().endswith(ONE[-20:])


def test_where_the_first_line_is_lost_the_cells_id_tells(course, tmp_path):
    body = ONE.split("\n", 1)[1]
    assert texts(course, tmp_path, code(body, id="lab90-1")) == {"lab90.1": [body]}
    assert texts(course, tmp_path, code(body, id="elsewhere")) == {}


def test_other_cells_do_not_count(course, tmp_path):
    kept = {"cell_type": "raw", "metadata": {"tags": ["kept"]}, "source": OTHER}
    prose = {"cell_type": "markdown", "metadata": {}, "source": OTHER}
    solution = code("def double(x):\n    return x + x")
    assert texts(course, tmp_path, solution, kept, prose, code(OTHER, "kept"), code(ONE)) == {"lab90.1": [ONE]}


@pytest.mark.parametrize("content, says", [
    ("{", "cannot be read"), ("[]", "cannot be read"), ('{"worksheets": []}', "cannot be read"), ("", "cannot be read"),
    ('{"cells": [3]}', "cannot be read"), ("[" * 10**6, "cannot be read"), ("<<<<<<< HEAD", "open it in JupyterLab"),
    ('{"cells": [], "x": "' + "x" * 21 * 10**6 + '"}', "clear its outputs"), (None, "there is no"),
])  # fmt: skip
def test_what_is_no_notebook_is_told_with_the_cure(tmp_path, content, says):
    path = tmp_path / "mine.ipynb"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=says):
        load(path)


def test_a_missing_cell_is_not_yet_and_names_its_first_line(course, tmp_path):
    path = tmp_path / "mine.ipynb"
    path.write_text(json.dumps(notebook("x = 1")))
    verdict = Submission("lab90", path, course).check("lab90.1")
    assert verdict.state == "not yet" and "`# Exercise lab90.1`" in verdict.text


@pytest.mark.ranks
def test_cells_may_stand_in_any_order_and_the_last_of_two_counts(course, tmp_path):
    path = tmp_path / "mine.ipynb"
    path.write_text(json.dumps(notebook(toy_lab.RIGHT["lab90.2"], OTHER, ONE, "raise SystemError")))
    mine = Submission("lab90", path, course)
    verdict = mine.check("lab90.2")
    assert (verdict.state, verdict.note) == ("passed", "")  # and exercise 1 came from the learner
    first = mine.check("lab90.1")
    assert first.state == "passed" and "2 cells begin with `# Exercise lab90.1`: the last one counts" in first.note


@pytest.mark.ranks
def test_nothing_else_of_the_notebook_runs(course, tmp_path):
    path = tmp_path / "mine.ipynb"
    given = code("import math as torch\ndist = None", "given", id="given")
    path.write_text(json.dumps(notebook(given, ONE, toy_lab.RIGHT["lab90.2"].replace("double(x)", "x + x"))))
    assert Submission("lab90", path, course).check("lab90.2").state == "passed"  # with the lab's own imports


@pytest.mark.ranks
def test_an_exercise_stands_alone_with_a_reference(course, write):
    mine = Submission("lab90", write(_1=toy_lab.STUBS["lab90.1"]), course)
    verdict = mine.check("lab90.2")
    assert verdict.state == "passed" and "with the reference of double" in verdict.note
    assert mine.check("lab90.1").state == "not yet"


@pytest.mark.ranks
def test_an_exercise_may_build_on_the_learners_own_of_an_earlier_one(course, write):
    mine = Submission("lab90", write(_3="# Exercise lab90.3\ndef first(x):\n    return int(double(x + 1) / 2)\n"
                                        "def second(x):\n    return x + 2"), course)  # fmt: skip
    assert mine.check("lab90.3").state == "passed" and mine.check("lab90.3").note == ""
    other = Submission("lab90", write(_1="# Exercise lab90.1\ndef double(x):\n    return x", _3="# Exercise lab90.3\n"
                       "def first(x):\n    return int(double(x + 1) / 2)\ndef second(x):\n    return x + 2"), course)
    assert "with the reference of double" in other.check("lab90.3").note


@pytest.mark.ranks
def test_who_waits_for_an_earlier_exercise_is_told_and_a_reference_only_where_code_reads_it(course, write):
    told = []
    text = "# Exercise lab90.2\ndef total(x):\n    x = 2 * x  # not double\n    dist.all_reduce(x)\n    return x"
    mine = Submission("lab90", write(_1=toy_lab.STUBS["lab90.1"], _2=text), course, tell=told.append)
    verdict = mine.check("lab90.2")
    assert (verdict.state, verdict.note) == ("passed", "")
    assert told == ["judging lab90.1 first, lab90.2 uses it"]


def test_given_cells_give_their_definitions_and_do_nothing_else():
    source = "import math\nN = 4\nf = lambda x: x\nranks = dtlab.launch(N)\nprint(N)\ndef g(x):\n    return N\nraise E"
    assert definitions(source).splitlines() == [
        "import math", "N = 4", "f = lambda x: x", "def g(x):", "    return N"]
    assert definitions("%%ranks\nx = 1") == ""


@pytest.mark.parametrize("line", ["from dtlab.checks import reference", "import dtlab.checks as c",
                                  "from dtlab import checks"])  # fmt: skip
def test_a_cell_that_uses_the_checks_is_no_answer(course, write, line):
    verdict = Submission("lab90", write(_1=f"# Exercise lab90.1\n{line}\ndef double(x):\n    return 2 * x"),
                         course).check("lab90.1")  # fmt: skip
    assert verdict.state == "failed" and "which judges it" in verdict.text
