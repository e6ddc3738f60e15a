"""The parts of ``fsdp``: a unit's flat shards, its parameters while they are whole, and what stands there else."""
import contextlib

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_leaves

from dtlab.errors import ConfigError
from dtlab.parallel.shared import all_gather_single, is_dry, reduce_scatter_single
from dtlab.record import tag

_SHARDED = ("is sharded here: 0 of its {} elements are at hand, because its unit, {}, is not in its forward. Gather it "
            "around this use, on every rank: with model.gathered(part): ..., where model is the FullyShardedModule and "
            "part the module that has the parameter. A weight that several units use can be registered in each instead "
            "(tied): then it is the root's, and whole throughout. Freeze and convert before wrapping")
_PENDING = ("is not complete: backward ran inside no_sync(), or failed on the way. Run one outside no_sync(), or give "
            "up what there is: zero_grad()")


class Placeholder(torch.Tensor):
    """Stands where a tensor is not at hand: its shape and dtype, no memory; ``text`` is the error of any use."""

    @staticmethod
    def __new__(cls, like, called, text):
        """A placeholder for the tensor ``like``."""
        kind = {"dtype": like.dtype, "device": like.device, "requires_grad": like.requires_grad}
        placeholder = torch.Tensor._make_wrapper_subclass(cls, like.shape, storage_size=0, **kind)
        placeholder.called, placeholder.text = called, text
        return placeholder

    def __repr__(self, **_):
        """What it is."""
        return f"<{self.called}, sharded>"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """What changes it would change nothing that counts."""
        if func.__name__ in ("__set__", "requires_grad_"):
            cls.__torch_dispatch__(func, types, args, kwargs)
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """Any operator: say who was used."""
        used = next(t for t in tree_leaves((args, kwargs)) if isinstance(t, Placeholder))
        raise ConfigError(f"{used.called} {list(used.shape)} {used.text} ({getattr(func, '__name__', func)})")


class _Refusing:
    """A tensor class: as any tensor, but for what it refuses."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """Any function; what it returns is a plain tensor."""
        cls.refuse(func)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class FormerParameter(_Refusing, nn.Parameter):
    """A parameter of the model from before it was wrapped, which somebody may still have."""

    @staticmethod
    def refuse(func):
        """To look for its gradient, as an optimizer does that would step nothing."""
        if getattr(func, "__self__", None) is torch.Tensor.grad:
            raise ConfigError("this is a parameter from before the model was wrapped, which nothing trains: make the "
                              "optimizer after wrapping, from the FullyShardedModule's parameters()")


class ShardedGradient(_Refusing, torch.Tensor):
    """A shard's gradient."""

    @staticmethod
    def refuse(func):
        """What needs the other ranks' parts, as torch.nn.utils.clip_grad_norm_ and GradScaler do."""
        if "norm" in func.__name__ or "non_finite" in func.__name__:
            raise ConfigError(f"{func.__name__} of a shard's gradient sees this rank's part only: each rank would find "
                              "another number, and scale by another factor. Use clip_grad_norm_(max_norm) of the "
                              "FullyShardedModule on all ranks (to look at a part: .grad.detach())")


