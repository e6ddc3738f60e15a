"""The fully sharded module against one process, in float64; by bytes; used in odd ways; and broken on purpose."""
import contextlib
import functools
import types
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from live_ranks import pool
from torch import nn
from torch.utils.checkpoint import checkpoint

import dtlab
from dtlab import theory
from dtlab.data import shard_batch
from dtlab.errors import RankError
from dtlab.models import GPT, GPTConfig, cross_entropy
from dtlab.models.init import full_parameter
from dtlab.parallel import FullyShardedModule, fsdp_units, global_mean, recompute
from dtlab.parallel.checkpoint import load_checkpoint, save_checkpoint
from dtlab.simulate import Hardware, replay

CONFIG = GPTConfig(vocab_size=31, seq_length=6, hidden_size=12, num_layers=3, num_heads=3)  # tied embeddings
NUM_STEPS, MAX_NORM = 5, 1.3
SECOND_RUN = functools.partial(checkpoint, use_reentrant=False)
NESTED_BACKWARD = functools.partial(checkpoint, use_reentrant=True)
close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)


# the whole model


class Model(GPT):
    """The lessons' GPT; layers are called through ``call``."""

    def __init__(self, seed, call=None, frozen=()):
        super().__init__(CONFIG, seed=seed, dtype=torch.float64)
        self.call = call or (lambda layer, x: layer(x))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not any(part in name for part in frozen))

    def forward(self, tokens):
        """[B, S] -> [B, S, V]."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = self.call(layer, x)
        return self.head(x)


def global_batch(step):
    """Seven rows (over 4 ranks: 2, 2, 2, 1) in which different numbers of tokens count."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, CONFIG.vocab_size, (7, CONFIG.seq_length + 1), generator=generator)
    targets = tokens[:, 1:].masked_fill(torch.rand(7, CONFIG.seq_length, generator=generator) < 0.4, -100)
    return tokens[:, :-1], targets


def sgd(parameters):
    """Not Adam: the gradient of a key's bias is zero but for rounding, and Adam divides it by its own size."""
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.3, momentum=0.9)


@functools.cache
def serial(frozen):
    """One process on the joined batch, clipped: losses, norms, the first step's gradients, parameters."""
    model = Model(seed=0, frozen=frozen)
    optimizer, losses, norms, grads = sgd(model.parameters()), [], [], {}
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        inputs, targets = global_batch(step)
        loss = cross_entropy(model(inputs), targets, reduction="mean")
        loss.backward()
        grads = grads or {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        losses.append(loss.item())
    assert min(norms) < MAX_NORM < max(norms)  # clipped in some steps and not in others
    return losses, norms, grads, dict(model.state_dict())


def whole_gradients(model):
    """On a rank: name -> the whole gradient of what is trained, put together from all ranks' shards."""
    flats = [flat for flat in model._flats().values() if flat.shard.grad is not None]
    return {name: grad for flat in flats for name, grad in flat.layout.join(flat.shard.grad).items()}


def backward(model, batch, num_micro_batches, is_accumulating):
    """On a rank: gradients of this rank's rows in micro-batches; the loss of the whole batch."""
    inputs, targets = batch
    num_tokens, total = (targets >= 0).sum(), torch.zeros((), dtype=torch.float64)
    parts = list(zip(inputs.tensor_split(num_micro_batches), targets.tensor_split(num_micro_batches)))
    for i, (inputs, targets) in enumerate(parts):
        is_last = i == len(parts) - 1
        with model.no_sync() if is_accumulating and not is_last else contextlib.nullcontext():
            loss = global_mean(cross_entropy(model(inputs), targets, reduction="sum"), num_tokens)
            loss.backward()
        total += loss.detach() / dist.get_world_size()
    dist.all_reduce(total)
    return total.item()


def train(options, num_micro_batches=1, is_accumulating=True, call=None, frozen=()):
    """On a rank: what ``serial`` returns; the model starts from a seed of this rank's own."""
    torch.set_num_threads(1)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = FullyShardedModule(Model(rank, call, frozen), **options)
    optimizer, losses, norms, grads = sgd(model.parameters()), [], [], {}
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        batch = shard_batch(global_batch(step), rank, world_size)
        losses.append(backward(model, batch, num_micro_batches, is_accumulating))
        grads = grads or {name: grad.clone() for name, grad in whole_gradients(model).items()}
        norms.append(model.clip_grad_norm_(MAX_NORM).item())
        optimizer.step()
    return losses, norms, grads, model.full_state_dict()


FROZEN = ("position_embedding", "layers.0", "layers.1.mlp")  # part of the root, a whole unit, part of a unit
CASES = {
    "plain": dict(options={}),
    "no prefetch, micro-batches": dict(options={"prefetch": False}, num_micro_batches=3),
    "kept, micro-batches that are sent": dict(
        options={"reshard_after_forward": False}, num_micro_batches=2, is_accumulating=False
    ),
    "frozen": dict(options={}, frozen=FROZEN, num_micro_batches=2),
    "recompute": dict(options={}, call=recompute),
    "recompute, frozen, kept": dict(options={"reshard_after_forward": False}, call=recompute, frozen=FROZEN),
    "torch's checkpoint": dict(options={"prefetch": False}, call=SECOND_RUN),
    "torch's other checkpoint": dict(options={}, call=NESTED_BACKWARD),
    "nested units": dict(options={"units": nn.Module}),
    "one unit": dict(options={"units": []}),
}


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks, cases", [
    (1, ["plain"]), (2, ["plain", "recompute, frozen, kept"]), (3, CASES),
    (4, ["no prefetch, micro-batches", "frozen"]),
])  # fmt: skip
def test_training_equals_one_process(num_ranks, cases):
    for case in cases:
        arguments = CASES[case]
        reference = serial(arguments.get("frozen", ()))
        for trained in pool(num_ranks).run(train, **arguments):
            for what, mine, wanted in zip(("losses", "norms", "gradients", "parameters"), trained, reference):
                close(mine, wanted, msg=f"{case}, {what}: ".__add__)


