# %% [markdown]
# # 05 FSDP
#
# Stage 3 made fast: a model whole on no rank, gathered unit by unit while the one before computes.
#
# | You will build | Needs | Runs on | Takes | Works on |
# |---|---|---|---|---|
# | units, gathered before use and freed after, then gathered ahead; beside them torch and DeepSpeed | [04](../notebooks/04_zero.ipynb) | 4 ranks on CPU | A 30 min, B 30 min | Linux; Windows through WSL2; macOS and Colab: not tried |
#
# Words are explained in the [glossary](../notebooks/GLOSSARY.md). The first cell imports what the lesson uses:

# %% name="imports" tags=["timing"]
import time
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import dtlab
from dtlab import parallel, plots, theory
from dtlab.data import SyntheticLanguage, batches, recordings, shard_batch
from dtlab.models import GPT, GPTConfig, TimedLayer, cross_entropy
from dtlab.plots.twin import twin
from dtlab.simulate import Box, Hardware, Timeline, replay

WORLD_SIZE = 4
torch.set_num_threads(1)  # the model here is too small to gain from more
print(dtlab.doctor())

# %% [markdown]
# ## Before you start
#
# <details><summary>ZeRO stage 3 on n ranks: what does a rank keep of parameters, gradients and optimizer states?</summary>
# 1/n of each.</details>
# <details><summary>Psi parameters. What does a rank send in a step of stage 3, what in stages 0 to 2?</summary>
# 3 Psi elements (gathered twice, gradients reduced), times (n-1)/n; 2 Psi.</details>
# <details><summary>How does naive stage 3 free gathered parameters, so that autograd finds them again?</summary>
# It resizes their storage to 0, and refills the same storage before backward.</details>
#
# # Part A
#
# ## The problem
#
# Stage 3 makes the 7.5B model fit 64 A100s. At what price, with 16-bit weights and one sequence of 2,048 tokens on each?

# %% name="price" tags=["exact"]
hardware, psi = Hardware.preset("64xA100-80GB"), theory.transformer_params(theory.GPT_7_5B)
sent = 2 * theory.zero_wire_elements(psi, dp_size=64, zero_stage=3)
token_s = 6 * psi / (hardware.peak_flops * hardware.gemm_efficiency)  # forward and backward
sent_s, work_s = hardware.between.time_s(sent), 2048 * token_s
print(f"kept {16 * psi / 64e9:.1f}, gathered {2 * psi / 1e9:.1f}, sent {sent / 1e9:.1f} GB")
print(f"send {sent_s:.2f} s, compute {work_s:.2f} s; even at {sent_s / token_s:,.0f} tokens")

# %% [markdown]
# All weights at once take eight times what a rank keeps. And sending, in one ring over InfiniBand, takes three times as
# long as computing. Both can be cut.
#
# ## The idea
#
# No layer needs another's weights. So cut the model into **units**: each layer is one, and the **root** has what is left
# (embeddings, last norm). A unit is gathered right before it computes and freed right after, in both passes. With $\psi_i$ the bytes of unit $i$, a rank of $n$ holds of parameters at most
#
# $$\frac{1}{n} \sum_i \psi_i + \psi_{root} + \max_i \psi_i .$$
#
# And while one unit computes, the next can travel. Commit yourself:

# %% name="question-1" tags=["exact", "folded"]
# Question 05.1: run me
dtlab.predict("05.1", "Only the root module is wrapped. Peak parameter memory against data parallel?", choices={
    "1/n of it": "That is what a rank keeps between steps; a shard cannot compute.",
    "the largest layer's": "Only if each layer were a unit of its own.",
    "the same plus a shard": "All is gathered before the first layer computes, and the shard stays beside it.",
})

# %% [markdown]
# ## Build it
#
# ### The loop you know
#
# The small GPT and the synthetic language; ranks will put in other models, optimizers and rows. Proofs use an `odd` model:
# its shards need padding. `in_order`: the root's parameters first, as units will have them. (With a small `eps` Adam would
# blow up mere rounding.)

