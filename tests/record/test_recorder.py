"""Operators, FLOPs, phases and what recording must leave as it was; in this process."""
import sys

import pytest
import torch
import torch.nn.functional as F
from helpers_for_records import record_here
from torch import nn
from torch.utils.checkpoint import checkpoint

import dtlab
from dtlab.models import GPT, GPTConfig
from dtlab.ranks import calls
from dtlab.record import recorder

CONFIG = GPTConfig(vocab_size=64, seq_length=16, hidden_size=32, num_layers=3, num_heads=4)


def product_flops(config, batch_size):
    """FLOPs of the forward products but attention's: 2 per weight and token."""
    h, f = config.hidden_size, config.ffn_hidden_size
    weights = config.num_layers * (4 * h * h + 2 * h * f) + h * config.vocab_size
    return 2 * weights * batch_size * config.seq_length


def attention_flops(config, batch_size):
    """FLOPs of QK^T and AV in forward: 2 products of S x S x h a layer."""
    return config.num_layers * 4 * batch_size * config.seq_length**2 * config.hidden_size


@pytest.mark.parametrize("flash", [True, False])
def test_flops_of_a_gpt_step_are_the_formula(flash):
    config = GPTConfig(**{**vars(CONFIG), "flash_attention": flash})
    model, tokens = GPT(config), torch.zeros(2, 16, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()

    table = record_here(step).flops().groupby("phase").flops.sum()
    products, attention = product_flops(config, 2), attention_flops(config, 2)
    assert table["forward"] == products + attention
    # flash attention's backward computes the scores again: 5 products against 2
    assert table["backward"] == 2 * products + (2.5 if flash else 2) * attention
    assert set(table.index) == {"forward", "backward"}


@pytest.mark.parametrize("flash", [True, False])
def test_inference_mode_counts_the_flops_of_no_grad(flash):
    model, tokens = GPT(GPTConfig(**{**vars(CONFIG), "flash_attention": flash})), torch.zeros(2, 16, dtype=torch.long)
    for off in (torch.no_grad, torch.inference_mode):
        table = record_here(off()(model), tokens).flops()
        assert table.flops.sum() == product_flops(CONFIG, 2) + attention_flops(CONFIG, 2)


@pytest.mark.parametrize("make, inputs", [
    (lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 1),
    (lambda: nn.MultiheadAttention(16, 2, batch_first=True), 3),
])  # fmt: skip
def test_layers_in_eval_count_the_flops_of_training(make, inputs):
    layer, x = make(), torch.ones(2, 4, 16)
    trained = record_here(layer, *[x] * inputs).flops().flops.sum()
    with torch.no_grad():
        evaluated = record_here(layer.eval(), *[x] * inputs).flops().flops.sum()
    assert evaluated == trained > 0 and torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("reentrant, again", [(True, 2), (False, 1)])
def test_a_checkpoint_computes_again(reentrant, again):
    """The older kind computes all again; the newer stops before the last product, whose result nobody needs."""
    layers, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), torch.ones(4, 8, requires_grad=True)
    table = record_here(lambda: checkpoint(layers, x, use_reentrant=reentrant).sum().backward()).flops()
    assert table.groupby("phase").flops.sum().to_dict() == {"forward": 2 * 512, "backward": (4 + again) * 512}


@pytest.mark.parametrize("operation, wanted", [
    (lambda: torch.ones(3, 4) @ torch.ones(4, 5), 120),
    (lambda: torch.ones(2, 3, 4) @ torch.ones(2, 4, 5), 240),
    (lambda: torch.ones(3, 4) @ torch.ones(4), 24),
    (lambda: torch.ones(4) @ torch.ones(4), 8),
    (lambda: torch.baddbmm(torch.ones(5), torch.ones(2, 3, 4), torch.ones(2, 4, 5)), 240),
    (lambda: F.conv2d(torch.ones(1, 2, 5, 5), torch.ones(3, 2, 3, 3)), 2 * 9 * 3 * 2 * 9),
    (lambda: torch.ones(100) + 1, 0),
])  # fmt: skip
def test_flops_of_single_operators(operation, wanted):
    assert record_here(operation).flops().flops.sum() == wanted


