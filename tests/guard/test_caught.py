"""Mistakes that the guard must report: at once, with the lines of both calls, leaving the ranks usable.

Each case is a function that runs on all ranks. ``# <-`` marks the lines that the report must name.
"""

import inspect
import re
import time

import pytest
import torch
import torch.distributed as dist

import dtlab
from dtlab.errors import GuardError, HangError, RankError

pytestmark = [pytest.mark.ranks, pytest.mark.faults]
WITHIN_S = 10  # five times what is promised


def other(n=2):
    """Rank 0 and the rest differ."""
    return n + (dist.get_rank() > 0)


# collectives that do not match


def size():
    dist.all_reduce(torch.ones(other()))  # <-


def shape():
    dist.all_reduce(torch.ones(2, 3) if dist.get_rank() else torch.ones(3, 2))  # <-


def number_type():
    dist.all_reduce(torch.ones(2, dtype=torch.float64 if dist.get_rank() else torch.float32))  # <-


def kind():
    x = torch.ones(2)
    if dist.get_rank():
        dist.all_reduce(x)  # <-
    else:
        dist.broadcast(x, 0)  # <-


def reduce_op():
    x = torch.ones(2)
    if dist.get_rank() == 0:
        dist.all_reduce(x, dist.ReduceOp.MAX)  # <-
    else:
        dist.all_reduce(x)  # <-


def reduce_op_of_reduce_scatter():
    n = dist.get_world_size()
    op = dist.ReduceOp.MAX if dist.get_rank() else dist.ReduceOp.SUM
    dist.reduce_scatter_tensor(torch.zeros(2), torch.ones(2 * n), op)  # <-


def root():
    dist.broadcast(torch.ones(2), src=int(dist.get_rank() > 0))  # <-


def root_of_reduce():
    dist.reduce(torch.ones(2), dst=int(dist.get_rank() > 0))  # <-


def sizes_of_all_gather():
    outputs = [torch.zeros(other()) for _ in range(dist.get_world_size())]
    dist.all_gather(outputs, torch.ones(other()))  # <-


def sizes_of_all_to_all():
    n = dist.get_world_size()
    dist.all_to_all([torch.zeros(other()) for _ in range(n)], [torch.ones(other())] * n)  # <-


def splits_of_all_to_all_single():
    n, mine = dist.get_world_size(), dist.get_rank()
    sends = [1 + (mine == 0)] * n
    dist.all_to_all_single(torch.zeros(n), torch.ones(sum(sends)), [1] * n, sends)  # <-


def barrier_against_all_reduce():
    if dist.get_rank():
        dist.barrier()  # <-
    else:
        dist.all_reduce(torch.ones(1))  # <-


def functional_size():
    import torch.distributed._functional_collectives as functional

    functional.all_reduce(torch.ones(other()), "sum", dist.group.WORLD) + 0  # <-


def functional_reduce_op():
    import torch.distributed._functional_collectives as functional

    functional.all_reduce(torch.ones(2), "max" if dist.get_rank() else "sum", dist.group.WORLD) + 0  # <-


def size_of_the_last_of_many():
    import torch.distributed._functional_collectives as functional

    tensors = [torch.ones(2)] * 99 + [torch.ones(other())]
    functional.all_reduce_coalesced(tensors, "sum", dist.group.WORLD)  # <-


def in_a_subgroup():
    group = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        dist.all_reduce(torch.ones(other()), group=group)  # <-


def asynchronous():
    dist.all_reduce(torch.ones(other()), async_op=True).wait()  # <-


def transposed_on_one_rank():
    x = torch.ones(3, 2)
    dist.all_reduce(x.t().contiguous() if dist.get_rank() else x.t())  # <-


def in_a_thread():
    import threading

    thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(other())))  # <-
    thread.start()
    thread.join()
    dist.barrier()


# order


