# %% [markdown]
# # Lab 02: data parallel
#
# Lesson 02 built the plain version. Here you build what it left out: a start that is equal in everything, tokens that count
# once wherever they are, and buckets that stand a gradient that never comes.
#
# | You will have | Needs | Ranks | Takes |
# |---|---|---|---|
# | data parallelism that survives uneven batches, unused parameters and accumulation | lesson [02](../../notebooks/02_data_parallel.ipynb), Part A; from exercise 3 on Part B | 1 to 4 on CPU | 85 min: 10, 20, 25, 20, 10 |
#
# Words are explained in the [glossary](../../notebooks/GLOSSARY.md).
#
# ### Rules
#
# - Write with `torch.distributed`'s collectives: `dist.broadcast`, `dist.all_reduce`, also asynchronous ones.
# - Leave out torch's `DistributedDataParallel` and `dtlab.parallel`: they are what you build.
# - A check runs your cell on new ranks, with inputs drawn anew, in float64. It compares values, then what the recording shows:
#   bytes, calls, order. It knows the usual mistakes by name. Run it as often as you like.
# - Each exercise stands alone; the fourth may build on your third.
#
# Your functions run on the ranks. `rank` and `world_size` are there, as in the lessons.

# %% name="imports" tags=["given"]
import contextlib  # noqa: F401 (exercise 4)
import random

import torch
import torch.distributed as dist

import dtlab
from dtlab.checks.lab02_programs import Net, draw_batch, gradients, named_tensors, token_loss, trained
from dtlab.models import cross_entropy

WORLD_SIZE = 4
torch.set_num_threads(1)

# %% [markdown]
# ## Warm-up
#
# The model of the checks is small and full of traps. How many tensors would you send?

# %% name="net"
net = Net(seed=0)
for name, tensor in named_tensors(net).items():
    kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "buffer"
    shape, dtype = str(tuple(tensor.shape)), str(tensor.dtype)[6:]
    print(f"{name:26} {kind:9} {shape:7} {dtype:8}", "trained" * tensor.requires_grad)
print("head.weight is embedding.weight:", net.head.weight is net.embedding.weight)

# %% [markdown]
# `clocks` compute nothing. They mark the layers in a recording, and may sleep in backward so that you can see overlap. A hook
# tells when a gradient is there. What do you read here, for `branch`, when the batch does not take it?

# %% name="hooks"
order = []
for name, parameter in trained(net).items():
    parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
tokens, targets = draw_batch(random.Random(0), rows=2, length=3)
cross_entropy(net(tokens, with_branch=False), targets, reduction="sum").backward()
print("arrived:", ", ".join(order))
print("branch.weight.grad:", net.branch.weight.grad)

# %% [markdown]
# No hook was called for `branch`, and its `.grad` is None. Now let one rank skip a call because it has no gradient. This cell
# fails on purpose. Read what it says: which ranks, which tensors, which line?

# %% name="deliberate-error" tags=["raises-exception"]
def skips_what_is_missing():
    model = Net(seed=0)
    tokens, targets = draw_batch(random.Random(0), rows=2, length=3)
    cross_entropy(model(tokens, with_branch=rank != 1), targets, reduction="mean").backward()
    for parameter in list(trained(model).values())[-5:]:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)

ranks = dtlab.launch(WORLD_SIZE)
ranks.run(skips_what_is_missing)

# %% [markdown]
# Rank 1 went on to its next gradient, so the ranks added up different parameters. The guard saw it because the shapes differ.
# With equal shapes it would have been a wrong sum, and without later calls a hang.
#
# ## Exercise 1: equal start (10 min)
#
# Each rank has built the model with a seed of its own. Give all of them what rank 0 has: **everything that forward reads**, also
# what no optimizer ever touches. The tensors stay the same objects, tied stays tied, frozen stays frozen.
#
# `equal_start(model)`: every parameter and buffer [any shape, float64 or int64], in place.
#
# **Budget**: each tensor travels once, a tied one too.
#
# The spec in one process: copy the first model into the others.

# %% name="spec-1" tags=["given"]
def equal_start_in_one_process(models):
    first = named_tensors(models[0])
    for model in models[1:]:
        for name, tensor in named_tensors(model).items():
            tensor.detach().copy_(first[name])

models = [Net(seed) for seed in range(3)]
equal_start_in_one_process(models)
pairs = [(named_tensors(model)[name], first) for model in models for name, first in named_tensors(models[0]).items()]
print("equal:", all(torch.equal(tensor, first) for tensor, first in pairs))

