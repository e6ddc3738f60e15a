"""pip, driven so that a CPU machine gets no CUDA build, others' packages stay, and errors become a sentence."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from dtlab import machine
from dtlab.errors import DtlabError

NEEDED_BYTES = 2 * 10**9  # a CPU environment, with room for pip to unpack
NEEDED_CUDA_BYTES = 9 * 10**9
DISK_FULL = "the disk is full: free some space (the course needs about 2 GB, 9 GB with CUDA) and run this again"
_NETWORK = re.compile(
    r"NewConnectionError|ConnectTimeout|ReadTimeout|name resolution|Name or service not known|"
    r"ProxyError|SSLError|ConnectionReset|IncompleteRead|getaddrinfo|Network is unreachable"
)
_NOT_FOUND = re.compile(r"No matching distribution|Could not find a version")
_PRESENT = (
    "import importlib.metadata as m, json, sys\n"
    "inside = lambda d: str(d.locate_file('')).startswith(sys.prefix)\n"
    "print(json.dumps([[d.metadata['Name'], inside(d)] for d in m.distributions()]))"
)


class SetupError(DtlabError):
    """What keeps the course from being set up: one sentence with the cure."""


def require_space(folder):
    """Raise SetupError if ``folder``'s disk cannot hold the environment."""
    needed = NEEDED_CUDA_BYTES if _wants_cuda() else NEEDED_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise SetupError(
            f"the disk of {folder} has {free / 1e9:.1f} GB free and the course needs about "
            f"{needed / 1e9:.0f} GB: free some space, or clone where there is more"
        )


def install(python, root, extra, *, log, ours):
    """Install torch, then ``dtlab[extra]`` from the clone at ``root``.

    Args:
        python: interpreter of the environment.
        ours: the environment was made by us, so pins apply to all its packages; else only to those not yet there.
        log: file that gets pip's full output.
    """
    Path(log).unlink(missing_ok=True)
    foreign = _foreign_packages(python, ours)
    lines = (Path(root) / "constraints.txt").read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if _name(line) not in foreign]
    pins = Path(log).with_name("dtlab-setup-pins.txt")
    pins.write_text("\n".join(kept) + "\n")
    if "torch" not in foreign:
        _install_torch(python, root, next(line for line in lines if _name(line) == "torch").split(";")[0].strip(), log)
    _pip_or_explain(python, ["-e", f"{root}[{extra}]", "-c", str(pins)], log)


def _name(line) -> str:
    """Normalised package name of a pin, for example ``jupyter-core``; empty for a comment."""
    return re.sub(r"[-_.]+", "-", re.split(r"[=<>;\[ #]", line.strip())[0]).lower()


def _foreign_packages(python, ours) -> "set[str]":
    """Names of the packages that are not ours to change."""
    reply = subprocess.run([str(python), "-c", _PRESENT], capture_output=True, text=True, check=False)
    if reply.returncode:
        raise SetupError(explain(reply.stderr, f"starting {python}", None))
    found = json.loads(reply.stdout)
    return {_name(name) for name, inside in found if name and not (ours and inside)} - {"pip", "setuptools", "dtlab"}


def _wants_cuda() -> bool:
    return sys.platform == "linux" and bool(machine.gpu_names())


def torch_index(root):
    """Address of the index to take torch from first, or None for pip's own.

    ``TORCH_INDEX`` decides if it is set (empty: pip's own). Otherwise Linux without an NVIDIA GPU takes the CPU wheels,
    whose address stands once, in README.md; elsewhere pip's own index has the right build.
    """
    if "TORCH_INDEX" in os.environ:
        return os.environ["TORCH_INDEX"] or None
    if sys.platform != "linux" or _wants_cuda():
        return None
    found = re.search(r"TORCH_INDEX=(https://\S+)", (Path(root) / "README.md").read_text(encoding="utf-8"))
    return found.group(1).strip("`") if found else None


def _install_torch(python, root, pin, log):
    """torch by itself and first: its packages come later from pip's own index, with the pins."""
    index = torch_index(root)
    if index:
        asked = "TORCH_INDEX" in os.environ
        code, text = _pip(python, ["--no-deps", *([] if asked else ["--retries", "0"]), "--index-url", index, pin], log)
        if code == 0:
            return
        if asked or not _NOT_FOUND.search(text):
            raise SetupError(explain(text, f"installing {pin} from {index}", log))
        print("dtlab: PyTorch's own index has no answer, taking torch from pip's", flush=True)
    _pip_or_explain(python, ["--no-deps", pin], log)


def _pip_or_explain(python, args, log):
    code, text = _pip(python, args, log)
    if code:
        raise SetupError(explain(text, "pip install", log))


def _pip(python, args, log):
    """``(exit code, error text)`` of ``pip install``; progress is seen in a terminal, the log gets the rest."""
    seen = sys.stdout.isatty()
    env = {"PIP_RETRIES": "2", **os.environ, "PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    command = [str(python), "-m", "pip", "install", *args]
    with open(log, "ab") as out:
        reply = subprocess.run(
            command, stdout=None if seen else out, stderr=subprocess.PIPE, env=env, close_fds=False, check=False
        )
        out.write(reply.stderr)
    return reply.returncode, reply.stderr.decode(errors="replace")


def explain(text, doing, log) -> str:
    """One sentence with the cure for what a tool printed when it failed."""
    if "No space left on device" in text or "Errno 28" in text:
        return DISK_FULL
    if _NETWORK.search(text):
        return (
            "pip reached no package index: connect to the network (a proxy goes into HTTPS_PROXY), then run this again"
        )
    version = ".".join(map(str, sys.version_info[:2]))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else "no message")
    if _NOT_FOUND.search(text):
        return f"no package for Python {version} here ({last}): take Python 3.10 to 3.13, make lab PYTHON=python3.12"
    return f"{doing} failed: {last}" + (f" (all of it: {log})" if log else "")
