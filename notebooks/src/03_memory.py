# %% [markdown]
# # 03 Memory
#
# Every byte and every FLOP of a training step, counted before it runs; and what to do when the bytes are too many.
#
# | You will build | Needs | Runs on | Takes | Works on |
# |---|---|---|---|---|
# | an account of a step's memory and FLOPs; recomputation by hand | [02](../notebooks/02_data_parallel.ipynb), Part A; for Part B all of it | 4 ranks on CPU | A 35 min, B 25 min | Linux; Windows through WSL2; macOS and Colab: not tried |
#
# Words are explained in the [glossary](../notebooks/GLOSSARY.md). The first cell imports what the lesson uses:

# %% name="imports" tags=["timing"]
import functools
import math
from dataclasses import replace

import psutil
import torch

import dtlab
from dtlab import parallel, plots, theory
from dtlab.data import SyntheticLanguage, batches, shard_batch
from dtlab.models import GPT, GPTConfig, TransformerLayer, cross_entropy, gpt
from dtlab.simulate.tables import live_bytes

WORLD_SIZE = 4
torch.set_num_threads(1)  # the model here is too small to gain from more
print(dtlab.doctor())

# %% [markdown]
# ## Before you start
#
# <details><summary>What is the same on all ranks of data parallelism, and what is not?</summary>
# The model, its gradients after the average, the optimizer; not the rows of the batch.</details>
# <details><summary>How many FLOPs does a step of N parameters on T tokens need?</summary>
# About 6NT: 2NT forward, 4NT backward.</details>
# <details><summary>A number here can be one of three kinds. Which?</summary>
# Exact here (values, bytes, counts), replayed (time on named hardware), waited (this machine's clock).</details>
#
# # Part A
#
# ## The problem
#
# Lesson 02 left out that the course's model does not fit. One A100, one sequence of 2,048 tokens:

# %% name="too-much" tags=["exact"]
big = theory.GPT_7_5B
num_params, sizes = theory.transformer_params(big), dict(hidden_size=4096, num_heads=32)
states = sum(theory.model_state_bytes(num_params).values())
layer = theory.activation_bytes_per_layer(seq_length=2048, micro_batch_size=1, **sizes)
print(f"{num_params / 1e9:.2f} billion parameters: {states / 1e9:.1f} GB of states + "
      f"{big.num_layers} layers x {layer / 2**20:.0f} MiB = {big.num_layers * layer / 1e9:.1f} "
      "GB of activations. An A100 has 80 GB")

# %% [markdown]
# ## The idea
#
# Everything a step holds is in one of two accounts:
#
# $$M = \Psi \, (w + g + o) + L \, A(s, b, h)$$
#
# **Model states** live from step to step: for each of $\Psi$ parameters $w$ bytes of weight, $g$ of gradient and $o$ of
# optimizer state. **Activations** live from forward to backward: $A$ bytes that each of $L$ layers keeps for its
# gradient, which grow with $s$ tokens, $b$ sequences and the hidden size $h$. (GB is $10^9$ bytes here, MiB $2^{20}$.)
#
# In **mixed precision** forward and backward compute in 16 bits; the optimizer updates **master weights** in 32 (why: Part B).

# %% name="question-1" tags=["exact", "folded"]
# Question 03.1: run me
question = "1 billion parameters in 16 bits, trained with Adam in mixed precision. GB before the first activation?"
dtlab.predict("03.1", question, choices={
    "2": "Those are the weights alone: one byte in eight.",
    "4": "Weights and gradients. Adam has two states for each parameter.",
    "8": "With Adam's states, if they had 16 bits; and without the 32-bit copy of the weights that Adam updates.",
    "16": "2 weights, 2 gradients, and in 32 bits a copy of the weights, momentum and variance: 4 each.",
})

# %% [markdown]
# ## Build it
#
# ### Count the states
#
# The small GPT comes first, in float32: 4 bytes for each weight, for its gradient and for both of Adam's states. Adam also
# counts steps, in 4 bytes for each *tensor*:

# %% name="count" tags=["exact"]
small = dict(num_layers=4, hidden_size=192, num_heads=12, seq_length=128, vocab_size=256,
             tie_embeddings=False)
