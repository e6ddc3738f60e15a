"""Recomputation against the function itself, in float64; by bytes and FLOPs; on ranks; and broken on purpose."""
import doctest
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dtlab
from dtlab import theory
from dtlab.errors import ConfigError
from dtlab.models import GPT, GPTConfig, TransformerLayer, cross_entropy, gpt
from dtlab.parallel import DistributedDataParallel, FullyShardedModule, recompute
from dtlab.simulate.tables import live_bytes

CONFIG = GPTConfig(vocab_size=31, seq_length=7, hidden_size=12, num_layers=3, num_heads=3, dropout=0.3,
                   flash_attention=False)  # fmt: skip
plainly = lambda function, *args: function(*args)


def layers():
    torch.manual_seed(0)
    return nn.ModuleList(TransformerLayer(CONFIG, dtype=torch.float64) for _ in range(3))


def run(program, inputs=None):
    """Outputs, gradients of the input and of every parameter, and the next random number."""
    parts = layers()
    x = torch.randn(2, 7, 12, dtype=torch.float64, requires_grad=True) if inputs is None else inputs
    torch.manual_seed(1)
    y = program(parts, x)
    (y * torch.arange(1.0, 13)).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in parts.parameters()), torch.rand(3)]


def assert_same(ours, theirs):
    torch.testing.assert_close(list(ours), list(theirs), rtol=1e-10, atol=1e-12)


def one_by_one(call):
    def program(parts, x):
        for part in parts:
            x = call(part, x)
        return x

    return program


def in_each_other(parts, x):
    inner = lambda x: recompute(parts[1], recompute(parts[0], x))
    return recompute(lambda x: parts[2](recompute(inner, x)), x)


@pytest.mark.parametrize("program", [one_by_one(recompute), in_each_other,
                                     lambda parts, x: recompute(one_by_one(plainly), parts, x)])
def test_outputs_gradients_and_dropout_masks_are_the_functions_own(program):
    assert_same(run(program), run(one_by_one(plainly)))


def test_an_input_that_needs_no_gradient_is_kept_all_the_same():
    assert_same(run(one_by_one(recompute), torch.ones(2, 7, 12, dtype=torch.float64)),
                run(one_by_one(plainly), torch.ones(2, 7, 12, dtype=torch.float64)))


def test_without_the_generators_state_the_gradient_is_of_another_mask(monkeypatch):
    monkeypatch.setattr("torch.set_rng_state", lambda state: None)
    wrong, right = run(one_by_one(recompute)), run(one_by_one(plainly))
    assert torch.equal(wrong[0], right[0])  # the output does not tell
    assert (wrong[1] - right[1]).norm() > 0.1 * right[1].norm()


# arguments and results


def mixed(number, tensors, *, scale=2.0):
    """Takes no tensor, and tensors in a dict; gives a tuple of which one part is cut off and one is no tensor."""
    with torch.no_grad():
        mean = tensors["a"].mean()
    product = (tensors["a"] - mean) * tensors["b"].exp() * number * scale
    return product.tanh(), product.detach().exp(), [product.sum(), "done"]


def test_any_arguments_in_and_any_results_out():
    found = []
    for call in (plainly, recompute):
        a, b = torch.arange(4.0, requires_grad=True), torch.arange(4.0) / 7
        first, second, (third, word) = call(mixed, 3, {"a": a, "b": b})
        assert word == "done" and not second.requires_grad
        (first.sum() + third).backward()
        found.append([first.detach(), second, third.detach(), a.grad])
    assert_same(*found)


