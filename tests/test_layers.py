"""The layers, read from the imports of every file: they point down only."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "dtlab"
PURE = {"errors", "validate", "machine", "notes", "shell", "ledger_table", "topology"}
PURE |= {"theory", "schedules", "simulate", "planner", "scaling"}
TOP = {"cli", "widgets", "checks"}  # nothing imports these
TECHNIQUES_MAY_SHARE = {"collectives", "mappings", "shared"}
# a Hardware that is this machine is measured, which needs ranks and torch: imported when it is asked for
MEASURES = ("dtlab.simulate.hardware", "dtlab.record.calibration")
TENSOR_MODULES = {"torch", "deepspeed", "megatron", "torchgpipe"}


def imports(source, module="dtlab.x"):
    """``(name, lazy)`` of every module that a source imports; relative ones made absolute."""
    tree = ast.parse(source)
    lazy = {id(node) for f in ast.walk(tree) if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            for node in ast.walk(f)}  # fmt: skip
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        yield from ((name, id(node) in lazy) for name in names)


def module_name(path, package=PACKAGE):
    parts = ("dtlab", *path.relative_to(package).with_suffix("").parts)
    return ".".join(parts[:-1] + (("__init__",) if parts[-1] == "__init__" else parts[-1:]))


def layer(name):
    """``dtlab.ranks.pool`` -> ``ranks``; empty for the package itself and for others' modules."""
    parts = name.split(".")
    return parts[1] if parts[0] == "dtlab" and len(parts) > 1 else ""


def faults(sources):
    """Every broken rule in ``{module: source}``, one sentence each."""
    layers = {layer(module) for module in sources}
    for module, source in sources.items():
        mine = layer(module)
        for name, lazy in imports(source, module):
            other, root = layer(name), name.split(".")[0]
            if mine in PURE and root in TENSOR_MODULES:
                yield f"{module} is pure and imports {name}"
            may = lazy and (other == "plots" or module == MEASURES[0] and name.startswith(MEASURES[1]))
            if mine in PURE and other and other not in PURE and other in layers and not may:
                yield f"{module} is pure and imports {name}"
            if other in TOP and mine != other and (mine, other) not in {("cli", "checks"), ("__main__", "cli")}:
                yield f"{module} imports {name}, which nothing may import"
            if root == "ipywidgets" and mine != "widgets":
                yield f"{module} imports ipywidgets, which only widgets may"
            if mine == "plots" and root in TENSOR_MODULES:
                yield f"{module} is a plot and imports {name}"
            yield from technique_fault(module, name)


def technique_fault(module, name):
    """Techniques in parallel/ do not import one another; ``parallelize`` combines, all may use what is shared."""
    mine, other = module.split("."), name.split(".")
    if mine[:2] != ["dtlab", "parallel"] or other[:2] != ["dtlab", "parallel"] or len(other) < 3:
        return
    free = {"__init__", "parallelize", *TECHNIQUES_MAY_SHARE}
    is_its_part = other[2].startswith(mine[2] + "_")  # fsdp's are fsdp_...
    if mine[2] not in free and other[2] not in {mine[2], *TECHNIQUES_MAY_SHARE} and not is_its_part:
        yield f"{module} is a technique and imports {name}"


def the_package():
    return {module_name(path): path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


def test_imports_point_down_only():
    assert list(faults(the_package())) == []


@pytest.mark.parametrize("module, source", [
    ("dtlab.theory.memory", "import torch"),
    ("dtlab.machine", "def f():\n    import torch.cuda"),
    ("dtlab.schedules.gpipe", "from ..ranks import launch"),
    ("dtlab.schedules.gpipe", "from dtlab import plots"),
    ("dtlab.simulate.hardware", "from dtlab.record.calibration import calibrate"),
    ("dtlab.simulate.replay", "def f():\n    from dtlab.record.calibration import calibrate"),
    ("dtlab.ranks.pool", "from dtlab.widgets import predict"),
    ("dtlab.ranks.pool", "from dtlab import cli"),
    ("dtlab.widgets.explorers", "from dtlab.checks import core"),
    ("dtlab.ranks.progress", "import ipywidgets as widgets"),
    ("dtlab.ranks.progress", "from ipywidgets import HTML"),
    ("dtlab.plots.timeline", "from torch import Tensor"),
    ("dtlab.parallel.zero", "from .data_parallel import Bucket"),
    ("dtlab.parallel.zero", "from dtlab.parallel import pipeline_parallel"),
    ("dtlab.parallel.zero", "from dtlab.parallel.fsdp_units import Unit"),
])  # fmt: skip
def test_a_broken_rule_is_found(module, source):
    assert list(faults({"dtlab.ranks.pool": "", "dtlab.record.dry": "", "dtlab.plots.svg": "", module: source}))


@pytest.mark.parametrize("module, source", [
    ("dtlab.schedules.gpipe", "def _repr_svg_(self):\n    from dtlab import plots"),
    ("dtlab.schedules.gpipe", "from dtlab.errors import ConfigError"),
    ("dtlab.simulate.hardware", "def f():\n    from dtlab.record.calibration import calibrate"),
    ("dtlab.parallel.fsdp", "from dtlab.parallel.fsdp_units import Unit"),
    ("dtlab.parallel.zero", "from .shared import FlatShard\nfrom dtlab.parallel.collectives import ring_all_reduce"),
    ("dtlab.parallel.parallelize", "from . import zero, tensor_parallel"),
    ("dtlab.widgets.predict", "import ipywidgets"),
    ("dtlab.cli.check", "from dtlab.checks import core"),
])  # fmt: skip
def test_what_is_allowed_is_not_reported(module, source):
    others = {"dtlab.plots.svg": "", "dtlab.checks.core": "", "dtlab.record.dry": ""}
    assert list(faults({**others, module: source})) == []


def in_a_fresh_process(code):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, check=True).stdout


def test_importing_dtlab_imports_nothing_heavy():
    heavy = {"torch", "numpy", "pandas", "ipywidgets", "matplotlib", "IPython"}
    assert in_a_fresh_process(f"import sys, dtlab; print(sorted({heavy} & set(sys.modules)))").strip() == "[]"


def test_every_public_name_is_found_where_it_is_said_to_be():
    code = "import dtlab; print([name for name in dtlab.__all__ if getattr(dtlab, name) is None])"
    assert in_a_fresh_process(code).strip() == "[]"


def test_no_public_function_has_the_name_of_a_module():
    """``import dtlab.x`` would put the module in the function's place."""
    import dtlab

    modules = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert sorted(set(dtlab._WHERE) & modules) == []


def test_files_stay_small():
    sizes = {name: len(source.splitlines()) for name, source in the_package().items()}
    assert {name: size for name, size in sizes.items() if size > 400} == {}
