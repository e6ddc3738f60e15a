"""``dtlab.doctor()``: what this machine can do for the course and what will go wrong, each with its cure.

A finding is ``ok``, ``note`` (good to know) or ``problem`` (something will fail). torch is imported only if there.
"""

import html
import importlib.metadata
import importlib.util
import os
import platform
import re
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


def _ok(name, text):
    return Finding(name, "ok", text)


def _note(name, text, cure=""):
    return Finding(name, "note", text, cure)


def _problem(name, text, cure):
    return Finding(name, "problem", text, cure)


def system_finding(system=None, release=None) -> Finding:
    """Which system this is: ranks need Linux, WSL2 or (not tried) macOS."""
    system, release = system or platform.system(), release or platform.release()
    text = f"{system} {release}, {platform.machine()}"
    if system == "Windows":
        cure = "install WSL2 (wsl --install), open Ubuntu there, clone and run make lab in it"
        return _problem("system", text, f"ranks need Linux's processes: {cure}; until then the lessons can be read")
    if system == "Darwin" and platform.machine() == "x86_64":
        return _problem("system", text, "PyTorch 2.6 and newer has no Intel macOS build: use a Linux machine or Colab")
    if system == "Darwin":
        cure = "each launch takes some 10 s, and so does replacing a rank that died"
        return _note("system", text, f"not tried on macOS: ranks start by spawn, so {cure}")
    return _ok("system", text + (", WSL2" if "microsoft" in release.lower() else ""))


def _python(version=None) -> Finding:
    version = version or sys.version_info
    text = ".".join(map(str, version[:3]))
    if tuple(version[:2]) < (3, 10):
        return _problem("python", text, "dtlab needs Python 3.10 or newer: make lab PYTHON=python3.12")
    return _ok("python", f"{text} ({sys.prefix})")


def _packages(version=_version) -> Finding:
    found = {name: version(name) for name in ("torch", "numpy", "pandas", "cloudpickle", "psutil", "matplotlib")}
    missing = [name for name, number in found.items() if number is None]
    if missing:
        return _problem("packages", f"not installed: {', '.join(missing)}", "make lab (or python3 -m dtlab lab)")
    return _ok("packages", ", ".join(f"{name} {number}" for name, number in found.items()))


def _numpy_bridge(convert=None) -> Finding:
    """A tensor to numpy and back: fails when torch was built for numpy 1 and numpy 2 is installed."""
    name, cure = "tensor.numpy()", 'this torch needs an older numpy: pip install "numpy<2"'
    if convert is None:
        if importlib.util.find_spec("torch") is None:
            return _note(name, "not tried, torch is not installed")
        import torch

        def convert():
            return torch.from_numpy(torch.arange(3).numpy()).tolist()

    try:
        return _ok(name, "round trip works") if convert() == [0, 1, 2] else _problem(name, "wrong values", cure)
    except (RuntimeError, ImportError, TypeError) as error:
        return _problem(name, (str(error).splitlines() or [""])[0], cure)


def _cores(usable=None, installed=None, quota=None) -> Finding:
    usable = usable or machine.usable_cores()
    installed, quota = installed or os.cpu_count() or usable, quota or machine.cgroup_cores()
    text = f"{usable} core{'s' if usable > 1 else ''}"
    if usable < installed:
        why = f"a cgroup quota of {quota:g}" if quota else "the CPU affinity"
        return _ok("cores", f"{text} usable of {installed} ({why})")
    return _ok("cores", text)


def _memory(available=None, total=None, limit=None) -> Finding:
    available = machine.memory_available_bytes() if available is None else available
    total = machine.memory_total_bytes() if total is None else total
    if not total:
        return _note("memory", "memory not known here")
    limit, ranks = limit or machine.memory_limit_bytes(), machine.max_ranks(available)
    text = f"{available / _GIB:.1f} GiB free of {total / _GIB:.1f} (room for {ranks} rank{'s' if ranks > 1 else ''})"
    if limit and limit <= total:
        text += ", cgroup limit"
    if ranks < 4:
        cure = f"raise the container's limit, or set WORLD_SIZE = {min(ranks, 2)} in the import cell"
        return _problem("memory", text, f"the lessons start 4 ranks of about 150 MB: close programs, {cure}")
    return _ok("memory", text)


