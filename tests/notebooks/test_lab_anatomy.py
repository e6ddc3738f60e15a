"""What every committed lab keeps: its source, no outputs, five cells an exercise, three folded hints without code."""
import importlib.util
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from dtlab.checks.exercise import LABS, exercises
from dtlab.checks.notebook import exercise_cells

COURSE = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("build", COURSE / "notebooks" / "build.py")
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)
BUILT = {name: paths for name, paths in build.sources(COURSE).items() if name.startswith("lab")}
SECTIONS = ("Rules", "Warm-up", "Exercise 1", "Stretch", "Solution")


def faults(lab, keys):
    """Everything in a lab's notebook that breaks the anatomy, one sentence each."""
    code = [cell for cell in lab.cells if cell.cell_type == "code"]
    if any(cell.outputs or cell.execution_count for cell in code):
        yield "a cell has outputs or was run"
    if "given" not in code[0].metadata.get("tags", []) or not re.search(r"^import ", code[0].source, flags=re.M):
        yield "the first code cell is not the imports, tagged given"
    found = exercise_cells(lab, lab)
    if list(found) != list(keys):
        yield f"the exercises are {list(found)}, not {list(keys)}"
    for key, cells in found.items():
        yield from around(lab.cells, cells, key)
    prose = "\n".join(cell.source for cell in lab.cells if cell.cell_type == "markdown")
    titles = re.findall(r"^##+ (.*)$", prose, flags=re.M)
    places = [next((i for i, title in enumerate(titles) if title.startswith(each)), None) for each in SECTIONS]
    if None in places or places != sorted(places):
        yield f"the sections are {titles}"
    hints = re.findall(r"<details>(.*?)</details>", prose, flags=re.S)
    if len(hints) != 3 * len(keys):
        yield f"{len(hints)} hints for {len(keys)} exercises"
    for hint in hints:
        quoted = re.findall(r"<code>(.*?)</code>|`([^`]*)`", hint, flags=re.S)
        if "```" in hint or "<pre" in hint or any(re.search(r"[\n;]|[^=]=[^=]", "".join(each)) for each in quoted):
            yield f"code in a hint: {hint[:80]!r}"
        if re.search(r"(?m)^\s*(def |for |return |import |    )", hint):
            yield f"code in a hint: {hint[:80]!r}"


def around(cells, own, key):
    """Faults of the five cells of an exercise: goal, spec, exercise, picture, check."""
    if len(own) != 1:
        return (yield f"{key} has {len(own)} cells")
    (stub,), at = own, cells.index(own[0])
    short = f"Exercise {int(key[3:5])}.{key.split('.')[1]}"
    bodies = len(re.findall(r"^\s*def ", stub.source, flags=re.M))
    if stub.source.count(f'raise NotImplementedError("{short}: ') != bodies or short not in stub.source:
        yield f'{key}: not each body is raise NotImplementedError("{short}: ...")'
    if "exercise" not in stub.metadata.get("tags", []) or not stub.source.startswith(f"# Exercise {key}\n"):
        yield f"{key}: no tag, or another first line than `# Exercise {key}`"
    before = [cell.cell_type for cell in cells[max(0, at - 2) : at]]
    if before != ["markdown", "code"] and (bodies or before[-1:] != ["markdown"]):
        yield f"{key}: goal and spec do not stand above it, but {before}"
    for offset, what in ((1, "picture"), (2, "check")):
        cell = cells[at + offset] if at + offset < len(cells) else None
        if cell is None or what not in cell.metadata.get("tags", []) or cell.source.strip() != f'dtlab.{what}("{key}")':
            yield f"{key}: cell {offset} below it is not its {what}"


def keys_of(name):
    return list(exercises(name[:5]))


def test_every_lab_has_a_source_and_a_solution():
    assert sorted(name[:5] for name in BUILT) == sorted(LABS)
    assert [name for name, (_, target) in BUILT.items() if not target.with_name("solution.py").exists()] == []


@pytest.mark.parametrize("name", BUILT)
def test_the_committed_lab_is_its_source(name):
    assert build.differences(*BUILT[name]) == []


