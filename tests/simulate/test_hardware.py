"""Named hardware against numbers worked out by hand."""
import dataclasses
import doctest

import numpy as np
import pytest

from dtlab.errors import ConfigError
from dtlab.simulate import Event, Recording, hardware, replay
from dtlab.simulate.hardware import LINKS, Hardware
from dtlab.theory import GPT_7_5B, Link, collective_time_s, train_flops, transformer_params

CLUSTER = Hardware.preset("64xA100-80GB")


def test_the_cluster_of_the_course():
    assert (CLUSTER.num_devices, CLUSTER.node_size, CLUSTER.memory_bytes) == (64, 8, 80e9)
    assert CLUSTER.peak_flops * CLUSTER.gemm_efficiency == 312e12 / 2
    assert CLUSTER.inside.bandwidth_bytes_per_s == pytest.approx(250e9)
    assert CLUSTER.between.bandwidth_bytes_per_s == 25e9


def test_its_64_devices_train_the_7_5b_model_on_150b_tokens_in_7_8_days():
    flops = train_flops(transformer_params(GPT_7_5B), 150e9)
    days = CLUSTER.compute_s(flops / CLUSTER.num_devices, 0) / 86400
    assert round(float(days), 1) == 7.8
    assert round(float(days) * 64) == 499


@pytest.mark.parametrize("name, flops, memory, bandwidth, inside, between", [
    ("8xV100", 125e12, 32e9, 900e9, 125e9, 12.5e9),
    ("8xA100-40GB", 312e12, 40e9, 1555e9, 250e9, 25e9),
    ("8xA100", 312e12, 80e9, 2039e9, 250e9, 25e9),
    ("8xH100", 989.5e12, 80e9, 3350e9, 375e9, 50e9),
    ("8xH200", 989.5e12, 141e9, 4800e9, 375e9, 50e9),
    ("8xB200", 2250e12, 180e9, 8000e9, 750e9, 50e9),
])  # fmt: skip
def test_presets_have_the_numbers_of_the_data_sheets(name, flops, memory, bandwidth, inside, between):
    machine = Hardware.preset(name)
    assert (machine.peak_flops, machine.memory_bytes) == (flops, memory)
    assert machine.memory_bandwidth_bytes_per_s == bandwidth
    links = [link.bandwidth_bytes_per_s for link in (machine.inside, machine.between)]
    assert links == pytest.approx([inside, between])


def test_every_number_has_a_source():
    table = Hardware.presets()
    assert list(table.index) == ["V100-32GB", "A100-40GB", "A100-80GB", "H100", "H200", "B200"]
    assert all(table[column].str.len().min() > 20 for column in ("source", "inside_source", "between_source"))
    assert table.loc["A100-80GB", "peak_flops"] == 312e12
    assert all(link.source and link.name == name for name, link in LINKS.items())


def test_compute_is_the_longer_of_arithmetic_and_memory_and_its_overhead():
    machine = Hardware.preset("1xA100", op_overhead_s=1e-3, memory_efficiency=0.5)
    flops, moved = np.array([156e12, 156e12, 0.0]), np.array([0.0, 2039e9, 2039e9])
    assert machine.compute_s(flops, moved).tolist() == pytest.approx([1.001, 2.001, 2.001])
    assert machine.compute_s(0, 0) == 1e-3


def test_recorded_cpu_time_counts_only_where_ranks_share_cores():
    """The cores of a calibrated machine are those it was measured on; a GPU has others."""
    laptop = Hardware.preset("4xA100", cores=2, op_overhead_s=0)
    assert laptop.compute_s([156e12, 156e12], [0, 0], [0.25, 0]).tolist() == pytest.approx([0.25, 1])
    assert Hardware.preset("1xA100", op_overhead_s=0).compute_s(156e12, 0, 0.25) == pytest.approx(1)


def four_ranks(op, cpu_s):
    """Each rank is at work for 3 seconds."""
    return Recording({rank: [Event("compute", op, 0, 3, cpu_s=cpu_s)] for rank in range(4)})


def test_four_ranks_on_two_cores_take_turns():
    machine, recording = Hardware.preset("4xA100", cores=4), four_ranks("aten.mm", 3)
    assert replay(recording, machine).step_time_s == pytest.approx(3)
    assert replay(recording, dataclasses.replace(machine, cores=2)).step_time_s == pytest.approx(6)


def test_a_sleep_takes_its_time_and_no_core():
    recording = four_ranks("sleep", 0)
    assert replay(recording, Hardware.preset("4xA100", cores=1)).step_time_s == pytest.approx(3)
    assert replay(recording, Hardware.preset("4xA100")).step_time_s == pytest.approx(3)


def test_work_beside_a_sleep_has_the_core_for_itself():
    events = {0: [Event("compute", "sleep", 0, 5), Event("compute", "aten.mm", 5, 6, cpu_s=1)],
              1: [Event("compute", "aten.mm", 0, 2, cpu_s=2), Event("compute", "aten.mm", 2, 6, cpu_s=4)]}  # fmt: skip
    spent = replay(Recording(events), Hardware.preset("2xA100", cores=1)).boxes
    assert [box.end_s for box in spent if box.lane.rank == 0][-1] == pytest.approx(7)  # from 5 to 7 both want the core
    assert [box.end_s for box in spent if box.lane.rank == 1][-1] == pytest.approx(7)


def test_a_ring_inside_a_node_by_hand():
    machine = Hardware.preset("16xA100", inside=Link("wire", 1e9, 1e-3), between=Link("string", 1e6, 1))
    assert machine.collective_s("all_reduce", 8e9, range(8), "ring") == pytest.approx(14e-3 + 2 * 7 / 8 * 8)
    assert machine.collective_s("all_reduce", 8e9, (3,)) == 0