class Flat:
    """Parameters of a unit, of one dtype, all trained or all frozen: a shard, and the whole while it is needed.

    Attributes:
        shard: [padded / n]: the master, what the optimizer gets.
        whole: [padded]: has memory only while the unit is whole. One storage for ever: what autograd saved for
            backward sees it filled again.
        leaves: ``whole`` in the parameters' shapes: what modules compute with, and where autograd leaves gradients.
        summed: [padded], in reduce_dtype: whole gradients of this rank alone, that wait to be sent. Or None.
        grad: What was reduced, while ``pending`` is the shard's ``.grad``: until no more is to come.
    """

    def __init__(self, layout, shard, param_dtype, reduce_dtype):
        self.layout, self.shard = layout, shard
        param_dtype, reduce_dtype = (param_dtype, reduce_dtype) if shard.is_floating_point() else (None, None)
        dtype = param_dtype or shard.dtype
        self.whole = tag(torch.empty(layout.padded, dtype=dtype, device=shard.device), "other")
        self.nbytes, self.reduce_dtype = self.whole.nbytes, reduce_dtype or dtype
        # Subtle: .data, so that filling the whole again is no in-place change of what autograd saved
        self.leaves = [view.data.requires_grad_(shard.requires_grad) for view in layout.views(self.whole)]
        self._versions = [torch.autograd._unsafe_preserve_version_counter(leaf) for leaf in self.leaves]
        self.summed = self.grad = None
        others = f" and {len(layout.names) - 1} more" if layout.names[1:] else ""
        self.pending = Placeholder(shard.detach(), f"the gradient of {layout.names[0]}{others}", _PENDING)
        self.free()

    def start(self):
        """Begin to gather; returns the call's handle."""
        self.whole.untyped_storage().resize_(self.nbytes)
        for version in self._versions:
            version.__exit__()
        mine = self.shard.detach().to(self.whole.dtype)
        # all_gather, (n-1)/n * bytes of the unit per rank
        return all_gather_single(self.whole, mine, group=self.layout.group, async_op=True)

    def free(self):
        """Give the memory of the whole back. Subtle: by another version number autograd sees that it is gone."""
        self.whole.untyped_storage().resize_(0)
        for leaf in self.leaves:
            increment_version(leaf)

    def keep_gradients(self, category="grads"):
        """Add the leaves' gradients to ``summed``, in ``reduce_dtype``: 16-bit sums lose what is small."""
        if all(leaf.grad is None for leaf in self.leaves):
            return
        if self.summed is None:
            zeros = torch.zeros(self.layout.padded, dtype=self.reduce_dtype, device=self.shard.device)
            self.summed = tag(zeros, category)
        for leaf, view in zip(self.leaves, self.layout.views(self.summed)):
            if leaf.grad is not None:
                view += leaf.grad  # a sparse one too
                leaf.grad = None

    def send_gradients(self):
        """Begin to average the gradients that are whole: (handle, this rank's part, what is sent), or None."""
        self.keep_gradients("other")
        flat, self.summed = self.summed, None
        return None if flat is None else self.reduce(flat)

    def reduce(self, flat):
        """Begin to average a flat gradient over the ranks, which changes it."""
        flat.div_(self.layout.dp_size)  # before the sum: a float16 above 65,504 is infinite
        mine = torch.empty_like(self.layout.shard_of(flat))
        # reduce_scatter, (n-1)/n * bytes of the unit per rank
        return reduce_scatter_single(mine, flat, group=self.layout.group, async_op=True), mine, flat

    def add(self, mine):
        """Add this rank's part of a mean gradient to what is there."""
        holder = self if self.is_pending() else self.shard
        if holder.grad is None:
            mine = tag(mine.to(self.shard.dtype), "grads")
            holder.grad = mine.as_subclass(ShardedGradient) if type(mine) is torch.Tensor else mine  # else: dry
        else:
            holder.grad += mine

    def is_pending(self):
        """Whether the gradient is not complete, and nobody has given it up (by the optimizer's ``zero_grad``)."""
        return self.shard.grad is self.pending

    def begin_pass(self):
        """A backward pass begins: it adds to what waits, or to what stands in ``.grad``."""
        if not self.is_pending():
            self.drop()
            self.grad, self.shard.grad = self.shard.grad, self.pending

    def end_pass(self):
        """It has ended: show the gradient, unless whole ones of ``no_sync`` wait to be sent."""
        if self.summed is None and self.is_pending():
            self.shard.grad, self.grad = self.grad, None

    def drop(self):
        """Forget what is not complete."""
        self.summed = self.grad = None
        for leaf in self.leaves:
            leaf.grad = None
        if self.is_pending():
            self.shard.grad = None

    def copies(self, dtype=None):
        """The parameters gathered into memory of their own, differentiable."""
        return self.layout.views(_Gather.apply(self.shard, self, dtype or self.whole.dtype))


class _Gather(torch.autograd.Function):
    """A shard -> the whole; of the gradient of the whole the mean over the ranks of this rank's part is added."""

    @staticmethod
    def forward(ctx, shard, flat, dtype):
        """[padded / n] -> [padded]."""
        ctx.flat, whole = flat, torch.empty(flat.layout.padded, dtype=dtype, device=shard.device)
        all_gather_single(whole, shard.to(dtype), group=flat.layout.group)
        return whole

    @staticmethod
    def backward(ctx, gradient):
        """[padded]."""
        work, mine, _ = ctx.flat.reduce(gradient.to(ctx.flat.reduce_dtype, copy=True))
        work.wait()
        ctx.flat.add(mine)
        return None, None, None


