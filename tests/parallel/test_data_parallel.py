"""Data parallel training against one process and against torch's own, in float64; by bytes; and broken on purpose."""
import contextlib
import copy
import doctest
import functools
import io
import os
import subprocess
import sys
from collections import Counter
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from live_ranks import pool
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import dtlab
from dtlab.data import shard_batch
from dtlab.errors import ConfigError, HangError, RankError
from dtlab.models import GPT, GPTConfig, cross_entropy
from dtlab.parallel import DistributedDataParallel, data_parallel, global_mean, shared

CONFIG = GPTConfig(vocab_size=31, seq_length=6, hidden_size=12, num_layers=2, num_heads=3)  # tied embeddings
NUM_STEPS = 5
ONE_EACH, SOME, ALL = 1, 6000, 25 * 2**20  # bucket_bytes: a bucket for each parameter, seven buckets, one
close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)


# the whole model


class Trained(NamedTuple):
    """What must be equal."""

    losses: list
    grads: list  # a dict of gradients for each step
    params: dict


def global_batch(step):
    """Seven rows (over 4 ranks: 2, 2, 2, 1) in which different numbers of tokens count."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, CONFIG.vocab_size, (7, CONFIG.seq_length + 1), generator=generator)
    targets = tokens[:, 1:].masked_fill(torch.rand(7, CONFIG.seq_length, generator=generator) < 0.4, -100)
    return tokens[:, :-1], targets


def train(model, backward):
    """Five steps; ``backward(step)`` leaves gradients and returns the loss of the whole batch."""
    # Not Adam: the gradient of a key's bias is zero but for rounding, and Adam divides it by its own size
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, grads = [], []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        losses.append(backward(step))
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
    return Trained(losses, grads, dict(model.state_dict()))


@functools.cache
def serial():
    """One process on the joined batch."""
    model = GPT(CONFIG, seed=0, dtype=torch.float64)

    def backward(step):
        inputs, targets = global_batch(step)
        loss = cross_entropy(model(inputs), targets, reduction="mean")
        loss.backward()
        return loss.item()

    return train(model, backward)


def replicas(wrap, options, num_micro_batches=1, mean=global_mean):
    """On a rank: this rank's rows, in micro-batches, some of them empty; the model starts from a seed of its own."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = GPT(CONFIG, seed=rank, dtype=torch.float64)
    replica = wrap(model, **options)

    def backward(step):
        inputs, targets = shard_batch(global_batch(step), rank, world_size)
        num_tokens, total = (targets >= 0).sum(), torch.zeros((), dtype=torch.float64)
        parts = list(zip(inputs.tensor_split(num_micro_batches), targets.tensor_split(num_micro_batches)))
        for i, (inputs, targets) in enumerate(parts):
            with replica.no_sync() if i < len(parts) - 1 else contextlib.nullcontext():
                loss = mean(cross_entropy(replica(inputs), targets, reduction="sum"), num_tokens)
                loss.backward()
            total += loss.detach() / world_size
        dist.all_reduce(total)
        return total.item()

    return train(model, backward)


def assert_equal(trained, reference):
    close(torch.tensor(trained.losses, dtype=torch.float64), torch.tensor(reference.losses, dtype=torch.float64))
    close(trained.grads, reference.grads)
    close(trained.params, reference.params)


