"""Timelines and traces of recordings made by hand."""
import json
from collections import defaultdict

import pytest
from hand_made import GROUP, call, compute, one_f_one_b, phase, two_ranks

from dtlab.errors import ConfigError
from dtlab.simulate import Box, Event, Lane, Recording, Timeline
from dtlab.simulate.boxes import rows


def on(timeline, rank, channel=""):
    return [(box.kind, box.text, box.start_s, box.end_s) for box in timeline.boxes if box.lane == (rank, channel)]


def lanes_of(*events):
    return Recording({0: list(events)}).timeline()


def test_phases_waits_and_calls_stand_where_they_were():
    timeline = two_ranks().timeline()
    assert on(timeline, 0) == [("forward", "0", 0, 1), ("backward", "0", 1, 4), ("idle", "", 4, 5),
                               ("optimizer", "", 5, 6)]
    assert on(timeline, 1) == [("idle", "", 0, 1), ("forward", "0", 1, 2), ("backward", "0", 2, 4), ("idle", "", 4, 5),
                               ("optimizer", "", 5, 6)]
    assert on(timeline, 0, GROUP) == [("communication", "", 3, 5)] and on(timeline, 1, "from rank 0")[0][2:] == (0, 1)
    assert timeline.step_time_s == 6
    assert timeline.seconds(1) == {"forward": 1, "backward": 2, "optimizer": 1, "communication": 3, "idle": 2}


def test_one_compute_lane_a_rank_then_one_per_group_and_way():
    events = [compute(0, 1), *call(1, 2, "all_reduce", group="0-1#0:default_pg"),
              *call(2, 3, "all_reduce", group="0-1#1:tp"), *call(3, 4, "isend", peer=1), *call(4, 5, "irecv", peer=1),
              *call(5, 6, "recv"), *call(6, 7, "send", 1, peer=1)]
    timeline = Recording({1: [compute(0, 1)], 0: events}).timeline()
    assert timeline.lanes == [(0, ""), (0, "0-1#0:default_pg"), (0, "0-1#1:tp"), (0, "from any rank"),
                              (0, "from rank 1"), (0, "to rank 1"), (1, "")]
    assert [str(lane) for lane in timeline.lanes] == ["rank 0", "0-1 default_pg", "0-1 tp", "from any rank",
                                                      "from rank 1", "to rank 1", "rank 1"]


@pytest.mark.parametrize("channel, text", [
    ("0-3#0:default_pg", "0-3 default_pg"), ("0-3#7:undefined", "0-3 #7"), ("0-1016:8#12:dp", "0-1016:8 dp"),
    ("0,3,4#2:", "0,3,4 #2"), ("to rank 1", "to rank 1"), ("g", "g"), ("", "rank 5"),
])
def test_a_lane_is_named_by_its_ranks_and_its_groups_label(channel, text):
    assert str(Lane(5, channel)) == text


def test_a_send_and_a_receive_with_the_same_number_end_with_their_own_wait():
    timeline = lanes_of(Event("issue", "isend", 0, 0, peer=1, seq=0), Event("issue", "irecv", 1, 1, peer=1, seq=0),
                        Event("wait", "irecv", 1, 3, peer=1, seq=0), Event("wait", "isend", 3, 4, peer=1, seq=0))
    assert on(timeline, 0, "to rank 1")[0][2:] == (0, 4) and on(timeline, 0, "from rank 1")[0][2:] == (1, 3)


def test_messages_of_two_groups_to_one_rank_end_with_their_own_wait():
    timeline = lanes_of(*(Event("issue", "isend", at, at, group=f"0-1#{at}:", peer=1, seq=0) for at in range(2)),
                        Event("wait", "isend", 2, 3, group="0-1#1:", peer=1, seq=0),
                        Event("wait", "isend", 3, 9, group="0-1#0:", peer=1, seq=0))
    assert [box[2:] for box in on(timeline, 0, "to rank 1")] == [(0, 9), (1, 3)]


def test_calls_under_way_at_once_are_told_apart_by_number_and_tag():
    timeline = lanes_of(*(Event("issue", "all_reduce", at, at, group="g", seq=at) for at in range(3)),
                        *(Event("wait", "all_reduce", 5 + at, 6 + at, group="g", seq=2 - at) for at in range(3)))
    assert [box[2:] for box in on(timeline, 0, "g")] == [(0, 8), (1, 7), (2, 6)]
    timeline = lanes_of(*(Event("issue", "isend", tag, tag, peer=1, seq=0, tag=tag) for tag in range(2)),
                        *(Event("wait", "isend", 4 - tag, 5 - tag, peer=1, seq=0, tag=tag) for tag in range(2)))
    assert [box[2:] for box in on(timeline, 0, "to rank 1")] == [(0, 5), (1, 4)]


