# %% [markdown]
# # 04 ZeRO
#
# Data parallelism without copies: every rank keeps a part of the optimizer's states, then of the gradients, then of the parameters.
#
# | You will build | Needs | Runs on | Takes | Works on |
# |---|---|---|---|---|
# | ZeRO stages 1 and 2, and stage 3 in its naive form | [01](../notebooks/01_collectives.ipynb), [02](../notebooks/02_data_parallel.ipynb) and [03](../notebooks/03_memory.ipynb) | 4 ranks on CPU | A 35 min, B 25 min | Linux; Windows through WSL2; macOS and Colab: not tried |
#
# Words are explained in the [glossary](../notebooks/GLOSSARY.md). The first cell imports what the lesson uses:

# %% name="imports" tags=["timing"]
import math

import torch
import torch.distributed as dist

import dtlab
from dtlab import parallel, plots, theory
from dtlab.data import SyntheticLanguage, batches, shard_batch
from dtlab.models import GPT, GPTConfig, cross_entropy
from dtlab.parallel.shared import split_by_bytes
from dtlab.plots.twin import twin
from dtlab.simulate import Hardware, replay

WORLD_SIZE = 4
torch.set_num_threads(1)  # the model here is too small to gain from more
print(dtlab.doctor())

# %% [markdown]
# ## Before you start
#
# <details><summary>A ring all-reduce has two halves. What does rank r hold between them?</summary>
# The finished sum of chunk r, and nothing finished of the others: a reduce-scatter is done, the all-gather is to come.</details>
# <details><summary>Mixed-precision Adam: which 16 bytes does a parameter cost?</summary>
# 2 the weight, 2 its gradient, 12 the optimizer: a float32 weight, momentum, variance.</details>
# <details><summary>Why do replicas stay equal?</summary>
# They start equal, and all step with the same average gradient.</details>
#
# # Part A
#
# ## The problem
#
# Data parallelism bought time, 64 devices for one (lesson 02). In memory it bought nothing. The course's model, on each device:

# %% name="states" tags=["exact"]
num_params = theory.transformer_params(theory.GPT_7_5B)
states = theory.model_state_bytes(num_params)
print("GB on each device:", {name: round(size / 1e9, 1) for name, size in states.items()})
print(f"together {16 * num_params / 1e9:.1f} GB, a 64th of it {num_params / 4e9:.1f} GB")

# %% [markdown]
# An A100 has 80 GB. And all devices hold the *same*: of 64 copies of the optimizer's states, 63 are there for nothing.
#
# ## The idea
#
# Adam works element by element: to update a parameter it needs that parameter's gradient, momentum and variance, and no
# other's. So let rank $r$ of $N$ update one part of the parameters, its **shard**, keep states for that part alone, and
# give the result to the others. That is **ZeRO** (Rajbhandari et al. 2020), and it goes on: whoever does not update a
# parameter needs no gradient of it, and between steps not even the parameter. With $\Psi$ parameters and $K = 12$ bytes
# of optimizer states for each, a rank holds
#
# $$2\Psi + 2\Psi + \frac{K\Psi}{N}, \qquad 2\Psi + \frac{(2 + K)\Psi}{N}, \qquad \frac{(2 + 2 + K)\Psi}{N}$$
#
# bytes at **stages** 1, 2, 3. What must it send for that? Commit yourself: choose before you run on (*Run All* leaves
# questions open).

# %% name="question-1" tags=["exact", "folded"]
# Question 04.1: run me
dtlab.predict("04.1", "Stage 1 keeps 1/N of Adam. Bytes sent against data parallelism?", choices={
    "less": "Gradients, yes: a rank needs the sum of its shard only. But then it has parameters to give away.",
    "equal": "Gradients of the shards, then parameters of the shards: the two halves of an all-reduce.",
    "more": "The parameters would come on top if every rank got all gradients. It needs those of its shard.",
})

# %% [markdown]
# ## Build it
#
# ### The loop you know
#
# A small GPT in float64, with a number of parameters that 4 does not divide, on a synthetic language. Every rank will have
# as many tokens as the others, so that the mean of means is the mean:

