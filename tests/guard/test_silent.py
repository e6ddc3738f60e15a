"""Correct programs: the guard says nothing, and results are what they are without it."""

import contextlib
import functools
import inspect
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dtlab
from dtlab.ranks import board, calls

pytestmark = pytest.mark.ranks
STEPS = 3


def mlp(width=8, layers=4):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])


def train(model, optimizer, steps=STEPS, before_step=lambda: None):
    for step in range(steps):
        torch.manual_seed(step * 100 + dist.get_rank())
        model(torch.randn(4, 8)).square().mean().backward()
        before_step()
        optimizer.step()
        optimizer.zero_grad()


# data parallel


def ddp():
    model = nn.parallel.DistributedDataParallel(mlp(), bucket_cap_mb=0.0005)
    train(model, torch.optim.Adam(model.parameters()))


def ddp_with_unused_parameters_and_batch_norm():
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    net.extra = nn.Linear(8, 8)
    model = nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def ddp_no_sync():
    model = nn.parallel.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        with model.no_sync():
            model(torch.randn(2, 8)).mean().backward()
        model(torch.randn(2, 8)).mean().backward()
        optimizer.step()


def ddp_join():
    model = nn.parallel.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        train(model, optimizer, steps=2 + dist.get_rank())
    train(model, optimizer)


def ddp_hooks():
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
        model = nn.parallel.DistributedDataParallel(mlp())
        model.register_comm_hook(None, hook)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def ddp_own_hook():
    def hook(_, bucket):
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda f: f.value()[0] / dist.get_world_size())

    model = nn.parallel.DistributedDataParallel(mlp())
    model.register_comm_hook(None, hook)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def grad_hooks_by_hand():
    model, works = mlp(), []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: works.append(dist.all_reduce(p.grad, async_op=True)))

    def wait():
        for work in works:
            work.wait()
        works.clear()
        for p in model.parameters():
            p.grad /= dist.get_world_size()

    train(model, torch.optim.SGD(model.parameters(), lr=0.1), before_step=wait)


def reduce_scatter_and_all_gather_by_hand():
    flat, n = torch.arange(float(12 * dist.get_world_size())), dist.get_world_size()
    shard = torch.empty(12)
    dist.reduce_scatter_tensor(shard, flat)
    dist.all_gather_into_tensor(flat, shard / n)


def zero_redundancy_optimizer():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(mlp(layers=3))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    train(model, optimizer)
    optimizer.consolidate_state_dict(0)


def ddp_with_sparse_gradients():
    model = nn.parallel.DistributedDataParallel(nn.Embedding(10, 4, sparse=True))
    model(torch.tensor([1, 1 + dist.get_rank()])).sum().backward()
    assert model.module.weight.grad.is_sparse


# sharded


def fsdp2():
    from torch.distributed.fsdp import fully_shard

    model = mlp()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model[0].set_modules_to_forward_prefetch([model[1]])
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, before_step=lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))


def hsdp():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    n = dist.get_world_size()
    if n % 2 == 0:
        mesh = init_device_mesh("cpu", (n // 2, 2), mesh_dim_names=("replicate", "shard"))
        model = fully_shard(mlp(), mesh=mesh)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def dtensor_tensor_parallel():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12 * 4), nn.ReLU(), nn.Linear(12 * 4, 8))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        torch.manual_seed(step)
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()


def dtensor_redistribute():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = distribute_tensor(torch.arange(40.0).reshape(10, 4), mesh, [Shard(0)])
    x.redistribute(placements=[Replicate()]).redistribute(placements=[Shard(1)]).full_tensor()


def checkpointing(use_reentrant):
    from torch.utils.checkpoint import checkpoint

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = mlp()

        def forward(self, x):
            return checkpoint(self.layers, x.requires_grad_(), use_reentrant=use_reentrant)

    model = nn.parallel.DistributedDataParallel(Block(), static_graph=True)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


checkpointing_reentrant = functools.partial(checkpointing, True)
checkpointing_not_reentrant = functools.partial(checkpointing, False)


# pipelines


