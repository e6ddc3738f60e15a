"""What techniques share: the place in a group, tensors that travel together in one flat buffer, and shards of such."""
import collections
import copy
import functools
import itertools
import math
import re
import weakref

import torch
import torch.distributed as dist
from torch import nn

from dtlab.errors import ConfigError
from dtlab.simulate.data_parallel import buckets
from dtlab.validate import amount

_WRAPPERS = ("DistributedDataParallel", "FullyShardedModule", "FullyShardedDataParallel")  # torch's too
# two collectives by their newest names, which older versions of torch do not have
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def place_in(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This rank's place in the group (None: all ranks) and the number of its ranks.

    Raises:
        ConfigError: this process is no rank, ``group`` is no group, or this rank is not in it.
    """
    if not dist.is_initialized():
        raise ConfigError("this process is no rank of a process group, so there is nobody to talk to: run it on live "
                          "ranks, with %%ranks or ranks = dtlab.launch(4); ranks.run(function)")
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(f"rank {dist.get_rank()} is not in this group: dist.new_group gave it a placeholder. "
                          f"Only the ranks that new_group was called with make calls on the group")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ConfigError(f"group ({group!r}) must be what dist.new_group returned, or None for all ranks")
    return dist.get_rank(group), dist.get_world_size(group)


def is_dry(group):
    """Whether this is a dry recording: tensors have no values to look at, and one rank stands for all."""
    return dist.get_backend(group) == "fake"


def refuse_what_is_no_model(module):
    """Raise ConfigError if ``module`` is no torch.nn.Module, or its gradients are averaged or sharded already."""
    if not isinstance(module, nn.Module):
        raise ConfigError(f"module is of type {type(module).__name__}: give a torch.nn.Module, the same on every rank")
    for name, part in module.named_modules():
        is_sharded = any(type(p).__name__ == "DTensor" for p in part.parameters(recurse=False))  # by fully_shard
        if type(part).__name__ in _WRAPPERS or is_sharded:
            raise ConfigError(f"module is or contains a {type(part).__name__} ({name or 'itself'}), whose gradients "
                              "are averaged already: wrap the plain model, as it was before")
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride())):
            raise ConfigError(f"elements of {name} share memory, so that no rank can write another's values into it "
                              "(expand?): register its .clone()")


def refuse_group_of_parts(module, group):
    """Raise ConfigError if ranks of the group have other parts of the module: values and gradients would be mixed."""
    ranks = lambda group: dist.get_process_group_ranks(group or dist.group.WORLD)
    for part in module.modules():
        is_cut = hasattr(part, "parameter_shards") and hasattr(part, "group")
        if is_cut and len(set(ranks(part.group)) & set(ranks(group))) > 1:
            raise ConfigError(f"the module is tensor-parallel over ranks {ranks(part.group)}, and this group has ranks "
                              f"{ranks(group)}: they may share one rank only. Give group= of the ranks that hold the "
                              "same part")


def as_text(value) -> str:
    """The same on every rank if the value is: without addresses."""
    return re.sub(" at 0x[0-9a-f]+", "", str(value))


def kind_of(tensor: torch.Tensor) -> str:
    """Name of its dtype, as messages have it: ``float32``."""
    return str(tensor.dtype).removeprefix("torch.")


def refuse_different_models(module, group, **options):
    """Compare options, names, shapes, dtypes and requires_grad over the ranks; on every rank the same error."""
    refuse_group_of_parts(module, group)
    if is_dry(group):
        return
    trains = lambda t: "trainable" if t.requires_grad else "not trainable"
    describe = lambda t: f"{kind_of(t)} {list(t.shape)}{' on meta' if t.is_meta else ''}, {trains(t)}"
    mine = [(f"option {name}", as_text(value)) for name, value in options.items()]
    mine += [(name, describe(t)) for name, t in [*module.named_parameters(), *module.named_buffers()]]
    refuse_different_rows(mine, group, "another model or option",
                          "Build the same model on every rank; only its values may differ")


def refuse_different_rows(mine, group, what, cure):
    """Compare lists of (name, text) over the ranks; on every rank the same error: who has ``what``, and the cure."""
    every, ranks = [None] * dist.get_world_size(group), dist.get_process_group_ranks(group or dist.group.WORLD)
    dist.all_gather_object(every, mine, group=group)
    for rank, other in zip(ranks, every):
        for first, theirs in itertools.zip_longest(every[0], other, fillvalue=("nothing more", "")):
            if first != theirs:
                raise ConfigError(f"rank {rank} has {what} than rank {ranks[0]}. The first: rank {ranks[0]} has "
                                  f"{' '.join(first)}; rank {rank} has {' '.join(theirs)}. {cure}")


def at_end_of_pass(method) -> weakref.ref:
    """Ask autograd to call ``method()`` when the backward pass under way has ended.

    Returns a weak reference that is dead once the pass is over, or has failed: then ``method`` is not called.
    """
    # Subtle: autograd alone holds this function and with it the method's object, so that both go with a pass that fails
    finish = functools.partial(method)
    torch.autograd.Variable._execution_engine.queue_callback(finish)
    return weakref.ref(finish)


class KeepsGroup:
    """Of a module whose ``group`` is a process group: ``copy.deepcopy`` makes one that talks to the same ranks."""

    def __deepcopy__(self, memo):
        memo[id(self.group)] = self.group  # it cannot be copied
        memo[id(self)] = new = type(self).__new__(type(self))
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new


class Bucket:
    """Tensors of one dtype and device with one flat buffer for all of them.

    A collective has a cost for each call and one for each byte: many small tensors pay the first one many times.

    Attributes:
        tensors: The tensors, in the order in which they lie in the buffer.
        flat: [elements of all tensors]: the buffer; it is made here and not filled.
        views: Pieces of ``flat`` in the tensors' shapes: the same memory.
        ready: Positions in ``tensors`` of those whose gradient is there.
    """

    def __init__(self, tensors):
        self.tensors, self.ready = list(tensors), set()
        first, shapes = self.tensors[0], [t.shape for t in self.tensors]
        self.flat = torch.empty(sum(s.numel() for s in shapes), dtype=first.dtype, device=first.device)
        self.views = _pieces(self.flat, shapes)

    def is_full(self) -> bool:
        """Whether every gradient is there."""
        return len(self.ready) == len(self.tensors)

    @torch.no_grad()
    def take_gradients(self):
        """Move the tensors' gradients into the buffer: each ``.grad`` is a view of it afterwards; a missing one, zeros.

        No tensor's gradient is held twice, and what a collective does to ``flat`` needs no copy back.
        """
        moved = []
        for tensor, view in zip(self.tensors, self.views):
            grad = tensor.grad
            if grad is None:
                view.zero_()
            elif grad is not view:  # it is the view if it was there before this backward pass: zeroed or added to
                moved.append((tensor, view, grad))
        if moved:
            tensors, views, grads = zip(*moved)
            torch._foreach_copy_(views, grads)
            for tensor, view in zip(tensors, views):
                tensor.grad = view


def split_by_bytes(tensors, bucket_bytes: int) -> list:
    """Lists of tensors, each of one dtype and device and, where it holds more than one, of ``bucket_bytes`` at most.

    They come in the order in which they are complete when the tensors arrive one by one.

    Example:
        >>> a, b, c = torch.zeros(4), torch.zeros(2, dtype=torch.float64), torch.zeros(3)
        >>> [[len(t) for t in part] for part in split_by_bytes([a, b, c], 28)]
        [[2], [4, 3]]
    """
    kinds, parts = {}, []  # (dtype, device) -> [(position, tensor), ...]; such lists, one a part
    for position, tensor in enumerate(tensors):
        kinds.setdefault((tensor.dtype, tensor.device), []).append((position, tensor))
    for its in kinds.values():
        ends = buckets([tensor.nbytes for _, tensor in its], bucket_bytes)
        parts += [its[start:end] for start, end in zip([0, *ends], ends)]
    return [[tensor for _, tensor in part] for part in sorted(parts, key=lambda part: part[-1][0])]


@torch.no_grad()
def broadcast_tensors(tensors, *, group_src: int = 0, group=None, bucket_bytes: int = 25 * 2**20):
    """Give every rank of ``group`` the values that its rank ``group_src`` has; as few calls as the buckets allow."""
    for part in split_by_bytes(tensors, bucket_bytes):
        bucket = Bucket(part)
        torch._foreach_copy_(bucket.views, part)
        dist.broadcast(bucket.flat.view(torch.uint8), group_src=group_src, group=group)  # bytes: gloo knows no int16
        torch._foreach_copy_(part, bucket.views)


def _pieces(flat, shapes):
    return [piece.view(shape) for piece, shape in zip(flat.split([shape.numel() for shape in shapes]), shapes)]


class FlatShards:
    """How tensors lie end to end in one flat tensor of which each rank keeps an equal part, its shard.

        a a a a a b b b | 0      8 elements on 3 ranks: padded to 9, shards of 3
        rank 0  rank 1  rank 2   a shard's border is anywhere; the last ranks may have nothing but padding

    This is the layout only: flat tensors and shards are made by whoever keeps them.

    Args:
        named_tensors: Pairs of name and tensor, all of one dtype and device.
        group: The ranks that have a shard each; None for all.

    Attributes:
        names, shapes: Of the tensors.
        numel: Elements of all tensors, without padding.
        padded: Elements of the flat tensor: the next multiple of ``dp_size``.
        shard_numel: Elements of a shard, padded / dp_size.
        rank, dp_size: This rank's place in the group and the number of its ranks.
        dtype, device: Of the tensors.
    """

    def __init__(self, named_tensors, *, group=None):
        self.names, tensors = zip(*named_tensors)
        self.group, (self.rank, self.dp_size) = group, place_in(group)
        self.shapes, self.dtype, self.device = [t.shape for t in tensors], tensors[0].dtype, tensors[0].device
        self.numel = sum(shape.numel() for shape in self.shapes)
        self.shard_numel = max(1, -(-self.numel // self.dp_size))  # 1 where all are empty: no collective takes nothing
        self.padded = self.shard_numel * self.dp_size

    def flatten(self, tensors) -> torch.Tensor:
        """[padded]: a new flat tensor with the tensors' values, and zeros as padding. They may have another dtype."""
        flat = torch.zeros(self.padded, dtype=self.dtype, device=self.device)
        torch._foreach_copy_(self.views(flat), [t.detach() for t in tensors])
        return flat

    def views(self, flat: torch.Tensor) -> list:
        """The pieces of a flat tensor in the tensors' shapes: the same memory, no padding."""
        return _pieces(flat[: self.numel], self.shapes)

    def join(self, shard: torch.Tensor) -> dict:
        """Name -> tensor, put together from the shards of all ranks, which call together."""
        whole = torch.empty(self.padded, dtype=shard.dtype, device=shard.device)
        all_gather_single(whole, shard.contiguous(), group=self.group)  # all_gather, (n-1)/n * bytes of the whole
        return dict(zip(self.names, self.views(whole)))

    def name_of(self, element: int) -> str:
        """Name of the tensor in which an element of the flat tensor lies."""
        ends = itertools.accumulate(shape.numel() for shape in self.shapes)
        return next(name for name, end in zip(self.names, ends) if element < end)

    def shard_of(self, flat: torch.Tensor) -> torch.Tensor:
        """[shard_numel]: this rank's part of a flat tensor: the same memory."""
        return flat[self.rank * self.shard_numel : (self.rank + 1) * self.shard_numel]


@torch.no_grad()
def total_norm(shards, *, group=None, norm_type: float = 2.0) -> torch.Tensor:
    """The norm of all elements of all ranks' shards: the same number on every rank, a scalar tensor.

    Each rank's norm to the power of p is summed (for infinity: the largest taken) by one all_reduce of one number.
    16-bit shards are summed in float32.

    Args:
        shards: This rank's parts, one at least; an element must not be in those of two ranks.

    Raises:
        ConfigError: ``norm_type`` is not above 0.

    Example: 3 on one rank and 4 on the other give 5
    """
    p = float(amount("norm_type", norm_type, above_0=True) if norm_type != math.inf else math.inf)
    is_double = any(t.dtype in (torch.float64, torch.complex128) for t in shards)
    kind = {"dtype": torch.float64 if is_double else torch.float32, "device": shards[0].device}
    norm_of = lambda t: torch.linalg.vector_norm(t, p, dtype=torch.float32 if t.itemsize < 4 else None)
    norms = torch.stack([norm_of(t).to(**kind) for t in shards if t.numel()] or [torch.zeros((), **kind)])
    if p == math.inf:
        total = norms.max().abs()
        # Subtle: as whole numbers, whose order is the same and has NaN above infinity; gloo's MAX of floats loses NaN
        dist.all_reduce(total.view(torch.int64 if is_double else torch.int32), dist.ReduceOp.MAX, group=group)
        return total
    total = norms.pow(p).sum()
    dist.all_reduce(total, group=group)
    return total.pow(1 / p)


@torch.no_grad()
def clip_shards_(shards, max_norm: float, *, group=None, norm_type: float = 2.0, counted=None) -> torch.Tensor:
    """Scale shards in place so that ``total_norm`` is ``max_norm`` (infinity: measure only) at most; the norm before.

    Every rank scales by the same factor, as torch's ``clip_grad_norm_``: max_norm / (norm + 1e-6) if that is below 1.
    A norm of NaN scales nothing (torch's makes every element NaN): it can still be found where it came from.

    Args:
        counted: Where ranks have the same elements, the parts of the shards that this rank counts; None: all.
    """
    amount("max_norm", max_norm if max_norm != math.inf else 0)
    norm = total_norm(shards if counted is None else counted, group=group, norm_type=norm_type)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0).nan_to_num(1.0)
    for shard in shards:
        shard.mul_(factor.to(shard.device))
    return norm