@pytest.mark.parametrize("operation, wanted", [
    (lambda x: x + 1, 800),
    (lambda x: x.add_(1), 800),
    (lambda x: x.add_(x), 1200),
    (lambda x: x.zero_(), 400),
    (lambda x: x.view(10, 10).t(), None),
    (lambda x: x.expand(3, 100).sum(), 400 + 4),
    (lambda x: x[torch.tensor([1, 2])], 16),
    (lambda x: torch.empty(50), 0),
])  # fmt: skip
def test_bytes_read_and_written(operation, wanted):
    x = torch.ones(100)
    events = [e for e in record_here(lambda: operation(x)).events[0] if e.kind == "compute"]
    assert (events[-1].bytes if events else None) == wanted


def test_phases_nest_and_name_what_happens():
    def program():
        with dtlab.phase("step", micro_batch=3):
            torch.ones(1)
            with dtlab.phase("forward", stage=1):
                torch.ones(2)
        torch.ones(3)

    events = record_here(program).events[0]
    assert [e.phase for e in events if e.kind == "compute"] == [
        {"name": "step", "micro_batch": 3}, {"name": "forward", "micro_batch": 3, "stage": 1}, {}]  # fmt: skip
    assert [e.op for e in events if e.kind == "phase"] == ["forward", "step"]
    with dtlab.phase("not recorded"):
        pass


def test_a_manual_update_is_no_forward():
    weight = nn.Parameter(torch.ones(3))

    def program():
        (weight * 2).sum().backward()
        with torch.no_grad():
            weight.sub_(0.1 * weight.grad)

    phases = {e.op: e.phase.get("name") for e in record_here(program).events[0] if e.kind == "compute"}
    assert (phases["aten.mul"], phases["aten.sub_"], phases["aten.sum"]) == (None, None, "forward")


def test_call_sites():
    recording = record_here(lambda: nn.Linear(2, 2)(torch.ones(1, 2)))
    line = sys._getframe().f_lineno - 1
    sites = [e.where for e in recording.events[0] if e.op in ("aten.ones", "aten.addmm")]
    assert sites == [f"test_recorder.py, line {line}"] * 2


def test_times_and_storages_add_up():
    events = record_here(lambda: (torch.ones(1000) + 1).sum()).events[0]
    computed = [e for e in events if e.kind == "compute"]
    assert [e.op for e in computed] == ["aten.ones", "aten.add", "aten.sum"]
    assert computed[1].reads == computed[0].writes and computed[2].reads == computed[1].writes
    ends = [e.end_s for e in computed]
    assert ends == sorted(ends) and all(0 <= e.start_s <= e.end_s and e.cpu_s >= 0 for e in computed)


def test_results_are_the_same_with_and_without():
    torch.manual_seed(0)
    model, tokens = GPT(CONFIG), torch.arange(32).view(2, 16)
    grads = []
    for run in (lambda f: f(), record_here):
        model.zero_grad()
        run(lambda: F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward())
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))


def test_an_in_place_change_of_a_saved_tensor_is_still_an_error():
    def program():
        x = torch.ones(3, requires_grad=True)
        y = x.exp()
        y.add_(1)
        y.sum().backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        record_here(program)


def test_an_error_ends_the_recording_and_nothing_stays_on():
    resize = torch.UntypedStorage.resize_
    with pytest.raises(ZeroDivisionError):
        record_here(lambda: 1 / 0)
    assert recorder.current is calls.observer is None
    assert torch.UntypedStorage.resize_ is resize
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not torch.autograd.graph.saved_tensors_hooks.__dict__.get("stack")
    assert len(record_here(lambda: torch.ones(3)).events[0]) == 2
    weight = nn.Linear(2, 2).weight
    record_here(lambda: (weight * 2).sum().backward())
    assert not weight._post_accumulate_grad_hooks


def test_operators_on_meta_tensors_are_not_recorded():
    recording = record_here(lambda: torch.ones(10, 10, device="meta") @ torch.ones(10, 10, device="meta"))
    assert recording.events[0] == []


def test_double_backward_and_functions_of_ones_own():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return 2 * x * grad

    def program():
        x = torch.full((3,), 2.0, requires_grad=True)
        (first,) = torch.autograd.grad(Square.apply(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        return first.tolist(), second.tolist()

    value, *_ = recorder.record(program, ())
    assert value == ([4.0] * 3, [2.0] * 3)
