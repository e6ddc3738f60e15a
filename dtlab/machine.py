"""What this machine offers: usable cores, free memory, shared memory, GPUs. Standard library only, no torch.

In a container ``os.cpu_count()`` and /proc/meminfo show the host. What counts is the smallest of affinity, cgroup limit
and host. Functions take the roots they read (``proc``, ``cgroup``), so that tests can hand them made-up machines.
"""

import math
import os
import subprocess
from pathlib import Path

BYTES_PER_RANK = 150 * 10**6  # private memory of one rank, with room for a small model (measured: 75 to 150 MB)
_HUGE = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63


def _read(path):
    """Text of a small kernel file, or None if it is not there."""
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _number(path):
    """Integer in a kernel file; None if missing, ``max``, or so large that it means no limit."""
    text = _read(path) or ""
    return int(text) if text.isdigit() and int(text) < _HUGE else None


def _cgroup_dirs(controller, proc, cgroup):
    """Folders that may limit this process, innermost first: its own cgroup and every parent of it (v2, then v1)."""
    dirs = []
    for line in (_read(Path(proc, "self/cgroup")) or "").splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        roots = [Path(cgroup, names), Path(cgroup, controller)] if names else [Path(cgroup), Path(cgroup, "unified")]
        parts = [part for part in path.split("/") if part and part != ".."]
        for root in roots:
            dirs += [root.joinpath(*parts[:n]) for n in range(len(parts), -1, -1)]
    return [d for d in dict.fromkeys(dirs) if d.is_dir()]


def cgroup_cores(*, proc="/proc", cgroup="/sys/fs/cgroup"):
    """Cores that the tightest cgroup quota allows, for example 1.5, or None without a limit."""
    limits = []
    for folder in _cgroup_dirs("cpu", proc, cgroup):
        quota, _, period = (_read(folder / "cpu.max") or "").partition(" ")  # v2: "150000 100000" or "max 100000"
        if not quota:  # v1: a quota of -1 means no limit
            quota, period = _read(folder / "cpu.cfs_quota_us") or "", _read(folder / "cpu.cfs_period_us") or ""
        if quota.isdigit() and period.isdigit() and int(period):
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def usable_cores(*, proc="/proc", cgroup="/sys/fs/cgroup") -> int:
    """Cores this process can really use: affinity, rounded-up cgroup quota, whichever is smaller (count, >= 1)."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS, Windows
        cores = os.cpu_count() or 1
    quota = cgroup_cores(proc=proc, cgroup=cgroup)
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def _cgroup_memory(proc, cgroup):
    """``(limit, free)`` bytes of the tightest memory cgroup, or None. File cache counts as free: it can be dropped."""
    found = []
    for folder in _cgroup_dirs("memory", proc, cgroup):
        limit = next((n for name in ("memory.max", "memory.limit_in_bytes") if (n := _number(folder / name))), None)
        if limit is None:
            continue
        used = next((n for name in ("memory.current", "memory.usage_in_bytes") if (n := _number(folder / name))), 0)
        stat = dict(line.split()[:2] for line in (_read(folder / "memory.stat") or "").splitlines() if " " in line)
        cache = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
        found.append((limit, max(0, limit - max(0, used - cache))))
    return min(found, key=lambda pair: pair[1], default=None)


def _host_memory(proc):
    """``(total, available)`` bytes of the whole machine; ``(0, 0)`` where it cannot be known."""
    lines = (line.split() for line in (_read(Path(proc, "meminfo")) or "").splitlines())
    info = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 1 and words[1].isdigit()}
    if "MemTotal" in info:
        return info["MemTotal"], info.get("MemAvailable", info["MemTotal"])
    try:  # no Linux
        import psutil

        memory = psutil.virtual_memory()
        return memory.total, memory.available
    except (ImportError, OSError):
        return 0, 0


def memory_bytes(*, proc="/proc", cgroup="/sys/fs/cgroup"):
    """``(total, available, limit)``: what this process may ever use, what it can take now, the cgroup's limit or None.

    In bytes, 0 if unknown. Available is MemAvailable, or what the cgroup has left if that is less.
    """
    total, available = _host_memory(proc)
    found = _cgroup_memory(proc, cgroup)
    if found is None:
        return total, available, None
    limit, free = found
    return min(total, limit), min(available, free), limit


def memory_available_bytes() -> int:
    """Memory that can be taken now without swapping (bytes; 0 unknown)."""
    return memory_bytes()[1]


def max_ranks(available_bytes=None) -> int:
    """Ranks that fit in the free memory, at about 150 MB each (count, >= 1: one rank works everywhere)."""
    available = memory_available_bytes() if available_bytes is None else available_bytes
    return max(1, available // BYTES_PER_RANK)


def gpu_names() -> "list[str]":
    """Names of the NVIDIA GPUs this process may use: those of the driver, less what CUDA_VISIBLE_DEVICES hides.

    The driver's own tool is asked, so that CUDA is not initialised in this process.
    """
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        reply = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    names = [line.strip() for line in reply.stdout.splitlines() if line.strip()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return names
    listed = [part.strip() for part in visible.split(",") if part.strip()]
    usable = listed[: listed.index("-1")] if "-1" in listed else listed  # CUDA stops at the first bad one
    return names[: len(usable)]
