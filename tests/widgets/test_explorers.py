"""Explorers without a browser: driven by ``set``, and by the messages that a browser sends."""
import functools
import subprocess
import sys
import time

import numpy as np
import pytest

import dtlab
from dtlab import shell
from dtlab.errors import ConfigError
from dtlab.plots.svg import document, label
from dtlab.theory import collective_time_s
from dtlab.widgets.collectives import _COURSE_LINK
from dtlab.widgets.explorer import Control, Explorer, toggle

TABS = ["messages", "ring", "cost"]
MAKERS = [*(functools.partial(dtlab.explore.collectives, tab) for tab in TABS), dtlab.explore.data_parallel,
          dtlab.explore.memory, dtlab.explore.zero, functools.partial(dtlab.explore.zero, "batch"),
          dtlab.explore.tensor_parallel, dtlab.explore.context_parallel]
WIDGET, SVG, TEXT = "application/vnd.jupyter.widget-view+json", "image/svg+xml", "text/plain"


@pytest.fixture
def live(monkeypatch):
    monkeypatch.setattr(shell, "in_notebook", lambda: True)


def send(widget, **state):
    """A message as the browser sends it when the reader moves something."""
    widget._handle_msg({"content": {"data": {"method": "update", "state": state}}, "buffers": []})


def small(drawn=None, **more):
    """Ranks 1 .. 4 and a step below them; ``drawn`` collects what was drawn."""
    def draw(ranks, step, on, **measured):
        drawn is None or drawn.append((ranks, step, on))
        told = f"{ranks} ranks, step {step}, {measured or 'not measured'}"
        return document([label(0, 10, told)], width=300, height=20, title="t", text=told), {"product": ranks * step}

    controls = {"ranks": Control("ranks", (1, 2, 3, 4)), "on": toggle("on"),
                "step": Control("step", lambda values: range(values["ranks"]), "stepper")}
    return Explorer(draw, controls, **{"first": {"ranks": 4}, "last": {"step": 3}, "move": "Step to 3.", **more})


def test_it_opens_on_the_first_end_of_its_move():
    assert small().values == {"ranks": 4, "on": False, "step": 0, "product": 0}
    assert small(first={"ranks": 3, "step": 2}, last={"step": 1}).values["product"] == 6


def test_several_controls_set_at_once_compute_once_and_return_the_explorer():
    drawn = []
    explorer = small(drawn)
    drawn.clear()
    assert explorer.set(ranks=2, step=1, on=True) is explorer
    assert drawn == [(2, 1, True)] and explorer.values["product"] == 2


def test_a_value_that_is_no_longer_legal_becomes_the_last_legal_one():
    assert small().set(step=3).set(ranks=2).values["step"] == 1


@pytest.mark.parametrize("degrees, words", [
    ({"rank": 2}, "no control 'rank'; it has ranks, on, step"),
    ({"ranks": 5}, "ranks=5 is not legal here; legal: 1, 2, 3, 4"),
    ({"ranks": 2, "step": 2}, "step=2 is not legal here; legal: 0, 1"),
    ({"on": 2}, r"on=2 is not legal here; legal: False \(no\), True \(yes\)"),
    ({"ranks": np.array([1, 2])}, r"ranks=array\(\[1, 2\]\) is not legal here"),
    ({"ranks": np.array([2])}, "is not legal here"), ({"ranks": [2]}, "is not legal here"),
])
def test_what_cannot_be_set_names_what_can_and_changes_nothing(degrees, words):
    explorer = small()
    before = explorer.values
    with pytest.raises(ConfigError, match=words):
        explorer.set(**degrees)
    assert explorer.values == before


def test_a_value_that_is_refused_is_told_why_where_a_reason_is_known():
    odd = Control("n", (2, 4), why_not=lambda value, values: f"{value} is odd" if value % 2 else None)
    explorer = Explorer(lambda n: (document([], width=9, height=9, title="t", text=""), {}), {"n": odd},
                        first={"n": 2}, last={"n": 4}, move="Move.")  # fmt: skip
    with pytest.raises(ConfigError, match="n=3 is not legal here; legal: 2, 4: 3 is odd$"):
        explorer.set(n=3)
    with pytest.raises(ConfigError, match="n=6 is not legal here; legal: 2, 4$"):
        explorer.set(n=6)


