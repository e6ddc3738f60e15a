"""ZeRO stages 1 and 2 against one process and against each other, in float64; by bytes; refused; broken on purpose."""
import contextlib
import copy
import functools
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from live_ranks import pool
from torch import nn

import dtlab
from dtlab.data import shard_batch
from dtlab.errors import ConfigError
from dtlab.models import GPT, GPTConfig, cross_entropy
from dtlab.parallel import DistributedDataParallel, global_mean, zero, zero_buckets
from dtlab.parallel.zero import ZeroOptimizer

CONFIG = GPTConfig(vocab_size=31, seq_length=6, hidden_size=12, num_layers=1, num_heads=3)  # tied embeddings
NUM_STEPS = 20
ONE_EACH, SOME, ALL = 1, 6000, 25 * 2**20  # bucket_bytes: a bucket for each parameter, four buckets, one
MAX_NORM = 0.3  # below the first gradients' norm and above the last ones'
SGD = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
ADAM = (torch.optim.AdamW, {"lr": 1e-3, "eps": 1e-4})  # a key's bias has a gradient of rounding only, over a small eps
close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)


# the whole model


def global_batch(step):
    """Seven rows (over 4 ranks: 2, 2, 2, 1) in which different numbers of tokens count."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, CONFIG.vocab_size, (7, CONFIG.seq_length + 1), generator=generator)
    targets = tokens[:, 1:].masked_fill(torch.rand(7, CONFIG.seq_length, generator=generator) < 0.4, -100)
    return tokens[:, :-1], targets


@functools.cache
def serial(optimizer_class, clips):
    """One process on the joined batch: losses, norms, gradients before clipping and parameters."""
    model = GPT(CONFIG, seed=0, dtype=torch.float64)
    optimizer_class, options = {c: (c, o) for c, o in (SGD, ADAM)}[optimizer_class]
    optimizer = optimizer_class(model.parameters(), **options)
    losses, norms, grads = [], [], []
    for step in range(NUM_STEPS):
        inputs, targets = global_batch(step)
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets, reduction="mean")
        loss.backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM if clips else 1e9).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, grads, dict(model.state_dict())


def mean_gradients(optimizer):
    """Whole again, from the ranks' shards."""
    return {name: grad for bucket in optimizer.buckets for name, grad in bucket.shards.join(bucket.grad).items()}


def sharded(optimizer, num_micro_batches=1, clips=False, accumulates=True, **options):
    """On a rank: the same training on its rows, in micro-batches, some of them empty; its model has its own seed."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = GPT(CONFIG, seed=rank, dtype=torch.float64)
    zero_optimizer = ZeroOptimizer(model, optimizer[0], **optimizer[1], **options)
    losses, norms, grads = [], [], []
    for step in range(NUM_STEPS):
        inputs, targets = shard_batch(global_batch(step), rank, world_size)
        num_tokens, total = (targets >= 0).sum(), torch.zeros((), dtype=torch.float64)
        parts = zip(inputs.tensor_split(num_micro_batches), targets.tensor_split(num_micro_batches))
        for i, (x, y) in enumerate(parts):
            is_last = i == num_micro_batches - 1
            with zero_optimizer.no_sync() if accumulates and not is_last else contextlib.nullcontext():
                loss = global_mean(cross_entropy(model(x), y, reduction="sum"), num_tokens)
                loss.backward()
            total += loss.detach() / world_size
        grads.append(mean_gradients(zero_optimizer))
        norms.append(zero_optimizer.clip_grad_norm_(MAX_NORM if clips else 1e9).item())
        zero_optimizer.step()
        dist.all_reduce(total)
        losses.append(total.item())
    return losses, norms, grads, dict(model.state_dict())


def assert_equal(trained, reference):
    for mine, right in zip(trained[:2], reference[:2]):
        close(torch.tensor(mine, dtype=torch.float64), torch.tensor(right, dtype=torch.float64))
    close(trained[2], reference[2])
    close(trained[3], reference[3])


RUNS = [
    (SGD, {"zero_stage": 1, "bucket_bytes": SOME, "clips": True}),
    (ADAM, {"zero_stage": 1, "bucket_bytes": ONE_EACH, "num_micro_batches": 3}),
    (ADAM, {"zero_stage": 1, "overlap": False}),
    (SGD, {"zero_stage": 2, "bucket_bytes": ONE_EACH, "num_micro_batches": 3, "accumulates": False}),
    (ADAM, {"zero_stage": 2, "bucket_bytes": SOME, "num_micro_batches": 2, "clips": True}),
    (ADAM, {"zero_stage": 2, "bucket_bytes": SOME, "overlap": False}),
]


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks, number", [
    (1, 4), (2, 0), (2, 1), (2, 4), *((3, number) for number in range(len(RUNS))), (4, 2), (4, 3), (4, 4),
])  # fmt: skip
def test_training_equals_one_process(num_ranks, number):
    optimizer, options = RUNS[number]
    for trained in pool(num_ranks).run(sharded, optimizer, **options):
        assert_equal(trained, serial(optimizer[0], options.get("clips", False)))


def replicated(optimizer):
    """On a rank: stage 0, DistributedDataParallel and a plain optimizer."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    replica = DistributedDataParallel(GPT(CONFIG, seed=rank, dtype=torch.float64))
    plain = optimizer[0](replica.parameters(), **optimizer[1])
    for step in range(NUM_STEPS):
        inputs, targets = shard_batch(global_batch(step), rank, world_size)
        plain.zero_grad()
        loss_sum = cross_entropy(replica(inputs), targets, reduction="sum")
        global_mean(loss_sum, (targets >= 0).sum()).backward()
        plain.step()
    return dict(replica.module.state_dict())


