"""Pictures of the explorers: what is drawn where, and that nothing is drawn outside."""
import doctest
import importlib
from xml.etree import ElementTree

import pytest

from dtlab.plots import Panel, bars, messages, ring
from dtlab.plots.bars import stacked
from dtlab.plots.ring import ring_sends, ring_table
from dtlab.plots.svg import arrow
from dtlab.plots.twin import twin
from dtlab.theory import ring_all_reduce_bytes

SVG = "{http://www.w3.org/2000/svg}"


def texts(picture):
    return [element.text for element in ElementTree.fromstring(str(picture)).iter(f"{SVG}text")]


def count(picture, tag):
    return len(list(ElementTree.fromstring(str(picture)).iter(f"{SVG}{tag}")))


@pytest.mark.parametrize("size", range(2, 9))
def test_the_ring_ends_with_every_sum_on_every_rank(size):
    table = ring_table(size, 2 * (size - 1))
    assert all(sorted(terms) == list(range(size)) and state == "finished" for row in table for terms, state in row)


@pytest.mark.parametrize("size", range(2, 9))
def test_after_the_reduce_scatter_rank_r_has_the_sum_of_chunk_r_only(size):
    table = ring_table(size, size - 1)
    finished = [(rank, chunk) for rank in range(size) for chunk in range(size) if table[rank][chunk][1] == "finished"]
    assert finished == [(rank, rank) for rank in range(size)]


def test_the_ring_moves_the_chunks_that_dtlab_parallel_moves():
    size = 5  # as in ring_reduce_scatter and ring_all_gather
    for step in range(size - 1):
        assert [chunk for _, _, chunk in ring_sends(size, step + 1)] == [(r - step - 1) % size for r in range(size)]
        assert [chunk for _, _, chunk in ring_sends(size, size + step)] == [(r - step) % size for r in range(size)]


def test_one_step_more_or_less_is_not_the_sum():
    assert not all(state == "finished" for row in ring_table(4, 5) for _, state in row)


def test_ring_writes_partial_sums_and_bytes_out():
    picture = ring(4, 2, tensor_bytes=16 * 2**20)
    assert {"3+0+1", "0+1+2", "1+2+3", "2+3+0"} <= set(texts(picture))
    assert "Step 2 of 6: reduce-scatter, 8 of 24 MiB sent by each rank" in texts(picture)
    assert count(picture, "polygon") == 4 + 1  # an arrow per rank, one in the legend
    assert "3 to 0: chunk 1" in picture.text and "Finished sums: 0 of 16" in picture.text


def test_ring_has_sent_what_theory_says_at_the_end():
    picture = ring(6, 10, tensor_bytes=6 * 2**20)
    assert f"{ring_all_reduce_bytes(6, 6):.4g} of {ring_all_reduce_bytes(6, 6):.4g} MiB" in picture.text


def test_every_ring_has_the_same_size_on_the_page():
    heads = {str(ring(size, step, tensor_bytes=1)).split(" role=")[0]
             for size in range(2, 9) for step in range(2 * size - 1)}
    assert len(heads) == 1


def test_messages_says_who_waits_for_whom_in_the_loop():
    calls, loop = [("send", "recv"), ("send", "recv")], [(0, 0), (1, 1), (1, 0), (0, 1)]
    picture = messages(calls, [((0, 0), (1, 1), ""), ((1, 0), (0, 1), "")], loop=loop, verdict="a loop of waits")
    assert picture.text.splitlines()[0] == "A loop of waits."
    assert "rank 0's send waits for rank 1's recv; rank 1's recv comes after rank 1's send" in picture.text
    assert texts(picture).count("after") == 2 and "then" not in texts(picture)


def test_messages_joins_what_was_meant_where_calls_cross():
    calls = [("all_reduce(X)", "all_reduce(Y)"), ("all_reduce(Y)", "all_reduce(X)")]
    meetings = [((0, 0), (1, 0), "X + Y"), ((0, 1), (1, 1), "Y + X")]
    crossed, straight = (str(messages(calls, meetings, crossing=on, verdict="v")).count("stroke-dasharray")
                         for on in (True, False))
    assert (crossed, straight) == (2, 0)


def three_bars(values, ticks=((0, "0"), (4, "4"))):
    return bars(["a", "b", "c"], [Panel("bytes [S]", values, ["x", "y", "z"], list(ticks))], title="t", text="told")


def test_bars_start_at_zero_and_are_as_long_as_their_values():
    root = ElementTree.fromstring(str(three_bars([1, 2, 4])))
    widths = [float(rect.get("width")) for rect in root.iter(f"{SVG}rect") if rect.get("stroke")]
    assert widths[1] == pytest.approx(2 * widths[0], abs=0.2) and widths[2] == pytest.approx(4 * widths[0], abs=0.2)


def test_a_bar_beyond_the_axis_ends_in_an_arrow_at_its_end():
    assert [count(three_bars(values), "polygon") for values in ([1, 2, 4], [1, 2, 4000])] == [0, 1]
    root = ElementTree.fromstring(str(three_bars([4, 4000, 0])))
    widths = [rect.get("width") for rect in root.iter(f"{SVG}rect") if rect.get("stroke")]
    assert widths[0] == widths[1]


