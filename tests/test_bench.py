"""The benchmark's table, goals and processes. No figure is tested: performance never gates a test."""
import importlib.util
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import bench, registry, run, table  # noqa: E402
from benchmarks.drivers import work  # noqa: E402


def a_row(unit="s", **peers):
    return registry.Row("name", "what it is", unit, peers, lambda bench, peers: {})


def cells(row, peer, samples, missing=None):
    return dict(zip(table.HEAD, table.line(row, peer, samples, missing)))


@pytest.mark.parametrize(
    ("samples", "unit", "shown"),
    [
        ([0.5, 0.1, 12.25], "s", "0.5 s [0.1-12.2]"),
        ([0.0123456], "s", "12.3 ms [12.3-12.3]"),
        ([0.09, 4.2, 0.08], "s", "90 ms [80-4200]"),
        ([123456789.0], "s", "123456789 s [123456789-123456789]"),
        ([3 * 2**20, 2**20], "MiB", "2 MiB [1-3]"),
    ],
)
def test_a_figure_is_the_median_with_its_range(samples, unit, shown):
    assert table.figure(samples, unit) == shown


@pytest.mark.parametrize(
    ("reach", "ours", "peers", "ratio", "met"),
    [
        (registry.times_faster(5), [2, 1, 3], [10, 9, 50], "5x", "yes"),
        (registry.times_faster(5), [1], [4.9], "4.9x", "no"),
        (registry.at_most(1 / 3), [1], [4], "0.25x", "yes"),
        (registry.at_most(1.1), [1.2], [1], "1.2x", "no"),
        (registry.at_least(0.8), [8], [10], "0.8x", "yes"),
        (registry.at_least(0.8), [7], [10], "0.7x", "no"),
        (registry.within(25), [0.9], [1], "-10 %", "yes"),
        (registry.within(25), [1.5], [1], "50 %", "no"),
        (None, [1], [4], "4x", "-"),
    ],
)
def test_a_goal_is_held_against_the_medians(reach, ours, peers, ratio, met):
    found = cells(a_row(peer=reach), "peer", {"dtlab": ours, "peer": peers})
    assert (found["ratio"], found["met"], found["reach"]) == (ratio, met, reach.text if reach else "-")


def test_a_peer_without_a_goal_is_compared_as_the_rows_other_peers():
    row = a_row(one=registry.at_most(0.5), other=None)
    assert cells(row, "other", {"dtlab": [1], "other": [4]})["ratio"] == "0.25x"


def test_a_missing_peer_is_named_with_its_cure():
    found = cells(a_row(ipyparallel=registry.times_faster(4)), "ipyparallel", {"dtlab": [1.0]}, "ipyparallel")
    assert found["peer's"] == "peer not installed: pip install ipyparallel"
    assert (found["dtlab"], found["met"]) == ("1 s [1-1]", "-")


@pytest.mark.parametrize("samples", [{}, {"dtlab": [1.0], "peer": []}, {"dtlab": [], "peer": [1.0]}])
def test_what_broke_is_not_measured_and_not_met(samples):
    found = cells(a_row(peer=registry.times_faster(4)), "peer", samples)
    assert (found["peer's"], found["met"]) == ("not measured", "-")


def test_the_table_says_each_row_once():
    row = a_row(one=registry.times_faster(2), other=None)
    samples = {"dtlab": [1], "one": [4], "other": [1]}
    head, rule, first, second = table.text([table.line(row, peer, samples) for peer in row.peers]).splitlines()
    assert first.startswith("what it is") and second.startswith(" " * len("what it is"))
    assert first.index(">= 2x faster") == head.index("reach")
    assert set(rule) == {"-", " "}


def test_every_figure_of_the_ranks_has_a_row_with_its_goal():
    goals = {name: [r.text for r in row.peers.values() if r] for name, row in registry.ROWS.items()}
    assert goals["warm_start"] == [">= 50x faster", ">= 50x faster"]
    assert goals["cold_start"] == [">= 4x faster", ">= 2x faster"]
    assert goals["empty_cell"] == goals["tensor_back"] == [">= 5x faster"]
    assert goals["memory"] == ["<= 1/3"]
    assert "first_ddp" in goals


def test_a_lesson_adds_a_row(monkeypatch):
    monkeypatch.setattr(registry, "ROWS", {})

    @registry.row("ring all-reduce", "s", {"gloo": registry.at_least(0.8)})
    def ring(bench, peers):
        return {"dtlab": [2.0], **{peer: [2.0] for peer in peers}}

    assert run.chosen_rows(["ring"]) == [registry.ROWS["ring"]]
    assert run.measure(registry.ROWS["ring"], None)[0][-1] == "yes"


def test_a_missing_package_is_not_measured(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    asked = []
    peers = {"ipyparallel": None, "torchrun": None, "Megatron-core": None}
    lines = run.measure(registry.Row("name", "what", "s", peers, lambda _, there: asked.extend(there) or {}), None)
    assert asked == ["torchrun"]
    assert "pip install ipyparallel" in lines[0][3] and "install" not in lines[1][3]
    assert lines[2][3].endswith("pip install megatron-core")


def test_an_unknown_row_is_answered_with_those_there_are():
    with pytest.raises(SystemExit, match="no row is called warm; there are .*cold_start"):
        run.chosen_rows(["warm"])


def test_conditions_are_stated():
    assert all(word in run.conditions() for word in ("Python", "torch", "ipyparallel", "cores", "load", "4 ranks"))


def test_everybody_is_first_in_some_round():
    assert [bench._rotated("abc", by)[0] for by in range(4)] == ["a", "b", "c", "a"]
    assert bench._rotated([], 1) == []


def a_driver(monkeypatch, tmp_path, engine, text):
    program = tmp_path / f"{engine}.py"
    program.write_text(text)
    monkeypatch.setitem(bench._DRIVERS, engine, [str(program)])


def test_a_broken_engine_does_not_stop_the_others(monkeypatch, tmp_path):
    a_driver(monkeypatch, tmp_path, "broken", "raise ValueError('boom')")
    text = "import talk; talk.say(value=True); talk.serve(ask=lambda times: [1.0] * times)"
    a_driver(monkeypatch, tmp_path, "good", text)
    with bench.Bench() as engines:
        samples = engines.in_turn({"a": ("broken", "ask"), "b": ("good", "ask")}, rounds=2, times=3)
    assert samples == {"a": [], "b": [1.0] * 6}
    assert engines.broken == {"broken": "broken ended: ValueError: boom"}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_outlives_the_benchmark(monkeypatch, tmp_path):
    leave = """import subprocess, sys, talk
code = "print(flush=True); import time; time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
child.stdout.readline()
talk.say(value=True)
talk.serve()"""
    a_driver(monkeypatch, tmp_path, "untidy", leave)
    with bench.Bench() as engines:
        engines.driver("untidy")
        assert len(work.pids_started(engines.mark)) == 2
    assert work.pids_started(engines.mark) == []


@pytest.mark.ranks
def test_the_benchmark_measures_dtlab_without_peers():
    with bench.Bench(quick=True) as engines:
        for name in ("empty_cell", "warm_start"):
            samples = registry.ROWS[name].measure(engines, [])
            assert list(samples) == ["dtlab"] and all(0 < seconds < 60 for seconds in samples["dtlab"])
    assert engines.broken == {}
    assert work.pids_started(engines.mark) == []
