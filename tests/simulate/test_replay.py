# ruff: noqa: F821  (names that live on the ranks)
"""Recordings replayed on machines whose times are worked out by hand, and on named ones."""
import dataclasses

import pytest
import torch
from hand_made import phase, two_ranks

import dtlab
from dtlab import parallel
from dtlab.errors import ConfigError
from dtlab.simulate import Event, Hardware, Recording, replay
from dtlab.theory import Link, collective_time_s


def machine(num_devices=4, node_size=4, latency_s=0.0, between=0.5, **changes):
    """An operation takes a second for each FLOP, a byte a second inside a node and two between nodes."""
    numbers = {"gemm_efficiency": 1.0, "memory_efficiency": 1.0, "op_overhead_s": 0.0, **changes}
    return Hardware("by hand", num_devices, node_size, 1.0, 1.0, 1e9, Link("inside", 1.0, latency_s),
                    Link("between", between, latency_s), **numbers)


def operation(flops, name="backward", **fields):
    return Event("compute", "aten.mm", 0.0, 0.0, flops=flops, phase={"name": name}, **fields)


def issue(op="all_reduce", size=0, seq=0, **fields):
    return Event("issue", op, 0.0, 0.0, bytes=size, seq=seq, **fields)


def wait(op="all_reduce", seq=0, **fields):
    return Event("wait", op, 0.0, 0.0, seq=seq, **fields)


def dry(events, world_size=4, **meta):
    events = events if isinstance(events, dict) else {0: events}
    return Recording(events, world_size=world_size, meta={"dry": True, "groups": {"g": range(world_size)}, **meta})


def spans(timeline, rank=0, channel=""):
    return [(box.kind, box.start_s, box.end_s) for box in timeline.boxes if box.lane == (rank, channel)]


def test_a_call_overlaps_until_its_wait_and_a_synchronous_one_does_not():
    hidden = [operation(2, "forward"), issue(size=4, group="g"), operation(3), wait(group="g"),
              operation(1, "optimizer")]
    timeline = replay(dry(hidden), machine(), algorithm="ring")
    assert spans(timeline) == [("forward", 0, 2), ("backward", 2, 5), ("idle", 5, 8), ("optimizer", 8, 9)]
    assert spans(timeline, channel="g") == [("communication", 2, 8)]  # 2 (n-1)/n S = 6 bytes
    assert timeline.exposed_communication_s == 3
    hidden.insert(2, hidden.pop(3))
    assert replay(dry(hidden), machine(), algorithm="ring").exposed_communication_s == 6


def test_a_ring_of_four_computes_takes_their_sum_and_that_of_the_messages():
    events = {0: [operation(1), issue("send", 2, peer=1), issue("recv", 2, peer=3), wait("recv", peer=3)]}
    for rank in range(1, 4):
        events[rank] = [issue("recv", 2, peer=rank - 1), wait("recv", peer=rank - 1), operation(rank + 1),
                        issue("isend", 2, peer=(rank + 1) % 4)]
    timeline = replay(dry(events), machine(latency_s=0.5))
    assert timeline.step_time_s == 1 + 2 + 3 + 4 + 4 * (0.5 + 2)
    path = timeline.critical_path
    assert [box.lane.rank for box in path if box.kind == "backward"] == [0, 1, 2, 3]
    assert all(before.end_s == after.start_s for before, after in zip(path, path[1:]))


def test_the_roofline_takes_the_longer_of_arithmetic_and_memory_and_adds_the_overhead():
    events = [operation(5, bytes=10), operation(1, bytes=30), operation(0)]
    hardware = dataclasses.replace(machine(), memory_bandwidth_bytes_per_s=10.0, op_overhead_s=0.25)
    assert replay(dry(events), hardware).step_time_s == 5 + 3 + 0 + 3 * 0.25


def test_two_groups_share_a_ranks_link_unless_one_spans_nodes():
    def step(ranks_of_second):
        events = [issue(size=4, group="a"), issue(size=4, group="b"), wait(group="a"), wait(group="b")]
        return dry(events, groups={"a": [0, 1], "b": ranks_of_second})

    def ends(recording):
        timeline = replay(recording, machine(node_size=2, between=1.0), algorithm="ring")
        return [spans(timeline, channel=name)[0][2] for name in "ab"]

    assert ends(step([0, 1])) == [8, 8]  # 4 bytes each, on one link
    assert ends(step([0, 2])) == [4, 4]  # the second between nodes


