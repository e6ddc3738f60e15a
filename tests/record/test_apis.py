# ruff: noqa: F821  (names that live on the ranks)
"""Each API of torch on real ranks, against bytes and calls counted by hand."""
import pytest
import torch
from helpers_for_records import calls, live_at_end
from torch import nn

import dtlab

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def ranks(request):
    with dtlab.launch(request.param, guard=False) as pool:
        yield pool


@pytest.fixture(scope="module")
def four():
    with dtlab.launch(4, guard=False) as pool:
        yield pool


def ring(n, size):
    return 2 * (n - 1) / n * size


def test_raw_calls(ranks):
    def every_collective():
        n = world_size
        x = torch.ones(60)
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        dist.reduce(x, 0)
        dist.all_gather([torch.empty(60) for _ in range(n)], x)
        dist.all_gather_into_tensor(torch.empty(60 * n), x)
        dist.reduce_scatter_tensor(torch.empty(60), torch.ones(60 * n))
        dist.reduce_scatter(torch.empty(60), [torch.ones(60) for _ in range(n)])
        dist.all_to_all_single(torch.empty(60), x)
        dist.all_to_all([torch.empty(5) for _ in range(n)], [torch.ones(5) for _ in range(n)])
        dist.gather(x, [torch.empty(60) for _ in range(n)] if rank == 0 else None, 0)
        dist.scatter(torch.empty(60), [torch.ones(60) for _ in range(n)] if rank == 0 else None, 0)
        dist.barrier()
        return rank

    recording, n = ranks.record(every_collective), ranks.size
    assert recording.results == list(range(n))
    s, share = 240, (n - 1) / n  # bytes of 60 floats; what a ring rank sends of a full buffer
    for r in range(n):
        alone = n == 1
        assert calls(recording, r) == {
            "all_reduce": (1, s, ring(n, s)),
            "broadcast": (1, s, 0 if r == n - 1 else s),
            "reduce": (1, s, 0 if r == 0 else s),
            "all_gather": (1, n * s, share * n * s),
            "all_gather_into_tensor": (1, n * s, share * n * s),
            "reduce_scatter": (1, n * s, share * n * s),
            "reduce_scatter_tensor": (1, n * s, share * n * s),
            "all_to_all_single": (1, s, share * s),
            "all_to_all": (1, n * 20, share * n * 20),
            "gather": (1, n * s, 0 if r == 0 or alone else s),
            "scatter": (1, n * s, share * n * s if r == 0 else 0),
            "barrier": (1, 0, 0),
        }
        events = recording.events[r]
        issues, waits = ([(e.op, e.group, e.seq) for e in events if e.kind == kind] for kind in ("issue", "wait"))
        assert issues == waits and [seq for *_, seq in issues] == list(range(12))


def test_uneven_chunks_are_exact(ranks):
    def program():
        mine = [torch.ones(r + 1) for r in range(world_size)]  # a chunk of r + 1 floats for rank r
        dist.reduce_scatter(torch.empty(rank + 1), mine)
        splits = [r + 1 for r in range(world_size)]
        received = torch.empty(world_size * (rank + 1))
        dist.all_to_all_single(received, torch.ones(sum(splits)), [rank + 1] * world_size, splits)

    recording, n = ranks.record(program), ranks.size
    total = 4 * n * (n + 1) // 2
    for r in range(n):
        mine = 0 if n == 1 else total - 4 * (r + 1)
        assert calls(recording, r) == {"reduce_scatter": (1, total, mine), "all_to_all_single": (1, total, mine)}