config, psi = GPTConfig(**small), theory.transformer_params(theory.ModelShape(**small))
parameters = list(GPT(config).parameters())
print(f"{psi:,} parameters by formula, {sum(p.numel() for p in parameters):,} by sum(numel)")
formula = {"params": 4 * psi, "grads": 4 * psi,
           "optimizer_states": 8 * psi + 4 * len(parameters)}

# %% [markdown]
# ### Record a step
#
# Data parallelism by hand, as in lesson 02, with 8 sequences a rank. (`call` waits for Part B, `keep_grads` for the
# exercises.)

# %% name="train"
data = SyntheticLanguage(vocab_size=256).sample(65536, seed=0)

def plainly(function, *args):
    return function(*args)

def train(steps=2, call=plainly, keep_grads=False):
    model = GPT(config)
    for layer in model.layers:
        layer.forward = functools.partial(call, layer.forward)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        batch = batches(data, config.seq_length, 8 * world_size, seed=0, step=step)
        inputs, targets = shard_batch(batch, rank, world_size)
        optimizer.zero_grad(set_to_none=not keep_grads)
        cross_entropy(model(inputs), targets, reduction="mean").backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
        optimizer.step()

# %% [markdown]
# ## Run it on ranks
#
# The recorder sees each block of memory until it is freed, and learns what it was: a parameter, a gradient, an optimizer's
# state, an activation that autograd saved; the rest is *other*. The most bytes of each:

# %% name="states" tags=["exact"]
ranks = dtlab.launch(WORLD_SIZE)
recording = ranks.record(train)
table = recording.memory()
for name, its_bytes in formula.items():
    recorded = ", ".join(f"{found:,}" for found in table[f"peak_{name}"].unique())
    print(f"{name:16} formula {its_bytes:>10,}, recorded on all ranks {recorded:>10}")
    assert (table[f"peak_{name}"] == its_bytes).all()

# %% [markdown]
# To the byte, and the same on every rank: data parallelism holds it all $n$ times (lesson 04). And a billion parameters in
# mixed precision?

# %% name="answer-1" tags=["exact"]
print(theory.RECIPES["adam_mixed"])
dtlab.reveal("03.1", f"{sum(theory.model_state_bytes(1e9).values()) / 1e9:.0f}")

# %% [markdown]
# ### Watch it breathe
#
# What rank 0 held, over both steps:

# %% name="breathing" tags=["picture"]
plots.memory(recording)

# %% [markdown]
# Forward piles up activations; backward takes them off, last layer first, as gradients come. Adam's states appear at the
# end of the first step and stay: *one step does not show the peak*. Nor is the peak the sum of all: where activations are
# most, `zero_grad` has freed the gradients.
#
# ### Count the activations
#
# What one layer keeps, in bytes for each of $sbh$ (16-bit numbers: 2 bytes; masks of dropout: 1):
#
# | part | keeps | bytes |
# |---|---|---|
# | two norms | their inputs | 2 + 2 |
# | attention | its input; Q, K, V; the projection's input; a mask | 2 + 6 + 2 + 1 |
# | MLP | its input; GELU's input and output, 4h wide; a mask | 2 + 8 + 8 + 1 |
# | scores, $a$ heads | softmax, its mask, what dropout left: $a s^2 b$ each | $(2 + 1 + 2) \; a s / h$ |
#
# $$A = sbh \left( 34 + 5 \frac{as}{h} \right) \quad \text{bytes}$$
#
# Bytes: multiply nothing by 2 again. A dry recording needs no memory, so here is one layer at real size, with
# 2,048 and 8,192 tokens; with the matrices of scores, and with flash attention, which computes them piece by piece and
# keeps none:

# %% name="layer" tags=["exact"]
def layers(seq_length, scores=True, num_layers=1, call=plainly):
    torch.nn.functional.dropout = lambda x, p, *_: torch.native_dropout(x, p, True)[0]
    shape = GPTConfig(seq_length=seq_length, dropout=0.1, flash_attention=not scores, **sizes)
    x = torch.empty(1, seq_length, shape.hidden_size, dtype=torch.bfloat16).requires_grad_()
    for _ in range(num_layers):
        layer = TransformerLayer(shape, dtype=torch.bfloat16)
        layer.self_attention.dropout *= scores  # on a CPU, flash attention has none
        x = call(layer, x)
    x.sum().backward()

