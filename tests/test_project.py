"""The files around the code agree with each other: versions, commands, links, what is shipped."""

import fnmatch
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from test_layers import imports, the_package

import dtlab
from dtlab import cli
from dtlab.cli import bootstrap

tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")  # pytest brings tomli to 3.10
ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))


def requirements(*extras):
    """Declared requirements by normalised name, of the core and of the named extras."""
    lines = PROJECT["dependencies"] + [line for extra in extras for line in PROJECT["optional-dependencies"][extra]]
    found = [Requirement(line) for line in lines]
    return {normal(each.name): each for each in found if each.name != "dtlab"}


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def pins():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return {normal(each.name): each for each in map(Requirement, (x for x in lines if x and x[0] != "#"))}


# Versions


def test_every_requirement_has_both_bounds():
    for each in requirements(*PROJECT["optional-dependencies"]).values():
        operators = {spec.operator for spec in each.specifier}
        assert operators == {">=", "<"}, each


def test_every_requirement_is_pinned_inside_its_bounds():
    pinned = pins()
    for name, each in requirements(*PROJECT["optional-dependencies"]).items():
        (pin,) = pinned[name].specifier
        assert pin.operator == "==" and each.specifier.contains(pin.version), (name, str(pin))


def test_the_pins_are_closed_under_what_the_packages_here_require():
    pinned, missing = pins(), []
    for name in pinned:
        try:
            needed = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        if importlib.metadata.version(name).split("+")[0] != next(iter(pinned[name].specifier)).version:
            continue
        wanted = [
            each for each in map(Requirement, needed) if each.marker is None or each.marker.evaluate({"extra": ""})
        ]
        missing += [
            (name, each.name) for each in wanted if normal(each.name) not in pinned | {"setuptools": 0, "pip": 0}
        ]
    assert missing == []


