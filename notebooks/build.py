"""Build the lessons: notebooks/src/NN_name.py (jupytext py:percent) -> notebooks/NN_name.ipynb, executed;
and the labs: notebooks/src/labs/labNN_name.py -> labs/labNN_name/lab.ipynb, not executed, without outputs.

    python notebooks/build.py                 build every lesson and lab
    python notebooks/build.py 00_ranks        build one
    python notebooks/build.py --check         only say whether the committed ones have the sources' cells
    python notebooks/build.py --fresh         take all outputs anew, timings and pictures too

A cell starts with ``# %% tags=["exact"]``, in full ``# %% name="first-hang" tags=["exact", "raises-exception"]``.
Its id is the lesson and its name, or a hash of its text: a new cell renumbers no other. Kinds of code cells:

    exact     its output is compared by nbval (the builder adds ``nbval-check-output``)
    timing    not compared; the old output stays when only its numbers moved
    picture   not compared; the old output stays when only its numbers or pixels moved

The tag ``folded`` hides a cell's source, where it would tell the answer.
A cell with output and no kind is refused, so is an output with a path or a name of this machine.
In a lab the tags say what a cell is for: ``given``, ``exercise``, ``picture``, ``check``.
Lessons run headless (DTLAB_HEADLESS=1) in a fresh kernel, so a rebuild without a change is an empty diff.
"""
import argparse
import getpass
import hashlib
import os
import re
import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
KINDS = {"exact", "timing", "picture"}
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python", "file_extension": ".py", "mimetype": "text/x-python"},
}
_NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*(e[-+]?\d+)?")
_MACHINE_PATH = re.compile(r"(?<![\w.:/])(?:/(?:home|root|Users|tmp|var|usr|opt|work|mnt|private)/|[A-Z]:\\\\)[\w.-]*")


class BuildError(Exception):
    """A source or an output that must not become a lesson."""


def from_source(path):
    """The lesson of one source, not executed: stable ids, clean metadata, nbval's tags."""
    notebook = jupytext.read(path, fmt="py:percent")
    lesson, used = path.stem.split("_")[0], {}
    for cell in notebook.cells:
        name = cell.metadata.get("name") or _digest(cell)
        used[name] = used.get(name, 0) + 1
        cell.id = f"{lesson}-{name}" + (f"-{used[name]}" if used[name] > 1 else "")
        if "name" in cell.metadata and used[name] > 1:
            raise BuildError(f"{path.name}: two cells are named {name!r}")
        tags = list(cell.metadata.get("tags", []))
        if "exact" in tags:
            tags.append("nbval-check-output")
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        if "folded" in tags:
            cell.metadata["jupyter"] = {"source_hidden": True}
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def execute(notebook, folder, timeout=120):
    """Run all cells in a fresh kernel in ``folder``, headless; returns the notebook with its outputs."""
    paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "DTLAB_HEADLESS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    client = NotebookClient(notebook, timeout=timeout, kernel_name="python3", record_timing=False,
                            store_widget_state=False, resources={"metadata": {"path": str(folder)}})
    try:
        client.execute(env=env)
    except RuntimeError as error:  # another program may have taken the port that was chosen for the kernel
        if "Kernel didn't respond" not in str(error):
            raise
        client.execute(env=env)
    notebook.metadata = nbformat.from_dict(METADATA)  # nbclient adds this machine's Python version
    for cell in _code(notebook):
        _require_ran(cell)
        cell.outputs = [_clean(output) for output in _joined(cell.outputs)]
    return notebook


def build(path, target, fresh=False):
    """Build one lesson or lab; returns whether the file changed."""
    new = from_source(path)
    if path.parent.name != "labs":
        new = execute(new, target.parent)
    target.parent.mkdir(parents=True, exist_ok=True)
    for cell in _code(new):
        _require_kind(cell, path.name)
        _require_no_machine(cell, path.name)
    if target.exists() and not fresh:
        _keep_old_outputs(new, nbformat.read(target, as_version=4))
    text = nbformat.writes(new) + "\n"
    changed = not target.exists() or target.read_text(encoding="utf-8") != text
    if changed:
        target.write_text(text, encoding="utf-8")
    return changed


def differences(path, target):
    """What tells the committed lesson from its source, one sentence each; [] if nothing does."""
    if not target.exists():
        return [f"{target.name} of {path.stem} is missing"]
    new, old = from_source(path).cells, nbformat.read(target, as_version=4).cells
    if [cell.id for cell in new] != [cell.id for cell in old]:
        known = {cell.id for cell in old}
        first = next((cell for cell in new if cell.id not in known), None)
        return [f"{path.stem} has other cells than its source" + (f", first {first.source[:60]!r}" if first else "")]
    return [f"{path.stem}: cell {a.id} differs from its source" for a, b in zip(new, old)
            if (a.cell_type, a.source, a.metadata) != (b.cell_type, b.source, b.metadata)]


