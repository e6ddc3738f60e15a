"""Costs of collectives: against published formulas, the course's figures, schedules played message by message."""
import doctest
from math import log2

import numpy as np
import pytest

from dtlab import theory
from dtlab.errors import ConfigError
from dtlab.theory import ALGORITHMS, Link, busbw, busiest_rank_bytes, collective_table, collective_time_s, collectives

ALPHA, B = 20e-6, 25e9
LINK = Link("test", B, ALPHA)
NVLINK, INFINIBAND = Link("NVLink", 250e9, 3e-6), Link("InfiniBand", 25e9, 20e-6)
MiB = 2**20


def time_ms(op, size, algorithm, tensor_bytes=25e6):
    return 1e3 * collective_time_s(op, tensor_bytes, size=size, link=LINK, algorithm=algorithm)


def test_figures_of_the_lesson_gather_then_broadcast_against_ring_at_16_MiB():
    sent = {a: [busiest_rank_bytes("all_reduce", 16 * MiB, size=n, algorithm=a) / MiB for n in (4, 64)]
            for a in ("naive", "ring")}
    assert sent == {"naive": [48, 1008], "ring": [24, 31.5]}


def test_figures_of_the_lesson_25_MB_at_20_us_and_25_GB_per_s():
    assert round(time_ms("all_reduce", 4, "ring"), 1) == 1.6
    assert round(time_ms("all_reduce", 1024, "ring"), 1) == 42.9
    assert round(time_ms("all_reduce", 1024, "halving_doubling"), 1) == 2.4
    assert round(time_ms("all_reduce", 1024, "ring") / time_ms("all_reduce", 4, "ring")) == 26


@pytest.mark.parametrize("p", [2, 8, 64])
@pytest.mark.parametrize("op, algorithm, steps, share", [
    ("all_reduce", "recursive_doubling", lambda p: log2(p), lambda p: log2(p)),
    ("all_reduce", "halving_doubling", lambda p: 2 * log2(p), lambda p: 2 * (p - 1) / p),
    ("all_reduce", "ring", lambda p: 2 * (p - 1), lambda p: 2 * (p - 1) / p),
    ("all_gather", "ring", lambda p: p - 1, lambda p: (p - 1) / p),
    ("all_gather", "recursive_doubling", lambda p: log2(p), lambda p: (p - 1) / p),
    ("all_gather", "bruck", lambda p: log2(p), lambda p: (p - 1) / p),
    ("reduce_scatter", "recursive_halving", lambda p: log2(p), lambda p: (p - 1) / p),
    ("reduce_scatter", "ring", lambda p: p - 1, lambda p: (p - 1) / p),
    ("broadcast", "tree", lambda p: log2(p), lambda p: log2(p)),
    ("broadcast", "scatter_all_gather", lambda p: log2(p) + p - 1, lambda p: 2 * (p - 1) / p),
    ("reduce", "tree", lambda p: log2(p), lambda p: log2(p)),
    ("reduce", "reduce_scatter_gather", lambda p: 2 * log2(p), lambda p: 2 * (p - 1) / p),
    ("all_to_all", "pairwise", lambda p: p - 1, lambda p: (p - 1) / p),  # the source rounds this up to 1
    ("all_to_all", "bruck", lambda p: log2(p), lambda p: log2(p) / 2),
])
def test_costs_are_those_of_mpich(op, algorithm, steps, share, p):
    expected = steps(p) * ALPHA + share(p) * 25e6 / B
    assert collective_time_s(op, 25e6, size=p, link=LINK, algorithm=algorithm) == pytest.approx(expected)


def play_tree(n):
    """Bytes / S each rank sends in a binomial reduce to rank 0 and a broadcast from it, and the rounds."""
    sent, distance, rounds = [0] * n, 1, 0
    while distance < n:
        for rank in range(0, n, 2 * distance):
            if rank + distance < n:
                sent[rank + distance] += 1  # reduce: child to parent
                sent[rank] += 1  # broadcast: parent to child
        distance, rounds = 2 * distance, rounds + 2
    return rounds, max(sent)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 7, 12, 33])
