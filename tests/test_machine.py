"""Machine facts on made-up /proc and cgroup trees: the tightest limit counts."""

import os

import pytest

from dtlab import machine

GIB = 2**30


def tree(root, files):
    """Write ``{path: text}`` under ``root`` and return the keyword arguments that point there."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text) + "\n")
    return {"proc": root / "proc", "cgroup": root / "cgroup"}


@pytest.fixture
def eight_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


def test_cores_are_the_affinity_without_a_quota(tmp_path, eight_cores):
    where = tree(tmp_path, {"proc/self/cgroup": "0::/", "cgroup/cpu.max": "max 100000"})
    assert machine.usable_cores(**where) == 8


@pytest.mark.parametrize("quota, cores", [(50_000, 1), (100_000, 1), (150_000, 2), (200_000, 2), (1_600_000, 8)])
def test_a_cgroup_v2_quota_caps_the_cores_rounded_up(tmp_path, eight_cores, quota, cores):
    where = tree(tmp_path, {"proc/self/cgroup": "0::/app", "cgroup/app/cpu.max": f"{quota} 100000"})
    assert machine.usable_cores(**where) == cores


def test_the_quota_of_a_parent_cgroup_counts(tmp_path, eight_cores):
    files = {"proc/self/cgroup": "0::/pod/app", "cgroup/pod/app/cpu.max": "max 100000"}
    files["cgroup/pod/cpu.max"] = "300000 100000"
    assert machine.usable_cores(**tree(tmp_path, files)) == 3


def test_a_cgroup_v1_quota_counts_and_minus_one_means_none(tmp_path, eight_cores):
    files = {"proc/self/cgroup": "4:cpu,cpuacct:/docker/abc", "cgroup/cpu/cpu.cfs_period_us": 100000}
    assert machine.usable_cores(**tree(tmp_path, files | {"cgroup/cpu/cpu.cfs_quota_us": -1})) == 8
    assert machine.usable_cores(**tree(tmp_path, files | {"cgroup/cpu/cpu.cfs_quota_us": 250000})) == 3


def test_affinity_smaller_than_the_quota_wins(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5}, raising=False)
    where = tree(tmp_path, {"proc/self/cgroup": "0::/", "cgroup/cpu.max": "400000 100000"})
    assert machine.usable_cores(**where) == 1


MEMINFO = "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:    8388608 kB"


def test_memory_is_the_hosts_without_a_limit(tmp_path):
    where = tree(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/", "cgroup/memory.max": "max"})
    assert machine.memory_bytes(**where) == (16 * GIB, 8 * GIB, None)


def test_a_memory_limit_counts_and_file_cache_is_free(tmp_path):
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/app",
        "cgroup/app/memory.max": 2 * GIB,
        "cgroup/app/memory.current": 3 * GIB // 2,
        "cgroup/app/memory.stat": f"anon 1\ninactive_file {GIB}",
    }
    where = tree(tmp_path, files)
    assert machine.memory_bytes(**where) == (2 * GIB, 3 * GIB // 2, 2 * GIB)


def test_a_cgroup_v1_memory_limit_counts_and_its_huge_number_means_none(tmp_path):
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "4:memory:/x", "cgroup/memory/memory.usage_in_bytes": GIB}
    where = tree(tmp_path, files | {"cgroup/memory/memory.limit_in_bytes": 9223372036854771712})
    assert machine.memory_bytes(**where) == (16 * GIB, 8 * GIB, None)
    where = tree(tmp_path, files | {"cgroup/memory/memory.limit_in_bytes": 3 * GIB})
    assert machine.memory_bytes(**where) == (3 * GIB, 2 * GIB, 3 * GIB)


def test_without_proc_and_cgroup_affinity_and_physical_memory_count(tmp_path, eight_cores):
    where = tree(tmp_path, {"proc/none": "", "cgroup/none": ""})
    assert machine.usable_cores(**where) == 8
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert machine.memory_bytes(**where)[0] == physical


def test_ranks_by_memory_about_150_mb_each_and_never_less_than_one():
    assert machine.max_ranks(2 * GIB) == 14
    assert machine.max_ranks(0) == 1


def test_this_machine_agrees_with_its_own_proc():
    assert 1 <= machine.usable_cores() <= os.cpu_count()
    assert 0 < machine.memory_available_bytes() <= machine.memory_bytes()[0]


def fake_driver(folder, monkeypatch, text="echo 'NVIDIA H200'; echo 'NVIDIA H200'"):
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{text}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_gpus_are_counted_by_the_driver_and_the_visible_devices(tmp_path, monkeypatch):
    fake_driver(tmp_path, monkeypatch)
    assert machine.gpu_names() == ["NVIDIA H200"] * 2
    for visible, count in (("0", 1), ("", 0), ("-1", 0), ("0,-1,1", 1), ("0,1", 2)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert len(machine.gpu_names()) == count, visible


def test_a_failing_driver_tool_means_no_gpu(tmp_path, monkeypatch):
    fake_driver(tmp_path, monkeypatch, "echo 'NVIDIA-SMI has failed'; exit 9")
    assert machine.gpu_names() == []