@pytest.mark.ranks
def test_data_parallel_is_stage_0():
    for params in pool(4).run(replicated, ADAM):
        close(params, serial(ADAM[0], False)[3])


# broken on purpose


def never_gathered(*args, **options):
    """On a rank: everyone goes on with the shards that it updated itself."""
    class Done:
        wait = staticmethod(lambda: None)

    kept, zero_buckets.all_gather_single = zero_buckets.all_gather_single, lambda *_, **__: Done
    try:
        return sharded(*args, **options)
    finally:
        zero_buckets.all_gather_single = kept


@pytest.mark.ranks
@pytest.mark.parametrize("zero_stage", [1, 2])
def test_broken_without_the_all_gather_ranks_disagree_from_the_second_step_on(zero_stage):
    first, second = pool(2).run(never_gathered, SGD, zero_stage=zero_stage)
    losses, right = first[0], serial(SGD[0], False)[0]
    assert losses[0] == pytest.approx(right[0], rel=1e-10) and losses[1] != pytest.approx(right[1], rel=1e-5)
    assert max((first[3][name] - second[3][name]).abs().max() for name in first[3]) > 0.01


def clipped_by_its_own_norm(*args, **options):
    """On a rank: each scales its shards by their own norm."""
    def local(shards, max_norm, **_):
        norm = torch.stack([shard.norm() for shard in shards]).norm()
        for shard in shards:
            shard.mul_((max_norm / (norm + 1e-6)).clamp(max=1))
        return norm

    kept, zero.clip_shards_ = zero.clip_shards_, local
    try:
        return sharded(*args, **options)
    finally:
        zero.clip_shards_ = kept


@pytest.mark.ranks
def test_broken_a_local_norm_is_too_small_and_shards_are_scaled_by_different_factors():
    trained, right = pool(2).run(clipped_by_its_own_norm, SGD, clips=True), serial(SGD[0], True)
    norms = [losses_norms[1][0] for losses_norms in trained]
    assert sum(norm**2 for norm in norms) ** 0.5 == pytest.approx(right[1][0], rel=1e-10)
    assert min(norms) < MAX_NORM < max(norms)  # so that one rank scales, and the other does not
    assert max((trained[0][3][name] - right[3][name]).abs().max() for name in right[3]) > 1e-3


# bytes, calls and memory


def recorded_step(num_micro_batches=1, dtype=torch.float64, **options):
    """On a rank: build, one step to warm up, then one that is marked; what stands in the buckets."""
    model = GPT(CONFIG, dtype=dtype)
    optimizer = ZeroOptimizer(model, torch.optim.Adam, **options)
    for step in range(2):
        with dtlab.phase("step", step=step):
            for i in range(num_micro_batches):
                with optimizer.no_sync() if i < num_micro_batches - 1 else contextlib.nullcontext():
                    cross_entropy(model(global_batch(0)[0]), global_batch(0)[0], reduction="mean").backward()
            optimizer.step()
    return [bucket.shards.padded for bucket in optimizer.buckets]


def issues_of(recording, rank, step=1):
    return [e for e in recording.events[rank] if e.kind == "issue" and e.phase.get("step") == step]