def test_calls_under_way_at_once_count_once():
    timeline = lanes_of(*call(0, 4, "isend", peer=1), *call(1, 2, "irecv", peer=1),
                        *call(3, 6, "all_reduce", group="g"), *call(8, 9, "all_reduce", 1, group="g"))
    assert timeline.seconds(0)["communication"] == 7


def test_a_second_wait_changes_nothing_and_no_wait_ends_with_the_call():
    wait = Event("wait", "all_reduce", 1, 2, group="g", seq=0)
    later = Event("wait", "all_reduce", 8, 9, group="g", seq=0)
    timeline = lanes_of(Event("issue", "all_reduce", 0, 0.5, group="g", seq=0), wait, later,
                        Event("issue", "all_reduce", 3, 3.5, group="g", seq=1))
    assert [box[2:] for box in on(timeline, 0, "g")] == [(0, 2), (3, 3.5)]


def test_operations_of_a_phase_are_one_box_and_a_wait_divides_it():
    timeline = lanes_of(compute(1, 2, name="forward"), compute(3, 4, name="forward"),
                        Event("wait", "all_gather", 5, 6), phase(0, 8, "forward"))
    assert on(timeline, 0) == [("forward", "", 0, 5), ("idle", "", 5, 6), ("forward", "", 6, 8)]
    assert timeline.boxes[1].label == "waits for all_gather"


def test_the_inner_phase_is_seen_over_the_outer_one():
    timeline = lanes_of(phase(2, 3, "attention"), phase(0, 5, "forward"), phase(5, 6, "BackwardWeight", micro_batch=3),
                        phase(6, 7, "backward_input"), phase(7, 8, "optimizer_step"))
    assert on(timeline, 0) == [("forward", "", 0, 2), ("compute", "", 2, 3), ("forward", "", 3, 5),
                               ("weight", "3", 5, 6), ("backward", "", 6, 7), ("optimizer", "", 7, 8)]
    assert timeline.boxes[1].label == "attention"


def test_touching_operations_of_one_phase_are_joined_and_gaps_and_micro_batches_kept():
    timeline = lanes_of(compute(0, 1, name="forward", micro_batch=0), compute(1, 2, name="forward", micro_batch=0),
                        compute(2, 3, name="forward", micro_batch=1), compute(4, 5), compute(5, 6, op="aten.add"))
    assert on(timeline, 0) == [("forward", "0", 0, 2), ("forward", "1", 2, 3), ("compute", "", 4, 6)]


def test_boxes_of_a_compute_lane_never_overlap_even_where_spans_cross():
    timeline = lanes_of(phase(0, 4, "forward"), phase(2, 6, "backward"), compute(3, 7), compute(10, 10))
    spans = [box[2:] for box in on(timeline, 0)]
    assert spans[0][0] == 0 and spans[-1][1] == 7
    assert all(first[1] <= second[0] for first, second in zip(spans, spans[1:]))


@pytest.mark.parametrize("p, m", [(1, 1), (2, 4), (4, 8), (4, 2)])
def test_one_f_one_b_takes_its_known_time_and_idles_its_known_share(p, m):
    """Time (m + p - 1)(F + B); each stage works m (F + B), so (p - 1) / (m + p - 1) of it is bubble."""
    timeline = one_f_one_b(p, m, forward_s=1.0, backward_s=2.0).timeline()
    assert timeline.step_time_s == 3 * (m + p - 1)
    for stage in range(p):
        spent = timeline.seconds(stage)
        assert (spent["forward"], spent["backward"]) == (m, 2 * m)
        numbers = [int(box.text) for box in timeline.boxes if box.lane == (stage, "") and box.kind == "forward"]
        assert numbers == list(range(m))
    last = [box for box in timeline.boxes if box.lane == (p - 1, "") and box.kind != "idle"]
    assert [box.kind for box in last[:2]] == ["forward", "backward"]
    assert last[1].label == f"backward, stage {p - 1}, micro-batch 0"


def test_a_dry_recording_has_no_timeline(tmp_path):
    recording = Recording({0: [compute(0, 1)]}, meta={"dry": True})
    with pytest.raises(ConfigError, match="dry recording has no times"):
        recording.timeline()
    with pytest.raises(ConfigError, match="dry recording has no times"):
        recording.to_chrome_trace(tmp_path / "trace.json")
    assert not list(tmp_path.iterdir())


