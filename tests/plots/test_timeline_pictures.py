"""Pictures of timelines: numbers in the boxes, nothing outside, quick and small however many events."""
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dtlab import plots
from dtlab.errors import ConfigError
from dtlab.plots.svg import COLOURS
from dtlab.simulate import Box, Event, Lane, Recording, Timeline

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "simulate"))
from hand_made import call, compute, one_f_one_b, phase, two_ranks  # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"


def drawn(*args, **options):
    picture = plots.timeline(*args, **options)
    return picture, ElementTree.fromstring(str(picture))


def texts(root):
    return [element.text for element in root.iter(f"{SVG}text") if element.text]


def tall(root):
    """Boxes of the compute lanes that are wide enough for an outline: ``(fill, x, width)``."""
    return [(rect.get("fill"), float(rect.get("x")), float(rect.get("width"))) for rect in root.iter(f"{SVG}rect")
            if rect.get("height") == "27" and rect.get("stroke")]


def test_micro_batch_numbers_with_their_letter_stand_in_the_boxes():
    picture, root = drawn(one_f_one_b(2, 3, forward_s=1.0, backward_s=2.0))
    assert [text for text in texts(root) if re.fullmatch("[FB][0-9]", text)] == [
        "F0", "F1", "B0", "F2", "B1", "B2", "F0", "B0", "F1", "B1", "F2", "B2"]
    assert root.get("role") == "img" and root.find(f"{SVG}title").text == "Timeline of 2 ranks, 12 s"
    assert picture.text.startswith("Timeline: 12 s\nrank 0: forward 3 + backward 6 + idle 3 = 12 s; communication: ")


def test_a_box_too_narrow_for_letter_and_number_keeps_the_number():
    _, root = drawn(one_f_one_b(4, 12))
    inside = texts(root)
    assert {"B7", "7"} <= set(inside) and "F7" not in inside


def test_kinds_have_the_courses_colours_an_outline_and_a_legend():
    events = [phase(0, 1, "forward"), phase(1, 2, "backward"), phase(2, 3, "backward_weight"), phase(3, 4, "optimizer"),
              phase(4, 5, "attention"), Event("wait", "all_reduce", 5, 6)]
    _, root = drawn(Recording({0: events}))
    fills = [fill for fill, _, _ in tall(root)]
    assert fills[:4] == [COLOURS[name] for name in ("forward", "backward", "weight_grads", "optimizer")]
    assert fills[5].startswith("url(#idle-") and root.find(f".//{SVG}pattern").get("id") == fills[5][5:-1]
    assert {"F", "B", "W", "O", "attention", "forward", "weight gradient", "idle"} <= set(texts(root))


def test_places_and_widths_are_to_scale():
    _, root = drawn(two_ranks())
    (fill, x, width), (_, following, _) = tall(root)[:2]
    assert fill == COLOURS["forward"] and following == pytest.approx(x + width)
    boxes = [(x, width) for fill, x, width in tall(root) if fill == COLOURS["backward"]]
    assert boxes[0] == (pytest.approx(x + width, abs=0.6), pytest.approx(3 * width, abs=0.6))


def test_each_wide_box_tells_its_story():
    _, root = drawn(one_f_one_b(2, 2, forward_s=1.5e-3))
    stories = [title.text for title in root.iter(f"{SVG}title")]
    assert "rank 1: forward, stage 1, micro-batch 0, 1.5 ms" in stories


@pytest.mark.parametrize("make", [two_ranks, one_f_one_b, lambda: one_f_one_b(8, 4), lambda: Recording({}),
                                  lambda: Recording({0: [compute(1, 1)], 1: []}),
                                  lambda: Recording({0: [phase(5, 5 + 1e-7, "<a & b>", note='"')]})])
def test_nothing_is_drawn_outside_the_picture(make):
    _, root = drawn(make())
    width, height = (float(root.get(name)) for name in ("width", "height"))
    for rect in root.iter(f"{SVG}rect"):
        assert 0 <= float(rect.get("x", 0)) and float(rect.get("x", 0)) + float(rect.get("width")) <= width
        assert float(rect.get("y", 0)) + float(rect.get("height")) <= height
    for text in root.iter(f"{SVG}text"):
        assert 0 < float(text.get("x")) < width and 0 < float(text.get("y")) < height
        assert float(text.get("font-size")) >= 12  # 18 px on a projector


def test_ranks_and_lanes_may_be_chosen():
    _, root = drawn(one_f_one_b(4, 8), ranks=[1, 3], communication=False)
    assert [text for text in texts(root) if "rank" in text] == ["rank 1", "rank 3"]
    assert "from rank 0" in texts(drawn(one_f_one_b(4, 8))[1])