def pipeline(schedule_name, per_rank=1, is_v=False):
    from torch.distributed.pipelining import PipelineStage, schedules

    n, mine = dist.get_world_size(), dist.get_rank()
    num_stages = n * per_rank
    indices = [mine, num_stages - 1 - mine] if is_v else [mine + i * n for i in range(per_rank)]
    stages = [PipelineStage(mlp(layers=1), i, num_stages, torch.device("cpu")) for i in indices]
    loss = lambda out, target: (out - target).square().mean()  # noqa: E731
    schedule_class = getattr(schedules, schedule_name)
    schedule = schedule_class(stages[0] if per_rank == 1 else stages, n_microbatches=2 * n, loss_fn=loss)
    x, target = torch.randn(4 * n, 8), torch.randn(4 * n, 8)
    for _ in range(2):
        args = (x,) if mine == 0 else ()
        has_last = num_stages - 1 in indices
        schedule.step(*args, **({"target": target, "losses": []} if has_last else {}))


gpipe = functools.partial(pipeline, "ScheduleGPipe")
one_f_one_b = functools.partial(pipeline, "Schedule1F1B")
interleaved = functools.partial(pipeline, "ScheduleInterleaved1F1B", 2)
looped_bfs = functools.partial(pipeline, "ScheduleLoopedBFS", 2)
interleaved_zero_bubble = functools.partial(pipeline, "ScheduleInterleavedZeroBubble", 2)
zbv = functools.partial(pipeline, "ScheduleZBVZeroBubble", 2, True)
dual_pipe_v = functools.partial(pipeline, "ScheduleDualPipeV", 2, True)


def pipeline_by_hand():
    """1F1B with blocking messages: odd stages receive first."""
    n, mine = dist.get_world_size(), dist.get_rank()
    for step in range(4):
        x = torch.full((2,), float(step))
        if mine > 0:
            dist.recv(x, mine - 1)
        x = x + 1
        if mine < n - 1:
            dist.send(x, mine + 1)
            grad = torch.empty(2)
            dist.recv(grad, mine + 1)
        else:
            grad = torch.ones(2)
        if mine > 0:
            dist.send(grad, mine - 1)


# messages


