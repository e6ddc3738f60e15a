"""Memory by category, in bytes: against counts of the tensors themselves and what autograd says it saved."""
import functools
import gc
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F
from helpers_for_records import live_at_end, record_here
from torch import nn
from torch.utils.checkpoint import checkpoint

import dtlab
from dtlab.models import GPT, GPTConfig
from dtlab.ranks import calls
from dtlab.ranks.worker import is_in_engine
from dtlab.record import recorder
from dtlab.record.memory import Memory

SMALL = GPTConfig(vocab_size=64, seq_length=16, hidden_size=32, num_layers=2, num_heads=4)
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "adamw": (torch.optim.AdamW, {}),
    "rmsprop": (torch.optim.RMSprop, {}),
    "rmsprop centered": (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {}),
    "adadelta": (torch.optim.Adadelta, {}),
    "adamax": (torch.optim.Adamax, {}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "asgd": (torch.optim.ASGD, {}),
}
CASES = [(name, how) for name in OPTIMIZERS for how in ({"foreach": False}, {"foreach": True}, {"fused": True})
         if "fused" not in how or name in ("sgd", "momentum", "nesterov", "adam", "amsgrad", "adamw", "adagrad")]


def batch(config=SMALL, size=2):
    tokens = torch.arange(size * config.seq_length).view(size, -1) % config.vocab_size
    return tokens, tokens.flip(0)


def loss_of(model, tokens, targets):
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def size_of(tensors):
    """Bytes of the storages of tensors, each once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]


@pytest.mark.parametrize("name, how", CASES, ids=[f"{name} {how}" for name, how in CASES])
def test_params_grads_and_states_are_exact(name, how):
    make, options = OPTIMIZERS[name]
    kept = []

    def steps():
        model = GPT(SMALL)
        optimizer = make(model.parameters(), lr=0.01, **options, **how)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model, *batch()).backward()
            optimizer.step()
        kept.extend([model, optimizer])

    live = live_at_end(record_here(steps))
    model, optimizer = kept
    assert live["params"] == size_of(model.parameters()) == 4 * sum(p.numel() for p in model.parameters())
    assert live["grads"] == size_of(p.grad for p in model.parameters()) == live["params"]
    assert live["optimizer_states"] == size_of(tensors_in(dict(optimizer.state)))
    assert live["activations"] <= 8 * 2 * SMALL.seq_length  # tokens and targets, kept by batch()'s caller
    assert live["other"] == 0


def test_adam_in_bytes():
    """8 bytes a parameter, and a 4-byte step counter for each tensor."""
    model = nn.Linear(10, 5)

    def step():
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(2, 10)).sum().backward()
        optimizer.step()

    row = record_here(step).memory().loc[0]
    assert (row.peak_params, row.peak_grads, row.peak_optimizer_states) == (220, 220, 440 + 8)


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_activations_are_what_autograd_saved(flash, dropout):
    model = GPT(GPTConfig(**{**vars(SMALL), "flash_attention": flash, "dropout": dropout}))
    tokens, targets = batch()
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(model, tokens, targets)
    params = {p.untyped_storage()._cdata for p in model.parameters()}
    wanted = sum(storage.nbytes() for address, storage in saved.items() if address not in params)
    del loss

    kept = []
    live = live_at_end(record_here(lambda: kept.append(loss_of(model, tokens, targets))))
    assert live["activations"] == wanted > 0


@pytest.mark.parametrize("dropout, mask_bytes", [(F.dropout, 2), (torch.native_dropout, 1)])
def test_masks_of_dropout(dropout, mask_bytes):
    """On the CPU, F.dropout keeps a mask in the tensor's own dtype; native_dropout a byte for each element."""
    x, kept = torch.ones(1000, dtype=torch.bfloat16, requires_grad=True), []
    live = live_at_end(record_here(lambda: kept.append(dropout(x, 0.5, True))))
    assert live["activations"] == 1000 * mask_bytes


def test_nothing_is_live_after_the_model_is_gone():
    def program():
        model = GPT(SMALL)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            loss_of(model, *batch()).backward()
            optimizer.step()
        del model, optimizer
        gc.collect()

    recording = record_here(program)
    assert set(live_at_end(recording).values()) == {0}
    assert recording.memory().loc[0].peak > 0


def test_a_model_from_before_counts_from_the_start():
    model = nn.Linear(10, 5)
    unused = nn.Linear(7, 1)
    model(torch.ones(2, 10)).sum().backward()

    def use(unused):
        model(torch.ones(2, 10))

    first = [e for e in record_here(use, unused).events[0] if e.start_s == 0]
    assert sorted((e.category, e.bytes) for e in first) == [
        ("grads", 20), ("grads", 200), ("params", 4), ("params", 20), ("params", 28), ("params", 200)]  # fmt: skip


def test_what_is_not_used_does_not_count():
    other = torch.ones(1000)
    recording = record_here(lambda: torch.ones(3))
    assert recording.memory().loc[0].peak == 12
    del other


def test_a_stop_waits_while_memory_is_given_back():
    waits = []
    memory = Memory([], lambda: waits.append(is_in_engine(sys._getframe(1))) or 0.0, None)
    memory.of(torch.ones(3))  # met, and gone at once
    assert waits == [True, True]


