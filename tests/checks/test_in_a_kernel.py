"""``dtlab.check`` in a real kernel: before its cell, on a stub, with a flood of output, and when it passes."""
from pathlib import Path

import pytest
import toy_lab
from nbclient import NotebookClient
from nbformat import v4


@pytest.mark.notebook
@pytest.mark.ranks
def test_cells_in_every_order(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{Path(__file__).parents[2]}")
    right = toy_lab.RIGHT["lab90.1"].replace("return", "print('x' * 10**6)\n    return")
    late = toy_lab.RIGHT["lab90.2"].replace("dist", "late")
    sources = ["import toy_lab\nimport dtlab", 'dtlab.check("lab90.1")', toy_lab.STUBS["lab90.1"],
               'dtlab.check("lab90.1")', right, 'dtlab.check("lab90.1")', late,
               'dtlab.check("lab90.2")', "import torch.distributed as late", 'dtlab.check("lab90.2")',
               "# Exercise lab90.2\ndef total(x)\n    return x", 'dtlab.check("lab90.2")']  # fmt: skip
    lab = v4.new_notebook(cells=[v4.new_code_cell(source) for source in sources])
    NotebookClient(lab, timeout=120, allow_errors=True, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [[out.get("text") or out.get("ename") or out["data"]["text/plain"] for out in lab.cells[i].outputs]
             for i in (1, 3, 5, 7, 9, 10, 11)]
    assert "run the cell of exercise lab90.1 first" in shown[0][-1]
    assert shown[1][-1] == "lab90.1: not yet\nExercise 90.1: return twice x\njudged: double of cell [3]"
    assert shown[2][-1] == "lab90.1: passed\ntwice a tensor\njudged: double of cell [5]"
    assert sum(map(len, shown[2])) < 6000 and "more characters are not shown" in "".join(shown[2])
    assert "NameError" in shown[3][-1] and "from the imports on" in shown[3][-1]
    assert shown[4][-1] == "lab90.2: passed\ntwice the sum over ranks\njudged: total of cell [7]"
    assert "SyntaxError" in shown[5][0] and shown[6][-1].endswith("judged: total of cell [7]")  # the one before it