# %% name="model" tags=["exact"]
config = GPTConfig(vocab_size=32, seq_length=31, hidden_size=21, num_layers=2, num_heads=3)
data, BATCH_SIZE = SyntheticLanguage(vocab_size=32).sample(65536, seed=0), 24
optimizers = {"SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
              "Adam": lambda parameters: torch.optim.Adam(parameters, lr=3e-3)}
new_model = lambda: GPT(config, seed=0, dtype=torch.float64)
psi = sum(p.numel() for p in new_model().parameters())
print(f"{psi:,} parameters")

# %% [markdown]
# One step. `parts` is what this lesson adds: groups of parameters that do something before the optimizer's step and
# something after it. One process has none:

# %% name="step"
as_is = lambda thing: thing
my_rows = lambda batch: shard_batch(batch, rank, world_size)

def one_step(model, optimizer, parts, rows, step, clip=as_is):
    inputs, targets = rows(batches(data, config.seq_length, BATCH_SIZE, seed=0, step=step))
    model.zero_grad(set_to_none=False)  # stage 1's gradients are views, which must stay
    loss = cross_entropy(model(inputs), targets, reduction="mean")
    loss.backward()
    for part in parts:
        part.before_step()
    clip(optimizer.param_groups[0]["params"])
    optimizer.step()
    for part in parts:
        part.after_step()
    return loss.detach()

# %% [markdown]
# Five steps give the losses, the gradients of every step and the parameters at the end, in the model's order. (For that ranks
# show each other their shards, in `joined`. It belongs to the proof, not to ZeRO.)

# %% name="train"
flat = lambda tensors: torch.cat([tensor.detach().flatten() for tensor in tensors])

def joined(model, parts, tensors):
    whole = dict(zip(model.parameters(), tensors))
    for part, tensor in zip(parts, tensors):
        everything, sizes = torch.empty_like(part.flat), [p.numel() for p in part.parameters]
        all_gather(everything, tensor.detach())
        whole.update(zip(part.parameters, everything[:sum(sizes)].split(sizes)))
    return flat(whole[p] for p in model.parameters())

def train(model, optimizer, parts, rows=as_is, **how):
    updated, losses, grads = optimizer.param_groups[0]["params"], [], []
    for step in range(5):
        losses.append(one_step(model, optimizer, parts, rows, step, **how))
        grads.append(joined(model, parts, [tensor.grad for tensor in updated]))
    return torch.stack(losses), torch.stack(grads), joined(model, parts, updated)

# %% [markdown]
# ### Stage 1
#
# To cut what has many shapes, lay it end to end: one flat tensor for the parameters, one for the gradients, each with zeros at the
# end until $N$ divides it (**padding**). `vector_to_parameters` makes the model's tensors views of it, so that nothing is
# there twice. The rank's shard of the flat parameter, a view again, is all that the optimizer gets.
#
# Before its step gradients are reduce-scattered, where data parallelism has an all-reduce: a rank needs the sum of its shard
# only. After it, an all-gather gives every rank the new shards. (Both calls work in place, and have two names: an old one and
# torch's newest.)

# %% name="stage-1"
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
padded = lambda vector: torch.nn.functional.pad(vector, (0, -len(vector) % world_size))
mine = lambda vector: vector.view(world_size, -1)[rank]

class Stage1:
    def __init__(self, parameters):
        self.parameters = list(parameters)
        for p in self.parameters:
            p.grad = torch.zeros_like(p)
        self.flat = padded(flat(self.parameters))
        self.grads = torch.zeros_like(self.flat)
        torch.nn.utils.vector_to_parameters(self.flat, self.parameters)
        torch.nn.utils.vector_to_parameters(self.grads, [p.grad for p in self.parameters])
        self.shard = torch.nn.Parameter(mine(self.flat))  # shares its memory

    def before_step(self):
        self.shard.grad = mine(self.grads)
        reduce_scatter(self.shard.grad, self.grads)  # (n-1)/n of the bytes of grads
        self.shard.grad /= world_size

    def after_step(self):
        all_gather(self.flat, self.shard.detach())  # (n-1)/n of the bytes of flat

