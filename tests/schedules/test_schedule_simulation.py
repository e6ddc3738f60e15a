"""A simulated schedule against the general engine on the same program, and what it says of memory and idle time."""
import pytest
from naive import MAKERS, is_allowed

from dtlab import theory
from dtlab.errors import ConfigError
from dtlab.plots.timeline import timeline as picture
from dtlab.schedules import Action, Backward, BackwardInput, Forward, Schedule, gpipe, one_f_one_b
from dtlab.simulate import Timeline
from dtlab.simulate.boxes import boxes_of_run
from dtlab.simulate.engine import Transfer, simulate

LINK = theory.Link("slow", 100.0, 0.25)
CASES = [(name, p, m) for name in MAKERS for p, m in ((1, 2), (2, 4), (3, 7), (4, 8)) if is_allowed(name, p, m)]
NAMES = {"F": ("forward", "forward"), "B": ("backward", "backward"), "I": ("backward_input", "backward"),
         "W": ("backward_weight", "weight")}  # fmt: skip


def by_the_engine(schedule, seconds, hop_s=0.0, overlap_s=None):
    """The timeline of dtlab.simulate.engine; a message is a transfer that its sender starts."""
    numbers, transfers, shows = {}, [], []
    home, last = schedule.stage_to_rank, schedule.num_stages - 1

    def message(way, stage, micro_batch):
        """The transfer out of a stage; None: the next one is on the same rank, or there is none."""
        to = stage + 1 if way == Forward else stage - 1
        if not 0 <= to <= last or home[to] == home[stage]:
            return None
        key = way, stage, micro_batch
        if key not in numbers:
            numbers[key] = len(transfers)
            transfers.append(Transfer(str(key), (home[stage],), (home[stage], home[to]), 0.0, hop_s))
            shows.append({home[stage]: (f"to rank {home[to]}", "send", str(micro_batch)),
                          home[to]: (f"from rank {home[stage]}", "recv", str(micro_batch))})
        return numbers[key]

    programs, looks = {}, {}
    for rank, actions in enumerate(schedule.actions):
        steps, seen = [], []
        for action in actions:
            parts = action.parts or (action,)
            share = overlap_s / sum(seconds(part) for part in parts) if action.parts and overlap_s else 1
            waits, starts = [], []
            for part in parts:
                if part.kind != "W":
                    way = Forward if part.kind == Forward else Backward
                    before = part.stage + (-1 if way == Forward else 1)
                    waits.append(message(way, before, part.micro_batch) if 0 <= before <= last else None)
                    starts.append(message(way, part.stage, part.micro_batch))
            steps += [(0.0, ~number) for number in waits if number is not None]
            steps += [(seconds(part) * share, None) for part in parts]
            steps += [(0.0, number) for number in starts if number is not None]
            seen += [("call", "compute", "")] * sum(number is not None for number in waits)
            seen += [(f"{NAMES[part.kind][0]}, stage {part.stage}, micro-batch {part.micro_batch}", NAMES[part.kind][1],
                      str(part.micro_batch)) for part in parts]  # fmt: skip
            seen += [("call", "compute", "")] * sum(number is not None for number in starts)
        programs[rank], looks[rank] = steps, seen
    return Timeline(boxes_of_run(simulate(programs, transfers), programs, looks, shows))


def rows(boxes):
    return sorted((str(box.lane), box.start_s, box.end_s, box.label, box.kind, box.text, box.after) for box in boxes)