def batch_of_messages():
    n, mine = dist.get_world_size(), dist.get_rank()
    x, y = torch.full((3,), float(mine)), torch.empty(3)
    ops = [dist.P2POp(dist.isend, x, (mine + 1) % n), dist.P2POp(dist.irecv, y, (mine - 1) % n)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert y[0] == (mine - 1) % n


def ring_on_chunks_of_one_buffer():
    """Ring all-reduce: a chunk is in flight while the next one is written."""
    n, mine = dist.get_world_size(), dist.get_rank()
    flat = torch.arange(4.0 * n)
    chunks = list(flat.chunk(n))
    for phase in (0, 1):
        for step in range(n - 1):
            sent, got = (mine - step + phase) % n, (mine - step - 1 + phase) % n
            work = dist.isend(chunks[sent], (mine + 1) % n)
            buffer = torch.empty_like(chunks[got])
            dist.recv(buffer, (mine - 1) % n)
            chunks[got].copy_(buffer if phase else chunks[got] + buffer)
            work.wait()
    assert torch.equal(flat, n * torch.arange(4.0 * n))


def rows_beside_a_row_in_flight():
    n, mine = dist.get_world_size(), dist.get_rank()
    x = torch.zeros(4, 3)
    work, receive = dist.isend(x[1], (mine + 1) % n), dist.irecv(x[3], (mine - 1) % n)
    x[::2] += 1
    x[0].sum(), x[1].sum()
    work.wait(), receive.wait()
    x += 1


def send_buffer_read():
    n, mine = dist.get_world_size(), dist.get_rank()
    x = torch.ones(3)
    works = [dist.isend(x, peer) for peer in range(n) if peer != mine]
    total = x.sum().item() + sum(x.tolist())
    for peer in range(n):
        if peer != mine:
            dist.recv(torch.empty(3), peer)
    for work in works:
        work.wait()
    assert total == 6


def tags_out_of_order():
    if dist.get_rank() == 0:
        works = [dist.isend(torch.full((tag,), 1.0), 1, tag=tag) for tag in (1, 2, 3)]
        for work in works:
            work.wait()
    elif dist.get_rank() == 1:
        for tag in (3, 1, 2):
            dist.recv(torch.empty(tag), 0, tag=tag)


def receive_from_anyone():
    if dist.get_rank() == 0:
        for _ in range(dist.get_world_size() - 1):
            dist.recv(torch.empty(2))
    else:
        dist.send(torch.ones(2), 0)


def messages_against_asynchronous_collectives():
    x = torch.ones(1 << 14)
    work = dist.all_reduce(x, async_op=True) if dist.get_rank() == 0 else None
    if dist.get_rank() == 0:
        dist.send(torch.ones(2), 1)
    elif dist.get_rank() == 1:
        dist.recv(torch.ones(2), 0)
    (work or dist.all_reduce(x, async_op=True)).wait()


def buffers_that_take_turns():
    """Double buffering: what one rank calls ping is pong on the other."""
    peer = {0: 1, 1: 0}.get(dist.get_rank())
    if peer is not None:
        ping, pong = torch.ones(2), torch.zeros(2)
        for _ in range(4):
            work = dist.isend(ping, peer)
            dist.recv(pong, peer)
            work.wait()
            ping, pong = pong, ping


def ring_written_out():
    """Two steps of a ring: what a rank sends second is what it received first, under the same name on all ranks."""
    n, mine = dist.get_world_size(), dist.get_rank()
    a, b = torch.full((2,), float(mine)), torch.empty(2)
    first = dist.isend(a, (mine + 1) % n)
    dist.recv(b, (mine - 1) % n)
    first.wait()
    second = dist.isend(b, (mine + 1) % n)
    dist.recv(a, (mine - 1) % n)
    second.wait()
    assert a[0] == (mine - 2) % n


def turns_written_out():
    a, b = torch.ones(2), torch.ones(2)
    if dist.get_rank() == 0:
        dist.send(a, 1)
        dist.recv(b, 1)
        dist.send(b, 1)
        dist.recv(a, 1)
    elif dist.get_rank() == 1:
        dist.recv(b, 0)
        dist.send(a, 0)
        dist.recv(a, 0)
        dist.send(b, 0)


def exchange_by_names():
    if dist.get_rank() == 0:
        mine, theirs = torch.ones(2), torch.zeros(2)
        dist.send(mine, 1)
        dist.recv(theirs, 1)
    elif dist.get_rank() == 1:
        mine, theirs = torch.ones(2), torch.zeros(2)
        dist.recv(theirs, 0)
        dist.send(mine, 0)


# collectives


def objects():
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, {"rank": dist.get_rank(), "text": "x" * dist.get_rank()})
    dist.gather_object(dist.get_rank(), gathered if dist.get_rank() == 0 else None)
    dist.broadcast_object_list(gathered, 0)
    out = [None]
    dist.scatter_object_list(out, list(range(dist.get_world_size())) if dist.get_rank() == 0 else None)
    assert out == [dist.get_rank()]


def strided_where_gloo_is_right():
    n = dist.get_world_size()
    column = torch.arange(8.0).reshape(4, 2)[:, 1]
    outputs = [torch.zeros(4, 2)[:, 1] for _ in range(n)]
    dist.all_gather(outputs, column)
    assert all(torch.equal(o, column) for o in outputs)
    dist.gather(column, outputs if dist.get_rank() == 0 else None)
    dist.all_to_all(outputs, [column] * n)
    assert all(torch.equal(o, column) for o in outputs)
    out = torch.zeros(4)
    dist.reduce_scatter(out, [column] * n)
    assert torch.equal(out, n * column)


def transposed_on_all_ranks():
    x = torch.arange(6.0).reshape(2, 3)
    y = x.t().contiguous().t()
    dist.all_reduce(y)
    assert torch.equal(y, dist.get_world_size() * x)
    dist.broadcast(y, 0)


def flattened_on_one_rank():
    x = torch.ones(4, 4)
    dist.all_reduce(x.view(-1) if dist.get_rank() else x)


