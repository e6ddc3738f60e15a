"""Data parallel: every rank holds the whole model and its own part of the batch; gradients are averaged in buckets.

Mean, not sum: what stands in ``.grad`` after backward is the mean over the ranks of what each would have alone. With
equal parts and a mean loss on each rank that is the gradient of the whole batch's mean loss.

    loss.backward()  on each rank, parameters in reverse order:

    autograd   [ 4 ][ 3 ][ 2 ][ 1 ]          gradients of parameters 4, 3, 2, 1
    network            [ bucket 0 ][ bucket 1 ]    all_reduce of 4, 3 while 2, 1 are computed
                                           ^ the pass ends here: wait
"""
import contextlib
import functools
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from dtlab.errors import ConfigError
from dtlab.parallel.shared import (
    Bucket,
    at_end_of_pass,
    broadcast_tensors,
    is_dry,
    place_in,
    refuse_different_models,
    refuse_what_is_no_model,
    split_by_bytes,
)
from dtlab.record import tag
from dtlab.validate import at_least

_NUM_NAMES = 5  # parameters that an error names
_COUNTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_AVERAGED_BY = weakref.WeakValueDictionary()  # id of a parameter -> the object that wrapped it last


class DistributedDataParallel(nn.Module):
    """``module``, the same on every rank of ``group``, with gradients averaged over the ranks during backward.

    At the start parameters and buffers, frozen ones too, get the values of the group's first rank: ranks may be seeded
    differently. Keys of ``state_dict()`` have the prefix ``module.``, as torch's do; save ``ddp.module.state_dict()``
    for a model without it.

    A gradient lives in its bucket: ``.grad`` is a view of the bucket's buffer and is overwritten in the next backward
    pass, also after ``zero_grad()``. Clone what you keep.

    Communication on each rank, n ranks, P bytes of trainable parameters (a tied one counts once): all_reduce of P bytes
    a step, one call a bucket, ring 2 (n-1)/n P bytes sent. Frozen parameters send nothing. Plus, if the module has
    buffers and ``broadcast_buffers``, one broadcast of them before each forward pass in training.

    Args:
        module: Its parameters are registered in about the order in which forward uses them: backward then fills the
            buckets in their order. Another order is right too, but overlaps less.
        group: Ranks that hold a replica each; None for all.
        bucket_bytes: Largest bucket of more than one parameter. 1: a bucket for each parameter.
        overlap: False sends after backward instead of during it.
        find_unused_parameters: True lets a parameter have no gradient on some ranks, which counts as zero; without one
            on any rank its ``.grad`` stays None. One more all_reduce a step, of a byte for each parameter. (A rank that
            uses no parameter at all has no backward pass, and the others wait for it.)
        broadcast_buffers: Ranks follow the first one's buffers (BatchNorm's running statistics) from one training step
            to the next; in between each adds its own part of the batch. Batch statistics themselves stay local.

    Raises:
        ConfigError: ranks have different models or options; in forward: a parameter that is trained and was not
            wrapped, or not by this object, so that its gradient would not be averaged (a part replaced or trained only
            later, a copy of this object, a model wrapped again); in backward: a parameter without gradient, with two,
            or with a sparse one.

    Not here: buckets in the order in which gradients really arrive, gradients in the memory format of channels_last
    weights, sparse gradients, ``torch.utils.checkpoint`` with ``use_reentrant=True`` (refused where it would be wrong;
    False works).

    Source: Li et al. 2020, arXiv:2006.15704, sections 3.2 (buckets, overlap, no_sync) and 4.1.
    """

    def __init__(self, module: nn.Module, *, group=None, bucket_bytes: int = 25 * 2**20, overlap: bool = True,
                 find_unused_parameters: bool = False, broadcast_buffers: bool = True):
        super().__init__()
        at_least("bucket_bytes", bucket_bytes, 1)
        refuse_what_is_no_model(module)
        self.module, self.group, (_, self.dp_size) = module, group, place_in(group)
        self.overlap, self.find_unused_parameters = overlap, find_unused_parameters
        self.broadcast_buffers = broadcast_buffers and any(True for _ in module.buffers())
        refuse_different_models(module, group, bucket_bytes=bucket_bytes, broadcast_buffers=broadcast_buffers,
                                 find_unused_parameters=find_unused_parameters)  # fmt: skip
        self._send_model(group_src=0)
        trainable = [p for p in module.parameters() if p.requires_grad]
        if not trainable:
            raise ConfigError("module has no parameter that requires a gradient: there is nothing to average")
        self.buckets = [Bucket(part) for part in split_by_bytes(reversed(trainable), bucket_bytes)]
        for bucket in self.buckets:
            tag(bucket.flat, "grads")
        self._is_syncing, self._is_joining = True, False
        self._running = list(range(self.dp_size))  # ranks of the group that still have data
        self._works = []  # of the buckets that are on their way, in order
        self._end_of_pass = None  # weakly, what autograd calls at the end of this backward pass; it dies with the pass
        self._hook_parameters()

    def _send_model(self, group_src):
        broadcast_tensors([*self.module.parameters(), *self.module.buffers()], group_src=group_src, group=self.group)

    def _hook_parameters(self):
        """Call ``_gradient_is_there`` for each gradient. Hooks hold this object weakly, and go when it goes."""
        hooks, me = [], weakref.ref(self)
        for bucket in self.buckets:
            for position, parameter in enumerate(bucket.tensors):
                _AVERAGED_BY[id(parameter)] = self
                hook = functools.partial(_on_gradient, me, bucket, position)
                hooks.append(parameter.register_post_accumulate_grad_hook(hook))
        weakref.finalize(self, lambda: [hook.remove() for hook in hooks])

    # a step

    def forward(self, *args, **kwargs):
        """What ``module`` returns."""
        if self._is_syncing and torch.is_grad_enabled():
            self._refuse_what_changed()
            if self._is_joining:
                self._running = self._who_runs(True)
            self._send_buffers()
        outputs = self.module(*args, **kwargs)
        for output in tree_leaves(outputs):
            if isinstance(output, torch.Tensor) and output.grad_fn is not None:
                output.grad_fn.metadata[DistributedDataParallel] = self  # lives until backward: hooks hold it weakly
        return outputs

    def _refuse_what_changed(self):
        """Each parameter that is trained must be one that this object averages."""
        strangers = [p for p in self.module.parameters() if p.requires_grad and _AVERAGED_BY.get(id(p)) is not self]
        if strangers:
            raise ConfigError(f"gradients of {self._names(strangers)} would not be averaged: these parameters came "
                              "into the model or got requires_grad=True after it was wrapped, or this is a copy "
                              "(deepcopy, pickle), or the model was wrapped again. Use the newest wrapper, or wrap the "
                              "model as it is now: ddp = DistributedDataParallel(ddp.module)")
        for bucket in self.buckets:
            kind = bucket.flat.dtype, bucket.flat.device
            if changed := [p for p in bucket.tensors if (p.dtype, p.device) != kind]:
                raise ConfigError(f"{self._names(changed)}: {changed[0].dtype} on {changed[0].device}, but when the "
                                  f"model was wrapped {kind[0]} on {kind[1]}: convert or move it first, then wrap it")

    def _send_buffers(self):
        if self.broadcast_buffers and self.training:
            broadcast_tensors(self.module.buffers(), group_src=self._running[0], group=self.group)

    def _gradient_is_there(self, bucket, position):
        """One gradient is complete: start what is complete with it, always in the order of the buckets."""
        if self._end_of_pass is None or self._end_of_pass() is None:  # no pass is under way, or one that has failed
            self._begin()
        if bucket.tensors[position].grad.layout is not torch.strided:
            raise ConfigError(f"{self._names([bucket.tensors[position]])} has a sparse gradient, which fits no bucket: "
                              "for nn.Embedding use sparse=False")
        if position in bucket.ready:
            raise ConfigError(f"{self._names([bucket.tensors[position]])} got a second gradient in one backward pass, "
                              "after the first may have been sent: torch.utils.checkpoint needs use_reentrant=False")
        bucket.ready.add(position)
        while self.overlap and len(self._works) < len(self.buckets) and self.buckets[len(self._works)].is_full():
            self._start_next()

    def _begin(self):
        """With the first gradient of a backward pass: ask autograd to call ``_finish`` at its end."""
        with contextlib.suppress(RuntimeError):  # the group may be gone
            self._wait()  # for what a pass that failed has sent: it still writes into the buckets
        self._works = []
        for bucket in self.buckets:
            bucket.ready.clear()
        self._end_of_pass = at_end_of_pass(self._finish)

    def _start_next(self):
        """Send the next bucket. Subtle: all ranks send in the same order, whatever that of their gradients."""
        bucket = self.buckets[len(self._works)]
        bucket.take_gradients()
        bucket.flat.div_(len(self._running))  # before the sum, as torch does: a float16 above 65,504 is infinite
        # all_reduce, 2 (n-1)/n * bytes of the bucket per rank
        self._works.append(dist.all_reduce(bucket.flat, group=self.group, async_op=True))

    def _finish(self):
        """At the end of backward: start what is left and wait for all of it."""
        self._end_of_pass = None  # a gradient that comes now is of another pass
        parameters = [p for bucket in self.buckets for p in bucket.tensors]
        unused = [p for p in parameters if p.grad is None]
        if unused and not self.find_unused_parameters:
            raise ConfigError(self._unused_text(unused))
        while len(self._works) < len(self.buckets):
            self._start_next()
        if self.find_unused_parameters:
            views = [view for bucket in self.buckets for view in bucket.views]
            is_used = self._on_any_rank([p.grad is not None for p in parameters])
            for parameter, view, used in zip(parameters, views, is_used):
                if used:
                    parameter.grad = view
        self._wait()

    def _wait(self):
        for work in self._works:
            work.wait()  # on CUDA only the stream waits, not the program
        self._works = []

    def _on_any_rank(self, flags):
        """For each flag whether any rank has it; every rank gets the same answer."""
        if is_dry(self.group):
            return flags
        flags = torch.tensor(flags, dtype=torch.uint8, device=self.buckets[0].flat.device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group)
        return flags.tolist()

    # accumulation, and ranks with less data

    @contextlib.contextmanager
    def no_sync(self):
        """Backward inside only adds to ``.grad``; the first backward outside sends the sum: one reduction a step.

        Divide each micro-batch's loss by the number of micro-batches, as without ranks. Whether a backward pass sends
        is decided where ``backward()`` is called. Without ``no_sync`` the result is the same and all is sent each time.
        """
        before, self._is_syncing = self._is_syncing, False
        try:
            yield
        finally:
            self._is_syncing = before

    @contextlib.contextmanager
    def join(self):
        """For ranks with different numbers of batches: ``with ddp.join(): for batch in batches: ...`` on every rank.

        A rank that leaves the block early takes part in the others' reductions with zeros until all have left; the mean
        is over the ranks that still run. Then all get the model of those that ran last; optimizer states stay as
        they are. One more all_reduce a step, of a byte for each rank. Every forward pass in the block with gradients
        on and outside ``no_sync`` needs a backward pass.

        Only the reductions of this object are taken part in. Calls of your own in the block, ``global_mean`` among
        them, wait for ranks that have left: for a weighted mean give those ranks batches of no tokens instead.
        """
        before, self._is_joining = self._is_joining, True
        try:
            yield
            while running := self._who_runs(False):
                self._running = running
                self._take_part()
            if len(self._running) < self.dp_size:
                self._send_model(group_src=self._running[0])
        finally:
            self._is_joining, self._running = before, list(range(self.dp_size))

    def _who_runs(self, i_do):
        """Ranks of the group that have a batch for this step."""
        mine = [i_do and position == dist.get_rank(self.group) for position in range(self.dp_size)]
        return [position for position, runs in enumerate(self._on_any_rank(mine)) if runs]

    def _take_part(self):
        """The calls of one step of the others, with nothing to add."""
        self._send_buffers()
        for bucket in self.buckets:
            bucket.flat.zero_()
            self._works.append(dist.all_reduce(bucket.flat, group=self.group, async_op=True))
        if self.find_unused_parameters:
            self._on_any_rank([False for bucket in self.buckets for _ in bucket.tensors])
        self._wait()

    # words

    def _names(self, parameters):
        names = [name for name, p in self.module.named_parameters() if any(p is other for other in parameters)]
        more = f" and {len(names) - _NUM_NAMES} more" if len(names) > _NUM_NAMES else ""
        return ", ".join(names[:_NUM_NAMES]) + more

    def _unused_text(self, unused):
        count = sum(len(bucket.tensors) for bucket in self.buckets)
        return (f"rank {dist.get_rank()}: {len(unused)} of {count} parameters have no gradient after backward: "
                f"{self._names(unused)}. The other ranks would wait for them. Use every parameter in the loss, set "
                "requires_grad=False before wrapping for what is not trained, or pass find_unused_parameters=True. "
                "(With torch.utils.checkpoint: use_reentrant=False)")


