"""Gradients that no rank of a tensor-parallel group has whole: summed over the group once in a backward pass.

A parameter that every rank holds, but uses on its own tokens only (LayerNorm with sequence parallelism) or with its own
heads only (a key that several ranks share), has a part of its gradient on each rank:

    autograd   [ norm 2: part ][ norm 1: part ]        each rank adds its part to .grad, as always
    network                                    [ all_reduce ]   one for all of them, when the pass has ended

What was in ``.grad`` before the pass is whole already, and the same on all ranks: all but the first forget it when the
new part comes, so that the sum has it once. So nothing is held twice, and ``.grad`` is linear in all ranks' parts: a
mean over data-parallel ranks, taken before the sum, gives the mean of the sums. (``torch.autograd.grad`` goes round
``.grad``, and is refused. Hooks of such a parameter see this rank's part.)
"""
import weakref

import torch
import torch.distributed as dist
from torch import nn

from dtlab.errors import ConfigError
from dtlab.parallel.shared import at_end_of_pass, clip_shards_, place_in

_PASSES = weakref.WeakValueDictionary()  # group -> its _Pass under way; one that failed, while its hooks are there


class PartialGradient:
    """Rows of a parameter whose gradient is the sum of what the ranks of ``group`` have.

    The ranks fall into ``num_sets`` sets of neighbours; those of one set hold the same rows. Sent is one buffer with a
    place for the rows of each set, of which a rank fills its own: no group for each set is needed.

    Args:
        rows: Which of the parameter's, a slice.
        num_sets: Sets of ranks (count); 1: all have the same rows.
    """

    def __init__(self, *, group=None, rows: slice = slice(None), num_sets: int = 1):
        rank, size = place_in(group)
        self.group, self.rows, self.num_sets = group, rows, num_sets
        self.set, place = divmod(rank, size // num_sets)
        self.is_first = place == 0  # in its set: it speaks for the set where something must count once

    def __deepcopy__(self, memo):
        return self  # nothing here changes

    def watch(self, parameter: torch.Tensor | None):
        """Have the parameter's gradients summed, if it is trained and they are not yet."""
        if parameter is None or not parameter.requires_grad:
            return
        if not any(isinstance(hook, _OnGradient) for hook in (parameter._backward_hooks or {}).values()):
            parameter.register_hook(_OnGradient(self, parameter))


def sum_gradients(module: nn.Module, partial: PartialGradient, *names: str):
    """Have the gradients of these parameters of a module summed over the group, from its next forward pass on.

    Asked for again in each forward pass: parameters that were frozen then or are other ones now (``to_empty``) are
    found too.
    """
    if dist.get_world_size(partial.group) == 1:
        return
    module.partial_gradients = dict.fromkeys(names, partial)
    module.register_forward_pre_hook(_watch)


def _watch(module, _inputs):
    for name, partial in module.partial_gradients.items():
        partial.watch(getattr(module, name))


class _OnGradient:
    """The hook of a parameter, called before its part of a gradient is added to ``.grad``. Holds it weakly."""

    def __init__(self, partial, parameter):
        self.partial, self.parameter, self.shape = partial, weakref.ref(parameter), list(parameter.shape)
        self.last = None  # the pass that it was last called in

    @torch.no_grad()
    def __call__(self, _gradient):
        partial, current = self.partial, _pass_of(self.partial.group)
        if self not in current.hooks:  # else it is there again: by a backward pass in the pass
            if self.last is not None:
                self.last.refuse_what_it_left(self.parameter().device)
            self.last = current
            if self.grad is not None and not partial.is_first:
                self.grad[partial.rows].zero_()
            current.hooks[self] = self.state

    @property
    def state(self):
        """What is another once a gradient was added to ``.grad``, and what stays."""
        grad = self.grad
        return None if grad is None else (id(grad), grad._version), getattr(self.parameter(), "_version", None)

    @property
    def grad(self):
        """What is in ``.grad``; None where it, or the parameter, is gone."""
        return getattr(self.parameter(), "grad", None)


def _pass_of(group):
    """The backward pass under way."""
    current = _PASSES.get(group)
    if current is None or current.end() is None:  # it failed
        current = _PASSES[group] = _Pass(group)
    return current


class _Pass:
    """One backward pass: the parameters that got a part of their gradient in it, in order, the same on all ranks."""

    def __init__(self, group):
        self.group, self.hooks, self.is_settled = group, {}, False  # each hook with its state before
        self.end = at_end_of_pass(self.let_others_finish)

    def let_others_finish(self):
        """At the end of the pass, where data parallelism may still be on its way: come last."""
        self.end = at_end_of_pass(self.sum)

    def refuse_what_it_left(self, device):
        """Called before its parameters get a gradient again. If it failed, all ranks ask, once: one may have zeros."""
        if self.is_settled:
            return
        self.is_settled = True
        is_left = any(hook.grad is not None and hook.grad.any() for hook in self.hooks)
        is_left = torch.tensor(int(is_left), device=device)
        dist.all_reduce(is_left, dist.ReduceOp.MAX, group=self.group)
        if is_left:
            self.is_settled = False
            raise ConfigError("the last backward pass failed on the way, so that some gradients are summed over the "
                              "group and others not: call zero_grad() and begin the step again")

    @torch.no_grad()
    def sum(self):
        """One all_reduce for all parameters of a dtype."""
        _PASSES.pop(self.group)
        kinds = {}
        for hook, (old_grad, old_parameter) in self.hooks.items():
            grad, (new_grad, new_parameter) = hook.grad, hook.state
            is_taken = grad is None or 0 in grad.stride()  # ZeRO's stage 2 leaves a placeholder without memory
            if is_taken or new_grad == old_grad or new_parameter != old_parameter:
                raise ConfigError(f"a gradient of shape {hook.shape}, of which each rank of the tensor-parallel group "
                                  "has a part, was taken from .grad before the parts were summed (by ZeroOptimizer, "
                                  "FullyShardedModule, torch.autograd.grad or an optimizer's step in backward): use "
                                  "backward(), and DistributedDataParallel over the other ranks")
            kinds.setdefault((grad.dtype, grad.device), []).append((hook.partial, grad[hook.partial.rows]))
        for (dtype, device), parts in kinds.items():
            sizes = [partial.num_sets * rows.numel() for partial, rows in parts]
            flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
            places = [piece.view(partial.num_sets, *rows.shape)[partial.set]
                      for piece, (partial, rows) in zip(flat.split(sizes), parts)]  # fmt: skip
            grads = [rows for _, rows in parts]
            torch._foreach_copy_(places, grads)
            dist.all_reduce(flat, group=self.group)  # 2 (t-1)/t * bytes of flat per rank
            torch._foreach_copy_(grads, places)
        self.is_settled = True


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, *, norm_type: float = 2.0) -> torch.Tensor:
    """Scale gradients so that the norm of the whole model's is ``max_norm`` (infinity: measure only) at most.

    Parts count on each rank, what all ranks have once. One all_reduce of one number; all ranks scale by one factor.

    Args:
        model: Made by ``apply_tensor_parallel``, or of the parallel layers, whose group it is.

    Returns:
        The norm before, the same on every rank.

    Raises:
        ConfigError: no module, or none of the parallel layers or several groups in it; there is no gradient;
            ``max_norm`` is negative, or ``norm_type`` not above 0.

    Example: parts with norms 3 and 4 on two ranks, 12 on both: 13, where summing all squares says 17.7
    """
    group = _group_of(model)
    rank, _ = place_in(group)
    grads = {}  # each with the elements of it that this rank counts
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.grad is None:
                continue
            counts = slice(None)
            if name not in getattr(module, "parameter_shards", {}):
                counts = slice(0 if rank else None)
            elif shared := getattr(module, "partial_gradients", {}).get(name):
                counts = slice(None if shared.is_first else shared.rows.start)
            grads[parameter] = parameter.grad, parameter.grad[counts]
    if not grads:
        raise ConfigError("there is no gradient to clip: call backward() first")
    whole, counted = zip(*grads.values())
    return clip_shards_(whole, max_norm, group=group, norm_type=norm_type, counted=counted)


def _group_of(model):
    modules = model.modules() if isinstance(model, nn.Module) else ()
    groups = {m.group for m in modules if hasattr(m, "parameter_shards") and hasattr(m, "group")}
    if len(groups) != 1:
        raise ConfigError(f"model is of type {type(model).__name__} with layers of {len(groups)} tensor-parallel "
                          "groups: give a module with some of one group; parameters do not say whether they are parts")
    return groups.pop()
