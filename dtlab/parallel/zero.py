"""ZeRO stages 1 and 2: each rank computes with the whole model, updates its part only and keeps states for no more.

    backward   bucket by bucket, from the model's end: reduce_scatter; this rank gets the mean gradient of its shard
    step       the optimizer updates this rank's shard; all_gather gives every rank the shards of all

    a rank's memory   parameters   gradients    optimizer states      Psi parameters on n ranks, each bucket padded
    data parallel     Psi          Psi          K Psi                 to a multiple of n; all three send
    stage 1           Psi          Psi          K Psi / n             2 (n-1)/n Psi elements a step
    stage 2           Psi          Psi / n      K Psi / n
"""
import contextlib
import functools
import weakref
import zlib

import torch
import torch.distributed as dist
from torch import nn

from dtlab.errors import ConfigError
from dtlab.parallel.shared import (
    ShardedState,
    as_text,
    at_end_of_pass,
    broadcast_tensors,
    clip_shards_,
    is_dry,
    place_in,
    refuse_different_models,
    refuse_what_is_no_model,
    split_by_bytes,
)
from dtlab.parallel.zero_buckets import (
    ShardedBucket,
    groups_of,
    refuse_master_dtype,
    refuse_what_is_not_elementwise,
    some,
)
from dtlab.validate import at_least

_OTHER_STAGES = {0: "stage 0 shards nothing: use DistributedDataParallel and a plain optimizer",
                 3: "stage 3 shards the parameters too: use FullyShardedModule and a plain optimizer"}  # fmt: skip