def swapped_in_branches():
    loss, correct = torch.ones(1), torch.ones(1)
    if dist.get_rank() == 0:
        dist.all_reduce(loss)  # <-
        dist.all_reduce(correct)  # <-
    else:
        dist.all_reduce(correct)  # <-
        dist.all_reduce(loss)  # <-


def swapped_in_a_dict():
    metrics = {"loss": torch.ones(1), "correct": torch.ones(1)}
    for name in sorted(metrics, reverse=dist.get_rank() == 0):
        dist.all_reduce(metrics[name])  # <-


def swapped_in_items():
    metrics = [("loss", torch.ones(1)), ("correct", torch.ones(1))]
    for _, value in metrics if dist.get_rank() else reversed(metrics):
        dist.all_reduce(value)  # <-


def swapped_in_functions():
    loss, correct = torch.ones(1), torch.ones(1)

    def sync_loss():
        dist.all_reduce(loss)  # <-

    def sync_correct():
        dist.all_reduce(correct)  # <-

    if dist.get_rank() == 0:
        sync_loss()
        sync_correct()
    else:
        sync_correct()
        sync_loss()


def swapped_through_a_helper():
    loss, correct = torch.ones(1), torch.ones(1)

    def mean(value):
        dist.all_reduce(value)  # <-
        return value / dist.get_world_size()

    if dist.get_rank() == 0:
        mean(loss)
        mean(correct)
    else:
        mean(correct)
        mean(loss)


def swapped_broadcasts():
    weight, bias = torch.ones(2), torch.ones(2)
    if dist.get_rank() == 0:
        dist.broadcast(weight, 0)  # <-
        dist.broadcast(bias, 0)  # <-
    else:
        dist.broadcast(bias, 0)  # <-
        dist.broadcast(weight, 0)  # <-


def left_out():
    a, b, c = torch.ones(1), torch.ones(1), torch.ones(1)
    if dist.get_rank() == 0:
        dist.all_reduce(a)  # <-
    dist.all_reduce(b)  # <-
    dist.all_reduce(c)  # <-


# memory


def column_of_all_reduce():
    dist.all_reduce(torch.ones(4, 2)[:, 1])  # <-


def column_of_broadcast():
    dist.broadcast(torch.ones(4, 2)[:, 1], 0)  # <-


def column_of_reduce():
    dist.reduce(torch.ones(4, 2)[:, 1], 0)  # <-


def every_second_of_scatter():
    n = dist.get_world_size()
    inputs = [torch.ones(6)[::2] for _ in range(n)] if dist.get_rank() == 0 else None
    dist.scatter(torch.zeros(3), inputs, src=0)  # <-


def column_as_output_of_scatter():
    n = dist.get_world_size()
    inputs = [torch.ones(4) for _ in range(n)] if dist.get_rank() == 0 else None
    dist.scatter(torch.zeros(4, 2)[:, 1], inputs, src=0)  # <-


def column_as_output_of_reduce_scatter():
    n = dist.get_world_size()
    dist.reduce_scatter(torch.zeros(4, 2)[:, 1], [torch.ones(4) for _ in range(n)])  # <-


def transposed_input_of_reduce_scatter():
    n = dist.get_world_size()
    dist.reduce_scatter(torch.zeros(2, 3), [torch.ones(3, 2).t() for _ in range(n)])  # <-


def column_as_output_of_all_to_all_single():
    n = dist.get_world_size()
    dist.all_to_all_single(torch.zeros(n, 2)[:, 1], torch.ones(n))  # <-


def same_output_twice():
    dist.all_gather([torch.zeros(2)] * dist.get_world_size(), torch.ones(2))  # <-


def overlapping_outputs():
    n = dist.get_world_size()
    flat = torch.zeros(n + 1)
    dist.all_gather([flat[i : i + 2] for i in range(n)], torch.ones(2))  # <-


def same_output_of_all_to_all():
    n = dist.get_world_size()
    dist.all_to_all([torch.zeros(2)] * n, [torch.ones(2)] * n)  # <-