def test_calls_under_way_at_once_are_drawn_in_rows():
    events = [*(Event("issue", "all_reduce", at, at, group="0-1#0:dp", seq=at) for at in range(7)),
              *(Event("wait", "all_reduce", 8, 9, group="0-1#0:dp", seq=at) for at in range(7))]
    _, root = drawn(Recording({0: events}))
    rows = {rect.get("y") for rect in root.iter(f"{SVG}rect")
            if rect.get("fill") == COLOURS["communication"] and rect.get("height") in ("15", "5")}
    assert len(rows) == 4 and texts(root).count("all_reduce") == 1


def test_neighbouring_calls_are_not_joined():
    events = [event for seq in range(3) for event in call(seq, seq + 1, "all_reduce", seq, group="0-1#0:dp")]
    assert texts(drawn(Recording({0: events}))[1]).count("all_reduce") == 3


def test_a_wait_too_short_to_see_does_not_divide_a_phase():
    events = [phase(0, 10, "forward", micro_batch=5), Event("wait", "all_reduce", 5, 5.001)]
    assert texts(drawn(Recording({0: events}))[1]).count("F5") == 1


def test_what_fills_most_of_a_column_is_drawn():
    """2,000 short operations, each followed by nine times as long a wait: the lane shows waiting."""
    events = []
    for at in range(2000):
        events += [compute(at, at + 0.1), Event("wait", "recv", at + 0.1, at + 1, peer=1)]
    _, root = drawn(Recording({0: events}))
    assert [fill[:10] for fill, _, _ in tall(root)] == ["url(#idle-"]


@pytest.mark.parametrize("num_events", [5_000, 50_000])
def test_many_events_stay_a_small_picture(num_events):
    events = []
    for at in range(num_events // 5):
        name = ("forward", "backward", "optimizer")[at * 50 // num_events % 3]
        events += [compute(at, at + 0.5, name=name), compute(at + 0.5, at + 0.6, op="aten.add"),
                   *call(at + 0.6, at + 0.8, "all_reduce", at, group="0-1#0:dp"), compute(at + 0.8, at + 1, name=name)]
    picture, root = drawn(Recording({rank: events for rank in range(2)}))
    assert len(str(picture)) < 500_000 and {"F", "B", "O"} <= set(texts(root))


def test_two_pictures_of_one_page_do_not_share_a_hatch():
    ids = [drawn(one_f_one_b(2, m))[1].find(f".//{SVG}pattern").get("id") for m in (2, 2, 3)]
    assert ids[0] == ids[1] != ids[2]


def test_a_timeline_shows_itself_and_a_dry_one_is_refused():
    timeline = Timeline([Box(Lane(0), "forward", 0, 1, "forward", "0")])
    assert timeline._repr_svg_() == str(plots.timeline(timeline)) and "F0" in timeline._repr_svg_()
    with pytest.raises(ConfigError, match="no times"):
        plots.timeline(Recording({0: [compute(0, 1)]}, meta={"dry": True}))


def test_two_pictures_may_have_one_scale():
    short, long = (Timeline([Box(Lane(0), "forward", 0, end, "forward")]) for end in (4.0, 10.0))
    widths = [tall(drawn(timeline, until_s=10.0)[1])[0][2] for timeline in (short, long)]
    assert widths[0] == pytest.approx(0.4 * widths[1], abs=0.5)
    assert tall(drawn(short)[1])[0][2] == widths[1]
    assert texts(drawn(short, until_s=10.0)[1])[-7:] == ["0", "2", "4", "6", "8", "10", "time [s]"]
    with pytest.raises(ConfigError, match=r"until_s \(9.0 s\) must be at least the step time \(10.0 s\)"):
        plots.timeline(long, until_s=9.0)


def test_a_column_where_three_boxes_meet_shows_the_longest_of_them():
    spans = [("forward", 0, 100.1), ("backward", 100.1, 100.7), ("optimizer", 100.7, 572)]  # a column is half a second
    picture = drawn(Timeline([Box(Lane(0), kind, start, end, kind) for kind, start, end in spans]))[1]
    fills = [rect.get("fill") for rect in picture.iter(f"{SVG}rect") if rect.get("height") == "27"]
    assert fills == [COLOURS[kind] for kind in ("forward", "backward", "optimizer")]
    edges = [float(rect.get("x")) for rect in picture.iter(f"{SVG}rect") if rect.get("height") == "27"]
    assert edges == pytest.approx([66, 166, 166.5], abs=0.11)


@pytest.mark.parametrize("total_s, ticks, unit", [
    (40.0, ["0", "10", "20", "30", "40"], "s"), (0.038, ["0", "5", "10", "15", "20", "25", "30", "35"], "ms"),
    (3e-5, ["0", "5", "10", "15", "20", "25", "30"], "us"), (1.0, ["0", "0.2", "0.4", "0.6", "0.8", "1"], "s"),
])
def test_the_axis_has_round_numbers_and_a_unit(total_s, ticks, unit):
    inside = texts(drawn(Timeline([Box(Lane(0), "forward", 2, 2 + total_s, "forward")]))[1])
    assert inside[-1] == f"time [{unit}]" and inside[-1 - len(ticks):-1] == ticks