for scores in (True, False):
    for s in (2048, 8192):
        recorded = dtlab.record_dry(layers, s, scores, world_size=1).memory().peak_activations[0]
        counted = theory.activation_bytes_per_layer(seq_length=s, micro_batch_size=1,
                                                    flash_attention=not scores, **sizes)
        print(f"{'scores' if scores else 'flash ':6} {s} tokens: formula {counted / 2**20:6,.0f}"
              f" MiB, recorded {recorded / 2**20:6,.0f}, ratio {recorded / counted:.3f}")

# %% [markdown]
# Four times the tokens: 12 times the bytes with scores, 4 times without. Beyond the formula, the recording has the
# norms' statistics. (The function's first line takes masks of 1 byte, as on a GPU; on a CPU
# `F.dropout` keeps 2. A dry recording has a process of its own, so nothing is replaced in the kernel.)
#
# ## Is it right?
#
# The whole peak of the small GPT: parameters, Adam's states, activations. It runs in 32 bits without dropout and scores, so
# a layer keeps $2 (34 - 2) = 64$ bytes for each of $sbh$; the last norm and the output layer keep 8, the loss its logits:

# %% name="peak" tags=["exact"]
tokens, h = 8 * config.seq_length, config.hidden_size
activations = tokens * (config.num_layers * 64 * h + 8 * h + 4 * config.vocab_size)
predicted = formula["params"] + formula["optimizer_states"] + activations

peak = table.loc[0]
print(f"predicted {predicted / 1e6:.1f} MB, recorded {peak.peak / 1e6:.1f}, off by "
      f"{peak.peak / predicted - 1:+.0%}; activations {activations / 1e6:.1f}, recorded "
      f"{peak.activations / 1e6:.1f}; other {peak.other / 1e6:.1f}")

# %% [markdown]
# Within 5 %. *Other* was not predicted: gradients on their way, here of the loss and the logits, and the data.
#
# **Break it.** Look at one step only:

# %% name="one-step" tags=["exact"]
one_step = ranks.record(train, 1).memory().peak[0]
print(f"recorded peak of one step {one_step / 1e6:.1f} MB, of two {peak.peak / 1e6:.1f}; Adam's "
      f"states {formula['optimizer_states'] / 1e6:.1f}")

# %% [markdown]
# Short by all of Adam: so a run that "fitted" dies in its second step.
#
# ### Which memory number?
#
# The system's number for a rank, beside the recorded peak:

# %% name="process" tags=["timing"]
process = ranks.run(lambda: psutil.Process().memory_info().rss)[0]
print(f"peak of tensors {table.peak[0] / 2**20:.0f} MiB; process {process / 2**20:.0f} MiB")

# %% [markdown]
# | number | counts | on a GPU |
# |---|---|---|
# | recorded, *allocated* | tensors (a GPU rounds each up) | `torch.cuda.max_memory_allocated()` |
# | *reserved* | what the allocator took and keeps for later, holes too | `torch.cuda.max_memory_reserved()` |
# | *process* | also libraries and the device's context | `nvidia-smi` |
#
# A CPU has only the last (RSS: pages in real memory), which tells neither a peak nor what is free inside. On a GPU, too, it is
# the last that runs out: leave room below the 80 GB.
#
# ### Part A in three lines
#
# - States: 16 bytes a parameter, on every rank, from the first `optimizer.step()` on.
# - Activations: $sbh(34 + 5as/h)$ a layer, highest when backward begins; without scores the second term goes.
# - Count before you run, record two steps, and say which number you read.
#
# # Part B
#
# ## Fewer bits
#
# bfloat16 has 8 bits of precision: just below 1, its numbers are 1/256 apart. A thousand steps of 0.001 down from 1.0, and a
# thousand ones added up (right: 0 and 1,000; in the last row both in float32, rounded at the end):

# %% name="bfloat16" tags=["exact"]
def small_steps(dtype, master_dtype):
    weight, total = torch.ones((), dtype=master_dtype), torch.zeros((), dtype=master_dtype)
    for _ in range(1000):
        weight -= 0.001
        total += 1
    return f"weight {weight.to(dtype).item():.3f}, sum {total.to(dtype).item():.0f}"

