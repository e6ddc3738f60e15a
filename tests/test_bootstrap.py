"""From a bare clone to a working environment, and every way it can fail, with stand-ins for Python and pip."""

import errno
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dtlab import cli, examine, machine
from dtlab.cli import bootstrap, installer

COURSE = Path(__file__).resolve().parents[1]
FAKE = Path(__file__).with_name("fake_python.sh")
RUN = ["run", "-c", "pass"]
NO_ANSWER = "ERROR: Could not find a version\nERROR: No matching distribution found for torch==2.13.0"


class Clone:
    """A bare clone, a log of what was called, and the command that would run in the end."""

    def __init__(self, root, log):
        self.root, self.log, self.handed_to = root, log, None
        self.venv = root / ".venv"

    def run(self, argv=RUN):
        self.handed_to = None
        return cli.main(argv)

    def calls(self, word=""):
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if word in line]

    def state(self):
        return bootstrap.read_state(self.venv)


@pytest.fixture
def clone(tmp_path, monkeypatch):
    root = tmp_path / "a clone"
    root.mkdir()
    for name in ("pyproject.toml", "constraints.txt", "README.md"):
        shutil.copy(COURSE / name, root)
    base = tmp_path / "python3"
    shutil.copy(FAKE, base)
    made = Clone(root, tmp_path / "calls.log")
    monkeypatch.setenv("FAKE_LOG", str(made.log))
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    monkeypatch.setattr(bootstrap, "ROOT", root)
    monkeypatch.setattr(bootstrap, "hand_over", lambda python, argv: setattr(made, "handed_to", python) or 0)
    monkeypatch.setattr(bootstrap, "torch_version", lambda: None)
    monkeypatch.setattr(bootstrap, "_active", lambda: False)
    monkeypatch.setattr(machine, "gpu_names", list)
    monkeypatch.setattr(sys, "_base_executable", str(base), raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    return made


def one_sentence(capsys, clone, argv=RUN):
    """The command must fail with exactly one line on stderr and no traceback; return that line."""
    assert clone.run(argv) == 1
    assert clone.handed_to is None
    text = capsys.readouterr().err.strip()
    assert text.startswith("dtlab: ") and "\n" not in text, text
    return text


# What a good set-up does


def test_a_bare_clone_gets_torch_first_then_the_pinned_course(clone):
    assert clone.run() == 0
    assert clone.handed_to == clone.venv / "bin" / "python"
    torch, course = clone.calls("pip install")
    assert "--no-deps" in torch and torch.endswith(pin_of("torch"))
    assert course.startswith(f"-m pip install -e {clone.root}[test] -c ")
    assert clone.state()["state"] == "ready"


def test_the_second_run_calls_nothing(clone):
    clone.run()
    before = clone.calls()
    start = time.perf_counter()
    assert clone.run() == 0
    assert clone.calls() == before
    assert time.perf_counter() - start < 1


def test_a_larger_extra_is_added_later_and_a_smaller_one_is_there(clone):
    clone.run(["lab"])
    assert "[course]" in clone.calls("pip install")[-1]
    clone.run()
    assert "[test]" in clone.calls("pip install")[-1]
    number = len(clone.calls())
    clone.run(["lab"])
    assert len(clone.calls()) == number


def test_changed_pins_are_installed_without_making_it_anew(clone):
    clone.run()
    (clone.venv / "mine").touch()
    pins = clone.root / "constraints.txt"
    pins.write_text(pins.read_text() + "leftpad==1.0\n")
    number = len(clone.calls())
    assert clone.run() == 0
    assert len(clone.calls()) > number and (clone.venv / "mine").exists()


def test_a_change_of_tool_settings_installs_nothing(clone):
    clone.run()
    project = clone.root / "pyproject.toml"
    project.write_text(project.read_text().replace("line-length = 120", "line-length = 99"))
    number = len(clone.calls())
    assert clone.run() == 0 and len(clone.calls()) == number


def test_packages_of_an_older_pin_are_ours_to_change(clone, monkeypatch):
    clone.run()
    monkeypatch.setenv("FAKE_PACKAGES", '[["torch", true], ["NumPy", true], ["pandas", false]]')
    (clone.root / "constraints.txt").write_text("torch==2.14.0\nnumpy==2.4.7\npandas==3.1.2\n")
    clone.run()
    assert any(call.endswith("torch==2.14.0") for call in clone.calls())
    assert (clone.venv / "dtlab-setup-pins.txt").read_text() == "torch==2.14.0\nnumpy==2.4.7\n"


def test_a_real_interpreter_tells_its_packages_and_whose_they_are():
    foreign = installer._foreign_packages(sys.executable, ours=False)
    assert "pytest" in foreign and "pip" not in foreign
    if sys.prefix in importlib.util.find_spec("pytest").origin:
        assert "pytest" not in installer._foreign_packages(sys.executable, ours=True)


# No CUDA download on a CPU machine


def test_without_a_gpu_torch_comes_from_the_cpu_index_of_the_readme(clone):
    address = re.search(r"make lab TORCH_INDEX=(\S+)", (COURSE / "README.md").read_text()).group(1)
    assert address.endswith("/whl/cpu")
    clone.run()
    assert f"--index-url {address}" in clone.calls("pip install")[0]


def test_an_index_without_an_answer_is_left_quickly_and_quietly(clone, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_PIP_ERROR", NO_ANSWER)
    monkeypatch.setenv("FAKE_PIP_ERROR_ON", "--index-url")
    assert clone.run() == 0
    first, second = clone.calls("torch==")[:2]
    assert "--retries 0" in first and "--index-url" not in second
    assert capsys.readouterr().err == ""


def unreachable(folder, retries):
    """What the real pip prints when nobody answers at the index."""
    command = ["-m", "pip", "--isolated", "download", "--no-deps", "-d", str(folder), "--retries", str(retries)]
    command += ["--index-url", "http://127.0.0.1:9/simple", "cloudpickle==9.9.9"]
    reply = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=60, check=False)
    assert reply.returncode
    return reply.stderr


def test_what_pip_prints_when_nobody_answers_is_understood(tmp_path):
    assert installer._NOT_FOUND.search(unreachable(tmp_path, 0))
    assert installer.explain(unreachable(tmp_path, 1), "pip", None).startswith("pip reached no package index")


def test_with_an_nvidia_gpu_torch_comes_from_pips_own_index(clone, monkeypatch):
    monkeypatch.setattr(machine, "gpu_names", lambda: ["H200"])
    clone.run()
    assert not clone.calls("--index-url")


def test_on_macos_torch_comes_from_pips_own_index(clone, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert installer.torch_index(clone.root) is None


def test_torch_index_of_the_reader_decides_and_has_no_other_way(clone, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_INDEX", "http://mirror.invalid/cpu")
    monkeypatch.setenv("FAKE_PIP_ERROR", NO_ANSWER)
    monkeypatch.setenv("FAKE_PIP_ERROR_ON", "--index-url")
    one_sentence(capsys, clone)
    assert len(clone.calls("torch==")) == 1 and "--index-url http://mirror.invalid/cpu" in clone.calls("torch==")[0]


def test_an_empty_torch_index_means_pips_own(clone, monkeypatch):
    monkeypatch.setenv("TORCH_INDEX", "")
    clone.run()
    assert not clone.calls("--index-url")


# An installed torch in range is left alone


def activate(monkeypatch, tmp_path, version, packages="[]"):
    """Pretend to run in an active environment outside the clone that has this torch."""
    prefix = tmp_path / "theirs"
    (prefix / "bin").mkdir(parents=True)
    shutil.copy(FAKE, prefix / "bin" / "python")
    monkeypatch.setattr(sys, "prefix", str(prefix))
    monkeypatch.setattr(bootstrap, "_active", lambda: True)
    monkeypatch.setattr(bootstrap, "torch_version", lambda: version)
    monkeypatch.setattr(bootstrap, "is_current", lambda python: False)
    monkeypatch.setenv("FAKE_PACKAGES", packages)
    return prefix


def test_an_active_environment_with_torch_is_used_and_its_packages_stay(clone, monkeypatch, tmp_path):
    theirs = '[["torch", true], ["NumPy", true], ["jupyter_core", true]]'
    prefix = activate(monkeypatch, tmp_path, "2.8.0+cu128", theirs)
    assert clone.run() == 0
    assert clone.handed_to == prefix / "bin" / "python" and not clone.venv.exists()
    (install,) = clone.calls("pip install")
    pins = Path(install.split(" -c ")[1])
    names = [line.split("==")[0] for line in pins.read_text().splitlines()]
    assert not {"torch", "numpy", "jupyter-core"} & set(names) and "pandas" in names


def test_an_active_environment_with_another_torch_is_left_and_that_is_said(clone, monkeypatch, tmp_path, capsys):
    activate(monkeypatch, tmp_path, "2.2.1")
    assert clone.run() == 0
    assert clone.handed_to == clone.venv / "bin" / "python"
    assert "torch 2.2.1, dtlab needs >=2.6,<3: using .venv instead" in capsys.readouterr().out


def test_an_active_environment_without_torch_is_left(clone, monkeypatch, tmp_path):
    activate(monkeypatch, tmp_path, None)
    assert clone.run() == 0 and clone.handed_to == clone.venv / "bin" / "python"


def test_the_systems_own_torch_is_seen_from_the_new_environment(clone, monkeypatch):
    monkeypatch.setattr(bootstrap, "torch_version", lambda: "2.7.0")
    monkeypatch.setenv("FAKE_PACKAGES", '[["torch", false]]')
    assert clone.run() == 0
    assert clone.calls("--system-site-packages") and not clone.calls("torch==")


@pytest.mark.parametrize("version, fits", [
    ("2.5.1", False), ("2.6.0", True), ("2.13.0+cpu", True), ("2.14.0.dev20261101", True),
    ("3.0.0", False), (None, False),
])  # fmt: skip
def test_the_range_of_torch_is_pyprojects(version, fits):
    assert bootstrap.fits(version) is fits


# What goes wrong: one sentence with the cure


def test_a_missing_venv_module_names_the_package(clone, monkeypatch, capsys):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ensurepip" else real(name))
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
    assert f"sudo apt install {version}" in one_sentence(capsys, clone)
    assert not clone.venv.exists()


@pytest.mark.parametrize("version", [(3, 6, 9), (3, 9, 18)])
def test_an_old_python_is_told_which_newer_one_is_there(version, tmp_path):
    newer = tmp_path / "python3.12"
    newer.write_text("#!/bin/sh\n")
    newer.chmod(0o755)
    code = f"import sys, runpy; sys.version_info = {version}; runpy.run_module('dtlab', run_name='__main__')"
    env = {**os.environ, "PATH": str(tmp_path)}
    reply = subprocess.run([sys.executable, "-c", code], cwd=COURSE, env=env, capture_output=True, text=True)
    assert reply.returncode == 1 and len(reply.stderr.strip().splitlines()) == 1
    assert f"{version[0]}.{version[1]}" in reply.stderr and "make lab PYTHON=python3.12" in reply.stderr


def test_what_an_old_python_reads_has_nothing_new_in_it():
    import ast

    for name in ("__init__.py", "__main__.py"):
        ast.parse((COURSE / "dtlab" / name).read_text(), feature_version=(3, 7))


def test_too_little_disk_is_said_before_anything_is_made(clone, monkeypatch, capsys):
    usage = shutil._ntuple_diskusage(10**11, 10**11, 3 * 10**8)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert "has 0.3 GB free and the course needs about 2 GB" in one_sentence(capsys, clone)
    assert clone.calls() == [] and not clone.venv.exists()


def test_a_disk_that_fills_up_under_pip_is_said(clone, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_PIP_ERROR", "ERROR: Could not install: OSError: [Errno 28] No space left on device")
    assert "the disk is full: free some space" in one_sentence(capsys, clone)


def test_a_disk_that_fills_up_under_us_is_said(clone, monkeypatch, capsys):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(bootstrap, "write_state", full)
    assert "the disk is full" in one_sentence(capsys, clone)


def test_no_network_is_said(clone, monkeypatch, capsys):
    error = "Failed to establish a new connection: [Errno -3] Temporary failure in name resolution\n" + NO_ANSWER
    monkeypatch.setenv("FAKE_PIP_ERROR", error)
    assert "connect to the network" in one_sentence(capsys, clone)


def test_a_python_that_no_wheel_fits_is_said(clone, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_PIP_ERROR", NO_ANSWER)
    assert "make lab PYTHON=python3.12" in one_sentence(capsys, clone)


def test_another_error_of_pip_is_quoted_with_its_log(clone, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_PIP_ERROR", "ERROR: hash mismatch of the wheel")
    text = one_sentence(capsys, clone)
    assert "hash mismatch of the wheel" in text and "dtlab-setup.log" in text
    assert "hash mismatch" in (clone.venv / "dtlab-setup.log").read_text()


def test_a_venv_that_cannot_be_made_is_quoted(clone, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_VENV_ERROR", "Error: [Errno 13] Permission denied: lib64")
    assert "making .venv failed: Error: [Errno 13] Permission denied" in one_sentence(capsys, clone)


def test_an_unknown_extra_is_refused_with_the_choices(clone, capsys):
    assert "course, test, bench, peers" in one_sentence(capsys, clone, ["run", "--extra", "tests", "-c", "pass"])


# A half-made environment is known and made anew


def test_after_a_failure_the_next_run_makes_it_anew(clone, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_PIP_ERROR", "ERROR: broken")
    assert clone.run() == 1 and clone.state()["state"] == "making"
    (clone.venv / "left over").touch()
    monkeypatch.delenv("FAKE_PIP_ERROR")
    assert clone.run() == 0
    assert not (clone.venv / "left over").exists() and clone.state()["state"] == "ready"


def test_a_set_up_killed_in_pip_is_made_anew(clone, tmp_path, capsys):
    code = (
        "import sys; from pathlib import Path; from dtlab import cli; from dtlab.cli import bootstrap\n"
        f"sys._base_executable = {str(tmp_path / 'python3')!r}; bootstrap.ROOT = Path({str(clone.root)!r})\n"
        "bootstrap.torch_version = lambda: None; bootstrap._active = lambda: False\n"
        "cli.main(['run', '-c', 'pass'])"
    )
    env = {**os.environ, "FAKE_PIP_SLEEP": "30", "PYTHONPATH": str(COURSE), "TORCH_INDEX": ""}
    process = subprocess.Popen([sys.executable, "-c", code], env=env, start_new_session=True)
    end = time.monotonic() + 20
    while not clone.calls("pip install") and time.monotonic() < end:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert "another set-up of this clone" in one_sentence(capsys, clone)  # its pip is still alive
    end_group(process.pid)
    (clone.venv / "left over").touch()
    assert clone.run() == 0
    assert not (clone.venv / "left over").exists() and clone.state()["state"] == "ready"


def end_group(group):
    """Kill a process group and wait until the last of it is gone."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            return
        time.sleep(0.02)


def test_a_dangling_interpreter_is_made_anew(clone):
    clone.run()
    (clone.venv / "bin" / "python").unlink()
    (clone.venv / "bin" / "python").symlink_to("/nowhere/python3.9")
    assert clone.run() == 0 and len(clone.calls("-m venv")) == 2


def test_a_moved_clone_is_made_anew(clone, monkeypatch):
    clone.run()
    moved = clone.root.with_name("moved")
    clone.root.rename(moved)
    monkeypatch.setattr(bootstrap, "ROOT", moved)
    assert clone.run() == 0 and clone.handed_to == moved / ".venv" / "bin" / "python"
    assert len(clone.calls("-m venv")) == 2


def test_an_environment_made_by_hand_is_kept(clone, monkeypatch):
    (clone.venv / "bin").mkdir(parents=True)
    shutil.copy(FAKE, clone.venv / "bin" / "python")
    (clone.venv / "pyvenv.cfg").write_text("home = by hand")
    (clone.venv / "mine").touch()
    monkeypatch.setenv("FAKE_PACKAGES", '[["torch", true]]')
    assert clone.run() == 0
    assert (clone.venv / "mine").exists() and not clone.calls("torch==") and not clone.calls("-m venv")


# The commands around it


def test_doctor_and_reset_install_nothing(clone, monkeypatch, capsys):
    assert clone.run(["reset", "99"]) == 1
    assert clone.run(["doctor"]) == bool(examine.doctor().problems)
    assert clone.calls() == [] and "dtlab doctor:" in capsys.readouterr().out


def test_output_that_nobody_reads_on_is_no_error(tmp_path):
    command = f"{sys.executable} -m dtlab doctor 2>{tmp_path / 'err'} | true"
    subprocess.run(["sh", "-c", command], cwd=COURSE, env={**os.environ, "PATH": "/usr/bin:/bin"}, check=True)
    assert (tmp_path / "err").read_text() == ""


def test_reset_without_a_lesson_says_what_it_needs(clone, capsys):
    assert "for example: dtlab reset 00" in one_sentence(capsys, clone, ["reset"])


def test_a_bare_interpreter_without_site_packages_reaches_the_commands():
    reply = subprocess.run([sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(COURSE)!r}); "
                            "import dtlab.cli.lab, dtlab.cli.working_copies, dtlab.examine; "
                            "print(sorted(m for m in ('torch', 'numpy', 'IPython') if m in sys.modules))"],
                           capture_output=True, text=True)  # fmt: skip
    assert reply.stdout.strip() == "[]", reply.stderr


def test_lab_turns_news_and_update_checks_off_and_keeps_later_changes(tmp_path, monkeypatch):
    from dtlab.cli import lab

    monkeypatch.delenv("JUPYTERLAB_SETTINGS_DIR", raising=False)
    env = lab.settings(tmp_path)
    path = Path(env["JUPYTERLAB_SETTINGS_DIR"], "@jupyterlab/apputils-extension/notification.jupyterlab-settings")
    assert json.loads(path.read_text()) == {"fetchNews": "false", "checkForUpdates": False}
    path.write_text("{}")
    lab.settings(tmp_path)
    assert path.read_text() == "{}"


def test_lab_uses_the_readers_settings_folder(tmp_path, monkeypatch):
    from dtlab.cli import lab

    monkeypatch.setenv("JUPYTERLAB_SETTINGS_DIR", str(tmp_path / "mine"))
    assert lab.settings(tmp_path / "other")["JUPYTERLAB_SETTINGS_DIR"] == str(tmp_path / "mine")
    assert list((tmp_path / "mine").rglob("notification.jupyterlab-settings"))


@pytest.mark.parametrize("display", [None, ":0"])
def test_lab_opens_a_browser_only_where_there_is_a_display(monkeypatch, display):
    from dtlab.cli import lab

    for name in ("DISPLAY", "WAYLAND_DISPLAY", "WSL_DISTRO_NAME"):
        monkeypatch.delenv(name, raising=False)
    if display:
        monkeypatch.setenv("DISPLAY", display)
    monkeypatch.setattr(sys, "platform", "linux")
    command = lab.command("work/00_ranks.ipynb", lab._options([]))
    assert ("--no-browser" in command) is (display is None)
    assert "--LabApp.default_url=/lab/tree/work/00_ranks.ipynb" in command


def pin_of(name):
    """The pin of one package as constraints.txt has it."""
    lines = (COURSE / "constraints.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{name}=="))


def test_importlib_metadata_is_what_tells_torch(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"torch": "2.9.9"}[name])
    assert bootstrap.torch_version() == "2.9.9"