@pytest.mark.ranks
@pytest.mark.parametrize("zero_stage, num_micro_batches", [(1, 1), (1, 3), (2, 1), (2, 3)])
@pytest.mark.parametrize("num_ranks, bucket_bytes", [(1, SOME), (2, ONE_EACH), (3, SOME), (4, ONE_EACH)])
def test_a_step_sends_reduce_scatter_and_all_gather_of_the_padded_parameters(
    num_ranks, bucket_bytes, zero_stage, num_micro_batches
):  # fmt: skip
    options = {"zero_stage": zero_stage, "bucket_bytes": bucket_bytes}
    recording = pool(num_ranks).record(recorded_step, num_micro_batches, **options)
    padded = recording.results[0]
    num_reductions = num_micro_batches if zero_stage == 2 else 1
    for rank in range(num_ranks):
        issues = issues_of(recording, rank)
        count = Counter("all_gather" if "all_gather" in e.op else e.op.removesuffix("_tensor").removesuffix("_single")
                        for e in issues)
        assert count == {"reduce_scatter": num_reductions * len(padded), "all_gather": len(padded), "all_reduce": 1}
        wire = sum(e.wire_bytes for e in issues if e.op != "all_reduce")
        assert wire == pytest.approx((num_ranks - 1) / num_ranks * (1 + num_reductions) * 8 * sum(padded), rel=1e-14)
        assert [e.bytes for e in issues if e.op == "all_reduce"] == [8]  # is a gradient NaN?


@pytest.mark.ranks
@pytest.mark.parametrize("zero_stage", [1, 2])
@pytest.mark.parametrize("overlap", [True, False])
def test_overlap_starts_buckets_while_backward_computes(zero_stage, overlap):
    recording = pool(2).record(recorded_step, zero_stage=zero_stage, bucket_bytes=SOME, overlap=overlap)
    events = [e for e in recording.events[0] if e.phase.get("step") == 1 and e.kind in ("issue", "wait", "compute")]
    first = next(i for i, e in enumerate(events) if "reduce_scatter" in e.op)
    assert any(e.flops for e in events[first:])
    wait = next(i for i, e in enumerate(events) if e.kind == "wait" and "reduce_scatter" in e.op)
    assert any(e.flops for e in events[first:wait]) == overlap


@pytest.mark.ranks
@pytest.mark.parametrize("dtype, sizes", [
    (torch.float64, (8, 2 * 8)), (torch.float32, (4, 2 * 4)), (torch.bfloat16, (2, 3 * 4)),
])  # fmt: skip
@pytest.mark.parametrize("zero_stage", [1, 2])
def test_states_take_the_bytes_that_theory_says_with_padding_and_step_counters(zero_stage, dtype, sizes):
    recording = pool(3).record(recorded_step, zero_stage=zero_stage, bucket_bytes=SOME, dtype=dtype)
    padded = recording.results[0]
    row = recording.memory().loc[0]
    assert row.params == sizes[0] * sum(padded)
    assert row.peak_optimizer_states == sizes[1] * sum(padded) / 3 + 4 * len(padded)  # Adam's step counters


def live_grads(recording, rank=0):
    """Bytes of gradients that live when the last step begins to update, and the most before, in that step."""
    live, most = {}, 0
    for event in recording.events[rank]:
        if event.kind == "alloc" and event.category == "grads":
            live[event.storage] = event.bytes
        elif event.kind == "free":
            live.pop(event.storage, None)
        if event.phase.get("step") == 1:
            most = max(most, sum(live.values()))
            if event.kind == "issue" and event.op == "all_reduce":
                return sum(live.values()), most
    raise AssertionError("no step")


@pytest.mark.ranks
@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_stage_2_frees_gradients_during_backward_and_keeps_its_shards(dtype, num_micro_batches):
    size, options = dtype.itemsize, {"bucket_bytes": SOME, "dtype": dtype}
    recording = pool(3).record(recorded_step, num_micro_batches, zero_stage=1, **options)
    padded = recording.results[0]
    assert live_grads(recording)[0] == size * sum(padded)
    recording = pool(3).record(recorded_step, num_micro_batches, zero_stage=2, **options)
    kept, most = live_grads(recording)
    kept_size = size if num_micro_batches == 1 else max(size, 4)  # a sum of several stands in the master's dtype
    assert kept == kept_size * sum(padded) / 3
    assert most <= kept + size * 3.4 * max(padded)  # one on its way, one that fills, a gradient that just came


# parameters of other kinds