# %% [markdown]
# ## Run it on ranks
#
# `cuts` says how a model becomes parts. The optimizer is torch's own: handed a shard, it keeps states of a shard.

# %% name="on-ranks"
cuts = {"alone": lambda model: [], 1: lambda model: [Stage1(model.parameters())]}

def build(cut, name):
    model = new_model()
    parts = cuts[cut](model)
    return model, optimizers[name]([part.shard for part in parts] or model.parameters()), parts

on_ranks = lambda cut, name, **how: train(*build(cut, name), my_rows, **how)
ranks = dtlab.launch(WORLD_SIZE)

# %% [markdown]
# ## Is it right?
#
# Against one process on the whole batch:

# %% name="equal" tags=["exact"]
def equal(results, right):
    losses, grads, parameters = map(torch.stack, zip(*results))
    pairs = zip((losses.mean(0), grads, parameters), right)
    return [torch.allclose(a, b.expand_as(a), rtol=1e-10, atol=1e-12) for a, b in pairs]

def check(stage):
    for name in optimizers:
        its = equal(ranks.run(on_ranks, stage, name), train(*build("alone", name)))
        print(f"stage {stage}, {name:4}: losses, gradients, parameters as one process's: {its}")

check(1)

# %% [markdown]
# Why two optimizers? Adam divides a gradient by its own size and so forgives a wrong factor; SGD does not. And
# a key's bias has gradient 0 but for rounding, which Adam divides by its own size: it grows large. Here `eps` keeps it below
# the bound.
#
# ### Stage 2
#
# The gradients of all parameters still lie in memory until the last one is there. But a gradient may leave as soon as its
# bucket (lesson 02) is full: so a bucket is the part that is flattened, padded and cut. The rank keeps its shard of the gradient,
# and the whole is freed while backward goes on:

# %% name="stage-2" tags=["exact"]
class Stage2(Stage1):
    def __init__(self, parameters):
        super().__init__(parameters)
        self.grads = torch.zeros_like(self.shard)
        for p in self.parameters:
            p.grad = None
            p.register_post_accumulate_grad_hook(self.gradient_is_there)

    def gradient_is_there(self, parameter):
        dtlab.tag(parameter.grad, "grads")  # a word to the recorder, which comes later
        if all(p.grad is not None for p in self.parameters):
            reduce_scatter(self.grads, padded(flat([p.grad for p in self.parameters])))
            self.grads /= world_size
            self.free()

    def free(self):  # what is whole
        for p in self.parameters:
            p.grad = None

    def before_step(self):
        self.shard.grad = self.grads

cuts[2] = lambda model: [Stage2(bucket) for bucket in split_by_bytes(model.parameters(), 20_480)]
check(2)

# %% [markdown]
# ### Beside the course's own
#
# `dtlab.parallel.ZeroOptimizer` does the same with overlap, checkpoints and 16-bit parameters; later lessons use it:

# %% name="dtlab" tags=["exact"]
def with_dtlab(stage):
    model = new_model()
    optimizer = parallel.ZeroOptimizer(model, torch.optim.Adam, zero_stage=stage, lr=3e-3)
    losses = [one_step(model, optimizer, [], my_rows, step) for step in range(5)]
    return torch.stack(losses), flat(model.parameters())

for stage in (1, 2):
    pairs = zip(ranks.run(on_ranks, stage, "Adam")[0][::2], ranks.run(with_dtlab, stage)[0])
    print(f"stage {stage}, losses and parameters as dtlab's:",
          [torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in pairs])

# %% [markdown]
# ### Break it
#
# Leave out the all-gather. Before you run it: in which step does the loss go wrong, and would you see it? Each rank
# takes all rows here, so that losses compare. The first line is one process, then come the ranks:

# %% name="no-gather" tags=["exact"]
class NoGather(Stage1):
    def after_step(self):
        pass

cuts["no gather"] = lambda model: [NoGather(model.parameters())]
right = train(*build("alone", "Adam"))[0]
for losses in (right, *ranks.run(lambda: train(*build("no gather", "Adam"))[0])):
    print(*(f"{loss:.4f}" for loss in losses.tolist()))