def test_latency_stretches_nobody():
    events = [issue(size=0, group="a"), issue(size=0, group="b"), wait(group="a"), wait(group="b")]
    recording = dry(events, groups={"a": [0, 1], "b": [0, 1]})
    assert replay(recording, machine(latency_s=1.0), algorithm="ring").step_time_s == 2  # two steps of the ring


def test_calls_of_one_group_queue_and_the_first_wait_is_not_longer_for_it():
    events = [issue(size=4, seq=0, group="g"), issue(size=4, seq=1, group="g"), wait(seq=0, group="g"),
              operation(1), wait(seq=1, group="g")]
    timeline = replay(dry(events), machine(), algorithm="ring")
    assert spans(timeline) == [("idle", 0, 6), ("backward", 6, 7), ("idle", 7, 12)]


@pytest.mark.parametrize("ranks, took", [([0, 1], 6), ([0, 2], 12)])
def test_a_message_between_nodes_takes_the_slower_link(ranks, took):
    first, second = ranks
    events = {first: [issue("isend", 6, peer=second), wait("isend", peer=second)],
              second: [issue("irecv", 6, peer=first), wait("irecv", peer=first)]}
    timeline = replay(dry(events), machine(node_size=2))
    assert spans(timeline, second, f"from rank {first}") == [("communication", 0, took)]
    assert timeline.step_time_s == took
    assert timeline.boxes[0].label == f"waits for isend to rank {second}"


def test_a_peer_that_was_not_recorded_is_ready_at_once():
    events = [operation(1), issue("irecv", 3, peer=2), wait("irecv", peer=2), issue(size=4, group="g"), wait(group="g")]
    assert replay(dry(events), machine(), algorithm="ring").step_time_s == 1 + 3 + 6


def test_messages_are_matched_by_source_destination_and_tag_in_their_order():
    sends = [issue("isend", size, seq=seq, tag=tag, peer=1) for size, seq, tag in [(1, 0, 7), (2, 0, 8), (4, 1, 7)]]
    receives = [issue("recv", 9, seq=seq, tag=tag, peer=0) for seq, tag in [(0, 8), (0, 7), (1, 7)]]
    waits = [wait("recv", seq=seq, tag=tag, peer=0) for seq, tag in [(0, 8), (0, 7), (1, 7)]]
    events = {0: [sends[0], operation(10), *sends[1:]], 1: [receives[0], receives[1], waits[1], waits[0], receives[2],
                                                            waits[2]]}
    timeline = replay(dry(events), machine())
    assert spans(timeline, 1, "from rank 0") == [("communication", 0, 1), ("communication", 10, 12),
                                                 ("communication", 12, 16)]


def test_phases_colour_the_boxes_and_touching_operations_of_one_are_one_box():
    events = [operation(1, "forward"), operation(2, "forward"), operation(1, "backward"), issue(group="g"),
              operation(1, "backward"), Event("compute", "aten.add", 0, 0, flops=1)]
    assert spans(replay(dry(events), machine())) == [("forward", 0, 3), ("backward", 3, 5), ("compute", 5, 6)]


def test_ranks_that_share_cores_slow_each_other_and_measured_time_counts():
    events = {rank: [operation(100, cpu_s=3.0)] for rank in range(4)}
    assert replay(dry(events), machine(cores=2)).step_time_s == pytest.approx(6)
    assert replay(dry(events), machine(cores=4)).step_time_s == pytest.approx(3)
    assert replay(dry(events), machine()).step_time_s == 100


def test_a_slider_changes_the_times_and_keeps_what_was_prepared():
    recording = dry([operation(1), issue(size=40, group="g"), wait(group="g")])
    assert replay(recording, machine(), algorithm="ring").step_time_s == 61
    prepared = recording.prepared
    fast = dataclasses.replace(machine(), inside=Link("faster", 10.0, 0.0))
    assert replay(recording, fast, algorithm="ring").step_time_s == pytest.approx(7)
    assert recording.prepared is prepared


