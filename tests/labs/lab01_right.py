# ruff: noqa
import torch
import torch.distributed as dist

rank, world_size = dist.get_rank(), dist.get_world_size()


# %% lab01.1: sums
def chunk_bounds(length, size):
    least, more = divmod(length, size)
    bounds, start = [], 0
    for chunk in range(size):
        end = start + least + (chunk < more)
        bounds.append((start, end))
        start = end
    return bounds


# %% lab01.1: closed form
def chunk_bounds(length, size):
    start = lambda chunk: chunk * (length // size) + min(chunk, length % size)
    return [[start(chunk), start(chunk + 1)] for chunk in range(size)]


# %% lab01.2: isend, irecv, wait
def ring_reduce_scatter(tensor):
    bounds = chunk_bounds(len(tensor), world_size)
    spare = torch.empty(bounds[0][1], dtype=tensor.dtype)
    for step in range(world_size - 1):
        start, end = bounds[(rank - step - 1) % world_size]
        first, last = bounds[(rank - step - 2) % world_size]
        received = spare[: last - first]
        handles = [dist.isend(tensor[start:end], (rank + 1) % world_size),
                   dist.irecv(received, (rank - 1) % world_size)]
        for handle in handles:
            handle.wait()
        tensor[first:last] += received


# %% lab01.2: even ranks send first
def ring_reduce_scatter(tensor):
    n, right, left = world_size, (rank + 1) % world_size, (rank - 1) % world_size
    chunks = [tensor[start:end] for start, end in chunk_bounds(len(tensor), n)]
    spare = torch.zeros_like(chunks[0])
    for chunk in range(rank - 1, rank - n, -1):
        mine, theirs = chunks[chunk % n], chunks[(chunk - 1) % n]
        if rank % 2 == 0:
            dist.send(mine, right)
            dist.recv(spare[: len(theirs)], left)
        else:
            dist.recv(spare[: len(theirs)], left)
            dist.send(mine, right)
        theirs.add_(spare[: len(theirs)])


# %% lab01.2: to the left, in a batch
def ring_reduce_scatter(tensor):
    n, right, left = world_size, (rank + 1) % world_size, (rank - 1) % world_size
    chunks = [tensor[start:end] for start, end in chunk_bounds(len(tensor), n)]
    spare = torch.empty_like(chunks[0])
    for step in range(1, n):
        mine, theirs = chunks[(rank + step) % n], chunks[(rank + step + 1) % n]
        received = spare[: theirs.numel()]
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, left), dist.P2POp(dist.irecv, received, right)]):
            work.wait()
        theirs += received


# %% lab01.3: isend, irecv, wait
def ring_all_gather(tensor):
    bounds = chunk_bounds(len(tensor), world_size)
    for step in range(world_size - 1):
        start, end = bounds[(rank - step) % world_size]
        first, last = bounds[(rank - step - 1) % world_size]
        handles = [dist.isend(tensor[start:end], (rank + 1) % world_size),
                   dist.irecv(tensor[first:last], (rank - 1) % world_size)]
        for handle in handles:
            handle.wait()


def ring_all_reduce(tensor):
    ring_reduce_scatter(tensor)
    ring_all_gather(tensor)


# %% lab01.3: both halves in one loop, rank 0 receives last
def ring(tensor, start, steps, add):
    n = world_size
    chunks = tensor.tensor_split(n)
    spare = torch.empty_like(chunks[0]) if add else None
    for step in range(steps):
        mine, theirs = chunks[(start - step) % n], chunks[(start - step - 1) % n]
        received = spare[: len(theirs)] if add else theirs
        if rank == 0:
            dist.send(mine, 1)
            dist.recv(received, n - 1)
        else:
            handle = dist.irecv(received, rank - 1)
            dist.send(mine, (rank + 1) % n)
            handle.wait()
        if add:
            theirs += received


def ring_all_gather(tensor):
    ring(tensor, rank, world_size - 1, False)