print("float32                 ", small_steps(torch.float32, torch.float32))
print("bfloat16                ", small_steps(torch.bfloat16, torch.bfloat16))
print("bfloat16, float32 master", small_steps(torch.bfloat16, torch.float32))

# %% [markdown]
# The weight has not moved: 0.001 is less than half the distance to the next number, so each step rounds back to 1.0. Such
# a run learns nothing and raises no error. Hence the master weights. (Save them: made again from 16 bits, they have lost what
# they were for.) By hand:

# %% name="masters" tags=["exact"]
def mixed():
    model = GPT(config, dtype=torch.bfloat16)
    weights = list(model.parameters())
    masters = [dtlab.tag(w.detach().float(), "optimizer_states") for w in weights]
    optimizer = torch.optim.AdamW(masters)
    for step in range(2):
        inputs, targets = batches(data, config.seq_length, 8, seed=0, step=step)
        cross_entropy(model(inputs), targets, reduction="mean").backward()
        for weight, master in zip(weights, masters):
            master.grad, weight.grad = weight.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
        for weight, master in zip(weights, masters):
            weight.data.copy_(master)  # rounds

recorded = ranks.record(mixed, ranks=[0]).memory().loc[0]
print({name: f"{recorded[f'peak_{name}'] / psi:.0f} bytes a parameter" for name in formula})

# %% [markdown]
# (`tag` tells the recorder what it cannot know.) That makes 18: Adam wants the gradient in 32 bits, too, as does adding up
# micro-batches, whose sum may stop as the one above did at 256. Systems that convert piece by piece need 16, those that
# keep both 20:

# %% name="recipes" tags=["exact"]
for name in ("adam_mixed", "adam_mixed_fp32_grads", "adam_mixed_both_grads"):
    parts = theory.RECIPES[name]
    each = sum(parts.values())
    print(f"{each} bytes, {num_params * each / 1e9:.1f} GB: {parts}")

# %% [markdown]
# Float32 throughout is 16, too: mixed precision saves time and activations, not states.
#
# ## Recompute
#
# Keep a layer's *input* only, and when backward gets there, run the layer a second time:

# %% name="by-hand"
class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layer, x, same_masks):
        ctx.layer, ctx.random = layer, torch.get_rng_state() if same_masks else None
        ctx.save_for_backward(x)
        return layer(x)  # in here autograd saves nothing

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.random.fork_rng([]), torch.enable_grad():
            if ctx.random is not None:
                torch.set_rng_state(ctx.random)
            y = ctx.layer(x)
        y.backward(grad)  # the parameters' gradients
        return None, x.grad, None

# %% [markdown]
# Dropout draws its mask anew each time, so the state of the random generator is kept too.

# %% name="question-2" tags=["exact", "folded"]
# Question 03.2: run me
question = "Every layer keeps its input only and is computed again in backward. By how much do the FLOPs of a step grow?"
dtlab.predict("03.2", question, choices={
    "nothing": "The layer runs twice, and its matrix products cost the same the second time.",
    "a third": "Forward is one part of three, backward two; a second forward makes four.",
    "a half": "That would be so if forward cost as much as backward.",
    "they double": "Backward itself is not done again.",
})

# %% [markdown]
# Is it right? The whole model in float64, with dropout; by hand, and with the course's `parallel.recompute`. That one runs
# no backward inside backward, which the hooks of lesson 02's buckets could take for the end of the pass: it puts numbers
# in the place of saved tensors, and computes those when autograd asks for the first.

# %% name="same" tags=["exact"]
with_dropout = replace(config, dropout=0.1, flash_attention=False)
inputs, targets = batches(data, config.seq_length, 4, seed=0, step=0)

def loss_and_gradient(call):
    torch.manual_seed(0)
    model = GPT(with_dropout, dtype=torch.float64)
    for layer in model.layers:
        layer.forward = functools.partial(call, layer.forward)
    loss = cross_entropy(model(inputs), targets, reduction="mean")
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])

def equal(call):
    pairs = zip(loss_and_gradient(call), loss_and_gradient(plainly))
    return [torch.allclose(ours, right, rtol=1e-10, atol=1e-12) for ours, right in pairs]