@pytest.mark.parametrize("name, p, m", CASES)
@pytest.mark.parametrize("message_bytes", [None, 0, 60])
def test_the_timeline_is_the_engines(name, p, m, message_bytes):
    schedule = MAKERS[name](p, m)
    forward_s = [1 + stage / 8 for stage in range(schedule.num_stages)]
    weight_s = [0.75 + stage / 16 for stage in range(schedule.num_stages)]
    hop_s = 0.0 if message_bytes is None else LINK.time_s(message_bytes)

    def seconds(part):
        whole = {"F": forward_s[part.stage], "B": 2.75, "I": 2.75 - weight_s[part.stage], "W": weight_s[part.stage]}
        return whole[part.kind]

    ours = schedule.simulate(forward_s=forward_s, backward_s=2.75, weight_s=weight_s, overlap_s=3.25,
                             link=LINK if hop_s else None, message_bytes=message_bytes or 0)  # fmt: skip
    engine = by_the_engine(schedule, seconds, hop_s, overlap_s=3.25)
    for name in ("step_time_s", "bubble_fraction", "bubble_overhead", "stage_bubble_fraction", "start_s",
                 "exposed_communication_s"):  # fmt: skip
        assert getattr(ours, name) == pytest.approx(getattr(engine, name)), name
    one, other = rows(ours.boxes), rows(engine.boxes)
    assert [row[3:6] for row in one] == [row[3:6] for row in other]
    assert [row[0] for row in one] == [row[0] for row in other]
    assert [row[1:3] for row in one] == [pytest.approx(row[1:3]) for row in other]
    assert ours.lanes == engine.lanes and ours.by_rank().equals(Timeline(ours.boxes).by_rank())
    path = ours.critical_path
    assert sum(box.end_s - box.start_s for box in path) == pytest.approx(ours.step_time_s)
    assert rows(path) == rows(Timeline(ours.boxes).critical_path)


def test_messages_of_one_way_follow_each_other():
    """Forwards of 1 s, messages of 3 s: the second leaves when the first is there."""
    timeline = gpipe(2, 2).simulate(forward_s=1, backward_s=1, link=theory.Link("slow", 1.0, 2.0), message_bytes=1)
    sent = [(box.start_s, box.end_s) for box in timeline.boxes if box.label == "send" and box.lane.rank == 0]
    assert sent == [(1.0, 4.0), (4.0, 7.0)]
    assert timeline.step_time_s == 16  # 7 + F + B + 2 messages + B
    assert [(box.start_s, box.end_s) for box in timeline.critical_path if box.kind == "communication"] == [
        *sent, (9.0, 12.0), (12.0, 15.0)]  # fmt: skip


def test_stages_on_one_rank_need_no_message():
    timeline = MAKERS["zero_bubble_v"](1, 3).simulate(link=LINK, message_bytes=10**6)
    assert timeline.bubble_fraction == 0 and not any(lane.channel for lane in timeline.lanes)


def test_the_three_idle_measures_of_1f1b():
    """p = 4, m = 8: 9 of 33 seconds; 9 for 24 of work; the first stage idles as long between its first and last."""
    timeline = one_f_one_b(4, 8).simulate(forward_s=1, backward_s=2)
    assert timeline.bubble_fraction == pytest.approx(3 / 11)
    assert timeline.bubble_overhead == pytest.approx(3 / 8)
    assert timeline.stage_bubble_fraction == pytest.approx(3 / 11)


def test_a_slow_stage_sets_the_pace():
    timeline = one_f_one_b(3, 10).simulate(forward_s=[1, 3, 1], backward_s=[2, 6, 2])
    assert timeline.by_rank().busy_s.tolist() == [30, 90, 30]
    assert timeline.step_time_s == 1 + 90 + 2  # in to the slow stage, and its last gradient back
    on_slow = [box for box in timeline.critical_path if box.lane.rank == 1]
    assert sum(box.end_s - box.start_s for box in on_slow) > 80


def test_memory_over_time_of_1f1b():
    """Stage 0 of two, three micro-batches: F0 F1 B0 F2 B1 B2."""
    times, held = one_f_one_b(2, 3).simulate(forward_s=1, backward_s=2, activation_bytes=[10, 20]).in_flight(0)
    assert held.tolist() == [10, 20, 10, 20, 10, 0]
    assert times.tolist() == [0, 1, 6, 6, 9, 12]