def test_an_algorithm_holds_for_the_collectives_that_know_it():
    events = [issue(size=2**20, group="g"), wait(group="g"), issue("all_to_all", 2**20, seq=1, group="g"),
              wait("all_to_all", seq=1, group="g")]
    hardware = Hardware.preset("4xH100")
    for algorithm in (None, "ring", "naive"):
        took = [end - start for _, start, end in spans(replay(dry(events), hardware, algorithm=algorithm), channel="g")]
        assert took == pytest.approx([hardware.collective_s("all_reduce", 2**20, range(4), algorithm),
                                      hardware.collective_s("all_to_all", 2**20, range(4))])


def test_hierarchical_holds_for_groups_that_span_nodes():
    events = [issue(size=2**20, group=name, seq=0) for name in ("node", "all")]
    recording = dry(events, world_size=16, groups={"node": range(8), "all": range(16)})
    hardware = Hardware.preset("16xA100")
    timeline = replay(recording, hardware, algorithm="hierarchical")
    took = [end - start for name in ("node", "all") for _, start, end in spans(timeline, channel=name)]
    assert took == pytest.approx([hardware.collective_s("all_reduce", 2**20, range(8)),
                                  hardware.collective_s("all_reduce", 2**20, range(16), "hierarchical")])


def test_a_live_recording_keeps_its_shape():
    """Rank 0 sends 100 bytes after forward (60 FLOPs) and waits; backward is 120; then 1,000 bytes are reduced."""
    timeline = replay(two_ranks(), machine(), algorithm="ring")
    assert spans(timeline, 0) == [("forward", 0, 60), ("idle", 60, 160), ("backward", 160, 280), ("idle", 280, 1340)]
    assert spans(timeline, 1) == [("idle", 0, 160), ("forward", 160, 220), ("backward", 220, 340), ("idle", 340, 1340)]
    assert timeline.exposed_communication_s == 100 + 1000  # while one waits for the other nothing moves


@pytest.mark.parametrize("recording, hardware, options, said", [
    (dry([operation(1)]), machine(2), {}, "recording of 4 ranks does not fit by hand, which has 2 devices"),
    (dry([issue(group="g")]), machine(), {"algorithm": "rung"}, "algorithm \\('rung'\\) must be .*'ring'"),
    (Recording({}), machine(), {}, "has neither operations nor calls"),
    (Recording({0: [phase(0, 1, "forward")], 1: []}), machine(), {}, "ranks \\[0, 1\\] has neither"),
    (dry([issue("recv", 3, where="cell [3], line 4")]), machine(), {},
     "rank 0 receives from any rank \\(cell \\[3\\], line 4\\).*name the source"),
    (dry({0: [issue("send", 3, peer=1), wait("send", peer=1)], 1: [operation(1)]}), machine(), {},
     "rank 0 waits for message 0 from rank 0 to rank 1, which rank 1 never started"),
    (dry({0: [issue(group="g"), wait(group="g")], 1: [operation(1)]}), machine(), {},
     "rank 0 waits for all_reduce 0 of g, which rank 1 never started"),
    (dry({0: [issue(group="g")], 1: [issue("broadcast", group="g", where="cell [3], line 5")]}), machine(), {},
     "call 0 of g is all_reduce on rank 0 and broadcast on rank 1 \\(cell \\[3\\], line 5\\).*not have met"),
    (dry([operation(1)]), "8xH100", {}, "hardware \\('8xH100'\\) must be Hardware, such as Hardware.preset"),
    ("step.jsonl", machine(), {}, "recording \\('step.jsonl'\\) must be what .* Recording.load returned"),
])
def test_what_cannot_be_replayed_is_refused_with_the_numbers(recording, hardware, options, said):
    with pytest.raises(ConfigError, match=said):
        replay(recording, hardware, **options)


def test_rates_come_from_what_was_said_to_the_recorder():
    recording = dry([operation(8)], tokens=400, model_flops=16)
    timeline = replay(recording, machine())
    assert timeline.tokens_per_s == 50 and timeline.mfu == 16 / (8 * 4)  # four devices of 1 FLOP/s
    assert replay(recording, machine(cores=2)).mfu == 16 / (8 * 2)


def test_a_replay_does_not_depend_on_the_order_of_the_ranks():
    said = []
    for ranks in ((0, 1), (1, 0)):
        events = two_ranks().events
        recording = Recording({rank: events[rank] for rank in ranks})
        said += [repr(replay(recording, machine()).boxes).encode() for _ in range(2)]
    assert len(set(said)) == 1


# recordings of real code


