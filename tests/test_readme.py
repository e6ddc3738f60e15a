"""The README's own cells run as they stand, and answer what the README says."""

import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]


def cells():
    """The README's Python blocks and its ``%%ranks`` blocks, in order."""
    blocks = re.findall(r"```(\w*)\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    return [text for language, text in blocks if language == "python" or text.startswith("%%ranks")]


def said(source):
    """What the comment behind the last line announces, up to a semicolon."""
    return source.strip().splitlines()[-1].split("# ", 1)[1].split(";")[0].strip()


@pytest.mark.ranks
@pytest.mark.notebook
def test_the_readmes_cells_answer_what_it_says(monkeypatch):
    monkeypatch.setenv("DTLAB_HEADLESS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells()])
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    assert len(notebook.cells) == 4
    for cell in notebook.cells:
        text = "".join(out.get("text", "") or out.get("data", {}).get("text/plain", "") for out in cell.outputs)
        assert said(cell.source) in text, text
