"""From a bare clone to a working ``.venv``. Standard library only: this runs before anything is installed.

Three environments can serve: the active one if it already has a fitting torch (it is used and its packages are left
alone), else the clone's own ``.venv``, which sees an outside Python's torch if that has one. A state file in the
environment says "making" while work goes on and "ready" as the last thing written, so a half-made one is known.
"""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from dtlab.cli import installer
from dtlab.cli.installer import DISK_FULL, SetupError  # noqa: F401  (DISK_FULL: for the caller)

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

ROOT = Path(__file__).resolve().parents[2]
OWN = ".venv"
EXTRAS = ("course", "test", "bench", "peers")  # each brings those before it


def is_clone() -> bool:
    """Whether dtlab runs from a clone; installed from a wheel there is nothing to set up."""
    return (ROOT / "pyproject.toml").is_file() and (ROOT / "constraints.txt").is_file()


def python_in(prefix) -> Path:
    """The interpreter of the environment at ``prefix``."""
    return Path(prefix, "Scripts", "python.exe") if os.name == "nt" else Path(prefix, "bin", "python")


def is_current(python) -> bool:
    """Whether this process already runs in the environment of ``python``."""
    return python is None or Path(sys.prefix).resolve() == Path(python).parents[1].resolve()


def hand_over(python, argv) -> int:
    """Run the same command with ``python``."""
    return become([str(python), "-m", "dtlab", *argv], os.environ)


def become(command, env) -> int:
    """Run a command in this process's place, so that Ctrl-C and signals reach it; Windows cannot, it waits."""
    if os.name == "nt":
        return subprocess.call(command, env=env)
    sys.stdout.flush()
    os.execve(command[0], command, env)


def prepare(extra):
    """Make sure that an environment has ``dtlab[extra]``; seconds where it already has.

    Args:
        extra: name of the extra needed; None: take an environment if there is one, install nothing.

    Returns:
        Its interpreter, or None for "go on in this process".

    Raises:
        SetupError: with one sentence that says what is missing and the cure.
    """
    if not is_clone():
        return None
    prefix = _choose()
    state = read_state(prefix)
    if extra is None:
        return python_in(prefix) if _is_ready(prefix, state, EXTRAS[0]) else None
    if extra not in EXTRAS:
        raise SetupError(f"there is no extra {extra!r}: choose one of {', '.join(EXTRAS)}")
    if not _is_ready(prefix, state, extra):
        with _alone():
            state = read_state(prefix)  # another set-up may just have finished
            if not _is_ready(prefix, state, extra):
                _set_up(prefix, state, extra)
    return python_in(prefix)


def _choose() -> Path:
    """Where to work: the active environment if it has a fitting torch, else the clone's own."""
    own = ROOT / OWN
    if Path(sys.prefix).resolve() == own.resolve() or not _active():
        return own
    version = torch_version()
    if version and not fits(version):
        print(f"dtlab: this environment has torch {version}, dtlab needs {torch_range()}: using {OWN} instead")
    return Path(sys.prefix) if fits(version) and importlib.util.find_spec("pip") else own


def _active() -> bool:
    """Whether this Python is a virtual or conda environment, not the system's own."""
    return sys.prefix != sys.base_prefix or os.environ.get("CONDA_PREFIX", "") == sys.prefix


def torch_version():
    """Version of the torch that this Python sees, or None. Read from its metadata: torch is not imported."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_range() -> str:
    """What pyproject.toml asks of torch, for example ``>=2.6,<3``."""
    return re.search(r'"torch([^"]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8")).group(1)


def fits(version) -> bool:
    """Whether a torch version is one that pyproject.toml admits."""
    low, high = re.fullmatch(r">=([\d.]+),<([\d.]+)", torch_range()).groups()
    numbers = [tuple(map(int, re.findall(r"\d+", text.split("+")[0]))) for text in (low, version or "0", high)]
    return numbers[0] <= numbers[1] < numbers[2]


def pins_hash() -> str:
    """Fingerprint of what an environment must hold: the pins, and pyproject.toml up to its tools' settings."""
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("[tool.")[0]
    return hashlib.sha256((declared + (ROOT / "constraints.txt").read_text(encoding="utf-8")).encode()).hexdigest()


