"""A program of a lesson's source, so that what is recorded of real systems is what the lesson records."""
import ast
import dataclasses
import pathlib

from dtlab.simulate import Recording

SOURCES = pathlib.Path(__file__).resolve().parents[2] / "notebooks" / "src"


def names_of(lesson, names, **given):
    """The lesson's imports and what first gives each of ``names`` a value: a dict; ``given`` is there before."""
    missing = set(names)

    def is_needed(node):
        targets = {name.id for part in getattr(node, "targets", ()) for name in ast.walk(part)
                   if isinstance(name, ast.Name)}  # fmt: skip
        found = missing & {*targets, getattr(node, "name", "")}
        missing.difference_update(found)
        return bool(found) or isinstance(node, (ast.Import, ast.ImportFrom))

    source = SOURCES / f"{lesson}.py"
    tree = ast.parse(source.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if is_needed(node)]
    assert not missing, f"{source.name} has no {missing}"
    program = {"__name__": "lesson", **given}
    exec(compile(tree, str(source), "exec"), program)
    return program


def small(recording):
    """What is shipped: rank 0, which stands for all, with times in microseconds; and the results of all ranks."""
    events = [dataclasses.replace(e, **{name: round(getattr(e, name), 6) for name in ("start_s", "end_s", "cpu_s")})
              for e in recording.events[0]]
    meta = {**recording.meta, "results": recording.results}
    return Recording({0: events}, world_size=recording.world_size, meta=meta)
