"""A step of data-parallel training from a list of gradients: against sums by hand, the real module and its replay."""
import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist

import dtlab
from dtlab.models import GPT, GPTConfig, cross_entropy
from dtlab.parallel import DistributedDataParallel
from dtlab.parallel.shared import split_by_bytes
from dtlab.simulate import Hardware, replay
from dtlab.simulate.data_parallel import (
    Gradient,
    bucketed_step,
    bucketed_times_s,
    buckets,
    data_parallel_step,
    data_parallel_times_s,
    gradients_of,
)
from dtlab.theory import GPT_7_5B, ModelShape, batch_flops, ring_all_reduce_bytes, transformer_params

SIZES = {"num_layers": 2, "hidden_size": 1024, "num_heads": 8, "seq_length": 512, "vocab_size": 5000}
SHAPE = ModelShape(**SIZES)


def half_a_second(sizes):
    return 0.5 * np.ones_like(sizes)


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_are_all_parameters_and_two_thirds_of_the_flops(tied):
    shape = dataclasses.replace(GPT_7_5B, tie_embeddings=tied)
    gradients = gradients_of(shape, batch_size=3, flops_per_s=1.0)
    assert sum(g.bytes for g in gradients) == 2 * transformer_params(shape)
    assert sum(g.seconds for g in gradients) == pytest.approx(batch_flops(shape, batch_size=3) * 2 / 3)


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_come_in_the_order_of_the_real_models_parameters_from_the_last(tied):
    model = GPT(GPTConfig(**SIZES, tie_embeddings=tied), device="meta")
    sizes = [2 * p.numel() for p in reversed(list(model.parameters()))]
    assert [g.bytes for g in gradients_of(dataclasses.replace(SHAPE, tie_embeddings=tied), batch_size=1,
                                          flops_per_s=1.0)] == sizes  # fmt: skip


@pytest.mark.parametrize("bucket_bytes", [1, 10**5, 3 * 10**6, 10**12])
def test_buckets_are_those_of_the_module(bucket_bytes):
    parameters = list(reversed(list(GPT(GPTConfig(**SIZES), device="meta").parameters())))
    parts = split_by_bytes(parameters, bucket_bytes)
    assert np.diff(buckets([p.nbytes for p in parameters], bucket_bytes), prepend=0).tolist() == list(map(len, parts))
    assert [p for part in parts for p in part] == parameters


@pytest.mark.parametrize("sizes, ends", [
    ([3, 1, 9, 2, 2], [2, 3, 5]), ([0, 9, 0, 3], [1, 2, 4]), ([0, 0], [2]), ([4, 4, 0], [1, 3]), ([5], [1]), ([], []),
])
def test_buckets_by_hand_also_of_gradients_without_bytes(sizes, ends):
    assert buckets(sizes, 4) == ends
    parts = split_by_bytes([torch.zeros(size, dtype=torch.uint8) for size in sizes], 4)
    assert np.cumsum([len(part) for part in parts]).tolist() == ends


def test_what_overlaps_is_hidden_and_the_last_bucket_is_not():
    gradients = [Gradient(8, 1.0)] * 3
    run, _ = bucketed_step(2.0, gradients, half_a_second, bucket_bytes=1)
    assert run.end_s[0] == 2 + 3 + 0.5 and run.moved == [(3.0, 3.5), (4.0, 4.5), (5.0, 5.5)]


def test_without_overlap_nothing_is_hidden():
    run, _ = bucketed_step(2.0, [Gradient(8, 1.0)] * 3, half_a_second, bucket_bytes=1, overlap=False)
    assert run.end_s[0] == 2 + 3 + 3 * 0.5


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("network", ["Ethernet 100", "InfiniBand XDR"])
def test_times_worked_out_are_those_of_the_engine(overlap, network):
    hardware, sizes = Hardware.preset("64xA100", between=network), [1, 10**7, 25 * 10**7, 10**12]
    choices = {"num_ranks": 64, "batch_size": 3, "overlap": overlap}
    times = data_parallel_times_s(GPT_7_5B, hardware, bucket_bytes=sizes, **choices)
    assert times == pytest.approx([
        data_parallel_step(GPT_7_5B, hardware, bucket_bytes=size, **choices).step_time_s for size in sizes])
    assert len(set(times)) > 1


def test_times_worked_out_of_uneven_gradients_are_those_of_the_engine():
    """Queues form and empty again: seconds and bytes in no order."""
    random = np.random.default_rng(5)
    bytes_and_seconds = zip(random.integers(0, 99, 60).tolist(), random.exponential(2, 60).tolist())
    gradients = [Gradient(*pair) for pair in bytes_and_seconds]
    for cost, overlap in ((0.01, True), (0.04, True), (0.2, True), (0.04, False)):
        parts, sizes = (1.5, gradients, lambda sizes, cost=cost: 0.1 + cost * sizes), [1, 50, 200, 10**4]
        assert bucketed_times_s(*parts, bucket_bytes=sizes, overlap=overlap) == pytest.approx(
            [bucketed_step(*parts, bucket_bytes=size, overlap=overlap)[0].end_s[0] for size in sizes])


def test_one_bucket_leaves_nothing_to_overlap():
    hardware, choices = Hardware.preset("64xA100"), {"num_ranks": 64, "bucket_bytes": 10**12}
    steps = [data_parallel_step(GPT_7_5B, hardware, overlap=overlap, **choices) for overlap in (True, False)]
    seconds = ring_all_reduce_bytes(2 * transformer_params(GPT_7_5B), 64) / 25e9 + 126 * hardware.between.latency_s
    assert [step.exposed_communication_s for step in steps] == pytest.approx([seconds] * 2)


def test_tokens_and_mfu_are_those_of_all_ranks():
    step = data_parallel_step(GPT_7_5B, Hardware.preset("8xA100"), num_ranks=8, bucket_bytes=10**8, batch_size=2)
    assert step.tokens_per_s == pytest.approx(8 * 2 * 2048 / step.step_time_s)
    hidden = step.step_time_s / (step.step_time_s - step.exposed_communication_s)
    assert step.mfu == pytest.approx(0.5 / hidden)  # half of the peak while it computes


def train(config, bucket_bytes):
    model = DistributedDataParallel(GPT(config, dtype=torch.bfloat16), bucket_bytes=bucket_bytes)
    tokens = torch.zeros(1, config.seq_length, dtype=torch.int64)
    cross_entropy(model(tokens), tokens, reduction="mean").backward()
    assert dist.get_world_size() == 64


@pytest.mark.ranks
@pytest.mark.parametrize("bucket_bytes", [1, 8 * 10**6, 10**12])
def test_it_is_the_replay_of_the_real_module(bucket_bytes):
    """On hardware where only matrix products take time, as here; flash attention computes its scores again."""
    recording = dtlab.record_dry(train, GPTConfig(**SIZES), bucket_bytes, world_size=64)
    hardware = dataclasses.replace(Hardware.preset("64xA100"), op_overhead_s=0.0, memory_bandwidth_bytes_per_s=1e30)
    real = replay(recording, hardware, algorithm="ring")
    begin_s = max(box.end_s for box in real.boxes if box.label == "broadcast")  # of the start-up
    ours = data_parallel_step(SHAPE, hardware, num_ranks=64, bucket_bytes=bucket_bytes)
    sent = [box for box in real.boxes if box.label == "all_reduce"]
    assert len(sent) == len([box for box in ours.boxes if box.label == "all_reduce"])
    assert real.start_s + real.step_time_s - begin_s == pytest.approx(ours.step_time_s, rel=0.02)
