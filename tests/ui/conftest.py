"""JupyterLab in a real Chromium, one server for all tests of a file.

DTLAB_SCREENSHOTS=FOLDER keeps a picture of every notebook at full length, for people to look at.
"""
import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from dtlab.cli import lab as lab_command
from dtlab.cli.working_copies import make_all

COURSE = Path(__file__).resolve().parents[2]

READY = """async () => {
  const until = async test => { while (!test()) await new Promise(again => setTimeout(again, 50)); };
  await until(() => window.jupyterapp?.shell?.currentWidget?.context);
  const panel = jupyterapp.shell.currentWidget;
  await panel.context.ready;
  await panel.sessionContext.ready;
  await until(() => panel.sessionContext.session?.kernel?.status === 'idle');
}"""
CELLS = "() => jupyterapp.shell.currentWidget.content.widgets.map(cell => cell.model.toJSON())"
ALL_RAN = """() => { const panel = jupyterapp.shell.currentWidget;
                     return panel.sessionContext.session.kernel.status === 'idle' && panel.content.widgets.every(
                       cell => cell.model.type !== 'code' || cell.model.executionCount !== null); }"""
RUN_ONE = """index => { jupyterapp.shell.currentWidget.content.activeCellIndex = index;
                       return jupyterapp.commands.execute('notebook:run-cell'); }"""
LENGTH = "() => Math.max(...[...document.querySelectorAll('.jp-WindowedPanel-outer')].map(box => box.scrollHeight))"


def find_chromium():
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Notebook:
    """One notebook open in JupyterLab: what a reader does with it."""

    def __init__(self, page, name):
        self.page, self.name = page, name

    def run_all(self):
        """Run all cells; JupyterLab's own promise ends at the first error, meant or not, so wait for the last cell."""
        self.page.evaluate("() => jupyterapp.commands.execute('notebook:run-all-cells')")
        self.page.wait_for_function(ALL_RAN, polling=200)

    def run(self, index):
        self.page.evaluate(RUN_ONE, index)

    def cells(self):
        return self.page.evaluate(CELLS)

    def find(self, text):
        """Index of the first code cell with ``text`` in its source."""
        return next(i for i, cell in enumerate(self.cells())
                    if cell["cell_type"] == "code" and text in "".join(cell["source"]))

    def exactly(self, source):
        """Index of the cell with just this source."""
        return next(i for i, cell in enumerate(self.cells()) if "".join(cell["source"]).strip() == source)

    def text(self, index):
        """All text of one cell's outputs."""
        pieces = []
        for output in self.cells()[index]["outputs"]:
            pieces += ["".join(output.get("text", "")), *output.get("traceback", [])]
            pieces += ["".join(data) for mime, data in output.get("data", {}).items() if mime == "text/plain"]
        return "\n".join(pieces)

    def on_screen(self, index):
        """What is painted for one cell, as text."""
        return self.page.locator(".jp-Cell").nth(index).inner_text()

    def picture(self, name):
        """Keep a screenshot at full length where DTLAB_SCREENSHOTS names a folder."""
        folder = os.environ.get("DTLAB_SCREENSHOTS")
        if folder:
            self.page.set_viewport_size({"width": 1280, "height": int(self.page.evaluate(LENGTH)) + 120})
            self.page.evaluate("() => document.querySelector('.jp-WindowedPanel-outer').scrollTo(0, 0)")
            self.page.wait_for_timeout(500)
            self.page.screenshot(path=str(Path(folder) / f"{name}.png"))
            self.page.set_viewport_size({"width": 1280, "height": 900})


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """A course folder of its own, so that no reader's copies are touched."""
    folder = tmp_path_factory.mktemp("course")
    shutil.copytree(COURSE / "notebooks", folder / "notebooks", ignore=shutil.ignore_patterns("src", "__pycache__"))
    return folder


@pytest.fixture(scope="module")
def server(course, tmp_path_factory):
    """JupyterLab with the settings that ``dtlab lab`` gives it; one SIGTERM stops it and its kernels."""
    settings = lab_command.settings(tmp_path_factory.mktemp("lab"))
    _paint_all_cells(Path(settings["JUPYTERLAB_SETTINGS_DIR"]))
    token, port = secrets.token_hex(16), _free_port()
    env = {**os.environ, **settings}
    env = {name: value for name, value in env.items() if name not in ("PYTEST_CURRENT_TEST", "DTLAB_HEADLESS")}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(COURSE), env.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--expose-app-in-browser", "--log-level=ERROR",
               f"--ServerApp.root_dir={course}", f"--ServerApp.port={port}", "--ServerApp.port_retries=0",
               f"--IdentityProvider.token={token}", "--ServerApp.answer_yes=True", *lab_command.QUIET_KERNELS]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")
    log = (tmp_path_factory.mktemp("log") / "server.txt").open("w")
    process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    try:
        _wait_for(f"http://127.0.0.1:{port}/api?token={token}", process)
        yield f"http://127.0.0.1:{port}", token
    finally:
        process.terminate()
        process.wait(timeout=30)
        log.close()


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright for Python is not installed")
    chromium = find_chromium()
    if chromium is None:
        pytest.skip("no Chromium found (on Debian: apt-get install chromium)")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield running
        running.close()


@pytest.fixture
def open_notebook(browser, server, course):
    """Function that opens a working copy: ``open_notebook("00_ranks")`` or one with cells of its own."""
    with contextlib.ExitStack() as stack:
        yield lambda name, *cells: _open(stack, browser, server, course, name, cells)


@pytest.fixture(scope="module")
def shared_notebook(request, browser, server, course):
    """A notebook with the test file's CELLS, opened once for all its tests."""
    with contextlib.ExitStack() as stack:
        yield _open(stack, browser, server, course, request.module.NAME, request.module.CELLS)


def _open(stack, browser, server, course, name, cells):
    address, token = server
    if cells:
        _write(course / "notebooks" / f"{name}.ipynb", cells)
    make_all(course)
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    stack.callback(page.close)
    page.set_default_timeout(120_000)
    page.goto(f"{address}/lab/tree/work/{name}.ipynb?reset&token={token}")
    page.evaluate(READY)
    return Notebook(page, name)


def _paint_all_cells(folder):
    """JupyterLab paints only the cells in sight; here all, so that tests and pictures see each."""
    path = folder / "@jupyterlab" / "notebook-extension" / "tracker.jupyterlab-settings"
    path.parent.mkdir(parents=True)
    path.write_text('{"windowingMode": "none"}', encoding="utf-8")


def _write(path, cells):
    import nbformat

    made = [nbformat.v4.new_code_cell(source) for source in cells]
    nbformat.write(nbformat.v4.new_notebook(cells=made, metadata={"kernelspec": {
        "name": "python3", "display_name": "Python 3", "language": "python"}}), path)


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_for(address, process, limit_s=60):
    end = time.monotonic() + limit_s
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError):
            return urllib.request.urlopen(address, timeout=5).close()
        time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not start within {limit_s} s (exit code {process.poll()})")
