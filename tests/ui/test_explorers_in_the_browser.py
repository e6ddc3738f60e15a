"""Explorers as a reader meets them: moved by keyboard and by mouse, on the screen and on a projector."""
import re
import time

import pytest

pytestmark = [pytest.mark.ui, pytest.mark.notebook]

NAME = "91_explorers"
CELLS = [
    "import dtlab",
    "messages = dtlab.explore.collectives(tab='messages')\nmessages",
    "ring = dtlab.explore.collectives(tab='ring')\nring",
    "cost = dtlab.explore.collectives(tab='cost')\ncost",
    "dtlab.explore.collectives()",
    "dtlab.explore.data_parallel()",
    "dtlab.present()",
    """import time
from dtlab.plots.svg import document, label
from dtlab.widgets.explorer import Control, Explorer
drawn = []
def draw(n):
    time.sleep(0.3)
    drawn.append(n)
    return document([label(0, 12, f"{n}, drawn {len(drawn)} times")], width=300, height=20, title="slow", text=""), {}
Explorer(draw, {"n": Control("n", tuple(range(31)))}, first={"n": 0}, last={"n": 30}, move="Move to 30.")""",
    "from dtlab.plots import curves\ncurves({'loss': [3, 2, 1]}, x='step', y='loss')",
    "dtlab.explore.memory()",
    "dtlab.explore.zero()",
    "dtlab.explore.tensor_parallel()",
    "dtlab.explore.context_parallel()",
]
MESSAGES, RING, COST, TABS, BUCKETS, PRESENT, SLOW, CURVES, MEMORY, ZERO, TENSOR, CONTEXT = range(1, 13)
FITS = """cell => [...cell.querySelectorAll('.widget-label, .widget-readout, button, label, .widget-dropdown select')]
                  .filter(part => part.offsetParent && part.scrollWidth > part.clientWidth + 1)
                  .map(part => part.textContent)"""


@pytest.fixture
def notebook(shared_notebook):
    """The explorers, new in each test."""
    shared_notebook.page.evaluate("() => document.getElementById('dtlab-present')?.remove()")
    for index in range(BUCKETS + 1):
        shared_notebook.run(index)
    for index in range(MESSAGES, BUCKETS + 1):
        picture(shared_notebook, index).first.wait_for()
    return shared_notebook


def cell(notebook, index):
    return notebook.page.locator(".jp-Cell").nth(index)


def picture(notebook, index):
    """The pictures that an explorer shows; what is behind another tab is not seen."""
    return cell(notebook, index).locator(".jp-OutputArea svg[role=img]:visible")


def markup(notebook, index):
    return picture(notebook, index).first.inner_html()


def wait_for(notebook, index, words):
    """Until the picture of a cell has these words in it."""
    picture(notebook, index).filter(has_text=re.compile(words)).first.wait_for()


def slider(notebook, index, number=0):
    return cell(notebook, index).locator(".noUi-handle:visible").nth(number)


def drag_to_the_end(notebook, handle, track):
    """30 quick moves of the mouse."""
    handle.scroll_into_view_if_needed()
    place, track = handle.bounding_box(), track.bounding_box()
    middle = place["x"] + place["width"] / 2, place["y"] + place["height"] / 2
    notebook.page.mouse.move(*middle)
    notebook.page.mouse.down()
    for part in range(1, 31):
        notebook.page.mouse.move(middle[0] + (track["x"] + track["width"] - middle[0]) * part / 30, middle[1])
    notebook.page.mouse.up()


def test_arrow_keys_on_a_slider_change_the_picture(notebook):
    before = markup(notebook, COST)
    slider(notebook, COST).focus()
    notebook.page.keyboard.press("ArrowRight")
    wait_for(notebook, COST, "on 6 ranks")
    assert markup(notebook, COST) != before
    notebook.page.keyboard.press("End")
    wait_for(notebook, COST, "on 1,024 ranks: halving-doubling is fastest")
    assert picture(notebook, COST).count() == 1
    notebook.picture("explorers-moved")


def test_dragging_a_slider_with_the_mouse_changes_the_picture_and_not_its_place(notebook):
    handle = slider(notebook, COST)
    handle.scroll_into_view_if_needed()
    top, height = picture(notebook, COST).bounding_box()["y"], cell(notebook, COST).bounding_box()["height"]
    drag_to_the_end(notebook, handle, cell(notebook, COST).locator(".noUi-base").first)
    wait_for(notebook, COST, "on 1,024 ranks")
    assert picture(notebook, COST).count() == 1
    assert picture(notebook, COST).bounding_box()["y"] == top
    assert cell(notebook, COST).bounding_box()["height"] == height


