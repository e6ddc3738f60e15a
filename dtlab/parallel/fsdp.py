"""Fully sharded data parallel, ZeRO stage 3: each rank holds 1/n of every parameter, gradient and optimizer state.

A *unit* is a part of the model whose parameters become whole together, just before they are used, and go right after:

    forward   compute       [ unit 0 ][ unit 1 ][ unit 2 ]
              network   [g0][ g1 ]    [ g2 ]                    g: all_gather of a unit's parameters
    backward  compute       [ unit 2 ][  unit 1  ][  unit 0  ]
              network   [g2][ g1 ]    [ g0 ][ r2 ][ r1 ]      [ r0 ]  r: reduce_scatter of its gradients

Letters: n ranks of the group, Psi parameters (count), each unit's padded to a multiple of n.
"""
import contextlib
import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves, tree_map_only

from dtlab.errors import ConfigError
from dtlab.parallel.fsdp_units import Flat, close_parts, first_values, refuse_dtypes, refuse_what_is_lost, units_of
from dtlab.parallel.shared import (
    FlatShards,
    ShardedState,
    at_end_of_pass,
    broadcast_tensors,
    clip_shards_,
    is_dry,
    place_in,
    refuse_different_models,
    refuse_what_is_no_model,
)


class FullyShardedModule(nn.Module):
    """``module`` with parameters, gradients and so optimizer states sharded over the ranks of ``group``.

    ``parameters()`` are this rank's flat shards, one for each unit (more where a unit has frozen parameters or several
    dtypes): make the optimizer from them, after wrapping; any elementwise one is right. They are the masters: build the
    model in float32. Gradients, the mean over the ranks, stand in the shards' ``.grad``; each backward pass adds.

    Communication on each rank: 3 (n-1)/n Psi elements sent a step: all_gather in forward and in backward,
    reduce_scatter in backward; 2 of frozen parameters. Torch's ``fully_shard`` keeps the root's unit whole between
    forward and backward, which saves one gather of it.

    Memory on each rank: Psi / n parameters, gradients and each optimizer state. Whole at once are the root's unit and
    one more, with ``prefetch`` two, and the gradients of two.

    Args:
        module: The same on every rank; it starts with the values of the group's first rank. Changed in place: what is
            not whole is a placeholder in it, with shape and dtype, which says who it is when computed with.
        units: Submodules to gather one by one, or a class: all its instances; None: the entries of the outermost
            ``ModuleList``s. A parameter belongs to the innermost unit around it. The root's unit has all others and
            those that stand in several units (tied ones): it is whole through all of forward, and of backward.
        group: Ranks that share the model; None for all.
        prefetch: Begin to gather the unit that comes next before this one computes: forward in the order of the last
            forward pass, backward in the reverse one.
        reshard_after_forward: False keeps units whole from forward to backward: 2 (n-1)/n Psi elements sent.
        param_dtype: Dtype of whole parameters; floating-point inputs of units are cast to it. None: the shards'.
        reduce_dtype: Dtype in which gradients are summed over the ranks; None: that of whole parameters.
        device, init: For a module made on the meta device, which no rank has to hold whole: where the shards are, and
            ``init(name, shape)`` for the values of each parameter (a dry recording needs none).

    Raises:
        ConfigError: no module, without parameters, or wrapped already; ranks have different models, units or options;
            a unit that is no part of it or has no forward; a meta parameter without values; no floating-point dtype.
            Later: a parameter used outside of its unit's forward, added, frozen, moved or converted after wrapping, or
            changed between forward and backward; a gradient used inside of ``no_sync`` or after a backward pass that
            failed (``zero_grad()`` gives it up).

    All ranks call the same units in the same order, in backward too (none may detach an output that others do not):
    nothing tells units of equal size apart. A parameter without gradient counts as zero, if another one in its shard
    has one. ``state_dict``, ``load_state_dict`` and what else would see one rank's part for the whole are refused:
    norms of a shard's ``.grad``, ``parameters()`` of a part of ``module``, parameters from before wrapping.

    Buffers are each rank's own while it trains; what is saved or returned is the first rank's, which all get then.

    Not here: a loss whose backward needs parameters of a unit, if it is made of nothing that the unit returns (torch
    says that they "have been modified by an inplace operation": they are gone), ``create_graph=True``, hooks on
    parameters, options of the optimizer for some parameters of a unit, optimizers that need whole matrices or norms
    (Muon, Adafactor, LBFGS), loss scaling for float16.

    Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 7.2.2; Zhao et al. 2023, arXiv:2304.11277, section 3.
    """

    def __init__(self, module: nn.Module, *, units=None, group=None, prefetch: bool = True,
                 reshard_after_forward: bool = True, param_dtype: torch.dtype | None = None,
                 reduce_dtype: torch.dtype | None = None, device=None, init=None):  # fmt: skip
        super().__init__()
        refuse_what_is_no_model(module)
        refuse_dtypes(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        place_in(group)
        self._units = units_of(module, units)  # the root first
        refuse_different_models(module, group, units=[unit.name for unit in self._units], prefetch=prefetch,
                                reshard_after_forward=reshard_after_forward, param_dtype=param_dtype,
                                reduce_dtype=reduce_dtype)  # fmt: skip
        self.module, self.group, self.param_dtype = module, group, param_dtype
        self.prefetch, self.reshard_after_forward = prefetch, reshard_after_forward
        self._shard(functools.partial(first_values, device=device, init=init, group=group), reduce_dtype)
        for unit in self._units:
            before, after = (functools.partial(f, unit) for f in (self._before_forward, self._after_forward))
            unit.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            unit.module.register_forward_hook(after, with_kwargs=True, always_call=True)
        self._expected = list(self._units)  # in which order forward calls units: as the last time
        self._started, self._latest = [], None  # in this forward pass: units called; the last one that backward needs
        self._reducing = []  # gradients on their way: (shard, handle, this rank's part, what is sent)
        self._is_syncing, self._end_of_pass = True, None  # weakly, what autograd calls at the end of a backward pass

    @torch.no_grad()
    def _shard(self, values_of, reduce_dtype):
        """Give every parameter to a unit: the first rank's values, of which this rank keeps its part."""
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        refuse_what_is_lost(self.module)
        state = self.module.state_dict(keep_vars=True)
        self._keys = {key: names.get(value) for key, value in state.items()}  # tied: several a name; None: a buffer
        owners = {part: unit for unit in self._units for part in unit.module.modules()}  # inner ones come last
        places, kinds = {parameter: [] for parameter in names}, {}
        for part in self.module.modules():
            for attribute, parameter in part._parameters.items():
                if parameter is not None:
                    places[parameter].append((part, attribute))
        for parameter, its in places.items():
            units = {owners[part] for part, _ in its}
            unit = units.pop() if len(units) == 1 else self._units[0]
            kinds.setdefault((unit, parameter.requires_grad, parameter.dtype), []).append(parameter)
        self.shards = nn.ParameterDict()
        for (unit, trains, dtype), parameters in kinds.items():
            named = [(names[parameter], values_of(names[parameter], parameter)) for parameter in parameters]
            layout = FlatShards(named, group=self.group)
            whole = layout.flatten([values for _, values in named])
            if not is_dry(self.group):
                dist.broadcast(whole.view(torch.uint8), group_src=0, group=self.group)
            name = (unit.name.replace(".", "/") or "root") + ("" if trains else " frozen")
            name += f" {dtype}".replace("torch.", "") if name in self.shards else ""
            self.shards[name] = nn.Parameter(layout.shard_of(whole).clone(), requires_grad=trains)
            flat = Flat(layout, self.shards[name], self.param_dtype, reduce_dtype)
            unit.add(name, flat, [places[parameter] for parameter in parameters])
            for leaf in flat.leaves if trains else ():
                leaf.register_hook(self._begin_pass)  # where no output was used: a loss that a unit keeps
        self._share_buffers()
        self.state_dict = self.load_state_dict = close_parts(self.module)
        self._as_wrapped = self._described()

    def _share_buffers(self):
        broadcast_tensors(self.module.buffers(), group=self.group)

    # forward

    def forward(self, *args, **kwargs):
        """What ``module`` returns."""
        if _in_backward():  # computed again
            return self.module(*args, **kwargs)
        self._refuse_what_changed()
        self._free_all()
        self._started, self._latest = [], None
        try:
            outputs = self.module(*args, **kwargs)
            self._expected = self._started
            return outputs
        finally:
            if self._frees_after_forward():
                self._free_all()  # what was gathered in vain, or for a forward pass that failed

    def _frees_after_forward(self):
        return not _in_backward() and (self.reshard_after_forward or not torch.is_grad_enabled())

    def _free_all(self):
        for unit in self._units:
            unit.free()

    def _before_forward(self, unit, _module, args, kwargs):
        """Gather a unit, begin with the next one, and let this one's inputs tell when its backward has ended."""
        unit.gather()
        if not _in_backward():
            self._started.append(unit)
            expected = self._expected[len(self._started) - 1 :][:2]
            if self.prefetch and len(expected) == 2 and expected[0] is unit:
                expected[1].start()
        inputs = tree_map_only(torch.Tensor, self._as_input, (args, kwargs))
        if differentiable := _differentiable(inputs):
            register_multi_grad_hook(differentiable, lambda _: self._after_backward(unit))
        return inputs

    def _as_input(self, tensor):
        """An input as the unit sees it. Subtle: a view has a place in backward of its own, before that of its maker."""
        if self.param_dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(self.param_dtype)
        return tensor.view_as(tensor) if _differentiable(tensor) else tensor

    def _after_forward(self, unit, _module, args, kwargs, outputs):
        """Free a unit, and let its outputs tell when its backward begins."""
        for leaf in tree_leaves(outputs):
            if not isinstance(leaf, torch.Tensor) and _differentiable(list(getattr(leaf, "__dict__", {}).values())):
                raise ConfigError(f"{unit.name or 'the model'} returns tensors in a {type(leaf).__name__}, where they "
                                  "are not found: return tuples or dicts, or register the class in torch's pytree")
        unit.refuse_lost_changes()
        outputs = tree_map_only(torch.Tensor, unit.own, outputs)
        if self._frees_after_forward():
            unit.free()
        inputs = {id(tensor) for tensor in _differentiable((args, kwargs))}
        if made := [tensor for tensor in _differentiable(outputs) if id(tensor) not in inputs]:
            begin = functools.partial(self._before_backward, unit, self._latest, unit.versions())
            register_multi_grad_hook(made, begin, mode="any")
            self._latest = unit
        return outputs

    # backward

    def _before_backward(self, unit, following, versions, _gradient):
        """The gradient of an output is there: gather the unit again, and begin with the one that comes next."""
        self._begin_pass()
        unit.open += 1
        if versions != unit.versions():
            raise ConfigError(f"parameters of {unit.name or 'the root'} were changed between forward and backward (by "
                              "an optimizer's step?): backward would compute with other ones. Step after backward, or "
                              "run forward again")
        unit.gather()
        if self.prefetch and following is not None:
            following.start()

    def _begin_pass(self, _gradient=None):
        """Ask autograd to call ``_finish`` at the end of this backward pass. Until then no gradient is complete."""
        if self._end_of_pass is not None and self._end_of_pass() is not None:
            return  # it has begun
        trained = [flat for flat in self._flats().values() if flat.shard.requires_grad]
        if self._end_of_pass is not None and any(flat.is_pending() for flat in trained):
            raise ConfigError("the last backward pass failed on the way, so that some gradients are in and others not: "
                              "call zero_grad() and begin the step again")
        self._forget_failed_pass()
        for flat in trained:
            flat.begin_pass()
        self._end_of_pass = at_end_of_pass(self._finish)

    def _after_backward(self, unit):
        """The gradients of a call's inputs are there: it needs no parameters any more, and theirs are there too."""
        unit.open -= 1
        if unit.open <= 0:  # of several calls the last
            self._release(unit)

    @torch.no_grad()
    def _release(self, unit):
        """Free a unit and send its gradients."""
        unit.open = 0
        unit.free()
        for flat in unit.flats.values():
            if not self._is_syncing:
                flat.keep_gradients()
            elif sent := flat.send_gradients():
                self._take_reduced()  # those of the unit before had its time to travel: now their memory goes
                self._reducing.append((flat, *sent))

    def _take_reduced(self):
        """Wait for gradients on their way and add them to those that are there."""
        while self._reducing:
            flat, work, mine, _ = self._reducing.pop()
            work.wait()
            flat.add(mine)

    @torch.no_grad()
    def _finish(self):
        """At the end of a backward pass: the root, and others whose inputs have no gradient."""
        for unit in reversed(self._units):
            self._release(unit)
        self._take_reduced()
        for flat in self._flats().values():
            flat.end_pass()
        self._end_of_pass = None

    def _forget_failed_pass(self):
        """Drop what a backward pass that did not come to its end has on its way."""
        reducing, self._reducing, self._end_of_pass = self._reducing, [], None
        for _, work, *_ in reducing:
            with contextlib.suppress(RuntimeError):  # failed with another rank
                work.wait()
        for unit in self._units:
            unit.open = 0

    @contextlib.contextmanager
    def no_sync(self):
        """Backward inside keeps whole gradients on every rank, Psi elements; the first backward outside sends the sum.

        Divide each micro-batch's loss by the number of micro-batches, as without ranks. Without ``no_sync`` the result
        is the same: each micro-batch is sent, and a rank keeps Psi / n.
        """
        before, self._is_syncing = self._is_syncing, False
        try:
            yield
        finally:
            self._is_syncing = before

    # around a step

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, whole ones of ``no_sync`` too. The optimizer's does the same."""
        self._forget_failed_pass()
        for flat in self._flats().values():
            flat.drop()
        super().zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradient so that the norm of the whole one is ``max_norm`` at most; the norm before.

        One all_reduce of one number: all ranks get the same norm, NaN too, and scale by the same factor. Not here: the
        norm of a model that tensor parallelism cut, over its parts too.
        """
        grads = [shard.grad.detach() for shard in self.parameters() if shard.grad is not None]
        if not grads:
            raise ConfigError("there is no gradient to clip: call backward() outside no_sync() first")
        return clip_shards_(grads, max_norm, group=self.group, norm_type=norm_type)

    @contextlib.contextmanager
    def gathered(self, *modules: nn.Module):
        """Whole parameters in ``modules`` and what is inside (none given: in all), on every rank; all enter together.

        They are copies: right to read everywhere, also in forward and for the loss: their gradient goes to the shards
        by a reduce_scatter of its own. What is written into them is lost.

        Raises:
            ConfigError: a module that is no part of this one.

        Example:
            >>> with model.gathered(embedding):                                             # doctest: +SKIP
            ...     logits = F.linear(x, embedding.weight)
        """
        parts = {part for module in modules or [self.module] for part in module.modules()}
        if not parts <= set(self.module.modules()):
            raise ConfigError(f"gathered({', '.join(type(module).__name__ for module in modules)}): not all of these "
                              "are parts of the sharded module; give submodules of .module")
        units = [u for u in self._units if not u.is_shown and any(module in parts for module, _ in u.places)]
        before = [unit.resting for unit in units]
        try:
            for unit in units:
                views = {leaf: copy for flat in unit.flats.values() for leaf, copy in zip(flat.leaves, flat.copies())}
                unit.rest([views[leaf] for leaf in unit.leaves])
            yield
        finally:
            for unit, resting in zip(units, before):
                unit.rest(resting)

    @torch.no_grad()
    def full_state_dict(self) -> dict:
        """``module``'s own state dict with whole parameters, in the shards' dtype, on every rank; all call together."""
        whole = {}
        self._share_buffers()
        for flat in self._flats().values():
            whole.update(zip(flat.layout.names, flat.copies(flat.shard.dtype)))
        return {key: whole[name] if name else self.module.get_buffer(key) for key, name in self._keys.items()}

    def sharded_state(self, optimizer: torch.optim.Optimizer | None = None) -> ShardedState:
        """Shards, buffers and, with ``optimizer``, its states, for ``save_checkpoint`` and ``load_checkpoint``.

        Raises:
            ConfigError: the optimizer has other parameters than the shards.
        """
        mine, theirs = set(self.parameters()), [p for g in getattr(optimizer, "param_groups", ()) for p in g["params"]]
        if strangers := [p for p in theirs if p not in mine]:
            raise ConfigError(f"{len(strangers)} of the optimizer's {len(theirs)} parameters are no shards: make it "
                              "after wrapping, from the FullyShardedModule's parameters()")
        return ShardedState(functools.partial(self._fill, optimizer, set(theirs)))

    def _fill(self, optimizer, theirs, state):
        self._share_buffers()
        for name, flat in self._flats().items():
            state.add_shard(f"{name}.parameters", flat.shard, flat.layout)
            if flat.shard in theirs and flat.shard.requires_grad:
                state.add_states(name, optimizer, flat.shard, flat.layout)
        for name, buffer in self.module.named_buffers():
            state.add_whole(f"buffers.{name}", buffer)

    def _flats(self):
        return {name: flat for unit in self._units for name, flat in unit.flats.items()}

    def _described(self):
        kind_of = lambda p: f"{p.dtype} on {p.device}, requires_grad={p.requires_grad}"
        return {name: kind_of(parameter) for name, parameter in self.named_parameters()}

    def _refuse_what_changed(self):
        """Shards must be as they were wrapped, and modules without parameters of their own."""
        for unit in self._units:
            unit.refuse_others()
        now, then = self._described(), self._as_wrapped
        for name in now if now != then else ():
            if now[name] != then.get(name):
                raise ConfigError(f"{name} was added, frozen, moved or converted after the model was wrapped: "
                                  f"{now[name]}; then: {then.get(name, 'not there')}. Change the model first, then "
                                  "wrap it; param_dtype computes in another dtype")


def _differentiable(tree):
    """The tensors in it that autograd follows."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
            ] if torch.is_grad_enabled() else []


def _in_backward():
    return torch._C._current_graph_task_id() != -1
