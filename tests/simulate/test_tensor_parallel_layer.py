"""A tensor-parallel layer and context-parallel attention: against sums by hand, theory, and replays of real layers."""
import dataclasses
import doctest

import pytest
import torch
import torch.distributed as dist

import dtlab
from dtlab.errors import ConfigError
from dtlab.models import GPT, GPTConfig
from dtlab.parallel.context_parallel import ring_attention, ulysses_attention
from dtlab.parallel.tensor_parallel import apply_tensor_parallel
from dtlab.simulate import Hardware, context_parallel_attention, replay, tensor_parallel, tensor_parallel_layer
from dtlab.theory import (
    GPT_7_5B,
    Link,
    LlamaShape,
    ModelShape,
    batch_flops,
    causal_work,
    ring_attention_wire_bytes,
    tp_layer_collectives,
    tp_layer_wire_bytes,
    ulysses_wire_bytes,
)

CLUSTER = Hardware.preset("64xA100-80GB")
NO_LATENCY = dataclasses.replace(CLUSTER, inside=Link("inside", 250e9, 0.0), between=Link("between", 25e9, 0.0))
AS_ONE_LAYER = {"num_layers": 1, "vocab_size": 1, "seq_length": 2048}  # the output layer's FLOPs do not count


def layer(hardware=NO_LATENCY, shape=GPT_7_5B, **choices):
    return tensor_parallel_layer(shape, hardware, **{"tp_size": 8, **choices})


def share(timeline):
    return timeline.exposed_communication_s / timeline.step_time_s


def calls(timeline):
    boxes = sorted((box for box in timeline.boxes if box.kind == "communication"), key=lambda box: box.start_s)
    return [box.label for box in boxes]


def compute_s(timeline):
    return sum(timeline.seconds(0)[kind] for kind in ("forward", "backward"))


@pytest.mark.parametrize("tp_size, percent, with_latency, hierarchical", [
    (4, 8.6, 10.1, 8.6), (8, 17.9, 23.5, 17.9), (16, 82.4, 86.2, 42.9)])  # fmt: skip
def test_communications_share_of_a_layer_jumps_where_the_group_leaves_its_node(
        tp_size, percent, with_latency, hierarchical):
    """Half of 312 TFLOP/s, 250 GB/s inside a node, 25 GB/s between, flat rings, nothing beside them."""
    assert 100 * share(layer(tp_size=tp_size, overlap=False)) == pytest.approx(percent, abs=0.05)
    assert 100 * share(layer(CLUSTER, tp_size=tp_size, overlap=False)) == pytest.approx(with_latency, abs=0.05)
    fastest = layer(tp_size=tp_size, overlap=False, algorithm=None)
    assert 100 * share(fastest) == pytest.approx(hierarchical, abs=0.05)


def test_a_rank_computes_its_part_of_the_layers_flops():
    shape = ModelShape(**AS_ONE_LAYER, hidden_size=4096, num_heads=32)
    flops = batch_flops(shape, batch_size=3) - 6 * 3 * 2048 * 4096
    for sequence_parallel in (False, True):
        timeline = layer(shape=shape, micro_batch_size=3, sequence_parallel=sequence_parallel)
        assert compute_s(timeline) == pytest.approx(flops / 8 / 156e12)


def test_shared_heads_of_keys_and_values_are_computed_on_each_of_their_ranks():
    sizes = {**AS_ONE_LAYER, "hidden_size": 4096, "num_heads": 32, "ffn_hidden_size": 14336}
    alone, shared = (compute_s(layer(shape=LlamaShape(**sizes, num_kv_heads=heads))) for heads in (8, 2))
    assert alone == pytest.approx(shared)  # one head on each of 8 ranks, and one on each of 4
    assert compute_s(layer(shape=LlamaShape(**sizes, num_kv_heads=32))) > alone


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_calls_and_their_bytes_are_theorys(sequence_parallel, overlap):
    choices = {"micro_batch_size": 2, "tp_size": 4, "sequence_parallel": sequence_parallel}
    timeline = layer(overlap=overlap, **choices)
    assert calls(timeline) == [op for _, op, _ in tp_layer_collectives(GPT_7_5B, **choices)]
    sent = sum(tp_layer_wire_bytes(GPT_7_5B, **choices).values())
    assert timeline.seconds(0)["communication"] == pytest.approx(sent / 250e9)
    if not overlap:
        assert timeline.exposed_communication_s == pytest.approx(sent / 250e9)