@pytest.mark.parametrize("name", BUILT)
def test_anatomy(name):
    lab = nbformat.read(BUILT[name][1], as_version=4)
    nbformat.validate(lab)
    for cell in lab.cells:  # as dtlab.checks.notebook reads them
        cell.metadata.setdefault("tags", [])
    assert list(faults(lab, keys_of(name))) == []


@pytest.mark.parametrize("name", BUILT)
def test_the_minutes_of_the_header_are_those_of_the_exercises(name):
    header = nbformat.read(BUILT[name][1], as_version=4).cells[0].source
    minutes = [each.minutes for each in exercises(name[:5]).values()]
    assert all(minutes) and str(sum(minutes)) in header, (minutes, header)


@pytest.mark.parametrize("name", BUILT)
def test_links_lead_somewhere(name):
    lab, folder = nbformat.read(BUILT[name][1], as_version=4), BUILT[name][1].parent
    prose = "\n".join(cell.source for cell in lab.cells if cell.cell_type == "markdown")
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", prose):
        assert (folder / target).exists(), target


@pytest.mark.parametrize("name", BUILT)
def test_no_line_of_code_is_long(name):
    code = [cell for cell in nbformat.read(BUILT[name][1], as_version=4).cells if cell.cell_type == "code"]
    assert [line for cell in code for line in cell.source.splitlines() if len(line) > 120] == []


@pytest.mark.notebook
@pytest.mark.ranks
@pytest.mark.parametrize("name", BUILT)
def test_an_unsolved_lab_runs_from_top_to_bottom(name, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(COURSE))
    lab = nbformat.read(BUILT[name][1], as_version=4)
    NotebookClient(lab, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    told = {tag: [cell.outputs[-1].data for cell in lab.cells if tag in cell.metadata.get("tags", [])]
            for tag in ("picture", "check")}  # fmt: skip
    assert all("image/svg+xml" in shown for shown in told["picture"])
    assert [shown["text/plain"].split("\n")[0] for shown in told["check"]] == [
        f"{key}: not yet" for key in keys_of(name)]


SMALL = '''# %% [markdown]
# # Lab
# ### Rules
# %% tags=["given"]
import dtlab
# %% [markdown]
# ## Warm-up
# ## Exercise 1
# %% tags=["given"]
spec = 1
# %% tags=["exercise"]
# Exercise lab01.1
def f(x):
    raise NotImplementedError("Exercise 1.1: do")
# %% tags=["picture"]
dtlab.picture("lab01.1")
# %% tags=["check"]
dtlab.check("lab01.1")
# %% [markdown]
# <details>look at `f(x)`</details> <details>a sum, <code>dist.send</code></details> <details>a formula: n = 1</details>
# ## Stretch
# ## Solution
'''


def faults_of(source, tmp_path):
    path = tmp_path / "lab01_small.py"
    path.write_text(source, encoding="utf-8")
    lab = build.from_source(path)
    for cell in lab.cells:
        cell.metadata.setdefault("tags", [])
    return list(faults(lab, ["lab01.1"]))


def test_a_lab_in_order_has_no_faults(tmp_path):
    assert faults_of(SMALL, tmp_path) == []


@pytest.mark.parametrize("old, new", [
    ('tags=["given"]\nimport', "\nimport"), ("# Exercise lab01.1", "# Exercise lab01.2"), ("Exercise 1.1: do", "do"),
    ('raise NotImplementedError("Exercise 1.1: do")', "return x"), ('# %% tags=["given"]\nspec = 1\n', ""),
    ('# %% tags=["picture"]\ndtlab.picture("lab01.1")\n', ""), ('check("lab01.1")', 'check("lab01.2")'),
    ("<details>a sum, <code>dist.send</code></details>", ""), ("look at `f(x)`", "```\n# f(x)\n# ```"),
    ("look at `f(x)`", "`y = f(x)`"), ("dist.send", "x = 1"), ("## Stretch\n", "\n"), ("## Warm-up", "## Cold"),
    ('# %% tags=["exercise"]', "# %%"),
])  # fmt: skip
def test_a_fault_of_a_lab_is_found(tmp_path, old, new):
    assert old in SMALL and faults_of(SMALL.replace(old, new), tmp_path)
