"""Every finding of the doctor: what it says when all is well, and the cure when it is not."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import dtlab
from dtlab import examine, machine
from dtlab.examine import Finding, Report

GIB = 2**30


def needs(finding, cure, level="problem"):
    """The finding has this level and its cure says this."""
    assert finding.level == level and cure in finding.cure, finding
    return finding.text


def test_doctor_in_a_cell_is_one_line_when_all_is_well():
    texts = {"cores": "2 cores", "memory": "8 GiB", "gpus": "no GPU"}
    report = Report(Finding(name, "ok", text) for name, text in texts.items())
    assert repr(report) == "dtlab doctor: all well (2 cores, 8 GiB, no GPU)"
    assert len(report.full().splitlines()) == 4


def test_doctor_in_a_cell_shows_problems_and_notes_with_their_cure():
    bad = [Finding("memory", "problem", "0.1 GiB", "buy some"), Finding("openmp", "note", "two", "one source")]
    text = repr(Report([Finding("cores", "ok", "2 cores"), *bad, Finding("gpus", "ok", "no GPU")]))
    assert text.splitlines()[0].startswith("dtlab doctor: 1 problem (")
    assert "memory: 0.1 GiB -> buy some" in text and "openmp: two -> one source" in text and "cores:" not in text


def test_the_page_shows_the_rest_folded_and_escaped():
    findings = [Finding(name, "ok", "<b>") for name in ("cores", "memory", "gpus")]
    page = Report(findings)._repr_html_()
    assert "<details>" in page and "<b>" not in page and "&lt;b&gt;" in page


def test_this_machine_is_examined_in_a_few_seconds_and_has_every_finding():
    report = dtlab.doctor()
    names = [finding.name for finding in report.findings]
    assert len(names) == len(set(names)) == len(examine._CHECKS)
    assert report["cores"].text.startswith(f"{machine.usable_cores()} core")
    assert report["tensor.numpy()"].text == "works"
    assert all(finding.cure for finding in report.problems)


def on(monkeypatch, system, release, processor="x86_64"):
    """What the doctor says of this system."""
    for name, answer in (("system", system), ("release", release), ("machine", processor)):
        monkeypatch.setattr(examine.platform, name, lambda answer=answer: answer)
    return examine.system_finding()


def test_windows_is_told_about_wsl2(monkeypatch):
    assert "Windows" in needs(on(monkeypatch, "Windows", "11"), "install WSL2")


def test_wsl2_is_linux(monkeypatch):
    assert on(monkeypatch, "Linux", "5.15.0-microsoft-standard-WSL2").text.endswith("WSL2")


@pytest.mark.parametrize("processor, level, cure", [
    ("arm64", "note", "each launch takes some 10 s"), ("x86_64", "problem", "Colab"),
])  # fmt: skip
def test_macos_differs_by_processor(monkeypatch, processor, level, cure):
    needs(on(monkeypatch, "Darwin", "25.1", processor), cure, level)


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(examine, "_version", lambda name: None if name == "torch" else "1")
    assert needs(examine._packages(), "make lab") == "not installed: torch"


@pytest.mark.filterwarnings("ignore")
def test_numpy_2_with_an_old_torch_is_cured_by_an_older_numpy(monkeypatch):
    import torch

    def convert(tensor):
        raise RuntimeError("Numpy is not available\nmore")

    monkeypatch.setattr(torch.Tensor, "numpy", convert)
    assert needs(examine._numpy_bridge(), 'pip install "numpy<2"') == "Numpy is not available"


def test_cores_cut_by_a_quota_or_affinity_are_explained(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(machine, "usable_cores", lambda: 2)
    monkeypatch.setattr(machine, "cgroup_cores", lambda: 1.5)
    assert examine._cores().text == "2 cores usable of 64 (a cgroup quota of 1.5)"
    monkeypatch.setattr(machine, "cgroup_cores", lambda: None)
    assert examine._cores().text == "2 cores usable of 64 (the CPU affinity)"
    monkeypatch.setattr(machine, "usable_cores", lambda: 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert examine._cores().text == "1 core"


def test_little_memory_says_how_many_ranks_fit(monkeypatch):
    monkeypatch.setattr(machine, "memory_bytes", lambda: (GIB, int(0.4 * GIB), GIB))
    text = needs(examine._memory(), "WORLD_SIZE = 2")
    assert "room for 2 ranks" in text and text.endswith("cgroup limit")
    monkeypatch.setattr(machine, "memory_bytes", lambda: (2 * GIB, 2 * GIB, None))
    assert examine._memory().level == "ok" and "limit" not in examine._memory().text


def test_memory_that_no_system_call_tells_is_no_problem(monkeypatch):
    monkeypatch.setattr(machine, "memory_bytes", lambda: (0, 0, None))
    assert examine._memory() == Finding("memory", "note", "memory not known here")


def test_a_small_shared_memory_is_a_note_for_dataloaders_since_ranks_do_not_use_it(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(64 << 20, 4 << 20, 60 << 20))
    text = needs(examine._shared_memory(), "--shm-size=1g", "note")
    assert text.startswith("60 MiB free of 64") and "DataLoader" in text
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(GIB, 0, GIB))
    assert examine._shared_memory().level == "ok"


def test_no_shared_memory_is_no_finding(monkeypatch):
    def absent(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(shutil, "disk_usage", absent)
    assert examine._shared_memory().level == "ok"


@pytest.mark.ranks
def test_ranks_do_not_use_shared_memory():
    """What the doctor says of /dev/shm is so: what ranks share is memory without a file."""
    if not Path("/proc/self/fd").is_dir() or not hasattr(os, "memfd_create"):
        pytest.skip("only Linux tells")
    import torch

    with dtlab.launch(2) as ranks:
        ranks.push(x=torch.ones(1 << 18))
        opened = [os.readlink(link) for pid in ranks.pids.values() for link in Path(f"/proc/{pid}/fd").iterdir()]
    assert any(name.startswith("/memfd:") for name in opened)
    assert not [name for name in opened if name.startswith("/dev/shm/")]


def test_a_dead_loopback_is_a_problem(monkeypatch):
    def refuse(address):
        raise OSError(99, "Cannot assign requested address")

    assert examine._loopback().level == "ok"
    monkeypatch.setattr(socket, "create_server", refuse)
    assert "Cannot assign" in needs(examine._loopback(), "ip link set lo up")


def test_gpus_and_what_ranks_do_with_them(monkeypatch):
    def finding(names, version):
        monkeypatch.setattr(machine, "gpu_names", lambda: names)
        monkeypatch.setattr(examine, "_version", lambda package: version)
        return examine._gpus()

    needs(finding(["H200"], "2.13.0+cpu"), "pip install torch", "note")
    needs(finding(["T4"], "2.13.0"), "share_gpu=True", "note")
    assert finding(["H200"] * 4, "2.13.0").text == "4 GPUs (H200)"
    assert finding([], "2.13.0").text == "no GPU: ranks use gloo on the CPU"


def test_missing_and_old_widget_packages_are_problems(monkeypatch):
    monkeypatch.setattr(examine, "_version", lambda name: None if name == "ipywidgets" else "8.1.0")
    assert "ipywidgets" in needs(examine._widgets(), "pip install ipywidgets")
    monkeypatch.setattr(examine, "_version", lambda name: "7.7.1")
    needs(examine._widgets(), "ipywidgets>=8.1")


def test_two_openmp_runtimes_warn_and_one_does_not(tmp_path, monkeypatch):
    line = "7f00-7f01 r-xp 0 08:01 1 /site-packages/"
    maps = tmp_path / "maps"
    maps.write_text(f"{line}torch/lib/libgomp-a34b3233.so.1\n{line}numpy.libs/libopenblas.so\n7f02 rw-p 0 00:00 0\n")
    assert examine.openmp_runtimes(maps) == ["libgomp-a34b3233.so.1"]
    maps.write_text(maps.read_text() + f"{line}intel/libiomp5.so\n")
    both = examine.openmp_runtimes(maps)
    monkeypatch.setattr(examine, "openmp_runtimes", lambda: both)
    needs(examine._openmp(), "from one source", "note")
    monkeypatch.setattr(examine, "openmp_runtimes", lambda: both[:1])
    assert examine._openmp().level == "ok"


def test_the_doctor_runs_without_torch_and_says_what_to_install():
    code = "import dtlab, sys; report = dtlab.doctor(); print(report.full()); sys.exit('torch' in sys.modules)"
    reply = subprocess.run([sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {sys.path[0]!r}); "
                            f"sys.path.insert(0, {str(examine.Path(dtlab.__file__).parents[1])!r}); {code}"],
                           capture_output=True, text=True, check=False)  # fmt: skip
    assert reply.returncode == 0, reply.stderr
    assert "WILL FAIL  packages: not installed: torch" in reply.stdout and "make lab" in reply.stdout


def test_examining_asks_cuda_nothing(monkeypatch):
    """The first question would initialise CUDA in the kernel; asking is seen also where there is no GPU."""
    import torch

    asked = []
    for name in ("is_available", "device_count", "_lazy_init", "get_device_name", "get_device_properties"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: asked.append(name))
    dtlab.doctor()
    assert asked == [] and not torch.cuda.is_initialized()
