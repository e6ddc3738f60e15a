# %% [markdown]
# # 02 Data parallel
#
# Replicas of one model, each with its share of the batch, that train exactly as one process does, and hide what they send.
#
# | You will build | Needs | Runs on | Takes | Works on |
# |---|---|---|---|---|
# | data parallelism by hand; then with buckets that leave during backward | [00](../notebooks/00_ranks.ipynb); Part B also 01 | 4 ranks on CPU | A 35 min, B 30 min | Linux; Windows through WSL2; macOS and Colab: not tried |
#
# Words are explained in the [glossary](../notebooks/GLOSSARY.md). The first cell imports what the lesson uses:

# %% name="imports" tags=["timing"]
import contextlib
import hashlib
import time

import torch

import dtlab
from dtlab import parallel, plots, theory
from dtlab.data import SyntheticLanguage, batches, shard_batch
from dtlab.models import GPT, GPTConfig, TimedLayer, cross_entropy
from dtlab.simulate import Hardware, replay

WORLD_SIZE = 4
torch.set_num_threads(1)  # the model here is too small to gain from more
print(dtlab.doctor())

# %% [markdown]
# ## Before you start
#
# <details><summary>Rank r of 4 holds r + 1, and all call all_reduce. What does rank 2 hold then?</summary>
# 10, as every rank does.</details>
# <details><summary>One rank leaves out a collective. What do the others do?</summary>
# They wait for it: a hang.</details>
# <details><summary>For Part B: what does each of n ranks send in a ring all-reduce of S bytes, in how many messages?</summary>
# 2(n-1)/n S bytes, in 2(n-1) messages one after another.</details>
#
# # Part A
#
# ## The problem
#
# The course's model has 7.47 billion parameters and is to learn from 150 billion tokens, on A100s at half of their peak:

# %% name="days" tags=["exact"]
num_params = theory.transformer_params(theory.GPT_7_5B)
for devices in (1, 64):
    days = theory.training_days(6 * num_params * 150e9, num_devices=devices, flops_per_s=156e12)
    print(f"{devices:2} A100: {days:5.1f} days, {16 * num_params / 1e9:.1f} GB on each")

# %% [markdown]
# Sixty-four devices, each with its share of every batch, are 64 times as fast, if talking costs nothing. What remains is
# the memory: 16 bytes a parameter on every device, and no A100 has that much (lessons 03, 04). Here the model
# fits.
#
# ## The idea
#
# Rank $r$ of $n$ holds a **replica** of the model and computes the gradient $g_r$ of *its* loss. All replicas then step
# with the same average,
#
# $$g = \frac{1}{n} \sum_{r=0}^{n-1} g_r ,$$
#
# so replicas that start equal stay equal. That $g$ is the gradient of the whole batch only if the losses are weighted
# rightly. Commit yourself: choose before you run on (*Run All* leaves questions open).

# %% name="question-1" tags=["exact", "folded"]
# Question 02.1: run me
question = "Rank 0 has one token, its gradient is 1. Rank 1 has three tokens, the gradient of each is 5. The right average?"
dtlab.predict("02.1", question, choices={
    "3.0": "That is the mean of the ranks' means: the lonely token counts as much as three.",
    "4.0": "Four tokens with 1 + 5 + 5 + 5 in sum: every token counts once.",
    "16.0": "That is the sum over the tokens; it would grow with the batch.",
})

# %% [markdown]
# ## Build it
#
# ### The loop you know
#
# The model is a small GPT, the data a synthetic language. Rows have different lengths, as sentences do: a target of -100
# marks what does not count. One process takes all rows as they are, and its own mean:

# %% name="loop"
config = GPTConfig(vocab_size=32, seq_length=32, hidden_size=32, num_layers=1, num_heads=4)
data, BATCH_SIZE = SyntheticLanguage(vocab_size=32).sample(65536, seed=0), 64
sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
flat = lambda tensors: torch.cat([tensor.detach().flatten() for tensor in tensors])

def as_is(thing):
    return thing

def own_mean(loss_sum, num_tokens):
    return loss_sum / num_tokens

def global_batch(step):
    inputs, targets = batches(data, config.seq_length, BATCH_SIZE, seed=0, step=step)
    lengths = 1 + torch.arange(BATCH_SIZE) // 2                     # tokens of each row
    return inputs, targets.masked_fill(torch.arange(config.seq_length) >= lengths[:, None], -100)