# broken on purpose


def never_gathered_again(arguments):
    """On a rank: backward gets memory for a unit's parameters, but nobody fills it."""
    gather = fsdp_units.all_gather_single

    def fill_with_zeros(whole, shard, **options):
        if torch._C._current_graph_task_id() == -1:
            return gather(whole, shard, **options)
        whole.zero_()
        return dist.barrier(async_op=True)

    fsdp_units.all_gather_single = fill_with_zeros
    try:
        return train(**arguments)
    finally:
        fsdp_units.all_gather_single = gather


def averaged_twice(arguments):
    """On a rank: the mean is divided by the number of ranks once more."""
    reduce = fsdp_units.Flat.reduce
    fsdp_units.Flat.reduce = lambda flat, gradient: reduce(flat, gradient / dist.get_world_size())
    try:
        return train(**arguments)
    finally:
        fsdp_units.Flat.reduce = reduce


@pytest.mark.ranks
def test_broken_parameters_that_are_not_gathered_again_give_other_gradients():
    losses, _, grads, _ = pool(2).run(never_gathered_again, CASES["plain"])[0]
    assert losses[0] == pytest.approx(serial(())[0][0])  # forward is right
    with pytest.raises(AssertionError):
        close(grads, serial(())[2])


@pytest.mark.ranks
def test_broken_a_mean_of_a_mean_is_too_small_by_the_number_of_ranks():
    trained = pool(3).run(averaged_twice, CASES["plain"])[0]
    assert trained[1][0] == pytest.approx(serial(())[1][0] / 3)


# bytes


def recorded_step(num_micro_batches=1, is_accumulating=True, num_layers=3, **options):
    """On a rank: a model that nobody holds whole, then one step with Adam."""
    model = GPT(config_of(num_layers), dtype=torch.float64, device="meta")
    init = lambda name, shape: full_parameter(name, shape, seed=0)
    model = FullyShardedModule(model, device="cpu", init=init, **options)
    optimizer = torch.optim.Adam(model.parameters())
    tokens, _ = global_batch(0)
    with dtlab.phase("step", step=0):
        for i in range(num_micro_batches):
            is_last = i == num_micro_batches - 1
            with model.no_sync() if is_accumulating and not is_last else contextlib.nullcontext():
                model(tokens).logsumexp(-1).mean().backward()
        optimizer.step()
    return model, optimizer


def config_of(num_layers):
    """CONFIG with another number of layers."""
    return GPTConfig(vocab_size=31, seq_length=6, hidden_size=12, num_layers=num_layers, num_heads=3)


def recorded(*args, **kwargs):
    """On a rank: ``recorded_step``; nothing of it travels."""
    recorded_step(*args, **kwargs)


LAYER, ROOT = 12 * 12**2 + 13 * 12, (31 + 6 + 2) * 12  # parameters of a unit and of the root's


def padded(num_ranks, num_layers=3):
    """Elements of all units, each a multiple of the number of ranks."""
    return sum(n + theory.padding_elements(n, num_ranks) for n in [ROOT, *[LAYER] * num_layers])


def issues(recording, rank=0):
    return [e for e in recording.events[rank] if e.kind == "issue" and e.phase.get("step") == 0]


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks, options, gathers", [
    (1, {}, 2), (2, {}, 2), (3, {}, 2), (3, {"prefetch": False}, 2), (3, {"reshard_after_forward": False}, 1),
    (4, {}, 2)])  # fmt: skip
def test_a_step_sends_the_parameters_three_times(num_ranks, options, gathers):
    recording = pool(num_ranks).record(recorded, **options)
    for rank in range(num_ranks):
        events = issues(recording, rank)
        ops = Counter("gather" if "gather" in e.op else e.op.partition("_tensor")[0] for e in events)
        assert ops == {"gather": 4 * gathers, "reduce_scatter": 4}
        sent = theory.zero_wire_elements(padded(num_ranks), dp_size=num_ranks, zero_stage=3) / 3 * (gathers + 1)
        assert sum(e.wire_bytes for e in events) == pytest.approx(8 * sent, rel=1e-14)