def all_to_all_single_in_place():
    x = torch.ones(2 * dist.get_world_size())
    dist.all_to_all_single(x, x)  # <-


def all_to_all_in_place():
    chunks = list(torch.ones(2 * dist.get_world_size()).chunk(dist.get_world_size()))
    dist.all_to_all(chunks, chunks)  # <-


def too_small_for_reduce_scatter_tensor():
    dist.reduce_scatter_tensor(torch.zeros(2), torch.ones(2 * dist.get_world_size() - 1))  # <-


# messages


def large_receive_buffer():
    if dist.get_rank() == 0:
        dist.send(torch.ones(3), 1)  # <-
    elif dist.get_rank() == 1:
        dist.recv(torch.zeros(4), 0)  # <-


def other_type_received():
    if dist.get_rank() == 0:
        dist.send(torch.ones(2, dtype=torch.float64), 1)  # <-
    elif dist.get_rank() == 1:
        dist.recv(torch.zeros(2), 0)  # <-


def swapped_messages():
    activation, target = torch.ones(2), torch.ones(2)
    if dist.get_rank() == 0:
        dist.send(activation, 1)  # <-
        dist.send(target, 1)  # <-
    elif dist.get_rank() == 1:
        dist.recv(target, 0)  # <-
        dist.recv(activation, 0)  # <-


def large_receive_buffer_in_a_batch():
    n, mine = dist.get_world_size(), dist.get_rank()
    ops = [
        dist.P2POp(dist.isend, torch.ones(3), (mine + 1) % n),
        dist.P2POp(dist.irecv, torch.zeros(3 + (mine == 0)), (mine - 1) % n),
    ]
    for work in dist.batch_isend_irecv(ops):  # <-
        work.wait()


# buffers in flight


def sender(touch):
    """Rank 0 sends to rank 1 and touches the buffer before wait."""
    x = torch.ones(4)
    if dist.get_rank() == 0:
        work = dist.isend(x, 1)  # <-
        touch(x)
        work.wait()
    elif dist.get_rank() == 1:
        dist.recv(x, 0)


def send_buffer_written():
    sender(lambda x: x.add_(1))  # <-


def send_buffer_zeroed_through_a_view():
    sender(lambda x: x[2:].zero_())  # <-


def send_buffer_written_through_data():
    sender(lambda x: x.data.mul_(2))  # <-


def send_buffer_written_by_a_list_operator():
    sender(lambda x: torch._foreach_add_([torch.zeros(1), x], 1.0))  # <-


def send_buffer_written_as_out():
    sender(lambda x: torch.add(torch.ones(4), 1, out=x))  # <-


def result_read_early():
    x = torch.ones(4)
    work = dist.all_reduce(x, async_op=True)  # <-
    total = x.sum()  # <-
    work.wait()
    return total


def result_listed_early():
    x = torch.ones(4)
    work = dist.all_reduce(x, async_op=True)  # <-
    x.tolist()  # <-
    work.wait()


def input_of_all_gather_written():
    x, n = torch.ones(2), dist.get_world_size()
    work = dist.all_gather([torch.zeros(2) for _ in range(n)], x, async_op=True)  # <-
    x += 1  # <-
    work.wait()


def receive_buffer_read_early():
    x = torch.zeros(4)
    if dist.get_rank() == 0:
        dist.send(x, 1)
    elif dist.get_rank() == 1:
        work = dist.irecv(x, 0)  # <-
        print(x)  # <-
        work.wait()


def reduced_twice_at_once():
    x = torch.ones(4)
    first = dist.all_reduce(x, async_op=True)  # <-
    second = dist.all_reduce(x, async_op=True)  # <-
    first.wait(), second.wait()


def grads_used_before_wait():
    w = torch.ones(3, requires_grad=True)
    works = []
    w.register_post_accumulate_grad_hook(
        lambda p: works.append(dist.all_reduce(p.grad, async_op=True))  # <-
    )
    (w * 2).sum().backward()
    torch.optim.SGD([w], lr=0.1).step()  # <-
    works[0].wait()