# %% [markdown]
# Step 1 is right: nothing was updated before. At step 2 the ranks disagree: each computes with a replica of its own, new in one
# shard and old elsewhere. And still every loss falls.
#
# ## What does it cost?
#
# *Exact here*: what a rank sends in one step, and the peak of each category. All is in float64: 8 + 8 + 16 bytes an element,
# padding counted. Two things come on top: at stage 2 the gradients of the largest bucket, until they are reduced; and Adam's
# 4-byte counter for each tensor that it updates. `keep` leaves a model on the ranks, so that the step alone is recorded:

# %% name="cost"
def keep(stage):
    global kept  # stays on the rank
    kept = build(stage, "Adam")

def compare(stage, sizes):  # sizes: parameters in each part
    elements = sum(size + theory.padding_elements(size, WORLD_SIZE) for size in sizes)
    ours = dict(dp_size=WORLD_SIZE, zero_stage=stage)
    formula = {"sent": 8 * theory.zero_wire_elements(elements, **ours), **theory.zero_states(
        elements, optimizer="adam_fp64", step_tensors=len(sizes), **ours)}
    formula["grads"] += 8 * max(sizes) * (stage > 1)
    formula["params"] += 8 * elements * (stage > 2)  # Part B
    ranks.run(keep, stage)
    recording = ranks.record(lambda: one_step(*kept, my_rows, 0))
    found = recording.memory().max()
    found["peak_sent"] = recording.communication().groupby("rank").wire_bytes.sum().max()
    for name, number in formula.items():
        print(f"stage {stage}, {name:16} {number:9,.0f} | {found[f'peak_{name}']:9,.0f}")
    return recording, elements

# %% [markdown]
# What did you say? At the left the formulas, at the right what was recorded:

# %% name="bytes" tags=["exact"]
buckets = [sum(p.numel() for p in b) for b in split_by_bytes(new_model().parameters(), 20_480)]
recordings = {stage: compare(stage, its) for stage, its in ((1, [psi]), (2, buckets))}
all_reduce = theory.ring_all_reduce_bytes(8 * recordings[1][1], WORLD_SIZE)
dtlab.reveal("04.1", f"equal; an all_reduce of these gradients: {all_reduce:,.0f}", "equal")

# %% [markdown]
# Equal, because an all-reduce always *was* a reduce-scatter and an all-gather. Here is lesson 01's ring for a
# billion float32 parameters, *replayed* on four A100s in one node (rank 0, after backward); then the same messages with the
# step between:

# %% name="cut" tags=["picture"]
def update(parameters, gradients):
    parameters.grad = gradients
    torch.optim.Adam([parameters]).step()

def data_parallel(parameters, gradients):
    parallel.ring_all_reduce(gradients)
    update(parameters, gradients)

def stage_1(parameters, gradients):
    update(mine(parameters), parallel.ring_reduce_scatter(gradients))
    parallel.ring_all_gather(parameters)

end = lambda way: way(torch.empty(10**9, device=device), torch.empty(10**9, device=device))
both = [replay(dtlab.record_dry(end, way, world_size=4, ranks=[0]), Hardware.preset("4xA100"))
        for way in (data_parallel, stage_1)]
twin([plots.timeline(its, until_s=both[0].step_time_s) for its in both],
     ["Data parallel", "Stage 1"], caption="The ring is cut, and the step slides into the gap")

# %% [markdown]
# X adds what has come in. Six messages above, the same six below. Stage 1 is free, and more: the step itself is a quarter, since
# each rank updates a quarter. Stages 2 and 3, with the paper's 7.5 billion parameters on 64 devices:

# %% name="stages" tags=["exact"]
gigabytes = lambda psi, n, stage: theory.zero_state_bytes(psi, dp_size=n, zero_stage=stage) / 1e9
for stage in range(4):
    sent = theory.zero_wire_elements(1, dp_size=64, zero_stage=stage)
    print(f"stage {stage}: holds {gigabytes(7.5e9, 64, stage):5.1f} GB, sends {sent:.2f} Psi")