class Unit:
    """A part of the model whose parameters become whole together. It knows nothing of other units.

    Attributes:
        flats: Name -> Flat.
        places: (module, attribute) of each use of each parameter. ``leaves`` and ``resting``, one for each place, are
            what stands there while the unit computes, and else.
        is_filled: Whole, or on the way. is_shown: the leaves are in their places.
        open: Calls whose backward has begun and not ended.
    """

    def __init__(self, name, module):
        self.name, self.module, self.flats = name, module, {}
        self.places, self.leaves, self.resting, self._works = [], [], [], []
        self.is_filled, self.is_shown, self.open = False, False, 0

    def add(self, name, flat, places):
        """Take a flat's parameters out of their modules."""
        self.flats[name] = flat
        for leaf, full_name, its in zip(flat.leaves, flat.layout.names, places):
            for module, attribute in its:
                former = module._parameters.pop(attribute)
                self.places.append((module, attribute))
                self.leaves.append(leaf)
                text = _SHARDED.format(leaf.numel(), self.name or "the root")
                self.resting.append(Placeholder(leaf, full_name, text))
            former.data, former.__class__ = former.new_empty(0), FormerParameter  # it may live on, its memory not
        self.show(self.resting)

    def show(self, tensors):
        """Put a tensor in each place. By setattr: an LSTM keeps a list of its weights, and follows."""
        for (module, attribute), tensor in zip(self.places, tensors):
            setattr(module, attribute, tensor)

    def refuse_lost_changes(self):
        """Raise ConfigError if a whole parameter was changed in place: its memory goes."""
        named = [item for flat in self.flats.values() for item in zip(flat.layout.names, flat.leaves)]
        if changed := [name for name, leaf in named if leaf._version]:
            raise ConfigError(f"{changed[0]} was changed in place in forward (by nn.Embedding(max_norm=)?), which "
                              "would be lost: only the optimizer may change parameters")

    def refuse_others(self):
        """Raise ConfigError if something else stands in a place than what was put there."""
        for (module, attribute), tensor in zip(self.places, self.leaves if self.is_shown else self.resting):
            if getattr(module, attribute, None) is not tensor:
                raise ConfigError(f"{attribute} of a {type(module).__name__} in {self.name or 'the root'} was replaced "
                                  "after the model was wrapped (to tie it?). Change the model first, then wrap it")

    def rest(self, tensors):
        """What stands in the places from now on while the unit does not compute."""
        self.resting = tensors
        if not self.is_shown:
            self.show(tensors)

    def start(self):
        """Begin to gather, unless that was done."""
        if not self.is_filled:
            self.is_filled, self._works = True, [flat.start() for flat in self.flats.values()]

    def gather(self):
        """Parameters are whole and in their places when this returns."""
        self.start()
        self._wait()
        if not self.is_shown:
            self.is_shown = True
            self.show(self.leaves)

    def free(self):
        """Give the memory of whole parameters back."""
        with contextlib.suppress(RuntimeError):  # a call that failed with another rank, which has said so
            self._wait()
        if self.is_shown:
            self.show(self.resting)
        if self.is_filled:
            for flat in self.flats.values():
                flat.free()
        self.is_filled = self.is_shown = False

    def _wait(self):
        works, self._works = self._works, []
        for work in works:
            work.wait()  # on CUDA only the stream waits, not the program

    def versions(self):
        """Other numbers after every change of a parameter."""
        return [flat.shard._version for flat in self.flats.values()]

    def own(self, tensor):
        """A tensor that the unit returns, copied if it is a piece of the whole parameters, whose memory will go."""
        wholes = [flat.whole.untyped_storage()._cdata for flat in self.flats.values()]
        is_ours = tensor.layout is torch.strided and tensor.untyped_storage()._cdata in wholes
        return tensor.clone() if is_ours else tensor


def units_of(module, units):
    """The root's unit, then the others, outer ones before inner ones."""
    if units is None:
        units = _entries(module)
    elif isinstance(units, type):
        units = [part for part in module.modules() if isinstance(part, units) and _has_forward(part)]
    chosen, names = {module, *units}, {part: name for name, part in module.named_modules()}
    for part in chosen:
        if part not in names:
            raise ConfigError(f"units: {type(part).__name__} is no submodule of the module; give parts of it")
        if not _has_forward(part):
            raise ConfigError(f"unit {names[part] or 'the module itself'}: {type(part).__name__} has no forward, so it "
                              "is never called, and never gathered: give its entries")
    return [Unit(name, part) for part, name in names.items() if part in chosen]


def _has_forward(part):
    return getattr(part.forward, "__func__", None) is not nn.Module.forward


def _entries(module):
    """Entries of the outermost ModuleLists and ModuleDicts."""
    for part in module.children():
        if not _has_forward(module) and _has_forward(part):
            yield part
        else:
            yield from _entries(part)


def close_parts(module):
    """Let what would change or read a module's parameters, and finds none there, say so."""

    def refuse(*_, **__):
        raise ConfigError("the parameters of this module are in the shards of a FullyShardedModule: ask that one for "
                          "parameters(), full_state_dict() or sharded_state(). Freeze, convert, move or load into the "
                          "module before it is wrapped")

    for part in module.modules():
        part.named_parameters = part.state_dict = part.load_state_dict = part._apply = refuse
    return refuse


def refuse_what_is_lost(module):
    """Parameters must be there, and without hooks: whole gradients are on no rank."""
    named = list(module.named_parameters())
    if not named:
        raise ConfigError(f"module ({type(module).__name__}) has no parameters: there is nothing to shard")
    if hooked := [name for name, parameter in named if parameter._backward_hooks]:
        raise ConfigError(f"{hooked[0]} has a hook (register_hook), which would be lost with the parameter: remove it, "
                          "and change the loss or the shards' .grad instead")


def refuse_dtypes(**dtypes):
    """They must be of floating-point numbers."""
    for name, dtype in dtypes.items():
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigError(f"{name} ({dtype!r}) must be a floating-point dtype: torch.bfloat16, torch.float32 ...")


def first_values(name, parameter, *, device, init, group):
    """A parameter's values; those of a meta one come from ``init``."""
    if not parameter.is_meta:
        return parameter
    if device is None or init is None and not is_dry(group):
        raise ConfigError(f"{name} is on the meta device and has no values: pass device= and init=lambda name, shape: "
                          "..., for example dtlab.models.init.full_parameter with a seed")
    values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    return values if init is None else values.copy_(init(name, parameter.shape))