def _on_gradient(reference, bucket, position, parameter):
    """The hook of a parameter. Of two objects that wrapped it the newer one acts."""
    ddp = reference()
    if ddp is not None and ddp._is_syncing and _AVERAGED_BY.get(id(parameter)) is ddp:
        ddp._gradient_is_there(bucket, position)


def global_mean(loss_sum: torch.Tensor, num_tokens, group=None) -> torch.Tensor:
    """A loss whose gradient, after data parallel's mean over the ranks, is that of the mean over all ranks' tokens.

    Ranks with different numbers of tokens must not average their means: a rank with one token would count as much as a
    rank with a thousand. The sum over all ranks is divided by the tokens of all ranks instead. One all_reduce of one
    number; nothing is sent in backward.

    Args:
        loss_sum: The loss summed over this rank's tokens, a scalar; 0 (from the model's output) without any.
        num_tokens: Tokens on this rank (count or integer tensor). With accumulation: of all micro-batches of the step,
            the same number for each of them.
        group: The ranks that average; None for all.

    Returns:
        n * loss_sum / (tokens of all n ranks): averaged over the ranks it is the mean over all tokens. 0 if no rank has
        any token.

    Raises:
        ConfigError: what is not one number, a count that is no whole number, or this rank is not in the group.

    Example: one token with loss 1 x on rank 0, three with 5 x each on rank 1: the gradient is 4, where the mean of
        their means says 3
        >>> global_mean(15 * x, 3).backward()                # on rank 1                   # doctest: +SKIP
    """
    _, size = place_in(group)
    if not isinstance(loss_sum, torch.Tensor) or loss_sum.numel() != 1:
        shape = f"shape {list(loss_sum.shape)}" if isinstance(loss_sum, torch.Tensor) else type(loss_sum).__name__
        raise ConfigError(f"loss_sum ({shape}) must be a tensor of one number: the sum over tokens, reduction='sum'")
    if not isinstance(num_tokens, torch.Tensor):
        num_tokens = torch.tensor(at_least("num_tokens", num_tokens, 0))
    if num_tokens.numel() != 1 or num_tokens.dtype not in _COUNTS:
        raise ConfigError(f"num_tokens ({num_tokens.dtype}, shape {list(num_tokens.shape)}) must be one whole number: "
                          "the sum of a mask of bools, (targets >= 0).sum()")
    total = num_tokens.detach().to(loss_sum.device, torch.int64, copy=True)  # int8 would overflow in the sum
    dist.all_reduce(total, group=group)
    return loss_sum * size / total.clamp(min=1)
