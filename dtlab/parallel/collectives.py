"""Collectives from messages: what NCCL and gloo do inside ``dist.all_reduce``, in a few lines each.

All work in place on a contiguous tensor of any length and any dtype that adds, on the ranks of ``group`` (None: the
default group). The ranks' tensors have the same shape and dtype. Where ranks end with a sum, they end with the same
bits: a sum is made once, in one order, and then copied.

Letters: n ranks of the group, rank 0 .. n-1 the place in it, S bytes of the tensor, c bytes of a chunk, about S/n.
"""
import torch
import torch.distributed as dist

from dtlab.errors import ConfigError
from dtlab.parallel.shared import place_in
from dtlab.validate import at_least


def chunk_bounds(length: int, size: int) -> list[tuple[int, int]]:
    """Where each of ``size`` chunks of ``length`` elements starts and ends: all elements, each once, longest first.

    The first ``length % size`` chunks have one element more; chunks are empty where there are too few elements.

    Raises:
        ConfigError: ``length`` below 0 or ``size`` below 1.

    Example:
        >>> chunk_bounds(10, 4)
        [(0, 3), (3, 6), (6, 8), (8, 10)]
        >>> chunk_bounds(1, 2)
        [(0, 1), (1, 1)]
    """
    length, extra = divmod(at_least("length", length, 0), at_least("size", size, 1))
    starts = [i * length + min(i, extra) for i in range(size + 1)]
    return list(zip(starts, starts[1:]))


