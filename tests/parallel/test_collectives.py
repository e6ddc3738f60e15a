# ruff: noqa: F821  (names that live on the ranks)
"""Collectives from messages, against torch's own, by bytes, and with the mistakes that weak data would hide."""
import doctest
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from live_ranks import pool

import dtlab
from dtlab.errors import ConfigError, GuardError, HangError, RankError
from dtlab.parallel import collectives
from dtlab.parallel.collectives import (
    all_to_all,
    chunk_bounds,
    halving_doubling_all_reduce,
    naive_all_reduce,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    tree_all_reduce,
)
from dtlab.theory import busiest_rank_bytes, wire_bytes

ALL_REDUCES = [ring_all_reduce, naive_all_reduce, tree_all_reduce, halving_doubling_all_reduce]
ROOT = Path(__file__).resolve().parents[2]
LENGTHS = [0, 1, 7, 8, 1000]


def own(length, dtype=torch.float64, rank=None):
    """On a rank: 1000 * rank + i, so that no two elements and no two ranks are alike."""
    return (1000 * (dist.get_rank() if rank is None else rank) + torch.arange(length)).to(dtype)


def summed(length, dtype=torch.float64):
    """On a rank: what torch's own all_reduce makes of it."""
    wanted = own(length, dtype)
    dist.all_reduce(wanted)
    return wanted


def on_ranks(num_ranks, function, *args):
    """Results of a module-level function on live ranks."""
    return pool(num_ranks).run(function, *args)


# values


def differences(collective, dtype):
    """On a rank: the lengths at which a collective does not end with torch's sum."""
    wrong = []
    for length in LENGTHS:
        tensor, wanted = own(length, dtype), summed(length, dtype)
        collective(tensor)
        if not torch.equal(tensor, wanted):  # whole numbers: exact in float64 too
            wrong.append(length)
    return wrong


@pytest.mark.ranks
@pytest.mark.parametrize("collective", ALL_REDUCES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5])
def test_all_reduce_equals_torchs(num_ranks, collective):
    for dtype in (torch.float64, torch.int64):
        assert on_ranks(num_ranks, differences, collective, dtype) == [[]] * num_ranks


def random_sum(collective, dtype):
    """On a rank: bits of the sum of numbers whose sum depends on the order, and the largest difference to torch's."""
    torch.manual_seed(dist.get_rank())
    tensor = torch.randn(1001, dtype=torch.float64).to(dtype)
    exact = tensor.double()
    dist.all_reduce(exact)
    collective(tensor)
    return tensor.view(torch.uint8).tolist(), (tensor.double() - exact).abs().max().item()


@pytest.mark.ranks
@pytest.mark.parametrize("dtype, within", [
    (torch.float64, 1e-14), (torch.float32, 2e-6), (torch.float16, 2e-2), (torch.bfloat16, 0.2),
])  # fmt: skip
@pytest.mark.parametrize("collective", ALL_REDUCES)
def test_all_ranks_end_with_the_same_bits(collective, dtype, within):
    bits, differences = zip(*on_ranks(3, random_sum, collective, dtype))
    assert bits[0] == bits[1] == bits[2] and max(differences) < within


def halves(length):
    """On a rank: the finished chunk of a reduce-scatter, whether it is a view; then what the all-gather makes of it."""
    tensor, wanted = own(length), summed(length)
    start, end = chunk_bounds(length, dist.get_world_size())[dist.get_rank()]
    chunk = ring_reduce_scatter(tensor)
    chunk_is_right = torch.equal(chunk, wanted[start:end])
    is_view = chunk.data_ptr() == tensor[start:].data_ptr() or not len(chunk)
    tensor[:start], tensor[end:] = -1, -1  # what the other chunks hold does not matter
    ring_all_gather(tensor)
    return chunk_is_right, is_view, torch.equal(tensor, wanted)


@pytest.mark.ranks
@pytest.mark.parametrize("length", LENGTHS)
def test_rank_r_owns_chunk_r_between_the_halves(length):
    assert on_ranks(3, halves, length) == [(True, True, True)] * 3