@pytest.mark.ranks
@pytest.mark.parametrize("is_accumulating, reductions", [(True, 4), (False, 12)])
def test_no_sync_sends_gradients_once(is_accumulating, reductions):
    recording = pool(2).record(recorded, 3, is_accumulating)
    assert sum("reduce_scatter" in e.op for e in issues(recording)) == reductions
    whole, most = 8 * padded(2), recording.memory().peak_grads[0]
    assert most >= whole if is_accumulating else most == whole / 2


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_model_states_are_the_theorys_bytes(num_ranks):
    padding = padded(num_ranks) - padded(1)
    wanted = theory.zero_states(padded(1), dp_size=num_ranks, zero_stage=3, optimizer="adam_fp64", padding=padding,
                                step_tensors=4)  # fmt: skip
    table = pool(num_ranks).record(recorded).memory()
    for name, size in wanted.items():
        assert set(table[f"peak_{name}"]) == {size}


def most_units_at_once(goes=True, **options):
    """On a rank: how many layers were whole at the same time, in forward and in backward; and afterwards."""
    filled, most = set(), []
    start, free, after = fsdp_units.Flat.start, fsdp_units.Flat.free, FullyShardedModule._after_backward

    def counted_start(flat):
        filled.add(flat.layout.names[0])
        most.append(len(filled - {"token_embedding.weight"}))
        return start(flat)

    def counted_free(flat):
        free(flat)
        filled.discard(flat.layout.names[0])
        assert flat.whole.untyped_storage().nbytes() == 0

    fsdp_units.Flat.start, fsdp_units.Flat.free = counted_start, counted_free
    if not goes:  # broken on purpose
        FullyShardedModule._after_backward = lambda model, unit: None
    try:
        model, _ = recorded_step(num_layers=6, **options)
    finally:
        fsdp_units.Flat.start, fsdp_units.Flat.free, FullyShardedModule._after_backward = start, free, after
    return max(most), len(filled), sum(flat.whole.untyped_storage().nbytes() for flat in model._flats().values())


@pytest.mark.ranks
@pytest.mark.parametrize("options, most", [({}, 2), ({"prefetch": False}, 1), ({"reshard_after_forward": False}, 6),
                                           ({"goes": False}, 6)])  # fmt: skip
def test_units_are_whole_only_while_they_are_needed(options, most):
    assert pool(2).run(most_units_at_once, **options) == [(most, 0, 0)] * 2


@pytest.mark.ranks
def test_prefetch_gathers_the_next_unit_while_one_computes():
    for prefetch in (True, False):
        recording = pool(2).record(recorded, prefetch=prefetch)
        events = [e for e in recording.events[0] if e.phase.get("step") == 0]
        waits = {(e.op, e.seq): i for i, e in enumerate(events) if e.kind == "wait"}
        overlapped = [any(between.flops for between in events[i : waits[e.op, e.seq]])
                      for i, e in enumerate(events) if e.kind == "issue" and "gather" in e.op]  # fmt: skip
        # forward: root, layers 0, 1, 2; backward: root, layers 2, 1, 0. (Layer 0 after the embeddings: no FLOPs)
        assert overlapped == [False, False, prefetch, prefetch, False, prefetch, prefetch, prefetch]


