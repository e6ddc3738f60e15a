"""``dtlab.doctor()``: what this machine can do for the course and what will go wrong, each with its cure.

A finding is ``ok``, ``note`` (good to know) or ``problem`` (something will fail). torch is imported only if there.
"""

import html
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from dtlab import machine

_MIB, _GIB = 2**20, 2**30


@dataclass(frozen=True)
class Finding:
    """One line of the report; ``cure`` says what to do about it (empty when nothing is to be done)."""

    name: str
    level: str  # "ok", "note" or "problem"
    text: str
    cure: str = ""

    def line(self) -> str:
        """The finding as one line of text."""
        mark = {"ok": "  ok ", "note": "note ", "problem": "WILL FAIL "}[self.level]
        return f"{mark} {self.name}: {self.text}" + (f" -> {self.cure}" if self.cure else "")


class Report:
    """All findings: a cell shows one line, and below it only what needs the reader; ``full()`` shows everything."""

    def __init__(self, findings):
        self.findings = list(findings)

    @property
    def problems(self) -> list:
        """Findings that will make something fail."""
        return [f for f in self.findings if f.level == "problem"]

    def __getitem__(self, name) -> Finding:
        return next(f for f in self.findings if f.name == name)

    def summary(self) -> str:
        """One line: whether all is well, and what there is."""
        number = len(self.problems)
        state = "all well" if not number else f"{number} problem{'s' if number > 1 else ''}"
        return f"dtlab doctor: {state} ({', '.join(self[name].text for name in ('cores', 'memory', 'gpus'))})"

    def full(self) -> str:
        """Every finding, one a line, under the summary."""
        return "\n".join([self.summary(), *(finding.line() for finding in self.findings)])

    def __repr__(self):
        return "\n".join([self.summary(), *(f.line() for f in self.findings if f.level != "ok")])

    def _repr_html_(self):
        rest = "\n".join(finding.line() for finding in self.findings)
        return (
            f"<pre>{html.escape(repr(self))}</pre><details><summary>all findings</summary>"
            f"<pre>{html.escape(rest)}</pre></details>"
        )


def doctor() -> Report:
    """Examine this machine; in a cell the result shows itself.

    Example:
        >>> dtlab.doctor()                                          # doctest: +SKIP
        dtlab doctor: all well (2 cores, 23.1 GiB free of 23.5 (room for 165 ranks), no GPU: ranks use gloo on the CPU)
    """
    return Report(check() for check in _CHECKS)


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def system_finding() -> Finding:
    """Which system this is: ranks need Linux, WSL2 or (not tried) macOS."""
    system, release, processor = platform.system(), platform.release(), platform.machine()
    text = f"{system} {release}, {processor}"
    if system == "Windows":
        cure = "install WSL2 (wsl --install), open Ubuntu there, clone and run make lab in it"
        cure = f"ranks need Linux's processes: {cure}; until then the lessons can be read"
        return Finding("system", "problem", text, cure)
    if system == "Darwin" and processor == "x86_64":
        cure = "PyTorch 2.6 and newer has no Intel macOS build: use a Linux machine or Colab"
        return Finding("system", "problem", text, cure)
    if system == "Darwin":
        cure = "not tried on macOS: each launch takes some 10 s, and so does replacing a rank that died"
        return Finding("system", "note", text, cure)
    return Finding("system", "ok", text + (", WSL2" if "microsoft" in release.lower() else ""))


def _python() -> Finding:
    return Finding("python", "ok", f"{platform.python_version()} ({sys.prefix})")


def _installed(name, packages, cure):
    """The versions of packages; a problem if one is missing."""
    found = {package: _version(package) for package in packages}
    missing = [package for package, version in found.items() if version is None]
    if missing:
        return Finding(name, "problem", f"not installed: {', '.join(missing)}", cure.format(" ".join(missing)))
    return Finding(name, "ok", ", ".join(f"{package} {version}" for package, version in found.items()))


def _packages() -> Finding:
    names = ("torch", "numpy", "pandas", "cloudpickle", "psutil", "matplotlib")
    return _installed("packages", names, "make lab (or python3 -m dtlab lab)")


def _widgets() -> Finding:
    if (_version("ipywidgets") or "8").startswith("7."):
        return Finding("widgets", "problem", "ipywidgets 7 is too old", 'pip install "ipywidgets>=8.1"')
    names = ("jupyterlab", "ipywidgets", "jupyterlab-widgets", "ipykernel")
    cure = "questions and sliders will show as text: {} -m pip install {{}}, then reload the page"
    return _installed("widgets", names, cure.format(Path(sys.executable).name))