class Branches(nn.Module):
    """Odd sizes (5, 3, 1 and 0 elements); a part that may be unused, a frozen one, a tied one, and buffers."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        make = lambda *size: nn.Parameter(torch.randn(size, dtype=torch.float64))
        self.five, self.three, self.one, self.spare, self.empty = make(5), make(3), make(1), make(2), make(0)
        self.frozen = make(5).requires_grad_(False)
        self.again = self.three
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def forward(self, x, uses_spare):
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.mean())
        y = (self.five * self.frozen * x).sum() + (self.three * self.again).sum() * self.one
        return (y + (self.spare.sum() if uses_spare else 0)).square().sum()


def inputs_of(rank, step):
    return torch.linspace(0.1 * rank, 0.3 + 0.01 * step, 5, dtype=torch.float64)


def branches(zero_stage, bucket_bytes):
    rank = dist.get_rank()
    model = Branches(seed=rank)
    optimizer = ZeroOptimizer(model, torch.optim.SGD, zero_stage=zero_stage, bucket_bytes=bucket_bytes, lr=0.01,
                              momentum=0.9, weight_decay=0.1)
    for step in range(4):
        model(inputs_of(rank, step), uses_spare=step == 0 and rank == 0).backward()
        optimizer.step()
    return dict(model.state_dict())


def branches_serial(num_ranks):
    model = Branches(seed=0)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01, momentum=0.9,
                                weight_decay=0.1)
    for step in range(4):
        optimizer.zero_grad(set_to_none=False)
        model.spare.grad = torch.zeros(2, dtype=torch.float64) if model.spare.grad is None else model.spare.grad
        before = model.mean.clone()
        for rank in reversed(range(num_ranks)):  # buffers end as the first rank has them
            model.mean.copy_(before)
            (model(inputs_of(rank, step), uses_spare=step == 0 and rank == 0) / num_ranks).backward()
        optimizer.step()
    return dict(model.state_dict())


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [1, 3, 4])
@pytest.mark.parametrize("zero_stage, bucket_bytes", [(1, ALL), (2, ONE_EACH)])
def test_odd_sizes_unused_frozen_tied_and_buffers(num_ranks, zero_stage, bucket_bytes):
    for params in pool(num_ranks).run(branches, zero_stage, bucket_bytes):
        close(params, branches_serial(num_ranks))


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, arXiv:2302.06675, algorithm 2: the sign of an average."""

    def __init__(self, params, lr, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                (first, second), lr = group["betas"], group["lr"]
                p.mul_(1 - lr * group["weight_decay"]).sub_(lr * average.lerp(p.grad, 1 - first).sign())
                average.lerp_(p.grad, 1 - second)


class Lars(torch.optim.Optimizer):
    """An update as large as the parameter's own norm."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.norm() / p.grad.norm() * p.grad)


ELEMENTWISE = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}, "Adam": {"amsgrad": True}, "AdamW": {},
    "RMSprop": {"momentum": 0.9}, "Adagrad": {}, "Adadelta": {"lr": 0.5}, "NAdam": {}, "RAdam": {}, "Adamax": {},
    "Rprop": {}, "ASGD": {},
}  # fmt: skip


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def data(step, rank=None):
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return x if rank is None else x[2 * rank : 2 * rank + 2]


def each_optimizer(zero_stage):
    """On a rank of two: parameters after five steps with each optimizer."""
    results = {}
    for name, options in {**ELEMENTWISE, "Lion": {"lr": 0.01}}.items():
        model = net()
        optimizer = ZeroOptimizer(model, Lion if name == "Lion" else getattr(torch.optim, name), zero_stage=zero_stage,
                                  bucket_bytes=100, **options)
        for step in range(5):
            model(data(step, dist.get_rank())).square().mean().backward()
            optimizer.step()
        results[name] = dict(model.state_dict())
    return results


@pytest.mark.ranks
@pytest.mark.parametrize("zero_stage", [1, 2])
def test_elementwise_optimizers_update_shards_as_they_update_the_whole(zero_stage):
    for results in pool(2).run(each_optimizer, zero_stage):
        for name, params in results.items():
            model = net()
            make = Lion if name == "Lion" else getattr(torch.optim, name)
            optimizer = make(model.parameters(), **{**ELEMENTWISE, "Lion": {"lr": 0.01}}[name])
            for step in range(5):
                optimizer.zero_grad()
                model(data(step)).square().mean().backward()
                optimizer.step()
            close(params, dict(model.state_dict()), msg=lambda text, name=name: f"{name}: {text}")


def grouped(make):
    """Weight decay for matrices only, and a learning rate that a scheduler lowers."""
    model = net()
    decays = [p for p in model.parameters() if p.dim() == 2]
    others = [(name, p) for name, p in model.named_parameters() if p.dim() == 1]  # torch takes names too
    groups = [{"params": decays, "weight_decay": 0.5}, {"params": others}]
    optimizer, inner = make(model, groups)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, step_size=2, gamma=0.1)
    rank = dist.get_rank() if dist.is_initialized() else None
    for step in range(4):
        optimizer.zero_grad(set_to_none=True)
        model(data(step, rank)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return dict(model.state_dict()), [(g["weight_decay"], g["lr"]) for g in optimizer.param_groups]


def zero_grouped():
    def make(model, groups):
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, zero_stage=2, param_groups=groups, lr=0.1, weight_decay=0.0)
        return optimizer, optimizer.optimizer

    return grouped(make)


def plain_grouped(model, groups):
    optimizer = torch.optim.AdamW([{**g, "params": [p[-1] if isinstance(p, tuple) else p for p in g["params"]]}
                                   for g in groups], lr=0.1, weight_decay=0.0)  # fmt: skip
    return optimizer, optimizer


@pytest.mark.ranks
def test_groups_of_parameters_have_their_own_options_and_a_scheduler_changes_them():
    params, options = grouped(plain_grouped)
    for theirs, theirs_options in pool(2).run(zero_grouped):
        close(theirs, params)
        assert theirs_options == options and options[0][0] != options[1][0]


def in_a_group(zero_stage, device=None):
    """On ranks 2 and 0 of three (or, on a device, on all): five steps."""
    group = None if device else dist.new_group([0, 2])
    rank = dist.get_rank() if device else {0: 0, 2: 1}.get(dist.get_rank())
    if rank is None:
        return None
    model = net().to(device)
    optimizer = ZeroOptimizer(model, torch.optim.Adam, zero_stage=zero_stage, bucket_bytes=100, group=group, lr=0.01)
    for step in range(5):
        model(data(step, rank).to(device)).square().mean().backward()
        optimizer.clip_grad_norm_(0.1)
        optimizer.step()
    return {name: value.cpu() for name, value in model.state_dict().items()}


def alone():
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(5):
        optimizer.zero_grad()
        model(data(step)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return dict(model.state_dict())


@pytest.mark.ranks
@pytest.mark.parametrize("zero_stage", [1, 2])
def test_a_group_trains_by_itself(zero_stage):
    first, other, last = pool(3).run(in_a_group, zero_stage)
    assert other is None
    close(first, alone())
    close(last, alone())


@pytest.mark.gpu
@pytest.mark.ranks
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
@pytest.mark.parametrize("zero_stage", [1, 2])
def test_on_a_gpu(zero_stage):
    with dtlab.launch(2, device="cuda", share_gpu=torch.cuda.device_count() < 2) as ranks:
        for params in ranks.run(in_a_group, zero_stage, "cuda"):
            close(params, alone())


# 16 bits


def small_updates(master_dtype, change=lambda model: None):
    """On a rank: 100 updates of -1e-3 on a bfloat16 1.0, in a bucket with a bias; on the way there is a change."""
    model = nn.Linear(1, 1, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    optimizer = ZeroOptimizer(model, torch.optim.SGD, master_dtype=master_dtype, lr=1e-3)
    for step in range(100):
        if step == 50:
            change(model)
        model.weight.sum().backward()
        optimizer.step()
    return model.weight.item(), optimizer.buckets[0].master.dtype


@pytest.mark.ranks
def test_masters_in_32_bits_keep_updates_that_16_bits_lose():
    assert pool(2).run(small_updates, None)[0] == (pytest.approx(0.9, rel=4e-3), torch.float32)
    assert pool(2).run(small_updates, torch.bfloat16)[0] == (1.0, torch.bfloat16)


def loads_3(model):
    model.load_state_dict({**model.state_dict(), "weight": torch.full((1, 1), 3.0)})


def fills_with_3(model):
    model.weight.data.fill_(3)  # which no version counts


def touches(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-100, 100)


@pytest.mark.ranks
@pytest.mark.parametrize("change, weight", [(loads_3, 2.95), (fills_with_3, 2.95), (touches, 0.9)])
def test_masters_follow_what_was_written_and_nothing_else(change, weight):
    assert pool(2).run(small_updates, None, change) == [(pytest.approx(weight, rel=4e-3), torch.float32)] * 2


# what may go wrong


def with_a_nan(zero_stage, bad):
    """On a rank: one of rank 1's gradients is not finite; then the step is skipped and the next one made."""
    model = net()
    optimizer = ZeroOptimizer(model, torch.optim.Adam, zero_stage=zero_stage, bucket_bytes=100)
    before = copy.deepcopy(model.state_dict())
    x = data(0, dist.get_rank())
    (model(x).mean() + (model[2].weight[0, 3] * bad if dist.get_rank() == 1 else 0)).backward()
    assert not optimizer.clip_grad_norm_(1.0).isfinite()
    try:
        optimizer.step()
    except FloatingPointError as error:
        text = str(error)
    unchanged = all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    optimizer.zero_grad()
    model(x).mean().backward()
    optimizer.step()
    return text, unchanged, model.state_dict()["2.weight"]


@pytest.mark.ranks
@pytest.mark.parametrize("zero_stage, bad", [(1, float("nan")), (2, float("inf"))])
def test_a_gradient_that_is_not_finite_stops_every_rank_before_it_changes_anything(zero_stage, bad):
    for text, unchanged, weight in pool(3).run(with_a_nan_on_three, zero_stage, bad):
        assert "gradient of 2.weight is NaN or infinite" in text and unchanged
        assert weight.isfinite().all()


def with_a_nan_on_three(zero_stage, bad):
    global data
    whole = data
    data = lambda step, rank=None: whole(step)
    try:
        return with_a_nan(zero_stage, bad)
    finally:
        data = whole


def fails_midway(zero_stage):
    """On a rank: a backward pass that fails after its first buckets; what step() says; then a whole step."""
    model = net()
    optimizer = ZeroOptimizer(model, torch.optim.SGD, zero_stage=zero_stage, bucket_bytes=1, lr=0.1)
    x = data(0, dist.get_rank()).requires_grad_()
    hidden = model[0](x)
    hidden.register_hook(lambda grad: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        model[2](model[1](hidden)).square().mean().backward()
    texts = []
    again = lambda: model(x).mean().backward()
    for action in [optimizer.step, again][:zero_stage]:  # stage 1's would add to what is on its way: the guard says it
        try:
            action()
        except ConfigError as error:
            texts.append(str(error))
    optimizer.zero_grad()
    model(data(0, dist.get_rank())).square().mean().backward()
    optimizer.step()
    return texts, dict(model.state_dict())


@pytest.mark.ranks
@pytest.mark.parametrize("zero_stage", [1, 2])
def test_a_backward_pass_that_failed_leaves_no_half_reduced_gradients(zero_stage):
    model = net()
    model(data(0)).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for texts, params in pool(2).run(fails_midway, zero_stage):
        assert len(texts) == zero_stage and all("call zero_grad() and begin the step again" in text for text in texts)
        close(params, dict(model.state_dict()))


class Stumbles(torch.optim.SGD):
    """It fails in the second bucket of the first step."""

    calls = None

    def step(self):
        if self.calls is not None:
            self.calls += 1
            if self.calls == 2:
                raise KeyboardInterrupt
        super().step()


def stumbling_step():
    """On a rank: what a second step() says after a broken one, and zero_grad() when the ranks of a call are gone."""
    optimizer = trained(net(), optimizer_class=Stumbles, bucket_bytes=1, lr=0.1)
    optimizer.optimizer.calls = 0
    with contextlib.suppress(KeyboardInterrupt):
        optimizer.step()
    with pytest.raises(ConfigError) as error:
        optimizer.step()

    class Gone:
        def wait():
            raise RuntimeError("Connection closed by peer")

    optimizer._in_flight.append((optimizer.buckets[0], Gone, None))
    optimizer.zero_grad()
    optimizer.module(data(0)).mean().backward()
    optimizer.step()
    return str(error.value)


@pytest.mark.ranks
def test_a_step_that_was_broken_off_is_not_made_again_in_part():
    for text in pool(2).run(stumbling_step):
        assert "backward pass or step failed on the way" in text


def copies():
    """On a rank: a deep copy is a model of its own, the newest of two wrappers acts, state_dict is torch's."""
    model = net()
    ZeroOptimizer(model, torch.optim.SGD, lr=100.0)
    optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.1)
    other = copy.deepcopy(model)
    model(data(0, dist.get_rank())).square().mean().backward()
    optimizer.step()
    right = net()
    right.load_state_dict(model.state_dict())
    return dict(right.state_dict()), dict(other.state_dict())


@pytest.mark.ranks
def test_a_copy_is_a_model_of_its_own_and_the_newest_wrapper_acts():
    model = net()
    model(data(0)).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for params, others in pool(2).run(copies):
        close(params, dict(model.state_dict()))
        close(others, dict(net().state_dict()))


def make(module=None, optimizer_class=torch.optim.SGD, **options):
    return ZeroOptimizer(net() if module is None else module, optimizer_class, **options)


def trained(model, **options):
    optimizer = make(model, **options)
    model(data(0)).mean().backward()
    return optimizer


def stepped_after(change, zero_stage=1):
    model = net()
    optimizer = trained(model, zero_stage=zero_stage)
    change(model)
    optimizer.step()


def reduced_twice(backward, zero_stage=1, **options):
    """What several backward passes of a step leave, each reduced."""
    model = net()
    optimizer = make(model, zero_stage=zero_stage, lr=0.1, **options)
    backward(model, optimizer)
    optimizer.step()
    return dict(model.state_dict())


def two_passes(model, _):
    for step in range(2):
        model(data(step)).mean().backward()


def parts_that_share_no_parameter(model, _):
    for part in (model[0], model[2]):
        sum((parameter * parameter).sum() for parameter in part.parameters()).backward()


def the_second_in_no_sync(model, optimizer):
    model[0].weight.sum().backward()
    with optimizer.no_sync():
        model[2].weight.sum().backward()


def reentrant(model, _):
    x = data(0).requires_grad_()
    for part in model:
        x = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=True)
    x.mean().backward()