def test_a_value_may_be_given_as_the_screen_shows_it():
    values = small().set(on="yes", ranks="2", step=np.int64(1)).values
    assert values == {"ranks": 2, "on": True, "step": 1, "product": 2}
    explorer = dtlab.explore.collectives("cost").set(tensor_bytes="64 MiB", ranks="1,024")
    assert (explorer.values["tensor_bytes"], explorer.values["ranks"]) == (2**26, 1024)


def test_headless_shows_both_ends_of_the_move_and_no_widget():
    explorer = small()
    shown = explorer._repr_mimebundle_()
    assert sorted(shown) == [SVG, TEXT]
    assert shown[TEXT].splitlines() == ["Step to 3.", "step: 0", "4 ranks, step 0, not measured",
                                        "step: 3", "4 ranks, step 3, not measured"]
    assert "step 0" in shown[SVG] and "step 3" in shown[SVG] and "step 1" not in shown[SVG]
    assert explorer.values["step"] == 0


def test_what_was_set_away_from_its_first_state_is_shown_as_it_stands():
    explorer = small().set(step=1, on=True)
    shown = explorer._repr_mimebundle_()
    assert shown[TEXT].splitlines() == ["ranks: 4, on: yes, step: 1", "", "4 ranks, step 1, not measured"]
    assert "step 1" in shown[SVG] and "step 3" not in shown[SVG]
    assert "Step to 3." in explorer.set(step=0, on=False)._repr_mimebundle_()[TEXT]  # and back again
    tabs = dtlab.explore.collectives()
    assert "Step 3 of 6" in tabs._repr_mimebundle_()[TEXT]  # all tabs
    assert tabs.set("ring", step=2)._repr_mimebundle_()[TEXT].startswith("ranks: 4, step: 2\n\nStep 2 of 6")
    assert "ring" not in tabs.set("messages", swap=True)._repr_mimebundle_()[TEXT]


def test_a_reader_with_a_kernel_gets_widgets_and_the_twin(live):
    assert sorted(small()._repr_mimebundle_()) == sorted([WIDGET, SVG, TEXT])


def test_no_widget_library_is_needed_to_drive_it():
    code = ("import sys, dtlab; explorer = dtlab.explore.collectives(); explorer.set('cost', ranks=8).svg; "
            "explorer._repr_mimebundle_(); print({'ipywidgets', 'matplotlib', 'torch'} & set(sys.modules))")
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"


@pytest.mark.parametrize("make, name, messages", [
    (MAKERS[0], "swap", [{"value": bool(i % 2)} for i in range(1, 31)]),
    (MAKERS[1], "step", [{"index": i % 7} for i in range(1, 31)]),
    (MAKERS[2], "ranks", [{"index": i % 20} for i in range(1, 31)]),
    (dtlab.explore.memory, "seq_length", [{"index": (i + 1) % 5} for i in range(1, 31)]),
    (dtlab.explore.zero, "ranks", [{"index": i % 11} for i in range(1, 31)]),
    (dtlab.explore.tensor_parallel, "tp_size", [{"index": (i + 2) % 6} for i in range(1, 31)]),
    (dtlab.explore.context_parallel, "ranks", [{"index": (i + 1) % 4} for i in range(1, 31)]),
])
def test_30_messages_of_a_slider_leave_one_picture_and_the_last_value_wins(live, capsys, make, name, messages):
    explorer = make()
    explorer._repr_mimebundle_()
    pictures = []
    explorer._view.picture.observe(lambda change: pictures.append(change["new"]), "value")
    start = time.process_time()
    for state in messages:
        send(explorer._view.inputs[name], **state)
    print(f"{name}: {(time.process_time() - start) / 30 * 1e3:.2f} ms of kernel a move")
    assert len(pictures) == 30 and explorer._view.picture.value.count("<svg") == explorer.svg.count("<svg")
    assert explorer._view.picture.value == pictures[-1] and len(set(pictures)) > 1
    last = explorer.legal(name)[messages[-1].get("index", messages[-1].get("value"))]
    assert explorer.values[name] == last
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or len(pyplot.get_fignums()) <= 1