print("loss, gradient equal: by hand", equal(lambda layer, x: Recompute.apply(layer, x, True)))
print("loss, gradient equal: parallel.recompute", equal(parallel.recompute))

# %% [markdown]
# **Break it**: forget the generator's state.

# %% name="other-masks" tags=["exact"]
print("loss, gradient equal:", equal(lambda layer, x: Recompute.apply(layer, x, False)))

# %% [markdown]
# The loss is right, so no curve shows it at once; the gradient is that of another network, with other units dropped.
#
# ## What does it cost?
#
# On three layers of the big model: keep everything; keep inputs only (*full*); drop the scores alone, the most bytes for the
# fewest FLOPs (*selective*). A layer's forward takes 2 FLOPs for each token and element of its matrices, and $4s^2h$ for
# scores; backward twice that:

# %% name="cost" tags=["exact"]
def recomputed(how):
    if how == "selective":
        scores = gpt.written_out_attention
        gpt.written_out_attention = functools.partial(parallel.recompute, scores)
    layers(2048, num_layers=3, call=parallel.recompute if how == "full" else plainly)

def kept(events):
    """Bytes of activations when forward has ended."""
    end = max(i for i, event in enumerate(events) if event.phase.get("name") == "forward")
    return [live["activations"] for _, live in live_bytes(events[:end])][-1]

matrices, scores = 2 * 2048 * theory.layer_matrices(big), 4 * 2048**2 * big.hidden_size
for how, again in {None: 0, "selective": scores, "full": matrices + scores}.items():
    dry = dtlab.record_dry(recomputed, how, world_size=1)
    counted = 3 * theory.activation_bytes_per_layer(seq_length=2048, micro_batch_size=1,
                                                    recompute=how, **sizes)
    flops = 3 * (3 * (matrices + scores) + again)
    print(f"{how or 'nothing':9} again: keeps {counted / 2**20:5,.0f} MiB, recorded "
          f"{kept(dry.events[0]) / 2**20:5,.0f}; TFLOPs {flops / 1e12:.3f}, recorded "
          f"{dry.flops().flops.sum() / 1e12:.3f}, x {flops / 9 / (matrices + scores):.3f}")
dtlab.reveal("03.2", f"x {flops / 9 / (matrices + scores):.3f}", "a third")

# %% [markdown]
# A 57th of the bytes for a third more FLOPs; or, selectively, 30 % of the bytes for 2.6 % more. Flash attention does the
# latter inside one kernel. Bytes *kept* are not the peak, though: what is computed again lives for a moment, a layer at a
# time. The small GPT's two steps once more:

# %% name="humps" tags=["picture"]
again = ranks.record(train, 2, parallel.recompute)
print(f"peak {again.memory().peak[0] / 2**20:.0f} MiB, before {table.peak[0] / 2**20:.0f} MiB")
plots.memory(again)

# %% [markdown]
# Four humps in backward, one a layer.
#
# ### The account of FLOPs
#
# $6NT$ is the quick estimate. MFU takes the FLOPs that the *model* needs: computing again is no progress. **HFU**, hardware
# FLOPs utilisation, counts those that the devices did. A published speed can be either. This very model, trained on 128 A100s
# with full recomputation, 512 sequences a step, is reported with 142 TFLOP/s each, 46 % of the peak of 312:

# %% name="mfu" tags=["exact"]
needed = theory.batch_flops(big, batch_size=512)
done = theory.batch_flops(big, batch_size=512, recompute="full")
step_s = done / (128 * 142e12)
share = functools.partial(theory.mfu, time_s=step_s, num_devices=128, peak_flops=312e12)
print(f"PFLOPs a step: 6NT {6e-15 * num_params * 512 * 2048:,.0f}, needed {needed / 1e15:,.0f}, "
      f"done {done / 1e15:,.0f}; step {step_s:.2f} s")
print(f"HFU {share(done):.1%}, MFU {share(needed):.1%}, tokens/s {512 * 2048 / step_s:,.0f}")

# %% [markdown]
# So the 46 % are HFU; beside another's MFU they look a third better than they are. When you read such a number, ask: is
# recomputation in it, are scores counted whole or half (causal), which peak? Tokens per second raise none.
#
# ## Turn the knobs
#
# The big model on one device, with its ends: embedding's mask, last norm, logits. Drag the sequence from 2,048 to 8,192, then
# tick *flash attention*:

# %% name="explorer" tags=["picture"]
dtlab.explore.memory()

# %% [markdown]
# This lesson's row of the ledger, with one recorded step, recomputed (*shipped*: a lesson not yet run here):

# %% name="ledger" tags=["timing"]
sent = round(theory.ring_all_reduce_bytes(4 * psi, WORLD_SIZE))
dtlab.ledger("03", recording=ranks.record(train, 1, parallel.recompute), formula=sent)

# %% [markdown]
# ## In real systems
#
# | here | torch | Megatron-LM | DeepSpeed |
# |---|---|---|---|
# | `recompute(layer, x)` | `checkpoint(layer, x, use_reentrant=False)` | `recompute_granularity="full"` | `checkpointing.checkpoint` |
# | selective | `create_selective_checkpoint_contexts` | `"selective"`, `recompute_modules` | - |
# | masters | by hand | `main_param` | `bf16` |
# | gradients in 32 bits | `reduce_dtype` (FSDP) | `grad_reduce_in_fp32` | `grad_accum_dtype` |
# | the account | `MemTracker` | `report_theoretical_memory` | `estimate_zero2_model_states_mem_needs_all_live` |
#
# Left out on purpose: activations or states on the CPU; optimizers with 8-bit states; holes in the allocator.
#
# ## Exercises
#
# 1. *Predict.* SGD with momentum in place of Adam, with masters, gradients in 16 bits: GB of states for the big model?
# 2. *Change.* Record `train` with `keep_grads=True`: gradients are zeroed, not freed. How much does the peak grow?
# 3. *Break.* Give `parallel.recompute` a function that does more at every second call; then one that does the same with other
#    numbers. Which is noticed? Look at the gradients.
#
# The folded cell computes all three:

# %% name="answers" tags=["exact", "folded"]
# Answers: run me
print(f"1. 2 + 2 + 4 + 4 bytes a parameter, {num_params * (2 + 2 + 4 + 4) / 1e9:.1f} GB")
more = ranks.record(train, keep_grads=True).memory().peak[0] - table.peak[0]
print(f"2. by {more:,} bytes, {more / psi:.2f} a parameter")
calls = []

def more_work(x):
    calls.append(1)
    return x.exp() if len(calls) % 2 else x.exp().tanh()

def other_numbers(x):
    calls.append(1)
    return (x * (2 - len(calls) % 2)).exp()  # of x, then of 2x

for moody in (more_work, other_numbers):
    calls.clear()
    x = torch.ones(1, requires_grad=True)
    try:
        parallel.recompute(moody, x).backward()
        print(f"3. {moody.__name__}: no error; gradient {x.grad.item():.3f}, right {math.e:.3f}")
    except dtlab.ConfigError as error:
        print("3.", error)

# %% [markdown]
# Noticed is another number, or shape, of saved tensors; with other values the gradient is wrong without a word.

# %% [markdown]
# ## Summary
#
# - **Model states**: 16 bytes a parameter with Adam, on every rank; **activations**: $sbh(34 + 5as/h)$ bytes a layer.
# - The peak comes with the second step, when backward begins. *Allocated*, *reserved* and *process* are three numbers.
# - **Mixed precision** needs **master weights** in 32 bits; a recipe has 16, 18 or 20 bytes.
# - **Recomputation** trades a third more FLOPs for almost all activations, with the same random numbers;
#   **selective recomputation** 2.6 % for most of them.
# - **MFU** counts what the model needs, **HFU** what was done.
#
# Activations are no longer the problem. The 119.5 GB are, on every one of 64 devices: lesson 04.
#
# References: Korthikanti et al. 2022, activation recomputation, [arXiv:2205.05198](https://arxiv.org/abs/2205.05198); Chen et al.
# 2016, sublinear memory, [arXiv:1604.06174](https://arxiv.org/abs/1604.06174); Narayanan et al. 2021 (its 7.5B run: table 1),
# [arXiv:2104.04473](https://arxiv.org/abs/2104.04473); Rajbhandari et al. 2020, ZeRO, section 3,
# [arXiv:1910.02054](https://arxiv.org/abs/1910.02054).
