# %% [markdown]
# # 06 Tensor parallelism
#
# Cut inside the layer: every rank has a part of each weight matrix, and works on the same tokens as the others.
#
# | You will build | Needs | Runs on | Takes | Works on |
# |---|---|---|---|---|
# | Megatron's two linears, cut attention heads, a cut vocabulary with its loss | [01](../notebooks/01_collectives.ipynb) and [03](../notebooks/03_memory.ipynb) | 4 ranks on CPU | A 35 min, B 30 min | Linux; Windows through WSL2; macOS and Colab: not tried |
#
# Words are explained in the [glossary](../notebooks/GLOSSARY.md). The first cell imports what the lesson uses:

# %% name="imports" tags=["timing"]
import math
from dataclasses import replace
from importlib.util import find_spec

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import parallel as torch_tp

import dtlab
from dtlab import models, parallel, plots, simulate, theory
from dtlab.data import SyntheticLanguage, batches, recordings
from dtlab.models import GPT, GPTConfig, cross_entropy
from dtlab.plots.twin import twin

WORLD_SIZE = 4
torch.set_num_threads(1)  # the model here is too small to gain from more
print(dtlab.doctor())

# %% [markdown]
# ## Before you start
#
# <details><summary>A ring all-reduce of S bytes on n ranks: what does each rank send?</summary>
# 2 (n-1)/n S.</details>
# <details><summary>What are activations, and what do they grow with?</summary>
# What forward keeps for backward: with tokens, layers and width; attention's scores with the square of the sequence.</details>
# <details><summary>Your result differs from one process in the seventh digit. Rounding or bug?</summary>
# Repeat in float64: rounding shrinks, a bug stays.</details>
#
# # Part A
#
# ## The problem
#
# ZeRO (lesson 04) cuts the states. But a rank takes at least one sequence, and keeps all its activations. Of the 7.5B
# model, and of one of a trillion parameters:

# %% name="problem" tags=["exact"]
kept = lambda h, heads, t=1: theory.activation_bytes_per_layer(
    seq_length=2048, micro_batch_size=1, hidden_size=h, num_heads=heads, tp_size=t)
for layers, h, heads in ((36, 4096, 32), (128, 25600, 160)):
    print(f"{h:6,} wide, {layers:3} layers: {kept(h, heads) / 2**20:,.0f} MiB a layer, in all "
          f"{layers * kept(h, heads) / 1e9:.1f} GB")

# %% [markdown]
# No number of data parallel ranks makes that smaller. And in a fixed batch more ranks than sequences find no work. So ranks
# must share *one* sequence.
#
# ## The idea
#
# Almost all of a layer is matrix products. $X$ has a token in each row. Cut $A$ by columns, or $X$ by columns and $A$ by rows:
#
# $$X \, [A_1 \; A_2] = [X A_1 \;\; X A_2], \qquad [X_1 \; X_2] \begin{bmatrix} A_1 \\ A_2 \end{bmatrix} = X_1 A_1 + X_2 A_2 .$$
#
# By columns each of $t$ ranks has columns of the result; by rows a term of a sum, which an all-reduce adds up.
#
# A layer has two pairs of matrices: attention's (QKV, then the projection), and the MLP's,
# $\mathrm{GELU}(X A) B$. The plan: the first of each pair by columns, the second by rows. Predict:

# %% name="questions" tags=["exact", "folded"]
# Questions 06.1 and 06.2: run me
dtlab.predict("06.1", "First matrix by columns, second by rows: all-reduces in a layer, forward and backward?", {
    "2": "One for each pair in forward; but backward has its own.", "4": "For each pair one in forward, after the rows, and one in backward, before the columns.", "8": "Between the two matrices of a pair nothing is sent: columns of the first are what rows of the second need."})
dtlab.predict("06.2", "Why not the first matrix by rows, the second by columns?", {
    "it would need one more": "GELU is taken of the sum, so the sum must be there first.", "rows do not divide": "Both sizes are multiples of the number of heads.", "it is the same": "It would be, if GELU of a sum were the sum of GELUs."})

# %% [markdown]
# ## Build it
#
# ### One process
#
# Five steps of training; the last loss and gradients, and the parameters, by name. A small GPT's MLP in float64, and its input:

# %% name="alone"
config = GPTConfig(vocab_size=64 * WORLD_SIZE, seq_length=32, hidden_size=96, num_layers=2)

def train(model, loss_of, num_steps=5):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    for step in range(num_steps):
        optimizer.zero_grad()
        (loss := loss_of(model, step)).backward()
        optimizer.step()  # eps: else Adam would enlarge gradients that are only rounding
    named = dict(model.named_parameters())
    return {"loss": loss.detach(), **named, **{f"grad of {n}": p.grad for n, p in named.items()}}

new_mlp = lambda: models.init_by_name(models.FeedForward(config, dtype=torch.float64), seed=0)
x = torch.randn(4, 8, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

# %% [markdown]
# ### One product, both ways
#
# First without ranks. Torch's linear stores $A$ transposed, so columns of $A$ are *rows* of `weight`:

# %% name="two-ways" tags=["exact"]
A, cut = new_mlp().linear_fc1.weight.T, lambda matrix, dim: matrix.chunk(WORLD_SIZE, dim)
columns = torch.cat([x @ part for part in cut(A, 1)], dim=-1)
rows = sum(piece @ part for piece, part in zip(cut(x, -1), cut(A, 0)))
print("by columns", torch.allclose(columns, x @ A), "by rows", torch.allclose(rows, x @ A))

a, b = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
gap = (F.gelu(a + b) - F.gelu(a) - F.gelu(b)).abs().max()
dtlab.reveal("06.2", f"GELU(a) + GELU(b) is off by up to {gap:.1f}", "it would need one more")

# %% [markdown]
# ### What autograd must be told
#
# `dist.all_reduce` is no part of autograd's graph: backward passes by it, at most with a warning. So what backward does
# must be written down: an `autograd.Function` has both directions. `gradcheck` compares the second with finite
# differences of the first:

# %% name="function" tags=["exact"]
class Twice(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: 2 * x)
    backward = staticmethod(lambda ctx, grad: 2 * grad)

print(torch.autograd.gradcheck(Twice.apply, x[0, 0].clone().requires_grad_()))

# %% [markdown]
# ### Into the split region, and out
#
# ```
#            all alike       copy           each rank r has its part            reduce       all alike
#
#   forward      X     --- as it is -->   H_r = X A_r -> GELU: Z_r -> Z_r B_r   -- all-reduce -->   Y
#   backward    dX     <- all-reduce --       dH_r    <-----  dZ_r  <--------   <-- as it is ----  dY
# ```
#
# After the rows, forward adds up: *reduce*. All ranks go on alike, so the gradient that comes back is whole, and passes. Before
# the columns it is the other way round: all ranks have $X$, but each finds only what *its* columns say of
# $X$'s gradient, one term of
#
# $$dX = \sum_r dH_r \, A_r^\top .$$
#
# So *copy* does nothing in forward, and an all-reduce in backward. They are Megatron's
# $f$ (copy) and $g$ (reduce), a **conjugate pair** at the borders of the **split region**:

# %% name="regions"
def all_reduced(tensor):  # sends 2 (t-1)/t of its bytes; gloo needs it without gaps
    dist.all_reduce(total := tensor.clone(memory_format=torch.contiguous_format))
    return total

class CopyToRegion(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x)
    backward = staticmethod(lambda ctx, grad: all_reduced(grad))

class ReduceFromRegion(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: all_reduced(x))
    backward = staticmethod(lambda ctx, grad: grad)

copy_to_tp_region, reduce_from_tp_region = CopyToRegion.apply, ReduceFromRegion.apply

# %% [markdown]
# ### Two linears
#
# Each takes its part of a whole linear. The second one's bias is no term of the sum: whole on each rank, added once,
# after it. Shapes on one of $t$ ranks:

# %% name="linears"
def part(tensor, dim):  # on ranks only: they have world_size and rank
    return None if tensor is None else torch.nn.Parameter(
        tensor.detach().chunk(world_size, dim)[rank].clone())  # a view would keep the whole

class ColumnParallelLinear(torch.nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.weight, self.bias = part(linear.weight, 0), part(linear.bias, 0)  # [out/t, in]

    def forward(self, x):  # [.., in] -> [.., out/t]
        return F.linear(copy_to_tp_region(x), self.weight, self.bias)

class RowParallelLinear(torch.nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.weight, self.bias = part(linear.weight, 1), linear.bias  # [out, in/t], [out]

    def forward(self, x):  # [.., in/t] -> [.., out]
        return reduce_from_tp_region(F.linear(x, self.weight)) + self.bias

# %% [markdown]
# ## Run it on ranks
#
# GELU works element by element: on columns as on the whole. So the MLP stays as it is, but for its linears:

# %% name="on-ranks"
def parallel_mlp(mlp):
    mlp.linear_fc1 = ColumnParallelLinear(mlp.linear_fc1)
    mlp.linear_fc2 = RowParallelLinear(mlp.linear_fc2)
    return mlp

def results(wrap):
    mlp, leaf = wrap(new_mlp()), x.clone().requires_grad_()
    found = train(mlp, lambda mlp, step: mlp(leaf).square().mean())
    return {"output": mlp(leaf).detach(), "input gradient": leaf.grad, **found}

ranks = dtlab.launch(WORLD_SIZE)

# %% [markdown]
# ## Is it right?
#
# Against one process, after five steps: output, input gradient (summed over them), loss, and every rank's shard of each
# gradient and parameter. `dims` says what is cut, and in which dimension:

# %% name="equal" tags=["exact"]
dims = {"linear_fc1": 0, "linear_fc2.weight": 1}
close = lambda *both: torch.allclose(*both, rtol=1e-10, atol=1e-12)

def shard_of(name, tensor):
    dim = next((dim for key, dim in dims.items() if key in name), None)
    return tensor if dim is None else tensor.chunk(world_size, dim)[rank]

def compare(program, *args):  # on a rank: what differs from one process
    found = program(*args)
    return [name for name in right if not close(found[name], shard_of(name, right[name]))]

right = results(lambda mlp: mlp)
print(len(right), "compared; differ on each rank:", ranks.run(compare, results, parallel_mlp))

# %% [markdown]
# Nothing differs. Gradcheck passes too: all ranks move the same element at a time. And what
# does the pair call, forward and backward? (A layer has two pairs.)

# %% name="count" tags=["exact"]
def first_step(wrap):
    mlp, leaf = wrap(new_mlp()), x.clone().requires_grad_()
    (y := mlp(leaf)).square().mean().backward()
    return y.detach(), leaf.grad, mlp.linear_fc1.weight.grad

checked = ranks.run(lambda: torch.autograd.gradcheck(
    parallel_mlp(new_mlp()), x[0, :1].clone().requires_grad_()))
calls = ranks.record(first_step, parallel_mlp).communication().query("rank == 0")
print("gradcheck", checked, *(f"| {row.calls} {row.op}" for row in calls.itertuples()))
dtlab.reveal("06.1", 2 * calls.calls.sum())

# %% [markdown]
# ### Break it
#
# Forget *copy*. What will be wrong: the output, the loss, this MLP's gradients?

# %% name="no-copy" tags=["exact"]
alone = first_step(lambda mlp: mlp)
real_copy, copy_to_tp_region = copy_to_tp_region, lambda x: x
for number, (y, grad, its) in enumerate(ranks.run(first_step, parallel_mlp)):
    print(f"rank {number}: output {close(y, alone[0])}, weight's gradient "
          f"{close(its, alone[2].chunk(WORLD_SIZE)[number])}, "
          f"input gradient off by {(grad - alone[1]).norm() / alone[1].norm():.0%}")
copy_to_tp_region = real_copy

# %% [markdown]
# Output, so the loss, and this MLP's own gradients are right. But what comes *before* it gets a wrong gradient, another one on
# each rank, and drifts apart. The first loss cannot see it.
#
# ### Part A in three lines
#
# - First matrix by columns, second by rows: between them nothing is sent.
# - *Copy* (all-reduce in backward) before, *reduce* (all-reduce in forward) after: four all-reduces a layer.
# - Compare input gradients: output and loss look right without *copy*.
#
# # Part B
#
# ## Heads
#
# Before the projection, attention's heads (our GPT has 12) do not look at each other. So a rank takes some: their rows of the joined QKV
# weight, their columns of the projection. But which rows are a head's? Four heads on four ranks, cut straight:
#
# ```
#                 rank 0       rank 1       rank 2       rank 3
# kind by kind    q0 q1 q2     q3 k0 k1     k2 k3 v0     v1 v2 v3      torch's MultiheadAttention
# head by head    q0 k0 v0     q1 k1 v1     q2 k2 v2     q3 k3 v3      Megatron, and the course's GPT
# ```
#
# Head by head, a straight cut gives whole heads.
#
# ## The vocabulary
#
# The embedding is cut by tokens: a rank looks up those that it has, zeros stand for the others, and the sum is
# the embedding. The tied output layer then is cut by columns: each rank has logits of *its* tokens.

# %% name="vocabulary"
def here(tokens, num_rows):  # its row, 0 if another rank has the token; does this one have it?
    index = tokens - rank * num_rows
    return index * (is_here := (index >= 0) & (index < num_rows)), is_here

class VocabParallelEmbedding(torch.nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.weight = part(embedding.weight, 0)  # [V/t, h]

    def forward(self, tokens):
        index, is_here = here(tokens, len(self.weight))
        return reduce_from_tp_region(F.embedding(index, self.weight) * is_here.unsqueeze(-1))

# %% [markdown]
# To gather all logits would bring each rank $V$ numbers a token. The loss of a token needs three: with logits $z_j$ and target $y$
#
# $$\log \sum_j e^{z_j - m} - (z_y - m), \qquad m = \max_j z_j .$$
#
# Each rank finds its largest logit, its sum, and $z_y$ if it has it: three all-reduces of one number a token.
# ($m$ keeps exponentials small. To subtract the *global* maximum returns in lesson 07.)

# %% name="loss"
def vocab_parallel_cross_entropy(logits, targets):  # [B, S, V/t], [B, S]
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    logits = logits - largest.unsqueeze(-1)
    total = sum_of_ranks(logits.exp().sum(-1))  # reduce, by a name that we break below
    index, is_here = here(targets, logits.shape[-1])
    target = logits.gather(-1, index.unsqueeze(-1)).squeeze(-1) * is_here
    return (total.log() - reduce_from_tp_region(target)).mean()

sum_of_ranks = reduce_from_tp_region

# %% [markdown]
# ## The whole model
#
# Norms and positions stay whole:

# %% name="gpt"
def parallel_layer(layer):
    its = layer.self_attention
    its.linear_qkv = ColumnParallelLinear(its.linear_qkv)
    its.linear_proj = RowParallelLinear(its.linear_proj)
    its.num_heads, its.num_kv_heads = its.num_heads // world_size, its.num_kv_heads // world_size
    parallel_mlp(layer.mlp)
    return layer

def parallel_gpt(gpt):
    gpt.layers = torch.nn.ModuleList(map(parallel_layer, gpt.layers))
    gpt.token_embedding = VocabParallelEmbedding(gpt.token_embedding)
    gpt.output_layer = ColumnParallelLinear(gpt.output_layer)
    gpt.output_layer.weight = gpt.token_embedding.weight  # tied
    return gpt

# %% [markdown]
# Five steps on a synthetic language, everything against one process. All ranks read the *same* batch:

# %% name="gpt-equal" tags=["exact"]
data, BATCH_SIZE = SyntheticLanguage(vocab_size=config.vocab_size).sample(16384, seed=0), 4
dims |= {"linear_qkv": 0, "linear_proj.weight": 1, "token_embedding": 0}

def train_gpt(wrap, loss_of, config=config, num_steps=5):
    def loss(gpt, step):  # with another batch on each rank no error: it would mix them
        inputs, targets = batches(data, config.seq_length, BATCH_SIZE, seed=0, step=step)
        return loss_of(gpt(inputs), targets)
    return train(wrap(GPT(config, dtype=torch.float64)), loss, num_steps)

serial = lambda gpt: gpt, lambda *both: cross_entropy(*both, reduction="mean")
by_hand = parallel_gpt, vocab_parallel_cross_entropy
right = train_gpt(*serial)
print(len(right), "compared; differ on each rank:", ranks.run(compare, train_gpt, *by_hand))

# %% [markdown]
# Equal.
#
# ### Break it
#
# Each rank takes its own sum of exponentials. What will a fresh model's loss be? It knows nothing, so the right one is near
# $\ln 256$:

# %% name="local-sum" tags=["exact"]
fresh = lambda: train_gpt(*by_hand, num_steps=1)["loss"].item()
losses, sum_of_ranks = ranks.run(fresh), lambda x: x
wrong, sum_of_ranks = ranks.run(fresh), reduce_from_tp_region
for name, its, size in (("right", losses, config.vocab_size), ("wrong", wrong, 64)):
    print(name, *(f"{loss:.3f}" for loss in its), f"| ln {size} = {math.log(size):.3f}")
print(f"off by {(sum(losses) - sum(wrong)) / WORLD_SIZE:.3f}; ln t = {math.log(WORLD_SIZE):.3f}")

# %% [markdown]
# Too *low*: no honest fresh model is far below $\ln 256$. Each rank believes that only its tokens exist, so
# the loss is off by $\ln t$ (exactly, were all logits equal). What can be foretold is a test.
#
# ### Beside the course's own
#
# `parallel.apply_tensor_parallel` does this to a whole GPT; later lessons use it. The same numbers?

# %% name="dtlab" tags=["exact"]
its_loss = lambda *both: parallel.vocab_parallel_cross_entropy(
    *both, vocab_size=config.vocab_size, reduction="mean")
print("differ:", ranks.run(compare, train_gpt, parallel.apply_tensor_parallel, its_loss))

# %% [markdown]
# ## Dropout
#
# Outside the split region all ranks compute the same, so dropout must draw the same mask on each. Inside, on a rank's own
# heads, masks must differ. `split_region_rng` draws one number, the same on all ranks, seeds with it and the rank, and puts
# the generator back. How many different masks do ranks draw?

# %% name="dropout" tags=["exact"]
def masks():
    torch.manual_seed(0)
    with parallel.split_region_rng():
        inside = torch.rand(32) < 0.5
    return [tuple(mask.tolist()) for mask in (inside, torch.rand(32) < 0.5)]

print("inside, outside:", [len(set(its)) for its in zip(*ranks.run(masks))])

# %% [markdown]
# Inside one for each rank, outside one for all. (Our layers leave this out; `apply_tensor_parallel` has it.)
#
# ## What does it cost?
#
# *Exact here*: our layer of the 7.5B model, recorded dry, with dropout and scores written out, as in
# lesson 03. Left the formulas, right the recording:

# %% name="layer" tags=["exact"]
def layer_pass(tokens, width, heads, rows=1, phase="forward", call=lambda layer, x: layer(x)):
    F.dropout = lambda x, p, *_, **__: torch.native_dropout(x, p, True)[0]
    shape = GPTConfig(seq_length=tokens, hidden_size=width, num_heads=heads, dropout=0.1,
                      flash_attention=False)
    layer = parallel_layer(models.TransformerLayer(shape, dtype=torch.bfloat16))
    x = torch.empty(rows, tokens, width, dtype=torch.bfloat16, requires_grad=True)
    with dtlab.phase(phase):
        y = call(layer, x)
    y.sum().backward()

dry = {t: dtlab.record_dry(layer_pass, 2048, 4096, 32, world_size=t) for t in (1, 2, 4, 8, 16)}
for t, its in dry.items():
    sent = theory.tp_layer_wire_bytes(theory.GPT_7_5B, micro_batch_size=1, tp_size=t).values()
    found = its.communication().wire_bytes.sum(), its.memory().peak_activations[0]
    mb = [n / 2**20 for n in (sum(sent), found[0], kept(4096, 32, t), found[1])]
    print(f"tp {t:2}: sends {mb[0]:3.0f} |{mb[1]:4.0f}, keeps {mb[2]:3.0f} |{mb[3]:4.0f} MiB; "
          f"36 layers keep {36 * kept(4096, 32, t) / 1e9:.1f} GB")

# %% [markdown]
# Bytes sent grow less and less: $2(t-1)/t$ stays below 2. On 8 ranks activations shrink, but not to an eighth: of lesson
# 03's 34 bytes 10 stay whole: inputs of norms (4), inputs of the split regions (4), masks outside (2).
#
# *Replayed*: the same layer on A100s in nodes of 8: its time, and the share of communication, in a flat ring and in the
# *fastest* way (between nodes hierarchical). Then, in the ring, matrix products alone, as in the explorer; and with
# backward's all-reduce beside the weight's gradient, as in `dtlab.parallel` and Megatron:

# %% name="shares" tags=["exact"]
hardware = simulate.Hardware.preset("64xA100-80GB")
say = lambda a: f"{1e3 * a.step_time_s:9.1f}{a.exposed_communication_s / a.step_time_s:5.0%}"
print(hardware, "\nms, share  flat ring        fastest       products        overlap")

def replay(t, algorithm):
    boxes = simulate.replay(dry[t], hardware, algorithm=algorithm).boxes
    return simulate.Timeline([b for b in boxes if b.kind != "compute"])  # which makes the layer

for t in (4, 8, 16):
    products = [simulate.tensor_parallel_layer(theory.GPT_7_5B, hardware, tp_size=t, overlap=its)
                for its in (False, True)]
    print(f"tp {t:2}", *map(say, (replay(t, "ring"), replay(t, None), *products)))

# %% [markdown]
# Inside a node more ranks pay. Beyond it links are ten times slower: in a flat ring the layer takes *longer* than on 8
# ranks; in the fastest way a quarter less time, for twice the ranks. In the ring:

# %% name="timelines" tags=["picture"]
twin([plots.timeline(replay(t, "ring")) for t in (8, 16)], ["tp 8", "tp 16"],
     caption="Four all-reduces: over NVLink, then through InfiniBand (mind the axes)")

# %% [markdown]
# And measured? Megatron-LM's paper made the model larger with the ranks (weak scaling), in a machine of 16 V100s. Its efficiency beside a
# replay of our layer at those sizes, recomputed as theirs:

# %% name="megatron-2019" tags=["exact"]
again = {t: dtlab.record_dry(layer_pass, 1024, *its[:2], 8, "layer", parallel.recompute,
                             world_size=t) for t, its in simulate.MEGATRON_2019.items()}
print(simulate.megatron_2019_efficiency(again).iloc[:, 3:].round().astype(int).to_string())

# %% [markdown]
# Within five points, with one assumption for all rows, made for this comparison: links and matrix products reach half of
# what the data sheet says.
#
# ## Turn the knobs
#
# Drag tp from 4 to 8 to 16. Then let collectives go through nodes first; then give a node 16 devices. Which degrees is a model with 12 heads offered?

# %% name="explorer" tags=["picture"]
dtlab.explore.tensor_parallel()

# %% [markdown]
# This lesson's row of the ledger, one step of the small GPT. A token costs four vectors a layer, one for the embedding, one for the
# output layer, three numbers for the loss.

# %% name="ledger" tags=["timing"]
size = 8 * BATCH_SIZE * 32 * ((4 * config.num_layers + 2) * config.hidden_size + 3)  # bytes
dtlab.ledger("06", ranks.record(fresh), round(theory.ring_all_reduce_bytes(size, WORLD_SIZE)))

# %% [markdown]
# ## In real systems
#
# The same MLP, the same weights, in torch and in Megatron-core. Torch's DTensors know how they are cut, and *copy* and
# *reduce* by themselves. Megatron's layers are ours with more options; where it is not installed, a recording of 4 ranks stands for it.
# Are output and input gradient one process's, and what does each call in a pass?

# %% name="peers" tags=["exact"]
def by_dtensor(mlp):
    cuts = {"linear_fc1": torch_tp.ColwiseParallel(), "linear_fc2": torch_tp.RowwiseParallel()}
    mesh = dist.init_device_mesh(device.type, (world_size,))
    return torch_tp.parallelize_module(mlp, mesh, cuts)

record = lambda wrap: ranks.record(lambda: [*map(close, first_step(wrap)[:2], alone)])
by_megatron = lambda mlp: recordings.with_megatron_linears(parallel_mlp(mlp))
systems = {"by hand": record(parallel_mlp), "DTensor": record(by_dtensor), "Megatron-core":
           record(by_megatron) if find_spec("megatron") else recordings.load("megatron_mlp")}
for name, its in systems.items():
    calls = its.communication().query("rank == 0 and op == 'all_reduce'")
    print(f"{name:14}{its.results[0]} {calls.calls.sum()} calls, {calls.wire_bytes.sum():.0f} B")

# %% [markdown]
# All three make the same calls, of as many bytes.
#
# | here and in `dtlab.parallel` | torch | Megatron-core | DeepSpeed |
# |---|---|---|---|
# | `ColumnParallelLinear` | `ColwiseParallel` | `ColumnParallelLinear` | AutoTP's `LinearLayer` |
# | `RowParallelLinear` | `RowwiseParallel` | `RowParallelLinear` | AutoTP's `LinearAllreduce` |
# | `copy_to_tp_region` | DTensor, `Replicate` | `copy_to_tensor_model_parallel_region` | - |
# | `reduce_from_tp_region` | DTensor, `Partial` | `reduce_from_tensor_model_parallel_region` | - |
# | `VocabParallelEmbedding` | `RowwiseParallel` | `VocabParallelEmbedding` | - |
# | `vocab_parallel_cross_entropy` | `loss_parallel` | `vocab_parallel_cross_entropy` | - |
# | `parallel.split_region_rng` | DTensor's generator | `CudaRNGStatesTracker` | - |
#
# Left out on purpose: padded vocabularies, fewer key and value heads than ranks, SwiGLU, overlap in backward,
# a rank's part made without the whole (`apply_tensor_parallel` has them).
#
# ## Exercises
#
# 1. *Predict.* Llama 2 70B: 64 query heads share 8 heads of keys and values. Which degrees are legal? On 16 ranks, what do
#    all parameters of a layer add up to, against one process?
# 2. *Change.* `GPTConfig(num_kv_heads=WORLD_SIZE)`: is `parallel_gpt` still right? And with `swiglu=True`, where `linear_fc1` has
#    the gate's rows above those of *up*? Make it right.
# 3. *Break.* Leave *copy* out of the whole GPT. After one step, how many of the gradients are right on every rank?
#
# Computed:

# %% name="answers" tags=["exact", "folded"]
# Answers: run me
llama = theory.LlamaShape(num_layers=80, hidden_size=8192, ffn_hidden_size=28672, num_heads=64, num_kv_heads=8, seq_length=4096, vocab_size=32000)

def gate_beside_up(gpt):
    for p in (p for layer in gpt.layers for p in layer.mlp.linear_fc1.parameters()):  # rows [2, t, f/t] -> [t, 2, f/t]
        p.data = p.data.unflatten(0, (2, world_size, -1)).transpose(0, 1).flatten(0, 2)
    return parallel_gpt(gpt)
losses = [(ranks.run(train_gpt, wrap, by_hand[1], other)[0]["loss"], train_gpt(*serial, other)["loss"]) for wrap, other in ((wrap, replace(config, num_kv_heads=WORLD_SIZE, swiglu=swiglu)) for wrap, swiglu in ((parallel_gpt, False), (parallel_gpt, True), (gate_beside_up, True)))]
right, copy_to_tp_region = train_gpt(*serial, num_steps=1), lambda x: x
wrong, copy_to_tp_region = set().union(*ranks.run(compare, lambda: train_gpt(*by_hand, num_steps=1))), real_copy
print("1. legal:", *theory.legal_tp_sizes(llama), f"| {16 * theory.tp_layer_params(llama, tp_size=16) / theory.layer_params(llama):.3f} times\n2. last losses, on ranks and right:", *(f"| {ours:.4f} {theirs:.4f}" for ours, theirs in losses), f"\n3. loss {'loss' not in wrong}; {sum(name.startswith('grad') for name in wrong)} of {sum(name.startswith('grad') for name in right)} gradients are wrong")

# %% [markdown]
# <details><summary>In words</summary>
#
# On 16 ranks two have a copy of the same keys and values. A straight cut of gate and up gives
# rank 0 gates only, and the loss hides it well. Without the last *copy* all before it is wrong.
#
# </details>
#
# ## Summary
#
# - **Tensor parallelism**: each rank has a part of every matrix; **column parallel**, then **row parallel**: nothing is sent between.
# - A **conjugate pair**, *copy* and *reduce*, at the borders of the **split region**: four all-reduces a layer.
# - A right loss proves no gradient; a fresh model's far below $\ln V$ proves a bug.
# - 34.4 GB of activations become 6.9 on 8 ranks.
# - What remains: norms and dropout are whole on every rank (lesson 07); beyond the node a layer gains little or nothing.
#
# References: Shoeybi et al. 2019, Megatron-LM, [arXiv:1909.08053](https://arxiv.org/abs/1909.08053); Korthikanti et al. 2022,
# [arXiv:2205.05198](https://arxiv.org/abs/2205.05198).
