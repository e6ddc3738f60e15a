"""The learners' copy of the course: everything but solutions, and a proof that no line of one has leaked."""
import ast
import io
import re
import shutil
import tokenize
from pathlib import Path

from dtlab.errors import ConfigError

SHIPPED = ("dtlab", "notebooks", "labs", "tests", "benchmarks", ".ci", ".github", ".gitignore", "CHANGELOG.md",
           "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "constraints.txt", "environment.yml",
           "pyproject.toml")  # fmt: skip
KEPT_BACK = ("labs/*/solution.py", "labs/INSTRUCTORS.md", "tests/labs")
PUBLIC = ("dtlab/parallel", "notebooks/[0-9]*")  # what a learner may read: the library, and the lessons
_JUNK = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", "*.egg-info", ".pytest_cache", ".dtlab.json")
_LEAST_CHARS = 16  # of a line without its blanks; shorter ones are trivial
_TRIVIAL = re.compile(r"\w+\([\w,]*\)|[\w,]+=(dist\.get_(rank|world_size)\(\w*\),?)+")


def release(target, course):
    """Copy the course without solutions, then search every text of the copy for their lines.

    Args:
        target: a new or empty folder.
        course: the checkout.

    Returns:
        (number of solution lines looked for, number of files).

    Raises:
        ConfigError: the folder is not empty, or a line of a solution is in the copy, which is removed again.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is not an empty folder: name a new one")
    target.mkdir(parents=True, exist_ok=True)
    for name in SHIPPED:
        if (course / name).is_dir():
            shutil.copytree(course / name, target / name, ignore=_JUNK)
        elif (course / name).exists():
            shutil.copy2(course / name, target / name)
    for pattern in KEPT_BACK:
        for path in target.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in target.glob("*.md"):  # no link to what is kept back
        text = path.read_text(encoding="utf-8")
        path.write_text(re.sub(r"\[([^]]*)\]\(labs/INSTRUCTORS\.md\)", r"\1", text), encoding="utf-8")
    secret = secret_lines(course)
    found = leaks(secret, target)
    if found:
        shutil.rmtree(target)
        shown = "\n".join(f"  {place}: {line}" for place, line in found[:20])
        raise ConfigError(f"{len(found)} lines of solutions would be in the copy, so it was not made:\n{shown}")
    return len(secret), sum(path.is_file() for path in target.rglob("*"))


def secret_lines(course):
    """Lines of the solutions that tell something: squeezed (no blanks) -> as written.

    Trivial, and left out: comments, docstrings, imports and signatures; lines with fewer than 16 characters besides
    blanks; a bare call of one function on names, rank and size asked for; what the library or a lesson shows anyhow.
    """
    public = [_squeezed(path) for pattern in PUBLIC for path in _files(course, pattern)]
    lines = {}
    for path in sorted(course.glob("labs/*/solution.py")):
        for line in _telling(path.read_text(encoding="utf-8")):
            lines["".join(line.split())] = line.strip()
    return {squeezed: line for squeezed, line in lines.items() if not any(squeezed in text for text in public)}


def _telling(source):
    lines, dull = source.splitlines(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            dull.update(range(node.lineno, node.body[0].lineno))  # the signature
        if isinstance(node, (ast.Import, ast.ImportFrom)) or (
                isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):  # fmt: skip
            dull.update(range(node.lineno, node.end_lineno + 1))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    telling = [line for number, line in enumerate(lines, 1) if number not in dull]
    return [line for line in telling for squeezed in ["".join(line.split())]
            if len(squeezed) >= _LEAST_CHARS and not _TRIVIAL.fullmatch(squeezed)]  # fmt: skip


def leaks(secret, target):
    """``[(file, line), ...]`` of solution lines in a copy, its library and lessons left out."""
    public = {path for pattern in PUBLIC for path in _files(target, pattern)}
    texts = {path: _squeezed(path) for path in sorted(_files(target, "*")) if path not in public}
    return [(path.relative_to(target).as_posix(), line) for path, text in texts.items()
            for squeezed, line in secret.items() if squeezed in text]  # fmt: skip


def _files(folder, pattern):
    return {path for top in folder.glob(pattern) for path in [top, *top.rglob("*")] if path.is_file()}


def _squeezed(path):
    """A file's text without blanks; a notebook's as its cells have it."""
    text = Path(path).read_bytes().decode(errors="replace")
    if path.suffix == ".ipynb":
        text = re.sub(r"\\n", "", text).replace('\\"', '"')
    return "".join(text.split())
