"""The reader's own copies of the lessons: ``work/NN_name.ipynb``, outputs cleared, never overwritten."""
import json
from pathlib import Path

from dtlab import notes
from dtlab.errors import ConfigError

_COURSE = Path(__file__).resolve().parents[2]


def make_all(course=None):
    """Make the working copies that are missing.

    Args:
        course: folder that holds ``notebooks/``; the checkout that dtlab is installed from if not given.

    Returns:
        Paths of all working copies, lesson order. A copy that was there is left as it is.
    """
    course = Path(course or _COURSE)
    return [_make(lesson, _copy_of(lesson, course)) for lesson in _lessons(course)]


def reset(name, course=None):
    """Keep the reader's copy aside under a numbered name and make a fresh one.

    Args:
        name: ``"00"``, ``"00_ranks"`` or ``"00_ranks.ipynb"``.
        course: as in ``make_all``.

    Returns:
        (path of the fresh copy, path the old one was kept under or None if there was none).

    Raises:
        ConfigError: no such lesson; the message lists those there are.
    """
    course = Path(course or _COURSE)
    lesson = _find(name, course)
    copy = _copy_of(lesson, course)
    kept = _keep_aside(copy) if copy.exists() else None
    notes.forget(lesson.stem.split("_")[0], copy.parent)
    return _make(lesson, copy), kept


def _lessons(course):
    lessons = sorted((course / "notebooks").glob("[0-9][0-9]_*.ipynb"))
    if not lessons:
        raise ConfigError(f"no lessons under {course / 'notebooks'}; run this in a checkout of the course")
    return lessons


def _find(name, course):
    lessons = _lessons(course)
    wanted = str(name).removesuffix(".ipynb")
    for lesson in lessons:
        if wanted in (lesson.stem, lesson.stem.split("_")[0]):
            return lesson
    raise ConfigError(f"no lesson {name!r}; there are {', '.join(lesson.stem for lesson in lessons)}")


def _copy_of(lesson, course):
    return course / "work" / lesson.name


def _make(lesson, copy):
    """Write the cleared copy unless there is one."""
    if not copy.exists():
        notebook = json.loads(lesson.read_text(encoding="utf-8"))
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