def test_30_quick_arrow_keys_leave_one_picture_of_the_last_value(notebook):
    slider(notebook, COST, 1).focus()
    notebook.page.keyboard.press("Home")
    for _ in range(30):
        notebook.page.keyboard.press("ArrowRight")
    wait_for(notebook, COST, "4 GiB on")
    assert picture(notebook, COST).count() == 1


def test_quick_moves_of_a_slow_picture_do_not_queue(notebook):
    """A picture takes 0.3 s: 30 moves in a second are not 30 pictures, and the last value wins."""
    notebook.run(SLOW)
    picture(notebook, SLOW).first.wait_for()
    before = int(re.search(r"drawn (\d+) times", markup(notebook, SLOW))[1])
    slider(notebook, SLOW).focus()
    for _ in range(30):
        notebook.page.keyboard.press("ArrowRight")
        notebook.page.wait_for_timeout(30)
    began = time.perf_counter()
    wait_for(notebook, SLOW, "30, drawn")
    drawn = int(re.search(r"drawn (\d+) times", markup(notebook, SLOW))[1]) - before
    print(f"30 moves: {drawn} pictures, the last {time.perf_counter() - began:.1f} s behind")
    assert drawn <= 15


def test_the_ring_is_stepped_by_button_and_by_arrow_key(notebook):
    cell(notebook, RING).get_by_role("button", name="Next").click()
    wait_for(notebook, RING, "Step 1 of 6")
    slider(notebook, RING, 1).focus()
    notebook.page.keyboard.press("ArrowRight")
    wait_for(notebook, RING, "Step 2 of 6: reduce-scatter, 8 of 24 MiB")
    cell(notebook, RING).get_by_role("button", name="Back").click()
    wait_for(notebook, RING, "Step 1 of 6")
    slider(notebook, RING).focus()
    notebook.page.keyboard.press("End")  # 8 ranks
    wait_for(notebook, RING, "Step 1 of 14")
    slider(notebook, RING, 1).focus()
    for _ in range(9):
        notebook.page.keyboard.press("ArrowRight")
    wait_for(notebook, RING, "Step 10 of 14: all-gather")
    notebook.picture("explorers-ring")


def test_swapping_the_calls_by_keyboard_closes_the_loop(notebook):
    before, height = markup(notebook, MESSAGES), cell(notebook, MESSAGES).bounding_box()["height"]
    cell(notebook, MESSAGES).locator("input[type=checkbox]").focus()
    notebook.page.keyboard.press("Space")
    wait_for(notebook, MESSAGES, "a loop of waits")
    assert markup(notebook, MESSAGES) != before
    assert cell(notebook, MESSAGES).bounding_box()["height"] == height  # the page does not jump
    assert "rank 0's send waits for rank 1's recv" in cell(notebook, MESSAGES).locator("p[aria-live]").inner_text()
    notebook.picture("explorers-loop")


def test_buckets_are_moved_by_keyboard_and_the_run_button_puts_marks_on_the_picture(notebook):
    slider(notebook, BUCKETS).focus()
    notebook.page.keyboard.press("End")
    wait_for(notebook, BUCKETS, "exposed 1.18 s")  # the whole model
    assert picture(notebook, BUCKETS).filter(has_text="measured").count() == 0
    cell(notebook, BUCKETS).get_by_role("button", name="Run timed layers").click()
    picture(notebook, BUCKETS).filter(has_text="measured").first.wait_for(timeout=120_000)
    assert "On 4 ranks by number of buckets" in cell(notebook, BUCKETS).locator("p[aria-live]").inner_text()
    notebook.picture("explorers-buckets")


def test_memory_by_keyboard_leaves_every_device_and_comes_back_without_score_matrices_by_mouse(notebook):
    notebook.run(MEMORY)
    picture(notebook, MEMORY).filter(has_text="154.4 GB").first.wait_for()
    slider(notebook, MEMORY).focus()
    for _ in range(2):
        notebook.page.keyboard.press("ArrowRight")
    wait_for(notebook, MEMORY, "549.4 GB")
    assert "fits none of" in cell(notebook, MEMORY).locator("p[aria-live]").inner_text()
    height = cell(notebook, MEMORY).bounding_box()["height"]
    cell(notebook, MEMORY).get_by_text("no score matrices").click()
    wait_for(notebook, MEMORY, "162.8 GB")
    recompute = cell(notebook, MEMORY).locator("select").first
    assert recompute.locator("option").all_inner_texts() == ["nothing", "full"] and recompute.input_value() == "nothing"
    assert cell(notebook, MEMORY).bounding_box()["height"] == height
    notebook.picture("explorers-memory")


