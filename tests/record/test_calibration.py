"""This machine, measured; and what a live recording takes on it. No assertion depends on how fast it is."""
import dataclasses
import math

import numpy as np
import pytest
import torch

import dtlab
from dtlab.errors import ConfigError
from dtlab.machine import usable_cores
from dtlab.models import TimedLayer
from dtlab.record import calibration
from dtlab.simulate import Hardware, replay

SLEEPS_S = 0.02, 0.04
NUM_LAYERS = 3


def timed_step():
    """Layers that sleep, then their gradients, averaged."""
    import torch.distributed as dist

    model = torch.nn.Sequential(*[TimedLayer(*SLEEPS_S, num_params=1000) for _ in range(NUM_LAYERS)])
    model(torch.ones(2)).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    return [parameter.grad.sum().item() for parameter in model.parameters()]


@pytest.fixture(scope="module")
def ranks():
    with dtlab.launch(3) as live:
        yield live


@pytest.mark.ranks
def test_numbers_are_positive_and_finite_and_measured_once(ranks):
    machine = Hardware.calibrate(ranks)
    numbers = [machine.peak_flops, machine.memory_bandwidth_bytes_per_s, machine.op_overhead_s, machine.memory_bytes,
               machine.gemm_efficiency, machine.inside.bandwidth_bytes_per_s, machine.inside.latency_s,
               *(number for row in machine.measured for number in row[2:])]  # fmt: skip
    assert all(0 < number < math.inf for number in numbers)
    assert machine.num_devices == 3 and 1 <= machine.cores <= usable_cores()
    assert Hardware.calibrate() is machine is calibration.calibrate(ranks)


@pytest.mark.ranks
def test_measured_are_the_calls_that_lessons_make_on_as_many_ranks(ranks):
    machine = Hardware.calibrate(ranks)
    assert {name for name, *_ in machine.measured} == {
        "all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier"}  # fmt: skip
    assert {size for _, size, *_ in machine.measured} == {3}
    name, _, latency_s, per_byte = machine.measured[0]
    assert machine.collective_s(name, 1e6, range(3)) == latency_s + 1e6 * per_byte


@pytest.mark.ranks
def test_measuring_leaves_no_group_behind(ranks):
    """A group of its own would change the names of groups in later recordings."""
    Hardware.calibrate(ranks)
    recording = ranks.record(lambda: torch.distributed.all_reduce(torch.ones(3)))
    assert list(recording.meta["groups"]) == ["0-2#0:default_pg"]


@pytest.mark.ranks
def test_timed_layers_take_their_sleep_in_a_replay(ranks):
    recording = ranks.record(timed_step)
    machine = dataclasses.replace(Hardware.preset("3xA100"), cores=1)  # sleeps would take turns if they took a core
    slept = [[e.end_s - e.start_s for e in events if e.op == "sleep"] for events in recording.events.values()]
    assert {len(times) for times in slept} == {2 * NUM_LAYERS}
    longest = max(map(sum, slept))
    assert longest >= NUM_LAYERS * sum(SLEEPS_S)
    assert longest <= replay(recording, machine).step_time_s <= 1.5 * longest


@pytest.mark.ranks
def test_sleeps_are_forward_and_backward(ranks):
    events = ranks.record(timed_step).events[1]
    phases = [event.phase["name"] for event in events if event.op == "sleep"]
    assert phases == ["forward"] * NUM_LAYERS + ["backward"] * NUM_LAYERS


def test_latency_and_bandwidth_are_fitted():
    sizes = np.array(list(calibration._SIZES))
    latency_s, per_byte = calibration._alpha_beta(1e-4 + 2e-9 * sizes)
    assert (latency_s, per_byte) == pytest.approx((1e-4, 2e-9), rel=1e-6)


def test_a_fit_is_never_below_zero():
    assert min(calibration._alpha_beta(np.array([5.0, 4.0, 3.0, 2.0, 1.0]))) > 0
    assert min(calibration._alpha_beta(1e-9 * np.array([1.0, 20.0, 900.0, 10000.0, 1e5]))) > 0


@pytest.mark.parametrize("ranks", [4, "4", [0, 1]])
def test_what_are_no_ranks_is_refused(ranks):
    with pytest.raises(ConfigError, match=r"ranks \(.*must be what dtlab.launch returned"):
        Hardware.calibrate(ranks)