def handle_dropped():
    dist.all_reduce(torch.ones(2), async_op=True)  # <-


def send_dropped():
    if dist.get_rank() == 0:
        dist.isend(torch.ones(2), 1)  # <-
    elif dist.get_rank() == 1:
        dist.recv(torch.ones(2), 0)


def sends_of_a_ring_dropped():
    n, mine, number = dist.get_world_size(), dist.get_rank(), torch.zeros(1)
    dist.isend(torch.tensor([mine * 1.0]), (mine + 1) % n)  # <-
    dist.irecv(number, (mine - 1) % n).wait()


def first_of_two_handles_overwritten():
    if dist.get_rank() == 0:
        work = dist.isend(torch.ones(2), 1)  # <-
        work = dist.isend(torch.ones(2), 1)
        work.wait()
    elif dist.get_rank() == 1:
        dist.recv(torch.ones(2), 0)
        dist.recv(torch.ones(2), 0)


def receive_dropped():
    n, mine = dist.get_world_size(), dist.get_rank()
    work = dist.isend(torch.ones(2), (mine + 1) % n)
    dist.irecv(torch.zeros(2), (mine - 1) % n)  # <-
    work.wait()


def result_read_though_the_handle_is_dropped():
    x = torch.ones(2)
    dist.all_reduce(x, async_op=True)  # <-
    return x.tolist()  # <-


def message_awaited_twice():
    n, mine = dist.get_world_size(), dist.get_rank()
    works = [dist.isend(torch.ones(2), (mine + 1) % n), dist.irecv(torch.zeros(2), (mine - 1) % n)]  # <-
    for work in [*works, *works]:
        work.wait()


def handle_dropped_before_another_call():
    dist.all_reduce(torch.ones(2), async_op=True)  # <-
    dist.barrier()


# groups


def different_groups():
    n = dist.get_world_size()
    dist.new_group([0, 1] if dist.get_rank() == 0 else [0, n - 1] if n > 2 else [1])  # <-


def monitored_barrier_against_barrier():
    if dist.get_rank() == 0:
        dist.monitored_barrier()  # <-
    else:
        dist.barrier()  # <-


def local_group_that_torch_names_differently():
    dist.new_group([0])
    if dist.get_rank() < 2:
        dist.new_group([0, 1], use_local_synchronization=True)  # <-


def all_reduce_against_new_group():
    if dist.get_rank() == 0:
        dist.new_group([0])  # <-
    else:
        dist.all_reduce(torch.ones(1))  # <-


CASES = [
    f  # those defined up to here
    for name, f in list(globals().items())
    if inspect.isfunction(f) and f.__module__ == __name__ and name not in ("other", "sender")
]


def marked_lines(*functions):
    """Line numbers of the lines marked ``# <-``."""
    lines = []
    for function in functions:
        source, first = inspect.getsourcelines(function)
        lines += [first + i for i, line in enumerate(source) if "# <-" in line]
    return lines


def usable(ranks):
    """The next cell works on the same ranks, with their variables."""
    total = sum(range(1, ranks.size + 1))
    assert ranks.run(lambda: (kept, _sum(rank + 1))) == [("kept", total)] * ranks.size  # noqa: F821


def _sum(value):
    x = torch.tensor([float(value)])
    dist.all_reduce(x)
    return x.item()


@pytest.fixture(scope="module", autouse=True)
def variable(ranks):
    ranks.push(kept="kept")