def test_zero_by_keyboard_stops_at_30_gb_and_goes_on_down_at_stage_3_and_is_run(notebook):
    notebook.run(ZERO)
    picture(notebook, ZERO).filter(has_text="119.5 + 34.9 GB").first.wait_for()
    slider(notebook, ZERO).focus()
    notebook.page.keyboard.press("End")
    wait_for(notebook, ZERO, "30.0 [+] 34.9 GB")
    slider(notebook, ZERO, 1).focus()
    notebook.page.keyboard.press("End")
    wait_for(notebook, ZERO, "Stage 3 on 1,024 x A100")
    assert cell(notebook, ZERO).evaluate(FITS) == [] and cell(notebook, ZERO).evaluate(INSIDE)
    cell(notebook, ZERO).get_by_role("button", name="Run a small GPT").click()
    picture(notebook, ZERO).filter(has_text="measured").first.wait_for(timeout=120_000)
    assert "parameters on 4 ranks" in cell(notebook, ZERO).locator("p[aria-live]").inner_text()
    notebook.picture("explorers-zero")


def test_tensor_parallel_by_keyboard_leaves_the_node_and_offers_legal_degrees_only_and_is_run(notebook):
    notebook.run(TENSOR)
    picture(notebook, TENSOR).filter(has_text="tp 4: a layer takes").first.wait_for()
    before, height = markup(notebook, TENSOR), cell(notebook, TENSOR).bounding_box()["height"]
    slider(notebook, TENSOR).focus()
    for _ in range(2):
        notebook.page.keyboard.press("ArrowRight")
    wait_for(notebook, TENSOR, "tp 16: a layer takes .* 86% exposed")
    assert markup(notebook, TENSOR) != before and cell(notebook, TENSOR).bounding_box()["height"] == height
    assert cell(notebook, TENSOR).evaluate(FITS) == [] and cell(notebook, TENSOR).evaluate(INSIDE)
    notebook.picture("explorers-tensor")
    cell(notebook, TENSOR).locator("select").last.select_option("small GPT, 12 heads")
    wait_for(notebook, TENSOR, r"No tp 5: num_heads \(12\) does not divide")
    wait_for(notebook, TENSOR, "tp 12: a layer takes")
    slider(notebook, TENSOR).focus()
    notebook.page.keyboard.press("ArrowLeft")
    wait_for(notebook, TENSOR, "tp 6: a layer takes")  # never 8
    cell(notebook, TENSOR).get_by_role("button", name="Run a small GPT's layer").click()
    picture(notebook, TENSOR).filter(has_text="measured").first.wait_for(timeout=120_000)
    assert "calls 6 and 6" in cell(notebook, TENSOR).locator("p[aria-live]").inner_text()


def test_context_parallel_by_mouse_becomes_level_and_ulysses_stops_at_the_heads_of_keys_and_values(notebook):
    notebook.run(CONTEXT)
    picture(notebook, CONTEXT).filter(has_text="1.75 x the mean").first.wait_for()
    before, height = markup(notebook, CONTEXT), cell(notebook, CONTEXT).bounding_box()["height"]
    pictures = picture(notebook, CONTEXT).count()
    layout, method = (cell(notebook, CONTEXT).locator("select").nth(number) for number in (0, 1))
    layout.select_option("zig-zag")
    wait_for(notebook, CONTEXT, "1.00 x the mean")
    assert markup(notebook, CONTEXT) != before
    notebook.picture("explorers-context")
    method.select_option("Ulysses")
    wait_for(notebook, CONTEXT, "zig-zag, Ulysses, 4 ranks")
    drag_to_the_end(notebook, slider(notebook, CONTEXT), cell(notebook, CONTEXT).locator(".noUi-base").first)
    wait_for(notebook, CONTEXT, "zig-zag, Ulysses, 8 ranks")
    slider(notebook, CONTEXT).focus()
    notebook.page.keyboard.press("End")
    notebook.page.keyboard.press("ArrowRight")
    slider(notebook, CONTEXT, 1).focus()
    notebook.page.keyboard.press("ArrowRight")  # 16 heads of keys and values; ranks stay until they are moved
    wait_for(notebook, CONTEXT, "Ulysses: 2, 4, 8, 16 ranks")
    assert picture(notebook, CONTEXT).filter(has_text="zig-zag, Ulysses, 8 ranks").count() == 1
    slider(notebook, CONTEXT).focus()
    notebook.page.keyboard.press("End")
    wait_for(notebook, CONTEXT, "zig-zag, Ulysses, 16 ranks")
    assert cell(notebook, CONTEXT).bounding_box()["height"] == height and picture(notebook, CONTEXT).count() == pictures
    cell(notebook, CONTEXT).get_by_role("button", name="Run ring attention").click()
    picture(notebook, CONTEXT).filter(has_text="147.5 kB measured").first.wait_for(timeout=120_000)


