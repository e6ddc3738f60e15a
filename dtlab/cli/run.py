"""``dtlab run [--extra NAME] ARGS``: Python with ARGS in the course's environment."""

import subprocess
import sys

from dtlab.cli import bootstrap


def main(argv) -> int:
    """Run ``python ARGS`` from the clone's root and return its exit code."""
    args = argv[2:] if argv[:1] == ["--extra"] else argv
    if not args:
        raise bootstrap.SetupError("run needs something to run, for example: dtlab run -m ruff check .")
    return subprocess.call([sys.executable, *args], cwd=bootstrap.ROOT)