OPTIONS = [
    ({"bucket_bytes": ONE_EACH}, 1), ({"bucket_bytes": SOME}, 2), ({}, 3),
    ({"bucket_bytes": SOME, "overlap": False}, 1), ({"bucket_bytes": ONE_EACH, "overlap": False}, 3),
    ({"bucket_bytes": SOME, "find_unused_parameters": True}, 2),
]  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize("options, num_micro_batches", OPTIONS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_training_equals_one_process(num_ranks, options, num_micro_batches):
    for trained in pool(num_ranks).run(replicas, DistributedDataParallel, options, num_micro_batches):
        assert_equal(trained, serial())


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_training_equals_torchs(num_ranks):
    ours = pool(num_ranks).run(replicas, DistributedDataParallel, {"bucket_bytes": SOME}, 2)
    for mine, theirs in zip(ours, pool(num_ranks).run(replicas, TorchDDP, {}, 2)):
        assert_equal(mine, theirs)


# broken on purpose


def ratio(trained, reference):
    """Size of the first step's gradients over that of the reference's."""
    norm = lambda grads: sum(g.square().sum() for g in grads.values()).sqrt()
    return (norm(trained.grads[0]) / norm(reference.grads[0])).item()


def summed(*args):
    """On a rank: nothing divides the sum."""

    def sum_only(model, **options):
        replica = DistributedDataParallel(model, **options)
        replica._running = [0]  # one rank, so it says
        return replica

    return replicas(sum_only, *args)


@pytest.mark.ranks
def test_broken_a_sum_for_a_mean_is_four_times_too_large():
    trained = pool(4).run(summed, {})[0]
    assert ratio(trained, serial()) == pytest.approx(4, rel=1e-12)
    assert ratio(pool(4).run(replicas, DistributedDataParallel, {})[0], serial()) == pytest.approx(1, rel=1e-12)


def own_mean(loss_sum, num_tokens):
    """The mean of this rank's tokens: wrong where ranks have different numbers of them."""
    return loss_sum / num_tokens


@pytest.mark.ranks
def test_broken_a_mean_of_means_is_no_factor_at_all():
    trained = pool(2).run(replicas, DistributedDataParallel, {}, 1, own_mean)[0]
    assert trained.losses[0] != pytest.approx(serial().losses[0], rel=1e-5)
    with pytest.raises(AssertionError):
        close(trained.grads, serial().grads)


def never_broadcast(*args):
    """On a rank: everyone keeps the model of its own seed."""
    kept, data_parallel.broadcast_tensors = data_parallel.broadcast_tensors, lambda *_, **__: None
    try:
        return replicas(DistributedDataParallel, *args)
    finally:
        data_parallel.broadcast_tensors = kept


@pytest.mark.ranks
def test_broken_without_the_first_broadcast_replicas_differ_though_their_loss_falls():
    first, second = pool(2).run(never_broadcast, {})
    assert first.losses == second.losses and first.losses[-1] < first.losses[0]
    assert max((first.params[name] - second.params[name]).abs().max() for name in first.params) > 0.1


# the weighted mean


def weighted(tokens_of_ranks):
    """On a rank: gradient of w, one token of gradient 1 on rank 0, tokens of gradient 5 elsewhere; by micro-batches."""
    counts = tokens_of_ranks[dist.get_rank()]
    w = nn.ParameterList([torch.ones((), dtype=torch.float64)])
    slope = 1 if dist.get_rank() == 0 else 5
    replica = DistributedDataParallel(w)
    for i, count in enumerate(counts):
        with replica.no_sync() if i < len(counts) - 1 else contextlib.nullcontext():
            global_mean((slope * w[0]).expand(count).sum(), sum(counts)).backward()
    return w[0].grad.item()


@pytest.mark.ranks
@pytest.mark.parametrize("tokens_of_ranks, wanted", [
    ([[1], [3]], 4.0), ([[1], [0]], 1.0), ([[0], [0]], 0.0), ([[1, 0, 5], [2, 2, 2]], 3.0),
    ([[1, 0, 0], [0, 3, 0]], 4.0),
])  # fmt: skip
def test_every_token_counts_alike(tokens_of_ranks, wanted):
    assert pool(2).run(weighted, tokens_of_ranks) == [pytest.approx(wanted, rel=1e-14)] * 2


# bytes, calls and order


def recorded_step(num_micro_batches=1, is_accumulating=True, **options):
    """On a rank: one step, recorded from the start of its first forward pass; the number of buckets."""
    replica = DistributedDataParallel(GPT(CONFIG, dtype=torch.float64), **options)
    tokens, _ = global_batch(0)
    with dtlab.phase("step", step=0):
        for i in range(num_micro_batches):
            is_last = i == num_micro_batches - 1
            with replica.no_sync() if is_accumulating and not is_last else contextlib.nullcontext():
                replica(tokens).logsumexp(-1).mean().backward()
    return len(replica.buckets)


def of_the_step(recording, rank=0):
    return [e for e in recording.events[rank] if e.phase.get("step") == 0]


PARAMETER_BYTES = 8 * sum(p.numel() for p in GPT(CONFIG).parameters())


@pytest.mark.ranks
@pytest.mark.parametrize("bucket_bytes, num_buckets", [(ONE_EACH, 28), (SOME, 7), (ALL, 1)])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_a_step_sends_the_rings_bytes_of_the_parameters_once(num_ranks, bucket_bytes, num_buckets):
    recording = pool(num_ranks).record(recorded_step, 3, bucket_bytes=bucket_bytes)
    for rank in range(num_ranks):
        issues = [e for e in of_the_step(recording, rank) if e.kind == "issue"]
        assert Counter(e.op for e in issues) == {"all_reduce": num_buckets}
        assert sum(e.wire_bytes for e in issues) == pytest.approx(2 * (num_ranks - 1) / num_ranks * PARAMETER_BYTES)
        assert sum(e.bytes for e in issues) == PARAMETER_BYTES
    assert recording.results == [num_buckets] * num_ranks


@pytest.mark.ranks
def test_without_no_sync_every_micro_batch_sends_all():
    recording = pool(2).record(recorded_step, 3, False, bucket_bytes=SOME)
    assert sum(e.kind == "issue" for e in of_the_step(recording)) == 3 * recording.results[0]


@pytest.mark.ranks
@pytest.mark.parametrize("overlap", [True, False])
def test_overlap_starts_buckets_while_backward_computes(overlap):
    recording = pool(2).record(recorded_step, bucket_bytes=SOME, overlap=overlap)
    events = of_the_step(recording)
    issues = [i for i, e in enumerate(events) if e.kind == "issue"]
    products = [i for i, e in enumerate(events) if e.flops and e.phase["name"] == "step"]
    waits = [i for i, e in enumerate(events) if e.kind == "wait"]
    assert (issues[0] < products[-1]) == overlap and max(issues) < min(waits)


@pytest.mark.ranks
def test_gradients_are_held_once():
    row = pool(2).record(recorded_step).memory().loc[0]
    assert PARAMETER_BYTES <= row.grads and row.peak_grads <= 2 * PARAMETER_BYTES


def dry_step(joins, **options):
    """On a played rank: build and wrap a GPT in 16 bits, then one step."""
    config = GPTConfig(vocab_size=51200, seq_length=2048, hidden_size=4096, num_layers=2, num_heads=32)
    replica = DistributedDataParallel(GPT(config, dtype=torch.bfloat16), **options)
    tokens = torch.zeros(1, 2048, dtype=torch.long)
    with dtlab.phase("step", step=0), replica.join() if joins else contextlib.nullcontext():
        cross_entropy(replica(tokens), tokens, reduction="mean").backward()


@pytest.mark.ranks
@pytest.mark.parametrize("joins, options", [
    (False, {}), (False, {"overlap": False}), (True, {"find_unused_parameters": True}),
])  # fmt: skip
def test_a_step_of_real_size_is_recorded_dry(joins, options):
    recording = dtlab.record_dry(dry_step, joins, **options, world_size=64, ranks=[0])
    num_params = 2 * (12 * 4096**2 + 13 * 4096) + (51200 + 2048 + 2) * 4096
    issues = [e for e in of_the_step(recording) if e.op == "all_reduce" and e.kind == "issue"]
    assert sum(e.bytes for e in issues) == 2 * num_params
    assert sum(e.wire_bytes for e in issues) == pytest.approx(2 * 63 / 64 * 2 * num_params)
    assert recording.memory().grads[0] >= 2 * num_params


# parameters without a gradient, frozen ones, buffers


class Branches(nn.Module):
    """A trunk, then the branches that are asked for; a frozen table and a branch that nobody uses."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        linear = lambda: nn.Linear(4, 4, dtype=torch.float64)
        self.trunk, self.text, self.image, self.spare = linear(), linear(), linear(), linear()
        self.table = nn.Parameter(torch.randn(4, dtype=torch.float64), requires_grad=False)
        self.register_buffer("numbers", torch.randint(0, 99, (3,)))

    def forward(self, x, branches):
        x = self.trunk(x) * self.table
        return sum(getattr(self, name)(x) for name in branches).square().mean()


def use(branches_of_ranks, wrap=DistributedDataParallel, **options):
    """On a rank: gradients after each of two steps, the second of which adds to those of the first."""
    rank = dist.get_rank()
    model = Branches(seed=rank)
    replica = wrap(model, **{"find_unused_parameters": True, **options})
    found = []
    for step in range(2):
        x = torch.linspace(rank, step + 1, 8, dtype=torch.float64).view(2, 4)
        replica(x, branches_of_ranks[rank]).backward()
        found.append({name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()})
    return found, model.table, model.numbers


@pytest.mark.ranks
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("branches_of_ranks", [[["text"], ["image"]], [["text"], ["text", "image"], ["text"]]])
def test_unused_parameters_count_as_zero_and_keep_no_gradient_where_nobody_uses_them(branches_of_ranks, overlap):
    size = len(branches_of_ranks)
    ours = pool(size).run(use, branches_of_ranks, overlap=overlap, bucket_bytes=200)
    theirs = pool(size).run(use, branches_of_ranks, TorchDDP)
    for (mine, *frozen), (torchs, *torchs_frozen) in zip(ours, theirs):
        assert mine[0]["spare.weight"] is mine[1]["spare.weight"] is mine[0]["table"] is None
        used = lambda steps: [{n: g for n, g in step.items() if g is not None} for step in steps]
        close(used(mine), used(torchs))
        assert all(torch.equal(a, b) for a, b in zip(frozen, torchs_frozen))


@pytest.mark.ranks
def test_a_parameter_without_gradient_is_named_with_its_rank_and_the_cure():
    with pytest.raises(RankError) as caught:
        pool(3).run(use, [["text", "image", "spare"], ["text", "spare"], ["text", "image", "spare"]],
                    find_unused_parameters=False)
    assert caught.value.rank == 1 and caught.value.cause == "ConfigError"
    text = "rank 1: 2 of 8 parameters have no gradient after backward: image.weight, image.bias. "
    assert text in str(caught.value) and "find_unused_parameters=True" in str(caught.value)
    assert pool(3).run(use, [["text"]] * 3)  # the ranks live on


class Normed(nn.Module):
    """BatchNorm, whose running statistics are buffers."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).double()

    def forward(self, x):
        return self.layers(x)


def train_normed(wrap, **options):
    """On a rank: three steps on data of its own; all that the model holds."""
    rank = dist.get_rank()
    model = Normed(rank)
    replica = wrap(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * rank + step), dtype=torch.float64)
        optimizer.zero_grad()
        replica(x).square().mean().backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.ranks
