"""DeepSpeed's ZeRO beside ours and beside one process in float32: what they learn, hold and send."""
import functools

import deepspeed_program
import lesson_program
import pytest
import torch
import torch.distributed as dist

import dtlab
from dtlab.data import recordings, shard_batch
from dtlab.models import GPT, GPTConfig, cross_entropy
from dtlab.parallel import FullyShardedModule, ZeroOptimizer
from dtlab.simulate.tables import live_bytes
from dtlab.theory import zero_states, zero_wire_elements

pytestmark = [pytest.mark.peers, pytest.mark.ranks]
CONFIG = GPTConfig(vocab_size=36, seq_length=12, hidden_size=24, num_layers=2, num_heads=3)  # no padding on 2, 3, 4
NUM_STEPS = 20
ADAM = {"lr": 1e-3, "eps": 1e-4}  # a key's bias has a gradient of rounding only, over a small eps
close = functools.partial(torch.testing.assert_close, rtol=1e-3, atol=1e-5)  # float32, other orders of addition


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request):
    """Live ranks, guarded: a false alarm fails the test."""
    pytest.importorskip("deepspeed")
    with dtlab.launch(request.param) as pool:
        yield pool


def global_batch(step):
    """Twelve rows."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, CONFIG.vocab_size, (12, CONFIG.seq_length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model, step):
    """Of this rank's rows, as many on each, or of all in one process."""
    batch = global_batch(step)
    if dist.is_initialized():
        batch = shard_batch(batch, dist.get_rank(), dist.get_world_size())
    return cross_entropy(model(batch[0]), batch[1], reduction="mean")


# each gives the model to call, and functions for backward, step, whole gradients and whole parameters by name


def alone(stage):
    model = GPT(CONFIG, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)

    def step():
        optimizer.step()
        optimizer.zero_grad()

    return model, torch.Tensor.backward, step, lambda: {n: p.grad.clone() for n, p in model.named_parameters()}, \
        model.state_dict


def theirs(stage):
    engine = recordings.deepspeed_engine(model := GPT(CONFIG, seed=0), torch.optim.AdamW(model.parameters(), **ADAM),
                                         micro_batch_size=12 // dist.get_world_size(),
                                         zero={**recordings.DEEPSPEED_ZERO3, "stage": stage})
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    whole = lambda get: lambda: {name: get(p).clone() for name, p in model.named_parameters()}
    return engine, engine.backward, engine.step, whole(safe_get_full_grad), whole(safe_get_full_fp32_param)


def ours(stage):
    """The model of another seed on each rank: all start from the first one's."""
    model = GPT(CONFIG, seed=dist.get_rank())
    if stage < 3:
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, zero_stage=stage, bucket_bytes=40_000, **ADAM)
        grads = lambda: {n: g for b in optimizer.buckets for n, g in b.shards.join(b.grad).items()}
        return model, torch.Tensor.backward, optimizer.step, grads, model.state_dict
    model = FullyShardedModule(model)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)

    def step():
        optimizer.step()
        optimizer.zero_grad()

    grads = lambda: {n: g for f in model._flats().values() for n, g in f.layout.join(f.shard.grad).items()}
    return model, torch.Tensor.backward, step, grads, model.full_state_dict



def train(make, stage=0):
    """Losses (of this rank's rows), gradients of the first and last step, parameters."""
    model, backward, step, grads, params = make(stage)
    losses, gradients = [], []
    for number in range(NUM_STEPS):
        loss = loss_of(model, number)
        backward(loss)
        if number in (0, NUM_STEPS - 1):
            gradients.append(grads())
        step()
        losses.append(loss.item())
    names = dict(GPT(CONFIG, device="meta").named_parameters())
    return torch.tensor(losses), gradients, {name: p.clone() for name, p in params().items() if name in names}


@functools.cache
def serial():
    return train(alone)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_both_train_as_one_process_does(ranks, stage):
    losses, gradients, params = serial()
    for make in (theirs, ours):
        answers = ranks.run(train, make, stage)
        close(torch.stack([mine for mine, *_ in answers]).mean(0), losses)
        for _, mine, its_params in answers:
            close(mine, gradients)
            close(its_params, params)


# bytes


def start(make, stage):
    """On a rank: two steps, in which states come to life and DeepSpeed notes the order of the modules."""
    global kept
    kept = make(stage)
    step(0)
    step(1)


def step(number):
    """On a rank: one step."""
    model, backward, update, *_ = kept
    backward(loss_of(model, number))
    update()


def of_step(ranks, make, stage):
    """One recorded step: for each rank, bytes sent by op (above 1 kB), bytes held at its end and the peak."""
    ranks.run(start, make, stage)
    recording = ranks.record(step, 2)
    for rank in range(ranks.size):
        rows = recording.communication().query("rank == @rank and tensor_bytes > 1000")
        *_, (_, held) = live_bytes(recording.events[rank])
        yield dict(rows.groupby("op").wire_bytes.sum()), dict(held), recording.memory().loc[rank].peak


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_both_hold_and_send(ranks, stage):
    """DeepSpeed's stages 1 and 2 all_reduce gradients; its stage 3 gathers a tied weight for each use."""
    n, count = ranks.size, sum(p.numel() for p in GPT(CONFIG, device="meta").parameters())
    once = 4 * (n - 1) / n * count
    twice_more = 2 * 4 * (n - 1) / n * CONFIG.vocab_size * CONFIG.hidden_size
    states = functools.partial(zero_states, count, dp_size=n, zero_stage=stage, optimizer="adam_fp32")
    peaks = []
    for sent, held, peak in of_step(ranks, theirs, stage):
        wanted = {"reduce_scatter_tensor": once, "all_gather_into_tensor": 2 * once + twice_more} if stage == 3 else \
            {"all_reduce": 2 * once, "all_gather_into_tensor": once}
        assert sent == pytest.approx(wanted, rel=1e-3)
        right = states(step_tensors=1)
        assert held["optimizer_states"] == right["optimizer_states"]
        copy = 0 if stage == 3 else 4 * count / n  # a float32 copy of its shard, though parameters are float32
        assert held["params"] == right["params"] + copy
        peaks.append(peak)
    for (sent, held, peak), its_peak in zip(of_step(ranks, ours, stage), peaks):
        num_flats = 3 if stage == 3 else 2  # units; buckets
        right = states(step_tensors=num_flats)
        assert {name: held[name] for name in ("params", "optimizer_states")} == {
            name: right[name] for name in ("params", "optimizer_states")}
        assert held["grads"] == (right["grads"] if stage == 1 else 0)
        assert sum(sent.values()) == pytest.approx(4 * zero_wire_elements(count, dp_size=n, zero_stage=stage))
        assert peak <= 1.05 * its_peak


# the recording that is shipped


@pytest.mark.parametrize("ranks", [deepspeed_program.NUM_RANKS], indirect=True)
def test_the_shipped_recording_equals_one_of_the_lessons_program(ranks):
    shipped, live = recordings.load("deepspeed_zero3"), lesson_program.small(deepspeed_program.record(ranks))
    assert live.communication().equals(shipped.communication())
    assert live.memory().equals(shipped.memory())
    assert live.flops().equals(shipped.flops())
    close(torch.tensor(live.meta["results"]), torch.tensor(shipped.results))
