"""The simulator against times worked out by hand, and against a second, naive evaluator on random programs."""
import random

import pytest

from dtlab.errors import ConfigError
from dtlab.simulate import Timeline
from dtlab.simulate.boxes import boxes_of_run
from dtlab.simulate.engine import Transfer, simulate


def message(source, destination, latency_s=0.0, transfer_s=0.0, name="message"):
    links = (source, "out"), (destination, "in")
    return Transfer(name, (source, destination), (source, destination), latency_s, transfer_s, links)


def collective(members, lane="group", latency_s=0.0, transfer_s=0.0, name="all_reduce"):
    return Transfer(name, tuple(members), lane, latency_s, transfer_s,
                    tuple((rank, way) for rank in members for way in ("out", "in")))


def timeline_of(programs, transfers, **options):
    run = simulate(programs, transfers, **options)
    look = ("work", "compute", "")
    looks = {rank: [look] * len(program) for rank, program in programs.items()}
    shows = [{rank: (f"{t.lane}", t.name, "") for rank in t.members} for t in transfers]
    return Timeline(boxes_of_run(run, programs, looks, shows))


def test_four_computes_in_a_ring_take_their_sum_and_that_of_the_messages():
    messages = [message(rank, (rank + 1) % 4, latency_s=0.25, transfer_s=0.5) for rank in range(4)]
    programs = {0: [(1, 0), (0, 3), (0, ~3)]}
    programs |= {rank: [(0, rank - 1), (0, ~(rank - 1)), (rank + 1, rank)] for rank in range(1, 4)}
    run = simulate(programs, messages)
    assert run.end_s == {0: 1 + 2 + 3 + 4 + 4 * 0.75, 1: 3.75, 2: 7.5, 3: 12.25}  # a start is no wait


@pytest.mark.parametrize("compute_s, communication_s", [(3.0, 2.0), (2.0, 3.0), (2.0, 2.0)])
def test_overlap_hides_exactly_the_shorter_of_both(compute_s, communication_s):
    transfers = [collective((0, 1), transfer_s=communication_s)]
    timeline = timeline_of({rank: [(1, 0), (compute_s, ~0), (1, None)] for rank in (0, 1)}, transfers)
    assert timeline.step_time_s == 2 + max(compute_s, communication_s)
    assert timeline.exposed_communication_s == max(0, communication_s - compute_s)
    at_once = timeline_of({rank: [(1, 0), (0, ~0), (compute_s, None), (1, None)] for rank in (0, 1)}, transfers)
    assert at_once.step_time_s == 2 + compute_s + communication_s
    assert at_once.exposed_communication_s == communication_s


def test_two_transfers_on_a_link_get_half_of_it_each_while_both_are_there():
    transfers = [collective((0,), "a", transfer_s=4), collective((0,), "b", transfer_s=2)]
    run = simulate({0: [(0, 0), (2, 1), (0, ~0), (0, ~1)]}, transfers)
    assert run.moved == [(0, 6), (2, 6)]  # 2 s alone, then both have 2 s left, at half the rate
    alone = [t._replace(links=(t.lane,)) for t in transfers]
    assert simulate({0: [(0, 0), (2, 1), (0, ~0), (0, ~1)]}, alone).moved == [(0, 4), (2, 4)]


def test_who_stays_on_a_link_speeds_up_when_another_leaves():
    transfers = [collective((0,), lane, transfer_s=seconds) for lane, seconds in (("a", 1), ("b", 2), ("c", 4))]
    run = simulate({0: [(0, number) for number in range(3)]}, transfers)
    assert [end for _, end in run.moved] == pytest.approx([3, 5, 7])


def test_latency_is_not_shared():
    transfers = [collective((0,), lane, latency_s=3) for lane in "abc"]
    assert simulate({0: [(0, 0), (0, 1), (0, 2)]}, transfers).moved == [(0, 3)] * 3
    transfers = [t._replace(latency_s=3, transfer_s=1) for t in transfers]
    assert simulate({0: [(0, 0), (0, 1), (0, 2)]}, transfers).moved == [(0, 6)] * 3