def forgotten_between(model, _):
    model(data(0)).mean().backward()
    model.zero_grad()
    model(data(0)).mean().backward()


def step_of_another_rate():
    model = net()
    optimizer = make(model, lr=0.1)
    model(data(0)).mean().backward()
    optimizer.param_groups[0]["lr"] *= 1 + dist.get_rank()
    optimizer.step()


def only_no_sync():
    model = net()
    optimizer = make(model)
    with optimizer.no_sync():
        model(data(0)).mean().backward()
    optimizer.step()


def with_buffer(tensor):
    model = net()
    model.register_buffer("shift", tensor)
    return model


def sparse():
    model = nn.Embedding(3, 2, sparse=True)
    optimizer = make(model)
    model(torch.tensor([1])).sum().backward()
    optimizer.step()


REFUSED = [
    (lambda: make(zero_stage=0), "zero_stage (0) must be 1 or 2: stage 0 shards nothing: use DistributedDataParallel"),
    (lambda: make(zero_stage=3), "use FullyShardedModule"),
    (lambda: make(zero_stage=4), "there is no such stage"),
    (lambda: make(bucket_bytes=0), "bucket_bytes (0) must be at least 1"),
    (lambda: make(nn.Identity()), "no parameter that requires a gradient"),
    (lambda: make(net().requires_grad_(False)), "no parameter that requires a gradient"),
    (lambda: make(net().state_dict()), "give a torch.nn.Module"),
    (lambda: make(nn.Sequential(DistributedDataParallel(net()))), "contains a DistributedDataParallel (0)"),
    (lambda: make(optimizer_class=torch.optim.LBFGS), "LBFGS cannot be sharded: LBFGS.step() missing 1 required"),
    (lambda: make(optimizer_class=torch.optim.Adafactor), "Adafactor cannot be sharded: updated one by one"),
    (lambda: make(optimizer_class=torch.optim.SparseAdam), "SparseAdam cannot be sharded: SparseAdam does not support"),
    (lambda: make(optimizer_class=Lars, lr=0.1), "Lars cannot be sharded: updated one by one"),
    (lambda: make(optimizer_class=torch.optim.SGD(net().parameters())), "give the optimizer's class"),
    (lambda: make(group=dist.new_group([0])), "is not in this group"),
    (lambda: make(param_groups=list(net().parameters())), "param_groups must be a list such as"),
    (lambda: make(param_groups=[{"lr": 0.1}]), "param_groups must be a list such as"),
    (lambda: make(param_groups=[{"params": [nn.Parameter(torch.ones(1))]}]), "param_groups must have each trainable"),
    (lambda: make(nn.Linear(2, 1 + dist.get_rank())), "another model or option"),
    (lambda: make(lr=0.1 * (1 + dist.get_rank())), "another model or option"),
    (lambda: make().step(), "no gradient was reduced"),
    (lambda: make().clip_grad_norm_(1.0), "no gradient was reduced"),
    (only_no_sync, "no gradient was reduced"),
    (lambda: trained(net()).step(lambda: None), "call backward() before step()"),
    (lambda: trained(net()).clip_grad_norm_(1.0, 0), "norm_type (0) must be a number above 0"),
    *((lambda backward=backward, overlap=overlap: reduced_twice(backward, overlap=overlap),
       "into no_sync(), or use zero_stage=2; after each step call step() or zero_grad() of this object; torch.utils")
      for backward in (two_passes, parts_that_share_no_parameter, the_second_in_no_sync, reentrant)
      for overlap in (True, False)),
    (lambda: stepped_after(lambda model: nn.utils.clip_grad_norm_(model.parameters(), 9)), "Clip with clip_grad"),
    (lambda: stepped_after(lambda model: setattr(model[2].bias, "grad", model[2].bias.data)), ".grad of 2.bias was"),
    (lambda: stepped_after(nn.Module.zero_grad), "forget with its zero_grad()"),
    (lambda: stepped_after(nn.Module.zero_grad, zero_stage=2), "forget with its zero_grad()"),
    (lambda: reduced_twice(forgotten_between, zero_stage=2), "forget with its zero_grad()"),
    (step_of_another_rate, "ranks have different options in param_groups; here [{'lr': 0."),
    (lambda: make(net().to("meta")), "0.weight, 0.bias, 2.weight, 2.bias on the meta device"),
    (lambda: make(master_dtype="float32"), "master_dtype ('float32') must be None or a dtype, such as torch.float32"),
    (lambda: make(Waves(), master_dtype=torch.float32), "what the parameters are: torch.complex128, torch.float64"),
    (lambda: make(with_buffer(torch.ones(1).expand(3))), "elements of shift share memory"),
    (sparse, "sparse=False"),
    (lambda: stepped_after(lambda model: model.float()), "0.weight, 0.bias, 2.weight, 2.bias: added, frozen"),
    (lambda: stepped_after(lambda model: model[0].requires_grad_(False)), "0.weight, 0.bias: added, frozen"),
    (lambda: stepped_after(lambda model: model.append(nn.Linear(1, 1))), "3.weight, 3.bias: added, frozen"),
]
if hasattr(torch.optim, "Muon"):
    REFUSED.append((lambda: make(optimizer_class=torch.optim.Muon), "Muon cannot be sharded: Muon only supports 2D"))