@torch.no_grad()
def ring_reduce_scatter(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Add over the ranks, chunk by chunk, around a ring: rank r ends with the finished chunk r of ``chunk_bounds``.

    In each of n - 1 steps a rank sends one chunk to its right and adds the one that comes from its left. Chunk r
    starts at rank r + 1, goes round and is finished at rank r.
    Not here: pieces of a chunk, one added while the next arrives; on gloo more messages cost more than that hides.

    Shapes on one rank: tensor [...], its other chunks hold partial sums afterwards; spare memory [c]. Sends S - c.

    Returns:
        View of this rank's chunk in ``tensor``, one-dimensional.

    Raises:
        ConfigError: the tensor is not contiguous, or this rank is not in the group.

    Source: Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms for clusters of workstations.
    """
    rank, size, chunks = _in_chunks(tensor, group)
    right, left = (rank + 1) % size, (rank - 1) % size
    spare = torch.empty_like(chunks[0])  # the longest
    sending = []
    for step in range(size - 1):
        chunk, following = chunks[(rank - step - 1) % size], chunks[(rank - step - 2) % size]
        received = spare[:len(following)]
        arrival, *departure = _start(chunk, right, received, left, group)  # send, c bytes
        arrival.wait()
        following += received
        sending += departure
    _wait(sending)  # only now: no chunk is changed after it was sent, so no step needs to wait for it
    return chunks[rank]


@torch.no_grad()
def ring_all_gather(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Give every rank all chunks, around a ring: rank r brings the chunk r of ``chunk_bounds``.

    In each of n - 1 steps a rank hands on to its right the chunk that it got last.

    Shapes on one rank: tensor [...]; what it holds outside of chunk r is overwritten. Sends S - c.

    Raises:
        ConfigError: the tensor is not contiguous, or this rank is not in the group.

    Source: Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms for clusters of workstations.
    """
    rank, size, chunks = _in_chunks(tensor, group)
    right, left = (rank + 1) % size, (rank - 1) % size
    sending = []
    for step in range(size - 1):
        chunk, following = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        arrival, *departure = _start(chunk, right, following, left, group)  # send, c bytes
        arrival.wait()  # the next step sends it on
        sending += departure
    _wait(sending)


def ring_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Add over the ranks, in place: the reduce-scatter, then the all-gather.

    2 (n-1) steps, 2 (n-1)/n S bytes a rank whatever n is, one spare chunk of memory, neighbours only.

    Shapes on one rank: tensor [...].

    Raises:
        ConfigError: the tensor is not contiguous, or this rank is not in the group.

    Source: Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms for clusters of workstations.
    """
    ring_reduce_scatter(tensor, group)  # (n-1)/n S bytes
    ring_all_gather(tensor, group)  # (n-1)/n S bytes


@torch.no_grad()
def naive_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Add over the ranks, in place: all send to rank 0, which adds and sends the sum to each.

    Rank 0 sends (n-1) S bytes and receives as many, one after the other; the others wait. Spare memory: S on rank 0.

    Shapes on one rank: tensor [...].

    Raises:
        ConfigError: the tensor is not contiguous, or this rank is not in the group.
    """
    rank, size, flat = _flat(tensor, group)
    if rank != 0:
        dist.send(flat, group_dst=0, group=group)  # send, S bytes
        dist.recv(flat, group_src=0, group=group)
        return
    spare = torch.empty_like(flat)
    for source in range(1, size):
        dist.recv(spare, group_src=source, group=group)
        flat += spare
    for destination in range(1, size):
        dist.send(flat, group_dst=destination, group=group)  # send, S bytes each


@torch.no_grad()
def tree_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Add over the ranks, in place: up a binomial tree to rank 0, then the sum down again.

    2 ceil(log2 n) steps of S bytes. A rank's parent is its number without the lowest 1 bit: of 8 ranks, 0 has the
    children 1, 2, 4; 4 has 5, 6; 6 has 7. Rank 0 sends ceil(log2 n) S, another one S for itself and for each child.

    Shapes on one rank: tensor [...]; spare memory: S on ranks with children.

    Raises:
        ConfigError: the tensor is not contiguous, or this rank is not in the group.

    Source: Thakur, Rabenseifner and Gropp 2005, Optimization of collective communication operations in MPICH.
    """
    rank, size, flat = _flat(tensor, group)
    lowest = rank & -rank or 1 << (size - 1).bit_length()  # rank 0 may have as many children as bits
    children = [rank + (1 << bit) for bit in range(lowest.bit_length() - 1) if rank + (1 << bit) < size]
    spare = torch.empty_like(flat) if children else None
    for child in children:
        dist.recv(spare, group_src=child, group=group)
        flat += spare
    if rank != 0:
        dist.send(flat, group_dst=rank - lowest, group=group)  # send, S bytes
        dist.recv(flat, group_src=rank - lowest, group=group)
    for child in reversed(children):  # the largest subtree first: it has the longest way to go
        dist.send(flat, group_dst=child, group=group)  # send, S bytes each


@torch.no_grad()
def halving_doubling_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Add over the ranks, in place: halve what a rank is about with ever nearer partners, then double it again.

    2 log2 n steps and 2 (n-1)/n S bytes a rank for n a power of two: the ring's bytes in fewer steps, with partners
    that are far away. For other n, let p be the largest power of two below: each rank from p on first adds its tensor
    to that of rank - p, and gets the sum from there in the end. That costs two more steps of S bytes.

    Shapes on one rank: tensor [...]; spare memory S/2, or S where n is no power of two.

    Raises:
        ConfigError: the tensor is not contiguous, or this rank is not in the group.

    Source: Thakur, Rabenseifner and Gropp 2005, Optimization of collective communication operations in MPICH,
    Rabenseifner's algorithm (its folding of extra ranks halves the tensor first, ours does not).
    """
    rank, size, flat = _flat(tensor, group)
    power = 1 << (size.bit_length() - 1)  # the largest power of two that is not above n
    if rank >= power:
        dist.send(flat, group_dst=rank - power, group=group)  # send, S bytes
        dist.recv(flat, group_src=rank - power, group=group)
        return
    if rank + power < size:
        spare = torch.empty_like(flat)
        dist.recv(spare, group_src=rank + power, group=group)
        flat += spare
    bounds = chunk_bounds(len(flat), power)

    def block(member, width):
        """The chunks of the ``width`` neighbours among which ``member`` is."""
        first = member // width * width
        return flat[bounds[first][0]:bounds[first + width - 1][1]]

    widths = [1 << bit for bit in range(power.bit_length() - 1)]  # 1, 2, 4 ... n/2
    for width in reversed(widths):
        mine, theirs, partner = block(rank, width), block(rank ^ width, width), rank ^ width
        received = torch.empty_like(mine)
        _exchange(theirs, partner, received, partner, group)  # send, S/2, S/4 ... S/n bytes
        mine += received
    for width in widths:
        mine, theirs, partner = block(rank, width), block(rank ^ width, width), rank ^ width
        _exchange(mine, partner, theirs, partner, group)  # send, S/n ... S/4, S/2 bytes
    if rank + power < size:
        dist.send(flat, group_dst=rank + power, group=group)  # send, S bytes


@torch.no_grad()
def all_to_all(outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Send ``inputs[r]`` to rank r, and fill ``outputs[r]`` with what rank r sends here. Sizes may differ.

    In step k of n - 1 a rank sends to the one k places to its right and receives from the one k places to its left.

    Shapes on one rank: n contiguous tensors each; rank q's ``outputs[r]`` is as large as rank r's ``inputs[q]``.

    Raises:
        ConfigError: not n tensors, one is not contiguous, an output shares memory with another tensor, or this rank is
            not in the group.

    Source: Thakur, Rabenseifner and Gropp 2005, Optimization of collective communication operations in MPICH
    (pairwise exchange).
    """
    rank, size = place_in(group)
    outputs, inputs = _listed("outputs", outputs, group, size), _listed("inputs", inputs, group, size)
    _refuse_what_does_not_fit(outputs, inputs, rank)
    outputs[rank].copy_(inputs[rank])
    for step in range(1, size):
        right, left = (rank + step) % size, (rank - step) % size
        _exchange(inputs[right], right, outputs[left], left, group)  # send, the bytes of inputs[right]


def _flat(tensor, group) -> tuple[int, int, torch.Tensor]:
    """Place, number of ranks, and the tensor as one row that shares its memory."""
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"the tensor is of type {type(tensor).__name__}, and collectives work in place on a "
                          "torch.Tensor: make one, x = torch.as_tensor(...), and use x afterwards")
    if not tensor.is_contiguous():
        raise ConfigError(f"the tensor of shape {list(tensor.shape)} with strides {list(tensor.stride())} is not "
                          "contiguous: its elements do not lie one behind the other in memory, so parts of it cannot "
                          "be sent as they are. Use a copy, x = tensor.contiguous(), and tensor.copy_(x) afterwards")
    if tensor.is_conj() or tensor.is_neg():
        raise ConfigError(f"the tensor of shape {list(tensor.shape)} is a view that conjugates or negates when it is "
                          "read: its memory, which is sent, holds other numbers. Use a copy, "
                          "x = tensor.resolve_conj().resolve_neg(), and tensor.copy_(x) afterwards")
    return *place_in(group), tensor.view(-1)


def _in_chunks(tensor, group) -> tuple[int, int, list[torch.Tensor]]:
    """Place, number of ranks, and one chunk of the tensor for each."""
    rank, size, flat = _flat(tensor, group)
    return rank, size, [flat[start:end] for start, end in chunk_bounds(len(flat), size)]


def _listed(name, tensors, group, size) -> list[torch.Tensor]:
    """One flat tensor for each rank of the group."""
    try:
        tensors = list(tensors)
    except TypeError:
        raise ConfigError(f"{name} is of type {type(tensors).__name__}: give a list of {size} tensors, one for each "
                          "rank of the group") from None
    if len(tensors) != size:
        raise ConfigError(f"{name} has {len(tensors)} tensors; the group has {size} ranks, so give {size}")
    return [_flat(tensor, group)[2] for tensor in tensors]


def _refuse_what_does_not_fit(outputs, inputs, rank) -> None:
    """An all_to_all must not write what is still to be sent, or one place twice; what stays here has one size."""
    if len(outputs[rank]) != len(inputs[rank]):
        raise ConfigError(f"outputs[{rank}] has {len(outputs[rank])} elements and inputs[{rank}] has "
                          f"{len(inputs[rank])}: rank {rank} sends them to itself, so give both one size")
    places = [(name, i, tensor.untyped_storage()._cdata, tensor.storage_offset() * tensor.itemsize, tensor.nbytes)
              for name, tensors in (("outputs", outputs), ("inputs", inputs)) for i, tensor in enumerate(tensors)]
    for at, (name, i, storage, start, length) in enumerate(places[:len(outputs)]):
        for other, j, its_storage, its_start, its_length in places[at + 1:]:
            if storage == its_storage and start < its_start + its_length and its_start < start + length:
                raise ConfigError(f"{name}[{i}] and {other}[{j}] share memory, so what arrives for one overwrites the "
                                  "other: make new outputs, [torch.empty_like(...) for ...], not [tensor] * n")


def _exchange(sent, destination, received, source, group) -> None:
    """Send one tensor while another one arrives."""
    _wait(_start(sent, destination, received, source, group))


def _start(sent, destination, received, source, group) -> list:
    """Hand over a receive and a send; their handles, in this order (NCCL gives one for both).

    Both stand in one batch, so that nobody waits for a send that its peer is not yet ready for.
    """
    return dist.batch_isend_irecv([
        dist.P2POp(dist.irecv, received, group=group, group_peer=source),
        dist.P2POp(dist.isend, sent, group=group, group_peer=destination),
    ])  # fmt: skip


def _wait(works) -> None:
    """Wait for all of some handles."""
    for work in works:
        work.wait()