# %% [markdown]
# The loop is one process's; `shard`, `mean` and `finish` are what ranks will do otherwise. It returns the loss and the
# gradients of every step, and the parameters at the end:

# %% name="train" tags=["exact"]
def train(model, steps=5, shard=as_is, mean=own_mean, finish=as_is, make_optimizer=sgd):
    optimizer, losses, grads = make_optimizer(model.parameters()), [], []
    for step in range(steps):
        inputs, targets = shard(global_batch(step))                 # which rows
        loss_sum = cross_entropy(model(inputs), targets, reduction="sum")
        loss = mean(loss_sum, (targets != -100).sum().item())       # over which tokens
        optimizer.zero_grad()
        loss.backward()
        finish(model)                                               # what follows backward
        grads.append(flat(p.grad for p in model.parameters()))
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), torch.stack(grads), flat(model.parameters())

alone = train(GPT(config, seed=0, dtype=torch.float64))
print("one process, loss falls:", (alone[0][-1] < alone[0][0]).item())

# %% [markdown]
# ### Equal start
#
# Ranks may be seeded differently, on purpose (dropout) or not. So rank 0 sends its parameters to all: `broadcast`. A hash
# tells whether replicas are equal, with eight letters a rank instead of a model:

# %% name="equal-start" tags=["exact"]
def equal_start(model):
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), src=0)
    return model

def replica_hash(parameters):
    return hashlib.sha256(parameters.cpu().numpy().tobytes()).hexdigest()[:8]

ranks = dtlab.launch(WORLD_SIZE)
start = lambda prepare: replica_hash(flat(prepare(GPT(config, seed=rank)).parameters()))
for how, prepare in {"seeded": as_is, "broadcast": equal_start}.items():
    print(f"{how:9}: {len(set(ranks.run(start, prepare)))} different replicas")

# %% [markdown]
# ### The average
#
# After backward, each gradient is summed over the ranks and divided by their number. And each rank takes its rows:

# %% name="average"
def average(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # 2 (n-1)/n * its bytes from each rank
        parameter.grad /= world_size

my_rows = lambda batch: shard_batch(batch, rank, world_size)

# %% [markdown]
# ### Every token counts once
#
# A rank divides the sum of its losses not by its own tokens but by those of all ranks, which costs one all-reduce of one
# number, and multiplies by $n$, because the average will divide by it. The question's case (further ranks hold no token):

# %% name="answer-1" tags=["exact"]
def global_mean(loss_sum, num_tokens):
    total = torch.tensor(num_tokens)
    dist.all_reduce(total)
    return loss_sum * world_size / total

def weighted():
    tokens, gradient = {0: (1, 1.0), 1: (3, 5.0)}.get(rank, (0, 0.0))
    x = torch.zeros(1, requires_grad=True)
    global_mean(tokens * gradient * x.sum(), tokens).backward()
    dist.all_reduce(x.grad)
    return x.grad.item() / world_size

dtlab.reveal("02.1", ranks.run(weighted)[0])

# %% [markdown]
# ## Run it on ranks
#
# Four pieces around the same loop. The seeds differ on purpose:

# %% name="on-ranks"
def on_ranks(prepare=equal_start, dtype=torch.float64, shard=my_rows, mean=global_mean,
             finish=average, **others):
    model = prepare(GPT(config, seed=rank, dtype=dtype))
    return train(model, shard=shard, mean=mean, finish=finish, **others)

# %% [markdown]
# ## Is it right?
#
# Five steps in float64 against one process: the mean of the ranks' losses, every gradient of every step on every rank,
# the parameters at the end. Beside the loop by hand stand torch's `DistributedDataParallel` and this course's
# (`dtlab.parallel`); they average during backward and need no `finish`. The learning rate is the same: same batch, same
# gradient.

# %% name="equal" tags=["exact"]
def equal(results):
    losses, grads, parameters = map(torch.stack, zip(*results))
    pairs = zip((losses.mean(0), grads, parameters), alone)
    return [torch.allclose(a, b.expand_as(a), rtol=1e-10, atol=1e-12) for a, b in pairs]

print("losses, gradients, parameters equal: by hand", equal(ranks.run(on_ranks)))
for lib in (torch.nn.parallel, parallel):
    print(lib.__name__, equal(ranks.run(on_ranks, lib.DistributedDataParallel, finish=as_is)))

# %% [markdown]
# ### Rounding or bug?
#
# In float32 this check fails: sums in another order differ in their last bits. Is it only that? Three looks tell:
#
# 1. *Repeat in float64.* Rounding is near $10^{-7}$, and eight digits smaller in float64. A bug stays; and what was far above
#    $10^{-7}$ is one even if float64 hides it.
# 2. *The ratio* of wrong to right. $n$: summed, not averaged. $1/n$: averaged twice. $m$: not divided by the number of
#    *micro-batches*, the parts in which a rank may take its batch (Part B).
# 3. *The first rank and index that differ.* One rank alone, or one parameter alone, says where to look.

# %% name="diagnose"
names = [f"{name}[{i}]" for name, p in GPT(config).named_parameters() for i in range(p.numel())]

def diagnose(**wrong):
    errors = []
    for dtype in (torch.float32, torch.float64):
        right = train(GPT(config, seed=0, dtype=dtype), steps=1)[1][0]
        results = ranks.run(on_ranks, steps=1, dtype=dtype, **wrong)
        found = torch.stack([grads[0] for _, grads, _ in results])
        errors.append(((found - right).norm(dim=1) / right.norm()).max().item())
    differs = (~torch.isclose(found, right, rtol=1e-10, atol=1e-12)).nonzero().tolist()
    where, index = (differs or [(0, 0)])[0]
    ratio = (found[where] @ right / (right @ right)).item()
    return *errors, ratio, f"rank {where}, {names[index]}" if differs else "nothing"

# %% [markdown]
# The right program and four mistakes:

# %% name="diagnoses" tags=["timing"]
add_up = lambda model: [dist.all_reduce(p.grad) for p in model.parameters()]
lose_a_row = lambda batch: my_rows([part[:-1] for part in batch])

def clip_on_rank_1(model):
    average(model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1 if rank == 1 else 1e9)

programs = {"right": {}, "sum for mean": {"finish": add_up}, "mean of means": {"mean": own_mean},
            "one row lost": {"shard": lose_a_row}, "one rank clips": {"finish": clip_on_rank_1}}
for name, pieces in programs.items():
    in_32, in_64, ratio, first = diagnose(**pieces)
    print(f"{name:14} float32 {in_32:.1e}, float64 {in_64:.1e}, ratio {ratio:.2f}, {first}")
    assert in_32 < 1e-5 and in_64 < 1e-12 if name == "right" else in_64 > 0.5 * in_32

# %% [markdown]
# Only the first line shrinks. The ratio names the sum, the place the one that clips. The other two have a ratio near 1
# and differ everywhere: look at the data, and at what the loss is divided by.
#
# ### Break it
#
# Leave out the broadcast. Replicas start differently and step with the average of their gradients. Say it before you run
# it: will the loss (in nats: natural logarithms) fall?

# %% name="no-broadcast" tags=["picture"]
right = train(GPT(config, seed=0, dtype=torch.float64), steps=20)[0]
wrong, _, replicas = map(torch.stack, zip(*ranks.run(on_ranks, as_is, steps=20, guard=False)))
losses = {"one process": right.tolist(), "no broadcast": wrong.mean(0).tolist()}
plots.curves(losses, x="step", y="loss [nats per token]")

# %% [markdown]
# It falls. Without the right curve beside it nobody would look twice. The replicas themselves:

# %% name="replicas" tags=["exact"]
print({name: f"{its[0]:.2f} -> {its[-1]:.2f}" for name, its in losses.items()})
print(f"{len(set(map(replica_hash, replicas)))} different replicas, "
      f"up to {(replicas - replicas[0]).abs().max():.2f} apart")

# %% [markdown]
# They are as far apart as at the start: all take the same steps, side by side. Which of them would you save? A loss curve
# proves nothing; a replica hash does.
#
# ### Part A in three lines
#
# - Replicas start equal by broadcast, and stay equal because all step with one average.
# - The average is right when every token counts once.
# - Prove it against one process in float64: rounding shrinks, a bug stays.
#
# # Part B
#
# ## Hide the sending
#
# One call per parameter, after backward, wastes twice: each call has its latency, and the network idles while backward
# computes. The cure for both is the **bucket**: gradients in one flat tensor, sent while earlier layers still compute.
# How large?

# %% name="question-2" tags=["exact", "folded"]
# Question 02.2: run me
question = "A GPT of 1.6 billion parameters, one ring of 64 A100s. Which buckets give the shortest step?"
dtlab.predict("02.2", question, choices={
    "one per parameter": "It starts first, but over a hundred calls pay the latency of 126 messages each.",
    "25 MB": "About torch's default. Round a ring of 64, its calls still pay more latency than backward can hide.",
    "100 MB": "Few calls, and what is left to send when backward has ended is short.",
    "the whole model": "One call, but it starts when backward has ended: nothing is hidden.",
})

# %% [markdown]
# ### Hooks
#
# Autograd calls a hook as soon as a parameter's gradient is there:

# %% name="hooks" tags=["exact"]
net = torch.nn.Sequential(*(torch.nn.Linear(2, 2, bias=False) for _ in range(3)))
for name, parameter in net.named_parameters():
    parameter.register_post_accumulate_grad_hook(lambda _, name=name: print("there:", name))
net(torch.ones(2)).sum().backward()

# %% [markdown]
# The last layer comes first. So a hook fills the buckets in that order, the same on every rank. A full bucket leaves at once,
# as an all-reduce that nobody waits for until `finish`:

# %% name="bucketed"
def gradient_is_there(model, parameter):
    model.bucket.append(parameter)
    if sum(p.grad.nbytes for p in model.bucket) >= model.bucket_bytes:
        send(model)

def send(model):
    joined = flat(p.grad for p in model.bucket)
    model.sent.append((model.bucket, joined, dist.all_reduce(joined, async_op=True)))
    model.bucket = []

def bucketed(model, bucket_bytes=25 * 2**20):
    model.bucket_bytes, model.bucket, model.sent = bucket_bytes, [], []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: gradient_is_there(model, p))
    return model