def test_one_message_draws_once_though_it_changes_the_values_of_another_control(live):
    drawn = []
    explorer = small(drawn).set(step=3)
    explorer._repr_mimebundle_()
    drawn.clear()
    send(explorer._view.inputs["ranks"], index=1)
    assert drawn == [(2, 1, False)]
    step = explorer._view.inputs["step"]
    assert (step.value, [value for _, value in step.options]) == (1, [0, 1])


def test_set_moves_the_widgets_and_draws_once(live):
    drawn = []
    explorer = small(drawn)
    explorer._repr_mimebundle_()
    drawn.clear()
    explorer.set(ranks=3, step=2, on=True)
    assert {name: widget.value for name, widget in explorer._view.inputs.items()} == {"ranks": 3, "step": 2, "on": True}
    assert drawn == [(3, 2, True)] and "3 ranks, step 2" in explorer._view.picture.value


def test_back_and_next_stop_at_the_ends(live):
    explorer = dtlab.explore.collectives("ring")
    back, forward, _ = next(row for row in explorer.view().children if hasattr(row, "children")).children
    back.click()
    assert explorer.values["step"] == 0
    for _ in range(9):
        forward.click()
    assert explorer.values["step"] == 6 and explorer.values["finished"] == 16
    back.click()
    assert explorer.values["step"] == 5


def test_labels_are_not_cut_and_the_text_stands_below_the_picture(live):
    explorer = small()
    explorer._repr_mimebundle_()
    assert {widget.style.description_width for widget in explorer._view.inputs.values()} == {"initial"}
    picture, text = explorer._view.picture.value.split("</svg>")
    assert 'role="img"' in picture and 'aria-live="polite"' in text and "4 ranks, step 0" in text


def test_dropdowns_and_toggles_that_follow_each_other_share_a_row_and_the_order_stays(live):
    explorer = dtlab.explore.tensor_parallel()
    rows = [getattr(row, "children", [row]) for row in explorer.view().children]
    known = [its.label for its in explorer.controls.values()]
    labels = [[widget.description for widget in row if widget.description in known] for row in rows]
    assert [len(row) for row in labels if row] == [1, 3, 1, 4] and sum(labels, []) == known


def test_the_run_button_measures_only_when_pressed_and_what_it_measured_stays(live):
    calls = []
    explorer = small(run=("Run it", lambda **values: calls.append(values) or "measured here"))
    explorer._repr_mimebundle_()
    send(explorer._view.inputs["ranks"], index=1)
    assert calls == [] and "None" in explorer._view.picture.value
    explorer._view.button.click()
    assert calls == [{"ranks": 2, "on": False, "step": 0}] and "measured here" in explorer._view.picture.value
    assert "measured here" in explorer.set(ranks=3).svg and len(calls) == 1


def test_an_interrupted_run_is_told_and_can_be_run_again(live):
    reports = iter([KeyboardInterrupt(), "measured here"])

    def measure(**values):
        if isinstance(report := next(reports), BaseException):
            raise report
        return report

    explorer = small(run=("Run it", measure))
    explorer._repr_mimebundle_()
    with pytest.raises(KeyboardInterrupt):
        explorer._view.button.click()
    assert explorer._view.said.value == "interrupted" and not explorer._view.button.disabled
    explorer._view.button.click()
    assert explorer._view.said.value == "measured: see the picture" and "measured here" in explorer._view.picture.value