def dry_step(prefetch, num_layers):
    """On a played rank: a step of layers of the 7.5B model's size, gathered in 16 bits."""
    config = GPTConfig(vocab_size=512, seq_length=2048, hidden_size=4096, num_layers=num_layers, num_heads=32)
    model = GPT(config, device="meta")
    model = FullyShardedModule(model, prefetch=prefetch, param_dtype=torch.bfloat16, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(1, 2048, dtype=torch.long)
    with dtlab.phase("step", step=0):
        cross_entropy(model(tokens), tokens, reduction="mean").backward()
        optimizer.step()


@pytest.mark.ranks
def test_a_step_of_real_size_is_recorded_dry_and_prefetch_hides_communication_there():
    recordings = [dtlab.record_dry(dry_step, prefetch, 3, world_size=64, ranks=[0]) for prefetch in (False, True)]
    num_params = 3 * (12 * 4096**2 + 13 * 4096) + (512 + 2048 + 2) * 4096
    for recording in recordings:
        assert sum(e.wire_bytes for e in issues(recording)) == pytest.approx(3 * 63 / 64 * 2 * num_params, rel=1e-14)
        assert recording.memory().peak_params[0] == 4 * num_params / 64
    hardware = Hardware.preset("64xA100-80GB")
    exposed = [replay(recording, hardware).exposed_communication_s for recording in recordings]
    assert exposed[1] < 0.75 * exposed[0]


# units and parameters of every kind


class Pair(nn.Module):
    """Returns a tuple: a number of its own too, its input as it came, and 5 parameters for any number of ranks."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(1, 2, 5, dtype=torch.float64))

    def forward(self, x, *, shift=0.0):
        return x * self.scale + shift, x, 3


class Named(nn.Module):
    """Returns a dict with a list; half of it is frozen, and the frozen half comes last in forward."""

    def __init__(self):
        super().__init__()
        self.trained, self.frozen = (nn.Linear(5, 5, dtype=torch.float64) for _ in range(2))
        self.frozen.requires_grad_(False)
        self.register_buffer("offset", torch.randn(5, dtype=torch.float64))

    def forward(self, x):
        return {"y": [self.frozen(self.trained(x).tanh()) + self.offset], "not in the loss": self.trained(x)}


class Table(nn.Module):
    """Returns a piece of its 3 rows themselves, and has parameters that no loss ever meets, one of another dtype."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(3, 5, dtype=torch.float64))
        self.spare, self.other = nn.Parameter(torch.ones(1, dtype=torch.float64)), nn.Parameter(torch.ones(1))

    def forward(self, count):
        return self.rows[:count]


class Zoo(nn.Module):
    """What a model may do with its units: twice, in other orders, not at all, in vain, failing, by LSTMs."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        memory = nn.LSTM(5, 5, dtype=torch.float64)
        in_vain = nn.Linear(5, 5, dtype=torch.float64)
        tied, named = nn.Linear(5, 5, dtype=torch.float64), Named()
        tied.weight = named.trained.weight  # in two units
        self.parts = nn.ModuleDict({"pair": Pair(), "named": named, "table": Table(), "memory": memory, "tied": tied,
                                    "in_vain": in_vain, "empty": nn.Tanh()})  # fmt: skip
        self.last = nn.Linear(5, 1, dtype=torch.float64)
        self.fails = False

    def forward(self, x):
        y, same, _ = self.parts["pair"](x, shift=x.mean())
        y = self.parts["named"](y)["y"][0] + same
        y, _, _ = self.parts["pair"](self.parts["empty"](y))
        y = y + self.parts["table"](2)
        if self.fails:
            raise KeyError("as asked")
        self.parts["in_vain"](y)
        return {"loss": self.last(self.parts["memory"](self.parts["tied"](y))[0]).square().mean()}


NO_GRADIENT = [f"parts.{part}.{name}" for part in ("named.frozen", "in_vain") for name in ("weight", "bias")]
NO_GRADIENT.append("parts.table.other")


def inputs_of(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(2, 5, dtype=torch.float64, generator=generator)


def zoo_in_one_process(num_ranks, num_steps):
    """Gradients of the mean over the ranks' losses, added up over the steps; of the first input, and the loss."""
    model, xs = Zoo(seed=0), [inputs_of(rank, 0).requires_grad_() for rank in range(num_ranks)]
    losses = [model(x)["loss"] for x in xs]
    (sum(losses) / num_ranks).backward()
    for step in range(1, num_steps):
        (sum(model(inputs_of(rank, step))["loss"] for rank in range(num_ranks)) / num_ranks).backward()
    return {name: p.grad for name, p in model.named_parameters()}, [num_ranks * x.grad for x in xs], losses


def fail_in_backward(_module, _inputs, outputs):
    """A hook on a unit: its first output's gradient fails."""
    outputs[0].register_hook(lambda gradient: 1 / 0)


def zoo(**options):
    """On a rank: three backward passes amid everything that may go wrong or be left out."""
    rank = dist.get_rank()
    model, x = FullyShardedModule(Zoo(seed=rank), **options), inputs_of(rank, 0).requires_grad_()
    model(inputs_of(rank, 9))  # backward never called
    loss = model(x)["loss"]
    second = model(inputs_of(rank, 1))["loss"]  # forward twice before backward
    model.module.fails = True
    with contextlib.suppress(KeyError):
        model(x)
    model.module.fails = False
    with torch.no_grad():
        model.eval()
        assert torch.equal(model(x)["loss"], loss) and not any(u.is_filled for u in model._units if u.flats)
        model.train()
    with model.module.parts["pair"].register_forward_hook(fail_in_backward), contextlib.suppress(ZeroDivisionError):
        model(inputs_of(rank, 7))["loss"].backward()  # after some units were sent
    model.zero_grad()
    loss.backward()
    second.backward()
    model(inputs_of(rank, 2))["loss"].backward()
    return {name: g.clone() for name, g in whole_gradients(model).items()}, x.grad, loss.item()


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks, options", [
    (2, {}), (3, {"prefetch": False}), (3, {"reshard_after_forward": False}), (4, {})])  # fmt: skip
def test_units_may_be_used_in_any_way(num_ranks, options):
    grads, inputs, losses = zoo_in_one_process(num_ranks, 3)
    for rank, (mine, of_input, loss) in enumerate(pool(num_ranks).run(zoo, **options)):
        close(of_input, inputs[rank])
        close(loss, losses[rank].item())
        assert {name for name, grad in grads.items() if grad is None} == {*NO_GRADIENT, "parts.table.spare"}
        assert mine.pop("parts.table.spare").tolist() == [0]  # zero, as the others in its shard have a gradient
        close(mine, {name: grad for name, grad in grads.items() if grad is not None})


# sharded parameters say so