@pytest.mark.ranks
def test_a_recorded_step_replayed_on_named_hardware(tmp_path):
    def step(num_layers):
        from dtlab.models import GPT, GPTConfig

        model = GPT(GPTConfig(vocab_size=64, seq_length=16, hidden_size=24, num_layers=num_layers, num_heads=3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with dtlab.phase("forward", micro_batch=3):
            loss = model(torch.arange(32).view(2, 16) % 64).logsumexp(-1).mean()
        loss.backward()
        handles = [dist.all_reduce(param.grad, async_op=True) for param in model.parameters()]
        for handle in handles:
            handle.wait()
        optimizer.step()
        message = torch.ones(50)
        handle = dist.isend(message, (rank + 1) % world_size)
        dist.recv(torch.empty(50), (rank - 1) % world_size)
        handle.wait()

    with dtlab.launch(3) as ranks:
        recording = ranks.record(step, 2, tokens=96, model_flops=10**9)
    hardware = Hardware.preset("8xH100")
    timeline = replay(recording, hardware)
    events = recording.events[1]
    assert timeline.seconds(1)["communication"] == pytest.approx(
        sum(hardware.collective_s("all_reduce", e.bytes, range(3)) for e in events if e.op == "all_reduce" and e.bytes)
        + hardware.p2p_s(200, 0, 1), rel=1e-6)
    work = [e for e in events if e.kind == "compute"]
    took = hardware.compute_s([e.flops for e in work], [e.bytes for e in work])
    assert timeline.by_rank().busy_s[1] == pytest.approx(took.sum())
    assert {"forward", "backward", "optimizer"} <= set(timeline.seconds(1))
    assert next(box.text for box in timeline.boxes if box.kind == "forward") == "3"
    assert timeline.tokens_per_s == 96 / timeline.step_time_s and 0 < timeline.mfu < 1
    recording.save(tmp_path / "step.jsonl")
    again = replay(Recording.load(tmp_path / "step.jsonl"), hardware)
    assert repr(again.boxes) == repr(timeline.boxes)
    path = recording.timeline().critical_path
    assert all(before.end_s <= after.start_s + 1e-12 for before, after in zip(path, path[1:]))


@pytest.mark.ranks
@pytest.mark.parametrize("size", [3, 8])
@pytest.mark.parametrize("algorithm", ["naive", "ring", "tree", "halving_doubling"])
def test_our_all_reduce_played_message_by_message_takes_what_its_formula_says(algorithm, size):
    def program():
        collective(torch.empty(24 * 10**5))

    collective = getattr(parallel, f"{algorithm}_all_reduce")
    hardware = Hardware.preset("8xA100", op_overhead_s=0.0, memory_bandwidth_bytes_per_s=1e30)  # adding is free
    timeline = replay(dtlab.record_dry(program, world_size=size, ranks=range(size)), hardware)
    formula_s = collective_time_s("all_reduce", 96e5, size=size, link=hardware.inside, algorithm=algorithm)
    assert timeline.step_time_s == pytest.approx(formula_s, rel=1e-9)


@pytest.mark.ranks
def test_a_block_of_gpt3_takes_its_arithmetic_and_four_all_reduces():
    """Tensor parallel over 16 ranks, so that a group spans two nodes of 64xA100-80GB; then 8, inside one of 8xH100."""
    def block(hidden, tokens, tp_size):
        group = dist.new_group(list(range(tp_size)))
        x = torch.empty(1, tokens, hidden)
        first, second = torch.empty(hidden, 4 * hidden // tp_size), torch.empty(4 * hidden // tp_size, hidden)
        for _ in range(4):
            x = x @ first @ second
            dist.all_reduce(x, group=group)

    for name, size in (("64xA100-80GB", 16), ("8xH100", 8)):
        hardware = dataclasses.replace(Hardware.preset(name), op_overhead_s=0.0)
        recording = dtlab.record_dry(block, 12288, 2048, size, world_size=hardware.num_devices)
        timeline = replay(recording, hardware)
        reduces_s = 4 * hardware.collective_s("all_reduce", 4 * 12288 * 2048, range(size))
        products_s = 4 * 16 * 2048 * 12288**2 / size / (hardware.peak_flops * 0.5)
        assert timeline.exposed_communication_s == pytest.approx(reduces_s)
        assert timeline.step_time_s == pytest.approx(products_s + reduces_s)