# %% name="exercise-1" tags=["exercise"]
# Exercise lab02.1
def equal_start(model):
    """Give this replica the values of rank 0's: parameters, frozen ones and buffers, in place."""
    raise NotImplementedError("Exercise 2.1: broadcast everything that forward reads")

# %% name="picture-1" tags=["picture"]
dtlab.picture("lab02.1")

# %% name="check-1" tags=["check"]
dtlab.check("lab02.1")

# %% [markdown]
# <details><summary>Hint 1: where to look</summary>
# Compare the printed table of the model with <code>model.parameters()</code>, and with the keys of
# <code>model.state_dict()</code>. Which rows are missing in each?</details>
# <details><summary>Hint 2: which collective</summary>
# A broadcast: one rank gives, all get. Every rank makes the same calls in the same order and names the same source. It writes
# into the tensor that you hand it; autograd must not watch.</details>
# <details><summary>Hint 3: the count</summary>
# Distinct parameters + buffers, each once. Iterating over parameters gives a tied one once; iterating over names
# may give it twice.</details>
#
# ## Exercise 2: every token counts once (20 min)
#
# A rank has a list of micro-batches with different numbers of tokens; some have none, some ranks have no micro-batch at all. What
# stands in `.grad` afterwards, on every rank, is the gradient of the mean loss over **all tokens of all ranks**:
#
# $$g = \frac{\sum_r \sum_m g_{r,m}}{\sum_r \sum_m t_{r,m}}$$
#
# with $g_{r,m}$ the gradient of the summed loss of micro-batch $m$ on rank $r$ and $t_{r,m}$ its tokens. Without any token it is 0.
#
# `token_mean_backward(model, micro_batches, loss_of)` returns the mean loss, the same on every rank. `loss_of(model, micro_batch)`
# gives `(loss, tokens)`: the loss summed over the tokens that count (scalar, float64) and their number. Call it once for each.
#
# **Budget**: a rank hands its gradients to a collective once a step, plus a few numbers (64 bytes).
#
# The spec in one process: it has all micro-batches of all ranks.

# %% name="spec-2" tags=["given"]
def token_mean_in_one_process(model, micro_batches_of_all_ranks, loss_of):
    pairs = [loss_of(model, batch) for its in micro_batches_of_all_ranks for batch in its]
    loss = sum(loss for loss, _ in pairs) / max(1, sum(tokens for _, tokens in pairs))
    loss.backward()
    return loss.item()

rng, model = random.Random(0), Net(0).eval()
batches = [[draw_batch(rng, 3, 5, tokens) for tokens in its] for its in ([1, 0], [], [5, 3])]
print(f"mean loss per token: {token_mean_in_one_process(model, batches, token_loss):.4f}")
print("gradient of head.bias:", [round(value, 4) for value in gradients(model)["head.bias"].tolist()])

# %% name="exercise-2" tags=["exercise"]
# Exercise lab02.2
def token_mean_backward(model, micro_batches, loss_of):
    """Leave the gradient of the mean loss over all ranks' tokens in .grad of every trained parameter.

    Args:
        micro_batches: this rank's, a list; may be empty.
        loss_of: function of (model, micro-batch) to (loss summed over its tokens, number of tokens).

    Returns:
        The mean loss over all tokens of all ranks (float), the same on every rank.
    """
    raise NotImplementedError("Exercise 2.2: weigh by tokens, not by ranks")

# %% name="picture-2" tags=["picture"]
dtlab.picture("lab02.2")

# %% name="check-2" tags=["check"]
dtlab.check("lab02.2")

