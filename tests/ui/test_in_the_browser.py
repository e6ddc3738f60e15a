"""Questions and pictures as a reader meets them: by keyboard, on the screen."""
import pytest

pytestmark = [pytest.mark.ui, pytest.mark.notebook]

CELLS = [
    "import dtlab\nfrom dtlab import plots",
    "dtlab.predict('90.1', 'What does rank 2 hold?', {'10': 'The sum.', '3': 'That is what it held before.'})",
    "dtlab.reveal('90.1', 10)",
    "plots.ranks_picture({'results': '[0, 1]'}, [{'x': 0}, {'x': 1}])",
    "dtlab.present()",
]


def test_a_question_is_answered_with_the_keyboard(open_notebook, course):
    notebook = open_notebook("90_small", *CELLS)
    notebook.run_all()
    assert "no answer yet" in notebook.text(2)
    page = notebook.page
    page.locator(".jp-Cell").nth(1).locator("input[type=radio]").first.wait_for()
    page.locator(".jp-Cell").nth(1).focus()
    reached = press_until(page, "Tab", "() => document.activeElement.type === 'radio'")
    assert reached, "Tab does not reach the radio buttons"
    page.keyboard.press("Tab")  # the second choice
    page.keyboard.press("Space")
    notebook.run(2)
    assert "You said: 3. Measured: 10.\nThat is what it held before." in notebook.text(2)
    assert "90.1" in (course / "work" / ".dtlab.json").read_text()
    notebook.picture("widgets")


def test_the_picture_is_painted_and_projector_mode_enlarges_it(open_notebook):
    notebook = open_notebook("90_small", *CELLS)
    image = notebook.page.locator(".jp-Cell").nth(3).locator(".jp-RenderedSVG img, .jp-RenderedSVG svg").first
    notebook.run(0)
    notebook.run(3)
    image.wait_for()
    before = image.bounding_box()["width"]
    notebook.run(4)
    text = ".jp-OutputArea pre, .jp-RenderedHTMLCommon"
    size = notebook.page.evaluate(f"() => parseFloat(getComputedStyle(document.querySelector('{text}')).fontSize)")
    output = notebook.page.locator(".jp-Cell").nth(3).locator(".jp-OutputArea-output").first
    assert size >= 18 and output.evaluate("output => output.scrollWidth <= output.clientWidth")  # beside the sidebar
    assert image.bounding_box()["width"] > before
    notebook.page.evaluate("() => jupyterapp.commands.execute('application:toggle-left-area')")
    notebook.page.wait_for_function("image => image.getBoundingClientRect().width > 975", arg=image.element_handle())
    notebook.picture("projector")


def press_until(page, key, reached, limit=30):
    for _ in range(limit):
        page.keyboard.press(key)
        if page.evaluate(reached):
            return True
    return False


def test_a_reader_goes_through_lesson_00(open_notebook):
    notebook = open_notebook("00_ranks")
    notebook.run_all()
    cells = notebook.cells()
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        failed = any(output["output_type"] == "error" for output in cell["outputs"])
        assert failed == ("raises-exception" in cell["metadata"].get("tags", [])), "".join(cell["source"])
    assert "ranks 0-3: tensor([10.])" in notebook.on_screen(notebook.find("dist.all_reduce(t)\nt"))
    assert "x lives on the ranks: ranks.pull('x')" in notebook.on_screen(notebook.exactly("x"))
    question, answer = notebook.find("dtlab.predict(\"00.1\""), notebook.find("dtlab.reveal(\"00.1\"")
    assert "no answer yet" in notebook.text(answer)
    notebook.page.locator(".jp-Cell").nth(question).focus()
    assert press_until(notebook.page, "Tab", "() => document.activeElement.type === 'radio'")
    notebook.page.keyboard.press("Space")
    notebook.run(notebook.find("launch(WORLD_SIZE)"))  # the lesson shut its ranks down at its end
    notebook.run(notebook.find("dist.all_reduce(t)\nt"))
    notebook.run(answer)
    assert "You said: 4. Measured: 10.\nThat is what it held before." in notebook.on_screen(answer)
    notebook.picture("00_ranks")