def list_against_tensor_all_gather():
    n = dist.get_world_size()
    if dist.get_rank():
        dist.all_gather([torch.zeros(2) for _ in range(n)], torch.ones(2))
    else:
        dist.all_gather_into_tensor(torch.zeros(2 * n), torch.ones(2))


def uneven_all_to_all():
    n, mine = dist.get_world_size(), dist.get_rank()
    sends, expects = [mine + 1] * n, [peer + 1 for peer in range(n)]
    dist.all_to_all_single(torch.zeros(sum(expects)), torch.ones(sum(sends)), expects, sends)


def all_to_all_within_one_buffer():
    n = dist.get_world_size()
    flat = torch.ones(2 * n)
    dist.all_to_all_single(flat[n:], flat[:n])
    dist.all_to_all(list(flat[n:].chunk(n)), list(flat[:n].chunk(n)))


def uneven_reduce_scatter():
    n, mine = dist.get_world_size(), dist.get_rank()
    dist.reduce_scatter(torch.zeros(mine + 1), [torch.ones(i + 1) for i in range(n)])


def unusual_types_and_sizes():
    x = torch.ones(2, dtype=torch.complex64)
    dist.all_reduce(x)
    dist.broadcast(torch.ones(2, dtype=torch.bool), 0)
    dist.all_reduce(torch.ones(0))
    dist.all_reduce(torch.ones(()) if dist.get_rank() else torch.ones(1))
    dist.all_gather([torch.zeros(2, 0) for _ in range(dist.get_world_size())], torch.zeros(2, 0))


def broadcast_from_one_branch():
    weight = torch.ones(2)
    for _ in range(STEPS):
        if dist.get_rank() == 0:
            weight += 1
            dist.broadcast(weight, 0)
        else:
            received = torch.empty(2)
            dist.broadcast(received, 0)


def exchange_by_broadcasts():
    """Rank 0 sends its a into the others' b, then rank 1 its a into the others' b."""
    a, b = torch.ones(2), torch.ones(2)
    if dist.get_rank() == 0:
        dist.broadcast(a, 0)
        dist.broadcast(b, 1)
    else:
        dist.broadcast(b, 0)
        dist.broadcast(a, 1)


def roots_in_turn():
    for root in range(dist.get_world_size()):
        mine, other = torch.ones(2), torch.empty(2)
        dist.broadcast(mine if dist.get_rank() == root else other, root)


def roles_that_swap_in_branches():
    a, b = torch.ones(2), torch.ones(2)
    for step in range(2 * STEPS):
        if (dist.get_rank() + step) % 2:
            dist.all_reduce(a)
        else:
            dist.all_reduce(b)


def roles_that_swap_in_functions():
    a, b = torch.ones(2), torch.ones(2)

    def teacher():
        dist.all_reduce(a)

    def student():
        dist.all_reduce(b)

    for step in range(2 * STEPS):
        (teacher if (dist.get_rank() + step) % 2 else student)()


def roles_that_swap_in_two_ifs():
    a, b = torch.ones(2), torch.ones(2)
    for step in range(2 * STEPS):
        if dist.get_rank() % 2 == step % 2:
            dist.all_reduce(a)
        if dist.get_rank() % 2 != step % 2:
            dist.all_reduce(b)


def phases_with_swapped_roles():
    target, guess = torch.ones(1), torch.ones(1)

    def teach():
        dist.all_reduce(target)

    def study():
        dist.all_reduce(guess)

    if dist.get_rank() == 0:
        teach()
    else:
        study()
    if dist.get_rank() == 0:
        study()
    else:
        teach()


def root_reads_what_it_broadcasts():
    x = torch.ones(4)
    work = dist.broadcast(x, 0, async_op=True)
    if dist.get_rank() == 0:
        x.sum()
    work.wait()


def roles_that_rotate():
    roles = [lambda i=i: dist.all_reduce(torch.full((2,), float(i))) for i in range(3)]
    for step in range(6):
        roles[(dist.get_rank() + step) % 3]()