def _shared_memory(size=None) -> Finding:
    """Ranks do not use /dev/shm; the workers of a DataLoader do."""
    size = size or machine.shared_memory_bytes()
    if size is None:
        return _ok("/dev/shm", "not there, and ranks do not need it")
    total, free = size
    text = f"{free / _MIB:.0f} MiB free of {total / _MIB:.0f}"
    if free < 256 * _MIB:
        cure = "docker run --shm-size=1g (Kubernetes: an emptyDir with medium Memory on /dev/shm)"
        return _note("/dev/shm", f"{text}: ranks do not need it, the workers of a torch DataLoader do", cure)
    return _ok("/dev/shm", text)


def _loopback(connect=None) -> Finding:
    try:
        (connect or _connect_to_self)()
        return _ok("loopback", "127.0.0.1 answers")
    except OSError as error:
        cure = "ranks talk over it: sudo ip link set lo up, or let the firewall pass loopback"
        return _problem("loopback", f"127.0.0.1 does not answer ({error})", cure)


def _connect_to_self():
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=2).close()


def _host_name(resolve=socket.gethostbyname, name=None) -> Finding:
    name = name or socket.gethostname()
    try:
        return _ok("host name", f"{name} is {resolve(name)}")
    except OSError:
        text = f"{name} has no address; dtlab's ranks use loopback and do not mind"
        return _note("host name", text, f"for torchrun add to /etc/hosts: 127.0.0.1 {name}")


def _interface(env=None) -> Finding:
    name = (os.environ if env is None else env).get("GLOO_SOCKET_IFNAME")
    if name:
        return _note("GLOO_SOCKET_IFNAME", f"is {name}: for torchrun only, dtlab's ranks use loopback")
    return _ok("GLOO_SOCKET_IFNAME", "not set")


def _gpus(names=None) -> Finding:
    names = machine.gpu_names()[: machine.gpu_count()] if names is None else names
    if not names:
        return _ok("gpus", "no GPU: ranks use gloo on the CPU")
    text = f"{len(names)} GPU{'s' if len(names) > 1 else ''} ({names[0]})"
    version = _version("torch") or ""
    if version.endswith("+cpu"):
        return _note("gpus", f"{text}, torch {version} cannot use it", "pip install torch from pip's own index")
    if len(names) < 4:
        cure = 'launch(4, device="cuda", share_gpu=True) puts several ranks on one GPU'
        return _note("gpus", f"{text}: fewer than 4, so 4 ranks use gloo on the CPU", cure)
    return _ok("gpus", text)


def _widgets(version=_version) -> Finding:
    found = {name: version(name) for name in ("jupyterlab", "ipywidgets", "jupyterlab-widgets", "ipykernel")}
    missing = [name for name, number in found.items() if number is None]
    if missing:
        text = f"not installed: {', '.join(missing)}; questions and sliders will show as text"
        cure = f"{Path(sys.executable).name} -m pip install {' '.join(missing)}, then reload the page"
        return _problem("widgets", text, cure)
    if int(found["ipywidgets"].split(".")[0]) < 8:
        return _problem("widgets", f"ipywidgets {found['ipywidgets']} is too old", 'pip install "ipywidgets>=8.1"')
    return _ok("widgets", ", ".join(f"{name} {number}" for name, number in found.items()))


def openmp_runtimes(maps="/proc/self/maps") -> "list[str]":
    """OpenMP runtimes loaded into this process, by file name. Empty where the system does not tell (macOS, Windows)."""
    try:
        text = Path(maps).read_text()
    except OSError:
        return []
    names = {os.path.basename(line.split()[-1]) for line in text.splitlines() if "/" in line}
    return sorted(name for name in names if re.match(r"lib(gomp|omp|iomp5)\b|libgomp-", name))


def _openmp(loaded=None) -> Finding:
    loaded = openmp_runtimes() if loaded is None else loaded
    text = ", ".join(loaded) or "none loaded"
    if len(loaded) > 1:
        cure = "install torch and numpy from one source (all by pip or all by conda) in a new environment"
        text = f"two runtimes in this process ({text}): work can hang at 0 % CPU"
        return _note("openmp", text, f"{cure}; never set KMP_DUPLICATE_LIB_OK")
    return _ok("openmp", text)


_CHECKS = (
    system_finding, _python, _packages, _numpy_bridge, _cores, _memory, _shared_memory, _loopback, _host_name,
    _interface, _gpus, _widgets, _openmp,
)  # fmt: skip