def test_a_pin_that_left_python_3_10_behind_says_so():
    for name, pin in pins().items():
        try:
            metadata = importlib.metadata.metadata(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if metadata["Version"].split("+")[0] != next(iter(pin.specifier)).version:
            continue
        old = SpecifierSet(metadata["Requires-Python"] or "").contains("3.10.20")
        assert old or pin.marker is not None and not pin.marker.evaluate({"python_version": "3.10"}), name


def undeclared(sources):
    """What ``{module: source}`` imports that no requirement brings: lazily the extra ``course`` may, else the core.

    What makes recordings of other people's programs may need the extra ``peers``.
    """
    distributions = {"megatron": ["megatron-core"], **importlib.metadata.packages_distributions()}  # also not installed
    for module, source in sources.items():
        for name, lazy in imports(source, module):
            root = name.split(".")[0]
            may_wait = lazy or module == "dtlab.ranks.figures"  # matplotlib itself loads that one
            extra = "peers" if module.startswith("dtlab.data.recordings") else "course"
            declared = requirements(extra) if may_wait else requirements()
            known = root in {*sys.stdlib_module_names, "dtlab"}
            if not known and normal(distributions.get(root, [root])[0]) not in declared:
                yield f"{module} imports {root}"


def test_what_dtlab_imports_is_declared():
    assert list(undeclared(the_package())) == []


@pytest.mark.parametrize("source", ["import pytest", "import matplotlib", "def f():\n    import yaml", "import absent"])
def test_an_undeclared_import_is_found(source):
    assert list(undeclared({"dtlab.x": source}))


def test_torch_stays_a_range_and_its_pin_names_no_build():
    assert str(requirements()["torch"].specifier) in ("<3,>=2.6", ">=2.6,<3")
    assert "+" not in str(pins()["torch"].specifier)


def test_the_extras_nest_as_the_set_up_believes():
    assert set(bootstrap.EXTRAS) == set(PROJECT["optional-dependencies"])
    for before, name in zip((None, *bootstrap.EXTRAS), bootstrap.EXTRAS):
        inner = {extra for line in PROJECT["optional-dependencies"][name] for extra in Requirement(line).extras}
        assert inner == ({before} if before else set()), name


def test_every_place_names_the_same_pythons():
    minors = sorted(int(line.rsplit(".", 1)[1]) for line in PROJECT["classifiers"] if "Python :: 3." in line)
    span = f"Python 3.{minors[0]} to 3.{minors[-1]}"
    assert PROJECT["requires-python"] == f">=3.{minors[0]}" and span in README
    assert span in (ROOT / "dtlab/cli/installer.py").read_text()
    offered = re.search(r"for minor in \(([\d, ]+)\)", (ROOT / "dtlab/__main__.py").read_text()).group(1)
    assert sorted(map(int, offered.split(","))) == minors


# environment.yml


def conda_specs(environment):
    return [line for line in environment["dependencies"] if isinstance(line, str)]


def environment_faults(environment):
    """What in a conda environment is not pyproject's own, one sentence each."""
    conda, (pip,) = conda_specs(environment), [x["pip"] for x in environment["dependencies"] if isinstance(x, dict)]
    python = next((line for line in conda if line.startswith("python")), "")
    newest = max(int(line.rsplit(".", 1)[1]) for line in PROJECT["classifiers"] if "Python :: 3." in line)
    if python != f"python{PROJECT['requires-python']},<3.{newest + 1}":
        yield f"python is {python!r}"
    if pip != ["-e .[course]"]:
        yield f"pip installs {pip}"
    if set(environment["channels"]) != {"conda-forge"}:
        yield f"channels are {environment['channels']}"
    if [line for line in conda if not re.match(r"(python|pip)\b", line)]:
        yield "conda brings packages that pip brings too"


def test_environment_yml_is_pyprojects_equal():
    assert list(environment_faults(ENVIRONMENT)) == []


@pytest.mark.parametrize("change", [
    {"dependencies": ["python>=3.9,<3.14", "pip", {"pip": ["-e .[course]"]}]},
    {"dependencies": ["python>=3.10,<3.14", "pip", {"pip": ["-e ."]}]},
    {"dependencies": ["python>=3.10,<3.14", "pip", "pytorch", {"pip": ["-e .[course]"]}]},
    {"channels": ["pytorch", "conda-forge"]},
])  # fmt: skip
def test_an_unequal_environment_is_found(change):
    assert list(environment_faults({**ENVIRONMENT, **change}))


def test_pip_reads_the_extra_that_environment_yml_names():
    (pip,) = (line["pip"] for line in ENVIRONMENT["dependencies"] if isinstance(line, dict))
    assert re.fullmatch(r"-e \.\[(\w+)\]", pip[0]).group(1) in PROJECT["optional-dependencies"]


# Commands


def targets():
    return set(re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split())


def what_make_would_do(*args):
    """The commands of a target, printed and not run, also when these tests run under make themselves."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "--dry-run", "--no-print-directory", *args]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout


def test_every_make_target_is_one_call_of_the_module():
    for target in sorted(targets() - {"clean", "help"}):
        (line,) = what_make_would_do(target, "PYTHON=snake").strip().splitlines()
        words = line.split()
        assert words[:3] == ["snake", "-m", "dtlab"] and words[3] in cli._COMMANDS, line


def test_the_scripts_that_make_runs_are_there():
    for script in re.findall(r"\b[\w/]+\.py\b", re.sub(r"ARGS=.*", "", (ROOT / "Makefile").read_text())):
        assert (ROOT / script).is_file(), script


def test_clean_leaves_the_readers_work_alone():
    lines = what_make_would_do("clean")
    assert "rm -rf .venv" in lines and "work" not in lines


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_the_make_commands_that_documents_name_exist(document):
    named = set(re.findall(r"\bmake ([a-z][\w-]*)(?=[ `\n;|)])", code_of((ROOT / document).read_text())))
    assert named <= targets(), named - targets()


def code_of(text):
    """The text between backticks, blocks and inline."""
    return "\n".join(re.findall(r"```.*?```|`[^`]*`", text, re.DOTALL))


def test_the_module_commands_that_the_readme_names_exist():
    named = set(re.findall(r"python3? -m dtlab (\w+)", README))
    assert named and named <= set(cli._COMMANDS)


def test_contributing_is_three_commands():
    block = re.search(r"```\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL).group(1)
    assert [line.split("#")[0].strip() for line in block.splitlines()] == ["make lab", "make test", "make notebooks"]


def test_ci_goes_through_the_readmes_command_and_its_failure_is_ours(tmp_path):
    script = (ROOT / ".ci/run").read_text()
    assert "\nmake test" in script and os.access(ROOT / ".ci/run", os.X_OK)
    copy = tmp_path / ".ci" / "run"
    copy.parent.mkdir()
    copy.write_text(script)
    (tmp_path / "bin").mkdir()
    for name, code in {"make": "exit 3", "chromium": "", "python3": "", "apt-get": "touch called"}.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{code}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    reply = subprocess.run(["bash", str(copy)], env=env, capture_output=True, text=True, check=False)
    assert reply.returncode == 3 and not (tmp_path / "called").exists()


def test_ci_runs_what_test_all_adds_and_nothing_twice():
    lines = re.findall(r"^make .*$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert lines == ["make lint", "make test", 'make test-all ARGS="-m long"']
    assert what_make_would_do("test-all", "PYTHON=snake", "ARGS=-m long").strip() == "snake -m dtlab test --all -m long"


@pytest.mark.parametrize("setting, counted", [("", "2 skipped"), ("1", "1 passed, 1 skipped")])
def test_what_takes_long_runs_only_in_test_all(setting, counted, tmp_path):
    shutil.copy(ROOT / "tests/conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = long\n")
    (tmp_path / "test_it.py").write_text("import pytest\n@pytest.mark.long\ndef test_it(): pass\n"
                                         "@pytest.mark.skip\ndef test_other(): pass\n")  # fmt: skip
    reply = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."], cwd=tmp_path,
                           env={**os.environ, "DTLAB_TEST_ALL": setting}, capture_output=True, text=True)  # fmt: skip
    assert counted in reply.stdout


def test_the_lessons_on_two_ranks_and_the_storm_of_200_take_long():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "long", "-p", "no:cacheprovider"]
    reply = subprocess.run([*command, "tests/notebooks", "tests/faults"], cwd=ROOT, capture_output=True, text=True)
    assert "test_lesson_runs_on_two_ranks[00_ranks]" in reply.stdout and "test_a_storm_of_faults[200]" in reply.stdout
    assert "test_a_storm_of_faults[12]" not in reply.stdout


def test_ci_installs_what_a_bare_debian_lacks(tmp_path):
    calls, shims = tmp_path / "calls", tmp_path / "bin"
    shims.mkdir()
    for name in ("bash", "dirname", "id", "cat", "env", "sh"):
        (shims / name).symlink_to(shutil.which(name))
    programs = {"apt-get": f'echo "$@" >> {calls}', "python3": "exit 1", "make": "exit 0", "sudo": '"$@"'}
    for name, code in programs.items():
        (shims / name).write_text(f"#!/bin/sh\n{code}\n")
        (shims / name).chmod(0o755)
    copy = tmp_path / ".ci" / "run"
    copy.parent.mkdir()
    shutil.copy(ROOT / ".ci/run", copy)
    reply = subprocess.run(
        [str(shims / "bash"), str(copy)], env={"PATH": str(shims)}, capture_output=True, text=True, check=False
    )
    assert reply.returncode == 0, reply.stderr
    assert "python3-venv chromium" in calls.read_text()


def test_the_workflow_runs_the_same_script_on_the_lowest_python_and_the_lowest_versions():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert any("bash .ci/run" in step.get("run", "") for step in job["steps"])
    matrix = job["strategy"]["matrix"]
    assert PROJECT["requires-python"] == f">={matrix['python'][0]}"
    assert {"python": matrix["python"][0], "versions": "lowest"} in matrix["include"]
    (step,) = (step for step in job["steps"] if step.get("if") == "matrix.versions == 'lowest'")
    assert "--resolution lowest-direct" in step["run"] and job["steps"].index(step) < len(job["steps"]) - 1


def test_no_two_test_files_have_one_name():
    """pytest imports them by name: a second file of a name is refused, or is taken for the first by the ranks."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert sorted(names) == sorted(set(names))


# What is written and shipped


def tracked():
    reply = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if reply.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in reply.stdout.splitlines() if (ROOT / name).is_file()]