def test_a_rank_sends_and_receives_at_once_but_two_sends_share():
    both_ways = [message(0, 1, transfer_s=2), message(1, 0, transfer_s=2)]
    assert simulate({0: [(0, 0), (0, 1)], 1: [(0, 0), (0, 1)]}, both_ways).moved == [(0, 2), (0, 2)]
    two_out = [message(0, 1, transfer_s=2), message(0, 2, transfer_s=2)]
    assert simulate({0: [(0, 0), (0, 1)], 1: [(0, 0)], 2: [(0, 1)]}, two_out).moved == [(0, 4), (0, 4)]


def test_calls_of_a_lane_go_one_after_the_other():
    transfers = [collective((0, 1), latency_s=1, transfer_s=1), collective((0, 1), latency_s=1, transfer_s=2)]
    assert simulate({rank: [(rank, 0), (0, 1)] for rank in (0, 1)}, transfers).moved == [(1, 3), (3, 6)]


def test_a_transfer_begins_when_the_last_of_its_members_starts_it_and_others_are_not_waited_for():
    transfers = [collective((0, 1, 2, 63), transfer_s=1)]
    run = simulate({0: [(1, 0)], 1: [(5, 0)], 2: [(3, 0), (0, ~0)]}, transfers)
    assert run.moved == [(5, 6)] and run.called == [(1, 5)] and run.end_s == {0: 1, 1: 5, 2: 6}


@pytest.mark.parametrize("cores, took", [(None, 3), (4, 3), (9, 3), (2, 6), (1, 12), (3, 4)])
def test_four_ranks_on_two_cores_take_twice_as_long(cores, took):
    run = simulate({rank: [(3, None)] for rank in range(4)}, [], cores=cores)
    assert run.end_s == dict.fromkeys(range(4), pytest.approx(took))


def test_cores_are_shared_only_by_who_runs():
    """Ranks of 1, 2 and 3 s on one core: 1 s at a third each; then half each; then alone. Who waits takes none."""
    run = simulate({rank: [(rank + 1, None)] for rank in range(3)}, [], cores=1)
    assert run.end_s == {0: 3, 1: 5, 2: 6}
    transfers = [collective((0, 1), transfer_s=10)]
    run = simulate({0: [(0, 0), (0, ~0), (2, None)], 1: [(2, 0)], 2: [(2, None)]}, transfers, cores=1)
    assert run.end_s == {0: 16, 1: 4, 2: 4}


def test_who_sleeps_takes_no_core():
    run = simulate({0: [(3, None)], 1: [(4, None)]}, [], cores=1, asleep={1: {0}})
    assert run.end_s == {0: 3, 1: 4}
    assert simulate({0: [(3, None)], 1: [(4, None)]}, [], cores=1).end_s == {0: 6, 1: 7}


def pipeline(num_stages, orders, forward_s=1.0, backward_s=2.0, message_s=0.0):
    """``(programs, transfers)``: each stage works in the order given, ``[("F", micro_batch), ...]``."""
    transfers, numbers = [], {}

    def number(kind, source, i):
        destination = source + 1 if kind == "F" else source - 1
        if (kind, source, i) not in numbers:
            numbers[kind, source, i] = len(transfers)
            transfers.append(message(source, destination, transfer_s=message_s, name=f"{kind}{i}"))
        return numbers[kind, source, i]

    programs = {}
    for stage, order in enumerate(orders):
        steps = programs[stage] = []
        for kind, i in order:
            source, is_last = (stage - 1, stage == num_stages - 1) if kind == "F" else (stage + 1, stage == 0)
            if 0 <= source < num_stages:
                steps += [(0, number(kind, source, i)), (0, ~number(kind, source, i))]
            steps.append((forward_s if kind == "F" else backward_s, None if is_last else number(kind, stage, i)))
    return programs, transfers


def gpipe(p, m):
    return [[("F", i) for i in range(m)] + [("B", i) for i in range(m)] for _ in range(p)]


def one_f_one_b(p, m):
    orders = []
    for stage in range(p):
        warmup = min(p - stage - 1, m)
        steady = [action for i in range(m - warmup) for action in (("F", warmup + i), ("B", i))]
        orders.append([("F", i) for i in range(warmup)] + steady + [("B", i) for i in range(m - warmup, m)])
    return orders