def exchanged(sizes):
    """On a rank: all_to_all of ``sizes[sender][receiver]`` elements, flattened, and what each rank should get."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    part = lambda sender, receiver: own(sizes[sender][receiver], rank=sender) + 100 * receiver
    outputs = [torch.zeros(sizes[sender][rank], dtype=torch.float64) for sender in range(num_ranks)]
    all_to_all(outputs, [part(rank, receiver) for receiver in range(num_ranks)])
    return [torch.equal(output, part(sender, rank)) for sender, output in enumerate(outputs)]


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_all_to_all_with_uneven_parts(num_ranks):
    sizes = [[(3 * sender + receiver) % 4 for receiver in range(num_ranks)] for sender in range(num_ranks)]
    assert on_ranks(num_ranks, exchanged, sizes) == [[True] * num_ranks] * num_ranks


def in_a_matrix_that_needs_a_gradient():
    """On a rank: a parameter is summed in place, and stays a leaf."""
    parameter = torch.nn.Parameter(own(21).view(7, 3))
    ring_all_reduce(parameter)
    return torch.equal(parameter, summed(21).view(7, 3)), parameter.is_leaf and parameter.requires_grad


@pytest.mark.ranks
def test_a_parameter_is_summed_without_a_graph():
    assert on_ranks(2, in_a_matrix_that_needs_a_gradient) == [(True, True)] * 2


def two_tensors():
    """On a rank: the second call starts when a rank is done with the first, not when all are."""
    tensors = own(1000), own(7) + 5
    for tensor in tensors:
        ring_all_reduce(tensor)
    return torch.equal(tensors[0], summed(1000)), torch.equal(tensors[1], summed(7) + 5 * dist.get_world_size())


@pytest.mark.ranks
def test_two_calls_one_after_the_other_do_not_mix():
    assert on_ranks(4, two_tensors) == [(True, True)] * 4


def on_a_subgroup(collective):
    """On a rank: ranks 1 and 3 add; the others are told that they are not in the group."""
    group, tensor = dist.new_group([1, 3]), own(7)
    try:
        collective(tensor, group)
    except ConfigError as error:
        return str(error)
    return tensor.tolist()


@pytest.mark.ranks
@pytest.mark.parametrize("collective", ALL_REDUCES)
def test_a_subgroup_of_ranks_1_and_3(collective):
    results, wanted = on_ranks(4, on_a_subgroup, collective), [4000.0 + 2 * i for i in range(7)]
    assert results[1] == results[3] == wanted
    assert results[0].startswith("rank 0 is not in this group") and results[2].startswith("rank 2 is not")


# what is refused


@pytest.mark.parametrize("length, size, bounds", [
    (0, 2, [(0, 0), (0, 0)]), (1, 3, [(0, 1), (1, 1), (1, 1)]), (7, 3, [(0, 3), (3, 5), (5, 7)]), (8, 1, [(0, 8)]),
])  # fmt: skip
def test_chunk_bounds(length, size, bounds):
    assert chunk_bounds(length, size) == bounds


@pytest.mark.parametrize("length", [0, 1, 7, 8, 1000])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_chunks_cover_everything_once_longest_first(length, size):
    lengths = [end - start for start, end in chunk_bounds(length, size)]
    covered = [i for start, end in chunk_bounds(length, size) for i in range(start, end)]
    assert covered == list(range(length)) and lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("length, size", [(-1, 2), (7, 0), (1.5, 2)])
def test_chunks_that_cannot_be_are_refused(length, size):
    with pytest.raises(ConfigError, match="at least"):
        chunk_bounds(length, size)


@pytest.mark.parametrize("collective", [*ALL_REDUCES, ring_reduce_scatter, ring_all_gather])
def test_a_column_is_refused_before_anything_is_sent(collective):
    with pytest.raises(ConfigError, match=r"shape \[4\] with strides \[3\] is not contiguous.*tensor.contiguous\(\)"):
        collective(torch.ones(4, 3)[:, 1])


@pytest.mark.parametrize("make", [
    lambda: torch.complex(torch.ones(3), torch.ones(3)).conj(), lambda: torch._neg_view(torch.ones(3)),
])  # fmt: skip
def test_a_view_whose_memory_holds_other_numbers_is_refused(make):
    with pytest.raises(ConfigError, match=r"shape \[3\] is a view that conjugates or negates.*resolve_conj"):
        ring_all_reduce(make())


@pytest.mark.parametrize("collective", [*ALL_REDUCES, ring_reduce_scatter, ring_all_gather])
@pytest.mark.parametrize("what", [None, [1.0, 2.0], 3.0, "x"])
def test_what_is_no_tensor_is_refused(collective, what):
    with pytest.raises(ConfigError, match=f"of type {type(what).__name__}, .*torch.as_tensor"):
        collective(what)


@pytest.mark.parametrize("call", [lambda: ring_all_reduce(torch.ones(3)), lambda: all_to_all([], [])])
def test_outside_of_ranks_the_cure_is_said(call):
    with pytest.raises(ConfigError, match=r"no rank of a process group.*%%ranks or ranks = dtlab.launch"):
        call()


def refusal(make):
    """On a rank: what an all_to_all of these tensors ends with, or is answered."""
    outputs, inputs = make(dist.get_rank())
    try:
        all_to_all(outputs, inputs)
    except ConfigError as error:
        return str(error)
    return [tensor.tolist() for tensor in outputs]


def _lists(rank):
    return [torch.zeros(1) for _ in range(3)], [torch.tensor([10.0 * rank + to]) for to in range(3)]


def in_place(rank):
    return (_lists(rank)[1],) * 2


def one_output_for_all(rank):
    return [torch.zeros(1)] * 3, _lists(rank)[1]


def outputs_that_overlap(rank):
    memory = torch.zeros(5)
    return [memory[:2], memory[1:3], memory[3:]], [torch.ones(2) + rank] * 3


def larger_for_itself(rank):
    outputs, inputs = _lists(rank)
    outputs[rank] = torch.zeros(2)
    return outputs, inputs


def rows_of_one_tensor(rank):
    return torch.zeros(3, 1), torch.stack(_lists(rank)[1])


@pytest.mark.ranks
@pytest.mark.parametrize("make, said", [
    (in_place, "outputs[0] and inputs[0] share memory"), (one_output_for_all, "outputs[0] and outputs[1] share memory"),
    (outputs_that_overlap, "outputs[0] and outputs[1] share memory"),
    (larger_for_itself, "has 2 elements and inputs["),
])  # fmt: skip
def test_an_all_to_all_that_would_end_with_wrong_numbers_is_refused_on_every_rank(make, said):
    assert [said in answer for answer in on_ranks(3, refusal, make)] == [True] * 3
    assert on_ranks(3, refusal, rows_of_one_tensor) == [[[to], [10 + to], [20 + to]] for to in range(3)]


def on_what_is_no_group():
    ring_all_reduce(torch.ones(3), [0, 1])


@pytest.mark.ranks
def test_what_is_no_group_is_refused():
    with pytest.raises(RankError, match=r"group \(\[0, 1\]\) must be what dist.new_group returned"):
        on_ranks(3, on_what_is_no_group)


def all_to_all_of(num_tensors):
    all_to_all([torch.zeros(1)] * num_tensors, [torch.zeros(1)] * num_tensors)


@pytest.mark.ranks
def test_all_to_all_needs_a_tensor_for_each_rank():
    with pytest.raises(RankError, match="outputs has 3 tensors; the group has 2 ranks, so give 2"):
        on_ranks(2, all_to_all_of, 3)


def one_rank_fails():
    if dist.get_rank() == 1:
        raise ValueError("broken on purpose")
    ring_all_reduce(torch.ones(10))


@pytest.mark.ranks
def test_a_rank_that_fails_stops_the_others_and_leaves_all_usable():
    with pytest.raises(RankError, match="rank 1 of 3 failed.*broken on purpose"):
        on_ranks(3, one_rank_fails)
    assert on_ranks(3, differences, ring_all_reduce, torch.float64) == [[]] * 3


# bytes


def chunk_bytes(length, size, itemsize=8):
    return [itemsize * (end - start) for start, end in chunk_bounds(length, size)]


def ring_bytes(length, size):
    """Reduce-scatter: all but the own chunk. All-gather: all but the chunk of the rank to the right."""
    chunks = chunk_bytes(length, size)
    return [2 * 8 * length - chunks[rank] - chunks[(rank + 1) % size] for rank in range(size)]


def tree_bytes(length, size):
    """One tensor up, one down to each child: there is a child for every 0 below the lowest 1 of the number."""
    parents = {rank: rank & (rank - 1) for rank in range(1, size)}
    return [8 * length * ((rank > 0) + list(parents.values()).count(rank)) for rank in range(size)]


def halving_doubling_bytes(length, size):
    """Halving: all but the own chunk. Doubling: the own chunk, then two, four ... ; extra ranks: the whole, once."""
    power = 1 << (size.bit_length() - 1)
    chunks, widths = chunk_bytes(length, power), [1 << bit for bit in range(power.bit_length() - 1)]
    block = lambda rank, width: sum(chunks[rank // width * width:][:width])
    inner = [8 * length - chunks[rank] + sum(block(rank, width) for width in widths) for rank in range(power)]
    folded = [8 * length if rank + power < size else 0 for rank in range(power)]
    return [a + b for a, b in zip(inner, folded)] + [8 * length] * (size - power)


BYTES = {
    ring_all_reduce: ring_bytes,
    naive_all_reduce: lambda length, size: [8 * length * (size - 1 if rank == 0 else 1) for rank in range(size)],
    tree_all_reduce: tree_bytes,
    halving_doubling_all_reduce: halving_doubling_bytes,
}


def reduce_once(collective, length):
    collective(own(length))


def sent_by_each(recording, num_ranks):
    table = recording.communication().groupby("rank")["wire_bytes"].sum()
    return [table.get(rank, 0) for rank in range(num_ranks)]


@pytest.mark.ranks
@pytest.mark.parametrize("collective", ALL_REDUCES)
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5])
def test_recorded_bytes_are_the_formula(num_ranks, collective):
    recording = pool(num_ranks).record(reduce_once, collective, 1003)
    assert sent_by_each(recording, num_ranks) == BYTES[collective](1003, num_ranks)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_the_rings_bytes_are_what_theory_says(size):
    chunks = chunk_bytes(1003, size)
    theory = [wire_bytes("all_reduce", 8 * 1003, size, index=rank, chunks=chunks) for rank in range(size)]
    assert ring_bytes(1003, size) == theory


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 8, 13])
@pytest.mark.parametrize("collective", ALL_REDUCES)
def test_the_busiest_ranks_bytes_are_what_theory_says(collective, size):
    length, algorithm = 8 * 7 * 5 * 3 * 13, collective.__name__.removesuffix("_all_reduce")  # even chunks
    theory = busiest_rank_bytes("all_reduce", 8 * length, size=size, algorithm=algorithm)
    assert max(BYTES[collective](length, size)) == pytest.approx(theory, rel=1e-12)


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [64, 1024])
def test_a_ring_of_many_ranks_recorded_dry(num_ranks):
    def program(length):
        ring_all_reduce(torch.ones(length))

    length = 6_250_001
    recording = dtlab.record_dry(program, length, world_size=num_ranks, ranks=[1])
    chunks = chunk_bytes(length, num_ranks, itemsize=4)
    sends = [event for event in recording.events[1] if event.kind == "issue" and event.op == "send"]
    assert len(sends) == 2 * (num_ranks - 1)
    assert sum(event.wire_bytes for event in sends) == 2 * 4 * length - chunks[1] - chunks[2]
    assert max(event.bytes for event in sends) == chunks[0]


# mistakes, which weak data would hide


def dropping_the_remainder(tensor):
    """Chunks of length // n elements: the last ones are never sent."""
    even = len(tensor) // dist.get_world_size() * dist.get_world_size()
    ring_all_reduce(tensor[:even])


