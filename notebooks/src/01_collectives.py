# %% [markdown]
# # 01 Collectives
#
# All-reduce, built from messages between two ranks; what it sends, and how long it takes on 4 and on 1,024 devices.
#
# | You will build | Needs | Runs on | Takes | Works on |
# |---|---|---|---|---|
# | `ring_all_reduce` from `send` and `recv` | lesson 00 | 4 ranks on CPU | A 30 min, B 25 min | Linux; Windows through WSL2; macOS and Colab: not tried |
#
# Words are explained in the [glossary](../notebooks/GLOSSARY.md). The first cell imports what the lesson uses:

# %% name="imports" tags=["timing"]
import time
from collections import Counter

import torch

import dtlab
from dtlab import parallel, theory
from dtlab.simulate import Hardware

WORLD_SIZE = 4
MB, MiB = 10**6, 2**20
print(dtlab.doctor())

# %% [markdown]
# ## Before you start
#
# <details><summary>Rank r brings a tensor to all_reduce. What does each rank hold afterwards?</summary>
# The sum over all ranks, element by element; every rank the same.</details>
# <details><summary>Two ranks have a message for each other, and both call send first. What happens?</summary>
# A deadlock: send ends when the other side receives, and neither gets there.</details>
# <details><summary>Which numbers of this course hold on your machine too, and which do not?</summary>
# Those marked exact here hold: values, bytes, counts, order. Replayed times are those of named hardware, waited ones of
# the machine that ran the cell.</details>
#
# # Part A
#
# ## The problem
#
# The course's model has 7.47 billion parameters; 64 devices train it, and each has gradients of its own, 2 bytes a
# parameter. The sum must reach all. The plain way: everybody sends to rank 0, which adds up and sends the sum back. Its
# link carries 25 GB/s in each direction. Meanwhile a device could compute (2,048 tokens a step, half of an A100's peak):

# %% name="problem" tags=["exact"]
num_params = theory.transformer_params(theory.GPT_7_5B)
gradient_bytes = 2 * num_params
compute_s = theory.train_flops(num_params, 2048) / 156e12
print(f"gradients of a device {gradient_bytes / 1e9:.1f} GB, computed in {compute_s:.2f} s")
print(f"to rank 0 and back    {2 * 63 * gradient_bytes / 25e9:.1f} s")

# %% [markdown]
# 63 devices wait for the link of one. The bytes must take another way.
#
# ## The idea
#
# Cut the tensor of $S$ bytes into $n$ **chunks**, one for each rank, and put the ranks in a **ring**: rank $r$ sends to
# $r+1$ and receives from $r-1$. A sum travels along the ring and grows at each rank: after $n-1$ steps every
# rank holds one finished chunk. Then the finished chunks go round, in $n-1$ steps more (Patarasuk and Yuan 2009). Commit
# yourself: choose before you run on (*Run All* leaves questions open). The picture below it counts the bytes.

# %% name="question-1" tags=["exact", "folded"]
# Question 01.1: run me
question = ("16 MiB, n ranks. What does the busiest rank send at n = 4 and at n = 64: first through rank 0 "
            "(gather, then broadcast), then in a ring?")
dtlab.predict("01.1", question, choices={
    "16 and 16 MiB; 16 and 16 MiB": "So much each rank brings. Sums must come back too, and rank 0 serves everybody.",
    "48 and 1008 MiB; 48 and 1008 MiB": "In a ring nobody serves everybody: each step sends one chunk, to one neighbour.",
    "48 and 1008 MiB; 12 and 15.75 MiB": "That is one half: each rank has one finished chunk, and they must go round.",
    "48 and 1008 MiB; 24 and 31.5 MiB": "Through rank 0 (n - 1) S; in a ring 2 (n - 1)/n S, never more than 2 S.",
})

# %% [markdown]
# Chosen? Step through the ring: *Next* sends one chunk of $S/n$ bytes from each rank.

# %% name="stepper" tags=["picture"]
dtlab.explore.collectives("ring")

# %% [markdown]
# ## Build it
#
# ### A test that can fail
#
# Start the ranks. Rank $r$ brings $1000\,r + i$ at place $i$: no two numbers are alike, so a chunk at the wrong place
# shows. Odd lengths and lengths below $n$ belong to the test. The right sum is made in the kernel, without ranks:

# %% name="check" tags=["timing"]
ranks = dtlab.launch(WORLD_SIZE)

def example(length, rank):
    return 1000.0 * rank + torch.arange(length, dtype=torch.float64)

def check(algorithm, lengths=(1, 3, 16, 17, 1000), make=example):
    def program(length):
        tensor = make(length, rank)
        algorithm(tensor)
        return tensor
    right = {}
    for length in lengths:
        expected = sum(make(length, r) for r in range(WORLD_SIZE))
        right[length] = all(torch.equal(t, expected) for t in ranks.run(program, length))
    print(f"{algorithm.__name__} on {make.__name__}, right by length: {right}")

print(f"ranks: {len(ranks.pids)}")

# %% [markdown]
# ### Through rank 0
#
# The plain way first (*naive* in the tables), in place as `dist.all_reduce` works. `rank` and `world_size` are the rank's own:

# %% name="naive" tags=["exact"]
def through_rank_0(tensor):
    if rank > 0:
        dist.send(tensor, 0)
        dist.recv(tensor, 0)
        return
    received = torch.empty_like(tensor)
    for source in range(1, world_size):
        dist.recv(received, source)
        tensor += received
    for other in range(1, world_size):
        dist.send(tensor, other)

check(through_rank_0)

# %% [markdown]
# ### Sending without waiting
#
# In a ring all ranks send at once, so `send` would close the circle of waits. `isend` and `irecv` only start a
# message. They return a **handle**; its `wait()` ends when the message is through:

# %% name="handles" tags=["exact"]
# %%ranks
right, left, number = (rank + 1) % world_size, (rank - 1) % world_size, torch.zeros(1)
handles = [dist.isend(torch.tensor([rank * 1.0]), right), dist.irecv(number, left)]
for handle in handles:
    handle.wait()
print(f"from rank {left}: {number.item():.0f}")

# %% [markdown]
# ### First half: add up
#
# Rank $r$ starts with chunk $r-1$, passes it on, and adds its own part to what comes in. So it passes on in each step
# what it just added to, and at the end holds the sum of chunk $r$. This half has a name of its own, **reduce-scatter**:

# %% name="reduce-scatter"
def exchange(sent, to, received, source):
    handles = [dist.isend(sent, to), dist.irecv(received, source)]
    for handle in handles:
        handle.wait()

def reduce_scatter(tensor):
    chunks = tensor.tensor_split(world_size)  # views; sizes differ by one element at most
    for step in range(world_size - 1):
        mine = chunks[(rank - step - 1) % world_size]
        theirs = chunks[(rank - step - 2) % world_size]
        received = torch.empty_like(theirs)
        exchange(mine, (rank + 1) % world_size, received, (rank - 1) % world_size)
        theirs += received
    return chunks[rank]

# %% [markdown]
# Does rank $r$ end with the sum of chunk $r$, even where 10 elements are cut?

# %% name="check-reduce-scatter" tags=["exact"]
results = ranks.run(lambda: reduce_scatter(example(10, rank)))
expected = sum(example(10, r) for r in range(WORLD_SIZE)).tensor_split(WORLD_SIZE)
print([torch.equal(mine, right) for mine, right in zip(results, expected)])

# %% [markdown]
# ### Second half: hand round
#
# Every rank hands on what it got last, starting with its own chunk. Nothing is added: **all-gather**. The two halves
# make the ring:

# %% name="ring" tags=["exact"]
def all_gather(tensor):
    chunks = tensor.tensor_split(world_size)
    for step in range(world_size - 1):
        mine = chunks[(rank - step) % world_size]
        theirs = chunks[(rank - step - 1) % world_size]
        exchange(mine, (rank + 1) % world_size, theirs, (rank - 1) % world_size)

def ring_all_reduce(tensor):
    reduce_scatter(tensor)
    all_gather(tensor)

check(ring_all_reduce)

# %% [markdown]
# ## Is it right?
#
# Every number is right. And beside the others? `dtlab.parallel` has the version that
# later lessons use (any shape, any group), torch has its own. Thirds must be rounded, and sums in another order round differently:

# %% name="equal" tags=["exact"]
def beside_others(length):
    mine, dtlabs, torchs = (example(length, rank) / 3 for _ in range(3))
    ring_all_reduce(mine)
    parallel.ring_all_reduce(dtlabs)
    dist.all_reduce(torchs)
    return torch.equal(mine, dtlabs), torch.allclose(mine, torchs, rtol=1e-10)

print("same bits as dtlab.parallel, torch to 1e-10:", set(ranks.run(beside_others, 1001)))

# %% [markdown]
# ### Break it: chunks in order of arrival
#
# Here is an all-gather by somebody who joins chunks as they come. First a test where each rank holds one value
# everywhere, then yours:

# %% name="arrival" tags=["exact"]
def joined_by_arrival(tensor):
    arrived = [reduce_scatter(tensor)]
    for _ in range(world_size - 1):
        arrived.append(torch.empty_like(arrived[0]))
        exchange(arrived[-2], (rank + 1) % world_size, arrived[-1], (rank - 1) % world_size)
    tensor.copy_(torch.cat(arrived))

def one_value(length, rank):
    return torch.full((length,), rank + 1.0)

check(joined_by_arrival, [4 * WORLD_SIZE], make=one_value)
check(joined_by_arrival, [4 * WORLD_SIZE])

# %% [markdown]
# The same code passes and fails. Data in which all chunks look alike hide the mistake: test with numbers that differ
# on every rank and at every place.
#
# ### Break it: a buffer that is still on its way
#
# `isend` copies nothing. Rank 0 clears its tensor after `isend`, before `wait`, while rank 1 is still busy. As
# elsewhere, without the guard:

# %% name="careless" tags=["exact"]
def careless():
    mine = example(4, rank) + 1
    if rank == 0:
        handle = dist.isend(mine, 1)
        mine.zero_()
        handle.wait()
    if rank == 1:
        time.sleep(0.2)  # busy
        dist.recv(mine, 0)
    return mine.tolist()

print("sent by rank 0:", (example(4, 0) + 1).tolist())
print("got by rank 1: ", ranks.run(careless, guard=False)[1])

# %% [markdown]
# No error, and wrong: what counts is what the buffer holds when the message leaves. The guard is on unless you switch
# it off:

# %% name="guarded" tags=["exact", "raises-exception"]
ranks.run(careless)

# %% [markdown]
# It names both lines, the call and the one that came too early.
#
# ## What does it cost?
#
# The recorder counts the bytes that each rank sends. To have 64 ranks too, record *dry*: the same function on tensors without
# content, one process playing each rank in turn. Ranks 0 and 1 are enough: through rank 0, that one sends most; in the ring
# all send alike. What did you say?

# %% name="bytes" tags=["exact"]
def on_16_MiB(algorithm):
    algorithm(torch.ones(4 * MiB))  # 4 bytes each

sent = {}
for name, algorithm in (("naive", through_rank_0), ("ring", ring_all_reduce)):
    for n in (4, 64):
        recording = dtlab.record_dry(on_16_MiB, algorithm, world_size=n, ranks=[0, 1])
        sent[name, n] = recording.communication().groupby("rank").wire_bytes.sum().max() / MiB
        formula = theory.busiest_rank_bytes("all_reduce", 16, size=n, algorithm=name)
        print(f"{name:5} n = {n:2}: recorded {sent[name, n]:6g} MiB, by formula {formula:6g}")
dtlab.reveal("01.1", "{:g} and {:g} MiB; {:g} and {:g} MiB".format(*sent.values()))

# %% [markdown]
# The formulas are $(n-1)\,S$ through rank 0, and in the ring $2\,(n-1)$ chunks, so $2\,(n-1)/n\,S$; nccl-tests publishes
# the same.
#
# ### Part A in three lines
#
# - Ring all-reduce is a reduce-scatter and an all-gather, each of $n-1$ steps with chunks of $S/n$.
# - A rank sends $2\,(n-1)/n\,S$ bytes: 1.5 $S$ at 4 ranks, and never more than 2 $S$. Through rank 0 it is $(n-1)\,S$.
# - A handle that nobody awaited leaves the buffer to the network; weak test data hide wrong chunks.
#
# # Part B
#
# ## Two halves, two collectives
#
# Torch has the halves as calls of their own (`reduce_scatter_single` is the newest name). Lessons 04 and 05 live from doing
# something in between:

# %% name="halves" tags=["exact"]
def halves():
    mine, theirs = example(6 * world_size, rank), example(6 * world_size, rank)
    chunk, whole = torch.empty(6, dtype=mine.dtype), torch.empty_like(theirs)
    torchs = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    torchs(chunk, theirs)
    same = torch.equal(reduce_scatter(mine), chunk)
    dist.all_gather(list(whole.tensor_split(world_size)), chunk)
    all_gather(mine)
    return same, torch.equal(mine, whole)

print("halves equal to torch's:", set(ranks.run(halves)))

# %% [markdown]
# ## Fewer steps: halving and doubling
#
# A chunk visits every rank of the ring, so the steps grow with $n$. **Halving-doubling** reaches everybody in
# $\log_2 n$ steps: swap halves with a rank far away, then quarters with a nearer one, and so on. Then all the way
# back. It takes $n$ a power of two; for others this cell checks `dtlab.parallel`'s instead, which adds two steps:

# %% name="halving-doubling" tags=["exact"]
def halving_doubling(tensor):
    part, distance, done = tensor, world_size // 2, []
    while distance:  # halving: a reduce-scatter
        low, high = part.tensor_split(2)
        part, given = (high, low) if rank & distance else (low, high)
        received = torch.empty_like(part)
        exchange(given, rank ^ distance, received, rank ^ distance)
        part += received
        done.append((part, given, rank ^ distance))
        distance //= 2
    for part, given, partner in reversed(done):  # doubling: an all-gather
        exchange(part, partner, given, partner)

check(halving_doubling if WORLD_SIZE in (2, 4) else parallel.halving_doubling_all_reduce)

# %% [markdown]
# It sends $S/2 + S/4 + \dots + S/n$, twice: the ring's bytes to the last, in $2\log_2 n$ steps.
#
# ## Seconds
#
# A message of $b$ bytes takes $\alpha + b/B$: $\alpha$ is the **latency**, $B$ the bandwidth of a link in one direction. An
# algorithm of $k$ steps whose rank sends $b$ bytes takes
#
# $$t = k\,\alpha + \frac{b}{B}$$
#
# (the alpha-beta model; here a rank sends and receives at once, and adding is free).

# %% name="question-2" tags=["exact", "folded"]
# Question 01.2: run me
question = "25 MB, 25 GB/s, 20 us a step. How much longer does the ring take on 1,024 ranks than on 4?"
dtlab.predict("01.2", question, choices={
    "1.3 times": "So much grow the bytes. Each of the steps costs its 20 us too.",
    "26 times": "Bytes a rank hardly depend on n. Steps do, and in the end they are all there is.",
    "256 times": "The steps grow even more than n, but at 4 ranks bytes are most of the time.",
})

# %% [markdown]
# The figures of `dtlab.theory` are replayed ones: computed, for a link that is named.

# %% name="seconds" tags=["exact"]
link = theory.Link("InfiniBand", bandwidth_bytes_per_s=25e9, latency_s=20e-6)
names, ring_s = ("ring", "halving_doubling"), {}
print("25 MB on  ", *(f"|{name:>19}{'':13}" for name in names))
for n in (4, 16, 64, 256, 1024):
    table = theory.collective_table("all_reduce", 25 * MB, size=n, link=link)
    rows = {row.algorithm: row for row in table}
    columns = [f"|{r.steps:6} steps {r.busiest_rank_bytes / MB:8.1f} MB{1e3 * r.time_s:7.1f} ms"
               for r in map(rows.get, names)]
    print(f"{n:4} ranks", *columns)
    ring_s[n] = rows["ring"].time_s
dtlab.reveal("01.2", f"{ring_s[1024] / ring_s[4]:.0f} times")

# %% [markdown]
# Read the ring's column: the bytes stay, the time does not. By this formula halving-doubling is
# *never* slower than the ring where $n$ is a power of two. Why does anybody use rings?
#
# ## Where messages really run
#
# Because the formula knows no cables. Suppose that each device is joined only to its two neighbours. A message to a
# rank further away passes every cable between. Count what the busiest cable carries in one direction:

# %% name="topology" tags=["exact"]
def busiest_cable(messages, n):
    load = Counter()
    for source, to, share in messages:
        hops = {1: (to - source) % n, -1: (source - to) % n}  # to the right, to the left
        ways = [way for way in hops if hops[way] == min(hops.values())]  # the shorter, or both
        for way in ways:
            for hop in range(hops[way]):
                load[(source + way * hop) % n, way] += share / len(ways)
    return max(load.values())

print("busiest cable, in S:  ring   halving-doubling")
for n in (4, 8, 64):
    around = [(r, (r + 1) % n, 1 / n) for r in range(n)] * (2 * (n - 1))
    distances = [2**k for k in range(n.bit_length() - 1)]
    across = [(r, r ^ d, d / n) for d in distances for r in range(n)] * 2
    loads = busiest_cable(around, n), busiest_cable(across, n)
    print(f"             n = {n:2}{loads[0]:11.2f}{loads[1]:19.2f}")

# %% [markdown]
# On such cables the ring stays below 2 $S$, while from 8 ranks on the far partners of halving-doubling share the way. These
# are the ring's reasons: it needs neighbours only, it takes any $n$, and a chunk can be passed on while its rest still arrives
# (pipelining, which hides part of the steps' $\alpha$). Where a switch joins all with all and latency counts, few steps
# win.
#
# ## How fast is the link?
#
# S / t is the **algorithm bandwidth**. It falls with $n$ even where every link is full, so it cannot be held against
# a data sheet. The **bus bandwidth** of nccl-tests can: times $2\,(n-1)/n$ for all-reduce, times $(n-1)/n$ for its halves. It
# assumes the bytes of a flat ring.

# %% name="busbw" tags=["exact"]
for n in (2, 4, 64):
    t = theory.collective_time_s("all_reduce", 1e9, size=n, link=link, algorithm="ring")
    alg, bus = theory.algbw(1e9, t) / 1e9, theory.busbw("all_reduce", 1e9, t, size=n) / 1e9
    print(f"1 GB, n = {n:2}: {1e3 * t:5.1f} ms, algbw {alg:4.1f} GB/s, busbw {bus:4.1f} GB/s")

# %% [markdown]
# The last column comes near to the link's 25 GB/s.
#
# ## Back to the problem
#
# And the seconds of the beginning? 64 devices are 8 nodes of 8, with NVLink (250 GB/s) inside. *Hierarchical* reduce-scatters
# inside each node, all-reduces an eighth between the nodes on each device's own link, and all-gathers inside. In a *tree*
# sums go up to rank 0 pair by pair, and down again; in *recursive doubling* pairs swap, then pairs of pairs: both send
# whole tensors (the course's cluster, replayed):

# %% name="again" tags=["exact"]
cluster = Hardware.preset("64xA100-80GB")
nodes = {"link": cluster.inside, "node_size": 8, "link_between": cluster.between}
for row in theory.collective_table("all_reduce", gradient_bytes, size=64, **nodes):
    sent = f"{row.busiest_rank_bytes / 1e9:6.1f} GB"
    print(f"{row.algorithm:18}{row.steps:4} steps, busiest {sent}, {row.time_s:5.2f} s")

# %% [markdown]
# From the first line to the last: below the time of the arithmetic. Lesson 02 hides what is left behind backward.
#
# ## This machine, waited
#
# Your ring beside gloo's, 16 MiB, in turns, medians. All ranks share this machine's cores and memory:

# %% name="waited" tags=["timing"]
def measure(algorithms, repeats=7):
    tensor, seconds = torch.zeros(4 * MiB), [[] for _ in algorithms]
    for _ in range(repeats):
        for algorithm, times in zip(algorithms, seconds):
            dist.barrier()
            start = time.perf_counter()
            algorithm(tensor)
            times.append(time.perf_counter() - start)
    return [sorted(times)[repeats // 2] for times in seconds]

algorithms = (through_rank_0, ring_all_reduce, torch.distributed.all_reduce)
waited = [max(times) for times in zip(*ranks.run(measure, algorithms, guard=False))]
for algorithm, t in zip(algorithms, waited):
    bus = theory.busbw("all_reduce", 16 * MiB, t, size=WORLD_SIZE)
    print(f"{algorithm.__name__:16} {1e3 * t:6.1f} ms, busbw {bus / 1e9:5.2f} GB/s")
assert waited[1] < 10 * waited[2]

# %% [markdown]
# This clock cannot show the ring's gain. All ranks together send $2\,(n-1)\,S$ bytes either way; the ring only spreads them
# over the links, and here all of them share one memory. That is why the course replays.
#
# ## Turn the knobs
#
# Drag the ranks from 4 to 1,024 and watch bytes and time; then the size, until the winner changes:

# %% name="explorer" tags=["picture"]
dtlab.explore.collectives("cost")

# %% [markdown]
# Your row of the ledger, from a recording on the live ranks (*shipped*: a lesson not yet run here). The formula
# takes chunks to be equal: where $n$ does not divide the tensor, a few bytes differ.

# %% name="ledger" tags=["timing"]
recording = ranks.record(on_16_MiB, ring_all_reduce)
formula = round(theory.ring_all_reduce_bytes(16 * MiB, WORLD_SIZE))
dtlab.ledger("01", recording=recording, formula=formula)

# %% [markdown]
# ## In real systems
#
# | here | torch | NCCL, gloo, MPI | Megatron-LM, DeepSpeed |
# |---|---|---|---|
# | `ring_all_reduce` | `dist.all_reduce` | NCCL `NCCL_ALGO=Ring`; gloo's default | torch's |
# | `reduce_scatter` | `dist.reduce_scatter_tensor` | NCCL `ncclReduceScatter` | gradients of the distributed optimizer, of ZeRO |
# | `all_gather` | `dist.all_gather_into_tensor` | NCCL `ncclAllGather` | their parameters |
# | `exchange` | `dist.batch_isend_irecv` | `ncclSend`, `ncclRecv` in a group | pipeline stages |
# | `halving_doubling` | - | MPICH (Rabenseifner) | - |
# | hierarchical | subgroups, by hand | NCCL knows the nodes | ZeRO++ |
#
# Left out on purpose: passing on parts of a chunk, several rings at once, double
# binary trees (NCCL's other way), sums made in the switch. All-to-all comes in lesson 07.
#
# ## Exercises
#
# 1. *Predict.* An all-gather ends with 25 MB on each of 1,024 ranks of a ring. How many steps, how many MB sent by each rank?
# 2. *Change.* Write the tree. Does it pass `check`? What does rank 0 send of 16 MiB on 64 ranks?
# 3. *Break.* Every rank of a ring calls `dist.send`, then `dist.recv`. What does dtlab say?
#
# The folded cell computes all three:

# %% name="answers" tags=["exact", "folded"]
# Answers: run me
row = theory.collective_table("all_gather", 25 * MB, size=1024, link=link)[0]
print(f"1. {row.algorithm}: {row.steps} steps, {row.busiest_rank_bytes / MB:.1f} MB")

check(parallel.tree_all_reduce)
recording = dtlab.record_dry(on_16_MiB, parallel.tree_all_reduce, world_size=64, ranks=[0])
print(f"2. rank 0 sends {recording.communication().wire_bytes.sum() / MiB:.0f} MiB")

def send_first():
    dist.send(torch.ones(1), (rank + 1) % world_size)
    dist.recv(torch.ones(1), (rank - 1) % world_size)

try:
    ranks.run(send_first)
except dtlab.HangError as error:
    print("3.", error)

# %% [markdown]
# ## Summary
#
# - A **ring** sends one **chunk** a step; its all-reduce is a **reduce-scatter**, then an **all-gather**.
# - Bytes a rank sends hardly depend on $n$, steps do: **latency** makes rings slow on many ranks, **halving-doubling** needs fewer steps.
# - A **handle** must be awaited before its buffer is touched.
# - **Algorithm bandwidth** is $S/t$, **bus bandwidth** is what a link carries.
#
# Now its lab: `work/labs/lab01_ring_all_reduce`.
#
# References: Patarasuk and Yuan 2009; Thakur, Rabenseifner and Gropp 2005; nccl-tests, doc/PERFORMANCE.md. Next: lesson 02.
