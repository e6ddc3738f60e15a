"""Who reads what is shown, decided in one place."""
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dtlab import shell

PACKAGE = Path(shell.__file__).parent


@pytest.mark.parametrize("kernel, test, headless, watched", [
    (object(), None, None, True), (object(), "x", None, False), (object(), None, "1", False), (None, None, None, False),
])  # fmt: skip
def test_a_kernel_without_test_or_build_is_watched(monkeypatch, kernel, test, headless, watched):
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=kernel)))
    for name, value in {"PYTEST_CURRENT_TEST": test, "DTLAB_HEADLESS": headless}.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    assert shell.in_notebook() is watched
    assert (shell.notebook_shell() is None) is (kernel is None)


def test_plain_python_is_no_notebook(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert shell.notebook_shell() is None and not shell.in_notebook()


def test_nobody_else_reads_the_variables():
    readers = [path.name for path in PACKAGE.rglob("*.py") if "PYTEST_CURRENT_TEST" in path.read_text(encoding="utf-8")]
    assert readers == ["shell.py"]