def test_a_tree_of_any_size_agrees_with_one_played_message_by_message(n):
    rows = {row.algorithm: row for row in collective_table("all_reduce", 1, size=n, link=LINK)}
    assert (rows["tree"].steps, rows["tree"].busiest_rank_bytes) == play_tree(n)


@pytest.mark.parametrize("n", [3, 5, 6, 7, 12])
def test_halving_doubling_off_a_power_of_two_takes_two_more_steps_and_a_whole_tensor_each(n):
    p = 2 ** int(log2(n))
    extra = 2 * (ALPHA + 25e6 / B)
    for algorithm in ("halving_doubling", "recursive_doubling"):
        full, off = (collective_time_s("all_reduce", 25e6, size=s, link=LINK, algorithm=algorithm) for s in (p, n))
        assert off == pytest.approx(full + extra)
        sent = busiest_rank_bytes("all_reduce", 1, size=p, algorithm=algorithm)
        assert busiest_rank_bytes("all_reduce", 1, size=n, algorithm=algorithm) == sent + 1


@pytest.mark.parametrize("n", [2, 3, 4, 6, 7, 16])
def test_bruck_all_to_all_sends_each_chunk_once_per_bit_of_its_distance(n):
    sent = sum(distance >> bit & 1 for distance in range(n) for bit in range((n - 1).bit_length()))
    assert busiest_rank_bytes("all_to_all", n, size=n, algorithm="bruck") == pytest.approx(sent)


def binomial_gather(ranks):
    """Most chunks that one rank hands on, ranks 0 .. n-1 in a binomial tree."""
    held, distance, most = [1] * ranks, 1, 0
    while distance < ranks:
        for rank in range(0, ranks - distance, 2 * distance):
            most = max(most, held[rank + distance])
            held[rank] += held[rank + distance]
        distance *= 2
    return most


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7, 8, 9, 13])
def test_the_busiest_rank_of_a_gather_is_the_root_of_the_largest_subtree(n):
    assert busiest_rank_bytes("gather", n, size=n, algorithm="tree") == pytest.approx(binomial_gather(n))


@pytest.mark.parametrize("n", [2**k for k in range(1, 11)])
def test_halving_doubling_is_never_slower_than_the_ring_at_powers_of_two(n):
    sizes = np.logspace(0, 10, 30)
    ring, halving = (collective_time_s("all_reduce", sizes, size=n, link=LINK, algorithm=a)
                     for a in ("ring", "halving_doubling"))
    assert (halving <= ring * (1 + 1e-12)).all()


def test_off_powers_of_two_the_ring_wins_for_large_tensors():
    assert time_ms("all_reduce", 6, "ring", 1e9) < time_ms("all_reduce", 6, "halving_doubling", 1e9)
    assert time_ms("all_reduce", 6, "ring", 1e3) > time_ms("all_reduce", 6, "recursive_doubling", 1e3)


@pytest.mark.parametrize("op", ALGORITHMS)
def test_a_group_of_one_takes_no_time_and_sends_nothing(op):
    for algorithm in set(ALGORITHMS[op]) - {"hierarchical"}:
        assert collective_time_s(op, 25e6, size=1, link=LINK, algorithm=algorithm) == 0
        assert busiest_rank_bytes(op, 25e6, size=1, algorithm=algorithm) == 0
    assert collective_time_s(op, 25e6, size=1, link=LINK) == 0