@pytest.mark.parametrize("broadcast_buffers", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_buffers_follow_the_first_rank_as_torchs_do(num_ranks, broadcast_buffers):
    ours = pool(num_ranks).run(train_normed, DistributedDataParallel, broadcast_buffers=broadcast_buffers)
    close(ours, pool(num_ranks).run(train_normed, TorchDDP, broadcast_buffers=broadcast_buffers))
    means = [state["layers.1.running_mean"] for state in ours]
    assert num_ranks == 1 or not torch.equal(means[0], means[1])  # since then each has added its own batch


def evaluate_on_one_rank():
    """On a rank: only the first one evaluates; in training mode without gradients too."""
    replica = DistributedDataParallel(Normed(0))
    x = torch.ones(4, 3, dtype=torch.float64)
    if dist.get_rank() == 0:
        with torch.no_grad():
            replica(x)
        replica.eval()
        replica(x)


@pytest.mark.ranks
def test_evaluation_needs_no_other_rank():
    pool(2).run(evaluate_on_one_rank)


# ranks with different numbers of batches


def uneven(num_batches, joins=True, wrap=DistributedDataParallel, **options):
    """On a rank: its batches, with or without join; all that the model holds."""
    rank = dist.get_rank()
    model = Normed(rank)
    replica = wrap(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with replica.join() if joins else contextlib.nullcontext():
        for step in range(num_batches[rank]):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * rank + step), dtype=torch.float64)
            optimizer.zero_grad()
            replica(x).square().mean().backward()
            optimizer.step()
    return model.state_dict()


