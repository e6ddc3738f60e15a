"""A step of ZeRO: against sums by hand, data parallel's step, and the replay of the real modules."""
import dataclasses
import doctest

import pytest
import torch

import dtlab
from dtlab.errors import ConfigError
from dtlab.models import GPT, GPTConfig, cross_entropy
from dtlab.simulate import Hardware, replay, zero
from dtlab.simulate.data_parallel import data_parallel_step
from dtlab.simulate.zero import _Rank, zero_step, zero_wire_bytes
from dtlab.theory import GPT_7_5B, Link, ModelShape, base_op, batch_flops, transformer_params, zero_wire_elements

SIZES = {"num_layers": 3, "hidden_size": 1024, "num_heads": 8, "seq_length": 512, "vocab_size": 5000}
CLUSTER = Hardware.preset("64xA100-80GB")
NO_LATENCY = dataclasses.replace(CLUSTER, between=Link("no latency", 25e9, 0.0))


def step(stage, hardware=CLUSTER, **choices):
    return zero_step(GPT_7_5B, hardware, **{"num_ranks": 64, "zero_stage": stage, **choices})


def moving_s(timeline):
    return timeline.seconds(0)["communication"]


def test_the_7_5b_model_at_stage_3_sends_44_gb_in_1_76_s_and_computes_less_than_that():
    sent = zero_wire_bytes(transformer_params(GPT_7_5B), num_ranks=64, zero_stage=3)
    assert sent == pytest.approx(44.1e9, rel=1e-3) and sent / 25e9 == pytest.approx(1.76, abs=0.005)
    timeline = step(3, NO_LATENCY)
    assert moving_s(timeline) == pytest.approx(sent / 25e9)
    compute_s = [timeline.seconds(0)[kind] for kind in ("forward", "backward")]
    assert sum(compute_s) == pytest.approx(batch_flops(GPT_7_5B, batch_size=1) / 156e12)
    assert round(6 * transformer_params(GPT_7_5B) * 2048 / 156e12, 2) == 0.59 < sum(compute_s)  # without the scores


@pytest.mark.parametrize("sequences, is_hidden", [(1, False), (2, False), (3, True), (4, True)])
def test_stage_3_is_hidden_from_as_many_tokens_as_flops_a_second_over_bytes_a_second(sequences, is_hidden):
    """6 Psi bytes sent against 6 Psi FLOPs a token: 156e12 / 25e9 = 6,240; attention's scores lower it below 6,144."""
    assert 2048 * 3 < 156e12 / 25e9
    unit_s = 2 * (2 * transformer_params(GPT_7_5B) / 37) / 25e9  # the first gathers, the last reductions
    exposed_s = step(3, NO_LATENCY, batch_size=sequences).exposed_communication_s
    assert (exposed_s < 4 * unit_s) == is_hidden


def test_stage_0_is_data_parallels_step_and_the_optimizer():
    choices = {"num_ranks": 64, "bucket_bytes": 10**8, "batch_size": 3}
    ours = zero_step(GPT_7_5B, CLUSTER, zero_stage=0, **choices)
    without = data_parallel_step(GPT_7_5B, CLUSTER, **choices)
    optimizer_s = transformer_params(GPT_7_5B) * (2 + 2 + 2 * 12) / (2.039e12 * 0.8)
    assert ours.step_time_s == pytest.approx(without.step_time_s + optimizer_s)
    assert ours.exposed_communication_s == pytest.approx(without.exposed_communication_s)


def test_stage_1_cuts_the_all_reduce_in_two_and_shares_the_optimizers_time():
    stages = [step(stage, NO_LATENCY) for stage in (0, 1, 2)]
    assert [moving_s(its) for its in stages] == pytest.approx([moving_s(stages[0])] * 3)
    shares = [its.seconds(0)["optimizer"] for its in stages]
    assert shares == pytest.approx([shares[0], shares[0] / 64, shares[0] / 64])
    ops = [[box.label for box in its.boxes if box.kind == "communication"] for its in stages]
    assert set(ops[0]) == {"all_reduce"} and ops[1] == ops[2] == [
        op for op in ("reduce_scatter", "all_gather") for _ in ops[0]]


def by_hand(prefetch):
    rank = _Rank()
    rank.gather_units([0, 1, 1], [0.5, 2, 2], [1.0] * 3, [1.0] * 3, prefetch)
    boxes = rank.boxes()
    return {kind: [(box.text, box.start_s, box.end_s) for box in boxes if kind in (box.kind, box.label)]
            for kind in ("forward", "backward", "all_gather", "reduce_scatter")}  # fmt: skip


def test_units_by_hand_the_next_one_is_gathered_while_one_computes():
    boxes = by_hand(prefetch=True)
    assert boxes["all_gather"] == [("0", 0, 1), ("1", 1, 2), ("2", 2, 3), ("0", 4, 5), ("2", 5, 6), ("1", 6, 7)]
    assert boxes["forward"] == [("1", 2, 3), ("2", 3, 4)]
    assert boxes["backward"] == [("0", 5, 5.5), ("2", 6, 8), ("1", 8, 10)]
    assert boxes["reduce_scatter"] == [("2", 8, 9), ("1", 10, 11), ("0", 11, 12)]