def test_what_weights_need_stays_until_their_backward():
    schedule = MAKERS["zero_bubble_h1"](2, 2)
    times, held = schedule.simulate(activation_bytes=10, weight_bytes=4).in_flight(1)
    assert [action.kind for action in schedule.actions[1]] == list("FIFIWW")[:4] + ["W", "W"]
    assert held.tolist() == [10, 4, 14, 8, 4, 0]
    assert times.tolist() == [1, 3, 3, 5, 6, 7]


def test_a_pair_holds_both_while_it_runs():
    schedule = Schedule([[Action(Forward, 0, 0), Action.pair(Action(Forward, 0, 1), Action(Backward, 0, 0)),
                          Action(Backward, 0, 1)]], 1, 2, (0,)).check()  # fmt: skip
    timeline = schedule.simulate(forward_s=1, backward_s=2, overlap_s=2.4)
    times, held = timeline.in_flight(0)
    assert timeline.step_time_s == pytest.approx(1 + 2.4 + 2)
    assert held.tolist() == [1, 2, 1, 0] and times.tolist() == pytest.approx([0, 1, 3.4, 5.4])


def test_more_in_flight_than_the_cap_is_refused():
    assert one_f_one_b(4, 8).simulate(memory_cap=4).peak_in_flight == [4, 3, 2, 1]
    with pytest.raises(ConfigError, match=r"memory_cap \(3\): rank 0 holds more from 3 s on, with forward, stage 0, "
                                          r"micro-batch 3; this schedule needs 4"):
        one_f_one_b(4, 8).simulate(memory_cap=3)


@pytest.mark.parametrize("arguments, said", [
    ({"forward_s": -1}, "forward_s"), ({"backward_s": [1, 2, 3]}, "backward_s has 3 values: it needs one, or one for"),
    ({"weight_s": 3}, "weight_s, a part of backward_s: 3.0 of 2.0 in stage 0"),
    ({"activation_bytes": 1, "weight_bytes": 2}, "weight_bytes"), ({"overlap_s": "x"}, "overlap_s"),
    ({"link": LINK, "message_bytes": -1}, "message_bytes"), ({"memory_cap": -1}, "memory_cap"),
    ({"forward_s": float("nan")}, "forward_s"),
])  # fmt: skip
def test_times_that_cannot_be_are_refused(arguments, said):
    with pytest.raises(ConfigError, match=said):
        one_f_one_b(2, 2).simulate(**arguments)


def test_an_edit_afterwards_does_not_change_what_was_simulated():
    schedule = MAKERS["zero_bubble_h1"](2, 3)
    timeline, before = schedule.simulate(), schedule.simulate()
    drawn = rows(before.boxes)
    schedule.actions[0].reverse()
    assert rows(timeline.boxes) == drawn
    assert "with forward, stage 0, micro-batch 1" in timeline.too_much(1)


def test_it_is_drawn_with_micro_batch_numbers():
    drawn = str(picture(one_f_one_b(2, 3).simulate()))
    assert ">F2</text>" in drawn and ">B2</text>" in drawn
    assert ">W1</text>" in str(picture(MAKERS["zero_bubble_h1"](2, 3).simulate()))


def test_the_benchmarks_evaluator_agrees():
    from benchmarks.schedules import evaluate

    for name in ("one_f_one_b", "zero_bubble_h1", "zero_bubble_v"):
        schedule = MAKERS[name](3, 6)
        step_time_s, bubble, ends = evaluate(schedule.actions, {"F": 1, "B": 2, "I": 1, "W": 1})
        timeline = schedule.simulate(forward_s=1, backward_s=2)
        assert (step_time_s, bubble) == pytest.approx((timeline.step_time_s, timeline.bubble_fraction))
        assert ends[BackwardInput, 0, 5] == max(box.end_s for box in timeline.boxes if box.label.startswith(
            ("backward, stage 0, micro-batch 5", "backward_input, stage 0, micro-batch 5")))  # fmt: skip