def uneven_serial(num_batches):
    """One process: in each step the mean over the ranks that still have a batch."""
    model = Normed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(max(num_batches)):
        running = [rank for rank, count in enumerate(num_batches) if step < count]
        optimizer.zero_grad()
        for rank in running:
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * rank + step), dtype=torch.float64)
            (model(x).square().mean() / len(running)).backward()
        optimizer.step()
    return dict(model.named_parameters())


@pytest.mark.ranks
@pytest.mark.parametrize("options", [{}, {"bucket_bytes": ONE_EACH, "find_unused_parameters": True}])
@pytest.mark.parametrize("num_batches", [[3, 5], [2, 2], [0, 0], [2, 0, 4], [1, 3, 3], [3, 1, 0, 2]])
def test_ranks_that_ran_out_take_part_and_all_end_with_the_last_model(num_batches, options):
    states = pool(len(num_batches)).run(uneven, num_batches, **options)
    for state in states:
        close({name: state[name] for name in uneven_serial(num_batches)}, uneven_serial(num_batches), check_dtype=False)
    assert len(set(num_batches)) == 1 or all(  # buffers of the last one too
        torch.equal(a, b) for state in states for a, b in zip(state.values(), states[0].values()))


@pytest.mark.ranks
def test_without_join_the_error_says_who_has_finished():
    with pytest.raises(HangError, match="rank 1 waits in (broadcast|all_reduce)") as caught:
        pool(2).run(uneven, [3, 5], joins=False)
    assert "rank 0 has finished" in str(caught.value)