def test_every_control_is_reached_with_tab(notebook):
    cell(notebook, RING).locator(".noUi-handle").first.focus()
    reached = []
    for _ in range(6):  # a slider's number is a stop of its own
        reached.append(notebook.page.evaluate(
            "() => document.activeElement.innerText.trim() || document.activeElement.getAttribute('role')"))
        notebook.page.keyboard.press("Tab")
    assert [stop for stop in reached if not stop.isdigit()] == ["slider", "Back", "Next", "slider"]


def test_the_next_tab_is_reached_by_keyboard(notebook):
    page, current = notebook.page, cell(notebook, TABS).locator(".lm-TabBar-tab[tabindex='0']")
    current.first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    wait_for(notebook, TABS, "Step 0 of 6")
    notebook.picture("explorers-tabs")


def test_set_in_a_cell_moves_the_widgets(notebook):
    notebook.page.evaluate("""() => jupyterapp.shell.currentWidget.sessionContext.session.kernel.requestExecute(
                                {code: "ring.set(ranks=5, step=4)"}).done""")
    wait_for(notebook, RING, "Step 4 of 8")
    assert slider(notebook, RING, 1).get_attribute("aria-valuenow") == "4.0"


LETTERS = """picture => picture.getBoundingClientRect().width / picture.viewBox.baseVal.width
                * Math.min(...[...picture.querySelectorAll('text')].map(text => text.getAttribute('font-size')))"""
INSIDE = """cell => [...cell.querySelectorAll('.jp-OutputArea-output')].every(
                      output => output.scrollWidth <= output.clientWidth)"""


def test_nothing_is_cut_and_projector_mode_enlarges_explorers(notebook):
    sizes = {}
    for mode in ("explorers", "explorers-projector"):
        for index in range(MESSAGES, BUCKETS + 1):
            assert cell(notebook, index).evaluate(FITS) == [] and cell(notebook, index).evaluate(INSIDE)
        sizes[mode] = [picture(notebook, index).first.evaluate(LETTERS) for index in (MESSAGES, RING, COST)]
        texts = [cell(notebook, COST).locator(part).first for part in (".widget-label:visible", "p[aria-live]")]
        sizes[mode] += [text.evaluate("text => parseFloat(getComputedStyle(text).fontSize)") for text in texts]
        for index in (MEMORY, ZERO, TENSOR, CONTEXT):
            notebook.run(index)
            picture(notebook, index).first.wait_for()
            assert cell(notebook, index).evaluate(FITS) == [] and cell(notebook, index).evaluate(INSIDE)
            sizes[mode].append(picture(notebook, index).first.evaluate(LETTERS))
        notebook.picture(mode)
        notebook.run(PRESENT)
        notebook.page.get_by_text("Projector mode is on").wait_for()
    assert min(sizes["explorers"]) >= 12 and min(sizes["explorers-projector"]) >= 18, sizes


def test_no_picture_runs_off_the_edge_in_projector_mode_beside_the_sidebar(notebook):
    for index in (PRESENT, CURVES):
        notebook.run(index)
    painted = cell(notebook, CURVES).locator(".jp-RenderedSVG img, .jp-RenderedSVG svg").first
    painted.wait_for()
    for sidebar in ("open", "closed"):
        wide = painted.bounding_box()["width"]
        assert wide > (650 if sidebar == "open" else 975) and cell(notebook, CURVES).evaluate(INSIDE)
        notebook.page.evaluate("() => jupyterapp.commands.execute('application:toggle-left-area')")
        notebook.page.wait_for_function("([image, wide]) => image.getBoundingClientRect().width != wide",
                                        arg=[painted.element_handle(), wide])
