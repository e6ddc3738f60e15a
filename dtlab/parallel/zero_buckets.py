"""The buckets of ``ZeroOptimizer``: flat parameters, flat gradients and shards; and what cannot be put into them."""
import torch
from torch import nn

from dtlab.errors import ConfigError
from dtlab.parallel.shared import FlatShards, all_gather_single, reduce_scatter_single
from dtlab.record import tag


class ShardedBucket:
    """Parameters that travel together, as views of one flat tensor.

    Attributes:
        flat: [padded] parameters. ``mine``: [shard_numel] of it, this rank's shard.
        master: [shard_numel], what the optimizer updates: ``mine`` itself, or a copy in another dtype.
        grads: [padded] gradients, of which each ``.grad`` is a view; None while there is none.
        grad: [shard_numel], the mean over the ranks of this rank's shard; None before it is reduced.
        ready: Positions of the parameters whose gradient is there in this backward pass.
    """

    def __init__(self, named_parameters, group, zero_stage, master_dtype):
        self.parameters, self.zero_stage = [p for _, p in named_parameters], zero_stage
        self.shards = FlatShards(named_parameters, group=group)
        self.flat = self.shards.flatten(self.parameters)
        for parameter, view in zip(self.parameters, self.shards.views(self.flat)):
            parameter.data = view
        self.mine = self.shards.shard_of(self.flat)
        dtype = master_dtype or (torch.float32 if self.flat.itemsize < 4 else self.flat.dtype)
        self.has_copy = dtype != self.flat.dtype
        self.master = nn.Parameter(self.mine.to(dtype))
        self.grads, self.grad, self.ready = None, None, set()
        self.nodes = []
        self.unknown = torch.full((), torch.nan, dtype=self.flat.dtype, device=self.flat.device)
        self.say_what_it_is()

    def say_what_it_is(self):
        """Tell a recording, which may have begun only now."""
        tag(self.flat, "params")
        if self.has_copy:
            tag(self.master, "optimizer_states")

    def owns(self, parameter) -> bool:
        """Whether the parameter's values stand in the flat tensor: not after ``.to()`` or another wrapper."""
        return parameter.untyped_storage()._cdata == self.flat.untyped_storage()._cdata

    def is_full(self) -> bool:
        """Whether every gradient is there."""
        return len(self.ready) == len(self.parameters)

    def open(self):
        """Stage 2, before a bucket's first gradient of another backward pass: what stood in ``.grad`` goes."""
        if self.grads is None and self.grad is not None:
            self.refuse_changes()
            self.forget_whole_gradients()

    def take(self, position):
        """Move one gradient into the flat tensor: the one that autograd made is freed."""
        if self.grads is None:
            self.grads = tag(torch.empty_like(self.flat), "grads")
            self.views = self.shards.views(self.grads)
            self.grads[self.shards.numel :].zero_()
        parameter, view = self.parameters[position], self.views[position]
        if parameter.grad is None:  # unused: counts as zero
            view.zero_()
        elif parameter.grad is not view:
            view.copy_(parameter.grad)
        parameter.grad = view

    def start(self):
        """Send the gradients: ``(the call's handle, where the mean of this rank's shard will stand)``."""
        self.open()
        for position in set(range(len(self.parameters))) - self.ready:
            self.take(position)
        self.grads.div_(self.shards.dp_size)  # before the sum: a float16 above 65,504 is infinite
        mean = self.shards.shard_of(self.grads)
        if self.zero_stage == 2:
            mean = tag(torch.empty_like(self.mine), "grads")
            self.forget_whole_gradients()
        # reduce_scatter, (n-1)/n * bytes of the bucket per rank
        return reduce_scatter_single(mean, self.grads, group=self.shards.group, async_op=True), mean

    def land(self, work, mean):
        """Wait for the call; stage 2 frees the flat gradients and adds the shard to that of micro-batches before."""
        work.wait()
        if self.zero_stage == 2:
            self.grads, self.views = None, [self.unknown.expand(shape) for shape in self.shards.shapes]
            for parameter, view in zip(self.parameters, self.views):
                parameter.grad = view  # Subtle: no memory; a norm of it is NaN, and to write into it fails
            if self.grad is not None:
                # Subtle: a sum of many in 16 bits would lose small ones, so it is kept as the master is
                mean = tag(self.grad.to(self.master.dtype).add_(mean), "grads")
        self.grad = mean
        self.seal()

    def seal(self):
        """What the gradient is now is right: a later change is not."""
        self.sealed = self.grad._version

    def refuse_changes(self):
        """Raise ConfigError if a reduced ``.grad`` was changed, replaced or forgotten by somebody else."""
        is_changed = self.grad._version != self.sealed  # of the whole flat tensor
        grads = zip(self.shards.names, self.parameters, self.views)
        if names := [name for name, parameter, view in grads if is_changed or parameter.grad is not view]:
            raise ConfigError(f".grad of {some(names)} was changed or forgotten after backward, where it is right in "
                              "this rank's shard at most. Clip with clip_grad_norm_() of the ZeroOptimizer, forget "
                              "with its zero_grad()")

    def forget_whole_gradients(self):
        for parameter in self.parameters:
            parameter.grad = None

    def follow(self):
        """Take over what was written into the parameters since the last step: load_state_dict, an initialisation."""
        if self.has_copy:
            master = self.master.detach()  # stays where nothing was written: it knows more than the parameter
            master.copy_(torch.where(self.mine == master.to(self.mine.dtype), master, self.mine))

    def update(self, optimizer):
        """Let the optimizer update this bucket's shard: it passes over what has no gradient."""
        self.follow()
        self.master.grad = self.grad.to(self.master.dtype)
        optimizer.step()
        self.master.grad = None

    def first_nonfinite(self):
        """The name of the first parameter whose part in this shard is not finite."""
        element = int((~self.grad.isfinite()).nonzero()[0]) + self.shards.rank * self.shards.shard_numel
        return self.shards.name_of(element)

    def gather(self):
        """Send this rank's new shard to all and get theirs: the call's handle."""
        if self.has_copy:
            self.mine.copy_(self.master.detach())
        # all_gather, (n-1)/n * bytes of the bucket per rank
        return all_gather_single(self.flat, self.mine, group=self.shards.group, async_op=True)


