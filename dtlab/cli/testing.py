"""``dtlab test``: what a user's machine can run in about ten minutes; ``--all`` adds what takes long."""

import os
import subprocess
import sys

from dtlab.cli import bootstrap


def main(argv) -> int:
    """Run pytest over the tests, then over the lessons (notebooks/conftest.py says how); return 1 if any of it failed.

    Arguments other than ``--all`` go to pytest as they are; then only what they name runs.
    """
    args = [arg for arg in argv if arg != "--all"]
    everything = "--all" in argv
    env = {**os.environ, "DTLAB_TEST_ALL": "1"} if everything else dict(os.environ)
    if args:
        return _pytest(args, env)
    codes = [_pytest([] if everything else ["-m", "not peers"], env)]
    lessons = sorted(str(path.relative_to(bootstrap.ROOT)) for path in bootstrap.ROOT.glob("notebooks/*.ipynb"))
    if lessons:
        codes.append(_pytest(lessons, env))
    return 1 if any(codes) else 0


def _pytest(args, env) -> int:
    return subprocess.call([sys.executable, "-m", "pytest", *args], cwd=bootstrap.ROOT, env=env)