def test_the_fastest_algorithm_is_taken_unless_one_is_asked_for():
    seconds = [CLUSTER.collective_s("all_reduce", 1e3, range(8), a) for a in ("ring", "tree", "recursive_doubling")]
    assert CLUSTER.collective_s("all_reduce", 1e3, range(8)) == min(seconds) < max(seconds)


def test_ranks_of_one_node_use_its_link_wherever_the_node_is():
    first, last = (CLUSTER.collective_s("all_gather_into_tensor", 1e9, ranks) for ranks in (range(8), range(56, 64)))
    link = CLUSTER.inside
    assert first == last == collective_time_s("all_gather", 1e9, size=8, link=link)
    assert CLUSTER.collective_s("all_gather", 1e9, range(4, 12)) > 2 * first


def test_across_nodes_hierarchical_is_cheaper_than_flat():
    flat = CLUSTER.collective_s("all_reduce", 15e9, range(64), "ring")
    assert CLUSTER.collective_s("all_reduce", 15e9, range(64)) == CLUSTER.collective_s(
        "all_reduce", 15e9, range(64), "hierarchical") < flat / 4  # fmt: skip


def test_one_rank_of_each_node_talks_over_the_network_alone():
    ranks = range(0, 64, 8)
    seconds = collective_time_s("all_reduce", 1e9, size=8, link=CLUSTER.between)
    assert CLUSTER.collective_s("all_reduce", 1e9, ranks) == seconds


def test_uneven_nodes_are_flat():
    assert CLUSTER.collective_s("all_reduce", 1e9, range(12)) == collective_time_s(
        "all_reduce", 1e9, size=12, link=CLUSTER.between)  # fmt: skip
    with pytest.raises(ConfigError, match="hierarchical"):
        CLUSTER.collective_s("all_reduce", 1e9, range(12), "hierarchical")


def test_messages_inside_a_node_and_between_nodes():
    assert CLUSTER.p2p_s(25e9, 0, 7) == pytest.approx(0.1, rel=1e-3)
    assert CLUSTER.p2p_s(25e9, 7, 8) == pytest.approx(1, rel=1e-3)
    assert CLUSTER.p2p_s(0, 7, 8) == CLUSTER.between.latency_s > CLUSTER.inside.latency_s


def test_measured_collectives_come_before_the_formula():
    machine = Hardware.preset("4xA100", measured=(("all_reduce", 4, 1.0, 1e-9),))
    assert machine.collective_s("all_reduce_coalesced", 1e9, range(4)) == 2
    assert machine.collective_s("all_reduce", 1e9, range(4), "ring") < 1
    assert machine.collective_s("all_reduce", 1e9, range(3)) < 1


def test_a_preset_can_be_changed():
    slow = Hardware.preset("8xA100", inside="PCIe 4", node_size=4)
    assert slow.inside.bandwidth_bytes_per_s == pytest.approx(0.8 * 31.5e9) and slow.node_size == 4
    assert dataclasses.replace(slow, cores=2).cores == 2
    assert "PCIe 4 25.2 GB/s" in repr(slow) and "InfiniBand HDR" in repr(slow)


@pytest.mark.parametrize("name, said", [
    ("8xP100", "V100-32GB, A100-40GB, A100-80GB, H100, H200, B200"),
    ("H100", "8xH100"),
    ("0xH100", "at least 1"),
    (8, "no preset 8"),
])  # fmt: skip
def test_an_unknown_preset_is_answered_with_those_there_are(name, said):
    with pytest.raises(ConfigError, match=said):
        Hardware.preset(name)


@pytest.mark.parametrize("changes", [
    {"node_size": 0}, {"num_devices": 2.5}, {"cores": 0}, {"peak_flops": -1}, {"memory_bandwidth_bytes_per_s": 0},
    {"memory_bytes": float("nan")}, {"op_overhead_s": -1e-6}, {"gemm_efficiency": 1.5}, {"inside": "NVLink 9"},
    {"inside": 3e9}, {"bandwidth": 1e9},
])  # fmt: skip
def test_numbers_that_cannot_be_are_refused(changes):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        Hardware.preset("8xH100", **changes)


@pytest.mark.parametrize("call", [
    lambda: CLUSTER.collective_s("all_reduce", 1, range(65)),
    lambda: CLUSTER.p2p_s(1, 0, 64),
])  # fmt: skip
def test_a_rank_without_a_device_is_refused(call):
    with pytest.raises(ConfigError, match=r"rank \(64\) must be below num_devices of 64xA100-80GB \(64\)"):
        call()


@pytest.mark.parametrize("ranks", [[], 4, [0, 0], range(0)])
def test_a_group_that_cannot_be_is_refused(ranks):
    with pytest.raises(ConfigError, match=r"ranks \(.*must be the global ranks of the group, each once"):
        CLUSTER.collective_s("all_reduce", 1, ranks)
    assert CLUSTER.collective_s("all_reduce", 1, iter(range(4))) == CLUSTER.collective_s("all_reduce", 1, range(4))


@pytest.mark.parametrize("num_bytes", [-1, "5", None, float("nan")])
def test_a_message_that_cannot_be_is_refused(num_bytes):
    with pytest.raises(ConfigError, match=r"num_bytes \(.*must be a number of at least 0"):
        CLUSTER.p2p_s(num_bytes, 0, 1)


def test_docstring_examples():
    result = doctest.testmod(hardware)
    assert result.attempted > 0 and result.failed == 0