class Untied(nn.Module):
    """An embedding that is a unit, and whose weight the root uses outside of its forward."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(3)
        self.embedding, self.how = nn.Embedding(7, 4, dtype=torch.float64), how

    def forward(self, tokens):
        x = self.embedding(tokens)
        with self.how(self.embedding) if self.how else contextlib.nullcontext():
            return F.linear(x, self.embedding.weight).logsumexp(-1).mean()


def head_uses_the_embedding(gathers):
    """On a rank: the loss, and the whole gradient of the embedding's weight."""
    plain = Untied(None)
    model = FullyShardedModule(plain, units=[plain.embedding])
    plain.how = model.gathered if gathers else None
    tokens = torch.arange(3) + dist.get_rank()
    loss = model(tokens)
    loss.backward()
    with torch.no_grad(), model.gathered(), model.gathered(plain.embedding):
        assert plain.embedding.weight.shape == (7, 4) and plain.embedding.weight.abs().sum() > 0
    assert repr(plain.embedding.weight) == "<embedding.weight, sharded>"
    return loss.item(), whole_gradients(model)["embedding.weight"]


@pytest.mark.ranks
def test_a_parameter_used_outside_its_unit_is_named_with_the_cure():
    with pytest.raises(RankError, match=r"embedding.weight \[7, 4\] is sharded here: 0 of its 28 elements") as error:
        pool(3).run(head_uses_the_embedding, False)
    assert "with model.gathered(part)" in str(error.value) and "F.linear" in str(error.value)


@pytest.mark.ranks
def test_gathered_parameters_are_right_in_the_loss_too():
    plain, losses = Untied(None), []
    for rank in range(3):
        losses.append(plain(torch.arange(3) + rank))
    (sum(losses) / 3).backward()
    for rank, (loss, grad) in enumerate(pool(3).run(head_uses_the_embedding, True)):
        close(loss, losses[rank].item())
        close(grad, plain.embedding.weight.grad)


# dtypes and norms


def in_16_bits(x):
    """On a rank: a step in bfloat16, gradients summed in float32; and the same by hand."""
    plain = [nn.Linear(3, 3), nn.Linear(3, 1)]
    model = nn.Sequential(*plain)
    model = FullyShardedModule(model, units=plain, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    before = model.full_state_dict()
    y = model(x[dist.get_rank()])
    y.float().sum().backward()
    return y, before, whole_gradients(model), {p.dtype for p in model.parameters()}


@pytest.mark.ranks
def test_parameters_are_computed_in_16_bits_and_gradients_summed_in_32():
    x, by_hand = torch.randn(2, 4, 3), []
    (y0, state, grads, kinds), (y1, *_) = pool(2).run(in_16_bits, x)
    for rows, y in zip(x, (y0, y1)):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        model.load_state_dict(state)
        out = model.bfloat16()(rows.bfloat16())
        assert y.dtype == torch.bfloat16 and torch.equal(y, out)
        out.float().sum().backward()
        by_hand.append({name: p.grad.float() for name, p in model.named_parameters()})
    assert kinds == {torch.float32} == {grad.dtype for grad in grads.values()}
    assert all(torch.equal(grad, by_hand[0][name] / 2 + by_hand[1][name] / 2) for name, grad in grads.items())


def norms_of(bad):
    """On a rank: the maximum norm; then with ``bad`` in one rank's loss, by both norms."""
    model = FullyShardedModule(nn.Linear(3, 1, dtype=torch.float64))
    model(torch.full((1, 3), float(dist.get_rank() + 1), dtype=torch.float64)).sum().backward()
    largest = model.clip_grad_norm_(1.0, float("inf")).item()
    model.zero_grad()
    (model(torch.ones(1, 3, dtype=torch.float64)).sum() * (bad if dist.get_rank() == 1 else 1)).backward()
    return [largest, *(model.clip_grad_norm_(1.0, p).item() for p in (2.0, float("inf")))]


@pytest.mark.ranks
def test_every_rank_gets_the_same_norm_nan_too():
    results = pool(3).run(norms_of, float("nan"))
    assert [r[0] for r in results] == [2.0] * 3  # the mean of 1, 2, 3
    assert all(n != n for r in results for n in r[1:])


# checkpoints


def trained_part(first, last, path, saves):
    """On a rank: steps ``first`` to ``last`` with Adam, between loading and saving."""
    model = FullyShardedModule(Model(dist.get_rank()))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-4)
    if first:
        load_checkpoint(path, model.sharded_state(optimizer))
    for step in range(first, last):
        optimizer.zero_grad()
        backward(model, shard_batch(global_batch(step), dist.get_rank(), dist.get_world_size()), 1, True)
        optimizer.step()
    if saves:
        save_checkpoint(path, model.sharded_state(optimizer))
    return model.full_state_dict()


@pytest.mark.ranks
def test_a_checkpoint_goes_on_with_another_number_of_ranks(tmp_path):
    straight = pool(3).run(trained_part, 0, 4, tmp_path, False)[0]
    pool(3).run(trained_part, 0, 2, tmp_path, True)
    for state in pool(2).run(trained_part, 2, 4, tmp_path, False):
        close(state, straight)