def test_under_a_matrix_product_that_is_long_enough_backward_hides_all_of_its_all_reduces():
    one = 2 * 7 / 8 * 2048 * 4096 * 2 / 250e9
    product_s = 2 * 2048 * 4096 * 3 * 4096 / 8 / 156e12  # the smaller of the two weight gradients
    assert product_s > one
    assert layer().exposed_communication_s == pytest.approx(2 * one)
    assert layer(overlap=False).exposed_communication_s == pytest.approx(4 * one)
    slow = dataclasses.replace(NO_LATENCY, inside=Link("slow", 25e9, 0.0))
    hidden_s = product_s * (1 + 4 / 3)
    assert layer(slow).exposed_communication_s == pytest.approx(40 * one - hidden_s)


def test_overlap_lowers_what_shows_at_every_degree():
    for tp_size in (2, 4, 8, 16, 32):
        for sequence_parallel in (False, True):
            shown = [layer(CLUSTER, tp_size=tp_size, sequence_parallel=sequence_parallel, overlap=overlap)
                     .exposed_communication_s for overlap in (False, True)]  # fmt: skip
            assert 0 < shown[1] < shown[0]


def test_one_rank_calls_nothing():
    assert calls(layer(tp_size=1)) == [] and layer(tp_size=1).exposed_communication_s == 0


# --- context parallelism

SHAPE = LlamaShape(num_layers=1, hidden_size=4096, num_heads=32, num_kv_heads=8, seq_length=65536, vocab_size=1)


def attention(cp_size=4, shape=SHAPE, hardware=NO_LATENCY, **choices):
    return context_parallel_attention(shape, hardware, cp_size=cp_size, **choices)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("cp_size", [1, 2, 3, 8])
def test_ranks_are_busy_in_proportion_to_their_work(layout, cp_size):
    shape = dataclasses.replace(SHAPE, seq_length=48 * 1024)
    whole_s = (2 + 5) * 2 * shape.seq_length**2 * 4096 / 2 / 156e12  # products: of scores and values, and backward
    busy = attention(cp_size, shape, layout=layout).by_rank().busy_s
    assert list(busy) == pytest.approx([whole_s * part for part in causal_work(cp_size, layout)])
    busy = attention(cp_size, shape, layout=layout, causal=False).by_rank().busy_s
    assert list(busy) == pytest.approx([2 * whole_s / cp_size] * cp_size)


def test_a_zigzag_ends_earlier_by_what_the_busiest_rank_has_more_than_the_mean():
    contiguous, zigzag = (attention(layout=layout).step_time_s for layout in ("contiguous", "zigzag"))
    assert 1.7 < contiguous / zigzag <= 1.75 and attention().step_time_s == zigzag  # as the real one by default


@pytest.mark.parametrize("method, theory", [("ring", ring_attention_wire_bytes), ("ulysses", ulysses_wire_bytes)])
def test_a_rank_sends_what_theory_says(method, theory):
    boxes = [box for box in attention(method=method).boxes if box.lane.rank == 1 and box.label != "recv"]
    sending_s = sum(box.end_s - box.start_s for box in boxes if box.kind == "communication")
    assert sending_s == pytest.approx(sum(theory(SHAPE, cp_size=4).values()) / 250e9)


def test_a_long_sequence_hides_the_rings_messages_and_none_of_ulysses_exchanges():
    ring, ulysses = attention(layout="zigzag"), attention(method="ulysses")
    sent_s = sum(ulysses_wire_bytes(SHAPE, cp_size=4).values()) / 250e9
    assert ulysses.exposed_communication_s == pytest.approx(sent_s)
    last = 2 * 2 * 65536 / 4 * 8 * 128 * 4 / 250e9  # the last gradients, in 32 bits, go home alone
    assert ring.exposed_communication_s <= last < ulysses.step_time_s
    short = attention(shape=dataclasses.replace(SHAPE, seq_length=2048), layout="zigzag")
    assert share(short) > 5 * share(ring)


# --- the layers themselves

def one_layer(sizes, overlap, sequence_parallel):
    """On a rank: forward and backward of a layer of 16 bits."""
    model = apply_tensor_parallel(GPT(GPTConfig(**sizes), dtype=torch.bfloat16), async_grad_all_reduce=overlap,
                                  sequence_parallel=sequence_parallel)  # fmt: skip
    tokens = sizes["seq_length"] // (dist.get_world_size() if sequence_parallel else 1)
    x = torch.ones(1, tokens, sizes["hidden_size"], dtype=torch.bfloat16, requires_grad=True)
    y = model.layers[0](x)
    with dtlab.phase("backward"):
        y.backward(y.detach())