def ring_all_reduce(tensor):
    ring(tensor, rank - 1, world_size - 1, True)
    ring(tensor, rank, world_size - 1, False)


# %% lab01.3: sends awaited at the end, empty chunks not sent
def ring_all_gather(tensor):
    n, sending = world_size, []
    bounds = chunk_bounds(tensor.numel(), n)
    for step in range(n - 1):
        (start, end), (first, last) = bounds[(rank - step) % n], bounds[(rank - step - 1) % n]
        if end > start:
            sending.append(dist.isend(tensor[start:end], (rank + 1) % n))
        if last > first:
            dist.recv(tensor[first:last], (rank - 1) % n)
    for handle in sending:
        handle.wait()


def ring_all_reduce(tensor):
    ring_reduce_scatter(tensor)
    ring_all_gather(tensor)


# %% lab01.3: as in the textbook: a rank's own chunk first, another one finished
def ring_all_gather(tensor):
    n, r = dist.get_world_size(), dist.get_rank()
    c = tensor.tensor_split(n)
    for k in range(n - 1):
        s = dist.isend(c[(r - k) % n], (r + 1) % n)
        dist.recv(c[(r - k - 1) % n], (r - 1) % n)
        s.wait()
def ring_all_reduce(tensor):
    n, r = dist.get_world_size(), dist.get_rank()
    c = tensor.tensor_split(n)
    tmp = torch.empty_like(c[0])
    for k in range(n - 1):
        s = dist.isend(c[(r - k) % n], (r + 1) % n)
        into = c[(r - k - 1) % n]
        dist.recv(tmp[:len(into)], (r - 1) % n)
        s.wait()
        into += tmp[:len(into)]
    for k in range(n - 1):
        s = dist.isend(c[(r + 1 - k) % n], (r + 1) % n)
        dist.recv(c[(r - k) % n], (r - 1) % n)
        s.wait()


# %% lab01.4: halves
def two_node_all_reduce(tensor):
    halves = tensor.tensor_split(2)
    mine, other = halves[rank % 2], halves[1 - rank % 2]
    inside, across = rank ^ 1, rank ^ 2
    received = torch.empty_like(mine)
    for partner, given in ((inside, other), (across, mine)):
        works = [dist.isend(given.clone(), partner), dist.irecv(received, partner)]
        for work in works:
            work.wait()
        mine += received
    works = [dist.isend(mine, inside), dist.irecv(other, inside)]
    for work in works:
        work.wait()


# %% lab01.4: leaders
def two_node_all_reduce(tensor):
    if rank % 2:
        dist.send(tensor, rank - 1)
        dist.recv(tensor, rank - 1)
        return
    spare = torch.empty_like(tensor)
    dist.recv(spare, rank + 1)
    tensor += spare
    if rank == 0:
        dist.send(tensor, 2)
        dist.recv(spare, 2)
    else:
        dist.recv(spare, 0)
        dist.send(tensor, 0)
    tensor += spare
    dist.send(tensor, rank + 1)


# %% lab01.4: everything to rank 3 and back
def two_node_all_reduce(tensor):
    spare = torch.empty_like(tensor)
    for source, to in ((0, 1), (1, 3), (2, 3)):
        if rank == source:
            dist.send(tensor, to)
        if rank == to:
            dist.recv(spare, source)
            tensor += spare
    for source, to in ((3, 2), (3, 1), (1, 0)):
        if rank == source:
            dist.send(tensor, to)
        if rank == to:
            dist.recv(tensor, source)


# %% lab01.5: all named
diagnosis = {"B": "whole tensors sent", "A": "joined in order of arrival", "C": "one neighbour after the other",
             "D": "remainder dropped", "F": "adds in the second half", "E": "all send first"}


# %% lab01.5: all named, with a capital and blanks
diagnosis = {"B": "Whole tensors sent", "A": "Joined in order of arrival ", "C": "one neighbour  after the other",
             "D": "remainder dropped", "F": "adds in the second half", "E": "ALL SEND FIRST"}