def after_three_steps(path, optimizer_class, options, takes_states):
    """On a rank: parameters after three steps; states to save or load are made before the first, or never."""
    model = FullyShardedModule(nn.Linear(3, 2, dtype=torch.float64))
    with torch.no_grad():
        for shard in model.parameters():
            shard.copy_(torch.linspace(-1, 1, len(shard)))
    optimizer = optimizer_class(model.parameters(), **options)
    state = model.sharded_state(optimizer) if takes_states else None
    for step in range(3):
        optimizer.zero_grad()
        model(inputs_of(dist.get_rank(), step)[:, :3]).square().sum().backward()
        optimizer.step()
    if takes_states:
        kept = {key: tensor.clone() for key, tensor in optimizer.state[next(model.parameters())].items()}
        save_checkpoint(path, state)
        for tensor in optimizer.state[next(model.parameters())].values():
            tensor.zero_()
        load_checkpoint(path, state)
        assert all(torch.equal(kept[key], tensor) for key, tensor in optimizer.state[next(model.parameters())].items())
    return model.full_state_dict()


@pytest.mark.ranks
@pytest.mark.parametrize("optimizer", [
    (torch.optim.NAdam, {}), (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5})])  # fmt: skip
def test_states_taken_before_the_first_step_change_nothing_and_are_saved_as_they_are_then(tmp_path, optimizer):
    without, taken = (pool(2).run(after_three_steps, tmp_path, *optimizer, takes) for takes in (False, True))
    assert all(torch.equal(without[0][key], taken[0][key]) for key in without[0])


def first_ranks_buffer():
    """On a rank: what is saved of a buffer that each rank has changed."""
    model = FullyShardedModule(nn.BatchNorm1d(3))
    model(torch.randn(4, 3) + dist.get_rank())
    return model.full_state_dict()["running_mean"]


@pytest.mark.ranks
def test_buffers_are_saved_as_the_first_rank_has_them():
    first, second = pool(2).run(first_ranks_buffer)
    assert torch.equal(first, second) and first.abs().max() < 0.1  # the second's inputs are 1 higher


# gradients that are not complete


def small(device="cpu"):
    """Two units in float64; the same on every rank and call."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double().to(device)
    return FullyShardedModule(model, units=[model[0], model[2]])


def loss_of(model, step):
    return model(inputs_of(dist.get_rank(), step).to(next(model.parameters()).device)).square().mean()


def fail(model, step):
    """A backward pass that fails in the middle, when the last unit's gradients are on their way."""
    with model.module[0].register_forward_hook(lambda *args: args[2].register_hook(lambda _: 1 / 0) and None):
        loss = loss_of(model, step)
    with pytest.raises(ZeroDivisionError):
        loss.backward()


def given_up(how, zero_grad):
    """On a rank: gradients and parameters of a step after others that were not completed; what is said until then."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    before, said = model.full_state_dict(), []
    if how == "failed after no_sync":
        with model.no_sync():
            loss_of(model, 7).backward()
    loss_of(model, 6).backward() if how == "no_sync after a pass" else None
    if how.startswith("failed"):
        fail(model, 8)
    else:
        with model.no_sync():
            loss_of(model, 8).backward()
    again = loss_of(model, 9).backward if how.startswith("failed") else optimizer.step
    for wrong in (optimizer.step, functools.partial(model.clip_grad_norm_, 1.0), again):
        try:
            wrong()
        except dtlab.ConfigError as error:
            said.append(str(error))
    close(model.full_state_dict(), before)
    (optimizer if zero_grad == "optimizer" else model).zero_grad()
    with model.no_sync():
        loss_of(model, 0).backward()
    loss_of(model, 1).backward()
    optimizer.step()
    return whole_gradients(model), said


@pytest.mark.ranks
@pytest.mark.parametrize("how", ["failed", "failed after no_sync", "no_sync", "no_sync after a pass"])
def test_gradients_that_are_not_complete_are_no_gradients_and_can_be_given_up(how):
    for zero_grad in ("optimizer", "model"):
        grads, said = pool(3).run(given_up, how, zero_grad)[1]
        assert len(said) == 3 and all("is not complete" in text or "call zero_grad()" in text for text in said)
        close(grads, serial_small())


def serial_small(num_ranks=3):
    """One process: the mean over the ranks of the gradients of steps 0 and 1."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    for step in (0, 1):
        (sum(model(inputs_of(rank, step)).square().mean() for rank in range(num_ranks)) / num_ranks).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def on_gpu():
    """On a rank: gradients of steps 0 and 1, the second without prefetch; and the norm."""
    model = small("cuda")
    for step in (0, 1):
        model.prefetch = step == 0
        loss_of(model, step).backward()
    grads = {name: grad.cpu() for name, grad in whole_gradients(model).items()}
    return grads, model.clip_grad_norm_(1.0).item()


