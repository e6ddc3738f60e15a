"""The builder: stable ids, kinds of cells, empty diffs."""
import importlib.util
from pathlib import Path

import nbformat
import pytest

spec = importlib.util.spec_from_file_location("build", Path(__file__).resolve().parents[2] / "notebooks" / "build.py")
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)

SOURCE = '''# %% [markdown]
# # A lesson

# %% name="start"
import time

# %% tags=["exact"]
print("always")

# %% tags=["timing"]
print(f"took {time.perf_counter():.6f} s")

# %% tags=["exact", "raises-exception"]
1 / 0
'''


@pytest.fixture
def lesson(tmp_path):
    path = tmp_path / "00_small.py"
    path.write_text(SOURCE, encoding="utf-8")
    return path


def ids(path):
    return [cell.id for cell in build.from_source(path).cells]


def test_ids_are_stable_and_an_inserted_cell_renumbers_no_other(lesson):
    before = ids(lesson)
    assert before == ids(lesson) and before[1] == "00-start"
    lesson.write_text(SOURCE.replace("# %% name=", "# %%\nx = 1\n\n# %% name="), encoding="utf-8")
    after = ids(lesson)
    assert len(after) == len(before) + 1 and [key for key in after if key in before] == before


def test_equal_cells_get_different_ids(lesson):
    lesson.write_text("# %%\nx = 1\n\n# %%\nx = 1\n", encoding="utf-8")
    assert len(set(ids(lesson))) == 2


def test_tags_survive_and_exact_cells_are_compared(lesson):
    tags = [cell.metadata.get("tags", []) for cell in build.from_source(lesson).cells]
    assert tags == [[], [], ["exact", "nbval-check-output"], ["timing"],
                    ["exact", "raises-exception", "nbval-check-output"]]


@pytest.mark.notebook
def test_a_rebuild_without_a_change_is_an_empty_diff(lesson, tmp_path):
    target = tmp_path / "00_small.ipynb"
    assert build.build(lesson, target)
    first = target.read_bytes()
    assert not build.build(lesson, target) and target.read_bytes() == first
    assert build.differences(lesson, target) == []
    lesson.write_text(SOURCE.replace("always", "never"), encoding="utf-8")
    assert len(build.differences(lesson, target)) == 1 and build.build(lesson, target)
    old, new = nbformat.reads(first.decode(), 4).cells, nbformat.read(target, 4).cells
    assert old[3] == new[3] and old[2].outputs != new[2].outputs  # the timing stayed, the exact cell did not


@pytest.mark.notebook
@pytest.mark.parametrize("cell, reason", [
    ("# %%\nprint(1)", "needs one of the tags"),
    ('# %% tags=["exact"]\nprint("/home/somebody/file.py")', "of this machine"),
    ("# %%\n%%no_such_magic\nx = 1", "not found"),
])
def test_what_must_not_become_a_lesson_is_refused(tmp_path, cell, reason):
    path = tmp_path / "00_bad.py"
    path.write_text(cell, encoding="utf-8")
    with pytest.raises(Exception, match=reason):
        build.build(path, tmp_path / "00_bad.ipynb")
    assert not (tmp_path / "00_bad.ipynb").exists()


@pytest.mark.parametrize("text, found", [
    ("File /usr/lib/python3.11/x.py:1", True), (r"C:\\Users\\x", True), ("6 samples/s and 1/home/x", False),
    ("see ../notebooks/GLOSSARY.md and https://a.org/home/x", False), ("/tmp/x", True),
])
def test_paths_of_a_machine_are_seen(text, found):
    assert bool(build.machine_names(text)) is found