# %% [markdown]
# `finish` sends what is left, waits, and puts the averages back. The proof is the old one, with buckets of 20 KiB: a
# last one stays unfilled, so it fails if you forget that one.

# %% name="finish" tags=["exact"]
def finish(model):
    if model.bucket:
        send(model)
    for parameters, joined, work in model.sent:
        work.wait()
        parts = (joined / world_size).split([p.numel() for p in parameters])
        for parameter, part in zip(parameters, parts):
            parameter.grad = part.view_as(parameter)
    model.sent.clear()

results = ranks.run(on_ranks, lambda model: bucketed(equal_start(model), 20_480), finish=finish)
print("losses, gradients, parameters equal to one process:", equal(results))

# %% [markdown]
# ### Overlap
#
# Does it hide anything? Here four ranks share your cores, so computing would slow the sending. `TimedLayer` sleeps instead:
# six layers, each with 40 ms of backward and 2 MiB of gradient. *Waited*, the slowest rank's best of five, in turns:

# %% name="overlap" tags=["timing"]
def timed_step(bucket_bytes):
    layers = [TimedLayer(0, backward_s=0.04, num_params=2**19) for _ in range(6)]
    model = bucketed(torch.nn.Sequential(*layers), bucket_bytes)
    dist.barrier()
    start = time.perf_counter()
    model(torch.ones(1)).sum().backward()
    finish(model)
    return time.perf_counter() - start

t = [max(ranks.run(timed_step, size, guard=False)) for _ in range(5) for size in (2**30, 2**21)]
after, during = min(t[::2]), min(t[1::2])
print(f"1 bucket, after backward: {1e3 * after:.0f} ms; 6, during it: {1e3 * during:.0f} ms")
assert 0.24 < during < 1.25 * after  # six layers that sleep

# %% [markdown]
# The layers sleep 240 ms in all. What is more is communication that shows (and copying): it is *exposed*. With a bucket a
# layer, five of six can travel under the backward of earlier layers; nothing is left to hide the last. (The six not faster? Then
# something else had the cores that messages need: run the cell again.)
#
# ### Postpone
#
# With several micro-batches a step, only the last one needs to send. `no_sync` adds up before it sends:

# %% name="no-sync" tags=["exact"]
def three_micro_batches(postpone):
    model = parallel.DistributedDataParallel(GPT(config))
    for step in range(3):
        inputs, targets = my_rows(global_batch(step))
        with model.no_sync() if postpone and step < 2 else contextlib.nullcontext():
            cross_entropy(model(inputs), targets, reduction="mean").backward()