@pytest.mark.parametrize("order", [gpipe, one_f_one_b])
@pytest.mark.parametrize("p, m", [(1, 3), (4, 1), (4, 2), (4, 8), (4, 16), (8, 8), (8, 32)])
def test_a_pipeline_fills_and_drains_as_the_formula_says(order, p, m):
    timeline = timeline_of(*pipeline(p, order(p, m)))
    assert timeline.step_time_s == 3 * (m + p - 1)
    assert timeline.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))
    assert timeline.bubble_overhead == pytest.approx((p - 1) / m)
    assert timeline.stage_bubble_fraction == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize("p, m, fraction", [(4, 8, 0.2727), (4, 16, 0.1579), (8, 8, 0.4667), (8, 32, 0.1795)])
def test_the_measures_are_those_that_other_simulators_agree_on(p, m, fraction):
    timeline = timeline_of(*pipeline(p, one_f_one_b(p, m)))
    assert round(timeline.bubble_fraction, 4) == round(timeline.stage_bubble_fraction, 4) == fraction
    if (p, m) == (4, 8):
        assert timeline.bubble_overhead == pytest.approx(0.375)


def test_messages_lengthen_a_pipeline_by_their_way_there_and_back():
    p, m, message_s = 4, 1, 0.25
    timeline = timeline_of(*pipeline(p, gpipe(p, m), message_s=message_s))
    assert timeline.step_time_s == 3 * p + 2 * (p - 1) * message_s


@pytest.mark.parametrize("message_s", [0.0, 0.125])
def test_the_critical_path_has_no_gaps_and_follows_the_slow_stage(message_s):
    programs, transfers = pipeline(3, gpipe(3, 4), message_s=message_s)
    programs[1] = [(seconds * 4, action) for seconds, action in programs[1]]
    timeline = timeline_of(programs, transfers)
    path = timeline.critical_path
    assert path[0].start_s == 0 and path[-1].end_s == timeline.step_time_s
    assert all(before.end_s == after.start_s for before, after in zip(path, path[1:]))
    assert sum(box.end_s - box.start_s for box in path if box.lane == (1, "")) == 4 * 4 * 3
    assert {box.kind for box in path} == {"compute", "communication"} - ({"communication"} if not message_s else set())


def test_the_critical_path_goes_through_the_queue_of_a_lane():
    transfers = [collective((0,), transfer_s=3, name=name) for name in "ab"]
    path = timeline_of({0: [(1, 0), (1, 1), (0, ~1), (1, None)]}, transfers).critical_path
    assert [(box.label, box.start_s, box.end_s) for box in path] == [("work", 0, 1), ("a", 1, 4), ("b", 4, 7),
                                                                     ("work", 7, 8)]


@pytest.mark.parametrize("programs, said", [
    ({0: [(0, ~0)], 1: [(0, 0)]}, "rank 0 waits for message, which rank 0 never started"),
    ({0: [(0, 0), (0, ~0), (0, 1)], 1: [(0, 1), (0, ~1), (0, 0)]},
     "rank 0 waits for message, which rank 1 never started; rank 1 waits for message back, which rank 0 never started"),
    ({0: [(0, 0), (0, ~0)], 1: []}, "rank 0 waits for message, which rank 1 never started"),
])
def test_programs_that_never_end_are_told_who_waits_for_what(programs, said):
    with pytest.raises(ConfigError) as error:
        simulate(programs, [message(0, 1), message(1, 0, name="message back")])
    assert str(error.value) == f"the programs never end: {said}"


# a second evaluator, and random programs for both