class ZeroOptimizer:
    """An elementwise optimizer whose states are shared out over the ranks of ``group``, for their mean gradient.

    It takes the place of DistributedDataParallel and the optimizer together: call ``module`` itself, ``backward()``,
    then ``step()`` of this object. ``step()`` uses the gradients up; ``zero_grad()`` forgets them without a step.

    Parameters become views of flat tensors, so that nothing is copied when shards are gathered. ``state_dict()`` and
    ``load_state_dict()`` of ``module`` work as before (load on every rank: each writes its part only) and ``deepcopy``
    gives a model of its own; after ``.to()``, ``.half()`` or another wrapper ``step()`` says that the parameters have
    left: convert first, then wrap.

    A parameter without gradient counts as zero (a plain optimizer passes over it; here momentum and weight decay go
    on). After backward ``.grad`` holds the mean only within this rank's shard (stage 1), or shows NaN and has no memory
    (stage 2), and must stay as it is: instead of ``torch.nn.utils.clip_grad_norm_`` and ``module.zero_grad()`` use
    ``clip_grad_norm_`` and ``zero_grad`` of this object; the others end in an error.

    Communication on each rank, n ranks, P bytes of trainable parameters with padding (a tied one counts once):
    reduce_scatter in backward and all_gather in ``step()``, (n-1)/n P bytes sent by each, two calls a bucket. Stage 2
    reduces in every backward pass. Plus one all_reduce of 8 bytes a step, by which all ranks know of a NaN and of other
    options elsewhere, and, if the module has buffers, one broadcast of them a step: as in data parallel, all ranks
    follow the first one's.

    Args:
        module: Its parameters are registered in about the order in which forward uses them.
        optimizer_class: Of torch or your own. Each element's update needs that element only, and parameters may be
            updated one by one: this is tried on four numbers.
        zero_stage: 1 shards the optimizer's states, 2 gradients too.
        group: Ranks that hold a replica each; None for all.
        bucket_bytes: Largest bucket of more than one parameter. Stage 2 holds two buckets' gradients beside its shards.
        overlap: A bucket's reduce_scatter runs while backward goes on, and its all_gather while the next bucket is
            updated (the next forward pass waits for all of them). False waits for each.
        master_dtype: Of the shards that the optimizer updates; None: float32 for 16-bit parameters, else their own.
        param_groups: Options for some parameters, as torch's: ``[{"params": [...], "weight_decay": 0.1}, ...]``; each
            has buckets of its own. None: all have ``optimizer_kwargs``.
        optimizer_kwargs: For ``optimizer_class``.

    Attributes:
        optimizer: The optimizer of this rank's shards, for a learning rate scheduler.

    Raises:
        ConfigError: ranks have different models or options; nothing to train; a stage that is not here; an optimizer
            that needs whole matrices, norms or a closure (Muon, Adafactor, LBFGS); in backward: a sparse gradient, or
            one that comes after its bucket was reduced.

    Not here: loss scaling for float16 (use bfloat16).

    Source: Rajbhandari et al. 2020, arXiv:1910.02054, sections 5 (stages) and 7 (communication).
    """

    def __init__(self, module: nn.Module, optimizer_class, *, zero_stage: int = 1, group=None,
                 bucket_bytes: int = 25 * 2**20, overlap: bool = True, master_dtype: torch.dtype | None = None,
                 param_groups: list | None = None, **optimizer_kwargs):  # fmt: skip
        at_least("bucket_bytes", bucket_bytes, 1)
        if zero_stage not in (1, 2):
            raise ConfigError(f"zero_stage ({zero_stage!r}) must be 1 or 2: "
                              f"{_OTHER_STAGES.get(zero_stage, 'there is no such stage')}")
        refuse_what_is_no_model(module)
        if not callable(optimizer_class):
            raise ConfigError(f"give the optimizer's class and its options, not {type(optimizer_class).__name__}(...)")
        place_in(group)
        self.module, self.zero_stage, self.group, self.overlap = module, zero_stage, group, overlap
        groups = groups_of(module, param_groups)
        name_of = {id(p): name for name, p in module.named_parameters()}
        refuse_different_models(module, group, zero_stage=zero_stage, bucket_bytes=bucket_bytes,
                                master_dtype=master_dtype, optimizer_class=getattr(optimizer_class, "__name__", ""),
                                optimizer_kwargs=optimizer_kwargs,
                                param_groups=[(options, [name_of[id(p)] for p in ps]) for options, ps in groups])
        make_optimizer = functools.partial(optimizer_class, **optimizer_kwargs)
        for options, parameters in groups:
            refuse_master_dtype(master_dtype, parameters)
            if not is_dry(group):
                refuse_what_is_not_elementwise(make_optimizer, options, parameters[0].device)
        broadcast_tensors([*module.parameters(), *module.buffers()], group=group)
        self.buckets = []  # in the order in which backward completes them
        masters = self._make_buckets(groups, bucket_bytes, master_dtype, name_of)
        self.optimizer = make_optimizer([{**o, "params": its} for (o, _), its in zip(groups, masters)])
        self._is_syncing, self._pass_ended = True, True
        self._num_started, self._in_flight, self._end_of_pass = 0, [], None
        self._hook_parameters()

    def _make_buckets(self, groups, bucket_bytes, master_dtype, name_of):
        """Buckets of one group's parameters each; returns the groups' masters."""
        place = {id(p): i for i, p in enumerate(reversed(list(self.module.parameters())))}  # in backward
        parts = [(i, part) for i, (_, parameters) in enumerate(groups)
                 for part in split_by_bytes(sorted(parameters, key=lambda p: place[id(p)]), bucket_bytes)]  # fmt: skip
        masters = [[] for _ in groups]
        for i, part in sorted(parts, key=lambda item: place[id(item[1][-1])]):
            named = [(name_of[id(p)], p) for p in part]
            self.buckets.append(ShardedBucket(named, self.group, self.zero_stage, master_dtype))
            masters[i].append(self.buckets[-1].master)
        return masters

    @property
    def param_groups(self) -> list:
        """The optimizer's groups, whose options (``lr``) may be changed between steps; their params are shards."""
        return self.optimizer.param_groups

    # backward

    def _hook_parameters(self):
        """Call ``_on_gradient`` for each gradient. Hooks hold this object weakly, and go when it goes."""
        hooks, me = [], weakref.ref(self)
        for bucket in self.buckets:
            for position, parameter in enumerate(bucket.parameters):
                hook = functools.partial(_on_gradient, me, bucket, position)
                hooks.append(parameter.register_post_accumulate_grad_hook(hook))
                node = torch.autograd.graph.get_gradient_edge(parameter).node  # adds to .grad
                bucket.nodes.append(node)  # which would go otherwise, with its hook
                hooks.append(node.register_prehook(functools.partial(_before_gradient, me, bucket, parameter)))
        weakref.finalize(self, lambda: [hook.remove() for hook in hooks])

    def _gradient_is_there(self, bucket, position):
        """One gradient is complete: start what is complete with it, always in the order of the buckets."""
        parameter, name = bucket.parameters[position], bucket.shards.names[position]
        if parameter.grad.layout is not torch.strided:
            raise ConfigError(f"{name} has a sparse gradient, which fits no flat tensor: for nn.Embedding use "
                              "sparse=False")
        is_reduced = self._is_syncing or self.zero_stage == 2
        if is_reduced and (self._end_of_pass is None or self._end_of_pass() is None):
            self._begin()
        if position in bucket.ready or self.zero_stage == 1 and bucket.grad is not None:
            raise ConfigError(f"{name} got another gradient after the first was sent: put every backward pass of a "
                              "step but the last into no_sync(), or use zero_stage=2; after each step call step() or "
                              "zero_grad() of this object; torch.utils.checkpoint needs use_reentrant=False")
        bucket.take(position)
        if is_reduced:
            bucket.ready.add(position)
            while self._num_started < len(self.buckets) and self.buckets[self._num_started].is_full():
                self._start_next()

    def _begin(self):
        """With the first gradient of a backward pass: ask autograd to call ``_finish`` at its end."""
        self._refuse_broken_pass()
        self._pass_ended, self._num_started = False, 0
        self._end_of_pass = at_end_of_pass(self._finish)

    def _start_next(self):
        if self.zero_stage == 2:
            self._land()  # one bucket is on its way while the next one fills: no more are held
        bucket = self.buckets[self._num_started]
        self._num_started += 1
        self._in_flight.append((bucket, *bucket.start()))
        if not self.overlap:
            self._land()

    def _land(self):
        for bucket, work, mean in self._in_flight:
            bucket.land(work, mean)
        self._in_flight = []

    @torch.no_grad()
    def _finish(self):
        """At the end of backward: start what is left and wait for all of it."""
        self._end_of_pass = None  # a gradient that comes now is of another pass
        while self._num_started < len(self.buckets):
            self._start_next()
        self._land()
        for bucket in self.buckets:
            bucket.ready.clear()
        self._pass_ended = True

    @contextlib.contextmanager
    def no_sync(self):
        """Stage 1: backward inside only adds to ``.grad``; the first one outside sends the sum.

        Stage 2 has no whole gradients to add to, and no_sync changes nothing: every backward pass is reduced and added
        to the shards. The result is the same; m micro-batches send their gradients m times. 16-bit gradients are added
        in 16 bits by stage 1, as torch does (256 + 1 = 256 in bfloat16), in the masters' dtype by stage 2.

        Divide each micro-batch's loss by the number of micro-batches, as without ranks.
        """
        before, self._is_syncing = self._is_syncing, False
        try:
            yield
        finally:
            self._is_syncing = before

    # a step

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Update this rank's shards and gather everyone's: then all ranks have the same new parameters.

        Raises:
            ConfigError: no gradient was reduced; the last backward pass failed; parameters have left the flat tensors;
                ``.grad`` was changed (stage 1); ranks have different options in ``param_groups``.
            FloatingPointError: on every rank, if a gradient is NaN or infinite on any. Nothing was updated;
                ``zero_grad()`` skips the step.
        """
        if closure is not None:
            raise ConfigError("step(closure) would compute gradients inside the step: call backward() before step()")
        self._refuse_what_left()
        self._refuse_other_ranks(self._mean_gradients())
        self._pass_ended = False  # until all is updated: no part of it twice
        for bucket in reversed(self.buckets):  # as forward uses them
            bucket.say_what_it_is()
            bucket.update(self.optimizer)
            self._in_flight.append((bucket, bucket.gather(), None))
            if not self.overlap:
                self._in_flight[-1][1].wait()
        for _, work, _ in self._in_flight:
            work.wait()
        self._in_flight = []
        self.zero_grad()
        broadcast_tensors(self.module.buffers(), group=self.group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients: ``.grad`` is None afterwards, whatever ``set_to_none`` is. Stage 2 frees their memory.
        """
        failed, self._in_flight, self._pass_ended = self._in_flight, [], True
        for _, work, _ in failed:  # of a pass or step that failed: it still writes
            with contextlib.suppress(RuntimeError):  # with the ranks that it needs
                work.wait()
        for bucket in self.buckets:
            bucket.grad = None
            bucket.ready.clear()
            bucket.forget_whole_gradients()
            if self.zero_stage == 2:
                bucket.grads = None

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients so that the norm of the whole gradient is ``max_norm`` at most; the norm before.

        One all_reduce of one number: all ranks get the same norm, and scale by the same factor. Not here: the norm of a
        model that tensor parallelism cut, over its parts too.
        """
        norm = clip_shards_(self._mean_gradients(), max_norm, group=self.group, norm_type=norm_type)
        for bucket in self.buckets:
            bucket.seal()
        return norm

    def _mean_gradients(self):
        """This rank's shards of the mean gradient, bucket by bucket."""
        self._refuse_broken_pass()
        if self.buckets[0].grad is None:
            raise ConfigError("no gradient was reduced since the last step: call backward() outside no_sync() first")
        for bucket in self.buckets:
            bucket.refuse_changes()
        return [bucket.grad for bucket in self.buckets]

    # checkpoints

    def sharded_state(self) -> ShardedState:
        """What ``save_checkpoint`` takes: masters, the optimizer's states, buffers and frozen parameters.

        Not in it: options such as ``lr``, gradients, random number generators.
        """
        return ShardedState(self._fill)

    def _fill(self, state):
        for i, bucket in enumerate(self.buckets):
            bucket.follow()
            state.add_shard(f"{i}.parameters", bucket.master, bucket.shards)
            state.add_states(str(i), self.optimizer, bucket.master, bucket.shards)
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.Tensor) and not tensor.requires_grad:
                state.add_whole(f"whole.{name}", tensor)
        state.after_load.append(self._gather)

    @torch.no_grad()
    def _gather(self):
        for bucket in self.buckets:
            bucket.gather().wait()

    # refusals

    def _refuse_broken_pass(self):
        if not self._pass_ended:
            raise ConfigError("the last backward pass or step failed on the way, so that some gradients are reduced or "
                              "used and others not: call zero_grad() and begin the step again")

    def _refuse_what_left(self):
        """Each parameter that is trained must be one that this object updates, and the other way round."""
        mine = {id(p) for bucket in self.buckets for p in bucket.parameters if bucket.owns(p)}
        if left := [name for name, p in self.module.named_parameters() if p.requires_grad != (id(p) in mine)]:
            raise ConfigError(f"{some(left)}: added, frozen, unfrozen, moved or converted after ZeroOptimizer was "
                              "made, or another one was made of the same module, so that a step would not reach it. "
                              "Make the ZeroOptimizer last, of the model as it is now")

    def _refuse_other_ranks(self, grads):
        """On all ranks, if one has a gradient that is not finite or other options: their sum says both."""
        if is_dry(self.group):
            return
        options = [{name: v for name, v in group.items() if name != "params"} for group in self.param_groups]
        mine = zlib.crc32(as_text(options).encode())  # below 2**32
        norms = torch.stack([norm.to(grads[0].device) for norm in torch._foreach_norm(grads, float("inf"))])
        is_bad = ~norms.isfinite().all()
        both = is_bad * 2**48 + mine
        dist.all_reduce(both, group=self.group)
        num_bad, total = divmod(int(both), 1 << 48)
        num_ranks = dist.get_world_size(self.group)
        if num_bad:
            names = [None] * num_ranks
            name = next(b.first_nonfinite() for b in self.buckets if not b.grad.isfinite().all()) if is_bad else None
            dist.all_gather_object(names, name, group=self.group)
            raise FloatingPointError(f"the gradient of {next(filter(None, names))} is NaN or infinite on some rank, so "
                                     "no rank has made the step. To skip it: zero_grad() of this object")
        if total != num_ranks * mine:
            raise ConfigError(f"ranks have different options in param_groups; here {options}: each would update its "
                              "shards with its own. A scheduler must see the same number on every rank: all_reduce it")


def _before_gradient(reference, bucket, parameter, _):
    if reference() is not None and bucket.owns(parameter):
        bucket.open()


def _on_gradient(reference, bucket, position, parameter):
    """The hook of a parameter. Of two objects that wrapped it the newer one acts."""
    zero = reference()
    if zero is not None and bucket.owns(parameter):
        with torch.no_grad():
            zero._gradient_is_there(bucket, position)