@pytest.mark.parametrize("case", CASES, ids=lambda f: f.__name__)
def test_every_mistake_is_reported_with_its_lines(ranks, case):
    pids, started = dict(ranks.pids), time.monotonic()
    with pytest.raises(GuardError) as caught:
        ranks.run(case)
    took = time.monotonic() - started
    text = str(caught.value)
    print(f"{took:.2f} s: {text}")
    with_sender = "sender(" in inspect.getsource(case)
    lines = marked_lines(case, *([sender] if with_sender else []))
    named = {int(n) for n in re.findall(r"test_caught\.py, line (\d+)", text)}
    assert named and named <= set(lines), text
    both = "two different lines" if len(lines) > 1 else ""
    assert not both or len(named) == len(lines), text
    assert caught.value.cause == "guard" and took < WITHIN_S
    assert ranks.pids == pids
    usable(ranks)


def message_of(ranks, function, error=GuardError):
    with pytest.raises(error) as caught:
        ranks.run(function)
    usable(ranks)
    return str(caught.value)


def test_both_calls_stand_side_by_side(ranks):
    text = message_of(ranks, size)
    assert "the shapes differ" in text
    assert re.search(r"rank 0  all_reduce\(2 float32, SUM\)  test_caught.py, line \d+:  dist.all_reduce", text)
    assert re.search(r"ranks? [-, \d]+  all_reduce\(3 float32, SUM\)", text)


def test_a_dropped_handle_is_told_as_what_it_is(ranks):
    def sends_later():
        time.sleep(0.2 * dist.get_rank())
        sends_of_a_ring_dropped()

    for case in (sends_of_a_ring_dropped, sends_later):
        text = message_of(ranks, case)
        assert re.match(r"rank \d: handle of isend never awaited\. The message may never leave: keep the handle", text)
        assert re.search(r"\n  rank \d  isend\(1 float32\) to rank \d  test_caught.py, line \d+:  dist.isend\(", text)
    text = message_of(ranks, handle_dropped_before_another_call)
    assert "handle of all_reduce never awaited. Nothing says when its result is there" in text


def test_a_kept_handle_can_be_asked_for_though_its_message_is_through(ranks):
    def sends_and_keeps(is_awaited):
        from dtlab.ranks import calls

        n, mine, number = dist.get_world_size(), dist.get_rank(), torch.zeros(1)
        handle = dist.isend(torch.tensor([mine * 1.0]), (mine + 1) % n)
        dist.recv(number, (mine - 1) % n)
        dist.barrier()
        if is_awaited:
            handle.wait()
        else:
            calls.current.guard.refuse_open()
        return number.item()

    n = len(ranks.run(dist.get_rank))
    assert ranks.run(sends_and_keeps, True) == [float((mine - 1) % n) for mine in range(n)]
    assert "handle of isend never awaited" in message_of(ranks, lambda: sends_and_keeps(False))


def test_a_message_is_shown_as_it_was_written(ranks):
    text = message_of(ranks, send_buffer_written)
    assert re.search(r"wait\(\) on:\n  rank 0  isend\(4 float32\) to rank 1  test_caught", text)
    text = message_of(ranks, large_receive_buffer)
    assert "send(3 float32) to rank 1" in text and "recv(4 float32) from rank 0" in text
    text = message_of(ranks, large_receive_buffer_in_a_batch)
    assert "isend(3 float32) to rank 0" in text and "irecv(4 float32) from rank" in text


def test_the_one_rank_that_differs_is_named(ranks):
    def other_size():
        time.sleep(0.02 * (dist.get_rank() == 2))
        dist.all_reduce(torch.ones(2 + (dist.get_rank() == 1)))

    def other_order():
        loss, correct = torch.ones(1), torch.ones(1)
        if dist.get_rank() == 1:
            dist.all_reduce(loss)
            dist.all_reduce(correct)
        else:
            dist.all_reduce(correct)
            dist.all_reduce(loss)

    others = {3: "ranks 0, 2", 4: "ranks 0, 2-3"}.get(ranks.size)
    for _ in range(3):
        sizes, order = message_of(ranks, other_size), message_of(ranks, other_order)
        if ranks.size == 2:
            assert sizes.startswith("ranks 0-1 do not make the same call: the shapes differ\n")
            assert order.startswith("ranks 0-1 make the same calls in different orders. Results since")
        else:
            assert sizes.startswith(f"rank 1 makes another call than {others}: the shapes differ\n")
            assert order.startswith(f"rank 1 makes the same calls in another order than {others}. Results since")
            assert f"\n  {others}  all_reduce(2 float32, SUM)" in sizes


