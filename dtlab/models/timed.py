"""A layer that waits instead of computing: ranks do not fight for cores, so the real clock shows true idle time."""
import torch
from torch import nn

from dtlab.errors import ConfigError
from dtlab.record.recorder import sleep
from dtlab.validate import at_least


class _Wait(torch.autograd.Function):
    """The identity, with a sleep in each direction."""

    @staticmethod
    def forward(ctx, x, payload, forward_s, backward_s):
        ctx.backward_s, ctx.payload_shape = backward_s, payload.shape
        sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        sleep(ctx.backward_s)
        # expand() would give one number n times; a gradient that is sent needs its own memory
        payload_grad = grad.sum().expand(ctx.payload_shape).contiguous() if ctx.needs_input_grad[1] else None
        return grad, payload_grad, None, None


class TimedLayer(nn.Module):
    """y = x, after ``forward_s`` seconds; the gradient passes through after ``backward_s`` seconds.

    Real processes and real messages, but no arithmetic: four ranks on two cores idle exactly as four GPUs would.

    ``payload`` gives data parallelism something to reduce. Its value is not used; its gradient is that of a bias: every
    element gets the sum of the gradient that arrives, so it differs between ranks and adds up over a batch as a real
    one does. There is always one element at least, so that backward waits even where the input needs no gradient (a
    first stage).

    Args:
        forward_s: Seconds that forward sleeps (>= 0).
        backward_s: Seconds that backward sleeps; twice ``forward_s`` if not given.
        num_params: Elements of ``payload`` (count, >= 1).

    Shapes:
        x, y [...] any shape, floating point.

    Raises:
        ConfigError: a negative time, no elements, or an input that is not floating point.
    """

    def __init__(self, forward_s: float, backward_s: float | None = None, *, num_params: int = 1,
                 dtype: torch.dtype = torch.float32, device="cpu"):
        super().__init__()
        self.forward_s = forward_s
        self.backward_s = 2 * forward_s if backward_s is None else backward_s
        for name, seconds in (("forward_s", self.forward_s), ("backward_s", self.backward_s)):
            if not 0 <= seconds < float("inf"):
                raise ConfigError(f"{name} ({seconds}) must be 0 seconds or more, and finite")
        self.payload = nn.Parameter(torch.zeros(at_least("num_params", num_params, 1), dtype=dtype, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sleep, then hand ``x`` on."""
        if not x.is_floating_point():
            raise ConfigError(f"TimedLayer passes gradients, so x must be floating point, not {x.dtype}: use x.float()")
        return _Wait.apply(x, self.payload, self.forward_s, self.backward_s)

    def extra_repr(self) -> str:
        """Times and size, for print(module)."""
        return f"forward_s={self.forward_s}, backward_s={self.backward_s}, num_params={self.payload.numel()}"