def naive(programs, transfers, cores=None):
    """At each instant all rates from scratch; then on to what ends first. ``(moved, end_s)``."""
    now, moved, end_s = 0.0, [None] * len(transfers), {}
    todo = {rank: [list(step) for step in program] for rank, program in programs.items()}
    started, queued, under_way = [set() for _ in transfers], [], {}  # under way: [begun, latency left, transfer left]
    while True:
        changed = True
        while changed:  # what takes no time
            changed = False
            for rank, steps in todo.items():
                while steps and steps[0][0] <= 1e-12:
                    action = steps[0][1]
                    if action is not None and action < 0 and moved[~action] is None:
                        break
                    if action is not None and action >= 0:
                        started[action].add(rank)
                    steps.pop(0)
                    changed = True
                if not steps:
                    end_s.setdefault(rank, now)
            for number, t in enumerate(transfers):
                members = {rank for rank in t.members if rank in programs}
                if moved[number] is None and number not in queued and started[number] == members != set():
                    changed = True
                    if t.latency_s + t.transfer_s == 0:
                        moved[number] = now, now
                    else:
                        queued.append(number)
            for number in queued:
                ahead = [n for n in queued[:queued.index(number)] if transfers[n].lane == transfers[number].lane]
                if number not in under_way and not ahead:
                    under_way[number] = [now, transfers[number].latency_s, transfers[number].transfer_s]
            for number, (begun, latency_s, transfer_s) in list(under_way.items()):
                if latency_s <= 1e-12 and transfer_s <= 1e-12:
                    moved[number], changed = (begun, now), True
                    queued.remove(number)
                    del under_way[number]
        running = [steps[0] for steps in todo.values() if steps and steps[0][0] > 1e-12]
        flowing = [number for number, (_, latency_s, _) in under_way.items() if latency_s <= 1e-12]
        left = [(step, 0, 1 if cores is None else min(1, cores / len(running))) for step in running]
        for number, parts in under_way.items():
            users = [sum(link in transfers[n].links for n in flowing) for link in transfers[number].links]
            left.append((parts, 2, 1 / max(users, default=1)) if number in flowing else (parts, 1, 1))
        if not left:
            return moved, end_s
        passed = min(parts[place] / rate for parts, place, rate in left)
        now += passed
        for parts, place, rate in left:
            parts[place] -= passed * rate


def random_programs(seed):
    """Ranks that start the transfers they take part in, in one order for all, and wait for them some time later."""
    draw = random.Random(seed)
    some = lambda: draw.choice([0, draw.random(), draw.random() * 3])
    ranks = range(draw.choice([1, 2, 3, 5]))
    transfers, programs = [], {rank: [] for rank in ranks}
    open_calls = {rank: [] for rank in ranks}
    for number in range(draw.randrange(1, 14)):
        members = tuple(sorted(draw.sample(range(6), draw.randrange(1, 5))))
        members = members if set(members) & set(ranks) else (0, *members)
        links = tuple((rank, draw.choice("ab")) for rank in members if rank in ranks)
        transfers.append(Transfer(f"t{number}", members, draw.choice("xyz"), some(), some(), links))
        for rank in set(members) & set(ranks):
            programs[rank].append((some(), number))
            open_calls[rank].append(number)
        for rank in ranks:
            while open_calls[rank] and draw.random() < 0.4:
                programs[rank].append((some(), ~open_calls[rank].pop(draw.randrange(len(open_calls[rank])))))
            if draw.random() < 0.3:
                programs[rank].append((some(), None))
    for rank in ranks:
        programs[rank] += [(some(), ~number) for number in open_calls[rank]]
    return programs, transfers


@pytest.mark.parametrize("seed", range(60))
def test_random_programs_take_what_a_naive_evaluator_says(seed):
    programs, transfers = random_programs(seed)
    for cores in (None, 1, 2):
        run = simulate(programs, transfers, cores=cores)
        moved, end_s = naive(programs, transfers, cores)
        assert [time_s for pair in run.moved for time_s in pair] == pytest.approx([t for pair in moved for t in pair])
        assert run.end_s == pytest.approx(end_s)


@pytest.mark.parametrize("seed", range(60, 75))
def test_boxes_are_the_same_bytes_twice_and_whatever_the_order_of_the_ranks(seed):
    programs, transfers = random_programs(seed)
    said = [repr(timeline_of(given, transfers, cores=cores).boxes).encode() for cores in (None, 2)
            for given in (programs, programs, dict(reversed(programs.items())))]
    assert len(set(said[:3])) == len(set(said[3:])) == 1


@pytest.mark.parametrize("seed", range(75, 90))
def test_critical_paths_of_random_programs_have_no_gaps(seed):
    timeline = timeline_of(*random_programs(seed))
    path = timeline.critical_path
    assert all(before.end_s == after.start_s for before, after in zip(path, path[1:]))
    if path:
        assert path[0].start_s == 0 and path[-1].end_s == timeline.step_time_s