# %% name="train" tags=["exact"]
config = GPTConfig(vocab_size=32, seq_length=32, hidden_size=32, num_layers=3, num_heads=4)
odd = GPTConfig(vocab_size=32, seq_length=32, hidden_size=27, num_layers=3, num_heads=3)
data, BATCH_SIZE = SyntheticLanguage(vocab_size=32).sample(65536, seed=0), 8
adamw = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-6)
flat = lambda tensors: torch.cat([tensor.detach().flatten() for tensor in tensors])
my_rows = lambda batch: shard_batch(batch, rank, world_size)
names = sorted(dict(GPT(odd).named_parameters()), key=lambda name: "layers." in name)
in_order = lambda gpt: [gpt.get_parameter(name) for name in names]

# %% [markdown]
# One process's losses, its parameters after three steps and the last gradients:

# %% name="alone" tags=["exact"]
def train(model, optimizer, rows, steps=range(3)):
    losses = []
    for step in steps:
        inputs, targets = rows(batches(data, config.seq_length, BATCH_SIZE, seed=0, step=step))
        loss = cross_entropy(model(inputs), targets, reduction="mean")
        optimizer.zero_grad()
        getattr(model, "backward", torch.Tensor.backward)(loss)  # DeepSpeed's model has its own
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)

gpt = GPT(odd, dtype=torch.float64)
losses = train(gpt, adamw(gpt.parameters()), list)
alone = losses, flat(in_order(gpt)), flat(p.grad for p in in_order(gpt))

# %% [markdown]
# ### A unit
#
# A unit takes those parameters of its module that no other unit has. `places` says where each is used: a tied weight in
# two modules. It lays them end to end, pads, and keeps this rank's shard. In `whole` all shards will be gathered; the
# module's own parameters are forgotten:

# %% name="unit"
class Unit:
    def __init__(self, module, places):
        mine = {p: places.pop(p) for p in module.parameters() if p in places}
        self.module, self.places, self.work = module, list(mine.values()), None
        self.shapes, self.numel = [p.shape for p in mine], sum(p.numel() for p in mine)
        first, self.padding = next(iter(mine)), -self.numel % world_size
        whole = torch.zeros(self.numel + self.padding, dtype=first.dtype, device=device)
        whole[:self.numel] = 0 if first.is_meta else flat(mine)  # no values in dry recordings
        self.shard = torch.nn.Parameter(whole.chunk(world_size)[rank].clone())
        self.whole = torch.nn.Parameter(whole)
        free(self)

# %% [markdown]
# ### Gather, free
#
# To free resizes the storage, as in lesson 04. Meanwhile tensors of no elements stand in the modules. `start` does not
# wait, it returns a handle:

# %% name="gather-free"
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # new, old name

def start(unit):
    if unit.work is None:
        unit.whole.untyped_storage().resize_(unit.whole.nbytes)
        unit.work = all_gather(unit.whole.data, unit.shard.data, async_op=True)
    return unit.work

def free(unit):
    unit.work = None
    unit.whole.untyped_storage().resize_(0)
    put(unit, [torch.empty(0)] * len(unit.places))

def put(unit, tensors):
    for tensor, places in zip(tensors, unit.places):
        for part, name in places:
            part._parameters[name] = tensor

# %% [markdown]
# In forward the modules get views of `whole`, so autograd brings the unit's gradients into one tensor,
# `whole.grad`. The root's forward is the model's. A hook on the output runs when backward arrives there:

# %% name="forward"
def before_forward(unit):
    start(unit).wait()
    sizes = [*(shape.numel() for shape in unit.shapes), unit.padding]
    put(unit, [view.view(shape) for view, shape in zip(unit.whole.split(sizes), unit.shapes)])
    start(unit.next)

def after_forward(unit, output):
    free(unit)
    if output.requires_grad:  # not in evaluation
        output.register_hook(lambda grad: before_backward(unit))

