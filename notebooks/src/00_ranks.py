# %% [markdown]
# # 00 Ranks
#
# Four real processes that you talk to from this notebook, and a small language model that they train together.
#
# | You will build | Needs | Runs on | Takes | Works on |
# |---|---|---|---|---|
# | ten lines of data-parallel training | PyTorch; nothing distributed | 4 ranks on CPU | 35 min | Linux; Windows through WSL2; macOS and Colab: not tried |
#
# Words are explained in the [glossary](../notebooks/GLOSSARY.md). After a kernel restart, run the first cell and the cell
# with `launch` again. The first cell imports what the lesson uses, and asks the doctor what this machine has:

# %% name="imports" tags=["timing"]
import math
import time

import torch

import dtlab
from dtlab import plots
from dtlab.data import batches, shard_batch, text_bytes
from dtlab.models import GPT, GPTConfig, cross_entropy

WORLD_SIZE = 4
torch.set_num_threads(1)  # the model here is too small to gain from more
print(dtlab.doctor())

# %% [markdown]
# The doctor's line says what this machine has. If it names a problem, it names the cure too.
#
# ## The problem
#
# A model of 7.47 billion parameters is to learn from 150 billion tokens. A parameter costs about 6 floating-point
# operations for every token, forward and backward together. How long does one A100 take, at half of its peak of
# 312 TFLOP/s?

# %% name="days" tags=["exact"]
num_params, num_tokens, flops_per_s = 7.47e9, 150e9, 312e12 / 2
one_device_s = 6 * num_params * num_tokens / flops_per_s
for devices in (1, 64):
    print(f"days with {devices:2} A100: {one_device_s / devices / 86400:5.1f}")

# %% [markdown]
# Nobody waits that long, so many devices train one model together. The second line is their best case: no time lost in
# talking. This course builds the ways of sharing that work, and counts what the talking costs.
#
# ## The idea
#
# A **rank** is one process of a group, and its number: 0, 1, 2, ... The world size $n$ is how many there are. All
# run the same program, each on its own data, in its own memory. Nothing is shared. What a rank must know from the
# others goes through a **collective**: a call that all of them make together. The most frequent one is **all-reduce**.
# Rank $r$ brings a tensor $t_r$, and afterwards every rank holds the sum:
#
# $$t_r \leftarrow \sum_{i=0}^{n-1} t_i \qquad \text{for all } r = 0, \dots, n-1$$
#
# (element by element; `MPI_Allreduce` in the MPI standard). Before you see it work, commit yourself. The next cell is
# folded because it knows the answer; run it like any other:

# %% name="question-1" tags=["exact", "folded"]
# Question 00.1: run me
total, last = WORLD_SIZE * (WORLD_SIZE + 1) // 2, WORLD_SIZE - 1
question = f"Rank r of {WORLD_SIZE} holds r + 1. After all_reduce(t), what does rank {last} hold?"
dtlab.predict("00.1", question, choices={
    f"{last + 1}": "That is what it held before. all_reduce replaces it, on every rank.",
    f"nothing new; only rank 0 has {total}": "That is reduce. The 'all' means that every rank gets the result.",
    f"the numbers 1 to {WORLD_SIZE}": "That is all_gather. To reduce means to add up.",
    f"{total}": "Every rank brings its number, and every rank gets the sum.",
})

# %% [markdown]
# ## Build it
#
# ### Processes that answer
#
# `launch` starts the ranks and joins them in one group:

# %% name="launch" tags=["timing"]
ranks = dtlab.launch(WORLD_SIZE)
print(f"process of each rank: {ranks.pids}")

# %% [markdown]
# Each is a Python process of its own. The one behind this notebook, the **kernel**, is no rank. A cell that starts with
# `%%ranks` runs on the ranks instead; `rank`, `world_size`, `torch` and `dist` (`torch.distributed`) are there already:

# %% name="hello" tags=["exact"]
# %%ranks
x = rank
print(f"I am one of {world_size}, and my x is {x}")

# %% [markdown]
# ### Two worlds
#
# Every rank made its own `x`. What is `x` in the kernel? (The red is meant.)

# %% name="two-worlds" tags=["exact", "raises-exception"]
x

# %% [markdown]
# The last line says where it is. Kernel and ranks are two worlds. `pull` brings a variable from all ranks, in rank
# order; `push` gives them one:

# %% name="pull" tags=["exact"]
values = ranks.pull("x")
ranks.push(lesson="00")
values

# %% [markdown]
# This is where everything lives now:

# %% name="picture" tags=["picture"]
on_ranks = [{"x": x, "lesson": repr(text)} for x, text in zip(values, ranks.pull("lesson"))]
plots.ranks_picture({"WORLD_SIZE": WORLD_SIZE, "values": values}, on_ranks)