def test_autocast_is_as_it_was_in_forward():
    found = []
    for call in (plainly, recompute):
        torch.manual_seed(0)
        net, x = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3)), torch.randn(4, 5, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            y = call(net, x)
        y.sum().backward()  # outside
        found.append([y.detach(), x.grad, *(p.grad for p in net.parameters())])
    assert found[0][0].dtype == torch.bfloat16
    assert_same(*found)


def test_a_second_backward_through_the_same_graph_computes_again():
    net, x, calls = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.ones(2, 3, requires_grad=True), []
    y = recompute(lambda x: (calls.append(1), net(x))[1], x).sum()
    y.backward(retain_graph=True)
    first = x.grad.clone()
    y.backward()
    assert torch.equal(x.grad, 2 * first) and len(calls) == 3


def test_without_gradients_it_is_a_plain_call_that_keeps_nothing():
    x, frozen = torch.ones(3), torch.full((3,), 2.0)
    assert not recompute(torch.mul, x, frozen).requires_grad
    with torch.no_grad():
        y = recompute(torch.mul, x, torch.ones(3, requires_grad=True))
    kept = weakref.ref(x)
    del x
    assert kept() is None and not y.requires_grad


def test_what_was_kept_goes_with_the_backward_pass():
    x = torch.ones(3, requires_grad=True)
    inner = x * 2
    kept, y = weakref.ref(inner), recompute(torch.exp, inner).sum()
    del inner
    assert kept() is not None
    y.backward()
    assert kept() is None and y.grad_fn is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_dropout_masks_on_a_gpu():
    def grads(program):
        parts, x = layers().cuda(), torch.ones(2, 7, 12, dtype=torch.float64, device="cuda", requires_grad=True)
        torch.manual_seed(1)
        (program(parts, x) * torch.arange(1.0, 13, device="cuda")).sum().backward()
        return [x.grad, *(p.grad for p in parts.parameters()), torch.rand(3, device="cuda")]

    assert_same(grads(one_by_one(recompute)), grads(one_by_one(plainly)))


# mistakes


def test_an_input_changed_in_place_is_found():
    x = torch.ones(3, requires_grad=True)
    inner = x * 2
    y = recompute(torch.exp, inner)
    inner.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_parameter_changed_in_between_is_found():
    layer = nn.Linear(3, 3)
    y = recompute(layer, torch.ones(1, 3, requires_grad=True))
    with torch.no_grad():
        layer.weight.add_(1)  # an optimizer's step
    with pytest.raises(ConfigError, match="Linear did something else .* or one of them has changed"):
        y.sum().backward()


def test_a_function_that_spoils_its_own_gradient_is_found():
    y = recompute(lambda x: x.exp().add_(1), torch.ones(3, requires_grad=True))
    with pytest.raises(ConfigError, match="in place that its own gradient needs"):
        y.sum().backward()


def test_a_function_that_does_something_else_the_second_time_is_found():
    calls = []

    def moody(x):
        calls.append(1)
        return (x.exp() if len(calls) == 1 else x.exp().tanh()).sum()

    with pytest.raises(ConfigError, match="moody did something else .* saved 1 tensors in forward and 2 in backward"):
        recompute(moody, torch.ones(3, requires_grad=True)).backward()


# bytes and FLOPs

SIZES = {"seq_length": 256, "hidden_size": 512, "num_heads": 8}


def big_layers(how, num_layers):
    """On a rank that is played: one step of 16-bit layers with 1-byte dropout masks."""
    torch.nn.functional.dropout = lambda x, p, *_: torch.native_dropout(x, p, True)[0]
    if how == "selective":
        attention = gpt.written_out_attention
        gpt.written_out_attention = lambda *args: recompute(attention, *args)
    config = GPTConfig(dropout=0.1, flash_attention=False, **SIZES)
    parts = [TransformerLayer(config, dtype=torch.bfloat16) for _ in range(num_layers)]
    x = torch.empty(1, 256, 512, dtype=torch.bfloat16).requires_grad_()
    for part in parts:
        x = recompute(part, x) if how == "full" else part(x)
    x.sum().backward()


def kept(recording):
    """Bytes of activations when forward has ended."""
    events = recording.events[0]
    last = max(i for i, event in enumerate(events) if event.phase.get("name") == "forward")
    *_, (_, live) = live_bytes(events[:last])
    return live["activations"]


@pytest.mark.ranks
@pytest.mark.parametrize("how", [None, "selective", "full"])
def test_bytes_kept_and_flops_are_the_formulas(how):
    recording = dtlab.record_dry(big_layers, how, 3, world_size=1)
    each = theory.activation_bytes_per_layer(micro_batch_size=1, recompute=how, **SIZES)
    statistics = 2 * 2 * 256 * 2  # not in the formula: norms' means and deviations
    assert kept(recording) == 3 * (each + {None: statistics, "selective": statistics, "full": 0}[how])
    shape = theory.ModelShape(num_layers=3, vocab_size=1, **SIZES)
    logits = 6 * 256 * 512
    assert recording.flops().flops.sum() == theory.batch_flops(shape, batch_size=1, recompute=how) - logits


# on ranks


def inside(model, call):
    """Each layer computes itself again: hooks on a layer stand outside."""
    for layer in model.layers:
        layer.forward = lambda x, forward=layer.forward: call(forward, x)


def outside(model, call):
    """The model has its layers computed again: with all their hooks."""

    def forward(tokens):
        x = model.embed(tokens)
        for layer in model.layers:
            x = call(layer, x)
        return model.head(x)

    model.forward = forward


def train(wrap, where, call, **options):
    """On a rank: the losses of three steps on this rank's rows, and what its parameters are then."""
    model = GPT(CONFIG, seed=0, dtype=torch.float64)
    where(model, call)
    replica = wrap(model, **options)
    optimizer, losses = torch.optim.SGD(replica.parameters(), lr=0.1), []
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        tokens = torch.randint(0, 31, (2, 7))
        optimizer.zero_grad()
        loss = cross_entropy(replica(tokens), tokens, reduction="mean")
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [torch.stack(losses), *(p.detach().clone() for p in replica.parameters())]


@pytest.fixture(scope="module")
def ranks():
    with dtlab.launch(2) as live:
        yield live


@pytest.mark.ranks
@pytest.mark.parametrize("where", [inside, outside])
@pytest.mark.parametrize("wrap, options", [(DistributedDataParallel, {"bucket_bytes": 1}), (TorchDDP, {}),
                                           (FullyShardedModule, {})])
def test_what_listens_to_gradients_gets_the_same(ranks, wrap, options, where):
    for ours, theirs in zip(ranks.run(train, wrap, where, recompute, **options),
                            ranks.run(train, wrap, where, plainly, **options)):
        assert_same(ours, theirs)


def test_examples():
    assert doctest.testmod(sys.modules["dtlab.parallel.recompute"]).failed == 0