@pytest.mark.ranks
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_asynchronous_collectives_of_the_layers_show_less_in_the_replay(sequence_parallel):
    sizes = {"num_layers": 1, "hidden_size": 4096, "num_heads": 32, "seq_length": 2048, "vocab_size": 64}
    timelines = {}
    for overlap in (False, True):
        recording = dtlab.record_dry(one_layer, sizes, overlap, sequence_parallel, world_size=8)
        timelines[overlap] = replay(recording, CLUSTER, algorithm="ring")
    shape, norms_s = ModelShape(**sizes), 0.0
    if sequence_parallel:  # the gradients of norms and row biases, at the end of the pass
        norms_s = CLUSTER.collective_s("all_reduce", 6 * 4096 * 2, range(8), "ring")
    for overlap, timeline in timelines.items():
        simulated = layer(CLUSTER, shape, sequence_parallel=sequence_parallel, overlap=overlap)
        expected_s = simulated.exposed_communication_s + norms_s
        assert timeline.exposed_communication_s == pytest.approx(expected_s, rel=0.02)
    assert timelines[True].exposed_communication_s < 0.75 * timelines[False].exposed_communication_s


def attention_step(method, causal, heads):
    """On a played rank: forward and backward of attention over 8192 tokens, heads of 128, in 16 bits."""
    attend = {"ring": ring_attention, "ulysses": ulysses_attention}[method]
    q, k, v = (torch.zeros(1, heads, 8192 // dist.get_world_size(), 128, dtype=torch.bfloat16, requires_grad=True)
               for _ in range(3))  # fmt: skip
    with dtlab.phase("forward"):
        y = attend(q, k, v, causal=causal)
    with dtlab.phase("backward"):
        y.backward(y.detach())


@pytest.mark.ranks
@pytest.mark.parametrize("method, causal, more", [("ring", False, 1), ("ring", True, 1 + 1024 / 8192),
                                                  ("ulysses", False, 1)])  # fmt: skip
def test_a_rank_is_as_busy_as_by_the_flops_of_the_real_attention(method, causal, more):
    """Of the diagonal the real ring computes whole tiles, 1024 x 1024. (Torch counts all of a masked SDPA.)"""
    recording = dtlab.record_dry(attention_step, method, causal, 4, world_size=4, ranks=[1])
    shape = ModelShape(num_layers=1, hidden_size=512, num_heads=4, seq_length=8192, vocab_size=1)
    seconds = attention(shape=shape, layout="zigzag", method=method, causal=causal).seconds(1)
    for phase in ("forward", "backward"):
        flops = sum(e.flops for e in recording.events[1] if e.flops and e.phase.get("name") == phase)
        assert flops / 156e12 == pytest.approx(more * seconds[phase])


@pytest.mark.parametrize("call, words", [
    (lambda: layer(tp_size=3), r"num_heads \(32\) does not divide by tp_size \(3\); legal are 1, 2, 4, 8, 16, 32"),
    (lambda: layer(Hardware.preset("4xA100"), tp_size=8), r"rank \(7\) must be below num_devices of 4xA100-80GB \(4\)"),
    (lambda: attention(method="rings"), r"method \('rings'\) must be 'ring' or 'ulysses'"),
    (lambda: attention(layout="level"), r"layout \('level'\) must be 'contiguous' or 'zigzag'"),
    (lambda: attention(16, method="ulysses"), r"num_kv_heads \(8\) must be divisible by cp_size \(16\)"),
    (lambda: attention(5), r"seq_length \(65536\) must be divisible by cp_size \(5\)"),
    (lambda: attention(shape=ModelShape(**{**AS_ONE_LAYER, "seq_length": 12}, hidden_size=8, num_heads=4),
                       layout="zigzag"), r"seq_length \(12\) must be divisible by 8: with cp_size 4 a zigzag layout"),
])  # fmt: skip
def test_what_cannot_be_is_refused(call, words):
    with pytest.raises(ConfigError, match=words):
        call()


def test_docstring_examples():
    result = doctest.testmod(tensor_parallel)
    assert result.attempted > 0 and result.failed == 0