def uneven_loops():
    """Rank 0 makes in a loop what the others make one by one."""
    a, b, c = torch.ones(1), torch.ones(1), torch.ones(1)
    if dist.get_rank() == 0:
        for t in (a, b, c):
            dist.all_reduce(t)
    else:
        dist.all_reduce(a)
        dist.all_reduce(b)
        dist.all_reduce(c)


def subgroups_in_different_orders():
    n, mine = dist.get_world_size(), dist.get_rank()
    one, two = dist.new_group([0, 1]), dist.new_group([0, n - 1])
    for group in (one, two) if mine % 2 else (two, one):
        if dist.get_rank(group) >= 0 and mine != 0:
            dist.all_reduce(torch.ones(2), group=group)
    if mine == 0:
        works = [dist.all_reduce(torch.ones(2), group=g, async_op=True) for g in (two, one)]
        for work in works:
            work.wait()


def asynchronous_on_two_groups_in_opposite_order():
    a, b = dist.new_group(), dist.new_group()
    groups = (a, b) if dist.get_rank() % 2 else (b, a)
    works = [dist.all_reduce(torch.ones(1 << 12), group=g, async_op=True) for g in groups]
    for work in works:
        work.wait()


def reduce_scatter_that_is_awaited_later():
    """On the CPU torch copies the result into the buffer while it waits."""
    mine, n = torch.empty(3), dist.get_world_size()
    work = dist.reduce_scatter_tensor(mine, torch.arange(3.0 * n), async_op=True)
    torch.ones(2) + 1
    work.wait()
    assert torch.equal(mine, n * torch.arange(3.0 * n)[3 * dist.get_rank() :][:3])


def overlap_with_other_work():
    x, w = torch.ones(1 << 16), torch.ones(64, 64)
    for _ in range(STEPS):
        work = dist.all_reduce(x, async_op=True)
        for _ in range(5):
            w = (w @ w).clamp(max=1)
        work.wait()
        x /= dist.get_world_size()


def polled_until_complete():
    work = dist.all_reduce(x := torch.ones(4), async_op=True)
    while not work.is_completed():
        pass
    assert x.sum() == 4 * dist.get_world_size()


def handles_inside_other_modes():
    """A handle opened inside a mode and awaited outside it leaves that mode's stack alone."""
    from torch.utils.flop_counter import FlopCounterMode

    x = torch.ones(4)
    with FlopCounterMode(display=False) as flops:
        work = dist.all_reduce(x, async_op=True)
        torch.ones(8, 8) @ torch.ones(8, 8)
    torch.ones(8, 8) @ torch.ones(8, 8)
    work.wait()
    assert flops.get_total_flops() == 2 * 8**3
    x += 1
    assert torch._C._len_torch_dispatch_stack() == 0


def a_compiled_function_beside_a_handle():
    double = torch.compile(lambda t: t * 2, backend="eager")
    x = torch.ones(4)
    work = dist.all_reduce(x, async_op=True)
    assert double(torch.ones(2)).sum() == 4
    work.wait()
    assert double(x).sum() == 8 * dist.get_world_size()


def memory_that_comes_back():
    for _ in range(20):
        works = [dist.all_reduce(torch.ones(256), async_op=True) for _ in range(3)]
        for work in works:
            work.wait()
        torch.ones(256).add_(1)


def uneven_work():
    import time

    time.sleep(0.6 * (dist.get_rank() == 0))
    dist.all_reduce(torch.ones(1))


def functional_collectives():
    import torch.distributed._functional_collectives as functional

    world = dist.group.WORLD
    x = functional.all_reduce(torch.ones(4), "sum", world)
    y = functional.all_gather_tensor(x * 2, 0, world)
    functional.reduce_scatter_tensor(y, "sum", 0, world).sum()
    functional.all_reduce(torch.ones(4, 4)[:, 1], "max", world).sum()
    n = dist.get_world_size()
    assert functional.broadcast(torch.full((2,), float(dist.get_rank())), 0, world).sum() == 0
    functional.wait_tensor(functional.broadcast(torch.ones(2), 0, world)).sum()
    assert functional.all_to_all_single(torch.ones(2 * n), None, None, world).sum() == 2 * n
    pair = [torch.ones(2 * n), torch.ones(3 * n)]
    for results in (
        functional.all_reduce_coalesced(pair, "sum", world),
        functional.all_gather_into_tensor_coalesced(pair, world),
        functional.reduce_scatter_tensor_coalesced(pair, "sum", [0, 0], world),
    ):
        assert [t.sum().item() > 0 for t in results] == [True, True]


