"""Who reads what is shown: a reader in a notebook, a test, a build, or a terminal."""
import os
import sys


def notebook_shell():
    """The IPython shell of a Jupyter kernel, or None."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell if getattr(shell, "kernel", None) is not None else None


def is_headless():
    """Whether a test or a build runs this: output comes once, at the end, as plain text, the same every time."""
    return bool(os.environ.get("PYTEST_CURRENT_TEST") or os.environ.get("DTLAB_HEADLESS"))


def in_notebook():
    """Whether this is a Jupyter kernel with somebody watching (not nbval, not a build)."""
    return notebook_shell() is not None and not is_headless()
