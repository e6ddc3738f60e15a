"""What techniques share: the place in a group, and tensors that travel together, in one flat buffer."""
import torch
import torch.distributed as dist

from dtlab.errors import ConfigError


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
        self.tensors, self.views, self.ready = list(tensors), [], set()
        first, start = self.tensors[0], 0
        self.flat = torch.empty(sum(t.numel() for t in self.tensors), dtype=first.dtype, device=first.device)
        for tensor in self.tensors:
            self.views.append(self.flat[start : start + tensor.numel()].view(tensor.shape))
            start += tensor.numel()

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
    filling, parts = {}, []  # (dtype, device) -> [position of the last tensor, bytes, tensors]
    for position, tensor in enumerate(tensors):
        key = tensor.dtype, tensor.device
        if key not in filling or filling[key][1] + tensor.nbytes > bucket_bytes:
            filling[key] = [position, 0, []]
            parts.append(filling[key])
        part = filling[key]
        part[0], part[1] = position, part[1] + tensor.nbytes
        part[2].append(tensor)
    return [tensors for _, _, tensors in sorted(parts, key=lambda part: part[0])]


@torch.no_grad()
def broadcast_tensors(tensors, *, group_src: int = 0, group=None, bucket_bytes: int = 25 * 2**20):
    """Give every rank of ``group`` the values that its rank ``group_src`` has; as few calls as the buckets allow."""
    for part in split_by_bytes(tensors, bucket_bytes):
        bucket = Bucket(part)
        torch._foreach_copy_(bucket.views, part)
        dist.broadcast(bucket.flat.view(torch.uint8), group_src=group_src, group=group)  # bytes: gloo knows no int16
        torch._foreach_copy_(part, bucket.views)