class ShardedState(dict):
    """Keys and tensors for ``torch.distributed.checkpoint``: a shard is a DTensor of its flat tensor without padding.

    They are this rank's own memory, so that loading is in place.

    Args:
        fill: Called with this object to put everything in, now and again when it is saved or loaded.

    Attributes:
        group: The ranks that have the shards; None for all.
        layout: For each key what lies where, as text: a checkpoint of another layout does not fit.
        after_load: Functions to call, on every rank, when new values are in place.
    """

    def __init__(self, fill):
        super().__init__()
        self._fill = fill
        self.refresh()

    def refresh(self):
        """Take what stands there now: an optimizer's step may have put other tensors in place."""
        self.clear()
        self.group, self.layout, self.after_load = None, {}, []
        self._fill(self)

    def add_shard(self, key: str, shard: torch.Tensor, shards: FlatShards):
        """Add this rank's [shard_numel] of a flat tensor that lies as ``shards`` says."""
        from torch.distributed.device_mesh import DeviceMesh  # half a second, which a notebook need not wait for
        from torch.distributed.tensor import DTensor, Shard

        self.group = shards.group
        mesh = DeviceMesh.from_group(shards.group or dist.group.WORLD, shard.device.type)
        start = shards.rank * shards.shard_numel
        mine = shard.detach()[: max(0, min(shards.shard_numel, shards.numel - start))]  # the last ranks may have none
        self[key] = DTensor.from_local(mine, mesh, [Shard(0)], run_check=False, shape=(shards.numel,), stride=(1,))
        pieces = ", ".join(f"{name} {list(shape)}" for name, shape in zip(shards.names, shards.shapes))
        self.layout[key] = f"{kind_of(shard)} {shards.numel}: {pieces}"

    def add_whole(self, key: str, tensor: torch.Tensor):
        """Add a tensor that is the same on every rank: a step counter, a buffer."""
        self[key], self.layout[key] = tensor.detach(), f"{kind_of(tensor)} {list(tensor.shape)}"

    def add_states(self, key: str, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, shards: FlatShards):
        """Add an optimizer's states of ``parameter``, a shard; before its first step such as it will have.

        States are shards as the parameter is, or scalars, whole. After loading the optimizer has some if the saved one
        had: what it begins with is its own affair.

        Raises:
            ConfigError: a state that is no tensor, or neither a scalar nor of the shard's shape.
        """
        states = optimizer.state.get(parameter)
        has_states = torch.tensor(bool(states))
        states = states or _states_to_load_into(optimizer, parameter)
        self.add_whole(f"{key}.has_states", has_states)
        for name, value in states.items():
            if isinstance(value, torch.Tensor) and value.shape == (shards.shard_numel,):
                self.add_shard(f"{key}.{name}", value, shards)
            elif isinstance(value, torch.Tensor) and value.dim() == 0:
                self.add_whole(f"{key}.{name}", value)
            else:
                is_what = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                raise ConfigError(f"the optimizer's state {name!r} is {is_what}; a checkpoint takes tensors, a number "
                                  f"torch.tensor(0.) or of the shard's shape [{shards.shard_numel}]")

        def put():
            optimizer.state.pop(parameter, None)
            if has_states:
                optimizer.state[parameter] = states

        self.after_load.append(put)


def _states_to_load_into(optimizer, parameter):
    """What the optimizer will keep of a parameter: torch's make it in their first step, so here another's."""
    kept = optimizer.param_groups, optimizer.state
    groups = [group for group in optimizer.param_groups if any(p is parameter for p in group["params"])]
    zeros = nn.Parameter(torch.zeros_like(parameter))
    zeros.grad = torch.zeros_like(parameter)
    try:
        optimizer.param_groups = [{**group, "params": [zeros]} for group in groups]
        optimizer.state = collections.defaultdict(dict)
        type(optimizer).step(optimizer)  # the class's: a scheduler that counts steps does not see this one
        return optimizer.state[zeros]
    finally:
        optimizer.param_groups, optimizer.state = kept