def test_text_says_what_the_picture_shows():
    assert repr(two_ranks().timeline()).splitlines() == [
        "Timeline: 6 s",
        "rank 0: forward 1 + backward 3 + optimizer 1 + idle 1 = 6 s; communication: exposed 1 + hidden 1 = 2 s",
        "rank 1: forward 1 + backward 2 + optimizer 1 + idle 2 = 6 s; communication: exposed 2 + hidden 1 = 3 s"]
    assert repr(Recording({}).timeline()) == "Timeline: 0 us"


def boxes(*spans):
    """Boxes of a rank from ``(kind, start, end)``; those of communication on their own lane."""
    return [Box(Lane(rank, "g" if kind == "communication" else ""), kind, start, end, kind)
            for rank, kind, start, end in spans]


def test_exposed_communication_is_waiting_while_something_moves_on_the_rank_where_it_is_most():
    timeline = Timeline(boxes((0, "forward", 0, 4), (0, "idle", 4, 9), (0, "backward", 9, 10),
                              (0, "communication", 1, 3), (0, "communication", 2, 6), (0, "communication", 8, 9.5),
                              (1, "idle", 0, 2), (1, "communication", 0, 1), (1, "forward", 2, 10)))
    assert timeline.exposed_communication_s == 2 + 1
    table = timeline.by_rank()
    assert table.to_dict("list") == {"busy_s": [5, 8], "idle_s": [5, 2], "communication_s": [6.5, 1],
                                     "exposed_communication_s": [3, 1]}
    assert (table.busy_s + table.idle_s == timeline.step_time_s).all() and list(table.index) == [0, 1]


def test_idle_before_and_after_the_work_counts_for_the_step_but_not_for_the_stage():
    timeline = Timeline(boxes((0, "forward", 0, 4), (1, "idle", 0, 4), (1, "forward", 4, 8)))
    assert (timeline.bubble_fraction, timeline.bubble_overhead, timeline.stage_bubble_fraction) == (0.5, 1, 0)
    gap = Timeline(boxes((0, "forward", 0, 4), (1, "forward", 2, 3), (1, "idle", 3, 6), (1, "forward", 6, 8)))
    assert (gap.bubble_fraction, gap.stage_bubble_fraction) == (1 - 7 / 16, 0.5)


def test_the_measures_of_a_recorded_pipeline_are_those_of_its_formula():
    timeline = one_f_one_b(4, 8, forward_s=1.0, backward_s=2.0).timeline()
    assert timeline.bubble_fraction == pytest.approx(3 / 11) and timeline.bubble_overhead == pytest.approx(3 / 8)
    path = timeline.critical_path
    assert sum(box.end_s - box.start_s for box in path) == timeline.step_time_s == 33
    assert {box.kind for box in path} == {"forward", "backward"}


def test_the_critical_path_of_a_recording_goes_through_the_rank_that_called_last():
    """Rank 1 computes 5 s before it calls; rank 0 has waited since 1."""
    late = {0: [compute(0, 1), *call(1, 7, "all_reduce", group=GROUP), compute(7, 8)],
            1: [compute(0, 5), *call(5, 7, "all_reduce", group=GROUP), compute(7, 7.5)]}
    path = Recording(late).timeline().critical_path
    assert [(box.lane.rank, box.kind, box.start_s, box.end_s) for box in path] == [
        (1, "compute", 0, 5), (0, "communication", 5, 7), (0, "compute", 7, 8)]


def test_a_critical_path_ends_where_the_recorded_times_contradict_each_other():
    """A message that was there before its sender, by its own clock, sent it."""
    early = {0: [compute(0, 6), *call(6, 6, "isend", peer=1)], 1: [*call(0, 5, "irecv", peer=0), compute(5, 9)]}
    path = Recording(early).timeline().critical_path
    assert [(box.lane.rank, box.kind, box.start_s, box.end_s) for box in path] == [(1, "idle", 0, 5),
                                                                                   (1, "compute", 5, 9)]


def test_rates_need_what_events_cannot_know():
    recording = two_ranks()
    for name, need in (("tokens_per_s", "tokens=..."), ("mfu", "model_flops=...")):
        with pytest.raises(ConfigError, match=need):
            getattr(recording.timeline(), name)
    recording.meta.update(tokens=600, model_flops=60)
    assert recording.timeline().tokens_per_s == 100
    with pytest.raises(ConfigError, match="needs hardware.*replay"):
        recording.timeline().mfu  # noqa: B018
    with pytest.raises(ConfigError, match="no length"):
        Timeline([], tokens=3).tokens_per_s  # noqa: B018