# calls that torch itself makes


def before_the_backward_of_ddp():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    out = model(torch.ones(2, 4)).sum()
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))  # <-
    out.backward()  # <-


def backward_passes_in_different_orders():
    models = [torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, n)) for n in (4, 5)]
    losses = [model(torch.ones(2, 4)).sum() for model in models]
    for loss in losses if dist.get_rank() else reversed(losses):
        loss.backward()  # <-


def objects_by_different_calls():
    if dist.get_rank() == 0:
        dist.all_gather_object([None] * dist.get_world_size(), 3)  # <-
    else:
        dist.broadcast_object_list([None], 0)  # <-


@pytest.mark.parametrize(
    "case", [before_the_backward_of_ddp, backward_passes_in_different_orders, objects_by_different_calls]
)
def test_calls_made_by_torch(ranks, case):
    """A rank of them waits inside C++ until its sockets are shut."""
    text = message_of(ranks, case)
    assert {int(n) for n in re.findall(r"test_caught\.py, line (\d+)", text)} == set(marked_lines(case)), text


# what the monitor finds


def one_rank_alone_in_a_sharded_forward():
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(torch.nn.Linear(8, 8))
    if dist.get_rank() == 0:
        model(torch.ones(2, 8))


def uneven_batches():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    for _ in range(2 + (dist.get_rank() == 0)):
        model(torch.ones(2, 4)).sum().backward()


def message_that_nobody_receives():
    if dist.get_rank() == 0:
        dist.isend(torch.ones(3), 1).wait()


def skipped():
    if dist.get_rank() != 1:
        dist.all_reduce(torch.ones(1))


def extra():
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))


def all_send_first():
    n, mine = dist.get_world_size(), dist.get_rank()
    dist.send(torch.ones(2), (mine + 1) % n)
    dist.recv(torch.ones(2), (mine - 1) % n)


def all_receive_first():
    n, mine = dist.get_world_size(), dist.get_rank()
    dist.recv(torch.ones(2), (mine - 1) % n)
    dist.send(torch.ones(2), (mine + 1) % n)


def groups_crossed():
    a, b = dist.new_group([0, 1]), dist.new_group([0, 1])
    for group in {0: (a, b), 1: (b, a)}.get(dist.get_rank(), ()):
        dist.all_reduce(torch.ones(1), group=group)


def group_by_members_only():
    if dist.get_rank() == 0:
        dist.new_group([0])


@pytest.mark.parametrize(
    "case",
    [
        skipped,
        extra,
        all_send_first,
        all_receive_first,
        groups_crossed,
        group_by_members_only,
        one_rank_alone_in_a_sharded_forward,
        uneven_batches,
        message_that_nobody_receives,
    ],
)
def test_waits_that_cannot_end(ranks, case):
    started = time.monotonic()
    text = message_of(ranks, case, HangError)
    assert time.monotonic() - started < WITHIN_S
    assert "test_caught.py, line" in text
    assert case is not group_by_members_only or "new_group is called by all ranks" in text


def test_a_group_rank_for_a_global_rank(ranks):
    def program():
        group = dist.new_group([1])
        if dist.get_rank() == 1:
            dist.broadcast(torch.ones(1), src=0, group=group)

    assert "its rank 0 is global rank 1" in message_of(ranks, program, RankError)


def test_lines_of_cells_are_named(ranks):
    ranks.run_cell("def mean(value):\n    dist.all_reduce(value)", "cell [1]")
    cell = "x = torch.ones(2 + (rank > 0))\nif rank:\n    mean(x)\nelse:\n    dist.all_reduce(x)"
    with pytest.raises(GuardError) as caught:
        ranks.run_cell(cell, "cell [2]")
    text = str(caught.value)
    assert "cell [2], line 5:  dist.all_reduce(x)" in text and "cell [1], line 2:  dist.all_reduce(value)" in text
    usable(ranks)