@pytest.mark.parametrize("op", ALGORITHMS)
@pytest.mark.parametrize("size", [2, 3, 8])
def test_the_table_has_all_algorithms_of_the_size_and_the_default_is_its_fastest(op, size):
    rows = collective_table(op, 25e6, size=size, link=LINK)
    left_out = {"hierarchical"} | ({"recursive_halving"} if size == 3 else set())
    left_out |= {"recursive_doubling"} if size == 3 and op == "all_gather" else set()
    assert {row.algorithm for row in rows} == set(ALGORITHMS[op]) - left_out
    assert min(row.time_s for row in rows) == collective_time_s(op, 25e6, size=size, link=LINK)
    for row in rows:
        assert row.time_s == collective_time_s(op, 25e6, size=size, link=LINK, algorithm=row.algorithm)


def test_a_hierarchical_all_reduce_by_hand():
    """16 ranks in nodes of 4: halving among 4 at NVLink, all_reduce of a quarter among 4 nodes, doubling among 4."""
    s = 64e6
    inside = 2 * (2 * 3e-6 + 3 / 4 * s / 250e9)
    between = 4 * 20e-6 + 2 * 3 / 4 * (s / 4) / 25e9
    nodes = {"node_size": 4, "link_between": INFINIBAND}
    time = collective_time_s("all_reduce", s, size=16, link=NVLINK, algorithm="hierarchical", **nodes)
    assert time == pytest.approx(inside + between)
    assert busiest_rank_bytes("all_reduce", 16, size=16, algorithm="hierarchical", node_size=4) == 24 + 6
    *_, row = collective_table("all_reduce", s, size=16, link=NVLINK, **nodes)
    assert row == ("hierarchical", 8, pytest.approx(30 / 16 * s), pytest.approx(time))


def test_hierarchical_all_gather_and_reduce_scatter_are_the_halves_of_the_all_reduce():
    nodes = {"size": 24, "link": NVLINK, "node_size": 8, "link_between": INFINIBAND, "algorithm": "hierarchical"}
    halves = [collective_time_s(op, 3e7, **nodes) for op in ("reduce_scatter", "all_gather")]
    assert sum(halves) == pytest.approx(collective_time_s("all_reduce", 3e7, **nodes))


def test_across_nodes_flat_algorithms_run_at_the_link_between():
    flat = collective_time_s("all_reduce", 1e9, size=64, link=INFINIBAND, algorithm="ring")
    nodes = {"size": 64, "link": NVLINK, "node_size": 8, "link_between": INFINIBAND}
    assert collective_time_s("all_reduce", 1e9, algorithm="ring", **nodes) == flat
    assert collective_time_s("all_reduce", 1e9, **nodes) < flat / 4


@pytest.mark.parametrize("node_size", [8, 16])
def test_a_group_inside_one_node_needs_no_link_between(node_size):
    inside = collective_time_s("all_reduce", 1e9, size=8, link=NVLINK)
    assert collective_time_s("all_reduce", 1e9, size=8, link=NVLINK, node_size=node_size) == inside


def test_an_array_of_sizes_gives_an_array_of_times():
    sizes = np.array([1e3, 1e6, 1e9])
    times = collective_time_s("all_reduce", sizes, size=6, link=LINK)
    assert times.tolist() == pytest.approx([collective_time_s("all_reduce", s, size=6, link=LINK) for s in sizes])


def test_names_of_torch_are_taken():
    times = [collective_time_s(op, 1e6, size=4, link=LINK) for op in ("all_gather_into_tensor", "all_gather")]
    assert times[0] == times[1]


