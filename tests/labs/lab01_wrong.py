# ruff: noqa
import torch
import torch.distributed as dist

rank, world_size = dist.get_rank(), dist.get_world_size()


def exchange(sent, to, received, source):
    handles = [dist.isend(sent, to), dist.irecv(received, source)]
    for handle in handles:
        handle.wait()


def reduce_scatter(tensor, cut=None, steps=None, shift=1):
    n = world_size
    cut = cut or chunk_bounds
    chunks = [tensor[start:end] for start, end in cut(len(tensor), n)]
    spare = torch.empty(max(map(len, chunks)), dtype=tensor.dtype)
    for step in range(n - 1 if steps is None else steps):
        mine, theirs = chunks[(rank - step - shift) % n], chunks[(rank - step - shift - 1) % n]
        received = spare[: len(theirs)]
        exchange(mine, (rank + 1) % n, received, (rank - 1) % n)
        theirs += received


def all_gather(tensor, cut=None, steps=None, shift=0):
    n = world_size
    cut = cut or chunk_bounds
    chunks = [tensor[start:end] for start, end in cut(len(tensor), n)]
    for step in range(n - 1 if steps is None else steps):
        mine, theirs = chunks[(rank - step - shift) % n], chunks[(rank - step - shift - 1) % n]
        exchange(mine, (rank + 1) % n, theirs, (rank - 1) % n)


# %% lab01.1: remainder dropped
def chunk_bounds(length, size):
    step = length // size
    return [(i * step, (i + 1) * step) for i in range(size)]


# %% lab01.1: rest in the last chunk
def chunk_bounds(length, size):
    step = length // size
    return [(i * step, length if i == size - 1 else (i + 1) * step) for i in range(size)]


# %% lab01.1: all chunks rounded up
def chunk_bounds(length, size):
    step = (length + size - 1) // size
    return [(min(i * step, length), min(i * step + step, length)) for i in range(size)]