def _numpy_bridge() -> Finding:
    """A tensor to numpy: fails when torch was built for numpy 1 and numpy 2 is installed."""
    name = "tensor.numpy()"
    if importlib.util.find_spec("torch") is None:
        return Finding(name, "note", "not tried, torch is not installed")
    import torch

    try:
        torch.arange(3).numpy()
    except (RuntimeError, ImportError, TypeError) as error:
        text = str(error).partition("\n")[0]
        return Finding(name, "problem", text, 'this torch needs an older numpy: pip install "numpy<2"')
    return Finding(name, "ok", "works")


def _cores() -> Finding:
    usable, there, quota = machine.usable_cores(), os.cpu_count() or 1, machine.cgroup_cores()
    text = f"{usable} core{'s' if usable > 1 else ''}"
    if usable < there:
        text += f" usable of {there} ({f'a cgroup quota of {quota:g}' if quota else 'the CPU affinity'})"
    return Finding("cores", "ok", text)


def _memory() -> Finding:
    total, available, limit = machine.memory_bytes()
    if not total:
        return Finding("memory", "note", "memory not known here")
    ranks = machine.max_ranks(available)
    text = f"{available / _GIB:.1f} GiB free of {total / _GIB:.1f} (room for {ranks} rank{'s' if ranks > 1 else ''})"
    if limit == total:
        text += ", cgroup limit"
    if ranks < 4:
        cure = "the lessons start 4 ranks of about 150 MB: close programs, raise the container's limit, or set "
        return Finding("memory", "problem", text, f"{cure}WORLD_SIZE = {min(ranks, 2)} in the import cell")
    return Finding("memory", "ok", text)


def _shared_memory() -> Finding:
    """Ranks do not use /dev/shm; the workers of a DataLoader do."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:  # macOS, Windows
        return Finding("/dev/shm", "ok", "not there, and ranks do not need it")
    text = f"{usage.free / _MIB:.0f} MiB free of {usage.total / _MIB:.0f}"
    if usage.free < 256 * _MIB:
        text += ": ranks do not need it, the workers of a torch DataLoader do"
        cure = "docker run --shm-size=1g (Kubernetes: an emptyDir with medium Memory on /dev/shm)"
        return Finding("/dev/shm", "note", text, cure)
    return Finding("/dev/shm", "ok", text)


def _loopback() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=2).close()
    except OSError as error:
        cure = "ranks talk over it: sudo ip link set lo up, or let the firewall pass loopback"
        return Finding("loopback", "problem", f"127.0.0.1 does not answer ({error})", cure)
    return Finding("loopback", "ok", "127.0.0.1 answers")


def _gpus() -> Finding:
    names, version = machine.gpu_names(), _version("torch") or ""
    if not names:
        return Finding("gpus", "ok", "no GPU: ranks use gloo on the CPU")
    text = f"{len(names)} GPU{'s' if len(names) > 1 else ''} ({names[0]})"
    if version.endswith("+cpu"):
        text += f", torch {version} cannot use it"
        return Finding("gpus", "note", text, "pip install torch from pip's own index")
    if len(names) < 4:
        cure = 'launch(4, device="cuda", share_gpu=True) puts several ranks on one GPU'
        return Finding("gpus", "note", f"{text}: fewer than 4, so 4 ranks use gloo on the CPU", cure)
    return Finding("gpus", "ok", text)


def openmp_runtimes(maps="/proc/self/maps") -> "list[str]":
    """OpenMP runtimes loaded into this process, by file name. Empty where the system does not tell (macOS, Windows)."""
    try:
        text = Path(maps).read_text()
    except OSError:
        return []
    return sorted(set(re.findall(r"/(lib(?:gomp|omp|iomp5)\b[^/\s]*)$", text, re.MULTILINE)))


def _openmp() -> Finding:
    loaded = openmp_runtimes()
    text = ", ".join(loaded) or "none loaded"
    if len(loaded) > 1:
        text = f"two runtimes in this process ({text}): work can hang at 0 % CPU"
        cure = "install torch and numpy from one source (all by pip or all by conda) in a new environment"
        return Finding("openmp", "note", text, f"{cure}; never set KMP_DUPLICATE_LIB_OK")
    return Finding("openmp", "ok", text)


_CHECKS = (
    system_finding, _python, _packages, _numpy_bridge, _cores, _memory, _shared_memory, _loopback, _gpus, _widgets,
    _openmp,
)  # fmt: skip