def barriers_and_coalesced():
    dist.barrier()
    dist.monitored_barrier()
    dist.barrier(async_op=True).wait()
    with contextlib.suppress(NotImplementedError, RuntimeError):
        dist.all_reduce_coalesced([torch.ones(2), torch.ones(3, 3)])


def handles_dropped_after_an_answer():
    for _ in range(4):
        if dist.get_rank() == 0:
            work = dist.isend(torch.ones(2), 1)  # noqa: F841  (the next pass drops it)
            dist.recv(torch.zeros(2), 1)
        elif dist.get_rank() == 1:
            dist.recv(torch.zeros(2), 0)
            dist.send(torch.ones(2), 0)


def handles_in_a_list_that_is_awaited_late():
    n, mine = dist.get_world_size(), dist.get_rank()
    works = [dist.isend(torch.ones(2), (mine + 1) % n) for _ in range(3)]
    works += [dist.irecv(torch.zeros(2), (mine - 1) % n) for _ in range(3)]
    dist.barrier()
    works.append(dist.all_reduce(torch.ones(3), async_op=True))
    while works:
        works.pop().wait()


def a_collective_awaited_twice():
    work = dist.all_reduce(torch.ones(3), async_op=True)
    work.wait(), work.wait()


def many_small_tensors():
    import torch.distributed._functional_collectives as functional

    tensors = [torch.ones(2, 3) for _ in range(400)]
    results = functional.all_reduce_coalesced(tensors, "sum", dist.group.WORLD)
    assert sum(t.sum().item() for t in results) == 2400 * dist.get_world_size()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls it deprecated
        dist.all_reduce_coalesced(tensors)
    assert all(t.sum() == 6 * dist.get_world_size() for t in tensors)


def long_names():
    metrics = {letter * 2500 + letter: torch.ones(1) for letter in "ab"}
    for name in metrics:
        dist.all_reduce(metrics[name])
    mine = {f"{dist.get_rank()}" * 2500: torch.ones(1)}
    for name in mine:
        dist.all_reduce(mine[name])


def a_gpt_step():
    from dtlab.models import GPT, GPTConfig

    torch.manual_seed(0)
    config = GPTConfig(vocab_size=32, seq_length=8, num_layers=2, hidden_size=16, num_heads=2)
    model = nn.parallel.DistributedDataParallel(GPT(config))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 32, (2, 8))
    logits = model(tokens)
    logits = logits[0] if isinstance(logits, tuple) else logits
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()


_HELPERS = {"mlp", "train", "pipeline", "checkpointing"}
PROGRAMS = {
    name: f
    for name, f in list(globals().items())
    if name not in _HELPERS
    and ((inspect.isfunction(f) and f.__module__ == __name__) or isinstance(f, functools.partial))
}


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request):
    with dtlab.launch(request.param, timeout=60) as live:
        yield live


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_correct_program_raises_no_alarm(ranks, name, capsys):
    for _ in range(2):
        ranks.run(PROGRAMS[name])
    assert "not awaited" not in capsys.readouterr().out


def with_full_texts():
    """Rank 0 has no room for the names of what it calls; the others have."""
    first = dist.get_rank() == 0
    if first:
        calls.current.board._heap_used = board.HEAP_BYTES
    metrics = {f"{i}{'first' if first else ''}": torch.ones(1) for i in range(3)}
    for name in metrics:
        dist.all_reduce(metrics[name])
    dist.all_reduce(torch.ones(3, 5), async_op=True).wait()


def test_a_rank_whose_texts_are_full_goes_on():
    with dtlab.launch(2, timeout=60) as live:
        for _ in range(2):
            live.run(with_full_texts)