def fails_in_join():
    """On a rank: one rank fails in the block."""
    replica = DistributedDataParallel(Normed(0))
    with replica.join():
        replica(torch.ones(4, 3, dtype=torch.float64)).sum().backward()
        if dist.get_rank() == 1:
            raise KeyError("mine")
        replica(torch.ones(4, 3, dtype=torch.float64)).sum().backward()


@pytest.mark.ranks
def test_an_error_in_the_block_is_the_one_that_is_shown():
    with pytest.raises(RankError, match="mine") as caught:
        pool(2).run(fails_in_join)
    assert caught.value.rank == 1


# what is refused, and what is left behind


def wrap_different(make):
    """On a rank: a model that is another one on the last rank."""
    DistributedDataParallel(make(dist.get_rank() == dist.get_world_size() - 1))


@pytest.mark.ranks
@pytest.mark.parametrize("make, message", [
    (lambda last: nn.Linear(3, 5 if last else 4), "rank 0 has weight float32 [4, 3], trainable; rank 2 has weight "
                                                  "float32 [5, 3], trainable"),
    (lambda last: nn.Linear(3, 4, bias=not last), "has bias float32 [4], trainable; rank 2 has nothing more"),
    (lambda last: nn.Linear(3, 4, dtype=torch.float64 if last else None), "rank 2 has weight float64 [4, 3]"),
    (lambda last: nn.Linear(3, 4).requires_grad_(not last), "rank 2 has weight float32 [4, 3], not trainable"),
    (lambda last: nn.BatchNorm1d(3, track_running_stats=not last), "has running_mean float32 [3], not trainable"),
])  # fmt: skip
def test_different_models_are_refused_on_every_rank(make, message):
    with pytest.raises(RankError) as caught:
        pool(3).run(wrap_different, make)
    assert message in str(caught.value) and "ranks 0-2 of 3 failed: ConfigError" in str(caught.value)


