# %% [markdown]
# # Lab 01: ring all-reduce
#
# Lesson 01 built the plain version. Here you build what it left out: chunks of any length by arithmetic, a ring that works in
# place with one spare chunk and exact bytes, and a sum over two nodes that crosses the border between them once.
#
# | You will have | Needs | Ranks | Takes |
# |---|---|---|---|
# | an all-reduce whose bytes and memory you can account for to the last one | lesson [01](../../notebooks/01_collectives.ipynb), Part A | 1 to 4 on CPU | 75 min: 10, 20, 20, 15, 10 |
#
# Words are explained in the [glossary](../../notebooks/GLOSSARY.md).
#
# ### Rules
#
# - Write with messages between two ranks: `dist.send`, `dist.recv`, `dist.isend`, `dist.irecv`, `dist.batch_isend_irecv`.
# - Leave out `dist.all_reduce` and the other collectives, and `dtlab.parallel`: they are what you build.
# - A check runs your cell on new ranks, with inputs drawn anew, in float64: $1000\,r + i$ at place $i$ of rank $r$, plus a random
#   fraction. It compares values, then what the recording shows: bytes, messages, memory. It knows the usual mistakes by
#   name. Run it as often as you like.
# - Each exercise stands alone: what it uses of an earlier one is yours where yours passes, else the course's.
#
# Your functions run on the ranks. `rank` and `world_size` are there, as in the lessons.

# %% name="imports" tags=["given"]
import torch
import torch.distributed as dist

import dtlab

WORLD_SIZE = 4

# %% [markdown]
# ## Warm-up
#
# A slice of a tensor is a *view*: it has no memory of its own. So a part can be sent as it lies there, and received into the
# place where it belongs. Which numbers does each rank hold afterwards?

# %% name="slices"
def swap_ends():
    tensor = 10.0 * rank + torch.arange(5, dtype=torch.float64)
    partner = rank ^ 1
    handles = [dist.isend(tensor[3:5], partner), dist.irecv(tensor[0:2], partner)]
    for handle in handles:
        handle.wait()
    return tensor.tolist()

ranks = dtlab.launch(WORLD_SIZE)
ranks.run(swap_ends)

# %% [markdown]
# The two parts did not overlap, so nothing had to be copied. What does that cost? A recording counts what each rank sends
# and the most bytes that its tensors held at one instant:

# %% name="recording"
recording = ranks.record(swap_ends)
print("sent by rank 0:", recording.communication().query("rank == 0").wire_bytes.sum(), "bytes")
print("peak on rank 0:", recording.memory().peak[0], "bytes")

# %% [markdown]
# Two numbers of 8 bytes were sent, and 5 were held, for a moment twice: the sum `10.0 * rank + ...` makes a second tensor.
#
# Where ranks do not divide a length, chunks differ by one element. Here somebody receives every chunk into a buffer of one size.
# This cell fails on purpose. Read what it says: which rank, which call, which two sizes?

# %% name="deliberate-error" tags=["raises-exception"]
def one_size_for_all():
    chunks = torch.arange(5.0).tensor_split(world_size)
    spare = torch.empty(1)
    handles = [dist.isend(chunks[rank], (rank + 1) % world_size), dist.irecv(spare, (rank - 1) % world_size)]
    for handle in handles:
        handle.wait()

ranks.run(one_size_for_all)

# %% [markdown]
# The first chunk has two elements, and rank 1 made room for one. Without the guard, gloo aborts the process of rank 1.
#
# ## Exercise 1: chunk bounds (10 min)
#
# Cut `length` elements into `size` chunks, one behind the other: every element in one chunk, no two chunks differing by more
# than one element, **the longer ones first**: 10 elements on 4 ranks are 3, 3, 2, 2. With fewer elements than chunks the last ones
# are empty.
#
# `chunk_bounds(length, size)` returns a list `[(start, end), ...]`, `size` pairs of whole numbers, `end` one past the last element, as in
# `tensor[start:end]`.
#
# **Budget**: no list and no tensor of all elements. A length of $10^{12}$ must work too.
#
# The spec, slow and obvious: deal out who owns how many, then take the elements in order.

# %% name="spec-1"
def elements_of_chunks(length, size):
    owners = sorted(element % size for element in range(length))
    return [[place for place in range(length) if owners[place] == chunk] for chunk in range(size)]

print(elements_of_chunks(7, 4))
print(elements_of_chunks(2, 4))

# %% name="exercise-1" tags=["exercise"]
# Exercise lab01.1
def chunk_bounds(length, size):
    """Where each of ``size`` chunks of ``length`` elements starts and ends, longest first: [(start, end), ...]."""
    raise NotImplementedError("Exercise 1.1: return the bounds of the chunks")

# %% name="picture-1" tags=["picture"]
dtlab.picture("lab01.1")

# %% name="check-1" tags=["check"]
dtlab.check("lab01.1")