# %% [markdown]
# <details><summary>Hint 1: where to look</summary>
# Question 02.1 of the lesson: 3.0 or 4.0? Then take a rank with an empty list through your code, line by line: what is
# <code>.grad</code> there, and which calls does it make?</details>
# <details><summary>Hint 2: which collective</summary>
# An all-reduce of sums. Tokens and losses add up over ranks, means do not. Whether the division stands before backward or after the
# reduction is up to you; only one of them.</details>
# <details><summary>Hint 3: the formula</summary>
# Summed over the ranks and divided by the number of all tokens; that number is at least 1. A rank without a gradient adds zeros of
# the parameter's shape. The mean loss is (sum of all losses) / (number of all tokens).</details>
#
# ## Exercise 3: planned buckets (25 min)
#
# The lesson's `bucketed` fills its buckets in the order in which gradients arrive. When one rank gets no gradient for a parameter,
# its buckets hold others than everybody else's. **Plan** the buckets before training, let hooks send each as soon as it is full,
# and send the rest at the end, with zeros for what is missing.
#
# `Buckets(model, bucket_bytes)`, made once; after each `backward()` the loop calls `finish()`, then steps. Afterwards `.grad` of each
# trained parameter is the mean over all ranks; one that no rank has may be zero or None.
#
# The plan: trained parameters from the last to the first. A parameter that would make a bucket larger than `bucket_bytes` begins
# the next one; a larger one has a bucket of its own.
#
# **Budget**: one `all_reduce` a bucket and step, in the order of the plan, of the bucket's bytes; no other call. Where there are
# several buckets and all gradients, the first one starts before backward has reached the first layer. Here you may wait for it
# at once.
#
# The spec in one process: the mean of what each rank has alone.

# %% name="spec-3" tags=["given"]
def mean_of_ranks_in_one_process(model, losses_of_ranks):
    for loss in losses_of_ranks:
        (loss() / len(losses_of_ranks)).backward()  # .grad adds up; what is not there counts as zero
    return gradients(model)

model, batch = Net(0).eval(), draw_batch(random.Random(1), 3, 5)
loss_of_rank = lambda branch: lambda: cross_entropy(model(batch[0], branch), batch[1], reduction="mean")
found = mean_of_ranks_in_one_process(model, [loss_of_rank(branch) for branch in (True, False, True)])
print("branch.bias, which two of three ranks have:", [round(value, 4) for value in found["branch.bias"].tolist()])

# %% name="exercise-3" tags=["exercise"]
# Exercise lab02.3
class Buckets:
    """Gradients of a model, averaged over the ranks in planned buckets."""

    def __init__(self, model, bucket_bytes):
        """Plan the buckets and register the hooks."""
        raise NotImplementedError("Exercise 2.3: plan from the last parameter to the first, hook what is trained")

    def finish(self):
        """After backward: send what has not left, put the means into .grad, be ready for the next step."""
        raise NotImplementedError("Exercise 2.3: send the rest, then write the means back")

# %% name="picture-3" tags=["picture"]
dtlab.picture("lab02.3")

# %% name="check-3" tags=["check"]
dtlab.check("lab02.3")

# %% [markdown]
# <details><summary>Hint 1: where to look</summary>
# Let rank 1 have no gradient for <code>branch</code>. Write down the calls of rank 0 and of rank 1, in order. Where do they part? A
# bucket that is full while an earlier one is not: may it leave?</details>
# <details><summary>Hint 2: which collective, and when</summary>
# One all-reduce a bucket. A hook only notes that a gradient is there, then starts the next bucket of the plan while that one is full:
# none, one or several. <code>finish</code> starts all that are left, in the same order.</details>
# <details><summary>Hint 3: what to keep</summary>
# The plan (lists of parameters), which gradients are there, how many buckets have left, and their flat tensors. The last
# three are of one step only. A bucket's flat tensor has the bytes of its parameters, whether or not they have a
# gradient.</details>
#
# ## Exercise 4: overlap and no_sync (20 min)
#
# Now the buckets travel while backward computes on: a hook starts them and does not wait. And a step may have several
# micro-batches: inside `no_sync()` backward only adds to `.grad`; the last one, outside, sends the sum.
#
# `OverlappedBuckets(model, bucket_bytes)` with `finish()` as before and the context manager `no_sync()`. However `no_sync()` is left,
# also by an exception: after it hooks send again. Write the class whole, or as `class OverlappedBuckets(Buckets)` with what is
# different. The loop:
#
# ```python
# for step in range(steps):
#     for number, batch in enumerate(micro_batches):
#         with buckets.no_sync() if number < last else contextlib.nullcontext():
#             (loss(batch) / len(micro_batches)).backward()
#     buckets.finish()
#     optimizer.step()
#     optimizer.zero_grad()
# ```
#
# **Budget**: as before, **once a step** whatever the number of micro-batches. The first all_reduce starts before the last layer's
# backward, and nobody waits for one before that.
#
# A parameter may have a gradient from the first micro-batch only. It counts.
#
# The spec in one process: all micro-batches of all ranks, and one mean.

