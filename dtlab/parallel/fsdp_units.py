"""The parts of ``fsdp``: a unit's flat shards, its parameters while they are whole, and what stands there else."""
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from dtlab.errors import ConfigError
from dtlab.parallel.shared import all_gather_single, is_dry, reduce_scatter_single
from dtlab.record import tag

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # never called


class Placeholder(torch.Tensor):
    """Stands in a module for a parameter that is not whole: its shape and dtype, no memory, no computing."""

    @staticmethod
    def __new__(cls, like, name, unit):
        """A placeholder for the tensor ``like``."""
        kind = {"dtype": like.dtype, "device": like.device, "requires_grad": like.requires_grad}
        placeholder = torch.Tensor._make_wrapper_subclass(cls, like.shape, storage_size=0, **kind)
        placeholder.called, placeholder.unit = name, unit
        return placeholder

    def __repr__(self, **_):
        """What it is."""
        return f"<{self.called}, sharded>"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """Any operator: say who was used."""
        used = next(t for t in tree_leaves((args, kwargs)) if isinstance(t, Placeholder))
        raise ConfigError(
            f"{used.called} {list(used.shape)} is sharded here: 0 of its {used.numel()} elements are at hand, because "
            f"its unit, {used.unit}, is not in its forward; {func} needs them. Gather it around this use, on every "
            "rank: with model.gathered(part): ..., where model is the FullyShardedModule and part the module that has "
            "the parameter. A weight that several units use can be registered in each instead (tied): then it is the "
            "root's, and whole throughout")


class Flat:
    """Parameters of a unit, of one dtype, all trained or all frozen: a shard, and the whole while it is needed.

    Attributes:
        shard: [padded / n]: the master, what the optimizer gets.
        whole: [padded]: has memory only while the unit is whole. One storage for ever: what autograd saved for
            backward sees it filled again.
        leaves: ``whole`` in the parameters' shapes: what modules compute with, and where autograd leaves gradients.
    """

    def __init__(self, layout, shard, param_dtype, reduce_dtype):
        self.layout, self.shard = layout, shard
        dtype = param_dtype if param_dtype and shard.is_floating_point() else shard.dtype
        self.whole = tag(torch.empty(layout.padded, dtype=dtype, device=shard.device), "other")
        self.nbytes, self.reduce_dtype = self.whole.nbytes, reduce_dtype or dtype
        # Subtle: .data, so that filling the whole again is no in-place change of what autograd saved
        self.leaves = [view.data.requires_grad_(shard.requires_grad) for view in layout.views(self.whole)]
        self.free()

    def start(self):
        """Begin to gather; returns the call's handle."""
        self.whole.untyped_storage().resize_(self.nbytes)
        mine = self.shard.detach().to(self.whole.dtype)
        # all_gather, (n-1)/n * bytes of the unit per rank
        return all_gather_single(self.whole, mine, group=self.layout.group, async_op=True)

    def free(self):
        """Give the memory of the whole back."""
        self.whole.untyped_storage().resize_(0)

    def send_gradients(self):
        """Take the leaves' gradients and begin to average them: (handle, this rank's part, what is sent), or None."""
        grads = [leaf.grad for leaf in self.leaves]
        if all(grad is None for grad in grads):
            return None
        flat = torch.empty(self.layout.padded, dtype=self.reduce_dtype, device=self.shard.device)
        views = self.layout.views(flat)
        flat[self.layout.numel :].zero_()
        for view, grad in zip(views, grads):
            view.zero_() if grad is None else view.copy_(grad)
        self.drop_gradients()
        return self.reduce(flat)

    def reduce(self, flat):
        """Begin to average a flat gradient over the ranks, which changes it."""
        flat.div_(self.layout.dp_size)  # before the sum: a float16 above 65,504 is infinite
        mine = torch.empty_like(self.layout.shard_of(flat))
        # reduce_scatter, (n-1)/n * bytes of the unit per rank
        return reduce_scatter_single(mine, flat, group=self.layout.group, async_op=True), mine, flat

    def drop_gradients(self):
        """Forget whole gradients."""
        for leaf in self.leaves:
            leaf.grad = None

    def copies(self, dtype=None):
        """The parameters gathered into memory of their own, differentiable."""
        return self.layout.views(_Gather.apply(self.shard, self, dtype or self.whole.dtype))