def test_links_and_pictures_of_the_documents_are_there():
    missing = []
    for document in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        for target in re.findall(r"\]\(([^)#]+)", (ROOT / document).read_text()):
            if "://" not in target and not (ROOT / target).exists():
                missing.append(f"{document}: {target}")
    assert missing == []


def test_every_lesson_is_in_the_readmes_map():
    for lesson in ROOT.glob("notebooks/[0-9]*.ipynb"):
        assert f"notebooks/{lesson.name}" in README, lesson.name


def test_what_was_not_tried_is_said():
    for place in ("macOS", "Windows", "conda", "Colab", "NVIDIA"):
        rows = [line for line in README.splitlines() if line.startswith("|") and place in line.split("|")[1]]
        assert rows and all(re.match(r"\s*(no|in part)\b", row.split("|")[-2]) for row in rows), place


INDEX_HOSTS = re.compile("|".join(["pypi[.]org", "pythonhosted[.]org", "download[.]pytorch[.]org", "deb[.]debian[.]org",
                                   "npmjs[.]org", "anaconda[.]org"]))  # fmt: skip


def test_the_address_of_the_cpu_wheels_stands_in_the_readme_alone():
    found = [
        path.relative_to(ROOT).as_posix()
        for path in tracked()
        if INDEX_HOSTS.search(path.read_bytes().decode(errors="replace"))
    ]
    assert found == ["README.md"]
    assert len(INDEX_HOSTS.findall(README)) == 1