# %% name="spec-4" tags=["given"]
def accumulate_in_one_process(model, losses):
    """``losses[rank][number]()`` is the mean loss of a micro-batch."""
    count = sum(len(its) for its in losses)
    for its in losses:
        for loss in its:
            (loss() / count).backward()
    return gradients(model)

model.zero_grad()
found = accumulate_in_one_process(model, [[loss_of_rank(True), loss_of_rank(False)]] * 2)
print("branch.bias, in half of the micro-batches:", [round(value, 4) for value in found["branch.bias"].tolist()])

# %% name="exercise-4" tags=["exercise"]
# Exercise lab02.4
class OverlappedBuckets:
    """Buckets that are on their way while backward computes; one reduction a step."""

    def __init__(self, model, bucket_bytes):
        """Plan the buckets and register the hooks."""
        raise NotImplementedError("Exercise 2.4: start without waiting")

    def no_sync(self):
        """A context manager: backward inside it sends nothing."""
        raise NotImplementedError("Exercise 2.4: backward only adds up in here")

    def finish(self):
        """After the step's last backward: send what has not left, wait for all, put the means into .grad."""
        raise NotImplementedError("Exercise 2.4: now wait")

# %% name="picture-4" tags=["picture"]
dtlab.picture("lab02.4")

# %% name="check-4" tags=["check"]
dtlab.check("lab02.4")

# %% [markdown]
# <details><summary>Hint 1: where to look</summary>
# In the picture: does a green box begin under the orange ones, and does the orange row go on while it lasts? Then: which hooks are
# called in the last micro-batch, and what is in <code>.grad</code> of the others?</details>
# <details><summary>Hint 2: which call</summary>
# An asynchronous all-reduce returns a handle. The buffer must neither be read nor written before the handle's wait; keep both until
# <code>finish</code>.</details>
# <details><summary>Hint 3: the rule</summary>
# A hook inside no_sync does nothing. A bucket takes <code>.grad</code> as it is when the bucket leaves: the sum of all micro-batches, also
# of parameters whose hook was not called this time; zeros only where it is None. Leaving no_sync, also by an exception,
# restores what was.</details>
#
# ## Exercise 5: diagnose (10 min)
#
# Six programs train `Net` on four ranks, two micro-batches a step, later ranks with more tokens. Each has one mistake. You see them
# only from outside: the gradient of the first step beside the right one, how far the replicas are apart, the bytes, when
# the first call starts, the loss, and the timeline of rank 0 in one step (its optimizer sleeps, so that you can see it). Name
# each mistake with one of:
#
# `sum for mean`, `averaged twice`, `mean of means`, `no broadcast`, `reduces every micro-batch`, `sends after backward`,
# `steps before wait`, `nothing wrong`.
#
# Say first, aloud or on paper, what each of the eight would look like. Not every one is there. The spec is the right program,
# the first of the picture.

# %% name="exercise-5" tags=["exercise"]
# Exercise lab02.5
diagnosis = {
    "A": "?",  # Exercise 2.5: one of the eight for each letter
    "B": "?",
    "C": "?",
    "D": "?",
    "E": "?",
    "F": "?",
}

# %% name="picture-5" tags=["picture"]
dtlab.picture("lab02.5")

# %% name="check-5" tags=["check"]
dtlab.check("lab02.5")

# %% [markdown]
# <details><summary>Hint 1: where to look</summary>
# The numbers first. Which programs have right gradients and equal replicas? Those differ in what they send, and when.</details>
# <details><summary>Hint 2: which numbers</summary>
# An exact factor names the number of ranks. No single factor: another weighting. Replicas apart at the start, or only
# at the end: two different mistakes. Bytes: how often it sends.</details>
# <details><summary>Hint 3: the timeline</summary>
# Does a green box begin before the orange ones of that micro-batch end? Is there green in both micro-batches? When your
# machine is busy, boxes stretch: trust their order, not their length.</details>
#
# ## Stretch
#
# `Buckets` sends 8 bytes a number in float64. Sending float32 halves the bytes: how far off is the gradient then, and how far after
# 100 steps? Can you do with half the bytes and lose no digit over many steps, by keeping on each rank what rounding cut off and adding
# it to the next step's gradient? The number to beat: a replica within 1e-6 of the exact one after 100 steps of `Net`, at half
# the bytes.
#
# ## Solution
#
# After you have tried: the file `labs/lab02_data_parallel/solution.py` in the course's folder (not in copies made by `dtlab release`). Open
# it beside your notebook, and compare cell by cell.