def test_views_count_once_and_resizing_is_seen():
    def program():
        whole = torch.ones(100)
        parts = whole.view(10, 10).unbind(0)
        whole.untyped_storage().resize_(0)
        whole.untyped_storage().resize_(200)
        del whole, parts
        empty = torch.empty(0)
        empty.resize_(5)
        return empty

    recording = record_here(program)
    assert [(e.kind, e.bytes) for e in recording.events[0] if e.kind in ("alloc", "free")] == [
        ("alloc", 400), ("free", 400), ("alloc", 200), ("free", 200), ("alloc", 20)]  # fmt: skip


def test_memory_that_a_tensor_gets_back_counts_from_then_on():
    one, other = torch.ones(100), torch.ones(50)
    for tensor in (one, other):
        tensor.untyped_storage().resize_(0)
    unseen = weakref.ref(one), weakref.ref(other)  # what the function holds itself counts from the start

    def program():
        for tensor in (known() for known in unseen):  # never both
            tensor.untyped_storage().resize_(tensor.nbytes)
            tensor.zero_()
            tensor.untyped_storage().resize_(0)

    recording = record_here(program)
    assert [(e.kind, e.bytes) for e in recording.events[0] if e.kind in ("alloc", "free")] == [
        ("alloc", 400), ("free", 400), ("alloc", 200), ("free", 200)]  # fmt: skip


def test_a_tag_decides():
    def program():
        flat = dtlab.tag(torch.zeros(25), "optimizer_states")
        weight = torch.ones(5, requires_grad=True)
        (weight * dtlab.tag(torch.ones(5), "other")).sum().backward()
        return flat, weight

    row = record_here(program).memory().loc[0]
    assert (row.peak_optimizer_states, row.peak_activations) == (100, 0)  # autograd saved the second
    with pytest.raises(dtlab.ConfigError, match="params, grads, optimizer_states"):
        dtlab.tag(torch.ones(1), "weights")


def test_gradients_are_known_without_an_optimizer():
    weight = nn.Parameter(torch.ones(10))

    def by_hand():
        for _ in range(2):
            (weight * 2).sum().backward()
            with torch.no_grad():
                weight.sub_(0.1 * weight.grad)
            weight.grad = None

    row = record_here(by_hand).memory().loc[0]
    assert (row.peak_params, row.peak_grads) == (40, 40)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_lowers_activations(reentrant):
    layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU()) for _ in range(4))

    def run(recompute):
        x = torch.ones(256, 64, requires_grad=True)
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=reentrant) if recompute else layer(x)
        x.sum().backward()

    full, less = (record_here(run, again).memory().loc[0].peak_activations for again in (False, True))
    one = 256 * 64 * 4
    assert full >= 16 * one  # 4 storages a layer
    assert 7 * one <= less <= 9 * one  # an input for each layer, and one layer computed again


weight, state = torch.ones(100), torch.ones(50)  # globals of the functions below


class Holder:
    """Has an attribute named as a global is, and holds a tensor."""

    def __init__(self):
        self.weight = torch.ones(7)

    def read(self, *_):
        return self.weight + 1


def held_at_end(function):
    return {category: size for category, size in live_at_end(record_here(function)).items() if size}


def test_an_attribute_is_no_global():
    layer = nn.Linear(3, 2, bias=False)
    live = held_at_end(lambda: (layer.weight, len(state)))
    assert live == {"params": 24, "other": 200}


@pytest.mark.parametrize("wrap", [
    lambda tensor: functools.partial(len, tensor),
    lambda tensor: functools.partial(lambda *, x: None, x=tensor),
    lambda tensor: functools.partial(lambda: len(tensor)),
])  # fmt: skip
def test_what_a_partial_holds_counts(wrap):
    assert held_at_end(wrap(torch.ones(10))) == {"other": 40}


def test_what_a_bound_methods_object_holds_counts():
    holder = Holder()
    assert held_at_end(lambda: holder.read and None) == {"other": 28}
    bound = holder.read
    assert held_at_end(lambda: bound and None) == {"other": 28}


def test_after_a_step_that_failed_nothing_is_the_optimizers():
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    optimizer = torch.optim.SGD(layer.parameters())

    def fail():
        raise ValueError

    def program():
        with pytest.raises(ValueError):
            optimizer.step(fail)
        layer(x).sum().backward()
        optimizer.step()

    phases = [e.phase.get("name") for e in record_here(program).events[0] if e.kind == "compute"]
    assert phases[0] == "forward" and phases[-1] == "optimizer" and "backward" in phases


@pytest.mark.parametrize("where", ["look_around", "start", "_registered"])
def test_a_recording_that_is_interrupted_as_it_begins_leaves_no_hooks(where, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    layer, resize = nn.Linear(2, 2), torch.UntypedStorage.resize_
    hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks
    before = len(hooks)
    if where == "_registered":
        monkeypatch.setattr(torch.nn.modules.module, "register_module_parameter_registration_hook", interrupted)
    else:
        monkeypatch.setattr(Memory, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        record_here(layer, torch.ones(1, 2))
    assert recorder.current is None and calls.observer is None and not layer.weight._post_accumulate_grad_hooks
    assert len(hooks) == before and torch.UntypedStorage.resize_ is resize
    assert torch.backends.mha.get_fastpath_enabled()