for postpone in (False, True):
    sent = ranks.record(three_micro_batches, postpone).communication().groupby("op").first()
    calls, size = sent.loc["all_reduce", ["calls", "tensor_bytes"]]
    print(f"no_sync {postpone!s:5}: {calls} all_reduce, {size:,} bytes")

# %% [markdown]
# ## What does it cost?
#
# *Exact here*: what each rank sends in a step. Published for a ring is $2(n-1)/n \cdot S$
# ([nccl-tests](https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md)); $S$ is 4 bytes a parameter, and 8 for
# the number of tokens:

# %% name="bytes" tags=["exact"]
recording = ranks.record(on_ranks, bucketed, steps=1, dtype=torch.float32, finish=finish)
sent = recording.communication().groupby("rank").wire_bytes.sum().max()
formula = theory.ring_all_reduce_bytes(4 * len(names) + 8, WORLD_SIZE)
print(f"bytes each rank sends: by formula {formula:,.0f}, recorded {sent:,.0f}")

# %% [markdown]
# *Replayed*: time, where it matters. The same `bucketed` is recorded dry, without memory and arithmetic, as rank 0 of 64,
# with a GPT of 1.6 billion parameters and 2 sequences of 2,048 tokens a rank. Does the recording count the right work? A
# model of $N$ parameters needs $6NT$ FLOPs for $T$ tokens, forward and backward, and some more for attention:

# %% name="dry" tags=["exact"]
sizes = dict(num_layers=12, hidden_size=3072, num_heads=24, seq_length=2048, vocab_size=32000)
shape, tokens = theory.ModelShape(**sizes, tie_embeddings=False), 2 * 2048

def big_step(bucket_bytes):
    model = GPT(GPTConfig(**sizes, tie_embeddings=False), dtype=torch.bfloat16, device="meta")
    empty = {name: torch.empty_like(p, device=device) for name, p in model.named_parameters()}
    model.load_state_dict(empty, assign=True)  # to set first values is no part of a step
    bucketed(model, bucket_bytes)
    batch = torch.zeros(2, 2048, dtype=torch.long)
    cross_entropy(model(batch), batch, reduction="mean").backward()
    finish(model)

buckets = {"one per parameter": 1, "25 MB": 25e6, "100 MB": 100e6, "the whole model": 1e12}
needed, big = tokens * theory.model_flops_per_token(shape), theory.transformer_params(shape)
dry = {name: dtlab.record_dry(big_step, size, world_size=64, model_flops=64 * needed)
       for name, size in buckets.items()}
print(f"{big / 1e9:.2f} billion parameters, TFLOPs a step: 6NT {6e-12 * big * tokens:.1f}, "
      f"+ attention {needed / 1e12:.1f}, recorded {dry['25 MB'].flops().flops.sum() / 1e12:.1f}")

# %% [markdown]
# It does, nearly. (The table of embeddings is looked up, not multiplied; flash attention computes its scores twice.) Now on
# A100s, all in one ring over InfiniBand. **MFU**, model FLOPs utilisation, is the FLOPs the model needs over those that the
# devices' peak could do in the time of the step:

# %% name="answer-2" tags=["exact"]
hardware = Hardware.preset("64xA100-80GB")
timelines = {name: replay(its, hardware, algorithm="ring") for name, its in dry.items()}
for name, t in timelines.items():
    print(f"{name:18}{dry[name].communication().calls.sum():3} calls, step "
          f"{t.step_time_s:.2f} s, exposed {t.exposed_communication_s:.2f} s, MFU {t.mfu:.0%}")
best = min(timelines, key=lambda name: timelines[name].step_time_s)
dtlab.reveal("02.2", f"{best}, {timelines[best].step_time_s:.2f} s", best)

# %% [markdown]
# A curve like a U: small buckets pay latency, one bucket hides nothing. (The optimizer's time is left out.) Here is the best of
# them on rank 0. How to read a timeline: time runs to the right; the first row is what the rank computes, forward (F) and
# backward (B), hatched where it is idle; the row below its calls (C) in the group of ranks 0 to 63 (`default_pg` to torch).
# Where communication has no computing above it, it costs time:

# %% name="replayed" tags=["picture"]
plots.timeline(timelines[best])

