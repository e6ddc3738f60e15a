"""Bytes that a rank sends, against sums counted by hand and by a ring played step by step."""
import doctest

import pytest

from dtlab.errors import ConfigError
from dtlab.theory import base_op, communication, wire_bytes


@pytest.mark.parametrize("n", [2, 3, 4, 64])
def test_even_collectives_have_the_ring_factors(n):
    size = 64 * 3 * n
    assert wire_bytes("all_reduce", size, n) == pytest.approx(2 * (n - 1) / n * size)
    for op in ("all_gather", "reduce_scatter", "all_to_all"):
        assert wire_bytes(op, size, n) == pytest.approx((n - 1) / n * size)
    assert wire_bytes("barrier", 0, n) == 0


@pytest.mark.parametrize("op", ["all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "reduce",
                                "gather", "scatter", "all_to_all_single", "barrier"])
def test_a_group_of_one_sends_nothing(op):
    assert wire_bytes(op, 4096, 1, index=0) == 0


def test_messages_count_where_they_are_sent():
    assert [wire_bytes(op, 100, 2) for op in ("send", "isend", "recv", "irecv")] == [100, 100, 0, 0]


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("root", [0, 1])
def test_rooted_collectives_send_each_byte_as_often_as_it_must_travel(n, root):
    def sent(op):
        return [wire_bytes(op, 12 * n, n, index=index, root=root) for index in range(n)]

    last = (root - 1) % n
    assert sent("broadcast") == [0 if i == last else 12 * n for i in range(n)]
    assert sent("reduce") == [0 if i == root else 12 * n for i in range(n)]
    assert sent("gather") == [0 if i == root else 12 for i in range(n)]
    assert sent("scatter") == [12 * (n - 1) if i == root else 0 for i in range(n)]


def play_ring(chunks, op):
    """Bytes each rank sends: chunk numbers are handed to the right, n - 1 times a half."""
    n = len(chunks)
    sent = [0] * n
    for rank in range(n):
        for step in range(n - 1):
            if op in ("reduce_scatter", "all_reduce"):  # rank r starts with chunk r-1 and ends up owning chunk r
                sent[rank] += chunks[(rank - 1 - step) % n]
            if op in ("all_gather", "all_reduce"):  # and starts the second half with chunk r
                sent[rank] += chunks[(rank - step) % n]
    return sent


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("chunks", [[5, 5, 4], [3, 0], [1, 1, 0, 0], [7, 1, 9, 2], [8, 8]])
def test_uneven_chunks_are_exact(op, chunks):
    sent = [wire_bytes(op, sum(chunks), len(chunks), index=i, chunks=chunks) for i in range(len(chunks))]
    assert sent == play_ring(chunks, op) and all(isinstance(size, int) for size in sent)


def test_uneven_all_to_all_and_gather_and_scatter_are_exact():
    assert wire_bytes("all_to_all_single", 10, 3, index=1, chunks=[1, 2, 7]) == 8
    assert wire_bytes("gather", 10, 3, index=2, root=0, chunks=[1, 2, 7]) == 7
    assert wire_bytes("scatter", 10, 3, index=0, root=0, chunks=[1, 2, 7]) == 9


def test_names_of_torch_are_known_by_their_plain_name():
    names = ["all_reduce_coalesced", "_all_gather_base", "all_gather_object", "broadcast_object_list", "reduce_scatter"]
    assert [base_op(name) for name in names] == ["all_reduce", "all_gather", "all_gather", "broadcast",
                                                 "reduce_scatter"]


@pytest.mark.parametrize("fields, words", [
    ({"op": "all_scatter"}, "'all_scatter' are not known; known are all_reduce"),
    ({"op": "all_gather", "chunks": [1, 2], "index": 0}, r"chunks \(\[1, 2\]\) must be one per rank \(3\)"),
    ({"op": "all_gather", "chunks": [1, 2, 9], "index": 0}, r"sum tensor_bytes \(10\)"),
    ({"op": "all_gather", "chunks": [1, 2, 7]}, r"index \(None\) given"),
])
def test_what_cannot_be_counted_is_said(fields, words):
    with pytest.raises(ConfigError, match=words):
        wire_bytes(tensor_bytes=10, size=3, **fields)


def test_docstring_examples():
    result = doctest.testmod(communication)
    assert result.attempted > 0 and result.failed == 0