def test_units_by_hand_without_prefetch_each_is_waited_for():
    boxes = by_hand(prefetch=False)
    assert boxes["forward"] == [("1", 2, 3), ("2", 4, 5)]
    assert boxes["backward"] == [("0", 6, 6.5), ("2", 7.5, 9.5), ("1", 11.5, 13.5)]
    assert boxes["reduce_scatter"][-1] == ("0", 14.5, 15.5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_makes_backward_longer_by_its_flops_and_no_byte_more(stage, recompute):
    plain, again = (step(stage, recompute=how) for how in (None, recompute))
    more = [batch_flops(GPT_7_5B, batch_size=1, recompute=how) for how in (None, recompute)]
    longer_s = again.seconds(0)["backward"] - plain.seconds(0)["backward"]
    assert longer_s == pytest.approx((more[1] - more[0]) / 156e12) and longer_s > 0
    assert moving_s(again) == pytest.approx(moving_s(plain)) and again.model_flops == plain.model_flops


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_are_theorys_elements_of_16_bits(stage):
    for ranks in (1, 3, 64):
        elements = zero_wire_elements(1001, dp_size=ranks, zero_stage=stage)
        assert zero_wire_bytes(1001, num_ranks=ranks, zero_stage=stage) == pytest.approx(2 * elements)


def test_gradients_of_32_bits_are_twice_as_long_on_the_wire():
    for stage, factor in ((0, 2), (1, 1.5), (3, 4 / 3)):
        timelines = [step(stage, NO_LATENCY, recipe=name) for name in ("adam_mixed", "adam_mixed_fp32_grads")]
        assert moving_s(timelines[1]) / moving_s(timelines[0]) == pytest.approx(factor)


def test_fewer_units_hide_less():
    exposed = [step(3, batch_size=4, num_units=units).exposed_communication_s for units in (36, 4, 1)]
    assert exposed == sorted(exposed) and exposed[2] > 5 * exposed[0]


def test_collectives_that_know_the_nodes_are_faster_than_a_flat_ring():
    assert step(3, algorithm=None).exposed_communication_s < step(3).exposed_communication_s / 10


def test_one_rank_sends_nothing_and_a_node_does_not_feel_the_network():
    alone = step(3, num_ranks=1)
    assert "communication" not in alone.seconds(0) and alone.exposed_communication_s == 0
    slow = dataclasses.replace(CLUSTER, between=Link("slow", 1e8, 1.0))
    assert step(3, slow, num_ranks=8).step_time_s == step(3, num_ranks=8).step_time_s


def test_tokens_are_those_of_all_ranks():
    timeline = step(2, batch_size=5)
    assert timeline.tokens_per_s == pytest.approx(64 * 5 * 2048 / timeline.step_time_s)


@pytest.mark.parametrize("choices, words", [
    ({"zero_stage": 4}, r"zero_stage \(4\) must be 0, 1, 2 or 3"), ({"recipe": "adam"}, r"recipe \('adam'\)"),
    ({"num_units": 5}, r"num_layers \(36\) must be divisible by num_units \(5\)"), ({"recompute": True}, "recompute"),
])  # fmt: skip
def test_what_is_not_there_is_refused(choices, words):
    with pytest.raises(ConfigError, match=words):
        step(**{"stage": 3, **{{"zero_stage": "stage"}.get(name, name): value for name, value in choices.items()}})


def test_the_examples_hold():
    result = doctest.testmod(zero)
    assert result.attempted >= 5 and result.failed == 0


def train(stage):
    """A step, in a phase of its own: what is sent before is the start's."""
    from dtlab.parallel import FullyShardedModule, ZeroOptimizer

    model = GPT(GPTConfig(**SIZES), dtype=torch.bfloat16)
    if stage == 3:
        model = FullyShardedModule(model)
        optimizer = torch.optim.SGD(model.parameters())
    else:
        optimizer = ZeroOptimizer(model, torch.optim.SGD, zero_stage=stage, bucket_bytes=8 * 10**6)
    tokens = torch.zeros(1, SIZES["seq_length"], dtype=torch.int64)
    with dtlab.phase("step", step=1):
        cross_entropy(model(tokens), tokens, reduction="mean").backward()
        optimizer.step()


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_it_is_the_replay_of_the_real_modules(stage):
    """On hardware where only matrix products and bytes on links take time: call by call."""
    recording = dtlab.record_dry(train, stage, world_size=64)
    hardware = dataclasses.replace(NO_LATENCY, op_overhead_s=0.0, memory_bandwidth_bytes_per_s=1e30)
    shape = ModelShape(**SIZES)
    sent = sum(event.wire_bytes for event in recording.events[0] if event.phase.get("step") == 1)
    assert sent == pytest.approx(zero_wire_bytes(transformer_params(shape), num_ranks=64, zero_stage=stage), rel=1e-4)
    events = [event for event in recording.events[0] if event.phase.get("step") == 1]
    real = replay(type(recording)({0: events}, world_size=64, meta=recording.meta), hardware, algorithm="ring")
    ours = zero_step(shape, hardware, num_ranks=64, zero_stage=stage, bucket_bytes=8 * 10**6)
    assert real.step_time_s == pytest.approx(ours.step_time_s, rel=1e-3)
    assert real.exposed_communication_s == pytest.approx(ours.exposed_communication_s, rel=5e-3)
    order = [[base_op(box.label) for box in its.boxes if box.kind == "communication"] for its in (real, ours)]
    assert order[0] == order[1]