@pytest.mark.parametrize("fields, words", [
    ({"op": "all_scatter"}, r"op \('all_scatter'\) must be 'all_reduce', 'all_gather'"),
    ({"algorithm": "rings"}, r"algorithm \('rings'\) must be 'naive', 'ring'"),
    ({"size": 0}, r"size \(0\) must be at least 1"),
    ({"op": "all_gather", "size": 6, "algorithm": "recursive_doubling"}, r"size \(6\) that is a power of two; ring"),
    ({"algorithm": "hierarchical"}, r"a node_size \(None\) above 1 and below size \(4\)"),
    ({"algorithm": "hierarchical", "node_size": 3, "link_between": LINK}, r"a node_size \(3\).* that divides it"),
    ({"node_size": 2}, "a group of 4 in nodes of 2 needs link_between"),
    ({"node_size": 0, "link_between": LINK}, r"node_size \(0\) must be at least 1"),
    ({"node_size": 2, "link_between": 25e9}, r"link_between \(25000000000.0\) must be a Link"),
    ({"link": "NVLink 4"}, r"link \('NVLink 4'\) must be a Link"), ({"op": None}, r"op \('None'\) must be"),
])
def test_what_has_no_cost_is_said(fields, words):
    with pytest.raises(ConfigError, match=words):
        collective_time_s(**{"op": "all_reduce", "tensor_bytes": 8, "size": 4, "link": LINK, **fields})


@pytest.mark.parametrize("tensor_bytes", [-1, float("nan"), float("inf"), "8", None, [1, 2], True, np.array([8.0, -1])])
def test_bytes_that_cannot_be_are_refused(tensor_bytes):
    for call in (lambda: collective_time_s("all_reduce", tensor_bytes, size=4, link=LINK),
                 lambda: collective_table("all_reduce", tensor_bytes, size=4, link=LINK),
                 lambda: theory.ring_all_reduce_bytes(tensor_bytes, 4), lambda: theory.algbw(tensor_bytes, 1)):
        with pytest.raises(ConfigError, match=r"tensor_bytes \(.*must be a number of at least 0, and finite"):
            call()


@pytest.mark.parametrize("time_s", [0, -1, float("nan"), "1"])
def test_bandwidth_needs_a_time(time_s):
    with pytest.raises(ConfigError, match=r"time_s \(.*must be a number above 0"):
        busbw("all_reduce", 8, time_s, size=4)


def test_bytes_of_a_rank_need_an_algorithm():
    with pytest.raises(ConfigError, match=r"algorithm \('None'\) must be 'naive', 'ring'"):
        busiest_rank_bytes("all_reduce", 8, size=4, algorithm=None)


@pytest.mark.parametrize("numbers", [
    (0, 0), (-1, 0), (float("nan"), 0), (1, -1e-6), ("fast", 0), (1, None), (True, 0), (1, float("inf")),
])  # fmt: skip
def test_a_link_that_cannot_be_is_refused(numbers):
    with pytest.raises(ConfigError, match=r"broken: (bandwidth_bytes_per_s|latency_s) \("):
        Link("broken", *numbers)


@pytest.mark.parametrize("op, factor", [("all_reduce", 1.5), ("all_gather", 0.75), ("reduce_scatter_tensor", 0.75),
                                        ("all_to_all_single", 0.75), ("broadcast", 1), ("reduce", 1)])
def test_bus_bandwidth_has_the_factors_of_nccl_tests(op, factor):
    assert busbw(op, 8e9, 2.0, size=4) == pytest.approx(factor * theory.algbw(8e9, 2.0))
    assert busbw(op, 8e9, 0.0, size=1) == 0  # a group of one takes no time


def test_bus_bandwidth_of_a_ring_without_latency_is_the_link_at_any_size():
    link = Link("no latency", B, 0.0)
    for n in (2, 3, 64):
        time = collective_time_s("all_reduce", 1e9, size=n, link=link, algorithm="ring")
        assert busbw("all_reduce", 1e9, time, size=n) == pytest.approx(B)


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter"])
def test_modelled_bytes_and_bytes_on_the_wire_say_the_same_of_a_ring(op):
    for n in (2, 3, 8):
        sent = busiest_rank_bytes(op, 24 * n, size=n, algorithm="ring")
        assert sent == pytest.approx(theory.wire_bytes(op, 24 * n, n))
    assert theory.ring_all_reduce_bytes(16, 4) == 24


def test_docstring_examples():
    result = doctest.testmod(collectives)
    assert result.attempted > 0 and result.failed == 0