# %% [markdown]
# One box, one process, one set of variables; they stay from cell to cell.
#
# ### One call that all make
#
# Now the call from the question:

# %% name="all-reduce" tags=["exact"]
# %%ranks
t = torch.tensor([rank + 1.0])
dist.all_reduce(t)
t

# %% [markdown]
# Ranks that show the same share one line. What did you say?

# %% name="answer-1" tags=["exact"]
dtlab.reveal("00.1", int(ranks.pull("t")[-1]))

# %% [markdown]
# ### Functions
#
# `%%ranks` is for looking around. What is to be proved goes into a function: `ranks.run` calls it on every rank and
# returns what each one returned. `rank`, `world_size`, `device`, `torch` and `dist` are always the rank's own; any other
# name is the notebook's or, if it has none, the rank's.

# %% name="run" tags=["exact"]
def sum_of(scale):
    mine = torch.tensor([scale * rank])
    dist.all_reduce(mine)
    return mine.item()

results = ranks.run(sum_of, 10)
print(results)
assert results == [10 * sum(range(WORLD_SIZE))] * WORLD_SIZE

# %% [markdown]
# ### Break it
#
# Ranks that wait for each other can wait for ever. Cause it now. First, rank 1 skips a collective; the others may wait at
# most 3 seconds, less where it is clear that nobody will come:

# %% name="skip" tags=["exact", "raises-exception"]
# %%ranks --timeout 3
if rank != 1:
    dist.all_reduce(t)

# %% [markdown]
# A **hang**, told as three facts: who never came, who waits in which call on which line, and what the missing rank did
# last. It comes before the limit, because a rank that has finished its cell can no longer come. Elsewhere you would
# see silence, for many minutes. And the ranks are free again:

# %% name="after-skip" tags=["exact"]
# %%ranks
t = torch.tensor([rank + 1.0])
total = t.clone()
dist.all_reduce(total)
total

# %% [markdown]
# (`t` is made anew: what a broken call leaves in its tensor is not defined.)
#
# Second, two ranks have something for each other, and both send before they receive (`%%ranks 0,1` runs on those two).
# `send` ends when the other side takes the message:

# %% name="both-send" tags=["exact", "raises-exception"]
# %%ranks 0,1
other, theirs = 1 - rank, torch.zeros(1)
dist.send(t, other)
dist.recv(theirs, other)

# %% [markdown]
# A **deadlock**: the waits close into a circle, which never opens. Swap rank 1's two calls and see it close:

# %% name="messages" tags=["picture"]
dtlab.explore.collectives(tab="messages")

# %% [markdown]
# (Under `calls` you find what two all-reduces do.) One of the two must receive first:

# %% name="one-receives" tags=["exact"]
# %%ranks 0,1
for call in (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send):
    call(t if call is dist.send else theirs, other)
print(f"I hold {t.item()} and got {theirs.item()}")

# %% [markdown]
# Worse than a hang is a wrong number without a word: that is what comes elsewhere, on CPUs, when calls meet that do not
# fit. Here a **guard** compares them; what cannot fit is refused before the data moves. Rank 1 brings another shape:

# %% name="shapes" tags=["timing", "raises-exception"]
# %%ranks
grad = torch.ones(3 if rank == 1 else 2)
dist.all_reduce(grad)

# %% [markdown]
# Both calls side by side (who is told first may vary). And if rank 1 makes two calls in the other order? Shapes fit, but losses would be added to hits:

# %% name="order" tags=["timing", "raises-exception"]
# %%ranks
loss, hits = torch.tensor([0.5]), torch.tensor([8.0])
if rank == 1:
    dist.all_reduce(hits)
    dist.all_reduce(loss)
else:
    dist.all_reduce(loss)
    dist.all_reduce(hits)

# %% [markdown]
# An order shows only at the second call: the first sum was made, and is wrong. Nothing since then is to be believed.
#
# Last, a process ends in the middle of the work, as one does that the system kills for its memory:

# %% name="exit" tags=["exact", "raises-exception"]
# %%ranks
if rank == world_size - 1:
    import os
    import time
    time.sleep(0.5)  # the others are waiting by now
    os._exit(7)
dist.all_reduce(t)

# %% [markdown]
# The first line is the cause; the others were only stopped. A new process stands in for the dead one. What do the
# ranks still know?

# %% name="after-exit" tags=["exact"]
# %%ranks
print("variables:", [name for name in ("lesson", "t", "x") if name in globals()])

# %% [markdown]
# All four answer, or as many as there are; the new one has no variables. The kernel was not restarted, and nothing here breaks for good: experiment.
#
# ## Run it on ranks
#
# Now train. The text is the reference manual that came with your Python. The model is a small GPT that predicts the
# next byte. A fresh one gives each of the 256 bytes the same probability, so its loss is
# $\ln 256$, in nats because the logarithm is the natural one. One process first:

# %% name="alone"
config = GPTConfig(hidden_size=64, num_layers=2, num_heads=4, seq_length=64)
text, BATCH_SIZE, STEPS = text_bytes(), 16, 32

def train_alone(steps, dtype=torch.float32):
    model = GPT(config, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        inputs, targets = batches(text, config.seq_length, BATCH_SIZE, seed=0, step=step)
        loss = cross_entropy(model(inputs), targets, reduction="sum") / targets.numel()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, torch.nn.utils.parameters_to_vector(model.parameters()).detach()

# %% [markdown]
# How far does it come?

# %% name="run-alone" tags=["timing"]
losses, parameters = train_alone(STEPS)
print(f"{len(parameters):,} parameters, ln 256 = {math.log(256):.2f}")
print(f"one process: loss {losses[0]:.2f} -> {losses[-1]:.2f}")
assert abs(losses[0] - math.log(256)) < 0.1 and losses[-1] < losses[0] - 1

# %% [markdown]
# It starts where it must and falls. Now the same batch on all ranks. Commit yourself:

# %% name="question-2" tags=["exact", "folded"]
# Question 00.2: run me
question = f"{WORLD_SIZE} ranks share each batch. How many samples per second, compared with one process?"
dtlab.predict("00.2", question, choices={
    "faster": "That takes free cores for the ranks, and calls that are quick beside the arithmetic between them.",
    "about equal": "That takes calls that cost as much as the further cores gain. The arithmetic is the same in sum.",
    "slower": "That takes calls that cost more than the further cores gain, or no further core that is free.",
})

# %% [markdown]
# Each rank holds the whole model, a **replica**, and takes its rows of the batch. It divides the loss of its rows by
# the tokens of the *whole* batch. So the gradients of the ranks add up to the gradient of the batch, and adding up is
# what all-reduce does. This is **data parallel** training. The loop's body has ten lines; what is new is marked:

# %% name="on-ranks"
def train_on_ranks(steps, dtype=torch.float32, add=True):
    model = GPT(config, dtype=dtype)  # initialised by name: the same on every rank
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        batch = batches(text, config.seq_length, BATCH_SIZE, seed=0, step=step)
        inputs, targets = shard_batch(batch, rank, world_size)  # new: my rows
        loss = cross_entropy(model(inputs), targets, reduction="sum") / batch[1].numel()
        optimizer.zero_grad()
        loss.backward()
        if add:
            for parameter in model.parameters():  # new
                dist.all_reduce(parameter.grad)   # new: the gradient of the whole batch
        optimizer.step()
        losses.append(loss.item())
    return losses, torch.nn.utils.parameters_to_vector(model.parameters()).detach()

# %% [markdown]
# Every rank returns its share of each loss; their sum is the loss of the batch. Beside one process:

# %% name="run-on-ranks" tags=["picture"]
results = ranks.run(train_on_ranks, STEPS)
together = [sum(shares) for shares in zip(*(shares for shares, _ in results))]
print(f"{WORLD_SIZE} ranks: loss {together[0]:.2f} -> {together[-1]:.2f}")
curves = {"one process": losses, f"{WORLD_SIZE} ranks": together}
plots.curves(curves, x="step", y="loss [nats per byte]")

# %% [markdown]
# You see one curve, because the two lie on each other.
#
# ## Is it right?
#
# That is no proof. Sums in another order differ in their last bits, so prove it in float64, where those differences are
# far below any mistake: every loss, and all parameters at the end on every rank, to a relative $10^{-10}$.

# %% name="equal" tags=["exact"]
def compare(results, steps=5):
    losses, parameters = train_alone(steps, torch.float64)
    losses = torch.tensor(losses, dtype=torch.float64)
    together = torch.tensor([shares for shares, _ in results], dtype=torch.float64).sum(0)
    same = lambda a, b: torch.allclose(a, b, rtol=1e-10, atol=1e-12)
    print("losses equal to one process:", same(together, losses))
    print("parameters equal, by rank:  ", [same(theirs, parameters) for _, theirs in results])
    print("loss falls:                 ", (together[-1] < together[0]).item())

compare(ranks.run(train_on_ranks, 5, torch.float64))

# %% [markdown]
# The ranks train exactly the model that one process trains. Now drop the all-reduce and watch the check fail:

# %% name="not-equal" tags=["exact"]
compare(ranks.run(train_on_ranks, 5, torch.float64, add=False))

# %% [markdown]
# Read the last line twice. There are as many models now as ranks, and the loss *still falls*. A falling loss proves
# nothing; equality with one process does.
#
# ## What does it cost?
#
# Time both, three times each, and take the best; other programs on this machine can only make it slower:

# %% name="answer-2" tags=["timing"]
def samples_per_s(program, *args, steps=5):
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        program(*args, steps)
        seconds.append(time.perf_counter() - start)
    return steps * BATCH_SIZE / min(seconds)

unguarded = lambda steps: ranks.run(train_on_ranks, steps, guard=False)  # comparing costs time
alone, shared = samples_per_s(train_alone), samples_per_s(unguarded)
speed = shared / alone
print(f"one process: {alone:,.0f} samples/s, {WORLD_SIZE} ranks: {shared:,.0f} samples/s")
right = "slower" if speed < 0.8 else "faster" if speed > 1.25 else "about equal"
dtlab.reveal("00.2", f"{speed:.2f} times the speed of one process", right)
assert speed < 2 * WORLD_SIZE

# %% [markdown]
# That is the speed of *this machine*, with as many free cores as it has just now, and of a tiny model whose every
# gradient waits for a call. It says nothing about four GPUs. So each number of this course is of one of three
# kinds, and says which:
#
# - *exact here*: values, bytes, calls, order. The same on every machine;
# - *replayed*: time on named hardware, computed from what was recorded;
# - *waited*: the real clock of this machine, as in the cell above.
#
# No lesson sells a waited number as the gain. Exact here is what a step sends: `record` runs a function and notes every
# call. An all-reduce of $S$ bytes makes each rank send $2(n-1)/n \cdot S$ (lesson 01 builds it), and all gradients of the
# float32 model are $4$ bytes a parameter. With it the course's ledger begins, which gets a row a lesson. Its
# memory is the most bytes that a rank's tensors held at one instant:

# %% name="ledger" tags=["timing"]
recording = ranks.record(train_on_ranks, 1)
calls = recording.communication().query("rank == 0")
formula = round(2 * (WORLD_SIZE - 1) / WORLD_SIZE * 4 * len(parameters))
sent = round(calls.wire_bytes.sum())
print(f"{calls.calls.sum()} calls, {sent:,} bytes; by formula {formula:,}")
assert sent == formula
dtlab.ledger("00", recording=recording, formula=formula)

# %% [markdown]
# ## In real systems
#
# | here | torch | Megatron-LM | DeepSpeed |
# |---|---|---|---|
# | `dtlab.launch(4)` | `torchrun --nproc-per-node 4`, then `init_process_group` | under torchrun | the `deepspeed` launcher |
# | `rank`, `world_size` | `dist.get_rank()`, `dist.get_world_size()` | the same | the same |
# | the loop over `all_reduce` | `DistributedDataParallel` | its own `DistributedDataParallel` | `engine.backward` |
# | who waits for whom | watchdog, flight recorder | torch's | torch's |
#
# Left out on purpose: how all-reduce works and what it sends (lesson 01), one call for many gradients, and sending
# while backward still runs (lesson 02).
#
# ## Exercises
#
# 1. *Predict.* `t` holds `rank + 1`, and all ranks call `all_reduce(t)` three times in a row. What is in `t`?
# 2. *Change.* Write a function whose result on every rank is the mean of the rank numbers.
# 3. *Break.* Rank 0 calls `all_reduce` twice, the others once. Who waits, for whom, in which call?
#
# <details><summary>Answers</summary>
#
# 1. The first call gives the sum to all; each further call adds up equal numbers, so it multiplies by the world size.
# 2. Add up, then divide by `world_size`, on every rank.
# 3. Rank 0, in its second call, for all others.
#
# </details>
#
# The folded cell computes all three: run it when you have your own (add cells with `b`).

# %% name="answers" tags=["exact", "folded"]
# Answers: run me
def three_times():
    t = torch.tensor([rank + 1.0])
    for _ in range(3):
        dist.all_reduce(t)
    return t.item()

def one_too_many():
    for _ in range(2 if rank == 0 else 1):
        dist.all_reduce(torch.ones(1))

print("1.", ranks.run(three_times))
print("2.", [result / WORLD_SIZE for result in ranks.run(sum_of, 1)])
try:
    ranks.run(one_too_many)
except dtlab.HangError as error:
    print("3.", error)

# %% [markdown]
# ## Summary
#
# - A **rank** is a process with its own variables; the **kernel** is no rank, and `push` and `pull` go between them.
# - A **collective** is a call that all ranks make; after **all-reduce** each of them holds the sum.
# - A call that one rank skips is a **hang**; waits that close into a circle are a **deadlock**.
# - **Data parallel**: a **replica** on each rank, rows of the batch to each, gradients added up: equal to one process.
# - A number is *exact here*, *replayed* or *waited*.
#
# Next: how all-reduce is made of sends and receives, and what it costs (lesson 01).