@pytest.mark.gpu
@pytest.mark.ranks
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_on_a_gpu():
    wanted = serial_small(2)
    with dtlab.launch(2, device="cuda", share_gpu=torch.cuda.device_count() < 2) as ranks:
        for grads, norm in ranks.run(on_gpu):
            close(grads, wanted)
            assert norm == pytest.approx(torch.cat([grad.flatten() for grad in wanted.values()]).norm().item())


KEPT = {}


def one_rank_fails(where):
    """On a rank: the last one fails, and the others are stopped where they wait for it."""
    KEPT["model"] = model = small()
    if where == "forward":
        loss_of(model, 8).backward()
        if dist.get_rank() == 2:
            raise KeyError("in forward")
        loss_of(model, 8)
    if dist.get_rank() == 2:
        fail(model, 8)
        raise KeyError("in backward")
    loss_of(model, 8).backward()


def next_try():
    """On a rank: with the same model, after zero_grad."""
    KEPT["model"].zero_grad()
    for step in (0, 1):
        loss_of(KEPT["model"], step).backward()
    return whole_gradients(KEPT["model"])


@pytest.mark.ranks
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_when_one_rank_fails_all_can_go_on_with_the_same_model(where):
    with pytest.raises(RankError, match=f"in {where}"):
        pool(3).run(one_rank_fails, where)
    close(pool(3).run(next_try)[0], serial_small())