def test_a_timeline_of_nothing_measures_nothing():
    timeline = Timeline([])
    assert timeline.bubble_fraction == timeline.bubble_overhead == timeline.stage_bubble_fraction == 0
    assert timeline.exposed_communication_s == 0 and timeline.critical_path == [] and len(timeline.by_rank()) == 0


def test_rows_keep_what_is_under_way_at_once_apart():
    boxes = [Box(Lane(0, "g"), "", start, end, "communication") for start, end in [(0, 3), (1, 2), (2, 4), (3, 5)]]
    assert [[(box.start_s, box.end_s) for box in row] for row in rows(boxes)] == [[(0, 3), (3, 5)], [(1, 2), (2, 4)]]


def trace(recording, path):
    recording.to_chrome_trace(path)
    return json.loads(path.read_text(), parse_constant=pytest.fail)


@pytest.mark.parametrize("make", [two_ranks, one_f_one_b])
def test_a_trace_is_valid_and_its_threads_nest(make, tmp_path):
    document = trace(make(), tmp_path / "trace.json")
    threads = defaultdict(list)
    for entry in document["traceEvents"]:
        assert entry["ph"] in "XMC" and isinstance(entry["pid"], int) and isinstance(entry["name"], str)
        if entry["ph"] == "X":
            assert entry["dur"] >= 0 and entry["ts"] >= 0
            start, length = round(entry["ts"] * 1e3), round(entry["dur"] * 1e3)  # ns
            threads[entry["pid"], entry["tid"]].append((start, -length))
    for spans in threads.values():
        opened = []
        for start, negative_length in sorted(spans):
            while opened and opened[-1] <= start:
                opened.pop()
            opened.append(start - negative_length)
            assert opened == sorted(opened, reverse=True)


def test_a_trace_has_a_thread_per_lane_and_a_counter_of_memory(tmp_path):
    entries = trace(two_ranks(), tmp_path / "trace.json")["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    assert names == {(0, 0): "compute", (0, 1): "0-1 default_pg", (0, 2): "to rank 1",
                     (1, 0): "compute", (1, 1): "0-1 default_pg", (1, 2): "from rank 0"}
    assert [e["args"]["name"] for e in entries if e["name"] == "process_name"] == ["rank 0", "rank 1"]
    counters = [e for e in entries if e["ph"] == "C" and e["pid"] == 0]
    assert counters[2]["ts"] == 2e6
    assert counters[2]["args"] == {"params": 1000, "grads": 1000, "optimizer_states": 0, "activations": 300, "other": 0}
    reduce = next(e for e in entries if e["name"] == "all_reduce")
    assert (reduce["ts"], reduce["dur"], reduce["tid"]) == (3e6, 2e6, 1)


def test_a_trace_of_calls_under_way_at_once_has_further_threads(tmp_path):
    events = [*(Event("issue", "all_reduce", at, at, group=GROUP, seq=at) for at in range(3)),
              *(Event("wait", "all_reduce", 5, 6, group=GROUP, seq=at) for at in range(3))]
    entries = trace(Recording({0: events}), tmp_path / "trace.json")["traceEvents"]
    names = [e["args"]["name"] for e in entries if e["name"] == "thread_name"]
    assert names == ["compute"] + ["0-1 default_pg"] * 3


def test_a_timeline_has_a_trace_with_a_thread_per_lane_too(tmp_path):
    path = tmp_path / "trace.json"
    two_ranks().timeline().to_chrome_trace(path)
    entries = json.loads(path.read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    assert names[0, 0] == "compute" and names[1, 2] == "from rank 0"
    assert [(e["name"], e["ts"], e["dur"]) for e in entries if e["ph"] == "X" and (e["pid"], e["tid"]) == (0, 0)] == [
        ("forward, micro-batch 0", 0, 1e6), ("backward, micro-batch 0", 1e6, 3e6),
        ("waits for all_reduce", 4e6, 1e6), ("optimizer", 5e6, 1e6)]


def test_timelines_may_be_made_without_a_recording():
    timeline = Timeline([Box(Lane(1), "B", 1, 3, "backward", "0"), Box(Lane(0), "F", 0, 1, "forward", "0")])
    assert timeline.lanes == [(0, ""), (1, "")] and timeline.step_time_s == 3