def test_no_path_of_one_machine_stands_in_a_tracked_file():
    pattern = re.compile(rb"/(?:root|home/\w+|Users/\w+|work/\w+|tmp/\w+)/")
    allowed = ("*test_*", "notebooks/build.py")
    names = [path for path in tracked() if path.suffix not in {".png", ".ico"}]
    found = [path.relative_to(ROOT).as_posix() for path in names if pattern.search(path.read_bytes())]
    assert [name for name in found if not any(fnmatch.fnmatch(name, each) for each in allowed)] == []


def test_the_license_is_apaches_whole_text():
    text = (ROOT / "LICENSE").read_text()
    assert PROJECT["license"] == "Apache-2.0" and "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text and len(text.split()) > 1500


def test_the_version_stands_in_one_place_and_has_a_changelog_entry():
    assert "version" not in PROJECT and "version" in PROJECT["dynamic"]
    assert f"## {dtlab.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_files_that_the_package_reads_are_shipped_with_it():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["dtlab"]
    suffixes = {pattern.rsplit("*", 1)[1] for pattern in patterns}
    others = {path.suffix for path in tracked() if path.is_relative_to(ROOT / "dtlab")} - {".py", ".md"}
    assert others <= suffixes, others - suffixes


def test_the_readers_work_is_ignored_by_git():
    reply = subprocess.run(["git", "check-ignore", "work/00_ranks.ipynb", ".venv/bin/python"], cwd=ROOT,
                           capture_output=True, text=True, check=False)  # fmt: skip
    if reply.returncode == 128:
        pytest.skip("not a git checkout")
    assert len(reply.stdout.splitlines()) == 2
