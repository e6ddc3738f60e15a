"""A toy lab in a course of its own; ``write`` makes a learner's notebook of it."""
import json

import pytest
import toy_lab
from toy_lab import code, notebook

from dtlab.checks import evidence
from dtlab.checks import exercise as exercises

exercises.LABS.pop("lab90")  # other tests see the course's labs only


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A checkout that has lab90 only."""
    monkeypatch.setitem(exercises.LABS, "lab90", "toy_lab")
    monkeypatch.setattr(exercises, "_last", {})
    monkeypatch.setattr(evidence, "LIMIT_S", 6.0)
    root = tmp_path / "course"
    cells = [code(toy_lab.GIVEN, "given", id="given")]
    cells += [code(text, "exercise", id=key.replace(".", "-")) for key, text in toy_lab.STUBS.items()]
    for place, text in (("labs/lab90_toy/lab.ipynb", notebook(*cells)), ("notebooks/00_x.ipynb", notebook("1"))):
        (root / place).parent.mkdir(parents=True)
        (root / place).write_text(json.dumps(text))
    return root


@pytest.fixture
def write(tmp_path):
    """Writes a notebook of exercise cells given by number; the rest are right."""
    def write(name="mine.ipynb", *more, **by_number):
        texts = {**toy_lab.RIGHT, **{f"lab90.{number[1:]}": text for number, text in by_number.items()}}
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(notebook(*texts.values(), *more)))
        return path
    return write