def many_small_gradients():
    """On a rank: micro-batches whose gradients are 256, 1 and 1, in 16 bits."""
    model = FullyShardedModule(nn.Linear(1, 1, bias=False), param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for x in (256.0, 1.0, 1.0):
        with model.no_sync():
            model(torch.full((1, 1), x)).sum().backward()
    model(torch.zeros(1, 1)).sum().backward()
    return whole_gradients(model)["weight"].item()


@pytest.mark.ranks
def test_micro_batches_are_summed_in_the_dtype_of_reduction():
    assert pool(2).run(many_small_gradients) == [258.0] * 2  # in bfloat16 256 + 1 is 256


def sparse():
    """On a rank: a sparse gradient of an embedding, two micro-batches."""
    model = FullyShardedModule(nn.Embedding(5, 2, sparse=True, dtype=torch.float64))
    with model.no_sync():
        model(torch.tensor([dist.get_rank()])).sum().backward()
    model(torch.tensor([3, 3])).sum().backward()
    return whole_gradients(model)["weight"][:, 0].tolist()


@pytest.mark.ranks
def test_sparse_gradients_become_dense():
    assert pool(2).run(sparse) == [[0.5, 0.5, 0, 2, 0]] * 2


def in_a_group():
    """On a rank: two of three train; the gradient, and a clipped norm."""
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return None
    model = FullyShardedModule(nn.Linear(3, 1, dtype=torch.float64), group=group)
    model(torch.full((1, 3), float(dist.get_rank()), dtype=torch.float64)).sum().backward()
    grads = whole_gradients(model)
    return grads["weight"].tolist(), model.clip_grad_norm_(1.0).item()


@pytest.mark.ranks
def test_some_ranks_may_share_a_model():
    first, none, last = pool(3).run(in_a_group)
    assert none is None and first == last == ([[1.0] * 3], 2.0)  # the mean of 0 and 2; with the bias' 1


# refusals


class Boxed(nn.Linear):
    """Returns its output in a class of its own, or keeps a loss."""

    kept, linear = None, False

    def forward(self, x):
        y = super().forward(x)
        if self.kept is None:
            return types.SimpleNamespace(y=y)
        self.kept.append((self.weight * x).sum() if self.linear else self.weight.square().sum())
        return y


def refused(how):
    """On a rank: what is asked for, which must not work."""
    rank, linear = dist.get_rank(), lambda: nn.Linear(2, 2)
    if how in WRONG_WRAPS:
        return WRONG_WRAPS[how](rank, linear)
    plain = nn.Sequential(linear(), linear())
    early = torch.optim.SGD(plain.parameters(), lr=1.0)
    model = FullyShardedModule(plain, units=list(plain))
    if how in WRONG_USES:
        WRONG_USES[how](model, plain, early)
    x = torch.ones(1, 2)
    loss = model(x).sum()
    if how == "a step before backward":
        with torch.no_grad():
            next(model.parameters()).mul_(2)
    loss.backward()
    WRONG_GRADIENTS[how](model)


def kept_loss(is_linear):
    """On a rank: a unit's loss that it does not return; its parameters are gone when backward comes."""
    unit = Boxed(2, 2)
    unit.kept, unit.linear = [], is_linear
    model = FullyShardedModule(nn.Sequential(unit, nn.Linear(2, 2)), units=[unit])
    model(torch.full((1, 2), dist.get_rank() + 1.0))
    unit.kept[0].backward()
    return whole_gradients(model)["0.weight"].tolist()


@pytest.mark.ranks
def test_a_loss_that_a_unit_keeps_is_right_where_backward_needs_no_parameters():
    assert pool(2).run(kept_loss, True) == [[[1.5] * 2] * 2] * 2


def scaled(optimizer):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    scaler.unscale_(optimizer)


def hooked(linear):
    linear.weight.register_hook(lambda grad: grad)
    return linear


WRONG_WRAPS = {
    "no module": lambda rank, linear: FullyShardedModule([linear()]),
    "no parameters": lambda rank, linear: FullyShardedModule(nn.Tanh()),
    "twice": lambda rank, linear: FullyShardedModule(nn.Sequential(FullyShardedModule(linear()))),
    "its module": lambda rank, linear: FullyShardedModule(FullyShardedModule(linear()).module),
    "a stranger": lambda rank, linear: FullyShardedModule(linear(), units=[linear()]),
    "no forward": lambda rank, linear: FullyShardedModule(m := nn.Sequential(nn.ModuleList([linear()])), units=[m[0]]),
    "meta": lambda rank, linear: FullyShardedModule(nn.Linear(2, 2, device="meta")),
    "a hook": lambda rank, linear: FullyShardedModule(hooked(linear())),
    "int8": lambda rank, linear: FullyShardedModule(linear(), reduce_dtype=torch.int8),
    "a word": lambda rank, linear: FullyShardedModule(linear(), param_dtype="bfloat16"),
    "different": lambda rank, linear: FullyShardedModule(nn.Linear(2, 2 + rank)),
    "different units": lambda rank, linear: FullyShardedModule(m := nn.Sequential(linear(), linear()), units=[m[rank]]),
    "clip": lambda rank, linear: FullyShardedModule(linear()).clip_grad_norm_(1.0),
    "gathered": lambda rank, linear: FullyShardedModule(linear()).gathered(linear()).__enter__(),
    "a hidden output": lambda rank, linear: FullyShardedModule(Boxed(2, 2))(torch.ones(1, 2)),
    "changed in forward": lambda rank, linear: FullyShardedModule(nn.Embedding(3, 2, max_norm=0.1))(torch.arange(3)),
    "a kept loss": lambda rank, linear: kept_loss(False),
}
WRONG_USES = {
    "frozen later": lambda model, plain, early: model.requires_grad_(False),
    "a part frozen later": lambda model, plain, early: plain[0].requires_grad_(False),
    "a weight frozen later": lambda model, plain, early: plain[0].weight.requires_grad_(False),
    "converted later": lambda model, plain, early: model.double(),
    "a part converted later": lambda model, plain, early: plain[0].double(),
    "added later": lambda model, plain, early: plain.append(nn.Linear(2, 2)),
    "tied later": lambda model, plain, early: setattr(plain[1], "weight", plain[0].weight),
    "a part's parameters": lambda model, plain, early: list(plain.parameters()),
    "state_dict": lambda model, plain, early: model.state_dict(),
    "load_state_dict": lambda model, plain, early: model.load_state_dict({}),
    "the module's state_dict": lambda model, plain, early: plain.state_dict(),
    "an optimizer from before": lambda model, plain, early: early.zero_grad(),
    "its state": lambda model, plain, early: model.sharded_state(torch.optim.SGD(nn.Linear(2, 2).parameters())),
}
WRONG_GRADIENTS = {
    "torch's clip": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "torch's scaler": lambda model: scaled(torch.optim.SGD(model.parameters())),
}


@pytest.mark.ranks
@pytest.mark.parametrize("how, text", [
    ("no module", "give a torch.nn.Module"), ("no parameters", "there is nothing to shard"),
    ("twice", "is or contains a FullyShardedModule"), ("its module", "in the shards of a FullyShardedModule"),
    ("a stranger", "Linear is no submodule"), ("no forward", "unit 0: ModuleList has no forward"),
    ("meta", "on the meta device and has no values"), ("a hook", "weight has a hook"),
    ("int8", r"reduce_dtype \(torch.int8\) must be a floating-point"), ("a word", "must be a floating-point"),
    ("different", "another model or option"), ("different units", r"option units \['', '0'\]"),
    ("clip", "there is no gradient to clip"), ("gathered", "not all of these are parts"),
    ("changed in forward", "weight was changed in place"),
    ("a hidden output", "returns tensors in a SimpleNamespace"), ("a kept loss", "is at version 1; expected version 0"),
    ("frozen later", "requires_grad=False; then"), ("a part frozen later", "before it is wrapped"),
    ("a weight frozen later", "Freeze and convert before wrapping"), ("converted later", "before it is wrapped"),
    ("a part converted later", "before it is wrapped"), ("added later", "module.2.weight was added"),
    ("tied later", "weight of a Linear in 1 was replaced"), ("a part's parameters", "ask that one"),
    ("state_dict", "full_state_dict"), ("load_state_dict", "before it is wrapped"),
    ("the module's state_dict", "ask that one"), ("an optimizer from before", "make the optimizer after wrapping"),
    ("its state", "2 of the optimizer's 2 parameters"), ("a step before backward", "changed between forward and"),
    ("torch's clip", "sees this rank's part only"), ("torch's scaler", "sees this rank's part only"),
])  # fmt: skip
def test_what_cannot_work_is_refused_with_its_cure(how, text):
    with pytest.raises(RankError, match=text):
        pool(2).run(refused, how)
