"""``dtlab reset 00``: keep the reader's copy of a lesson aside and make a fresh one."""

from dtlab.cli import bootstrap, working_copies


def main(argv) -> int:
    """Reset every named copy; return 0."""
    if not argv or argv[0].startswith("-"):
        raise bootstrap.SetupError("reset needs the lesson's number, for example: dtlab reset 00")
    for name in argv:
        fresh, kept = working_copies.reset(name)
        print(f"fresh copy: {_short(fresh)}" + (f", your old one: {_short(kept)}" if kept else ""))
    return 0


def _short(path):
    return path.relative_to(bootstrap.ROOT) if path.is_relative_to(bootstrap.ROOT) else path