def some(names):
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def groups_of(module, param_groups):
    """Pairs of options and parameters, which are together all that is trained, each once."""
    trained = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    if not trained:
        raise ConfigError("module has no parameter that requires a gradient: there is nothing to update")
    if hollow := [name for name, t in [*module.named_parameters(), *module.named_buffers()] if t.is_meta]:
        raise ConfigError(f"{some(hollow)} on the meta device: without values. First module.to_empty(device=...) and "
                          "give it values; FullyShardedModule takes it as it is")
    groups, given = [], param_groups or [{"params": module.parameters()}]
    if not all(isinstance(group, dict) and "params" in group for group in given):
        raise ConfigError('param_groups must be a list such as [{"params": [...], "weight_decay": 0.1}, ...]')
    for group in given:
        parameters = [p[-1] if isinstance(p, tuple) else p for p in group["params"]]  # torch takes (name, p) too
        parameters = [p for p in parameters if p.requires_grad]
        if parameters:
            groups.append(({name: v for name, v in group.items() if name != "params"}, parameters))
    listed = [id(p) for _, parameters in groups for p in parameters]
    if sorted(listed) != sorted(trained):
        wrong = [name for key, name in trained.items() if listed.count(key) != 1] or ["parameters of other modules"]
        raise ConfigError(f"param_groups must have each trainable parameter of module once, not {some(wrong)}: set "
                          "requires_grad=False for what is not trained")
    return groups


def refuse_master_dtype(master_dtype, parameters):
    """None, or a dtype that holds the parameters' numbers."""
    kinds = {p.dtype for p in parameters}
    if master_dtype is not None and not (isinstance(master_dtype, torch.dtype)
                                         and all(torch.can_cast(kind, master_dtype) for kind in kinds)):  # fmt: skip
        raise ConfigError(f"master_dtype ({master_dtype!r}) must be None or a dtype, such as torch.float32, that can "
                          f"hold what the parameters are: {some(sorted(map(str, kinds)))}")


def refuse_what_is_not_elementwise(make, options, device):
    """A shard holds any elements: four numbers updated one by one must come out as a matrix does at once."""
    values = torch.tensor([[1.0, -2.0], [3.0, 0.5]], dtype=torch.float64 if device.type != "mps" else None)
    matrix = nn.Parameter(values.clone().to(device))
    numbers = [nn.Parameter(value.clone().view(1)) for value in matrix.detach().view(-1)]
    at_once = make([{**options, "params": [matrix]}])
    reason = "updated one by one, the numbers of a matrix come out differently"
    try:
        one_by_one = make([{**options, "params": numbers}])
        for _ in range(2):
            matrix.grad = matrix.detach() ** 2 - 1.5
            at_once.step()
            for number in numbers:
                number.grad = number.detach() ** 2 - 1.5
                one_by_one.step()
                number.grad = None
        difference = torch.cat(numbers).view(2, 2) - matrix
        if (difference.abs() <= 1e-6 * (matrix - values.to(device)).abs()).all():
            return
    except Exception as error:  # what a custom optimizer raises
        reason = str(error)
    name = type(at_once).__name__
    raise ConfigError(f"{name} cannot be sharded: {reason}. Each rank updates any elements of the flat parameters, so "
                      "use an elementwise optimizer: SGD, Adam, AdamW, RMSprop, Adagrad ...")
