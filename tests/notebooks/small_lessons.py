"""Small lessons written where a test asks for them; no .ipynb of a fixture lies in the tree."""
import subprocess
import sys
from pathlib import Path

import nbformat

COURSE = Path(__file__).resolve().parents[2]


def write_notebook(path, *cells):
    """An executed-looking notebook of code cells; a cell is its source or (source, tags)."""
    notebook = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    for number, cell in enumerate(cells):
        source, tags = cell if isinstance(cell, tuple) else (cell, [])
        notebook.cells.append(nbformat.v4.new_code_cell(source, execution_count=number + 1, metadata={"tags": tags}))
    nbformat.write(notebook, path)
    return path


def run_nbval(notebook, *arguments):
    """pytest on one notebook in a process of its own, with the lessons' conftest beside it."""
    for name in ("conftest.py", "nbval.cfg"):
        text = (COURSE / "notebooks" / name).read_text(encoding="utf-8")
        (notebook.parent / name).write_text(text, encoding="utf-8")
    (notebook.parent / "pytest.ini").write_text("[pytest]\nmarkers = notebook\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider", *arguments, str(notebook)]
    return subprocess.run(command, cwd=notebook.parent, capture_output=True, text=True, timeout=120)
