"""The commands: ``dtlab lab | test | tour | doctor | check | reset | catch-up | grade | release | run``.

``python3 -m dtlab ...`` is the same from a bare clone: until the environment is there, nothing but the standard
library is imported.
"""

import argparse
import errno
import importlib
import os
import subprocess
import sys

from dtlab.cli import bootstrap
from dtlab.errors import DtlabError


def _main_of(module):
    """The command of a module that is imported when it is asked for."""
    return lambda args: importlib.import_module(module).main(args) or 0


def _test(args) -> int:
    """Run pytest over the tests and the lessons (pyproject.toml says where they are) and return its exit code.

    Arguments other than ``--all`` go to pytest as they are; then only what they name runs. ``--all`` sets
    ``DTLAB_TEST_ALL=1``, which lets the tests marked ``long`` run.
    """
    everything, args = "--all" in args, [arg for arg in args if arg != "--all"]
    if not everything and not args:
        args = ["-m", "not peers"]
    env = {**os.environ, "DTLAB_TEST_ALL": "1"} if everything else None
    return subprocess.call([sys.executable, "-m", "pytest", *args], cwd=bootstrap.ROOT, env=env)


def _doctor(args) -> int:
    """Print every finding; return 1 if something will go wrong."""
    from dtlab.examine import doctor

    report = doctor()
    print(report.full())
    return 1 if report.problems else 0


def _lab_command(name):
    """A command about labs."""
    return lambda args: getattr(importlib.import_module("dtlab.cli.labs"), name)(args) or 0


def _run(args) -> int:
    """Run ``python ARGS`` (without ``--extra NAME``) from the clone's root and return its exit code."""
    args = args[2:] if args[:1] == ["--extra"] else args
    if not args:
        raise bootstrap.SetupError("run needs something to run, for example: dtlab run -m ruff check .")
    return subprocess.call([sys.executable, *args], cwd=bootstrap.ROOT)


_COMMANDS = {  # name -> (what runs it, extra it needs, one line of help)
    "lab": (_main_of("dtlab.cli.lab"), "course", "set up, make your working copies, open JupyterLab on lesson 00"),
    "test": (_test, "test", "set up, then run the tests; --all adds what takes long"),
    "tour": (_main_of("dtlab.cli.tour"), "course", "the course in miniature: techniques on 4 ranks, one table"),
    "doctor": (_doctor, None, "what this machine can do, what will go wrong, and the cure"),
    "check": (_lab_command("check"), "course", "check your notebook of a lab, for example: dtlab check lab01"),
    "reset": (_lab_command("reset"), None, "keep your copy of a lesson or a lab aside and make a fresh one"),
    "catch-up": (_lab_command("catch_up"), "course", "go on without the first exercises: dtlab catch-up lab01 --to 2"),
    "grade": (_lab_command("grade"), "course", "for instructors: check every notebook under a folder"),
    "release": (_lab_command("release"), "course", "for instructors: a copy of the course without solutions"),
    "run": (_run, "test", "run Python in the course's environment, for example: dtlab run -m ruff check ."),
}


def _parse(argv):
    parser = argparse.ArgumentParser(prog="dtlab", description="Learn distributed training on real processes.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_, _, text) in _COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    return parser.parse_known_args(argv[:1] or ["--help"])[0].command, argv[1:]


def main(argv=None) -> int:
    """Run one command and return its exit code; what the reader can mend is told in one sentence, never a traceback."""
    argv = list(sys.argv[1:] if argv is None else argv)
    command, rest = _parse(argv)
    command_main, extra, _ = _COMMANDS[command]
    try:
        python = bootstrap.prepare(_extra(command, rest, extra))
        if not bootstrap.is_current(python):
            return bootstrap.hand_over(python, argv)
        code = command_main(rest)
        sys.stdout.flush()
        return code
    except DtlabError as problem:
        print(f"dtlab: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("dtlab: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has seen enough: dtlab doctor | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except OSError as problem:
        if problem.errno != errno.ENOSPC:
            raise
        print(f"dtlab: {bootstrap.DISK_FULL}", file=sys.stderr)
        return 1


def _extra(command, rest, extra):
    """``run --extra bench ...`` and ``reset --exercise`` ask for more than their default."""
    if command == "reset" and any(arg.startswith("--exercise") for arg in rest):
        return "course"
    if command == "run" and rest[:1] == ["--extra"] and len(rest) > 1:
        return rest[1]
    return extra