def before_backward(unit):
    start(unit).wait()
    start(unit.previous)

# %% [markdown]
# ### Reduce-scatter
#
# When `whole.grad` is there, the weights can go, and each rank gets its shard of the mean gradient. It travels while
# backward goes on, one unit at a time: whole gradients are large. (`tag` tells the recorder what they are.)

# %% name="backward"
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

def after_backward(unit):
    mean, unit.whole.grad = dtlab.tag(unit.whole.grad.div_(world_size), "grads"), None
    free(unit)
    [work.wait() for work, _ in unit.sent]  # of the unit before
    unit.shard.grad = torch.empty_like(unit.shard)
    unit.sent[:] = [(reduce_scatter(unit.shard.grad, mean, async_op=True), mean)]
    if unit.is_root:  # the last one
        unit.sent.pop()[0].wait()

# %% [markdown]
# Now the hooks. Without `prefetch` a unit is its own neighbour, and `start` finds it gathered:

# %% name="shard-units"
def shard_units(model, modules, prefetch=True):
    places, sent = {}, []
    for part in model.modules():
        for name, parameter in part.named_parameters(recurse=False):
            places.setdefault(parameter, []).append((part, name))
    inner = [Unit(module, places) for module in modules]
    units = [Unit(model, places), *inner]  # the root: what is left; forward needs it first
    for i, unit in enumerate(units):
        unit.is_root, unit.sent = i == 0, sent
        unit.next = units[(i + 1) % len(units)] if prefetch else unit  # its own neighbour
        unit.previous = units[i - 1] if prefetch else unit
        unit.module.register_forward_pre_hook(lambda *_, u=unit: before_forward(u))
        unit.module.register_forward_hook(lambda m, a, out, u=unit: after_forward(u, out))
        unit.whole.register_post_accumulate_grad_hook(lambda _, u=unit: after_backward(u))
    return units

# %% [markdown]
# ## Run it on ranks
#
# The optimizer gets shards, nothing else changes. For the comparison `joined` puts all ranks' shards together:

# %% name="on-ranks"
def joined(unit, shard):
    all_gather(whole := shard.new_empty(world_size * len(shard)), shard)
    return whole[:unit.numel]

def by_hand(gpt, prefetch=True):
    units = shard_units(gpt, gpt.layers, prefetch)
    whole = lambda: [torch.cat([joined(u, t) for u, t in zip(units, tensors)]) for tensors in
                     ([u.shard.data for u in units], [u.shard.grad for u in units])]
    return gpt, adamw(unit.shard for unit in units), whole

ranks = dtlab.launch(WORLD_SIZE)

# %% [markdown]
# ## Is it right?
#
# Every rank has other rows. In float64, against one process, on each rank: the mean of the losses, every parameter after three
# steps, every gradient (that of the position embeddings is the first layer's input gradient, summed over rows):

# %% name="equal" tags=["exact"]
def equal(wrap, *how):
    model, optimizer, whole = wrap(GPT(odd, dtype=torch.float64), *how)
    dist.all_reduce(losses := train(model, optimizer, my_rows))
    pairs = zip((losses / world_size, *whole()), alone)
    return [torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in pairs]

print(ranks.run(equal, by_hand, False), ranks.run(equal, by_hand, True), sep="\n")

# %% [markdown]
# The course's `FullyShardedModule` does this for any model. The same losses and parameters?

# %% name="same-as-dtlab" tags=["exact"]
def by_dtlab(gpt):
    gpt = parallel.FullyShardedModule(gpt)
    return gpt, adamw(gpt.parameters()), lambda: [flat(map(gpt.full_state_dict().get, names))]

print(ranks.run(equal, by_dtlab))

# %% [markdown]
# ### How much is whole at once?
#
# The 7.5B model, recorded dry as rank 0 of 64 (some seconds): the most bytes of parameters at a time, shards
# included. First one unit, then one for each of 36 layers, then with prefetch:

# %% name="answer-1" tags=["exact"]
big = GPTConfig(51200, 2048, hidden_size=4096, num_layers=36, num_heads=32)  # the 7.5B model

def big_step(modules=lambda gpt: gpt.layers, prefetch=True, rows=1):
    gpt = GPT(big, dtype=torch.bfloat16, device="meta")
    shard_units(gpt, modules(gpt), prefetch)
    batch = torch.zeros(rows, big.seq_length, dtype=torch.long)
    cross_entropy(gpt(batch), batch, reduction="mean").backward()

dry = {"only the root": dtlab.record_dry(big_step, lambda gpt: [], world_size=64),
       "36 layers": dtlab.record_dry(big_step, prefetch=False, world_size=64),
       "with prefetch": dtlab.record_dry(big_step, world_size=64)}
peaks = {name: f"{its.memory().peak_params[0] / 1e9:.2f} GB" for name, its in dry.items()}
print(f"data parallel {2 * psi / 1e9:.2f} GB;", peaks)
print([round(2e-9 * n, 2) for n in (psi / 64, *theory.unit_sizes(theory.GPT_7_5B, 36)[:2])])
dtlab.reveal("05.1", peaks["only the root"], "the same plus a shard")

# %% [markdown]
# The list: shard, root and one layer, in GB. Together that is the peak of 36 units; prefetch adds a layer.
#
# ### Break it
#
# A regularising term uses a weight outside its unit's forward. And a backward pass forgets to gather again:

# %% name="break" tags=["timing"]
def first_line(program, *args):
    try:
        ranks.run(program, *args)
    except dtlab.RankError as error:
        print(str(error).splitlines()[0])

first_line(lambda: by_dtlab(GPT(config))[0].module.token_embedding.weight.square())
right, before_backward = before_backward, lambda unit: None
first_line(equal, by_hand)
before_backward = right

# %% [markdown]
# First: 0 elements, and the cure. **Tied weights** meet the same if the embedding is a unit: its forward is over when the
# output layer wants the weight. They belong to a unit around both uses, here the root. Second: autograd kept
# views of an empty storage. Had another layer got the memory, backward would have used its weights, silently.
#
# ## Prefetch
#
# Does asking ahead hide the gathering? On the real clock: six `TimedLayer`s sleep 20 ms forward and 40 ms backward, with
# 2 MiB of weights each. *Waited*, the slowest rank's best of three, in turns:

# %% name="prefetch" tags=["timing"]
def timed_step(prefetch):
    layers = (TimedLayer(0.02, 0.04, num_params=2**19) for _ in range(6))
    model = torch.nn.Sequential(TimedLayer(0), *layers)
    shard_units(model, model[1:], prefetch)
    begin = time.perf_counter()
    model(torch.ones(1)).sum().backward()
    return time.perf_counter() - begin

t = [max(ranks.run(timed_step, ahead, guard=False)) for _ in range(3) for ahead in (False, True)]
print(f"gathered when needed {1e3 * min(t[::2]):.0f} ms, one ahead {1e3 * min(t[1::2]):.0f} ms")

# %% [markdown]
# The layers sleep 360 ms. The rest is copying and exposed communication, less with prefetch. (Not so? Other programs
# had the cores.)
#
# ### Part A in three lines
#
# - A unit is gathered before use and freed after, in both passes; its gradients are reduce-scattered.
# - Units decide what is whole at once; a weight is used inside its unit's forward.
# - Gathering one unit ahead hides communication, and costs one more unit of memory.
#
# # Part B
#
# ## What does it cost?
#
# *Exact here*: what a rank sends in a step (the third, in float32), beside the $3 \Psi (n-1)/n$ elements of lesson 04:

# %% name="bytes" tags=["exact"]
def two_steps(wrap):
    global system  # stays on the rank
    system = wrap(GPT(config))[:2]
    train(*system, my_rows, range(2))

def record(wrap):
    ranks.run(two_steps, wrap)
    return ranks.record(lambda: train(*system, my_rows, [2]).item())

