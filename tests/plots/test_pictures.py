"""Pictures are SVG with a title and a text that says the same."""
import doctest
import importlib
from xml.etree import ElementTree

import pytest

from dtlab.plots import curves, ranks_picture

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_ranks_picture_shows_each_variable_where_it_lives(size):
    picture = ranks_picture({"a<b": "1 & 2"}, [{"x": rank} for rank in range(size)])
    root = ElementTree.fromstring(picture)
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert "a<b = 1 & 2" in texts and [f"x = {rank}" in texts for rank in range(size)] == [True] * size
    assert root.get("role") == "img" and f"{size} ranks" in root.find(f"{SVG}title").text
    assert picture.text.splitlines()[-1] == f"rank {size - 1}: x = {size - 1}"


def test_nothing_is_drawn_outside_the_picture():
    root = ElementTree.fromstring(ranks_picture({"x": "y" * 200}, [{"name": "v" * 200, "b": 2}, {}]))
    width, height = (float(root.get(name)) for name in ("width", "height"))
    for rect in root.iter(f"{SVG}rect"):
        assert float(rect.get("x", 0)) + float(rect.get("width")) <= width
        assert float(rect.get("y", 0)) + float(rect.get("height")) <= height


def test_curves_are_the_same_in_every_run_and_say_their_numbers():
    first, second = (curves({"serial": [5.5, 3.0], "4 ranks": [5.5, 3.0]}, x="step", y="loss [nats]") for _ in "ab")
    assert str(first) == str(second)
    root = ElementTree.fromstring(first)
    assert root.get("role") == "img" and root.find(f"{SVG}title").text == "loss [nats] over step: serial, 4 ranks"
    assert first.text.splitlines()[0] == "serial: loss [nats] from 5.5 to 3, 2 points"
    assert first.axes.get_xlabel() == "step"


def test_the_docstrings_example():
    result = doctest.testmod(importlib.import_module("dtlab.plots.ranks_picture"))
    assert result.attempted == 2 and result.failed == 0