def checkpointed(use_reentrant):
    """On a rank: one layer used in two checkpoints, a bucket for each parameter; the gradients."""
    layer = nn.Linear(3, 3, dtype=torch.float64)
    replica = DistributedDataParallel(layer, bucket_bytes=ONE_EACH)
    x = torch.eye(3, dtype=torch.float64).requires_grad_()
    for _ in range(2):
        x = checkpoint(replica, x, use_reentrant=use_reentrant)
    x.sum().backward()
    (plain := nn.Linear(3, 3, dtype=torch.float64)).load_state_dict(layer.state_dict())
    plain(plain(torch.eye(3, dtype=torch.float64))).sum().backward()
    close([p.grad for p in layer.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.ranks
def test_a_checkpoint_is_right_or_refused():
    pool(2).run(checkpointed, False)
    with pytest.raises(RankError, match="use_reentrant=False"):
        pool(2).run(checkpointed_twice_at_once)


def checkpointed_twice_at_once():
    """On a rank: backward passes within one, each of which gives the layer a gradient."""
    layer = nn.Linear(3, 3)
    layer.register_parameter("other", nn.Parameter(torch.ones(3)))
    replica = DistributedDataParallel(layer)
    x = torch.eye(3).requires_grad_()
    for _ in range(2):
        x = checkpoint(layer, x, use_reentrant=True)
    (x * layer.other).sum().backward()
    return replica


def wrapped_again():
    """On a rank: the same model wrapped again, as a cell does that runs twice; calls in a backward pass."""
    model = nn.Linear(3, 1)
    for _ in range(3):
        replica = DistributedDataParallel(model)
    with dtlab.phase("step", step=0):
        replica(torch.ones(2, 3)).sum().backward()
    return list(replica.state_dict())


@pytest.mark.ranks
def test_a_model_that_is_wrapped_again_sends_once():
    recording = pool(2).record(wrapped_again)
    assert [e.op for e in of_the_step(recording) if e.kind == "issue"] == ["all_reduce"]
    assert recording.results == [["module.weight", "module.bias"]] * 2  # as torch's


def held_by_nobody():
    """On a rank: gradients where only the loss is kept; then those of the model alone."""
    model, x = nn.Linear(1, 1, bias=False), torch.full((1, 1), 1.0 + dist.get_rank())
    loss = DistributedDataParallel(model)(x).sum()
    loss.backward()
    mean = model.weight.grad.item()
    del loss
    model.zero_grad()
    model(x).sum().backward()
    return mean, model.weight.grad.item()


@pytest.mark.ranks
def test_a_wrapper_lives_as_long_as_its_loss_and_no_longer():
    assert pool(2).run(held_by_nobody) == [(1.5, 1.0), (1.5, 2.0)]


def both_wrappers_alive():
    """On a rank: gradients of the newer one, and what the older one says."""
    model = nn.Linear(3, 1, bias=False)
    older, newer = DistributedDataParallel(model), DistributedDataParallel(model)
    newer(torch.full((1, 3), 1.0 + dist.get_rank())).sum().backward()
    with pytest.raises(ConfigError, match="weight would not be averaged.*wrapped again. Use the newest wrapper"):
        older(torch.ones(1, 3))
    return model.weight.grad.tolist()


@pytest.mark.ranks
def test_of_two_wrappers_the_newer_one_sends_and_the_older_one_refuses():
    assert pool(2).run(both_wrappers_alive) == [[[1.5] * 3]] * 2


def with_new_layer(replica):
    replica.module[1] = nn.Linear(3, 1)
    return replica


def with_loaded_parameters(replica):
    replica.module.load_state_dict(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).state_dict(), assign=True)
    return replica


def with_more_to_train(replica):
    replica.module[1].requires_grad_(True)
    return replica


def saved_and_loaded(replica):
    file = io.BytesIO()
    torch.save(replica, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def step_after(change):
    """On a rank: what a step says after a change, and whether wrapping anew averages again."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).double()
    model[1].requires_grad_(change is not with_more_to_train)
    replica = change(DistributedDataParallel(model))
    x = torch.full((1, 3), 1.0 + dist.get_rank(), dtype=next(replica.parameters()).dtype)
    try:
        replica(x).sum().backward()
    except ConfigError as error:
        again = DistributedDataParallel(replica.module.double())
        again(x.double()).sum().backward()
        grads = [None] * dist.get_world_size()
        dist.all_gather_object(grads, [p.grad for p in replica.module.parameters()])
        close(grads[0], grads[1])
        return str(error)


@pytest.mark.ranks
@pytest.mark.parametrize("change, said", [
    (with_new_layer, "gradients of 1.weight, 1.bias would not be averaged"),
    (with_loaded_parameters, "gradients of 0.weight, 0.bias, 1.weight, 1.bias would not be averaged"),
    (with_more_to_train, "gradients of 1.weight, 1.bias would not be averaged: these parameters came"),
    (copy.copy, "or this is a copy"), (copy.deepcopy, "or this is a copy"), (saved_and_loaded, "or this is a copy"),
    (lambda replica: replica.float(), "torch.float32 on cpu, but when the model was wrapped torch.float64 on cpu"),
])  # fmt: skip
def test_what_would_train_without_the_others_is_refused_and_can_be_wrapped_anew(change, said):
    assert [said in answer for answer in pool(2).run(step_after, change)] == [True, True]


@pytest.mark.ranks
@pytest.mark.parametrize("make, said", [
    (lambda: DistributedDataParallel("gpt"), "module is of type str: give a torch.nn.Module"),
    (lambda: DistributedDataParallel(nn.Sequential(DistributedDataParallel(nn.Linear(1, 1)))), "averaged twice"),
    (lambda: DistributedDataParallel(nn.Linear(1, 1), bucket_bytes=1 + dist.get_rank()), "rank 1 has option bucket_b"),
    (lambda: DistributedDataParallel(nn.Linear(1, 1), find_unused_parameters=dist.get_rank() == 1), "option find_unus"),
    (lambda: DistributedDataParallel(nn.Embedding(3, 2, sparse=True))(torch.tensor([1])).sum().backward(), "sparse=Fa"),
    (lambda: DistributedDataParallel(nn.Linear(1, 1), group=0), r"group \(0\) must be what dist.new_group returned"),
    (lambda: global_mean(torch.ones(3), 2), r"loss_sum \(shape \[3\]\) must be a tensor of one number"),
    (lambda: global_mean(3.0, 2), r"loss_sum \(float\) must be a tensor"),
    (lambda: global_mean(torch.ones(()), -2), r"num_tokens \(-2\) must be at least 0"),
    (lambda: global_mean(torch.ones(()), 0.25), r"num_tokens \(0.25\) must be a whole number"),
    (lambda: global_mean(torch.ones(()), torch.tensor(0.25)), r"num_tokens \(torch.float32, shape \[\]\) must be one"),
    (lambda: global_mean(torch.ones(()), torch.ones(3, dtype=torch.bool)), "sum of a mask of bools"),
    (lambda: global_mean(torch.ones(()), [1, 2]), "must be a whole number"),
])  # fmt: skip
def test_mistakes_are_told_on_every_rank(make, said):
    with pytest.raises(RankError, match=f"(?s)ranks 0-1 of 2 failed: ConfigError.*{said}"):
        pool(2).run(make)


def mean_of_small_counts():
    """On a rank: 100 tokens on each, in eight bits, which end at 127."""
    loss = global_mean(torch.tensor(50.0), torch.tensor(100, dtype=torch.int8))
    return loss.item()


@pytest.mark.ranks
def test_a_count_in_few_bits_does_not_overflow():
    assert pool(2).run(mean_of_small_counts) == [0.5] * 2


@pytest.mark.parametrize("call", [
    lambda: DistributedDataParallel(nn.Linear(1, 1)), lambda: global_mean(torch.ones(()), 1),
])  # fmt: skip
def test_outside_of_ranks_the_cure_is_said(call):
    with pytest.raises(ConfigError, match=r"no rank of a process group.*dtlab.launch"):
        call()


def joined_within():
    """On a rank: a block in a block; ranks run out of both."""
    layer = nn.Linear(1, 1, bias=False).double()
    replica = DistributedDataParallel(layer)
    with replica.join():
        for num_batches in (1 + dist.get_rank(), 3 - 2 * dist.get_rank()):
            with replica.join():
                for _ in range(num_batches):
                    replica(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
        for _ in range(2 * dist.get_rank()):
            replica(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
    return replica._is_joining


@pytest.mark.ranks
def test_join_in_join_goes_on_when_the_inner_one_ends():
    assert pool(2).run(joined_within) == [False, False]


def after_a_failed_backward(overlap):
    """On a rank: a backward pass that fails in the middle, then a good one."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).double()
    replica = DistributedDataParallel(model, overlap=overlap, bucket_bytes=1)
    y = model[0](torch.full((1, 3), 1.0 + dist.get_rank(), dtype=torch.float64))
    fail = y.register_hook(lambda grad: grad[7])
    with contextlib.suppress(IndexError):
        model[1](y).sum().backward()
    fail.remove()
    model.zero_grad()
    replica(torch.full((1, 3), 1.0 + dist.get_rank(), dtype=torch.float64)).sum().backward()
    return model[0].weight.grad / model[1].weight.T  # the input


@pytest.mark.ranks
@pytest.mark.parametrize("overlap", [True, False])
def test_a_failed_backward_pass_leaves_nothing_behind(overlap):
    for found in pool(2).run(after_a_failed_backward, overlap):
        close(found, torch.full((3, 3), 1.5, dtype=torch.float64))


def in_a_group():
    """On a rank: ranks 1 and 2 train, with parameters of two dtypes; rank 0 does not."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double(), nn.Linear(2, 2))
    model.register_buffer("number", torch.tensor(dist.get_rank(), dtype=torch.int16))  # which gloo does not know
    replica = DistributedDataParallel(model, group=group)
    sum(p.double().sum() * dist.get_rank() for p in replica.module.parameters()).backward()
    assert all((p.grad == 1.5).all() and p.grad.dtype == p.dtype for p in model.parameters())
    return [len(b.tensors) for b in replica.buckets], model[0].weight.detach(), model.number.item()


@pytest.mark.ranks
def test_a_group_of_some_ranks_and_parameters_of_two_dtypes():
    _, (sizes, first, number), (_, second, numbers_copy) = pool(3).run(in_a_group)
    assert sizes == [2, 4] and torch.equal(first, second) and number == numbers_copy == 1


def large_gradients(wrap):
    """In float16, which ends at 65,504: on each rank below it, their sum above."""
    layer = nn.Linear(2, 1, bias=False).half()
    replica = wrap(layer)
    replica(torch.tensor([[30000.0, 20000.0]]).half() + 64 * dist.get_rank()).sum().backward()
    return layer.weight.grad.tolist()


@pytest.mark.ranks
def test_a_mean_of_16_bits_is_finite_where_the_sum_is_not():
    mine = pool(4).run(large_gradients, DistributedDataParallel)
    assert mine == [[[30096.0, 20096.0]]] * 4 == pool(4).run(large_gradients, TorchDDP)


def test_a_model_with_nothing_to_train_is_refused(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match="nothing to average"):
            DistributedDataParallel(nn.Linear(1, 1).requires_grad_(False))
        with pytest.raises(ConfigError, match=r"bucket_bytes \(0\) must be at least 1"):
            DistributedDataParallel(nn.Linear(1, 1), bucket_bytes=0)
    finally:
        dist.destroy_process_group()


PROGRAM = """
import torch, torch.distributed as dist
from dtlab.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(torch.nn.Linear(3, 1))
model(torch.full((1, 3), float(dist.get_rank()))).sum().backward()
assert model.module.weight.grad.tolist() == [[0.5, 0.5, 0.5]]
print("right")
"""


@pytest.mark.ranks
def test_under_torchrun(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "program.py"]
    root = str(data_parallel.__file__).partition("/dtlab/parallel/")[0]
    env = {**os.environ, "PYTHONPATH": root, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.count("right") == 2, done.stderr


# buckets


def test_a_bucket_is_one_buffer_and_views_of_it():
    a, b = torch.zeros(2, 3), torch.zeros(())
    bucket = shared.Bucket([a, b])
    bucket.flat.copy_(torch.arange(7))
    assert bucket.views[0].tolist() == [[0, 1, 2], [3, 4, 5]] and bucket.views[1].item() == 6
    a.grad, b.grad = torch.ones(3, 2).T, None  # strided
    bucket.take_gradients()
    assert bucket.flat.tolist() == [1] * 6 + [0] and a.grad is bucket.views[0] and b.grad is None
    a.grad.add_(1)
    bucket.take_gradients()
    assert bucket.flat.tolist() == [2] * 6 + [0]


def test_examples():
    for module in (shared, data_parallel):
        assert doctest.testmod(module).failed == 0
