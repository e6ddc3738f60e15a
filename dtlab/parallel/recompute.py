"""Activation recomputation: keep what goes into a part of the model, compute the rest again when backward needs it.

    forward     x -> [ layer 1 ] -> [ layer 2 ] -> loss     of each layer only its input stays
    backward                        [ 2 again ][ back ]  [ 1 again ][ back ]

No backward pass inside backward: the graph of the forward pass stays and has numbers where its tensors were. The first
of them that backward asks for makes the function run again. So a gradient arrives once, after all of its parts, as the
hooks of data parallelism and ZeRO expect it.
"""
import contextlib

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from dtlab.errors import ConfigError


def recompute(function, *args):
    """What ``function(*args)`` returns; its activations are freed, and computed again in backward.

    Kept are the tensors of ``args`` and the states of the random generators (5,056 bytes for the CPU's). Outputs and
    gradients are those of ``function(*args)``: dropout draws the same mask again, autocast is as it was. Backward
    computes the forward pass a second time, 1/3 more FLOPs for a step. Calls may stand in each other.

    Args:
        function: A module or any function that does the same when it is called again with the same arguments. Its
            parameters, and whatever else it uses besides ``args``, must not change until backward has ended. What it
            counts it counts twice: BatchNorm's running mean moves twice a step.
        args: Tensors, and lists, tuples and dicts with tensors in them, are kept without a copy; all else as it is.

    Raises:
        ConfigError: in backward: ``function`` saved other tensors than the first time, or one was changed in place.
        RuntimeError: in backward: a tensor of ``args`` was changed in place (torch says which).

    Example:
        >>> layer, x = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout()), torch.ones(1, 2)
        >>> recompute(layer, x).sum().backward()

    Source: Chen et al. 2016, arXiv:1604.06174, section 3.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    forward = _Forward(function, args)
    with torch.autograd.graph.saved_tensors_hooks(forward.pack, forward.unpack):
        return function(*args)


class _Keep(torch.autograd.Function):
    """Keeps tensors as autograd does: it sees changes in place, hooks around us see the tensors. Never runs back."""

    @staticmethod
    def forward(ctx, anchor, *tensors):
        """An empty tensor whose ``grad_fn`` has the tensors (None where there is none)."""
        ctx.save_for_backward(*tensors)
        return torch.empty_like(anchor)


class _Forward:
    """One call of a function: what it takes to run it again, and what that gave."""

    def __init__(self, function, args):
        leaves, self.spec = tree_flatten(args)
        tensors = [leaf if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        self.function, self.others = function, [leaf if t is None else None for leaf, t in zip(leaves, tensors)]
        self.kept = _Keep.apply(torch.empty(0, requires_grad=True), *tensors)
        gpus = {tensor.device for tensor in tensors if tensor is not None and tensor.is_cuda}
        self.random = torch.get_rng_state(), {gpu: torch.cuda.get_rng_state(gpu) for gpu in gpus}
        self.autocast = [(k, torch.get_autocast_dtype(k), torch.is_autocast_enabled(k)) for k in ("cpu", "cuda")]
        self.saved = []  # shape, dtype and version of each tensor that autograd wanted to save
        self.again, self.backward = {}, None  # number -> the tensor; the backward pass that it belongs to

    def pack(self, tensor):
        """Autograd saves a tensor: it gets a number instead."""
        self.saved.append((tensor.shape, tensor.dtype, tensor._version))
        return len(self.saved) - 1

    def unpack(self, number):
        """Backward asks for a tensor. It is given away: what was used is freed at once."""
        backward = torch._C._current_graph_task_id()
        if number not in self.again or backward != self.backward:
            self.backward, self.again = backward, dict(enumerate(self.run_again()))
        return self.again.pop(number)

    def run_again(self):
        """The tensors that autograd saves, in order."""
        kept, found = zip(self.others, self.kept.grad_fn.saved_tensors), []
        args = tree_unflatten([other if tensor is None else tensor for other, tensor in kept], self.spec)
        # Subtle: detached, else the new graph would hold itself
        pack = lambda tensor: found.append((tensor.detach(), tensor._version))
        with self.as_it_was(), torch.autograd.graph.saved_tensors_hooks(pack, lambda _: None):
            self.function(*args)
        name = getattr(self.function, "__name__", type(self.function).__name__)
        if [(tensor.shape, tensor.dtype, version) for tensor, version in found] != self.saved:
            raise ConfigError(f"{name} did something else when it was computed again: autograd saved {len(self.saved)} "
                              f"tensors in forward and {len(found)} in backward, or of other shapes, or one of them "
                              "has changed (by an optimizer's step?). It must do the same twice: look for what counts "
                              "its calls, and for what changed in between")
        if any(tensor._version != version for tensor, version in found):
            raise ConfigError(f"{name} changes a tensor in place that its own gradient needs: leave out the last _ of "
                              "the operation, or inplace=True")
        return [tensor for tensor, _ in found]

    @contextlib.contextmanager
    def as_it_was(self):
        """Random generators and autocast as in forward; the generators go on where they were afterwards."""
        cpu, gpus = self.random
        with torch.random.fork_rng(list(gpus)), torch.enable_grad(), contextlib.ExitStack() as stack:
            torch.set_rng_state(cpu)
            for gpu, state in gpus.items():
                torch.cuda.set_rng_state(state, gpu)
            for kind, dtype, enabled in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled))
            yield