# %% [markdown]
# The gigabytes are those of the paper's Figure 1. Sent are 2, 2, 2, 3 $\Psi$, but for the ring's $(n-1)/n$: stage 3 is the first
# that is paid for.
#
# ### Part A in three lines
#
# - Replicas hold the same states: let each rank keep, and update, a shard of them.
# - Reduce-scatter, step, all-gather: an all-reduce with the optimizer in the gap. Stages 1 and 2 send nothing more.
# - The shards are right when losses, gradients and parameters equal one process; a falling loss proves nothing.
#
# # Part B
#
# ## Stage 3, naively
#
# Between steps a rank keeps nothing but its shard. To compute it gathers the whole, before forward, and again before backward,
# and frees it each time (`resize_` to 0 leaves tensor and views, without memory). After the step there is nothing to give: the next
# forward gathers anyway.

# %% name="stage-3" tags=["exact"]
class Stage3(Stage2):
    def __init__(self, module):
        super().__init__(module.parameters())
        self.shard.data = self.shard.data.clone()  # no view any more: the whole goes
        self.free()
        module.register_forward_pre_hook(self.gather)
        module.register_forward_hook(self.forward_is_done)

    def free(self):
        super().free()
        self.flat.untyped_storage().resize_(0)

    def gather(self, *_):
        self.flat.untyped_storage().resize_(self.flat.nbytes)
        all_gather(self.flat, self.shard.detach())  # (n-1)/n of the bytes of flat

    def forward_is_done(self, module, inputs, output):
        self.free()
        output.register_hook(self.gather)  # as backward begins

    def after_step(self):
        pass  # the next forward gathers

# %% [markdown]
# Is it right, and what does it hold at its peak?

# %% name="stage-3-check" tags=["exact"]
cuts[3] = lambda model: [Stage3(model)]
check(3)
recordings[3] = compare(3, [psi])

# %% [markdown]
# Right, with three halves of an all-reduce in place of two. But look at the peaks: while it computes, a rank holds the whole
# *and* its shard, of parameters and of gradients: more than at stage 1. The saving is there between the steps only. Gathering
# less at a time is lesson 05; exercise 2 begins it.
#
# ## Clipping
#
# To clip by the norm of the gradient a rank needs the norm of all shards. `clip_grad_norm_` sees one:

# %% name="clip" tags=["exact"]
clip_alone = lambda tensors: torch.nn.utils.clip_grad_norm_(tensors, max_norm=0.2)

def clip_over_shards(shards):
    total = sum(shard.grad.square().sum() for shard in shards)
    dist.all_reduce(total)  # one number
    for shard in shards:
        shard.grad *= (0.2 / (total.sqrt() + 1e-6)).clamp(max=1)  # as torch does

right = train(*build("alone", "SGD"), clip=clip_alone)
for name, clip in {"over shards": clip_over_shards, "alone": clip_alone}.items():
    its = equal(ranks.run(on_ranks, 2, "SGD", clip=clip), right)
    print(f"clipped {name:11} losses, gradients, parameters as one process's: {its}")

# %% [markdown]
# By its local norm each rank scales by a factor of its own: the gradient is not only too long, it points elsewhere.
#
# ## The paper's table
#
# Its Table 1 counts the three stages (in GB, left computed, right as printed):

# %% name="table-1" tags=["exact"]
printed = {4: (52.5, 41.3, 30), 16: (35.6, 21.6, 7.5), 64: (31.4, 16.6, 1.88),
           256: (30.4, 15.4, 0.47), 1024: (30.1, 15.1, 0.12)}
for n, row in printed.items():
    pairs = [f"{gigabytes(7.5e9, n, s):9.3f} |{said:5g}" for s, said in enumerate(row, 1)]
    print(f"7.5B on {n:4}:", *pairs)
for size, n, said in ((128e9, 1024, 513), (1e12, 64, 4187), (1e12, 256, 4046)):
    print(f"{size / 1e9:,.0f}B on {n}, stage 1: {gigabytes(size, n, 1):,.3f} | {said:,}")

