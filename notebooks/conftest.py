"""pytest runs every lesson through nbval, and proves that every cell really ran.

nbval alone passes a cell whose magic is not loaded: IPython prints a UsageError, and no error message is sent.
Here each cell's own reply must be "ok" ("error" where the cell is tagged raises-exception), no output may hold a
UsageError, and a last test per lesson counts: as many cells ran as the lesson has code cells.
"""
import os
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
from nbval.plugin import IPyNbCell

COURSE = Path(__file__).resolve().parents[1]


def pytest_configure(config):
    """Lessons compare only cells tagged for it, in this environment's kernel, at most 120 s a cell."""
    option = config.option
    option.nbval_lax, option.nbval_current_env = True, True
    option.nbval_cell_timeout = min(option.nbval_cell_timeout, 120)
    option.nbval_sanitize_with = option.nbval_sanitize_with or str(Path(__file__).with_name("nbval.cfg"))


def pytest_collection_modifyitems(items):
    """Mark the cells, and put the count behind the last cell of every lesson that is run as a whole."""
    chosen = Counter(item.parent for item in items if isinstance(item, IPyNbCell))
    proved = []
    for item in items:
        proved.append(item)
        if not isinstance(item, IPyNbCell):
            continue
        item.add_marker("notebook")
        cells = len(_code_cells(item.parent))
        if chosen[item.parent] == cells and item.cell_num == cells - 1:
            proved.append(EveryCellRan.from_parent(item.parent, name="every cell ran"))
            proved[-1].add_marker("notebook")
    items[:] = proved


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    """Let the lesson's kernel start headless and with this checkout's dtlab."""
    paths = os.pathsep.join(filter(None, [str(COURSE), os.environ.get("PYTHONPATH")]))
    with mock.patch.dict(os.environ, DTLAB_HEADLESS="1", PYTHONPATH=paths):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Listen to the kernel's replies while a cell runs, then require the right one."""
    if not isinstance(item, IPyNbCell) or item.options["skip"]:
        return (yield)
    kernel, replies = item.parent.kernel, []
    listen = kernel.get_message

    def get_message(stream, timeout=None):
        message = listen(stream, timeout=timeout)
        if message["msg_type"] == "execute_reply":
            replies.append(message["content"]["status"])
        return message

    kernel.get_message = get_message
    try:
        result = yield
    finally:
        kernel.get_message = listen
    _require_ran(item, replies)
    item.parent.cells_that_ran = getattr(item.parent, "cells_that_ran", 0) + 1
    return result


def _require_ran(item, replies):
    expected = "error" if item.options["check_exception"] else "ok"
    if replies != [expected]:
        item.raise_cell_error(f"Cell did not run as it should: reply {replies}, expected [{expected!r}]")
    printed = "".join(output.get("text", "") for output in item.test_outputs)
    if "UsageError:" in printed:
        item.raise_cell_error(f"Cell did not run: {printed.strip()}")


def _code_cells(lesson):
    return [cell for cell in lesson.nb.cells if cell.cell_type == "code"]


class EveryCellRan(pytest.Item):
    """Counts the cells of one lesson that ran against the code cells it has."""

    def runtest(self):
        cells, ran = len(_code_cells(self.parent)), getattr(self.parent, "cells_that_ran", 0)
        assert ran == cells, f"{ran} of {cells} code cells of {self.parent.path.name} ran as they should"

    def repr_failure(self, excinfo):
        return str(excinfo.value)

    def reportinfo(self):
        return self.path, 0, f"{self.path.name}: every cell ran"