def test_async_calls_groups_and_messages(four):
    def program():
        low, high = dist.new_group([0, 1]), dist.new_group([2, 3])
        x, y = torch.ones(10), torch.empty(10)
        handle = dist.all_reduce(x, group=low if rank < 2 else high, async_op=True)
        torch.ones(5) + 1
        handle.wait()
        sent = dist.isend(x, (rank + 1) % 4, tag=7)
        dist.recv(y, (rank - 1) % 4, tag=7)
        sent.wait()
        dist.send(x, (rank + 2) % 4) if rank < 2 else dist.recv(x, (rank + 2) % 4)

    recording = four.record(program)
    for r in range(4):
        events = [e for e in recording.events[r] if e.kind in ("issue", "wait") or e.op == "aten.add"]
        assert [(e.kind, e.op) for e in events[:3]] == [
            ("issue", "all_reduce"), ("compute", "aten.add"), ("wait", "all_reduce")]  # fmt: skip
        group = recording.meta["groups"][events[0].group]
        assert group == ([0, 1] if r < 2 else [2, 3]) and events[0].wire_bytes == 40
        messages = [(e.kind, e.op, e.peer, e.tag, e.seq, e.bytes, e.wire_bytes) for e in events[3:7]]
        after, before, across = (r + 1) % 4, (r - 1) % 4, (r + 2) % 4
        assert messages == [
            ("issue", "send", after, 7, 0, 40, 40), ("issue", "recv", before, 7, 0, 40, 0),
            ("wait", "recv", before, 7, 0, 0, 0), ("wait", "send", after, 7, 0, 0, 0)]  # fmt: skip
        assert (events[7].op, events[7].peer) == ("send" if r < 2 else "recv", across)


def test_functional_collectives(ranks):
    def program():
        import torch.distributed._functional_collectives as functional

        group = dist.group.WORLD
        y = functional.all_reduce(torch.ones(60), "sum", group) + 1
        z = functional.all_gather_tensor(torch.ones(60), 0, group) + 1
        w = functional.reduce_scatter_tensor(torch.ones(60 * world_size), "sum", 0, group)
        return y.sum().item(), z.sum().item(), w.sum().item()

    recording, n = ranks.record(program), ranks.size
    assert recording.results == [(60 * (n + 1), 120 * n, 60 * n)] * n
    for r in range(n):
        assert calls(recording, r) == {
            "all_reduce": (1, 240, ring(n, 240)),
            "all_gather_into_tensor": (1, 240 * n, 240 * (n - 1)),
            "reduce_scatter_tensor": (1, 240 * n, 240 * (n - 1)),
        }
        order = [e.op for e in recording.events[r] if e.kind == "wait" or e.op in ("aten.add", "aten.sum")]
        assert order[:4] == ["all_reduce", "aten.add", "all_gather_into_tensor", "aten.add"]
        assert len([e for e in recording.events[r] if e.kind == "wait"]) == 3


def test_ddp(ranks):
    def program():
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)))
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
        model(torch.ones(4, 512)).sum().backward()  # DDP makes its buckets in the first step
        with dtlab.phase("step"):
            model(torch.ones(4, 512)).sum().backward()

    recording, n = ranks.record(program), ranks.size
    params = 3 * (512 * 512 + 512) * 4
    for r in range(n):
        events = [e for e in recording.events[r] if e.phase.get("name") == "step"]
        reduces = [e for e in events if e.op == "all_reduce" and e.kind == "issue"]
        assert sum(e.bytes for e in reduces) == params and len(reduces) == 3  # a bucket for each layer
        waits = [e for e in events if e.op == "all_reduce" and e.kind == "wait"]
        assert [w.seq for w in waits] == [e.seq for e in reduces]  # inferred: C++ waits
        first_copy = next(e for e in events if e.kind == "compute" and set(e.reads) & set(reduces[0].writes))
        assert waits[0].end_s <= first_copy.start_s
        row = recording.memory().loc[r]
        assert (row.peak_params, row.peak_grads) == (params, params)


