"""Every finding of the doctor: what it says when all is well, and the cure when it is not."""

import os
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
    assert report["tensor.numpy()"].text == "round trip works"
    assert all(finding.cure for finding in report.problems)


def test_windows_is_told_about_wsl2():
    assert "Windows" in needs(examine.system_finding("Windows", "11"), "install WSL2")


def test_wsl2_is_linux():
    assert examine.system_finding("Linux", "5.15.0-microsoft-standard-WSL2").text.endswith("WSL2")


@pytest.mark.parametrize("processor, level, cure", [
    ("arm64", "note", "each launch takes some 10 s"), ("x86_64", "problem", "Colab"),
])  # fmt: skip
def test_macos_differs_by_processor(monkeypatch, processor, level, cure):
    monkeypatch.setattr(examine.platform, "machine", lambda: processor)
    needs(examine.system_finding("Darwin", "25.1"), cure, level)


def test_an_old_python_is_a_problem():
    needs(examine._python((3, 9, 1)), "PYTHON=python3.12")


def test_missing_packages_are_named():
    text = needs(examine._packages(lambda name: None if name == "torch" else "1"), "make lab")
    assert text == "not installed: torch"


def test_numpy_2_with_an_old_torch_is_cured_by_an_older_numpy():
    def convert():
        raise RuntimeError("Numpy is not available\nmore")

    assert needs(examine._numpy_bridge(convert), 'pip install "numpy<2"') == "Numpy is not available"
    assert examine._numpy_bridge(lambda: [0, 0, 0]).level == "problem"


def test_cores_cut_by_a_quota_or_affinity_are_explained():
    assert examine._cores(2, 64, 1.5).text == "2 cores usable of 64 (a cgroup quota of 1.5)"
    assert examine._cores(1, 1).text == "1 core"


def test_little_memory_says_how_many_ranks_fit():
    text = needs(examine._memory(int(0.4 * GIB), GIB, GIB), "WORLD_SIZE = 2")
    assert "room for 2 ranks" in text and text.endswith("cgroup limit")
    assert examine._memory(2 * GIB, 2 * GIB, 2 * GIB).level == "ok"


def test_memory_that_no_system_call_tells_is_no_problem(monkeypatch):
    assert examine._memory(0, 0) == Finding("memory", "note", "memory not known here")


def test_a_small_shared_memory_is_a_note_for_dataloaders_since_ranks_do_not_use_it():
    text = needs(examine._shared_memory((64 << 20, 60 << 20)), "--shm-size=1g", "note")
    assert text.startswith("60 MiB free of 64") and "DataLoader" in text
    assert examine._shared_memory((GIB, GIB)).level == "ok"


def test_no_shared_memory_is_no_finding(monkeypatch):
    monkeypatch.setattr(machine, "shared_memory_bytes", lambda: None)
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


def test_a_dead_loopback_is_a_problem():
    def refuse():
        raise OSError(99, "Cannot assign requested address")

    assert "Cannot assign" in needs(examine._loopback(refuse), "ip link set lo up")
    assert examine._loopback().level == "ok"


def test_a_host_name_without_address_is_only_a_note():
    def unknown(name):
        raise socket.gaierror(-2, "Name or service not known")

    needs(examine._host_name(unknown, "bogus"), "127.0.0.1 bogus", "note")


@pytest.mark.parametrize("name", ["utun9", "lo"])
def test_a_preset_gloo_interface_is_a_note_since_ranks_use_loopback(name):
    text = needs(examine._interface({"GLOO_SOCKET_IFNAME": name}), "", "note")
    assert name in text and "torchrun only" in text and "loopback" in text
    assert examine._interface({}).level == "ok"


def test_gpus_and_what_ranks_do_with_them(monkeypatch):
    monkeypatch.setattr(examine, "_version", lambda name: "2.13.0+cpu")
    needs(examine._gpus(["H200"]), "pip install torch", "note")
    monkeypatch.setattr(examine, "_version", lambda name: "2.13.0")
    needs(examine._gpus(["T4"]), "share_gpu=True", "note")
    assert examine._gpus(["H200"] * 4).text == "4 GPUs (H200)"
    assert examine._gpus([]).text == "no GPU: ranks use gloo on the CPU"


def test_missing_and_old_widget_packages_are_problems():
    text = needs(examine._widgets(lambda name: None if name == "ipywidgets" else "8.1.0"), "pip install ipywidgets")
    assert "ipywidgets" in text
    needs(examine._widgets(lambda name: "7.7.1"), "ipywidgets>=8.1")


def test_two_openmp_runtimes_warn_and_one_does_not(tmp_path):
    line = "7f00-7f01 r-xp 0 08:01 1 /site-packages/"
    maps = tmp_path / "maps"
    maps.write_text(f"{line}torch/lib/libgomp-a34b3233.so.1\n{line}numpy.libs/libopenblas.so\n7f02 rw-p 0 00:00 0\n")
    assert examine.openmp_runtimes(maps) == ["libgomp-a34b3233.so.1"]
    maps.write_text(maps.read_text() + f"{line}intel/libiomp5.so\n")
    needs(examine._openmp(examine.openmp_runtimes(maps)), "from one source", "note")
    assert examine._openmp(["libgomp.so.1"]).level == "ok"


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