def texts_of(cases):
    """On a rank: what each of the cases says."""
    texts = []
    for number in cases:
        try:
            REFUSED[number][0]()
            texts.append("nothing")
        except ConfigError as error:
            texts.append(str(error))
    return texts


@pytest.mark.ranks
def test_what_cannot_work_is_refused_on_every_rank_with_the_cure():
    not_of_this = "is not in this group"
    for rank, texts in enumerate(pool(2).run(texts_of, range(len(REFUSED)))):
        for text, (_, wanted) in zip(texts, REFUSED):
            assert wanted in text or wanted == not_of_this and rank == 0 and text == "nothing"


def plainly(backward):
    """One process."""
    model = net()
    model.zero_stage, model.no_sync = None, contextlib.nullcontext
    backward(model, model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return dict(model.state_dict())


@pytest.mark.ranks
@pytest.mark.parametrize("backward", [two_passes, parts_that_share_no_parameter, the_second_in_no_sync, reentrant])
def test_stage_2_adds_up_backward_passes_and_ignores_no_sync(backward):
    for params in pool(2).run(reduced_twice, backward, zero_stage=2, bucket_bytes=100):
        close(params, plainly(backward))


def clipped_by_torch():
    """On a rank: stage 2."""
    model = net()
    trained(model, zero_stage=2)
    with pytest.raises(RuntimeError):  # torch's: elements share memory
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return nn.utils.get_total_norm([p.grad for p in model.parameters()]).isnan()


@pytest.mark.ranks
def test_stage_2_has_no_gradients_that_torch_could_clip():
    assert pool(2).run(clipped_by_torch) == [True, True]


class Waves(nn.Module):
    """Complex and real parameters."""

    def __init__(self):
        super().__init__()
        numbers = torch.arange(1.0, 6.0, dtype=torch.float64)
        self.wave, self.real = nn.Parameter(torch.complex(numbers, numbers.flip(0))), nn.Parameter(numbers.clone())

    def forward(self, scale):
        return (scale * self.wave.abs() * self.real).square().sum()


def waves(optimizer_of, scale):
    model = Waves()
    optimizer, clip = optimizer_of(model)
    for _ in range(3):
        optimizer.zero_grad()
        model(scale).backward()
        clip(1.0)
        optimizer.step()
    return dict(model.state_dict())


def sharded_waves(zero_stage):
    def optimizer_of(model):
        optimizer = ZeroOptimizer(model, torch.optim.Adam, zero_stage=zero_stage, lr=0.1)
        return optimizer, optimizer.clip_grad_norm_

    return waves(optimizer_of, 1 + dist.get_rank())


def serial_waves(model):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return optimizer, functools.partial(nn.utils.clip_grad_norm_, [model.wave, model.real])


@pytest.mark.ranks
@pytest.mark.parametrize("zero_stage", [1, 2])
def test_complex_parameters_beside_real_ones(zero_stage):
    right = waves(serial_waves, 2.5**0.5)  # the mean of 1 and 4
    for params in pool(2).run(sharded_waves, zero_stage):
        close(params, right)


def dry_step(zero_stage):
    """On a played rank: a GPT in 16 bits, one step."""
    config = GPTConfig(vocab_size=51200, seq_length=2048, hidden_size=4096, num_layers=2, num_heads=32)
    model = GPT(config, dtype=torch.bfloat16)
    optimizer = ZeroOptimizer(model, torch.optim.Adam, zero_stage=zero_stage)
    tokens = torch.zeros(1, 2048, dtype=torch.long)
    with dtlab.phase("step", step=1):
        cross_entropy(model(tokens), tokens, reduction="mean").backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()


@pytest.mark.ranks
@pytest.mark.parametrize("zero_stage", [1, 2])
def test_a_step_of_real_size_is_recorded_dry(zero_stage):
    recording = dtlab.record_dry(dry_step, zero_stage, world_size=64, ranks=[0])
    num_params = 2 * (12 * 4096**2 + 13 * 4096) + (51200 + 2048 + 2) * 4096  # every bucket is divisible by 64
    wire = sum(e.wire_bytes for e in issues_of(recording, 0) if e.op != "all_reduce")
    assert wire == pytest.approx(2 * 63 / 64 * 2 * num_params, rel=1e-12)
    row = recording.memory().loc[0]
    assert row.peak_optimizer_states == pytest.approx(12 * num_params / 64, rel=1e-6)