def test_fsdp2(ranks):
    def program():
        from torch.distributed.fsdp import fully_shard

        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        kept.append((model, optimizer))

    recording, n = ranks.record(_keeping(program)), ranks.size
    layer, rows = 64 * 64 * 4, -(-64 // n)  # of a shard; the last one is padded
    for r in range(n):
        # forward gathers both layers, backward both again; each gradient is scattered once
        assert n == 1 or calls(recording, r) == {
            "all_gather_into_tensor": (4, 4 * rows * n * 256, 4 * rows * (n - 1) * 256),
            "reduce_scatter_tensor": (2, 2 * rows * n * 256, 2 * rows * (n - 1) * 256),
        }
        live = live_at_end(recording, r)
        assert live["params"] == live["grads"] == 2 * rows * 256
        mine = len(torch.arange(64)[r * rows : (r + 1) * rows])
        assert live["optimizer_states"] == 4 * mine * 256 + 2 * 4
        assert recording.memory().loc[r].peak_params <= 4 * layer


def _keeping(program):
    """``program`` with a list ``kept`` whose content lives until the next call."""

    def run():
        program.__globals__["kept"] = []
        program()

    return run


def test_dtensor_tensor_parallel(ranks):
    def program():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (world_size,))
        mlp = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24))
        mlp = parallelize_module(mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        with dtlab.phase("step"):
            mlp(torch.ones(5, 24)).sum().backward()

    recording, n = ranks.record(program), ranks.size
    for r in range(n):
        events = [e for e in recording.events[r] if e.phase]
        reduces = [e for e in events if e.kind == "issue"]
        assert [(e.op, e.bytes) for e in reduces] == ([("all_reduce", 5 * 24 * 4)] if n > 1 else [])
        flops = sum(e.flops for e in events)
        assert flops == (2 + 3) * 2 * 5 * 24 * 48 // n  # local shapes; the first input needs no gradient
        local = 4 * (2 * 24 * 48 // n + 48 // n + 24)
        assert recording.memory().loc[r].peak_grads == local


SCHEDULES = [("ScheduleGPipe", 1), ("Schedule1F1B", 1), ("ScheduleInterleaved1F1B", 2), ("ScheduleLoopedBFS", 2),
             ("ScheduleInterleavedZeroBubble", 2), ("ScheduleZBVZeroBubble", 2)]  # fmt: skip


@pytest.mark.parametrize("name, chunks", SCHEDULES)
def test_pipelining(four, name, chunks):
    def program(name, chunks):
        import torch.distributed.pipelining.schedules as schedules
        from torch.distributed.pipelining import PipelineStage

        last = world_size * chunks - 1
        v_shaped = [rank, last - rank]  # ZBV: the last stage stands beside the first
        mine = v_shaped if "ZBV" in name else [rank + world_size * chunk for chunk in range(chunks)]
        stages = [PipelineStage(nn.Linear(16, 16), s, last + 1, torch.device("cpu")) for s in mine]
        loss = lambda out, target: ((out - target) ** 2).sum()
        schedule = getattr(schedules, name)(stages if chunks > 1 else stages[0], 8, loss_fn=loss)
        data = (torch.ones(16, 16),) if rank == 0 else ()
        target = {"target": torch.ones(16, 16)} if last in mine else {}
        schedule.step(*data, **target)  # the first step also finds out shapes
        with dtlab.phase("step", second=True):
            schedule.step(*data, **target)
        return mine

    recording = four.record(program, name, chunks)
    message, last = 2 * 16 * 4, 4 * chunks - 1
    for r, mine in enumerate(recording.results):
        issues = [e.op for e in recording.events[r]
                  if e.kind == "issue" and "second" in e.phase and e.bytes == message]  # fmt: skip
        elsewhere = [s for stage in mine for s in (stage - 1, stage + 1) if 0 <= s <= last and s not in mine]
        wanted = len(elsewhere) * 8  # an activation or gradient for each micro-batch
        assert issues.count("send") == issues.count("recv") == wanted
        waits = [e for e in recording.events[r] if e.kind == "wait" and "second" in e.phase]
        assert len(waits) == 2 * wanted
        products = sum(e.flops for e in recording.events[r] if "second" in e.phase)
        assert products == sum(8 * 2 * 2 * 16 * 16 * (2 if s == 0 else 3) for s in mine)
        boxes = [(e.phase["name"], e.phase["stage"], e.phase["micro_batch"]) for e in recording.events[r]
                 if e.kind == "phase" and "stage" in e.phase and "second" in e.phase]  # fmt: skip
        each = ["forward", "backward"] + (["weight"] if "Zero" in name else [])
        assert set(each[:2]) <= {kind for kind, *_ in boxes} <= set(each)
        for kind in each[:2]:
            assert sorted(b[1:] for b in boxes if b[0] == kind) == [(s, m) for s in sorted(mine) for m in range(8)]


def test_collectives_of_a_user_thread(four):
    def program():
        import threading

        x = torch.ones(10)
        thread = threading.Thread(target=dist.all_reduce, args=(x,))
        thread.start()
        thread.join()

    assert calls(four.record(program), 2) == {"all_reduce": (1, 40, 60)}


def test_a_failure_is_raised_and_the_next_recording_is_right(four):
    with pytest.raises(dtlab.RankError, match="rank 1 of 4 failed: ZeroDivisionError"):
        four.record(lambda: 1 / 0 if rank == 1 else None)
    assert calls(four.record(lambda: dist.all_reduce(torch.ones(10)))) == {"all_reduce": (1, 40, 60)}
    assert four.run(lambda: torch._C._len_torch_dispatch_stack()) == [0] * 4


def test_handles_that_nobody_waits_for_hold_no_memory(four):
    def program():
        for _ in range(3):
            handle = dist.all_reduce(torch.ones(1000), async_op=True)
            dist.barrier()
        del handle
        dist.barrier()

    recording = four.record(program)
    assert set(live_at_end(recording).values()) == {0}


def test_a_part_of_the_ranks_and_what_is_noted(four):
    recording = four.record(lambda: torch.ones(2), ranks=[1, 3], tokens=64, model_flops=1e6)
    assert (recording.ranks, recording.world_size, len(recording.results)) == ([1, 3], 4, 2)
    assert (recording.meta["tokens"], recording.meta["model_flops"], recording.meta["dry"]) == (64, 1e6, False)


def test_what_lives_on_the_ranks_counts_from_the_start(four):
    four.run_cell(
        "model = torch.nn.Linear(4, 4)\nadam = torch.optim.Adam(model.parameters())\n"
        "model(torch.ones(1, 4)).sum().backward()\nadam.step()",
        "cell [1]",
    )

    def evaluate():
        adam.zero_grad(set_to_none=False)
        return model(torch.ones(1, 4)).sum()

    row = four.record(evaluate).memory().loc[1]
    assert (row.params, row.grads, row.optimizer_states) == (80, 80, 2 * 80 + 2 * 4)


def test_a_cell_is_recorded(four):
    four.run_cell("model = torch.nn.Linear(4, 4)", "cell [1]")
    recording = four.run_cell("y = model(torch.ones(2, 4))\ny.sum().backward()", "cell [2]", record=True)
    assert recording.memory().loc[3].params == 80
    assert {e.where for e in recording.events[0] if e.op == "aten.addmm"} == {"cell [2], line 1"}


def test_the_ranks_share_one_clock(four):
    """A rank with many tensors begins later; a barrier still ends for all at once."""

    def hold(count):
        torch.held = [torch.ones(1) for _ in range(count if rank == 0 else 0)]

    def program():
        dist.barrier()

    four.run(hold, 50_000)
    recording = four.record(program)
    four.run(hold, 0)
    ends = [e.end_s for events in recording.events.values() for e in events if e.kind == "wait"]
    assert len(ends) == 4 and max(ends) - min(ends) < 0.05