def _digest(cell):
    return hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:10]


def _code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _require_ran(cell):
    """nbclient stops at errors; what it lets pass is a cell that only printed IPython's UsageError."""
    text = "".join(output.get("text", "") for output in cell.outputs)
    if cell.execution_count is None or "UsageError:" in text:
        raise BuildError(f"cell {cell.id} did not run: {text.strip() or cell.source[:80]!r}")


def _require_kind(cell, name):
    kinds = KINDS & set(cell.metadata.get("tags", []))
    if len(kinds) > 1 or (cell.outputs and not kinds):
        raise BuildError(f"{name}: cell {cell.id} needs one of the tags {', '.join(sorted(KINDS))}; it has "
                         f"{', '.join(sorted(kinds)) or 'none'}\n{cell.source}\n{_text(cell)[:2000]}")


def _require_no_machine(cell, name):
    found = machine_names(_text(cell))
    if found:
        raise BuildError(f"{name}: cell {cell.id} shows {found[0]!r} of this machine in its output")


def machine_names(text):
    """Paths and the user name that stand in ``text`` (a name of up to four letters is not looked for)."""
    user = getpass.getuser()
    names = [user] if len(user) > 4 and re.search(rf"\b{re.escape(user)}\b", text) else []
    return _MACHINE_PATH.findall(text) + names


def _text(cell):
    """All text of a cell's outputs."""
    return "\n".join(_output_text(output) for output in cell.outputs)


def _output_text(output):
    parts = [output.get("text", ""), *output.get("traceback", [])]
    parts += [data for mime, data in output.get("data", {}).items() if not mime.startswith("image/png")]
    return "\n".join(map(str, parts))


def _clean(output):
    """Without widget views, whose random model ids no reader can open, and without empty metadata."""
    if "data" in output:
        output.data.pop("application/vnd.jupyter.widget-view+json", None)
        output.metadata = nbformat.from_dict({})
    return output


def _joined(outputs):
    """Neighbouring pieces of one stream as one output: how text is cut depends on time."""
    joined = []
    for output in outputs:
        last = joined[-1] if joined else {}
        if output.output_type == "stream" and last.get("name") == output.name and last.output_type == "stream":
            last.text += output.text
        else:
            joined.append(output)
    return joined


def _keep_old_outputs(new, old):
    """Take a timing's or picture's old output where the cell is the same and only numbers moved."""
    before = {cell.id: cell for cell in _code(old)}
    for cell in _code(new):
        twin = before.get(cell.id)
        kinds = {"timing", "picture"} & set(cell.metadata.get("tags", []))
        if kinds and twin and twin.source == cell.source and _shape(twin) == _shape(cell):
            cell.outputs = twin.outputs


def _shape(cell):
    """A cell's outputs with every number and every run of blanks or dashes made equal."""
    return [(output.output_type, sorted(output.get("data", {})),
             re.sub(r"[\s-]+", " ", _NUMBER.sub("#", _output_text(output)))) for output in cell.outputs]


def sources(course=HERE.parent):
    """Every lesson, then every lab: name -> (its source, the notebook to build)."""
    lessons = sorted((course / "notebooks" / "src").glob("[0-9][0-9]_*.py"))
    labs = sorted((course / "notebooks" / "src" / "labs").glob("lab[0-9][0-9]_*.py"))
    return {**{path.stem: (path, course / "notebooks" / f"{path.stem}.ipynb") for path in lessons},
            **{path.stem: (path, course / "labs" / path.stem / "lab.ipynb") for path in labs}}


def main(arguments=None):
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="notebooks/build.py", description="Build lessons and labs from their text.")
    parser.add_argument("lessons", nargs="*", help="names such as 00_ranks, lab01_ring_all_reduce; all if none")
    parser.add_argument("--check", action="store_true", help="compare only, run nothing")
    parser.add_argument("--fresh", action="store_true", help="keep no old timing or picture")
    options = parser.parse_args(arguments)
    known = sources()
    unknown = set(options.lessons) - set(known)
    if unknown:
        parser.error(f"no lesson {sorted(unknown)[0]!r}; there are {', '.join(known)}")
    wrong = []
    for name in options.lessons or known:
        path, target = known[name]
        if options.check:
            wrong += differences(path, target)
            continue
        try:
            print(f"{name}: {'built' if build(path, target, options.fresh) else 'unchanged'}", flush=True)
        except BuildError as error:
            wrong.append(str(error))
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