# %% [markdown]
# <details><summary>Hint 1: where to look</summary>
# Write the sizes of 7 elements on 4 ranks in a row. How many chunks have one element more than the others, and which?</details>
# <details><summary>Hint 2: which operation</summary>
# Quotient and remainder of length and size, both at once. The remainder counts the longer chunks.</details>
# <details><summary>Hint 3: the formula</summary>
# Before chunk r stand r chunks of the shorter size, and one more element for each of them that is a longer one: there are
# r of those, or the remainder if that is smaller.</details>
#
# ## Exercise 2: ring reduce-scatter (20 min)
#
# Add over all ranks, in place: afterwards rank $r$ holds the finished sum in chunk $r$ of `chunk_bounds`. What its other chunks hold
# does not matter. It works on 1 to 4 ranks and for every length, also below the number of ranks.
#
# `ring_reduce_scatter(tensor)`: [length], float64, contiguous; changed in place, nothing returned.
#
# **Budget**: rank $r$ sends the tensor's $S$ bytes without those of chunk $r$, in $n-1$ messages, all to a neighbour. Beside the tensor it
# never holds more than **one** spare chunk, as long as the longest; the result of `a + b` counts too. The lesson's
# version does not pass: how many spare chunks does it hold at once, and when?
#
# The spec in one process: it has the tensors of all ranks.

# %% name="spec-2"
def reduce_scatter_in_one_process(tensors):
    total = sum(tensors)
    return list(total.tensor_split(len(tensors)))

examples = [1000.0 * r + torch.arange(7) for r in range(WORLD_SIZE)]
for r, chunk in enumerate(reduce_scatter_in_one_process(examples)):
    print(f"rank {r} ends with {chunk.tolist()}")

# %% name="exercise-2" tags=["exercise"]
# Exercise lab01.2
def ring_reduce_scatter(tensor):
    """Add over the ranks, in place: rank r ends with the finished chunk r."""
    raise NotImplementedError("Exercise 1.2: pass chunks to the right, add what comes from the left")

# %% name="picture-2" tags=["picture"]
dtlab.picture("lab01.2")

# %% name="check-2" tags=["check"]
dtlab.check("lab01.2")

# %% [markdown]
# <details><summary>Hint 1: where to look</summary>
# Follow one chunk: if the sum of chunk r is to end at rank r after n - 1 steps, at which rank does it start? In the
# picture, find the row in which your chunk r is finished.</details>
# <details><summary>Hint 2: which calls</summary>
# One message out and one in, in every step. Start both before you wait for either, or let neighbours take turns: who sends first,
# who receives first? Make the room for what comes in once, and use as much of it as the chunk needs.</details>
# <details><summary>Hint 3: the formula</summary>
# In step k (from 0) rank r sends chunk r - k - 1 and adds to chunk r - k - 2, counted around the ring, modulo n.</details>
#
# ## Exercise 3: all-gather, then all-reduce (20 min)
#
# The second half: rank $r$ has the finished chunk $r$, and every rank is to have all of them, each at its own place. Then both
# halves as one all-reduce.
#
# `ring_all_gather(tensor)`: [length], chunk $r$ finished on rank $r$, the rest of any content; in place. `ring_all_reduce(tensor)`:
# [length]; in place, the sum on every rank, **the same to the last bit**.
#
# **Budget**, all-gather: $n-1$ messages, all to a neighbour, $(n-1)/n\,S$ bytes, no spare chunk: the tensor alone. All-reduce:
# $2\,(n-1)$ messages to a neighbour, one spare chunk, and
#
# $$2\,\frac{n-1}{n}\,S \text{ bytes, exactly: } 2S - c_r - c_{r+1}$$
#
# where $c_r$ are the bytes of chunk $r$. (Passing to the left is as good; then it is $c_{r-1}$. So is an all-reduce of one piece that
# finishes other chunks on the way, if it leaves out two neighbouring ones.)
#
# The spec in one process:

# %% name="spec-3"
def all_reduce_in_one_process(tensors):
    total = sum(tensors)
    return [total.clone() for _ in tensors]

print(all_reduce_in_one_process(examples)[3].tolist())

# %% name="exercise-3" tags=["exercise"]
# Exercise lab01.3
def ring_all_gather(tensor):
    """Give every rank all chunks, in place: rank r brings chunk r."""
    raise NotImplementedError("Exercise 1.3: hand the finished chunks round")


def ring_all_reduce(tensor):
    """Add over the ranks, in place: every rank ends with the sum."""
    raise NotImplementedError("Exercise 1.3: both halves")

# %% name="picture-3" tags=["picture"]
dtlab.picture("lab01.3")

# %% name="check-3" tags=["check"]
dtlab.check("lab01.3")

