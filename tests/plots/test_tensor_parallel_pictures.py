"""Shard maps and sequence strips: what is drawn where, and that nothing is drawn outside."""
import re
from xml.etree import ElementTree

import pytest

from dtlab.plots.svg import COLOURS
from dtlab.plots.tensor_parallel import Matrix, sequence_strip, shard_map
from dtlab.theory import chunks_of

SVG = "{http://www.w3.org/2000/svg}"
MATRICES = [Matrix("X", "activations", (2048, 4096), None, (2048, 4096)),
            Matrix("A", "params", (4096, 16384), "columns", (4096, 4096)),
            Matrix("B", "params", (16384, 4096), "rows", (4096, 4096))]  # fmt: skip


def draw(matrices=MATRICES, *, num_ranks=4, node_size=8, **more):
    picture = shard_map(matrices, num_ranks=num_ranks, node_size=node_size, title="Shards", **more)
    return picture, ElementTree.fromstring(str(picture))


def texts(root):
    return [element.text for element in root.iter(f"{SVG}text")]


def shards(root, name):
    """``[(x, y, width, height), ...]`` by rank."""
    return [tuple(float(rect.get(part)) for part in ("x", "y", "width", "height")) for rect in root.iter(f"{SVG}rect")
            if (title := rect.find(f"{SVG}title")) is not None and title.text.startswith(f"{name}:")]  # fmt: skip


def test_a_matrix_cut_by_columns_has_its_ranks_from_left_to_right_and_by_rows_from_the_top():
    _, root = draw()
    (whole,), columns, rows = (shards(root, name) for name in "XAB")
    assert [(left[0] + left[2], left[1], left[3]) for left in columns[:-1]] == [
        pytest.approx((right[0], right[1], right[3]), abs=0.11) for right in columns[1:]]
    assert [(upper[1] + upper[3], upper[0], upper[2]) for upper in rows[:-1]] == [
        pytest.approx((lower[1], lower[0], lower[2]), abs=0.11) for lower in rows[1:]]
    assert len(columns) == len(rows) == 4 and whole[2] > 2 * columns[0][2]
    assert [title.text for title in root.iter(f"{SVG}title")][1:4] == ["X: every rank", "A: rank 0", "A: rank 1"]


def test_rank_0_is_dark_and_every_number_can_be_read():
    _, root = draw()
    fills = [rect.get("fill") for rect in root.iter(f"{SVG}rect")
             if rect.findtext(f"{SVG}title", "").startswith("A:")]  # fmt: skip
    letters = [label.get("fill") for label in root.iter(f"{SVG}text") if label.text in list("0123")]
    assert fills[0] == COLOURS["params"] and fills[1:] == [fills[1]] * 3 and fills[0] != fills[1]
    assert letters == 2 * [COLOURS["paper"], *[COLOURS["outline"]] * 3]


def test_sizes_stand_below_in_numbers_with_the_bytes_of_a_rank():
    picture, root = draw()
    assert {"4,096 x 16,384", "columns 0 .. 3", "4,096 x 4,096", "33.6 MB", "rows 0 .. 3", "whole on each"} <= set(
        texts(root))
    assert picture.text.startswith("X 2,048 x 4,096, whole on each, 2,048 x 4,096, 16.8 MB; A 4,096 x 16,384, columns")
    assert "67.1 MB" in texts(draw(bytes_per_element=4)[1])


def test_one_rank_has_all_and_its_matrices_are_whole():
    alone = [matrix._replace(part=matrix.shape) for matrix in MATRICES]
    _, root = draw(alone, num_ranks=1)
    assert texts(root).count("one rank") == 3 and [len(shards(root, name)) for name in "XAB"] == [1, 1, 1]


@pytest.mark.parametrize("num_ranks, node_size, borders", [(4, 8, 0), (8, 8, 0), (16, 8, 1), (16, 4, 3)])
def test_a_heavy_line_stands_where_a_nodes_ranks_end(num_ranks, node_size, borders):
    _, root = draw(num_ranks=num_ranks, node_size=node_size)
    lines = [path for path in root.iter(f"{SVG}path") if path.get("stroke-width") == "3"]
    assert len(lines) == 2 * borders
    if borders == 1:
        across, down = ([float(its) for its in re.findall(r"[-\d.]+", line.get("d"))] for line in lines)
        assert across[0] == pytest.approx(shards(root, "A")[8][0], abs=0.11) and across[2] == 0 < across[3]
        assert down[1] == pytest.approx(shards(root, "B")[8][1], abs=0.11) and down[3] == 0 < down[2]


def test_rank_numbers_stand_only_where_there_is_room_and_the_story_is_always_there():
    for num_ranks, numbers in ((8, list("01234567")), (32, [])):
        matrix = MATRICES[1]._replace(part=(4096, 16384 // num_ranks))
        _, root = draw([matrix, *MATRICES[:1]], num_ranks=num_ranks, node_size=64)
        assert [text for text in texts(root) if re.fullmatch(r"\d+", text)] == numbers
        assert len(shards(root, "A")) == num_ranks


def test_signs_stand_between_matrices_and_lines_below():
    _, root = draw(signs={1: "f"}, lines=["f: nothing", "g: something"])
    (circle,) = root.iter(f"{SVG}circle")
    (x, _, width, _), a = shards(root, "X")[0], shards(root, "A")[0]
    radius = float(circle.get("r"))
    assert x + width < float(circle.get("cx")) - radius and float(circle.get("cx")) + radius < a[0]
    assert texts(root)[-2:] == ["f: nothing", "g: something"]


@pytest.mark.parametrize("picture", [
    draw(num_ranks=16, signs={1: "f", 2: "g"}, lines=["last"])[0],
    sequence_strip(chunks_of(16, "zigzag"), seq_length=131072),
], ids=["map", "strip"])  # fmt: skip
def test_nothing_is_drawn_outside_the_picture(picture):
    root = ElementTree.fromstring(str(picture))
    width, height = (float(root.get(name)) for name in ("width", "height"))
    for element in root.iter():
        x, y, wide, tall = (float(element.get(name, 0)) for name in ("x", "y", "width", "height"))
        assert 0 <= x <= x + wide <= width and 0 <= y <= y + tall <= height, element.attrib
        assert float(element.get("font-size", 12)) >= 12
    assert root.get("role") == "img" and root.find(f"{SVG}title").text


@pytest.mark.parametrize("layout, owners", [("contiguous", list("0123")), ("zigzag", list("01233210"))])
def test_the_strip_says_which_rank_has_which_chunk(layout, owners):
    picture = sequence_strip(chunks_of(4, layout), seq_length=32768)
    root = ElementTree.fromstring(str(picture))
    assert texts(root)[3:] == owners and "32,767" in texts(root)
    fills = [rect.get("fill") for rect in root.iter(f"{SVG}rect")][1:]
    assert [fill == fills[0] for fill in fills] == [owner == "0" for owner in owners]
    assert picture.text == f"Chunks of {32768 // len(owners):,} tokens, on ranks {' '.join(owners)}."
