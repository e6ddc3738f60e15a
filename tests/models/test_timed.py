"""TimedLayer waits in both directions and passes gradients on. Only lower bounds of time are asserted."""
import time

import pytest
import torch
from torch import nn

from dtlab.errors import ConfigError
from dtlab.models import TimedLayer


def seconds(fn):
    """Wall time of one call."""
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


@pytest.mark.parametrize("input_needs_grad", [True, False])
def test_it_sleeps_in_both_directions(input_needs_grad):
    layer, x, out = TimedLayer(0.02, 0.05), torch.ones(3, requires_grad=input_needs_grad), []
    assert seconds(lambda: out.append(layer(x))) >= 0.02
    assert seconds(lambda: out[0].sum().backward()) >= 0.05


def test_backward_takes_twice_the_forward_unless_given():
    assert TimedLayer(0.01).backward_s == 0.02


def test_values_and_gradients_pass_through_unchanged():
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    y = nn.Sequential(TimedLayer(0), TimedLayer(0))(x)
    grad = torch.randn(4, 3, dtype=torch.float64)
    y.backward(grad)
    assert torch.equal(y, x) and torch.equal(x.grad, grad)


def test_the_payloads_gradient_adds_up_over_the_batch_as_a_biass_does():
    def payload_grad(x):
        layer = TimedLayer(0, num_params=1000)
        (layer(x) ** 2).sum().backward()
        assert layer.payload.grad.is_contiguous() and layer.payload.grad.untyped_storage().nbytes() == 4000
        return layer.payload.grad

    x = torch.arange(6.0)
    assert torch.equal(payload_grad(x[:2]) + payload_grad(x[2:]), payload_grad(x))
    assert payload_grad(x).eq(30).all()  # sum of 2x


def test_a_chain_across_stages_sends_the_gradient_back():
    first, second = TimedLayer(0), TimedLayer(0)
    sent = first(torch.ones(2))
    received = sent.detach().requires_grad_()
    second(received).sum().backward()
    sent.backward(received.grad)
    assert first.payload.grad.item() == 2


@pytest.mark.parametrize("arguments, message", [
    (dict(forward_s=-1), r"forward_s \(-1\) must be 0 seconds or more"),
    (dict(forward_s=0, backward_s=float("nan")), r"backward_s \(nan\) must be 0 seconds or more, and finite"),
    (dict(forward_s=0, num_params=0), r"num_params \(0\) must be at least 1"),
])
def test_impossible_arguments_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        TimedLayer(**arguments)


def test_token_ids_are_refused():
    with pytest.raises(ConfigError, match="floating point, not torch.int64: use x.float"):
        TimedLayer(0)(torch.zeros(2, dtype=torch.long))
