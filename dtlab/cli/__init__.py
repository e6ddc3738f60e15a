"""The commands: ``dtlab lab | test | tour | doctor | reset``, also ``python3 -m dtlab ...`` from a bare clone.

Until the environment is there, nothing but the standard library is imported.
"""

import argparse
import errno
import importlib
import os
import sys

from dtlab.cli import bootstrap
from dtlab.errors import DtlabError

_COMMANDS = {  # name -> (module that runs it, extra it needs, one line of help)
    "lab": ("dtlab.cli.lab", "course", "set up, make your working copies, open JupyterLab on lesson 00"),
    "test": ("dtlab.cli.testing", "test", "set up, then run the tests; --all adds what takes long"),
    "tour": ("dtlab.cli.tour", "course", "the course in miniature: every technique on 4 ranks, one table"),
    "doctor": ("dtlab.cli.examine", None, "what this machine can do, what will go wrong, and the cure"),
    "reset": ("dtlab.cli.reset", None, "keep your copy of a lesson aside and make a fresh one"),
    "run": ("dtlab.cli.run", "test", "run Python in the course's environment, for example: dtlab run -m ruff check ."),
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
    module, extra, _ = _COMMANDS[command]
    try:
        python = bootstrap.prepare(_extra(command, rest, extra))
        if not bootstrap.is_current(python):
            return bootstrap.hand_over(python, argv)
        code = importlib.import_module(module).main(rest) or 0
        sys.stdout.flush()
        return code
    except (bootstrap.SetupError, DtlabError) as problem:
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
    """``run --extra bench ...`` asks for more than its default; the other commands always need the same."""
    if command == "run" and rest[:1] == ["--extra"] and len(rest) > 1:
        return rest[1]
    return extra
