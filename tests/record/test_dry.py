# ruff: noqa: F821  (names that live on the ranks)
"""Dry recordings: the bytes, FLOPs and memory of live ones, at sizes that no test machine has."""
import functools
import time

import pytest
import torch
from helpers_for_records import calls, live_at_end
from torch import nn

import dtlab
from dtlab.models import GPT, GPTConfig

pytestmark = pytest.mark.ranks


def block_of():
    """A function that travels by value."""

    def tensor_parallel_block(hidden, tokens, heads, tp_size):
        """Forward and backward of a transformer layer whose matrices are split over groups of ``tp_size`` ranks."""
        import resource

        import torch.nn.functional as F

        used = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        before = used()
        groups = [dist.new_group(range(first, first + tp_size)) for first in range(0, world_size, tp_size)]
        group = groups[rank // tp_size]

        class CopyToTp(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.view_as(x)

            @staticmethod
            def backward(ctx, grad):
                grad = grad.clone()
                dist.all_reduce(grad, group=group)
                return grad

        class ReduceFromTp(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                x = x.clone()
                dist.all_reduce(x, group=group)
                return x

            @staticmethod
            def backward(ctx, grad):
                return grad

        linear = lambda inputs, outputs: nn.Linear(inputs, outputs, bias=False)
        qkv, proj = linear(hidden, 3 * hidden // tp_size), linear(hidden // tp_size, hidden)
        fc1, fc2 = linear(hidden, 4 * hidden // tp_size), linear(4 * hidden // tp_size, hidden)
        norms = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        x = torch.randn(1, tokens, hidden, requires_grad=True)
        heads = qkv(CopyToTp.apply(norms[0](x))).unflatten(-1, (heads // tp_size, 3, -1))
        q, k, v = (part.transpose(1, 2) for part in heads.unbind(3))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + ReduceFromTp.apply(proj(y))
        x = x + ReduceFromTp.apply(fc2(F.gelu(fc1(CopyToTp.apply(norms[1](x))))))
        x.sum().backward()
        print("MiB", used() - before)

    return tensor_parallel_block


def test_a_world_without_ranks_is_refused():
    with pytest.raises(dtlab.ConfigError, match="a world has at least 1 rank"):
        dtlab.record_dry(lambda: None, world_size=0)


def test_a_block_of_gpt3_on_two_of_1024_ranks(capsys):
    hidden, tokens, t = 12288, 2048, 8
    dtlab.record_dry(lambda: None)  # the first one starts a process
    began = time.monotonic()
    recording = dtlab.record_dry(block_of(), hidden, tokens, 96, t, world_size=1024, ranks=[0, 8])
    took = time.monotonic() - began
    said = capsys.readouterr().out.splitlines()
    print(f"{took:.1f} s, MiB more on the two ranks: {said}")
    assert took < 30 and [line.partition(": MiB ")[0] for line in said] == ["rank 0", "rank 8"]
    assert all(int(line.rpartition(" ")[2]) < 300 for line in said)  # the block's tensors are 2.6 GB
    assert (recording.ranks, recording.world_size, recording.results) == ([0, 8], 1024, None)
    assert recording.meta["dry"] and list(recording.meta["groups"].values()) == [list(range(8)), list(range(8, 16))]
    activation = hidden * tokens * 4
    weights = 12 * hidden**2 // t
    for rank in (0, 8):
        assert calls(recording, rank) == {"all_reduce": (4, 4 * activation, 4 * 2 * 7 / 8 * activation)}
        attention = 4 * tokens**2 * hidden // t
        assert sum(e.flops for e in recording.events[rank]) == 6 * weights * tokens + attention * 7 // 2
        row = recording.memory().loc[rank]
        assert row.peak_params == row.peak_grads == 4 * (weights + 4 * hidden)
        assert {e.start_s for e in recording.events[rank]} | {e.end_s for e in recording.events[rank]} == {0.0}


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_dry_is_what_live_is(optimizer):
    def program(optimizer):
        from dtlab.models import GPT, GPTConfig

        model = GPT(GPTConfig(vocab_size=64, seq_length=16, hidden_size=32, num_layers=2, num_heads=4))
        optimizer = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)
        tokens = torch.zeros(2, 16, dtype=torch.long)
        with dtlab.phase("forward", micro_batch=1):
            loss = model(tokens).logsumexp(-1).mean()
        loss.backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)
        optimizer.step()

    with dtlab.launch(2, guard=False) as ranks:
        live = ranks.record(program, optimizer)
    dry = dtlab.record_dry(program, optimizer, world_size=2, ranks=[0, 1])
    assert dry.communication().equals(live.communication())
    assert dry.flops().equals(live.flops())
    for rank in (0, 1):
        facts = [[(e.op, e.bytes, e.phase) for e in recording.events[rank] if e.kind == "compute"]
                 for recording in (live, dry)]  # fmt: skip
        assert facts[0] == facts[1]
    assert dry.memory().equals(live.memory())


def test_functional_collectives_fsdp2_and_dtensor():
    def program():
        import torch.distributed._functional_collectives as functional
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        with dtlab.phase("functional"):
            y = functional.all_reduce(torch.ones(60), "sum", mesh["tp"].get_group()) + 1
        mlp = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24))
        parallelize_module(mlp, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        with dtlab.phase("tensor parallel"):
            mlp(torch.ones(5, 24)).sum().backward()
        sharded = fully_shard(nn.Linear(64, 64, bias=False), mesh=mesh["dp"])
        with dtlab.phase("sharded"):
            sharded(torch.ones(2, 64)).sum().backward()
        return y

    recording = dtlab.record_dry(program, world_size=8, ranks=[0, 5])
    for rank in (0, 5):
        issues = [(e.phase.get("name"), e.op, e.bytes, len(recording.meta["groups"][e.group]))
                  for e in recording.events[rank] if e.kind == "issue" and e.phase]  # fmt: skip
        assert issues == [
            ("functional", "all_reduce", 240, 4), ("tensor parallel", "all_reduce", 5 * 24 * 4, 4),
            ("sharded", "all_gather_into_tensor", 64 * 64 * 4, 2),
            ("sharded", "reduce_scatter_tensor", 64 * 64 * 4, 2)]  # fmt: skip
        flops = {name: 0 for name in ("tensor parallel", "sharded")}
        for event in recording.events[rank]:
            flops[event.phase.get("name")] = flops.get(event.phase.get("name"), 0) + event.flops
        assert flops["tensor parallel"] == 5 * 2 * 5 * 24 * 48 // 4
        assert flops["sharded"] == 2 * 2 * 2 * 64 * 64


def test_arguments_become_fake():
    def program(model, batch):
        assert type(batch["x"]).__name__ == "FakeTensor"
        model(batch["x"]).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    recording = dtlab.record_dry(program, nn.Linear(10, 5), {"x": torch.ones(2, 10)}, world_size=4, ranks=3)
    assert recording.memory().loc[3].peak_params == recording.memory().loc[3].peak_grads == 220
    assert live_at_end(recording, 3)["params"] == 220


@pytest.mark.parametrize("program, says", [
    (lambda: torch.ones(3).sum().item(), "reads the value of a tensor"),
    (lambda: dist.all_gather_object([None] * world_size, rank), "reads the value of a tensor"),
    (lambda: torch.ones(3).numpy(), "reads the value of a tensor"),
    (lambda: f"{torch.ones(3).sum():.3f}", "reads the value of a tensor"),
    (lambda: dist.recv(torch.ones(3)), "does not know"),
    (lambda: dist.monitored_barrier(), "does not know"),
    (lambda: nn.parallel.DistributedDataParallel(nn.Linear(4, 4)), "DistributedDataParallel"),
])  # fmt: skip
def test_what_cannot_be_recorded_dry_says_so(program, says):
    with pytest.raises(dtlab.ConfigError, match=rf"(?s)recorded dry: test_dry.py, line \d+.*{says}.*ranks.record"):
        dtlab.record_dry(program, world_size=2)


def test_a_partial_has_the_name_of_its_function():
    def step(x):
        return x.item()

    with pytest.raises(dtlab.ConfigError, match=r"^step\(\) cannot be recorded dry"):
        dtlab.record_dry(functools.partial(step, torch.ones(1)), world_size=2)


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 3), lambda: nn.Embedding(4, 3), lambda: nn.LayerNorm(4)])
def test_a_captured_parameter_is_refused(make):
    model, x = make(), torch.zeros(2, 4, dtype=torch.long)
    x = x if isinstance(model, nn.Embedding) else x.float()
    wanted = r"recorded dry: test_dry.py, line \d+ uses a parameter of shape .*: pass the model or make it inside"
    with pytest.raises(dtlab.ConfigError, match=wanted):
        dtlab.record_dry(lambda x: model(x), x, world_size=2)
    assert dtlab.record_dry(lambda model, x: model(x), model, x, world_size=2).memory().loc[0].params


def test_failures_and_wrong_arguments():
    with pytest.raises(dtlab.RankError, match="rank 8 of 16, played dry, failed: ZeroDivisionError"):
        dtlab.record_dry(lambda: 1 / 0, world_size=16, ranks=[8])
    with pytest.raises(dtlab.ConfigError, match="a world of 16 has ranks 0 to 15"):
        dtlab.record_dry(lambda: None, world_size=16, ranks=[0, 16])


def test_live_ranks_are_left_alone():
    with dtlab.launch(2) as ranks:
        pids = dict(ranks.pids)
        dtlab.record_dry(lambda: dist.barrier(), world_size=4)
        assert dtlab.current_ranks() is ranks and ranks.pids == pids
        assert ranks.run(lambda: dist.get_world_size()) == [2, 2]


def test_gpt_sizes_need_no_memory():
    config = GPTConfig(hidden_size=4096, num_heads=32, num_layers=2, seq_length=2048)

    def program(config):
        model = GPT(config)
        model(torch.zeros(1, config.seq_length, dtype=torch.long)).sum().backward()

    row = dtlab.record_dry(program, config).memory().loc[0]
    with torch.device("meta"):
        wanted = 4 * sum(p.numel() for p in nn.ModuleList([GPT(config, device="meta")]).parameters())
    assert row.params == row.peak_grads == wanted
    assert row.peak_params == wanted + 4 * 256 * 4096  # the output layer's own weight, until it is tied


def test_meta_tensors_hold_no_bytes():
    def program():
        shapes_only = nn.Linear(100, 100, bias=False, device="meta")
        return torch.empty_like(shapes_only.weight[0], device="cpu")

    row = dtlab.record_dry(program, world_size=2).memory().loc[0]
    assert row.peak == row.other == 400
