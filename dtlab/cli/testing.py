"""``dtlab test``: what a user's machine can run in about ten minutes; ``--all`` adds what takes long."""

import os
import subprocess
import sys

from dtlab.cli import bootstrap


def main(argv) -> int:
    """Run pytest over the tests and the lessons (pyproject.toml says where they are) and return its exit code.

    Arguments other than ``--all`` go to pytest as they are; then only what they name runs. ``--all`` sets
    ``DTLAB_TEST_ALL=1``, which tests that can run long read.
    """
    everything, args = "--all" in argv, [arg for arg in argv if arg != "--all"]
    if not everything and not args:
        args = ["-m", "not peers"]
    env = {**os.environ, "DTLAB_TEST_ALL": "1"} if everything else None
    return subprocess.call([sys.executable, "-m", "pytest", *args], cwd=bootstrap.ROOT, env=env)