recorded, size = {"by hand": record(by_hand)}, sum(p.numel() for p in GPT(config).parameters())
formula = 4 * theory.zero_wire_elements(size, dp_size=WORLD_SIZE, zero_stage=3)
found = recorded["by hand"].communication().groupby("rank").wire_bytes.sum()
print(f"bytes each rank sends: by formula {formula:,.0f}, recorded {found.max():,.0f}")

# %% [markdown]
# *Replayed*: the 7.5B model on 64 A100s, in one flat ring. What shows of the
# communication? And with four sequences on each rank? Bytes do not grow with the batch, computing does.

# %% name="replayed" tags=["exact"]
dry["4 sequences"] = dtlab.record_dry(big_step, rows=4, world_size=64)
steps = {name: replay(its, hardware, algorithm="ring") for name, its in dry.items()}
for name, step in steps.items():
    print(f"{name:14} sends {dry[name].communication().wire_bytes.sum() / 1e9:.1f} GB, step "
          f"{step.step_time_s:.2f} s, exposed {step.exposed_communication_s:.2f} s")

# %% [markdown]
# Without prefetch, or in one unit, almost all shows. With prefetch and one sequence, computing hides in
# communication, not the other way round. With four, little shows. From 80 ms before backward begins to 140 ms after:

# %% name="timelines" tags=["picture"]
def turn(step):  # 80 ms before backward begins, 140 ms after
    t = next(b.start_s for b in step.boxes if b.kind == "backward")
    part = [Box(b.lane, b.label, max(b.start_s, t - 0.08), min(b.end_s, t + 0.14), b.kind,
                {"all": "G", "red": "R"}.get(b.label[:3], "")) for b in step.boxes]
    return plots.timeline(Timeline([b for b in part if b.start_s < b.end_s]))

twin([*map(turn, [*steps.values()][2:])], [*steps][2:], caption="G gathers, R reduces")

# %% [markdown]
# Above, the device waits for the link, except at the turn: backward's first layer is asked for when the loss is there.
# Below, the link waits.
#
# ## Two real systems
#
# Torch's `fully_shard` (FSDP2) is called on every unit, inner ones first. Equal to one process?

# %% name="torchs" tags=["exact"]
def by_torch(gpt):
    [fully_shard(module) for module in (*gpt.layers, gpt)]
    whole = lambda: [flat(t.full_tensor() for t in tensors) for tensors in
                     (in_order(gpt), [p.grad for p in in_order(gpt)])]
    return gpt, adamw(gpt.parameters()), whole

print(ranks.run(equal, by_torch))

# %% [markdown]
# DeepSpeed makes an *engine* of model and optimizer. So set it gathers module by module (sizes are in elements). Where it
# is not installed, a recording of this program stands for it:

# %% name="deepspeed" tags=["timing"]
def by_deepspeed(gpt):
    optimizer, rows = adamw(gpt.parameters()), BATCH_SIZE // world_size
    return [recordings.deepspeed_engine(gpt, optimizer, micro_batch_size=rows)] * 2  # it is both

is_live, recorded["fully_shard"] = find_spec("deepspeed"), record(by_torch)
recorded["DeepSpeed"] = record(by_deepspeed) if is_live else recordings.load("deepspeed_zero3")
print(recordings.DEEPSPEED_ZERO3, "live" if is_live else "recorded on another machine", sep="\n")

# %% [markdown]
# The third step, side by side: loss; bytes that rank 0 sends; the most bytes that parameters, gradients, optimizer states take:

# %% name="side-by-side" tags=["exact"]
print(f"{'':12}  loss  gathered   reduced    params     grads optimizer")
for name, its in recorded.items():
    sent = its.communication().query("rank == 0").groupby("op").wire_bytes.sum()
    parts = [sent.filter(like="gather").sum(), sent.filter(like="scatter").sum()]
    parts += its.memory().loc[0, ["peak_params", "peak_grads", "peak_optimizer_states"]].tolist()
    print(f"{name:12}{sum(its.results) / len(its.results):.4f}", *(f"{b:9,.0f}" for b in parts))