def joining_in_arrival_order(tensor):
    """The all-gather puts what arrives behind what is there: each rank ends with another order of the chunks."""
    ring_reduce_scatter(tensor)
    bounds, size = chunk_bounds(len(tensor), dist.get_world_size()), dist.get_world_size()
    parts = [tensor[slice(*bounds[dist.get_rank()])].clone()]
    for _ in range(size - 1):
        received = torch.empty_like(parts[0])
        for work in dist.batch_isend_irecv([
            dist.P2POp(dist.irecv, received, (dist.get_rank() - 1) % size),
            dist.P2POp(dist.isend, parts[-1], (dist.get_rank() + 1) % size),
        ]):
            work.wait()
        parts.append(received)
    tensor.copy_(torch.cat(parts))


def is_right(collective, length, constant):
    """On a rank: whether a sum of tensors of this length is right; constant ones hold one value each."""
    tensor = torch.full((length,), 1.0 + dist.get_rank()) if constant else own(length)
    wanted = tensor.clone()
    dist.all_reduce(wanted)
    collective(tensor)
    return torch.equal(tensor, wanted)


@pytest.mark.ranks
@pytest.mark.parametrize("mistake, hidden", [
    (dropping_the_remainder, (9, False)), (joining_in_arrival_order, (9, True)),
])  # fmt: skip
def test_a_mistake_shows_only_with_data_that_tells(mistake, hidden):
    length = 7 if mistake is dropping_the_remainder else 9
    assert on_ranks(3, is_right, mistake, *hidden) == [True] * 3
    assert not all(on_ranks(3, is_right, mistake, length, False))
    assert on_ranks(3, is_right, ring_all_reduce, length, False) == [True] * 3