# %% [markdown]
# The block of 7.5 billion is rounded, those of 128 billion and a trillion are truncated: where the first has 41.3 for 41.25, the
# others have 4,046 for 4,046.875.
#
# ## Turn the knobs
#
# Stage 1; drag the ranks from 1 to 1,024. Where does the bar stop? At 4 bytes a parameter, 30 GB: weights and gradients are
# still whole. Switch to stage 3, and it goes on down. (Why so low an MFU? Overlap, as in lesson 02, hides sending behind
# backward, which on one sequence a rank is far shorter.)

# %% name="explorer" tags=["picture"]
dtlab.explore.zero()

# %% [markdown]
# This lesson's row of the ledger, stage 1 (*shipped*: a lesson not yet run here):

# %% name="ledger" tags=["timing"]
dtlab.ledger("04", recording=recordings[1][0], formula=round(all_reduce))

# %% [markdown]
# ## In real systems
#
# | here | torch | Megatron-LM | DeepSpeed |
# |---|---|---|---|
# | stage 1 | `ZeroRedundancyOptimizer`: whole parameters to ranks, sent by broadcast | `use_distributed_optimizer` | `zero_optimization.stage` 1 |
# | stage 2 | `fully_shard(..., reshard_after_forward=False)`, nearly | Megatron-FSDP, `optim_grads` | 2 |
# | stage 3 | `fully_shard` (lesson 05) | Megatron-FSDP, `optim_grads_params` | 3 |
# | `Stage2`'s bucket | a module | `bucket_size`, in parameters | `reduce_bucket_size`, in elements |
# | `clip_over_shards` | `clip_grad_norm_` on DTensors | `clip_grad` | `gradient_clipping` |
#
# Left out on purpose: 16-bit parameters with a float32 shard, overlap, several micro-batches (`ZeroOptimizer` has all three). No flat
# ZeRO knows the matrices that it cuts: optimizers that look at a whole matrix (LAMB, Adafactor, Muon) need more.
#
# ## Exercises
#
# 1. *Predict.* 175 billion parameters, devices of 80 GB, states only. At which stages do they ever fit, and on how many
#    devices?
# 2. *Change.* Give `Stage3` each of `model.layers`, and `Stage2` the other parameters. Is it still right? What happens to the
#    peak of `params`?
# 3. *Break.* Two ranks' shards have gradients 3 and 4; a small parameter was left whole on both, gradient 12.
#    Which norm does each find alone? Which one, if both ranks' squares are added? Which is right?
#
# The folded cell computes all three:

# %% name="answers" tags=["exact", "folded"]
# Answers: run me
for stage in (1, 2, 3):
    print("1. stage", stage, next((n for n in range(1, 9999) if gigabytes(175e9, n, stage) <= 80), "never"))

cuts["by layer"] = lambda model: [*map(Stage3, model.layers), Stage2(
    p for name, p in model.named_parameters() if "layers." not in name)]
check("by layer")
ranks.run(keep, "by layer")
found = ranks.record(lambda: one_step(*kept, my_rows, 0)).memory().peak_params
print(f"2. by layer, peak of params: {found.max():,} bytes")

print(f"3. alone {math.hypot(3, 12):.2f} and {math.hypot(4, 12):.2f}, all added "
      f"{math.hypot(3, 4, 12, 12):.2f}, right {math.hypot(3, 4, 12):.2f}")

# %% [markdown]
# <details><summary>In words</summary>
#
# What stays whole at stages 1 and 2 is too large alone: no number of devices helps. With layers as
# parts, only one of them is whole at a time, beside what `Stage2` keeps. Shards' squares add up; what is on every rank
# counts once.
#
# </details>
#
# ## Summary
#
# - **ZeRO**: each rank keeps a **shard** of what replicas hold alike; **padding** makes shards equally long.
# - Each **ZeRO stage** cuts more: optimizer states, gradients, parameters; 31.4, 16.6, 1.9 GB in place of 120.
# - 1 and 2 send what data parallelism sends; the step slides between reduce-scatter and all-gather.
# - Stage 3 sends 1.5 times as much, and gathers too much at once if done naively: lesson 05.
# - Norms are of all shards.
#
# Now its lab: `work/labs/lab03_zero`.
#
# References: Rajbhandari et al. 2020, ZeRO, [arXiv:1910.02054](https://arxiv.org/abs/1910.02054).
