"""Tables against recordings made by hand."""
import random

import pytest
from hand_made import GROUP, alloc, call, compute, free, one_f_one_b, two_ranks

from dtlab.errors import ConfigError
from dtlab.simulate import Recording
from dtlab.simulate.tables import live_bytes

CATEGORIES = ["params", "grads", "optimizer_states", "activations", "other"]


def rows(table):
    return [tuple(row) for row in table.itertuples(index=False)]


def peaks(*events):
    return Recording({0: list(events)}).memory().loc[0].to_dict()


def test_communication_sums_calls_and_bytes_by_op_and_group():
    table = two_ranks().communication()
    assert list(table.columns) == ["rank", "op", "group", "calls", "tensor_bytes", "wire_bytes"]
    assert rows(table) == [(0, "send", "", 1, 100, 100), (0, "all_reduce", GROUP, 1, 1000, 1000),
                           (1, "recv", "", 1, 100, 0), (1, "all_reduce", GROUP, 1, 1000, 1000)]


def test_groups_of_the_same_ranks_are_kept_apart_and_calls_added():
    events = [event for seq in range(3) for event in call(seq, seq, "all_gather", seq, group="0-1#1:tp", bytes=8,
                                                          wire_bytes=4.0)]
    events += call(4, 4, "all_gather", group="0-1#2:dp", bytes=6, wire_bytes=3.0)
    assert rows(Recording({5: events}).communication()) == [(5, "all_gather", "0-1#1:tp", 3, 24, 12.0),
                                                            (5, "all_gather", "0-1#2:dp", 1, 6, 3.0)]


def test_a_pipeline_sends_each_activation_and_gradient_once():
    table = one_f_one_b(4, 8).communication()
    sent = table[table.op == "isend"].set_index("rank")["wire_bytes"]
    assert sent.to_dict() == {0: 8 * 4096, 1: 16 * 4096, 2: 16 * 4096, 3: 8 * 4096}
    assert table[table.op == "irecv"]["wire_bytes"].sum() == 0


def test_flops_by_phase_and_op():
    events = [compute(0, 1, flops=10, name="forward"), compute(1, 2, flops=20, name="forward"),
              compute(2, 3, op="aten.add", name="forward"), compute(3, 4, flops=7)]
    table = Recording({0: events}).flops()
    assert list(table.columns) == ["rank", "phase", "op", "calls", "flops"]
    assert rows(table) == [(0, "forward", "aten.mm", 2, 30), (0, "", "aten.mm", 1, 7)]


def test_flops_stay_whole_beyond_float_precision():
    table = Recording({0: [compute(0, 1, flops=2**60 + 1), compute(1, 2, flops=1)]}).flops()
    assert table.flops.tolist() == [2**60 + 2]


@pytest.mark.parametrize("name, columns", [("communication", 6), ("flops", 5)])
def test_empty_recordings_give_empty_tables_that_add_up(name, columns):
    for recording in (Recording({}), Recording({0: [], 1: []})):
        table = getattr(recording, name)()
        assert table.shape == (0, columns) and table["calls"].sum() == 0


def test_memory_at_the_peak_and_each_ones_own():
    """params 100 throughout; activations up to 50 before grads of 80 come: the peak is 100 + 20 + 80."""
    table = Recording({3: [
        alloc(0, 1, 100, "params"), alloc(1, 2, 30, "activations"), alloc(2, 3, 20, "activations"), free(3, 2),
        alloc(4, 4, 80, "grads"), free(5, 3), free(6, 4), alloc(7, 5, 60, "optimizer_states"), alloc(8, 6, 5),
    ]}).memory()
    assert list(table.columns) == [*CATEGORIES, "peak", *(f"peak_{name}" for name in CATEGORIES)]
    assert table.index.name == "rank" and table.index.tolist() == [3]
    assert table.loc[3].tolist() == [100, 80, 0, 20, 0, 200, 100, 80, 60, 50, 5]


def test_the_first_of_equal_peaks_counts():
    held = peaks(alloc(0, 1, 10, "grads"), free(1, 1), alloc(2, 2, 10, "activations"))
    assert (held["grads"], held["activations"], held["peak"]) == (10, 0, 10)


def test_a_storage_counts_once():
    """Seen twice, it is not two; grown, it has its new size; under a new category it leaves the old one."""
    held = peaks(alloc(0, 1, 10, "grads"), alloc(1, 1, 10, "grads"))
    assert held["peak"] == held["peak_grads"] == 10
    held = peaks(alloc(0, 1, 10, "other"), alloc(1, 1, 25, "params"), free(2, 1), alloc(3, 2, 5, "grads"))
    assert (held["params"], held["other"], held["peak"], held["peak_other"]) == (25, 0, 25, 10)


def test_what_was_there_before_may_go_and_nothing_is_negative():
    held = peaks(free(0, 99), alloc(1, 1, 10, "grads"), free(2, 1), free(3, 1), alloc(4, 2, 4, "grads"))
    assert held["peak"] == held["grads"] == 10


def test_a_random_life_against_a_second_count():
    rng = random.Random(0)
    events, alive, highest = [], {}, 0
    for at in range(2000):
        storage = rng.randrange(40)
        if rng.random() < 0.5:
            events.append(free(at, storage))
            alive.pop(storage, None)
        else:
            alive[storage] = rng.randrange(1000)
            events.append(alloc(at, storage, alive[storage], rng.choice(CATEGORIES)))
        highest = max(highest, sum(alive.values()))
    held = peaks(*events)
    assert held["peak"] == sum(held[name] for name in CATEGORIES) == highest
    lives = [dict(live) for _, live in live_bytes(events)]
    assert min(min(live.values()) for live in lives) >= 0 and sum(lives[-1].values()) == sum(alive.values())


def test_an_unknown_category_is_named():
    with pytest.raises(ConfigError, match="storage 1 has category 'cache': none of params, grads"):
        peaks(alloc(0, 1, 10, "cache"))


def test_a_rank_that_allocates_nothing_has_zeros():
    assert Recording({0: [], 1: []}).memory()["peak"].tolist() == [0, 0]
