"""The reader's own copies: ``work/NN_name.ipynb``, ``work/labs/labNN_name/lab.ipynb``; cleared, never overwritten."""
import json
from pathlib import Path

from dtlab import notes
from dtlab.errors import ConfigError

_COURSE = Path(__file__).resolve().parents[2]


def make_all(course=None):
    """Make the working copies that are missing.

    Args:
        course: folder that holds ``notebooks/`` and ``labs/``; the checkout that dtlab is installed from if not given.

    Returns:
        Paths of all working copies, lessons first. A copy that was there is left as it is.
    """
    course = Path(course or _COURSE)
    return [_make(lesson, copy) for lesson, copy in _all(course).values()]


def reset(name, course=None):
    """Keep the reader's copy aside under a numbered name and make a fresh one.

    Args:
        name: ``"00"``, ``"00_ranks"`` or ``"00_ranks.ipynb"``; ``"lab01"``.
        course: as in ``make_all``.

    Returns:
        (path of the fresh copy, path the old one was kept under or None if there was none).

    Raises:
        ConfigError: no such lesson or lab; the message lists those there are.
    """
    name, lesson, copy = find(name, course)
    kept = _keep_aside(copy) if copy.exists() else None
    result = copy.with_suffix(".result.json")  # of the old notebook, and none of the fresh one's
    if result.exists():
        result.replace(kept.with_suffix(".result.json")) if kept else result.unlink()
    notes.forget(name.split("_")[0], copy.parent)
    return _make(lesson, copy), kept


def find(name, course=None):
    """(whole name, the course's notebook, path of its working copy) of a lesson or a lab; arguments as in ``reset``."""
    there = _all(Path(course or _COURSE))
    wanted = str(name).removesuffix(".ipynb")
    for whole, (lesson, copy) in there.items():
        if wanted in (whole, whole.split("_")[0]):
            return whole, lesson, copy
    kind = "lab" if wanted.startswith("lab") else "lesson"
    those = [whole for whole in there if whole.startswith("lab") == (kind == "lab")]
    raise ConfigError(f"no {kind} {name!r}; there are {', '.join(those)}")


def _all(course):
    lessons = sorted((course / "notebooks").glob("[0-9][0-9]_*.ipynb"))
    if not lessons:
        raise ConfigError(f"no lessons under {course / 'notebooks'}; run this in a checkout of the course")
    labs = sorted((course / "labs").glob("lab[0-9][0-9]_*/lab.ipynb"))
    return {**{path.stem: (path, course / "work" / path.name) for path in lessons},
            **{path.parent.name: (path, course / "work" / path.relative_to(course)) for path in labs}}


def _make(lesson, copy):
    """Write the cleared copy unless there is one."""
    if not copy.exists():
        text = lesson.read_text(encoding="utf-8")
        if lesson.name == "lab.ipynb":
            text = text.replace("](../../", "](../../../")  # the copy lies one folder deeper
        notebook = json.loads(text)
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                cell.update(outputs=[], execution_count=None)
        copy.parent.mkdir(parents=True, exist_ok=True)
        half = copy.with_suffix(".new")
        half.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        half.replace(copy)
    return copy


def _keep_aside(copy):
    """Rename ``00_ranks.ipynb`` to the first free ``00_ranks_kept_1.ipynb``, ``_2``, ..."""
    number = 1
    while (kept := copy.with_name(f"{copy.stem}_kept_{number}{copy.suffix}")).exists():
        number += 1
    return copy.rename(kept)
