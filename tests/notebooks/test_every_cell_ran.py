"""nbval passes a cell whose magic is not loaded; the lessons' conftest must not."""
import pytest
from small_lessons import run_nbval, write_notebook

pytestmark = pytest.mark.notebook


def test_a_whole_lesson_passes_and_is_counted(tmp_path):
    cells = ["x = 1", "%%capture\nprint(x)", ("raise ValueError('meant')", ["raises-exception"])]
    run = run_nbval(write_notebook(tmp_path / "00_good.ipynb", *cells))
    assert run.returncode == 0 and "4 passed" in run.stdout, run.stdout  # three cells and the count


def test_what_never_ran_fails(tmp_path):
    cells = ["x = 1", "%%no_such_magic 4\nassert False", "%no_such_magic\nraise RuntimeError",
             ("x = 2", ["raises-exception"]), ("x = 3", ["nbval-skip"])]
    run = run_nbval(write_notebook(tmp_path / "00_bad.ipynb", *cells))
    assert run.returncode == 1, run.stdout
    assert "4 failed, 1 passed, 1 skipped" in run.stdout  # the count fails too
    assert "1 of 5 code cells of 00_bad.ipynb ran as they should" in run.stdout


def test_a_dead_kernel_fails_soon(tmp_path):
    run = run_nbval(write_notebook(tmp_path / "00_dead.ipynb", "x = 1", "import os; os._exit(1)", "x = 2"),
                    "--nbval-cell-timeout=2")
    assert run.returncode == 1 and "1 of 3 code cells" in run.stdout, run.stdout