def test_dots_on_a_logarithmic_axis_are_a_decade_apart_for_a_factor_of_ten():
    panel = Panel("time", [1, 10, 100], ["1", "10", "100"], [(0.1, "0.1"), (1000, "1000")], log=True)
    root = ElementTree.fromstring(str(bars(["a", "b", "c"], [panel], marked=1, title="t", text="told")))
    at = [float(circle.get("cx")) for circle in root.iter(f"{SVG}circle")]
    assert at[1] - at[0] == pytest.approx(at[2] - at[1], abs=0.2) and at[1] > at[0]
    assert len({circle.get("fill") for circle in root.iter(f"{SVG}circle")}) == 2


def test_narrow_pictures_stand_beside_each_other_and_wide_ones_above():
    narrow = messages([("send",), ("recv",)], [((0, 0), (1, 0), "")], verdict="v")
    for picture, places in ((narrow, 1), (ring(2, 0, tensor_bytes=1), 2)):
        both = twin([picture, picture], ["before", "after"], caption="Move it.")
        inner = list(ElementTree.fromstring(str(both)))
        assert len({svg.get("y") for svg in inner if svg.tag == f"{SVG}svg"}) == places
        assert both.text.splitlines()[:2] == ["Move it.", "before"] and both.text.count(picture.text) == 2


@pytest.mark.parametrize("picture", [
    ring(8, 9, tensor_bytes=2**20), three_bars([0, 5, 4000]),
    messages([("all_reduce(X)", "recv"), ("send", "recv")], [((0, 0), (1, 1), "X + X")], verdict="v" * 45),
], ids=["ring", "bars", "messages"])  # fmt: skip
def test_nothing_is_drawn_outside_the_picture(picture):
    root = ElementTree.fromstring(str(picture))
    width, height = (float(root.get(name)) for name in ("width", "height"))
    for name, limit in (("x", width), ("x1", width), ("x2", width), ("y", height), ("y1", height), ("y2", height)):
        assert all(0 <= float(element.get(name)) <= limit for element in root.iter() if element.get(name)), name
    corners = [pair.split(",") for polygon in root.iter(f"{SVG}polygon") for pair in polygon.get("points").split()]
    assert all(0 <= float(x) <= width and 0 <= float(y) <= height for x, y in corners)
    assert root.get("role") == "img" and root.find(f"{SVG}title").text


def test_an_arrow_has_its_head_at_its_end_and_two_where_asked():
    assert 'points="10.0,0.0' in arrow(0, 0, 10, 0) and arrow(0, 0, 10, 0).count("<polygon") == 1
    assert arrow(0, 0, 30, 0, both=True).count("<polygon") == 2


def test_the_docstrings_examples():
    result = doctest.testmod(importlib.import_module("dtlab.plots.ring"))
    assert result.attempted == 2 and result.failed == 0


STACKED = {"texts": ["3 GB", "9 GB"], "x": "memory [GB]", "top": 8, "title": "t", "text": "said"}


def rects(picture, fill):
    return [(float(r.get("x")), float(r.get("width"))) for r in ElementTree.fromstring(str(picture)).iter(f"{SVG}rect")
            if r.get("fill") == fill][1:]  # the first is the legend's


def test_stacked_bars_start_where_the_part_before_ends_and_share_one_axis():
    picture = stacked(["a", "b"], {"params": [1, 4], "grads": [2, 4]}, **STACKED)
    params, grads = rects(picture, "#4D4D4D"), rects(picture, "#D55E00")
    assert [x for x, _ in grads] == pytest.approx([x + width for x, width in params], abs=0.11)
    assert [width / params[0][1] for _, width in (params[1], *grads)] == pytest.approx([4, 2, 4], abs=0.02)
    assert texts(picture)[:4] == ["P", "params", "G", "grads"]
    assert {"3 GB", "9 GB", "memory [GB]"} <= set(texts(picture))


def test_a_stacked_bar_that_leaves_the_axis_ends_in_an_arrow_and_an_empty_part_is_not_drawn():
    fits = stacked(["a", "b"], {"params": [1, 4], "grads": [0, 4]}, **STACKED)
    assert count(fits, "polygon") == 0 and len(rects(fits, "#D55E00")) == 1
    assert count(stacked(["a", "b"], {"params": [1, 9], "grads": [2, 4]}, **STACKED), "polygon") == 1


def test_limits_are_lines_that_no_letter_stands_on():
    picture = stacked(["a"], {"params": [8]}, limits=[4, 6], said="devices:", **{**STACKED, "texts": ["8 GB"]})
    root = ElementTree.fromstring(str(picture))
    lines = [float(its.get("x1")) for its in root.iter(f"{SVG}line") if its.get("stroke-dasharray")]
    (at,) = [float(its.get("x")) for its in root.iter(f"{SVG}text") if its.text == "P"][1:]
    assert len(lines) == 2 and all(abs(at - x) > 8 for x in lines) and {"devices:", "4", "6"} <= set(texts(picture))


def test_measured_sums_are_marked_and_told_in_the_legend():
    parts = {"params": [1, 4], "grads": [2, 4]}
    plain, marked = (stacked(["a", "b"], parts, measured=its, **STACKED) for its in (None, [3, 7]))
    assert "measured" not in texts(plain) and "measured" in texts(marked)
    assert count(marked, "path") == 3  # with the legend's