def both_send_first():
    right, left = (dist.get_rank() + 1) % dist.get_world_size(), (dist.get_rank() - 1) % dist.get_world_size()
    dist.send(torch.ones(4), right)
    dist.recv(torch.ones(4), left)


@pytest.mark.ranks
def test_a_ring_in_which_all_send_first_is_reported_as_a_circle():
    began = time.monotonic()
    with pytest.raises(HangError, match="wait for each other: 0 -> 1 -> 2 -> 0"):
        on_ranks(3, both_send_first)
    assert time.monotonic() - began < 20
    assert on_ranks(3, is_right, ring_all_reduce, 7, False) == [True] * 3


def overwriting_before_wait():
    tensor, size = own(8), dist.get_world_size()
    works = collectives._start(tensor[:4], 1 - dist.get_rank(), torch.empty_like(tensor[:4]), 1 - dist.get_rank(), None)
    tensor[0] = size
    collectives._wait(works)


@pytest.mark.ranks
def test_a_chunk_that_is_changed_before_its_send_is_awaited_is_found():
    with pytest.raises(GuardError, match="writes"):
        on_ranks(2, overwriting_before_wait)


# elsewhere


def test_examples_in_docstrings():
    result = doctest.testmod(collectives)
    assert result.attempted > 0 and result.failed == 0


TORCHRUN_PROGRAM = """
import torch, torch.distributed as dist
from dtlab.parallel import ring_all_reduce
dist.init_process_group("gloo")
x = torch.arange(7) + 1000 * dist.get_rank()
ring_all_reduce(x)
assert x.tolist() == [1000 + 2 * i for i in range(7)], x
dist.destroy_process_group()
"""


@pytest.mark.ranks
def test_under_torchrun(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(TORCHRUN_PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr


def sum_on_gpu():
    tensor = own(1001).cuda()
    ring_all_reduce(tensor)
    return torch.equal(tensor.cpu(), own(1001, rank=0) + own(1001, rank=1))


@pytest.mark.gpu
@pytest.mark.ranks
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_on_a_gpu():
    with dtlab.launch(2, device="cuda", share_gpu=torch.cuda.device_count() < 2) as ranks:
        assert ranks.run(sum_on_gpu) == [True, True]
