"""Pictures are SVG with a title and a text that says the same."""
import doctest
import importlib
from xml.etree import ElementTree

import pytest
from IPython.core.formatters import DisplayFormatter

from dtlab.plots import curves, ranks_picture
from dtlab.plots.svg import document
from dtlab.ranks.console import mime_bundle

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_ranks_picture_shows_each_variable_where_it_lives(size):
    picture = ranks_picture({"a<b": "1 & 2"}, [{"x": rank} for rank in range(size)])
    root = ElementTree.fromstring(str(picture))
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert "a<b = 1 & 2" in texts and [f"x = {rank}" in texts for rank in range(size)] == [True] * size
    assert root.get("role") == "img" and f"{size} ranks" in root.find(f"{SVG}title").text
    assert picture.text.splitlines()[-1] == f"rank {size - 1}: x = {size - 1}"


def test_nothing_is_drawn_outside_the_picture():
    root = ElementTree.fromstring(str(ranks_picture({"x": "y" * 200}, [{"name": "v" * 200, "b": 2}, {}])))
    width, height = (float(root.get(name)) for name in ("width", "height"))
    for rect in root.iter(f"{SVG}rect"):
        assert float(rect.get("x", 0)) + float(rect.get("width")) <= width
        assert float(rect.get("y", 0)) + float(rect.get("height")) <= height


def test_curves_are_the_same_in_every_run_and_say_their_numbers():
    first, second = (curves({"serial": [5.5, 3.0], "4 ranks": [5.5, 3.0]}, x="step", y="loss [nats]") for _ in "ab")
    assert str(first) == str(second)
    root = ElementTree.fromstring(str(first))
    assert root.get("role") == "img" and root.find(f"{SVG}title").text == "loss [nats] over step: serial, 4 ranks"
    assert first.text.splitlines()[0] == "serial: loss [nats] from 5.5 to 3, 2 points"
    assert first.axes.get_xlabel() == "step"


@pytest.mark.parametrize("xs, whole", [(None, True), (range(5, 12), True), ([0.0, 1, 2, 3, 4, 5, 6.5], False)])
def test_ticks_of_whole_steps_are_whole(xs, whole):
    axes = curves({"loss": [7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]}, x="step", y="loss", xs=xs).axes
    axes.set_xlim(0, 4.2)  # where ticks of 0.5 would fit
    assert all(float(tick).is_integer() for tick in axes.get_xticks()) == whole


@pytest.mark.parametrize("picture", [
    ranks_picture({"a": 1}, [{"x": 0}]), curves({"serial": [2.0, 1.0]}, x="step", y="loss [nats]"),
], ids=["ranks_picture", "curves"])  # fmt: skip
def test_a_notebook_keeps_the_picture_and_its_text_twin_not_the_markup_as_text(picture):
    shown, _ = DisplayFormatter().format(picture)
    assert shown["text/plain"] == picture.text and "<svg" not in picture.text
    assert shown["image/svg+xml"] == str(picture)
    assert mime_bundle(picture) == shown  # and from a rank


@pytest.mark.parametrize("text, title", [("\nfour shards\nof 3", "four shards"), ("", "picture")])
def test_a_picture_without_a_title_takes_its_texts_first_line(text, title):
    root = ElementTree.fromstring(str(document([], width=1, height=1, title="", text=text)))
    assert root.get("aria-label") == root.find(f"{SVG}title").text == title


def test_the_docstrings_example():
    result = doctest.testmod(importlib.import_module("dtlab.plots.ranks_picture"))
    assert result.attempted == 2 and result.failed == 0