# %% [markdown]
# The loss agrees, and reducing costs the same. What differs:
#
# - *Gathered*: torch keeps the root from forward to backward. DeepSpeed gathers the tied weight for each of its uses.
# - *Params*: we hold shard, root and two layers. On CPU torch's all-gathers are synchronous: one layer, nothing
#   hides. DeepSpeed, so set, holds one module.
# - *Grads*: whole gradients wait to be reduced: two layers' here, torch's one, DeepSpeed's bucket (by default 5e8 elements, 2 GB).
# - *Optimizer*: Adam counts steps in 4 bytes a tensor: our 4 units, torch's 40 parameters, DeepSpeed's one.
#
# (In float32, as DeepSpeed's masters on CPU are in any case. Its stages 1 and 2 all-reduce, unless told not to.)
#
# ## Turn the knobs
#
# Drag the sequences on each rank from 1 to 4: the bytes stay, and exposed communication all but goes. Then
# stages 1 and 2 are slowest, though stage 3 sends more: they gather updated parameters after the step, beside no computing.
# (Real systems hide that in the next forward.) Stage 3's gathers hide in both passes, stage 0's all-reduce in backward.
#
# *Replayed* took longer and hid more: recordings also have what moves memory (copied gradients, GELU, norms), attention
# scores computed again, and the making of the model.

# %% name="explorer" tags=["picture"]
dtlab.explore.zero("batch")

# %% [markdown]
# This lesson's row of the ledger (*shipped*: a lesson not yet run here):

# %% name="ledger" tags=["timing"]
dtlab.ledger("05", recording=recorded["by hand"], formula=round(formula))

# %% [markdown]
# ## Groups
#
# **Hybrid sharding** (HSDP) shards within a node and replicates between nodes. It needs **groups**, and *all* ranks make
# *all* groups, in one order, also those that they are not in:

# %% name="groups" tags=["timing"]
def sum_in_pair(pairs):
    groups = [dist.new_group(pair) for pair in pairs]
    dist.all_reduce(total := torch.tensor(rank), group=groups[rank // 2])
    return total.item()

print(ranks.run(sum_in_pair, [[first, first + 1] for first in range(0, WORLD_SIZE, 2)]))
first_line(lambda: dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1]) and None)  # only its own

# %% [markdown]
# ## In real systems
#
# **Offload** keeps states in the host's memory.
#
# | here | torch, `fully_shard` | Megatron-LM | DeepSpeed, stage 3 |
# |---|---|---|---|
# | unit | module it is called on | Megatron-FSDP, `fsdp_unit_modules` | module; `stage3_param_persistence_threshold` leaves small ones whole |
# | `prefetch` | always; `set_modules_to_forward_prefetch` | `overlap_param_gather` | `stage3_prefetch_bucket_size` |
# | `free` | `reshard_after_forward` | - | `stage3_max_live_parameters`, `stage3_max_reuse_distance` |
# | hybrid sharding | mesh of nodes by ranks | HSDP in Megatron-FSDP | `zero_hpz_partition_size`, `mics_shard_size` |
# | offload | `CPUOffloadPolicy` | `optimizer_cpu_offload` | `offload_optimizer`, `offload_param` |
#
# Left out on purpose: parameters without gradient, frozen ones, units without parameters, `no_sync`, 16-bit units with 32-bit
# shards (`FullyShardedModule` has them).
#
# ## Exercises
#
# 1. *Predict.* Without `free` in `after_forward`: what does the 7.5B model send, and hold whole?
# 2. *Predict.* Hybrid sharding: the 8 ranks of each of 8 nodes shard the 7.5B model, and each all-reduces its gradient shard with
#    the seven ranks that have the same shard. Bytes of states on a rank? Of these, to offload? Bytes sent within the node, and beyond?
# 3. *Break.* Leave out `div_(world_size)`. What do the losses say?
#
# All three, computed:

# %% name="answers" tags=["exact", "folded"]
# Answers: run me
states, inside, between = theory.zero_states(psi, dp_size=8, zero_stage=3), *(2 * theory.zero_wire_elements(size, dp_size=8, zero_stage=stage) for size, stage in ((psi, 3), (psi / 8, 0)))
print(f"1. sends {2 * theory.zero_wire_elements(psi, dp_size=64, zero_stage=2) / 1e9:.1f} GB, holds {peaks['only the root']}", f"2. {sum(states.values()) / 1e9:.1f} GB (optimizer {states['optimizer_states'] / 1e9:.1f}); sends {inside / 1e9:.1f} GB in {hardware.inside.time_s(inside):.2f} s, {between / 1e9:.1f} GB in {hardware.between.time_s(between):.2f} s", sep="\n")
right, last = after_backward, lambda: [f"{loss:.6f}" for loss in train(*by_hand(GPT(odd, dtype=torch.float64))[:2], my_rows)]
losses, after_backward = ranks.run(last)[0], lambda unit: (unit.whole.grad.mul_(world_size), right(unit))[1]
print("3. rank 0's losses, right", losses, "and wrong", ranks.run(last)[0])
after_backward = right

# %% [markdown]
# <details><summary>In words</summary>
#
# Whole parameters, sharded gradients and states: stage 2. Hybrid sharding takes eight times the memory, but sends in less
# time than one sequence computes. AdamW divides the factor away: losses say nothing, a check of gradients all.
#
# </details>
#
# ## Why four more lessons
#
# Large runs fix the *global* batch: more ranks, fewer tokens each. Published for 175 billion parameters and 1,536 sequences:
# what each A100 reached with stage 3, and with what lessons 06 to 09 build; a step's time by that; and, by our
# formula, the least that stage 3's sending takes:

# %% name="fixed-batch" tags=["exact"]
gpt3 = theory.ModelShape(num_layers=96, hidden_size=12288, num_heads=96, seq_length=2048,
                         vocab_size=51200)
flops = theory.batch_flops(gpt3, batch_size=1536, recompute="full") / 1e12
print(f"sending: {hardware.between.time_s(6 * theory.transformer_params(gpt3)):.0f} s at least")
for n, ours, theirs in ((384, 144, 153), (768, 88, 149), (1536, 44, 141)):
    print(f"{n:4} GPUs, {1536 * 2048 // n} tokens each: stage 3 {ours:3} TFLOP/s, "
          f"{flops / n / ours:.0f} s; lessons 06-09 {theirs}, {flops / n / theirs:.0f} s")

# %% [markdown]
# From 768 to 1,536 devices stage 3 gains nothing: half the computing on each, the step as long. Sending takes 42 of
# the 67 s at full bandwidth, and does not shrink; the rest may be bandwidth not reached and computing that does not
# hide. What sends *activations*, not weights, sends less with fewer tokens. So lessons 06 and 07 cut inside the
# layer, 08 and 09 between layers.
#
# ## Summary
#
# - **FSDP** is stage 3 by the **unit**: gathered before use, freed after, gathered again in backward. What is whole at once:
#   the **root** and a unit; the whole model if only the root is wrapped.
# - **Prefetch** hides communication for one more unit of memory.
# - A weight is used inside its unit's forward; **tied weights** belong to a unit around both uses.
# - Bytes do not shrink with the batch, computing does: below some 6,000 tokens a rank the 7.5B model waits.
# - **Hybrid sharding** and **offload** trade memory for sending.
#
# References: Zhao et al. 2023, PyTorch FSDP, [arXiv:2304.11277](https://arxiv.org/abs/2304.11277); Rajbhandari et al. 2020, ZeRO,
# [arXiv:1910.02054](https://arxiv.org/abs/1910.02054); Narayanan et al. 2021, Table 2 (with 175B above),
# [arXiv:2104.04473](https://arxiv.org/abs/2104.04473).
