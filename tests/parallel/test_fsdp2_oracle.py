"""torch's fully_shard and ours in float64: both train as one process does, and hold and send the same bytes."""
import functools

import pytest
import torch
import torch.distributed as dist

import dtlab
from dtlab.data import shard_batch
from dtlab.models import GPT, GPTConfig, cross_entropy
from dtlab.parallel import FullyShardedModule, global_mean
from dtlab.simulate.tables import live_bytes
from dtlab.theory import padding_elements, zero_states, zero_wire_elements

pytestmark = pytest.mark.ranks
ODD = GPTConfig(vocab_size=31, seq_length=6, hidden_size=15, num_layers=2, num_heads=3)  # tied; units are padded
EVEN = GPTConfig(vocab_size=36, seq_length=12, hidden_size=24, num_layers=2, num_heads=3)  # no padding on 1 to 4 ranks
NUM_STEPS, MAX_NORM = 20, 1.1  # above the norms of some gradients and below others'
ADAM = {"lr": 1e-3, "eps": 1e-4}  # a key's bias has a gradient of rounding only, over a small eps
close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def ranks(request):
    """Live ranks, guarded: a false alarm fails the test."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are too small to gain from more
    with dtlab.launch(request.param) as pool:
        pool.run(torch.set_num_threads, 1)
        yield pool
    torch.set_num_threads(num_threads)


def global_batch(config, step):
    """Seven rows (over 4 ranks: 2, 2, 2, 1) in which different numbers of tokens count."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, config.vocab_size, (7, config.seq_length + 1), generator=generator)
    targets = tokens[:, 1:].masked_fill(torch.rand(7, config.seq_length, generator=generator) < 0.4, -100)
    return tokens[:, :-1], targets


def ours(config):
    """On a rank: the model to call, what clips, and functions that give whole gradients and parameters by name."""
    model = FullyShardedModule(GPT(config, seed=dist.get_rank(), dtype=torch.float64))
    grads = lambda: {name: grad for flat in model._flats().values()
                     for name, grad in flat.layout.join(flat.shard.grad).items()}
    return model, model.clip_grad_norm_, grads, model.full_state_dict


def torchs(config):
    """As ``ours``."""
    from torch.distributed.fsdp import fully_shard

    model = GPT(config, seed=0, dtype=torch.float64)
    for part in (*model.layers, model):
        fully_shard(part, reshard_after_forward=True)
    whole = lambda tensors: {name: tensor.full_tensor().clone() for name, tensor in tensors.items()}
    grads = lambda: whole({name: p.grad for name, p in model.named_parameters()})
    clip = lambda max_norm: torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).full_tensor()
    return model, clip, grads, lambda: whole(model.state_dict())


def alone(config):
    """As ``ours``, in one process."""
    model = GPT(config, seed=0, dtype=torch.float64)
    clip = functools.partial(torch.nn.utils.clip_grad_norm_, list(model.parameters()))
    return model, clip, lambda: {name: p.grad.clone() for name, p in model.named_parameters()}, model.state_dict


def own_mean(total, num_tokens):
    return total / num_tokens


def train(wrap, config, mean=global_mean):
    """On a rank, or in one process: losses, norms, gradients of all steps before clipping, and parameters."""
    is_rank = dist.is_initialized()
    model, clip, grads, params = wrap(config)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    losses, norms, gradients = [], [], []
    for step in range(NUM_STEPS):
        inputs, targets = global_batch(config, step)
        if is_rank:
            inputs, targets = shard_batch((inputs, targets), dist.get_rank(), dist.get_world_size())
        optimizer.zero_grad()
        loss = mean(cross_entropy(model(inputs), targets, reduction="sum"), (targets >= 0).sum())
        loss.backward()
        gradients.append(grads())
        norms.append(clip(MAX_NORM).detach().clone())
        optimizer.step()
        losses.append(loss.detach() / (dist.get_world_size() if is_rank else 1))
    losses = torch.stack(losses)
    if is_rank:
        dist.all_reduce(losses)
    return losses, torch.stack(norms), gradients, {name: p.clone() for name, p in params().items()}


@functools.cache
def serial(config):
    return train(alone, config, own_mean)


def assert_equal(trained, reference):
    for mine, right in zip(trained, reference):
        close(mine, right)


def test_both_train_as_one_process_does(ranks):
    right = serial(ODD)
    assert right[1].max() > MAX_NORM > right[1].min()
    theirs = ranks.run(train, torchs, ODD)
    for mine, other in zip(ranks.run(train, ours, ODD), theirs):
        assert_equal(other, right)
        assert_equal(mine, right)
        assert_equal(mine, other)


@pytest.mark.parametrize("ranks", [2], indirect=True)
@pytest.mark.parametrize("wrap", [ours, torchs])
def test_broken_by_means_of_the_ranks_own_tokens_neither_does(ranks, wrap):
    losses, _, gradients, _ = ranks.run(train, wrap, ODD, own_mean)[0]
    mine, right = (its[0]["layers.1.mlp.linear_fc1.weight"] for its in (gradients, serial(ODD)[2]))
    assert (mine - right).norm() > 0.01 * right.norm() and losses[-1] < losses[0]  # and still it falls


# bytes


def start(wrap):
    """On a rank: make a model, and a first step, so that states and gradients are there."""
    global kept
    model = wrap(EVEN)[0]
    kept = model, torch.optim.AdamW(model.parameters())
    step()


def step():
    """On a rank: a step whose gradients stay."""
    model, optimizer = kept
    optimizer.zero_grad()
    inputs, targets = shard_batch(global_batch(EVEN, 0), dist.get_rank(), dist.get_world_size())
    cross_entropy(model(inputs), targets, reduction="sum").backward()
    optimizer.step()


def live_at_end(recording, rank):
    """Bytes of model states that live when the recording ends, by category."""
    *_, (_, held) = live_bytes(recording.events[rank])
    return {category: held[category] for category in ("params", "grads", "optimizer_states")}


def sent(recording, rank):
    """Op -> (calls, bytes that this rank sends)."""
    rows = recording.communication().query("rank == @rank").groupby("op")
    return {op: (its.calls.sum(), its.wire_bytes.sum()) for op, its in rows}


def test_both_hold_and_send_the_same_bytes(ranks):
    recordings, n = [], ranks.size
    for wrap in (ours, torchs):
        ranks.run(start, wrap)
        recordings.append(ranks.record(step))
    sizes = [p.numel() for p in GPT(EVEN, device="meta").parameters()]
    assert sum(padding_elements(size, n) for size in sizes) == 0
    one_pass = zero_wire_elements(sum(sizes), dp_size=n, zero_stage=3) * 8 / 3
    states = functools.partial(zero_states, sum(sizes), dp_size=n, zero_stage=3, optimizer="adam_fp64")
    for rank in range(n):
        for recording, num_tensors in zip(recordings, (3, len(sizes))):  # whose steps Adam counts: units, or weights
            assert live_at_end(recording, rank) == states(step_tensors=num_tensors)
            calls = sent(recording, rank)
            assert n == 1 or calls == {"all_gather_into_tensor": (6, pytest.approx(2 * one_pass)),
                                       "reduce_scatter_tensor": (3, pytest.approx(one_pass))}
        mine, theirs = (recording.memory().loc[rank] for recording in recordings)
        assert n == 1 or mine.peak <= 1.05 * theirs.peak  # alone, torch's shard is the whole; ours has both