def read_state(prefix) -> dict:
    """What the last set-up wrote into an environment; empty if there was none."""
    try:
        return json.loads(Path(prefix, "dtlab-setup.json").read_text())
    except (OSError, ValueError):
        return {}


def write_state(prefix, **state):
    """Write the state in one step, so that no half-written file is ever read."""
    part = Path(prefix, "dtlab-setup.part")
    part.write_text(json.dumps(state))
    part.replace(Path(prefix, "dtlab-setup.json"))


def _is_ready(prefix, state, extra) -> bool:
    is_whole = _is_sound(prefix, state) and state["pins"] == pins_hash()
    return is_whole and EXTRAS.index(extra) <= EXTRAS.index(state["extra"])


def _is_sound(prefix, state) -> bool:
    """Whether a set-up of this clone ended well, and its interpreter is still there (of a system's it is a link)."""
    return state.get("state") == "ready" and state["root"] == str(ROOT) and python_in(prefix).exists()


def _set_up(prefix, state, extra):
    start = time.monotonic()
    if prefix == ROOT / OWN and not _keeps(prefix, state):
        _make(prefix)
        state = {"made": True}
    made = bool(state.get("made"))
    extra = max(extra, state.get("extra", extra), key=EXTRAS.index)
    print(f"dtlab: installing the tested packages into {prefix.name}; the first time takes some minutes", flush=True)
    write_state(prefix, state="making", made=made, extra=extra)
    installer.install(python_in(prefix), ROOT, extra, log=prefix / "dtlab-setup.log", ours=made)
    write_state(prefix, state="ready", made=made, pins=pins_hash(), root=str(ROOT), extra=extra)
    print(f"dtlab: {prefix.name} is ready after {time.monotonic() - start:.0f} s", flush=True)


def _keeps(prefix, state) -> bool:
    """Whether an existing ``.venv`` can be brought up to date; a half-made, moved or broken one is made anew."""
    by_hand = not state and (prefix / "pyvenv.cfg").exists() and python_in(prefix).exists()
    return by_hand or _is_sound(prefix, state)


@contextlib.contextmanager
def _alone():
    """Let one set-up of this clone run at a time. pip inherits the lock, so it lasts while any part is alive."""
    with open(ROOT / "pyproject.toml", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.set_inheritable(file.fileno(), True)
        except BlockingIOError:
            text = "another set-up of this clone is still at work: wait for it, or end it and run this again"
            raise SetupError(text) from None
        except (OSError, AttributeError):  # a file system without locks; Windows
            pass
        yield


def _make(prefix):
    """Make ``.venv`` afresh; it sees the packages of an outside Python only where that has a fitting torch."""
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        name = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
        raise SetupError(
            f"{sys.executable} cannot make virtual environments: sudo apt install {name} (Debian, Ubuntu)"
            " or take another Python: make lab PYTHON=..."
        )
    installer.require_space(ROOT)
    if prefix.exists():
        print(f"dtlab: {prefix.name} is half-made or was moved: making it anew", flush=True)
        shutil.rmtree(prefix)
    prefix.mkdir()
    write_state(prefix, state="making", made=True)
    share = not _active() and fits(torch_version())
    python = getattr(sys, "_base_executable", None) or sys.executable
    command = [python, "-m", "venv", "--prompt", "dtlab", *(["--system-site-packages"] if share else []), str(prefix)]
    reply = subprocess.run(command, capture_output=True, text=True, close_fds=False, check=False)
    if reply.returncode:
        raise SetupError(installer.explain(reply.stdout + reply.stderr, "making .venv", log=None))
