# %% [markdown]
# # Lab 03: ZeRO
#
# Lesson 04 cut one flat tensor, gathered the whole model and freed it again. Here you build what it left out: parameters in groups, cut
# where they happen to be cut, gradients that leave one by one over several micro-batches, a norm with everything that spoils it,
# and a stage 3 that never holds more than a few layers.
#
# | You will have | Needs | Ranks | Takes |
# |---|---|---|---|
# | three stages of ZeRO, each with the bytes that it saves and sends | lesson [04](../../notebooks/04_zero.ipynb), Part A; from exercise 4 on Part B | 1 to 4 on CPU | 100 min: 10, 25, 20, 10, 35; two sittings, the second from exercise 4 on |
#
# Words are explained in the [glossary](../../notebooks/GLOSSARY.md).
#
# ### Rules
#
# - Write with `torch.distributed`'s collectives. `reduce_scatter(out, full)` and `all_gather(full, out)` are torch's
#   `reduce_scatter_tensor` and `all_gather_into_tensor`, under whichever name your torch has for them.
# - Leave out `dist.all_reduce` of gradients, torch's `ZeroRedundancyOptimizer`, `fully_shard` and `FullyShardedDataParallel`, and
#   `dtlab.parallel`: they are what you build.
# - A check runs your cell on new ranks, with inputs drawn anew, in float64. It compares values with one process, then what the
#   recording shows: bytes held, by category, bytes sent, calls. A right loss alone proves nothing here: an optimizer that
#   shards nothing has it too. It knows the usual mistakes by name. Run it as often as you like.
# - Each exercise stands alone: what it uses of an earlier one is yours where yours passes, else the course's.
#
# Your functions run on the ranks. `rank` and `world_size` are there, as in the lessons.

# %% name="imports" tags=["given"]
import functools
import inspect
import math

import torch
import torch.distributed as dist  # noqa: F401 (for your cells)
from torch import nn

import dtlab
from dtlab.checks.lab03_model import Net, all_gather, decay_groups, loss_of, reduce_scatter

WORLD_SIZE = 4
torch.set_num_threads(1)

# %% [markdown]
# ## Warm-up
#
# Rank $r$ holds eight times $10^r$. After the first call, what stands on which rank? And after the second?

# %% name="halves"
def halves():
    full = torch.full((8,), 10.0**rank, dtype=torch.float64)
    own = full.new_empty(8 // world_size)
    reduce_scatter(own, full)
    own[0] = rank
    all_gather(full, own)
    return own.tolist(), full.tolist()

ranks = dtlab.launch(WORLD_SIZE)
for own, full in ranks.run(halves)[::3]:
    print(own, full)

# %% [markdown]
# What does an optimizer hold? A recording sorts every byte by what it is. Why is `optimizer_states` a little more than twice
# `params`, and what are the 8 bytes beyond?

# %% name="categories"
def one_step_of_adam():
    model = nn.Linear(10, 3, dtype=torch.float64)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 10, dtype=torch.float64)).sum().backward()
    optimizer.step()

recording = ranks.record(one_step_of_adam)
print(recording.memory().loc[0, ["peak_params", "peak_grads", "peak_optimizer_states"]].to_dict())

# %% [markdown]
# Momentum and variance, and a step counter of 4 bytes for each of two tensors. Now seven numbers on four ranks. This cell fails on
# purpose. Read what it says: what would have to be different?

# %% name="deliberate-error" tags=["raises-exception"]
def seven_on_four():
    own = torch.empty(2, dtype=torch.float64)
    reduce_scatter(own, torch.ones(7, dtype=torch.float64))

ranks.run(seven_on_four)

# %% [markdown]
# All parts have one length, so the line has to be a multiple of the number of ranks long: it gets **padding**.
#
# ## Exercise 1: shard bounds (10 min)
#
# Lay the parameters end to end, pad the line at its end, and cut it into equal shards. A cut falls where it falls, mostly inside
# a parameter. Say what lies on every rank.
#
# `shard_pieces(sizes, world_size)` returns `(shard_numel, pieces)`: the elements of a shard, padding included (the fewest that
# will do), and for every rank the list of its pieces `(number, start, end)`: elements `start:end` of parameter `number`, flattened.
# Pieces come in order; where a rank has nothing of a parameter there is no piece; padding belongs to none.
#
# **Budget**: none; no rank talks.
#
# The spec, element by element:

# %% name="spec-1" tags=["given"]
def owner_of_each_element(sizes, world_size):
    shard_numel = math.ceil(sum(sizes) / world_size)
    owners = [place // shard_numel for place in range(sum(sizes))]
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return [owners[end - size : end] for size, end in zip(sizes, ends)]

for number, owners in enumerate(owner_of_each_element([12, 3, 7, 1, 10], 4)):
    print(f"parameter {number}: its elements lie on ranks {owners}")

# %% name="exercise-1" tags=["exercise"]
# Exercise lab03.1
def shard_pieces(sizes, world_size):
    """Cut parameters of these sizes (elements), laid end to end, into one shard for each rank.

    Returns:
        (elements of a shard, [[(number, start, end), ...] for each rank])
    """
    raise NotImplementedError("Exercise 3.1: which part of which parameter lies in which shard?")

# %% name="picture-1" tags=["picture"]
dtlab.picture("lab03.1")

# %% name="check-1" tags=["check"]
dtlab.check("lab03.1")

# %% [markdown]
# <details><summary>Hint 1: where to look</summary>
# Write the line for five parameters on four ranks on paper. Where does shard 2 begin, and in which parameter is that? Which rank
# has the padding, and could two of them have some?</details>
# <details><summary>Hint 2: what it is</summary>
# The overlap of two intervals: the place of a parameter in the line, and the place of a shard. It starts at the later of the two
# starts and ends at the earlier of the two ends.</details>
# <details><summary>Hint 3: the formula</summary>
# A shard has the total divided by the ranks, rounded up. Subtract where the parameter begins to come from places in the line to places in
# the parameter. An overlap that ends where it starts is no piece.</details>
#
# ## Exercise 2: stage 1 (25 min)
#
# An optimizer for parameters in **groups**, each with a rate and a decay of its own, as every real run has them. It keeps states for one
# shard of the whole line, whose pieces may belong to both groups.
#
# `StageOne(groups, optimizer_class)`, made once; `groups` is a list of dicts, each with `"params"` and settings, as torch's
# optimizers take them. It makes its own optimizer with `optimizer_class(your_groups)`: that is how states are counted. After each
# `backward()` the loop calls `step()`, then `model.zero_grad()`. After `step()` every rank has all new parameters, in place. A
# `.grad` may be None on one rank: that is a zero.
#
# **Budget** of a rank and step: one `reduce_scatter` and one `all_gather`, whatever the number of groups and parameters; optimizer
# states of one shard.
#
# The model `Net` of exercises 2 and 3: layers, and at the end a vector `branch` of factors, in which a rank may take no part. The spec
# in one process: the mean of what the ranks have, and one optimizer for all.

# %% name="spec-2" tags=["given"]
def step_in_one_process(model, optimizer, batches_of_ranks):
    optimizer.zero_grad()
    for batch in batches_of_ranks:
        (loss_of(model, batch) / len(batches_of_ranks)).backward()
    optimizer.step()

print(inspect.getsource(Net))
net = Net(seed=0)
for group in decay_groups(net):
    print({**group, "params": [tuple(p.shape) for p in group["params"]]})
optimizer = torch.optim.AdamW(decay_groups(net))
step_in_one_process(net, optimizer, [torch.rand(2, 3, 5, dtype=torch.float64).split([3, 2], dim=-1)] * 2)
print("states of", sum(len(state["exp_avg"].flatten()) for state in optimizer.state.values()), "elements")

# %% name="exercise-2" tags=["exercise"]
# Exercise lab03.2
class StageOne:
    """An optimizer whose states are cut among the ranks."""

    def __init__(self, groups, optimizer_class):
        """Keep this rank's pieces of the parameters, and make an optimizer for them.

        Args:
            groups: [{"params": [...], "lr": ..., "weight_decay": ...}, ...]
            optimizer_class: called with groups like these.
        """
        raise NotImplementedError("Exercise 3.2: which pieces, with which settings, does this rank update?")

    def step(self):
        """Average .grad over the ranks, update the own pieces, give all parameters to all."""
        raise NotImplementedError("Exercise 3.2: reduce-scatter, step, all-gather")

# %% name="picture-2" tags=["picture"]
dtlab.picture("lab03.2")

# %% name="check-2" tags=["check"]
dtlab.check("lab03.2")

# %% [markdown]
# <details><summary>Hint 1: where to look</summary>
# On two ranks, print the shapes that the optimizer of rank 1 holds. Do they add up to a shard? Then: which settings does each have, and
# where do they come from?</details>
# <details><summary>Hint 2: which call gives what</summary>
# The reduce-scatter takes the padded line of all gradients and leaves a shard of their sum. Cut that like the parameters: each piece
# has the gradient at its own place. The all-gather takes a shard, padding included, and gives the line.</details>
# <details><summary>Hint 3: what to keep</summary>
# A Parameter for each of your pieces; a group for each, with all settings of its parameter's group but the list. A piece may be a
# view of its parameter, or a copy. A rank may have no piece: it has no optimizer then, and makes both calls all
# the same.</details>
#
# ## Exercise 3: stage 2 (20 min)
#
# Now no rank keeps a gradient that it does not update. The lesson waited until a bucket was full. Here each gradient leaves as it
# comes, and a step has **several micro-batches**: what arrives is added to a shard, since whole gradients, which could wait for
# the last micro-batch, are what must not be there.
#
# `StageTwo(groups, optimizer_class)`, with `step()` as before. Every parameter gets a gradient on every rank. The loop:
#
# ```python
# for step in range(steps):
#     for batch in micro_batches:
#         (loss(batch) / len(micro_batches)).backward()
#     sharded.step()
# ```
#
# **Budget** of a rank: optimizer states of one shard; during backward, of gradients, one shard and what is on its way (6 layers are
# allowed, of 24); bytes handed to calls: each gradient once a micro-batch, each parameter once a step. How many calls is up to you.
#
# The spec in one process:

# %% name="spec-3" tags=["given"]
def add_up_in_one_process(model, optimizer, micro_batches_of_ranks):
    optimizer.zero_grad()
    for micro_batches in micro_batches_of_ranks:
        for batch in micro_batches:
            (loss_of(model, batch) / len(micro_batches) / len(micro_batches_of_ranks)).backward()
    optimizer.step()

whole = sum(p.nbytes for p in net.parameters())
print(f"gradients: {whole} bytes whole, {whole // 4} a shard; sent with m micro-batches: m times the reduce-scatter")

# %% name="exercise-3" tags=["exercise"]
# Exercise lab03.3
class StageTwo:
    """An optimizer whose states and gradients are cut among the ranks."""

    def __init__(self, groups, optimizer_class):
        """As in stage 1; and see to it that gradients leave as they come."""
        raise NotImplementedError("Exercise 3.3: what happens when a gradient is there?")

    def step(self):
        """Update the own pieces with what has come in since the last step, give all parameters to all."""
        raise NotImplementedError("Exercise 3.3: step, all-gather, be ready for the next")

# %% name="picture-3" tags=["picture"]
dtlab.picture("lab03.3")

# %% name="check-3" tags=["check"]
dtlab.check("lab03.3")

# %% [markdown]
# <details><summary>Hint 1: where to look</summary>
# After backward, which parameters still have a <code>.grad</code>? What else holds the same memory: a list, a view, a handle? A tensor is
# freed when the last of them lets go.</details>
# <details><summary>Hint 2: which call</summary>
# A piece has one owner, so a reduce to that rank is enough. Or cut each parameter by itself, with padding of its own: then it
# is a reduce-scatter a parameter. What other ranks find in their tensor after a reduce is of no use.</details>
# <details><summary>Hint 3: the order of things</summary>
# In the hook that runs after a gradient was added to <code>.grad</code>: take it, divide by the ranks, reduce, add to the shard, set
# <code>.grad</code> to None. In step: give the pieces their gradients, step, gather, clear the shard.</details>
#
# ## Exercise 4: clip by the global norm (10 min)
#
# The lesson's norm was that of clean shards. In a real run the last shards have padding, in which anything may stand; small
# parameters were left whole on every rank; a tied one stands in a list twice; and somebody asks for another norm.
#
# `clip_shards(shard, padding, whole, max_norm, norm_type=2.0)`:
#
# - `shard`: [k], this rank's gradients; the last `padding` of them mean nothing and may be NaN (it may be all).
# - `whole`: list of gradients that every rank has whole, equal on all; may be empty; may hold one tensor twice (and two of equal values,
#   which are two gradients).
# - returns the norm of the whole gradient, each element of it once: $(\sum_i |g_i|^p)^{1/p}$ with $p$ = `norm_type`, for
#   $p = \infty$ the largest $|g_i|$.
# - multiplies all gradients by $\min(1, \text{max\_norm} / \text{norm})$, in place. The norm may be 0.
#
# **Budget**: a few numbers, at most 64 bytes handed to calls.
#
# The spec in one process, and the numbers of the first picture:

# %% name="spec-4" tags=["given"]
def norm_in_one_process(shards_without_padding, whole, norm_type=2.0):
    distinct = {id(tensor): tensor for tensor in whole}.values()
    everything = torch.cat([tensor.flatten() for tensor in [*shards_without_padding, *distinct]])
    return torch.linalg.vector_norm(everything, norm_type).item()

three, four, twelve = (torch.tensor([value], dtype=torch.float64) for value in (3, 4, 12))
print("one process:", norm_in_one_process([three, four], [twelve]))
print("each rank alone:", *(f"{norm_in_one_process([own], [twelve]):.2f}" for own in (three, four)))

# %% name="exercise-4" tags=["exercise"]
# Exercise lab03.4
def clip_shards(shard, padding, whole, max_norm, norm_type=2.0):
    """Scale all gradients in place so that their norm over all ranks is at most max_norm.

    Returns:
        The norm before, the same on every rank.
    """
    raise NotImplementedError("Exercise 3.4: which squares add up, and how often does each count?")

# %% name="picture-4" tags=["picture"]
dtlab.picture("lab03.4")

# %% name="check-4" tags=["check"]
dtlab.check("lab03.4")

# %% [markdown]
# <details><summary>Hint 1: where to look</summary>
# Write down the two squares that rank 0 knows, and those of rank 1. Which number is on both lists? Whose is it?</details>
# <details><summary>Hint 2: which collective</summary>
# One all-reduce of one number: a sum of powers, or for the infinite norm a maximum. Let one rank add what all have, or let each add it
# after the call.</details>
# <details><summary>Hint 3: the traps</summary>
# Cut the padding off first. Take each tensor of the list once, for the norm and for the scaling. The largest of nothing does not
# exist, so begin from a zero. Divide only where the norm is above the limit.</details>
#
# ## Exercise 5: stage 3, layer by layer (35 min)
#
# The lesson gathered the whole model, so its peak was the model and a shard. Now one layer at a time: gather it, compute, free it; in
# backward gather it again, compute its gradients, send them off, free it.
#
# `StageThree(layers)` is an `nn.Module`, called as `model(x)`. `layers` are modules, whole and equal on every rank, used one after the
# other; one may be there twice. Afterwards the whole layers are gone. `parameters()` gives this rank's shards, a flat one for each
# distinct layer in the order of first use: its parameters end to end, padded, cut into equal parts. The loop:
#
# ```python
# model = StageThree(layers)
# optimizer = torch.optim.Adam(model.parameters())
# loss(model(x)).backward()   # each shard's .grad: its part of the mean over the ranks
# optimizer.step()
# ```
#
# A gradient also comes to `x`: an embedding may stand before.
#
# **Budget** of a rank: sent $3 \frac{n-1}{n}$ of the layers' bytes, of each use; held at most, beside optimizer states: shards and their
# gradients, 6 whole layers of 20, and what autograd keeps between layers. A layer may be computed a second time in backward.
#
# The spec in one process, and what a weight does after its layer:

# %% name="spec-5" tags=["given"]
def whole_layers_in_one_process(layers, x):
    return functools.reduce(lambda values, layer: layer(values), layers, x)

layer = nn.Sequential(nn.Linear(3, 3, dtype=torch.float64), nn.Tanh())
x = torch.ones(1, 3, dtype=torch.float64, requires_grad=True)
y = whole_layers_in_one_process([layer, layer], x)
node = y.grad_fn.next_functions[0][0]
print(node.name(), "holds the weight itself:", node._saved_mat2.data_ptr() == layer[0].weight.data_ptr())

# %% name="exercise-5" tags=["exercise"]
# Exercise lab03.5
class StageThree(nn.Module):
    """Layers of which a rank keeps a shard, and which are whole only while they compute."""

    def __init__(self, layers):
        """Cut each distinct layer, keep this rank's shard, let the whole ones go."""
        raise NotImplementedError("Exercise 3.5: what of the layers has to stay, and what must not?")

    def forward(self, x):
        """The layers one after the other."""
        raise NotImplementedError("Exercise 3.5: gather, compute, free; and what happens in backward?")

# %% name="picture-5" tags=["picture"]
dtlab.picture("lab03.5")

# %% name="check-5" tags=["check"]
dtlab.check("lab03.5")

# %% [markdown]
# <details><summary>Hint 1: where to look</summary>
# Between the forward and the backward of layer 1, who still holds its whole weight? You let go of it; a linear layer saves its
# weight for the gradient of its input. And who holds the modules that were given?</details>
# <details><summary>Hint 2: which tools</summary>
# An <code>autograd.Function</code> whose forward sees no graph, saves its input and the shard, and whose backward gathers and computes
# the layer again, now with a graph. Or <code>torch.autograd.graph.saved_tensors_hooks</code>, to save a note instead of a weight. Or a
# storage that is resized to nothing, and filled again in time. <code>torch.func.functional_call</code> computes a module with tensors
# that are not its own; a module on the device <code>meta</code> has shapes and no bytes.</details>
# <details><summary>Hint 3: the count</summary>
# Backward of a layer: gather, compute forward again from the saved input, take the gradients of that for the input and for the flat
# layer, reduce-scatter the latter, divide by the ranks. What a Function returns for the shard is added up by autograd, also over two
# uses of a layer.</details>
#
# ## Stretch
#
# Your stage 3 waits for each gather. Start the gather of the next layer before this one computes, in forward and in backward, and
# have it whole in time: lesson 05 does so. The numbers to beat: the same bytes, at most one layer more at the peak, and on
# layers that take 20 ms each (`dtlab.models.TimedLayer` beside yours) no time that a gather alone adds.
#
# ## Solution
#
# After you have tried: the file `labs/lab03_zero/solution.py` in the course's folder (not in copies made by `dtlab release`). Open
# it beside your notebook, and compare cell by cell.