# %% [markdown]
# <details><summary>Hint 1: where to look</summary>
# Which chunk is finished on rank r when the second half begins? That one must go first. Which one comes in, and where does
# it belong?</details>
# <details><summary>Hint 2: which calls</summary>
# The same messages as in the first half. What comes in is finished: it can be received right into its place, and the next
# step hands it on. Not before it is there.</details>
# <details><summary>Hint 3: the formula</summary>
# In step k (from 0) rank r sends chunk r - k and receives chunk r - k - 1, modulo n. Over both halves a rank sends every chunk twice, two
# of them only once.</details>
#
# ## Exercise 4: two nodes (15 min)
#
# Ranks 0 and 1 are one node, ranks 2 and 3 the other; the link between the nodes is ten times slower than those inside (the course's
# cluster: 250 and 25 GB/s). A flat ring sends every chunk over that link on its way: 1.5 $S$ leave each node. Make it
# two thirds of that.
#
# `two_node_all_reduce(tensor)`: [length], on four ranks; in place, the sum on every rank, the same to the last bit.
#
# **Budget**: 1.0 $S$ leaves each node and no more, all its ranks together, as messages. What is sent inside a node is free, and so is memory.
#
# The spec in one process: first each node, then the two sums.

# %% name="spec-4"
def two_node_sum_in_one_process(tensors):
    node_sums = [tensors[0] + tensors[1], tensors[2] + tensors[3]]
    return [node_sums[0] + node_sums[1] for _ in tensors]

print(two_node_sum_in_one_process(examples)[0].tolist())

# %% name="exercise-4" tags=["exercise"]
# Exercise lab01.4
def two_node_all_reduce(tensor):
    """Add over four ranks, in place; ranks 0 and 1 are one node, ranks 2 and 3 the other."""
    raise NotImplementedError("Exercise 1.4: let at most S bytes leave a node")

# %% name="picture-4" tags=["picture"]
dtlab.picture("lab01.4")

# %% name="check-4" tags=["check"]
dtlab.check("lab01.4")

# %% [markdown]
# <details><summary>Hint 1: where to look</summary>
# What is the least that node 1 must learn of node 0? Who can make that, before anything crosses?</details>
# <details><summary>Hint 2: which pattern</summary>
# Add up inside each node, cross once, hand on inside. One rank of a node can do the crossing, or both can share it: then each
# crosses with a half, and both links are busy.</details>
# <details><summary>Hint 3: the count</summary>
# The sum of a node has S bytes. Shared, a rank sends S/2 inside, S/2 across and S/2 inside again, and two ranks cross with S/2
# each.</details>
#
# ## Exercise 5: diagnose (10 min)
#
# Six programs should all-reduce 7 elements around a ring of four ranks. You see them only from outside: what each rank holds
# afterwards at each place, as the parts that are added up there; what each rank sent; and the timeline, replayed on
# eight H100: green while messages of the rank are under way, grey while it computes or starts calls, white while it waits for
# another rank and nothing of its own is under way. "Sum" is the right sum of its place, "sum of 3" at place 0 that of place 3;
# "7 parts" are seven parts added up, some of them more than once. Name each program's mistake with one of:
#
# `whole tensors sent`, `joined in order of arrival`, `remainder dropped`, `adds in the second half`,
# `one neighbour after the other`, `all send first`, `right on rank 0 only`, `rounded to float32`, `nothing wrong`.
#
# Say first, aloud or on paper, what each of the nine would look like. Not every one is there. The spec is the right program,
# the first of the picture; its bytes and its time stand beside those of each other one.

# %% name="exercise-5" tags=["exercise"]
# Exercise lab01.5
diagnosis = {
    "A": "?",  # Exercise 1.5: one of the nine for each letter
    "B": "?",
    "C": "?",
    "D": "?",
    "E": "?",
    "F": "?",
}

# %% name="picture-5" tags=["picture"]
dtlab.picture("lab01.5")

# %% name="check-5" tags=["check"]
dtlab.check("lab01.5")

# %% [markdown]
# <details><summary>Hint 1: where to look</summary>
# Values first. Which programs have all sums right? Those differ in what they send, and when.</details>
# <details><summary>Hint 2: which numbers</summary>
# The ring sends 2 (n - 1)/n S. More: parts travel one by one. Less: something does not travel at all. The same: then look at what is
# added to what.</details>
# <details><summary>Hint 3: the timeline</summary>
# In a ring all ranks send at once, so all rows look alike. Rows that are shifted against each other, step by step,
# belong to ranks that wait for their neighbour.</details>
#
# ## Stretch
#
# Write an all-reduce for four
# ranks that is quick at every length: few steps where latency counts, few bytes where they count. Choose by the length; from
# which one on do you switch? `replay(ranks.record(program), Hardware.preset("8xH100")).step_time_s` tells the seconds (`from
# dtlab.simulate import Hardware, replay`). The numbers to beat, with `torch.ones` for a
# tensor of float64 in the program: 25 us at 7 elements, 80 us at a million. There the ring of `dtlab.parallel` takes 82 us, and sends
# $1.5\,S$, the least there is: so what is left to save?
#
# ## Solution
#
# After you have tried: the file `labs/lab01_ring_all_reduce/solution.py` in the course's folder (not in copies made by `dtlab release`). Open
# it beside your notebook, and compare cell by cell.
