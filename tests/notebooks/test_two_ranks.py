"""Every lesson runs at WORLD_SIZE = 2 too: executed, not compared."""
import sys
from pathlib import Path

import nbformat
import pytest

COURSE = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))
from test_anatomy import LESSONS, build  # noqa: E402

LINE = "WORLD_SIZE = 4"


@pytest.mark.long
@pytest.mark.notebook
@pytest.mark.ranks
@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_lesson_runs_on_two_ranks(path, tmp_path):
    lesson = nbformat.read(path, as_version=4)
    first = next(cell for cell in lesson.cells if cell.cell_type == "code")
    assert first.source.splitlines().count(LINE) == 1, f"not found in {path.name}: {LINE}"
    first.source = first.source.replace(LINE, "WORLD_SIZE = 2")
    for cell in lesson.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    ran = build.execute(lesson, tmp_path)
    for cell in ran.cells:
        if cell.cell_type == "code":
            failed = any(output.output_type == "error" for output in cell.outputs)
            assert failed == ("raises-exception" in cell.metadata.get("tags", [])), (cell.source, cell.outputs)