# %% lab01.1: longer chunks last
def chunk_bounds(length, size):
    return [(i * length // size, (i + 1) * length // size) for i in range(size)] if length % size == 0 else [
        (i * (length // size) + max(0, i - size + length % size),
         (i + 1) * (length // size) + max(0, i + 1 - size + length % size)) for i in range(size)]


# %% lab01.1: last element inside
def chunk_bounds(length, size):
    least, more = divmod(length, size)
    return [(i * least + min(i, more), (i + 1) * least + min(i + 1, more) - 1) for i in range(size)]


# %% lab01.1: sizes for bounds
def chunk_bounds(length, size):
    return [length // size + (i < length % size) for i in range(size)]


# %% lab01.1: too long to list
def chunk_bounds(length, size):
    bounds, start = [], 0
    for chunk in torch.empty(length).tensor_split(size):
        bounds.append((start, start + len(chunk)))
        start += len(chunk)
    return bounds


# %% lab01.1: borrowed
def chunk_bounds(length, size):
    from dtlab.parallel.collectives import chunk_bounds as theirs

    return theirs(length, size)


# %% lab01.1: longer chunks not first
def chunk_bounds(length, size):
    return [(i * length // size, (i + 1) * length // size) for i in range(size)]


# %% lab01.1: no list
def chunk_bounds(length, size):
    least, more = divmod(length, size)
    starts = [i * least + min(i, more) for i in range(size + 1)]
    return zip(starts, starts[1:])


# %% lab01.1: no return
def chunk_bounds(length, size):
    least, more = divmod(length, size)
    starts = [i * least + min(i, more) for i in range(size + 1)]
    list(zip(starts, starts[1:]))


# %% lab01.2: all send first
def ring_reduce_scatter(tensor):
    n = world_size
    chunks = [tensor[start:end] for start, end in chunk_bounds(len(tensor), n)]
    for step in range(n - 1):
        mine, theirs = chunks[(rank - step - 1) % n], chunks[(rank - step - 2) % n]
        received = torch.empty_like(theirs)
        dist.send(mine, (rank + 1) % n)
        dist.recv(received, (rank - 1) % n)
        theirs += received


# %% lab01.2: all receive first
def ring_reduce_scatter(tensor):
    n = world_size
    chunks = [tensor[start:end] for start, end in chunk_bounds(len(tensor), n)]
    for step in range(n - 1):
        mine, theirs = chunks[(rank - step - 1) % n], chunks[(rank - step - 2) % n]
        received = torch.empty_like(theirs)
        dist.recv(received, (rank - 1) % n)
        dist.send(mine, (rank + 1) % n)
        theirs += received


# %% lab01.2: buffer in use (one spare for what goes and what comes)
def ring_reduce_scatter(tensor):
    n = world_size
    chunks = [tensor[start:end] for start, end in chunk_bounds(len(tensor), n)]
    spare = torch.empty_like(chunks[0])
    for step in range(n - 1):
        mine, theirs = chunks[(rank - step - 1) % n], chunks[(rank - step - 2) % n]
        out = spare[: len(mine)]
        out.copy_(mine)
        sending = dist.isend(out, (rank + 1) % n)
        dist.recv(spare[: len(theirs)], (rank - 1) % n)
        theirs += spare[: len(theirs)]
        sending.wait()


# %% lab01.2: buffer in use (adds before the message is there)
def ring_reduce_scatter(tensor):
    n = world_size
    chunks = [tensor[start:end] for start, end in chunk_bounds(len(tensor), n)]
    for step in range(n - 1):
        mine, theirs = chunks[(rank - step - 1) % n], chunks[(rank - step - 2) % n]
        received = torch.empty_like(theirs)
        handles = [dist.isend(mine, (rank + 1) % n), dist.irecv(received, (rank - 1) % n)]
        theirs += received
        for handle in handles:
            handle.wait()


# %% lab01.2: handle never awaited
def ring_reduce_scatter(tensor):
    n = world_size
    chunks = [tensor[start:end] for start, end in chunk_bounds(len(tensor), n)]
    for step in range(n - 1):
        mine, theirs = chunks[(rank - step - 1) % n], chunks[(rank - step - 2) % n]
        received = torch.empty_like(theirs)
        sending = dist.isend(mine, (rank + 1) % n)
        dist.recv(received, (rank - 1) % n)
        theirs += received


# %% lab01.2: handle never awaited (nor kept)
def ring_reduce_scatter(tensor):
    n = world_size
    chunks = [tensor[start:end] for start, end in chunk_bounds(len(tensor), n)]
    for step in range(n - 1):
        mine, theirs = chunks[(rank - step - 1) % n], chunks[(rank - step - 2) % n]
        received = torch.empty_like(theirs)
        dist.isend(mine, (rank + 1) % n)
        dist.recv(received, (rank - 1) % n)
        theirs += received


# %% lab01.2: buffer that does not fit (float32)
def ring_reduce_scatter(tensor):
    n = world_size
    chunks = [tensor[start:end] for start, end in chunk_bounds(len(tensor), n)]
    spare = torch.empty(len(chunks[0]))
    for step in range(n - 1):
        mine, theirs = chunks[(rank - step - 1) % n], chunks[(rank - step - 2) % n]
        exchange(mine, (rank + 1) % n, spare[: len(theirs)], (rank - 1) % n)
        theirs += spare[: len(theirs)]


# %% lab01.2: buffer that does not fit (as long as the longest)
def ring_reduce_scatter(tensor):
    n = world_size
    chunks = [tensor[start:end] for start, end in chunk_bounds(len(tensor), n)]
    spare = torch.empty_like(chunks[0])
    for step in range(n - 1):
        mine, theirs = chunks[(rank - step - 1) % n], chunks[(rank - step - 2) % n]
        exchange(mine, (rank + 1) % n, spare, (rank - 1) % n)
        theirs += spare[: len(theirs)]


# %% lab01.2: n = 1 forgotten
def ring_reduce_scatter(tensor):
    n, right, left = world_size, (rank + 1) % world_size, (rank - 1) % world_size
    chunks = [tensor[start:end] for start, end in chunk_bounds(len(tensor), n)]
    spare = torch.empty_like(chunks[0])
    step = 0
    while True:
        mine, theirs = chunks[(rank - step - 1) % n], chunks[(rank - step - 2) % n]
        received = spare[: len(theirs)]
        exchange(mine, right, received, left)
        theirs += received
        step += 1
        if step >= n - 1:
            break


# %% lab01.2: not on 3 ranks
def ring_reduce_scatter(tensor):
    n = world_size
    right, left = (rank + 1) & (n - 1), (rank - 1) & (n - 1)
    chunks = [tensor[start:end] for start, end in chunk_bounds(len(tensor), n)]
    spare = torch.empty_like(chunks[0])
    for step in range(n - 1):
        mine, theirs = chunks[(rank - step - 1) & (n - 1)], chunks[(rank - step - 2) & (n - 1)]
        received = spare[: len(theirs)]
        exchange(mine, right, received, left)
        theirs += received


# %% lab01.2: neighbour by rank ^ 1
def ring_reduce_scatter(tensor):
    n = world_size
    chunks = [tensor[start:end] for start, end in chunk_bounds(len(tensor), n)]
    spare = torch.empty_like(chunks[0])
    for step in range(n - 1):
        mine, theirs = chunks[(rank - step - 1) % n], chunks[(rank - step - 2) % n]
        received = spare[: len(theirs)]
        exchange(mine, rank ^ 1, received, rank ^ 1)
        theirs += received


# %% lab01.2: not in place
def ring_reduce_scatter(tensor):
    tensor = tensor + 0
    reduce_scatter(tensor)
    return tensor


# %% lab01.2: not in place (new chunks)
def ring_reduce_scatter(tensor):
    n = world_size
    chunks = [tensor[start:end] for start, end in chunk_bounds(len(tensor), n)]
    for step in range(n - 1):
        mine, at = chunks[(rank - step - 1) % n], (rank - step - 2) % n
        received = torch.empty_like(chunks[at])
        exchange(mine, (rank + 1) % n, received, (rank - 1) % n)
        chunks[at] = chunks[at] + received


# %% lab01.2: rounded to float32
def ring_reduce_scatter(tensor):
    rough = tensor.float()
    reduce_scatter(rough)
    tensor.copy_(rough)


# %% lab01.2: remainder dropped
def ring_reduce_scatter(tensor):
    reduce_scatter(tensor, lambda length, n: [(i * (length // n), (i + 1) * (length // n)) for i in range(n)])


# %% lab01.2: other chunks (the last takes the rest)
def ring_reduce_scatter(tensor):
    def cut(length, n):
        return [(i * (length // n), length if i == n - 1 else (i + 1) * (length // n)) for i in range(n)]

    reduce_scatter(tensor, cut)


# %% lab01.2: other chunks (rounded up)
def ring_reduce_scatter(tensor):
    def cut(length, n):
        step = -(-length // n)
        return [(min(i * step, length), min(i * step + step, length)) for i in range(n)]

    reduce_scatter(tensor, cut)


# %% lab01.2: another chunk finished
def ring_reduce_scatter(tensor):
    reduce_scatter(tensor, shift=0)


# %% lab01.2: one step short
def ring_reduce_scatter(tensor):
    reduce_scatter(tensor, steps=world_size - 2)


# %% lab01.2: one step too many
def ring_reduce_scatter(tensor):
    reduce_scatter(tensor, steps=world_size if world_size > 1 else 0)


# %% lab01.2: adds twice
def ring_reduce_scatter(tensor):
    n = world_size
    chunks = [tensor[start:end] for start, end in chunk_bounds(len(tensor), n)]
    spare = torch.empty_like(chunks[0])
    for step in range(n - 1):
        mine, theirs = chunks[(rank - step - 1) % n], chunks[(rank - step - 2) % n]
        received = spare[: len(theirs)]
        exchange(mine, (rank + 1) % n, received, (rank - 1) % n)
        theirs += received
        tensor[slice(*chunk_bounds(len(tensor), n)[(rank - step - 2) % n])] += received


# %% lab01.2: overwrites
def ring_reduce_scatter(tensor):
    n = world_size
    chunks = [tensor[start:end] for start, end in chunk_bounds(len(tensor), n)]
    for step in range(n - 1):
        mine, theirs = chunks[(rank - step - 1) % n], chunks[(rank - step - 2) % n]
        exchange(mine, (rank + 1) % n, theirs, (rank - 1) % n)


# %% lab01.2: sends what it brought
def ring_reduce_scatter(tensor):
    n = world_size
    chunks = [tensor[start:end] for start, end in chunk_bounds(len(tensor), n)]
    brought = [chunk.clone() for chunk in chunks]
    for step in range(n - 1):
        mine, theirs = brought[(rank - step - 1) % n], chunks[(rank - step - 2) % n]
        received = torch.empty_like(theirs)
        exchange(mine, (rank + 1) % n, received, (rank - 1) % n)
        theirs += received


# %% lab01.2: whole tensors sent
def ring_reduce_scatter(tensor):
    brought, received = tensor.clone(), torch.empty_like(tensor)
    for distance in range(1, world_size):
        exchange(brought, (rank + distance) % world_size, received, (rank - distance) % world_size)
        tensor += received


# %% lab01.2: two spare chunks
def ring_reduce_scatter(tensor):
    n = world_size
    chunks = [tensor[start:end] for start, end in chunk_bounds(len(tensor), n)]
    for step in range(n - 1):
        mine, theirs = chunks[(rank - step - 1) % n], chunks[(rank - step - 2) % n]
        received = torch.empty_like(theirs)
        exchange(mine, (rank + 1) % n, received, (rank - 1) % n)
        theirs += received


# %% lab01.2: a second tensor
def ring_reduce_scatter(tensor):
    work = tensor.clone()
    n = world_size
    chunks = [work[start:end] for start, end in chunk_bounds(len(tensor), n)]
    for step in range(n - 1):
        mine, theirs = chunks[(rank - step - 1) % n], chunks[(rank - step - 2) % n]
        received = torch.empty_like(theirs)
        exchange(mine, (rank + 1) % n, received, (rank - 1) % n)
        theirs += received
    tensor.copy_(work)


# %% lab01.2: a collective called
def ring_reduce_scatter(tensor):
    dist.all_reduce(tensor)


# %% lab01.2: borrowed
def ring_reduce_scatter(tensor):
    from dtlab.parallel import ring_reduce_scatter as theirs

    theirs(tensor)


# %% lab01.2: mean for sum
def ring_reduce_scatter(tensor):
    c = tensor.tensor_split(world_size); b = torch.empty_like(c[0])
    for k in range(world_size - 1):
        out, into = c[(rank-k-1) % world_size], c[(rank-k-2) % world_size]
        w = dist.isend(out, (rank+1) % world_size)
        dist.recv(b[:len(into)], (rank-1) % world_size); w.wait(); into += b[:len(into)]
    c[rank].div_(world_size)


# %% lab01.2: not on 3 ranks (WORLD_SIZE for world_size)
WORLD_SIZE = 4


def ring_reduce_scatter(tensor):
    n = WORLD_SIZE
    chunks = [tensor[start:end] for start, end in chunk_bounds(len(tensor), n)]
    spare = torch.empty_like(chunks[0])
    for step in range(n - 1):
        mine, theirs = chunks[(rank - step - 1) % n], chunks[(rank - step - 2) % n]
        received = spare[: len(theirs)]
        exchange(mine, (rank + 1) % n, received, (rank - 1) % n)
        theirs += received


# %% lab01.2: a sum beside the spare chunk
def ring_reduce_scatter(tensor):
    n = world_size
    bounds = chunk_bounds(len(tensor), n)
    spare = torch.empty(bounds[0][1], dtype=tensor.dtype)
    for step in range(n - 1):
        a, b = bounds[(rank - step - 1) % n]
        c, d = bounds[(rank - step - 2) % n]
        exchange(tensor[a:b], (rank + 1) % n, spare[: d - c], (rank - 1) % n)
        tensor[c:d] = tensor[c:d] + spare[: d - c]


# %% lab01.2: straight to everybody
def ring_reduce_scatter(tensor):
    n = world_size
    chunks = [tensor[start:end] for start, end in chunk_bounds(len(tensor), n)]
    spare = torch.empty_like(chunks[rank])
    for step in range(1, n):
        exchange(chunks[(rank + step) % n], (rank + step) % n, spare, (rank - step) % n)
        chunks[rank] += spare


# %% lab01.2: chunks in the other direction
def ring_reduce_scatter(tensor):
    n = world_size
    chunks = [tensor[start:end] for start, end in chunk_bounds(len(tensor), n)]
    spare = torch.empty_like(chunks[0])
    for step in range(n - 1):
        mine, theirs = chunks[(rank + step + 1) % n], chunks[(rank + step + 2) % n]
        received = spare[: len(theirs)]
        exchange(mine, (rank + 1) % n, received, (rank - 1) % n)
        theirs += received


# %% lab01.2: chunks in the other direction (to the left)
def ring_reduce_scatter(tensor):
    n = world_size
    chunks = [tensor[start:end] for start, end in chunk_bounds(len(tensor), n)]
    spare = torch.empty_like(chunks[0])
    for step in range(n - 1):
        mine, theirs = chunks[(rank - step - 1) % n], chunks[(rank - step - 2) % n]
        received = spare[: len(theirs)]
        exchange(mine, (rank - 1) % n, received, (rank + 1) % n)
        theirs += received


# %% lab01.2: taken for another chunk
def ring_reduce_scatter(tensor):
    n = world_size
    chunks = [tensor[start:end] for start, end in chunk_bounds(len(tensor), n)]
    spare = torch.empty_like(chunks[0])
    for step in range(n - 1):
        mine, theirs = chunks[(rank - step - 1) % n], chunks[(rank - step) % n]
        received = spare[: len(theirs)]
        exchange(mine, (rank + 1) % n, received, (rank - 1) % n)
        theirs += received


# %% lab01.2: message missing
def ring_reduce_scatter(tensor):
    n = world_size
    chunks = [tensor[start:end] for start, end in chunk_bounds(len(tensor), n)]
    spare = torch.empty_like(chunks[0])
    for step in range(n - 1):
        mine, theirs = chunks[(rank - step - 1) % n], chunks[(rank - step - 2) % n]
        sending = dist.isend(mine, (rank + 1) % n) if step or rank else None
        dist.recv(spare[: len(theirs)], (rank - 1) % n)
        theirs += spare[: len(theirs)]
        if sending:
            sending.wait()


# %% lab01.2: awaited twice
def ring_reduce_scatter(tensor):
    n, handles = world_size, []
    chunks = [tensor[start:end] for start, end in chunk_bounds(len(tensor), n)]
    spare = torch.empty_like(chunks[0])
    for step in range(n - 1):
        mine, theirs = chunks[(rank - step - 1) % n], chunks[(rank - step - 2) % n]
        received = spare[: len(theirs)]
        handles += [dist.isend(mine, (rank + 1) % n), dist.irecv(received, (rank - 1) % n)]
        for handle in handles:
            handle.wait()
        theirs += received


# %% lab01.3: order of arrival
def ring_all_gather(tensor):
    start, end = chunk_bounds(len(tensor), world_size)[rank]
    arrived = [tensor[start:end].clone()]
    for step in range(world_size - 1):
        first, last = chunk_bounds(len(tensor), world_size)[(rank - step - 1) % world_size]
        arrived.append(torch.empty(last - first, dtype=tensor.dtype))
        exchange(arrived[-2], (rank + 1) % world_size, arrived[-1], (rank - 1) % world_size)
    tensor.copy_(torch.cat(arrived))


def ring_all_reduce(tensor):
    ring_reduce_scatter(tensor)
    ring_all_gather(tensor)


# %% lab01.3: whole tensors sent
def ring_all_gather(tensor):
    all_gather(tensor)


def ring_all_reduce(tensor):
    parts = [tensor.clone() if r == rank else torch.empty_like(tensor) for r in range(world_size)]
    for distance in range(1, world_size):
        source = (rank - distance) % world_size
        exchange(parts[rank], (rank + distance) % world_size, parts[source], source)
    tensor.copy_(sum(parts))


# %% lab01.3: whole tensors sent (through rank 0)
def ring_all_gather(tensor):
    all_gather(tensor)


def ring_all_reduce(tensor):
    received = torch.empty_like(tensor)
    if rank > 0:
        dist.send(tensor, 0)
        dist.recv(tensor, 0)
        return
    for source in range(1, world_size):
        dist.recv(received, source)
        tensor += received
    for other in range(1, world_size):
        dist.send(tensor, other)


# %% lab01.3: rank 0 only
def ring_all_gather(tensor):
    all_gather(tensor)


def ring_all_reduce(tensor):
    if rank > 0:
        dist.send(tensor, 0)
        return
    received = torch.empty_like(tensor)
    for source in range(1, world_size):
        dist.recv(received, source)
        tensor += received


# %% lab01.3: adds in the second half
def ring_all_gather(tensor):
    n = world_size
    chunks = [tensor[start:end] for start, end in chunk_bounds(len(tensor), n)]
    for step in range(n - 1):
        mine, theirs = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        received = torch.empty_like(theirs)
        exchange(mine, (rank + 1) % n, received, (rank - 1) % n)
        theirs += received


def ring_all_reduce(tensor):
    ring_reduce_scatter(tensor)
    ring_all_gather(tensor)


# %% lab01.3: one step short
def ring_all_gather(tensor):
    all_gather(tensor, steps=world_size - 2)


def ring_all_reduce(tensor):
    ring_reduce_scatter(tensor)
    ring_all_gather(tensor)


# %% lab01.3: another chunk first
def ring_all_gather(tensor):
    all_gather(tensor, shift=1)


def ring_all_reduce(tensor):
    ring_reduce_scatter(tensor)
    ring_all_gather(tensor)


# %% lab01.3: remainder dropped
def ring_all_gather(tensor):
    all_gather(tensor, lambda length, n: [(i * (length // n), (i + 1) * (length // n)) for i in range(n)])


def ring_all_reduce(tensor):
    cut = lambda length, n: [(i * (length // n), (i + 1) * (length // n)) for i in range(n)]
    reduce_scatter(tensor, cut)
    all_gather(tensor, cut)


# %% lab01.3: all send first
def ring_all_gather(tensor):
    n = world_size
    chunks = [tensor[start:end] for start, end in chunk_bounds(len(tensor), n)]
    for step in range(n - 1):
        dist.send(chunks[(rank - step) % n], (rank + 1) % n)
        dist.recv(chunks[(rank - step - 1) % n], (rank - 1) % n)


def ring_all_reduce(tensor):
    ring_reduce_scatter(tensor)
    ring_all_gather(tensor)


# %% lab01.3: buffer in use (hands on what is not there yet)
def ring_all_gather(tensor):
    n, handles = world_size, []
    chunks = [tensor[start:end] for start, end in chunk_bounds(len(tensor), n)]
    for step in range(n - 1):
        handles.append(dist.isend(chunks[(rank - step) % n], (rank + 1) % n))
        handles.append(dist.irecv(chunks[(rank - step - 1) % n], (rank - 1) % n))
    for handle in handles:
        handle.wait()


def ring_all_reduce(tensor):
    ring_reduce_scatter(tensor)
    ring_all_gather(tensor)


# %% lab01.3: neighbour by rank ^ 1
def ring_all_gather(tensor):
    n = world_size
    chunks = [tensor[start:end] for start, end in chunk_bounds(len(tensor), n)]
    for step in range(n - 1):
        exchange(chunks[(rank - step) % n], rank ^ 1, chunks[(rank - step - 1) % n], rank ^ 1)


def ring_all_reduce(tensor):
    ring_reduce_scatter(tensor)
    ring_all_gather(tensor)


# %% lab01.3: a second tensor
def ring_all_gather(tensor):
    all_gather(tensor)


def ring_all_reduce(tensor):
    whole = tensor.clone()
    ring_reduce_scatter(whole)
    all_gather(whole)
    tensor.copy_(whole)


# %% lab01.3: two spare chunks
def ring_all_gather(tensor):
    all_gather(tensor)


def ring_all_reduce(tensor):
    n = world_size
    chunks = [tensor[start:end] for start, end in chunk_bounds(len(tensor), n)]
    for step in range(n - 1):
        received = torch.empty_like(chunks[(rank - step - 2) % n])
        exchange(chunks[(rank - step - 1) % n], (rank + 1) % n, received, (rank - 1) % n)
        chunks[(rank - step - 2) % n] += received
    all_gather(tensor)


# %% lab01.3: not on 3 ranks
def ring_all_gather(tensor):
    n = world_size
    chunks = [tensor[start:end] for start, end in chunk_bounds(len(tensor), n)]
    for step in range(n - 1):
        exchange(chunks[(rank - step) % n], (rank + 1) & (n - 1), chunks[(rank - step - 1) % n], (rank - 1) & (n - 1))


def ring_all_reduce(tensor):
    ring_reduce_scatter(tensor)
    ring_all_gather(tensor)


# %% lab01.3: mean for sum
def ring_all_gather(tensor):
    c = tensor.tensor_split(world_size)
    for k in range(world_size - 1):
        w = dist.isend(c[(rank-k) % world_size], (rank+1) % world_size)
        dist.recv(c[(rank-k-1) % world_size], (rank-1) % world_size); w.wait()
def ring_all_reduce(tensor):
    ring_reduce_scatter(tensor); ring_all_gather(tensor); tensor /= world_size


# %% lab01.3: spare chunk in the second half
def ring_all_gather(tensor):
    n = world_size
    chunks = [tensor[start:end] for start, end in chunk_bounds(len(tensor), n)]
    spare = torch.empty_like(chunks[0])
    for step in range(n - 1):
        mine, theirs = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        exchange(mine, (rank + 1) % n, spare[: len(theirs)], (rank - 1) % n)
        theirs.copy_(spare[: len(theirs)])


def ring_all_reduce(tensor):
    ring_reduce_scatter(tensor)
    ring_all_gather(tensor)


# %% lab01.3: second half missing
def ring_all_gather(tensor):
    all_gather(tensor)


def ring_all_reduce(tensor):
    ring_reduce_scatter(tensor)


# %% lab01.3: straight to everybody
def ring_all_gather(tensor):
    n = world_size
    chunks = [tensor[start:end] for start, end in chunk_bounds(len(tensor), n)]
    for step in range(1, n):
        exchange(chunks[rank], (rank + step) % n, chunks[(rank - step) % n], (rank - step) % n)


def ring_all_reduce(tensor):
    ring_reduce_scatter(tensor)
    ring_all_gather(tensor)


# %% lab01.3: halves in the other order
def ring_all_gather(tensor):
    all_gather(tensor)


def ring_all_reduce(tensor):
    ring_all_gather(tensor)
    ring_reduce_scatter(tensor)


# %% lab01.3: chunks in the other direction
def ring_all_gather(tensor):
    n = world_size
    chunks = [tensor[start:end] for start, end in chunk_bounds(len(tensor), n)]
    for step in range(n - 1):
        exchange(chunks[(rank + step) % n], (rank + 1) % n, chunks[(rank + step + 1) % n], (rank - 1) % n)


def ring_all_reduce(tensor):
    ring_reduce_scatter(tensor)
    ring_all_gather(tensor)


# %% lab01.3: another chunk first (of the chunk behind)
def ring_all_gather(tensor):
    all_gather(tensor, shift=-1)


def ring_all_reduce(tensor):
    ring_reduce_scatter(tensor)
    ring_all_gather(tensor)


# %% lab01.4: flat ring
def two_node_all_reduce(tensor):
    reduce_scatter(tensor)
    all_gather(tensor)


# %% lab01.4: whole tensors across
def two_node_all_reduce(tensor):
    received = torch.empty_like(tensor)
    for partner in (rank ^ 1, rank ^ 2):
        exchange(tensor, partner, received, partner)
        tensor += received


# %% lab01.4: whole tensors across (everything to rank 0)
def two_node_all_reduce(tensor):
    received = torch.empty_like(tensor)
    if rank > 0:
        dist.send(tensor, 0)
        dist.recv(tensor, 0)
        return
    for source in (1, 2, 3):
        dist.recv(received, source)
        tensor += received
    for other in (1, 2, 3):
        dist.send(tensor, other)


# %% lab01.4: node sums only
def two_node_all_reduce(tensor):
    received = torch.empty_like(tensor)
    exchange(tensor, rank ^ 1, received, rank ^ 1)
    tensor += received


# %% lab01.4: partners only
def two_node_all_reduce(tensor):
    received = torch.empty_like(tensor)
    exchange(tensor, rank ^ 2, received, rank ^ 2)
    tensor += received


# %% lab01.4: leaders only
def two_node_all_reduce(tensor):
    received = torch.empty_like(tensor)
    if rank % 2:
        dist.send(tensor, rank - 1)
        return
    dist.recv(received, rank + 1)
    tensor += received
    exchange(tensor, rank ^ 2, received, rank ^ 2)
    tensor += received


# %% lab01.4: half a sum
def two_node_all_reduce(tensor):
    halves = tensor.tensor_split(2)
    mine, other = halves[rank % 2], halves[1 - rank % 2]
    received = torch.empty_like(mine)
    for partner, given in ((rank ^ 1, other), (rank ^ 2, mine)):
        exchange(given, partner, received, partner)
        mine += received


# %% lab01.4: a constant factor
def two_node_all_reduce(tensor):
    halves = tensor.tensor_split(2)
    mine, other = halves[rank % 2], halves[1 - rank % 2]
    received = torch.empty_like(mine)
    for partner, given in ((rank ^ 1, other), (rank ^ 2, mine)):
        exchange(given, partner, received, partner)
        mine += received
    exchange(mine, rank ^ 1, other, rank ^ 1)
    tensor *= 2


# %% lab01.4: all send first
def two_node_all_reduce(tensor):
    received = torch.empty_like(tensor)
    dist.send(tensor, rank ^ 1)
    dist.recv(received, rank ^ 1)
    tensor += received


# %% lab01.4: buffer in use
def two_node_all_reduce(tensor):
    received = torch.empty_like(tensor)
    for partner in (rank ^ 1, rank ^ 2):
        handles = [dist.isend(tensor, partner), dist.irecv(received, partner)]
        tensor += received
        for handle in handles:
            handle.wait()


# %% lab01.4: sums that differ
def two_node_all_reduce(tensor):
    halves = tensor.tensor_split(2)
    parts = {rank: tensor.clone()}
    parts[rank ^ 1] = torch.empty_like(tensor)
    exchange(parts[rank], rank ^ 1, parts[rank ^ 1], rank ^ 1)
    theirs = torch.empty_like(tensor).tensor_split(2)
    if rank % 2:
        sent, mine = (parts[rank ^ 1] + parts[rank]).tensor_split(2)[1].clone(), 1
    else:
        sent, mine = (parts[rank] + parts[rank ^ 1]).tensor_split(2)[0].clone(), 0
    exchange(sent, rank ^ 2, theirs[mine], rank ^ 2)
    exchange(theirs[mine], rank ^ 1, theirs[1 - mine], rank ^ 1)
    for half, other, its in zip(halves, theirs, parts[rank ^ 1].tensor_split(2)):
        half.copy_((other + half) + its)


# %% lab01.4: remainder dropped
def two_node_all_reduce(tensor):
    h = len(tensor) // 2
    halves = [tensor[:h], tensor[h:2*h]]
    mine, other = halves[rank % 2], halves[1 - rank % 2]; b = torch.empty_like(mine)
    for p, s in ((rank ^ 1, other), (rank ^ 2, mine)):
        w = dist.isend(s, p); dist.recv(b, p); w.wait(); mine += b
    w = dist.isend(mine, rank ^ 1); dist.recv(other, rank ^ 1); w.wait()


# %% lab01.4: mean for sum
def two_node_all_reduce(tensor):
    h = tensor.tensor_split(2); mine, other = h[rank % 2], h[1 - rank % 2]; b = torch.empty_like(mine)
    for p, s in ((rank ^ 1, other), (rank ^ 2, mine)):
        w = dist.isend(s, p); dist.recv(b, p); w.wait(); mine += b
    w = dist.isend(mine, rank ^ 1); dist.recv(other, rank ^ 1); w.wait()
    tensor /= 4


# %% lab01.4: remainder dropped (the middle is lost)
def two_node_all_reduce(tensor):
    h = len(tensor) // 2
    halves = [tensor[:h], tensor[len(tensor) - h:]]
    mine, other = halves[rank % 2], halves[1 - rank % 2]
    received = torch.empty_like(mine)
    for partner, given in ((rank ^ 1, other), (rank ^ 2, mine)):
        exchange(given, partner, received, partner)
        mine += received
    exchange(mine, rank ^ 1, other, rank ^ 1)


# %% lab01.4: not handed on
def two_node_all_reduce(tensor):
    if rank % 2:
        dist.send(tensor, rank - 1)
        dist.recv(tensor, rank - 1)
        return
    received = torch.empty_like(tensor)
    dist.recv(received, rank + 1)
    tensor += received
    exchange(tensor, rank ^ 2, received, rank ^ 2)
    tensor += received


# %% lab01.4: leaders only (of one node)
def two_node_all_reduce(tensor):
    received = torch.empty_like(tensor)
    if rank % 2:
        dist.send(tensor, rank - 1)
        if rank == 1:
            dist.recv(tensor, 0)
        return
    dist.recv(received, rank + 1)
    tensor += received
    exchange(tensor, rank ^ 2, received, rank ^ 2)
    tensor += received
    if rank == 0:
        dist.send(tensor, 1)


# %% lab01.4: halves crossed
def two_node_all_reduce(tensor):
    halves = tensor.tensor_split(2)
    mine, other = halves[rank % 2], halves[1 - rank % 2]
    received = torch.empty_like(mine)
    for partner, given in ((rank ^ 1, other), (3 - rank, mine)):
        exchange(given, partner, received, partner)
        mine += received
    exchange(mine, rank ^ 1, other, rank ^ 1)


# %% lab01.4: wrong, and enough sent
def two_node_all_reduce(tensor):
    halves = tensor.tensor_split(2)
    mine, other = halves[rank % 2], halves[1 - rank % 2]
    received = torch.empty_like(mine)
    exchange(mine, rank ^ 2, received, rank ^ 2)
    mine += received
    exchange(other, rank ^ 1, received, rank ^ 1)
    mine += received
    exchange(mine, rank ^ 1, other, rank ^ 1)


# %% lab01.5: another mistake
diagnosis = {"A": "joined in order of arrival", "B": "whole tensors sent", "C": "nothing wrong",
             "D": "remainder dropped", "E": "all send first", "F": "adds in the second half"}


# %% lab01.5: another mistake (two exchanged)
diagnosis = {"A": "adds in the second half", "B": "whole tensors sent", "C": "one neighbour after the other",
             "D": "remainder dropped", "E": "all send first", "F": "joined in order of arrival"}


# %% lab01.5: another mistake (no choice)
diagnosis = dict.fromkeys("ABCDEF", "it is slow")


# %% lab01.5: another mistake (no such choice)
diagnosis = {"B": "whole tensors sent", "A": "joined in a wrong order", "C": "one neighbour after the other",
             "D": "remainder dropped", "F": "adds in the second half", "E": "all send first"}
