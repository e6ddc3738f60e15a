"""Stacked columns: heights are the numbers, parts lie on each other, marks stand at what was measured."""
import re

import pytest

from dtlab.plots.columns import columns
from dtlab.plots.svg import tick_step

PARTS = {"forward": [1.0, 2.0], "communication": [3.0, 0.0]}


def draw(**more):
    return columns(["a", "b"], PARTS, x="buckets", y="step [s]", title="Steps", text="Steps: a 4 s, b 2 s.", **more)


def rectangles(picture, colour):
    """``(y, height)`` of the parts of one colour; the legend's box has no stroke-width."""
    shape = rf'<rect x="[\d.]+" y="([\d.]+)" width="[\d.]+" height="([\d.]+)" fill="{colour}" stroke="\S+" stroke-width'
    return [tuple(map(float, found)) for found in re.findall(shape, str(picture))]


def test_parts_are_as_tall_as_their_numbers_and_lie_on_each_other():
    (below, ours), (_, theirs) = rectangles(draw(), "#56B4E9")
    (above, communication), (_, nothing) = rectangles(draw(), "#009E73")
    assert theirs / ours == 2 and abs(communication / ours - 3) < 0.01 and nothing == 0
    assert abs(above + communication - below) < 0.11


def test_a_mark_stands_at_the_measured_height():
    (top, height), _ = rectangles(draw(measured=[1.0, None]), "#56B4E9")
    (y,) = re.findall(r'<path d="M [\d.]+ ([\d.]+) l 7', str(draw(measured=[1.0, None])))[1:]  # behind the legend's
    assert abs(float(y) - top) < 0.11 and ">measured<" in str(draw(measured=[1.25, None]))
    assert ">1.25<" in str(draw(measured=[1.25, None])) and ">buckets<" in str(draw())
    assert "measured" not in str(draw())


def test_the_axis_is_as_long_as_asked_so_that_pictures_compare():
    heights = [rectangles(draw(top=top), "#56B4E9")[0][1] for top in (None, 40)]
    assert heights[0] > 5 * heights[1]


def test_letters_may_be_larger_for_a_projector():
    smallest = lambda picture: min(map(int, re.findall(r'<text[^>]*font-size="(\d+)"', str(picture))))
    assert (smallest(draw(measured=[1.0, None])), smallest(draw(measured=[1.0, None], size=14))) == (12, 14)


def test_the_marked_column_is_bold_and_the_text_is_there():
    picture = draw(marked=1)
    assert re.search(r'font-weight="bold"[^>]*>b<', str(picture)) and repr(picture) == "Steps: a 4 s, b 2 s."
    assert re.search(r'font-weight="normal"[^>]*>a<', str(picture))


@pytest.mark.parametrize("length, count, step", [
    (12, 4, 2), (8, 4, 2), (7.9, 4, 1), (0.3, 3, 0.1), (59, 3, 10), (3e-3, 3, 1e-3),
    (9.999999999999999e-10, 1, 1e-9),  # a hair below a power of ten, whose logarithm is rounded up
])
def test_ticks_are_1_2_or_5_times_a_power_of_ten(length, count, step):
    assert tick_step(length, count) == pytest.approx(step)
