"""A learner's lab notebook: its exercise cells are read as text and judged, nothing else of it counts or runs.

Given code comes from the pristine lab. An exercise that uses earlier ones gets the learner's if they pass, else the
reference, and says so.
"""
import ast
import json
import re
from pathlib import Path

from dtlab.checks import exercise as exercises
from dtlab.checks.evidence import Answer
from dtlab.checks.exercise import Verdict
from dtlab.errors import ConfigError

COURSE = Path(__file__).resolve().parents[2]
CATCH_UP = "catch-up"  # tag of a cell that `dtlab catch-up` has filled
KEPT = "kept"  # tag of a learner's own cell beside it
_MOST_BYTES = 20 * 10**6
_JUDGE = re.compile(r"\bdtlab\s*\.\s*checks\b|\bfrom\s+dtlab\s+import\b.*\bchecks\b")
_KEY = re.compile(r"\s*#\s*Exercise\s+(lab\d\d\.\d+)\b")


def load(path):
    """A notebook as JSON, whoever saved it; each cell with ``source`` as one text and ``tags``.

    Raises:
        ConfigError: not a notebook, or of a format older than 4.
    """
    try:
        if Path(path).stat().st_size > _MOST_BYTES:
            raise ConfigError(f"{path} is larger than {_MOST_BYTES // 10**6} MB: clear its outputs and save it")
        notebook = json.loads(Path(path).read_text(encoding="utf-8-sig"))
        for cell in notebook["cells"]:
            cell["source"] = "".join(cell["source"])
            tags = cell.setdefault("metadata", {}).get("tags")
            cell["metadata"]["tags"] = tags if isinstance(tags, list) else []
    except FileNotFoundError:
        raise ConfigError(f"there is no {path}; `dtlab lab` makes your copies of the labs") from None
    except ConfigError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"[:200]
        raise ConfigError(f"{path} cannot be read as a notebook ({why}): open it in JupyterLab and save it again, or "
                          "begin anew with `dtlab reset`") from None  # fmt: skip
    return notebook


def save(notebook, path):
    """Write a notebook in one step."""
    half = path.with_suffix(".new")
    half.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    half.replace(path)


def pristine(lab, course=None):
    """Path of the unsolved notebook of a lab.

    Raises:
        ConfigError: it is not there.
    """
    exercises.exercises(lab)
    folder = Path(course or COURSE) / "labs"
    found = sorted(folder.glob(f"{lab}_*/lab.ipynb"))
    if not found:
        raise ConfigError(f"{lab} is not under {folder}: run this in a checkout of the course")
    return found[0]


def exercise_cells(notebook, unsolved):
    """Exercise cells by key, each key's in their order: by the first line, or where that is lost by the cell's id."""
    stubs = [cell for cell in unsolved["cells"] if "exercise" in cell["metadata"]["tags"]]
    ids = {cell["id"]: _key(cell) for cell in stubs if "id" in cell}
    found = {}
    for cell in notebook["cells"]:
        key = cell.get("cell_type") == "code" and KEPT not in cell["metadata"]["tags"] and (
            _key(cell) or ids.get(str(cell.get("id"))))  # fmt: skip
        if key:
            found.setdefault(key, []).append(cell)
    return found


def _key(cell):
    found = _KEY.match(re.sub(r"\A(\s*%%.*\n)+", "", cell["source"]))
    return found.group(1) if found else None


def definitions(source):
    """Imports, functions, classes and constants of a cell of the lab; what else it does is for the notebook."""
    try:
        body = ast.parse(source).body
    except SyntaxError:  # a magic
        return ""
    kinds = ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef
    kept = [node for node in body if isinstance(node, kinds) or isinstance(node, ast.Assign) and _is_plain(node.value)]
    return "\n".join(ast.unparse(node) for node in kept)


def _is_plain(value):
    """Whether it is a lambda, or made of numbers and texts alone."""
    plain = ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.UnaryOp, ast.expr_context, ast.unaryop
    return isinstance(value, ast.Lambda) or all(isinstance(node, plain) for node in ast.walk(value))


class Submission:
    """One learner's notebook of one lab."""

    def __init__(self, lab, path, course=None, verdicts=None, tell=None):
        self.path, self.known = Path(path), exercises.exercises(lab)
        unsolved = load(pristine(lab, course))
        self.given = [("given code", definitions(cell["source"])) for cell in unsolved["cells"]
                      if "given" in cell["metadata"]["tags"]]  # fmt: skip
        self.cells = exercise_cells(load(path), unsolved)
        self.verdicts = dict(verdicts or {})  # key -> Verdict
        self._tell = tell or (lambda line: None)  # what makes a learner wait

    def check(self, key):
        """The verdict on one exercise; those that it builds on are judged first."""
        if key not in self.known:
            raise ConfigError(f"there is no exercise {key!r}; there are {', '.join(self.known)}")
        if key not in self.verdicts:
            self.verdicts[key] = self._judge(self.known[key])
        return self.verdicts[key]

    def _judge(self, exercise):
        key, mine = exercise.key, self.cells.get(exercise.key)
        if not mine:
            return Verdict(key, "not yet", f"its cell is not in {self.path.name}: a code cell that begins with "
                                           f"the line `# Exercise {key}`")  # fmt: skip
        if self.is_caught_up(key):
            return Verdict(key, "reference", note="put there by catch-up")
        if _JUDGE.search(mine[-1]["source"]):
            return Verdict(key, "failed", "its cell uses dtlab.checks, which judges it: write it without")
        references = {name: one for each in self.known.values() for name, one in each.references.items()}
        stand_ins, source = dict(exercise.references), list(self.given)
        for before in self._used_by(exercise):
            names = {name: references[name] for name in before.names if name in references}
            if names and before.key not in self.verdicts:
                self._tell(f"judging {before.key} first, {key} uses it")
            if names and self.check(before.key).state != "passed":
                stand_ins.update(names)
            elif before.key in self.cells:
                source.append((f"exercise {before.key}", self.cells[before.key][-1]["source"]))
                stand_ins = {name: one for name, one in stand_ins.items() if name not in names}
        source.append((f"exercise {key}", mine[-1]["source"]))
        several = f"{len(mine)} cells begin with `# Exercise {key}`: the last one counts"
        verdict = exercises.judge(exercise, Answer({}, tuple(source), stand_ins), shown_chars=0)
        read = set().union(*(exercises.names_in(text) for label, text in source if label != "given code"))
        used = {name: one for name, one in stand_ins.items() if name in read}
        return exercises.with_note(verdict, used, *[several] * (len(mine) > 1))

    def _used_by(self, exercise):
        """Earlier exercises whose names an exercise's cell has in it, or whose references it declares, in order."""
        text, used = self.cells[exercise.key][-1]["source"], []
        declared = {before.key for before, _ in exercises.earlier(exercise)}
        before_it = list(self.known.values())[: list(self.known).index(exercise.key)]
        for before in reversed(before_it):
            if before.key in declared or any(re.search(rf"\b{name}\b", text) for name in before.names):
                used.insert(0, before)
                text += "\n" + self.cells.get(before.key, [{"source": ""}])[-1]["source"]
        return used

    def is_caught_up(self, key):
        """Whether a cell is what catch-up has put there; its tag stays when a learner writes over it."""
        return is_reference(self.cells[key][-1]["source"])


def is_reference(source):
    """Whether a cell's text is that of catch-up."""
    return "checks.reference(" in source