def test_without_ipywidgets_a_notebook_shows_the_twin(live, monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    assert sorted(small()._repr_mimebundle_()) == ["image/svg+xml", "text/plain"]


def test_the_run_button_is_disabled_while_it_runs_and_shows_an_error_in_the_widget(live):
    seen = []

    def fails(**values):
        seen.append(explorer._view.button.disabled and "some seconds" in explorer._view.said.value)
        raise RuntimeError("rank 1 <died>")

    explorer = small(run=("Run it", fails))
    explorer._repr_mimebundle_()
    explorer._view.button.click()
    assert seen == [True] and not explorer._view.button.disabled
    assert "RuntimeError: rank 1 &lt;died&gt;" in explorer._view.said.value
    assert explorer._view.picture.value.count("<svg") == 1


@pytest.mark.parametrize("make", MAKERS)
def test_no_picture_of_an_explorer_changes_its_size(make):
    explorer = make()
    sizes = set()
    for name in explorer.controls:
        for value in explorer.legal(name):
            sizes.add(explorer.set(**{name: value}).svg.split(" role=")[0])
    assert len(sizes) == 1


@pytest.mark.parametrize("make", MAKERS)
def test_the_key_move_is_named_and_its_two_ends_differ(make):
    explorer = make()
    shown = explorer._repr_mimebundle_()
    assert shown[TEXT].startswith(explorer.move)
    assert shown[SVG].count("<svg") == 1 + 2 * explorer.svg.count("<svg")
    first, last = (explorer._drawn(end)[0].text for end in (explorer._first, explorer._last))
    assert first != last and first in shown[TEXT] and last in shown[TEXT]


def test_swapping_two_calls_closes_a_loop_of_waits():
    explorer = dtlab.explore.collectives("messages")
    assert explorer.values["ends"] and "waits for" not in repr(explorer)
    explorer.set(swap=True)
    assert not explorer.values["ends"] and "rank 0's send waits for rank 1's recv" in repr(explorer)


def test_swapping_two_collectives_ends_with_wrong_sums():
    explorer = dtlab.explore.collectives("messages").set(calls="two all-reduces")
    assert explorer.values["as_meant"] and "X + X" in explorer.svg
    explorer.set(swap=True)
    assert explorer.values["ends"] and not explorer.values["as_meant"] and "X + Y" in explorer.svg


def test_cost_from_4_to_1024_ranks_bytes_stay_and_time_grows_26_fold():
    explorer = dtlab.explore.collectives("cost")
    few = explorer.values
    many = explorer.set(ranks=1024).values
    assert few["busiest_rank_bytes"]["ring"] == 37.5e6 and many["busiest_rank_bytes"]["ring"] < 50e6
    assert many["time_s"]["ring"] / few["time_s"]["ring"] == pytest.approx(26.5, abs=0.1)
    assert many["time_s"]["ring"] == collective_time_s("all_reduce", 25e6, size=1024, link=_COURSE_LINK,
                                                       algorithm="ring")


def test_cost_from_64_kib_to_64_mib_the_winner_changes():
    explorer = dtlab.explore.collectives("cost").set(ranks=1024, tensor_bytes=2**16)
    assert explorer.values["fastest"] == "recursive_doubling"
    assert explorer.set(tensor_bytes=2**26).values["fastest"] == "halving_doubling"
    assert explorer.set(ranks=1000).values["fastest"] != explorer.set(ranks=1000, tensor_bytes=2**32).values["fastest"]


def test_tabs_are_one_explorer(live):
    tabs = dtlab.explore.collectives()
    assert tabs.values["tab"] == "messages" and sorted(tabs._repr_mimebundle_()) == sorted([WIDGET, SVG, TEXT])
    assert tabs.set("ring", step=2) is tabs and "Step 2 of 6" in tabs.svg and tabs.view().selected_index == 1
    send(tabs.view(), selected_index=2)
    assert tabs.values["tab"] == "cost" and "fastest" in tabs.values
    assert all(words in repr(tabs.twin()) for words in ("loop of waits", "Step 3 of 6", "1,024 ranks"))


@pytest.mark.parametrize("call, words", [
    (lambda: dtlab.explore.collectives("rings"), "no tab 'rings'; it has messages, ring, cost"),
    (lambda: dtlab.explore.collectives(["ring"]), "no tab \\['ring'\\]; it has messages"),
    (lambda: dtlab.explore.collectives().set(["ring"]), "no tab \\['ring'\\]; there are messages"),
    (lambda: dtlab.explore.collectives("ring").legal("foo"), "no control 'foo'; it has ranks, step"),
    (lambda: dtlab.explore.collectives("cost").set(tensor=1), r"tensor_bytes \(on the screen: tensor S\), link"),
    (lambda: dtlab.explore.collectives("ring").run(), "no Run button.*set\\(ranks=..., step=...\\)"),
    (lambda: dtlab.explore.collectives().set("rings"), "no tab 'rings'; there are messages, ring, cost"),
    (lambda: dtlab.explore.collectives().set("ring", swap=True), "no control 'swap'; it has ranks, step"),
])
def test_mistakes_name_the_cure(call, words):
    with pytest.raises(ConfigError, match=words):
        call()