# the switch, and what is meant


def test_a_guard_that_is_off_compares_nothing(ranks):
    assert ranks.run(swapped_in_branches, guard=False) == [None] * ranks.size
    with pytest.raises(HangError):
        ranks.run(kind, guard=False)
    usable(ranks)
    message_of(ranks, swapped_in_branches)


def test_calls_that_gloo_runs_alike_meet_without_the_guard_too(ranks):
    def program():
        n = dist.get_world_size()
        inputs, outputs = torch.arange(2.0 * n), torch.zeros(2 * n)
        if dist.get_rank():
            dist.all_to_all_single(outputs, inputs)
            dist.all_gather_into_tensor(outputs, inputs[:2])
        else:
            dist.all_to_all(list(outputs.chunk(n)), list(inputs.chunk(n)))
            dist.all_gather(list(outputs.chunk(n)), inputs[:2])
        return outputs.tolist()

    for guard in (False, True):
        assert ranks.run(program, guard=guard) == [[0.0, 1.0] * ranks.size] * ranks.size


def test_same_call_says_what_is_meant(ranks):
    def program():
        loss, correct = torch.ones(1), torch.ones(1)
        first, second = (loss, correct) if dist.get_rank() else (correct, loss)
        with dtlab.same_call("metric"):
            if dist.get_rank():
                dist.all_reduce(loss)
                dist.all_reduce(correct)
            else:
                dist.all_reduce(correct)
                dist.all_reduce(loss)

    ranks.run(program)


def test_an_open_handle_is_named_and_may_be_awaited_later(ranks, capsys):
    ranks.run_cell("x = torch.ones(2)\nwork = dist.all_reduce(x, async_op=True)", "cell [1]")
    assert "not awaited yet: all_reduce" in capsys.readouterr().out
    ranks.run_cell("work.wait()\nprint(x.sum().item())", "cell [2]")
    assert str(2.0 * ranks.size) in capsys.readouterr().out


def test_a_rank_that_swallows_exceptions_is_stopped_too(ranks):
    def program():
        try:
            dist.all_reduce(torch.ones(other()))
        except Exception:
            pass
        time.sleep(30)

    started = time.monotonic()
    message_of(ranks, program)
    assert time.monotonic() - started < WITHIN_S


@pytest.mark.parametrize("size", [2, 3])
def test_a_default_device_hides_nothing(size):
    def sets(device):
        torch.set_default_device(device)

    def writes_early():
        x = torch.ones(4)
        work = dist.all_reduce(x, async_op=True)
        x += 1
        work.wait()

    with dtlab.launch(size) as ranks:
        ranks.run(sets, "cpu")
        with pytest.raises(dtlab.GuardError, match="writes a buffer"):
            ranks.run(writes_early)


def test_other_memory_for_a_buffer_in_flight():
    def gives_other_memory():
        x = torch.ones(4000)
        work = dist.all_reduce(x, async_op=True)
        x.data = torch.zeros(4000)
        work.wait()

    def swaps_gathers():
        outputs, a, b = [torch.zeros(2) for _ in range(2)], torch.ones(2), torch.ones(2)
        if dist.get_rank() == 0:
            dist.all_gather(outputs, a)
            dist.all_gather(outputs, b)
        else:
            dist.all_gather(outputs, b)
            dist.all_gather(outputs, a)

    with dtlab.launch(2) as ranks:
        with pytest.raises(dtlab.GuardError, match="has given other memory to a buffer"):
            ranks.run(gives_other_memory)
        with pytest.raises(dtlab.GuardError, match="different orders"):
            ranks.run(swaps_gathers)
        assert ranks.run(lambda: dist.get_rank()) == [0, 1]