# %% [markdown]
# Once it has begun, the link is never idle: what sticks out at the end goes only with a faster link, or with more tokens a rank.
#
# ## Turn the knobs
#
# The 7.5B model, as if it fitted. Drag the bucket from one parameter to the whole model: the exposed green shrinks, then comes
# back. Why are 25 MB good here, and not above? With twice the tokens a rank, backward takes longer than all the sending, and
# hides each call's latency too. Give a rank 1 sequence, and the link is the slower one; then another network:

# %% name="explorer" tags=["picture"]
dtlab.explore.data_parallel()

# %% [markdown]
# This lesson's row of the ledger (*shipped*: a lesson not yet run here):

# %% name="ledger" tags=["timing"]
dtlab.ledger("02", recording=recording, formula=round(formula))

# %% [markdown]
# ## In real systems
#
# | here | torch | Megatron-LM | DeepSpeed |
# |---|---|---|---|
# | `bucketed`, `finish` | `DistributedDataParallel` | `DistributedDataParallel`, `overlap_grad_reduce` | `engine.backward`, `overlap_comm` |
# | `bucket_bytes` | `bucket_cap_mb`, in MiB (25) | `bucket_size`, in parameters | `reduce_bucket_size`, in elements |
# | `no_sync` | `no_sync` | `no_sync` | `gradient_accumulation_steps` |
# | `global_mean` | by hand | `calculate_per_token_loss` | by hand |
# | `equal_start` | in the constructor | `broadcast_params` | in `initialize` |
#
# Left out on purpose: buffers and frozen parameters at the start; a rank without any token; a parameter without gradient on
# one rank, which shifts `bucketed`'s buckets there (torch: `find_unused_parameters`). Beyond that: batch statistics stay
# local unless `SyncBatchNorm` joins them; torch's `DistributedSampler` pads, so that
# 10 samples evaluated on 4 ranks count as 12.
#
# ## Exercises
#
# 1. *Predict.* AdamW in place of SGD, and gradients are summed, not averaged. How wrong are the parameters after 5 steps,
#    beside SGD?
# 2. *Change.* Replay `dry` with the fastest algorithm in place of the flat ring (`algorithm=None`): inside a node over NVLink, between
#    nodes in few steps. Which buckets are good now?
# 3. *Break.* Rank 0 has 3 batches, the others have 5. `train` the course's `DistributedDataParallel` on them. What happens?
#    Then put `train` under `with model.join():`.
#
# The folded cell computes all three:

# %% name="answers" tags=["exact", "folded"]
# Answers: run me
for name, make in {"SGD": sgd, "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3)}.items():
    right = train(GPT(config, seed=0, dtype=torch.float64), make_optimizer=make)[2]
    summed = ranks.run(on_ranks, finish=add_up, make_optimizer=make)[0][2]
    print(f"1. {name}: off by {(summed - right).norm() / right.norm():.3%}")
print("2. exposed [ms]:", {k: round(1e3 * replay(r, hardware).exposed_communication_s, 1) for k, r in dry.items()})

def uneven(joined):
    model = parallel.DistributedDataParallel(GPT(config))
    with model.join() if joined else contextlib.nullcontext():
        return len(train(model, 3 if rank == 0 else 5, my_rows)[0])

try:
    ranks.run(uneven, False)
except dtlab.HangError as error:
    print("3.", str(error).splitlines()[0])
print("   with join, batches done:", ranks.run(uneven, True))

# %% [markdown]
# <details><summary>In words</summary>
#
# AdamW divides a gradient by its own size, so the factor cancels, and no curve would show the mistake. With the fastest
# algorithm all but some 2 ms is hidden, whatever the bucket, except with the whole model in one.
#
# </details>
#
# ## Summary
#
# - **Data parallel**: equal replicas by **broadcast**, one average gradient; every token counts once.
# - **Rounding or bug**: repeat in float64; then the ratio; then the first rank and index. A **replica hash** tells whether
#   replicas are equal.
# - A **bucket** leaves during backward, started by a **hook**; what is not hidden is **exposed communication**.
# - Too small buckets pay latency, too large ones hide nothing. **no_sync** sends once a step.
# - **MFU**: FLOPs the model needs over what the devices could do; the model needs about $6NT$.
#
# Now its lab: `work/labs/lab02_data_parallel`.
#
# References: Li et al. 2020, [arXiv:2006.15704](https://arxiv.org/abs/2006.15704); Chowdhery et al. 2022,
# PaLM, [arXiv:2204.02311](https://arxiv.org/abs/2204.02311).