class _Gather(torch.autograd.Function):
    """A shard -> the whole; the gradient of the whole -> the mean over the ranks of this rank's part of it."""

    @staticmethod
    def forward(ctx, shard, flat, dtype):
        """[padded / n] -> [padded]."""
        ctx.flat, whole = flat, torch.empty(flat.layout.padded, dtype=dtype, device=shard.device)
        all_gather_single(whole, shard.to(dtype), group=flat.layout.group)
        return whole

    @staticmethod
    def backward(ctx, gradient):
        """[padded] -> [padded / n]."""
        work, mine, _ = ctx.flat.reduce(gradient.to(ctx.flat.reduce_dtype, copy=True))
        work.wait()
        return mine.to(ctx.flat.shard.dtype), None, None


class Unit:
    """A part of the model whose parameters become whole together. It knows nothing of other units.

    Attributes:
        flats: Name -> Flat.
        places: (module, attribute) of each use of each parameter. ``leaves`` and ``resting``, one for each place, are
            what stands there while the unit computes, and else.
        is_filled: Whole, or on the way. is_shown: the leaves are in their places.
        open: Calls whose backward has begun and not ended.
        keeps: Whether whole gradients of a ``no_sync`` wait in the leaves.
    """

    def __init__(self, name, module):
        self.name, self.module, self.flats = name, module, {}
        self.places, self.leaves, self.resting, self._works = [], [], [], []
        self.is_filled, self.is_shown, self.open, self.keeps = False, False, 0, False

    def add(self, name, flat, places):
        """Take a flat's parameters out of their modules."""
        self.flats[name] = flat
        for leaf, full_name, its in zip(flat.leaves, flat.layout.names, places):
            for module, attribute in its:
                del module._parameters[attribute]
                self.places.append((module, attribute))
                self.leaves.append(leaf)
                self.resting.append(Placeholder(leaf, full_name, self.name or "the root"))
        self.show(self.resting)

    def show(self, tensors):
        """Put a tensor in each place. By setattr: an LSTM keeps a list of its weights, and follows."""
        for (module, attribute), tensor in zip(self.places, tensors):
            setattr(module, attribute, tensor)

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
        self._wait()
        if self.is_shown:
            self.show(self.resting)
        if self.is_filled:
            for flat in self.flats.values():
                flat.free()
        self.is_filled = self.is_shown = False

    def _wait(self):
        for work in self._works:
            work.wait()  # on CUDA only the stream waits, not the program
        self._works = []

    def drop_gradients(self):
        """Forget whole gradients, those of ``no_sync`` too."""
        for flat in self.flats.values():
            flat.drop_gradients()
        self.keeps = False

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
        units = [part for part in module.modules() if isinstance(part, units)]
    chosen, names = {module, *units}, {part: name for name, part in module.named_modules()}
    if strangers := [type(part).__name__ for part in chosen if part not in names]:
        raise ConfigError(f"units: {', '.join(strangers)} is no submodule of the module; give parts of it")
    return [Unit(name, part) for part, name in names.items() if part in chosen]


def _entries(module):
    """Entries of the outermost ModuleLists and ModuleDicts."""
    for part in module.children():
        if isinstance(module, _CONTAINERS) and not isinstance(part, _CONTAINERS):
            yield part
        else:
            yield from _entries(part)


def first_values(name, parameter, *, device, init, group):
    """A parameter's values; those of a meta one come from ``init``."""
    if not parameter.is_meta:
        return parameter
    if device is None or init is None and not is_dry(group):
        raise ConfigError(f"{name} is on the meta device and has no values: pass device= and init=lambda name, shape: "
                          "..., for example dtlab.models.init.full_parameter with a seed")
    values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    return values if init is None else values.copy_(init(name, parameter.shape))
