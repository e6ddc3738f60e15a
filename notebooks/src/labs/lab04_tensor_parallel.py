# %% [markdown]
# # Lab 04: tensor parallelism
#
# Lesson 06 cut one MLP and one attention, head by head, by columns and rows. Here you build what it left out: pieces along any
# dimension, f and g that stand whatever autograd does with them, a bias that counts once, the fused weight as GPT-2's
# checkpoints have it, and a vocabulary that the ranks do not divide.
#
# | You will have | Needs | Ranks | Takes |
# |---|---|---|---|
# | a transformer layer's MLP and attention, and its loss, on any number of ranks that fits | lesson [06](../../notebooks/06_tensor_parallel.ipynb), Part A; from exercise 4 on Part B | 1 to 4 on CPU | 90 min: 10, 20, 15, 20, 25 |
#
# Words are explained in the [glossary](../../notebooks/GLOSSARY.md).
#
# ### Rules
#
# - Write with `torch.distributed`'s collectives and `torch.autograd.Function`. `all_gather(whole, piece)` is torch's
#   `all_gather_into_tensor`, under whichever name your torch has for it: `whole` is [t n, ..] for pieces of [n, ..], since gloo
#   takes no stack [t, n, ..].
# - Leave out `torch.distributed.tensor` (DTensor) and `dtlab.parallel`: they are what you build. Each exercise says which
#   collectives it does without.
# - A check runs your cell on new ranks, with inputs drawn anew, in float64. It compares values and gradients with one process,
#   then what the recording shows: calls, and bytes handed to them. A right output alone proves nothing here: without f, the output
#   is right too. It knows the usual mistakes by name. Run it as often as you like.
# - Each exercise stands alone: what it uses of an earlier one is yours where yours passes, else the course's. A helper
#   of your own stands in the cell that uses it.
#
# Your functions run on the ranks. `rank` and `world_size` are there, as in the lessons; all ranks are one tensor parallel group.

# %% name="imports" tags=["given"]
import torch
import torch.distributed as dist
from torch import nn

import dtlab
from dtlab.checks.lab04_model import all_gather, attend  # noqa: F401 (for your cells)

WORLD_SIZE = 4
torch.set_num_threads(1)

# %% [markdown]
# ## Warm-up
#
# Every rank has the same matrix `w` of 2 x 8 and takes two of its columns. Where do they lie in memory? Which of the two
# lies in one run, `mine` or `mine.contiguous()`?

# %% name="columns" tags=["given"]
def two_columns():
    w = torch.arange(16.0).view(2, 8)
    mine = w[:, 2 * rank : 2 * rank + 2]
    return mine.stride(), mine.is_contiguous(), mine.contiguous().stride(), mine.untyped_storage().nbytes()

ranks = dtlab.launch(WORLD_SIZE)
print(ranks.run(two_columns)[1])

# %% [markdown]
# The two columns are a **view**: they step over what lies between, and keep all 64 bytes of `w` alive. What happens when such a view is
# handed to a collective? This cell fails on purpose. Read what it says.

# %% name="deliberate-error" tags=["raises-exception"]
def adds_columns():
    w = torch.arange(16.0).view(2, 8)
    mine = w[:, 2 * rank : 2 * rank + 2]
    dist.all_reduce(mine)

ranks.run(adds_columns)

# %% [markdown]
# On GPUs NCCL refuses the same. gloo, without dtlab, adds whatever lies in memory there, and says nothing.
#
# What does a collective mean to autograd? Each rank has its own factor, and three times all of them are added up. What should the gradient of
# the total be, on each rank, for its own factor?

# %% name="autograd" tags=["given"]
def gradient_through_a_sum():
    factor = torch.tensor(float(rank + 1), requires_grad=True)
    total = (3 * factor).detach()
    dist.all_reduce(total)
    return total.item(), total.requires_grad

for total, is_in_the_graph in ranks.run(gradient_through_a_sum)[::3]:
    print(f"sum {total:g}, part of the graph: {is_in_the_graph}")

# %% [markdown]
# Three, on every rank; but a collective writes numbers, and autograd does not know where they came from. You have to say so.
#
# ## Exercise 1: pieces, and the whole again (10 min)
#
# - `shard(whole, dim)`: this rank's piece of a tensor that every rank has: a run of neighbours along `dim`, contiguous, in memory of its
#   own, so that the whole can be freed. A size that the ranks do not divide is refused on every rank with a
#   `ValueError` that has both numbers in it.
# - `gather(piece, dim)`: the whole tensor on every rank, from pieces of equal shape.
#
# Tensors have 1 to 3 dimensions, `dim` may be negative, and both functions may get a strided view. Neither writes to what it is
# given.
#
# **Budget**: `shard` makes no call, `gather` one all-gather, whichever form of it you like; no `all_reduce`, no `broadcast`.
#
# The spec in one process:

# %% name="spec-1" tags=["given"]
def pieces_in_one_process(whole, cuts, dim):
    return list(whole.chunk(cuts, dim))

whole = torch.arange(8).view(2, 4)
for dim in (0, 1):
    its = pieces_in_one_process(whole, 2, dim)
    print(f"along {dim}: {[piece.tolist() for piece in its]}, joined again: {torch.cat(its, dim).equal(whole)}")

# %% name="exercise-1" tags=["exercise"]
# Exercise lab04.1
def shard(whole, dim):
    """This rank's piece of a tensor that every rank has whole.

    Shapes: whole [.., n, ..] -> [.., n / world_size, ..], contiguous

    Raises:
        ValueError: the ranks do not divide n.
    """
    raise NotImplementedError("Exercise 4.1: which run of the dimension is this rank's, and who owns its memory?")


def gather(piece, dim):
    """The whole tensor, from the pieces of all ranks.

    Shapes: piece [.., n / world_size, ..] -> [.., n, ..]
    """
    raise NotImplementedError("Exercise 4.1: in which order do the pieces come, and along which dimension?")

# %% name="picture-1" tags=["picture"]
dtlab.picture("lab04.1")

# %% name="check-1" tags=["check"]
dtlab.check("lab04.1")

# %% [markdown]
# <details><summary>Hint 1: where to look</summary>
# Print <code>piece.stride()</code> and the bytes of <code>piece.untyped_storage()</code>, for rows and for columns. Which of them is
# already contiguous without a copy, and what does it keep alive?</details>
# <details><summary>Hint 2: which call</summary>
# An all-gather into a list gives one tensor a rank. An all-gather into one tensor puts them below each other, along the
# first dimension, whichever was cut: viewed as [t, n, ..] they stand along a new one.</details>
# <details><summary>Hint 3: the order of dimensions</summary>
# Pieces that stand along a new first dimension have to go where they were cut: join them along that dimension, or move the new one
# in front of it and merge the two. A clone can be asked for the contiguous memory format.</details>
#
# ## Exercise 2: f and g (20 min)
#
# f stands where what all ranks have enters what each does alone, g where the parts are added up:
# $y = g(\tanh(f(x) A_r) B_r)$. The lesson's pair held for one block, once. Yours has to hold
#
# - several times in one graph, in series and side by side; and where x goes another way too, or another node needs the gradient;
# - for tensors that are strided, or expanded, as the gradient of a sum is;
# - twice: the gradient of a gradient (a penalty, a Hessian) is right as well.
#
# `copy_to_region(x)` is f: $x$ forward; backward the sum of the ranks' gradients. `reduce_from_region(x)` is g: the sum
# forward; backward the gradient as it comes. Neither writes to what it is given, forward or backward.
#
# **Budget**: f makes no call in forward, g none in backward; one `all_reduce` of their tensor's bytes for the other; no other
# collective.
#
# The spec: one process with all of A and B. `gradcheck` runs on ranks too, where all nudge the same x together. Here it is, with a
# pair that only looks right. Try yours in it before the check:
# `ranks.run(gradchecks, copy_to_region, reduce_from_region)`.

# %% name="spec-2" tags=["given"]
def block_in_one_process(x, a, b):
    return torch.tanh(x @ a) @ b

def gradchecks(f, g):
    torch.manual_seed(0)
    x, a, b = (torch.rand(shape, dtype=torch.float64) for shape in ((2, 3), (3, 8), (8, 3)))
    mine = slice(2 * rank, 2 * rank + 2)
    split = lambda x: g(torch.tanh(f(x) @ a[:, mine]) @ b[mine])
    equal = torch.allclose(split(x), block_in_one_process(x, a, b))
    x.requires_grad_()
    checks = (torch.autograd.gradcheck, torch.autograd.gradgradcheck)
    return equal, *(check(split, x, raise_exception=False) for check in checks)

def only_looks_right(x):
    total = x.detach().clone()
    dist.all_reduce(total)
    return x + (total - x).detach()

print("output, gradient, its gradient:", ranks.run(gradchecks, lambda x: x, only_looks_right)[0])

# %% name="exercise-2" tags=["exercise"]
# Exercise lab04.2
def copy_to_region(x):
    """f: x, which all ranks have; backward adds the ranks' gradients. [..] -> [..]."""
    raise NotImplementedError("Exercise 4.2: what happens to a gradient that every rank has a part of?")


def reduce_from_region(x):
    """g: the sum over the ranks, on all of them; backward hands the gradient on. [..] -> [..]."""
    raise NotImplementedError("Exercise 4.2: what happens to a gradient that every rank has whole?")

# %% name="picture-2" tags=["picture"]
dtlab.picture("lab04.2")

# %% name="check-2" tags=["check"]
dtlab.check("lab04.2")

# %% [markdown]
# <details><summary>Hint 1: where to look</summary>
# Write down, for two ranks, how y depends on x: by which two ways? Which of them does autograd see on rank 0? Then: whose
# memory is it that your <code>all_reduce</code> writes to?</details>
# <details><summary>Hint 2: which tool</summary>
# Two classes of <code>torch.autograd.Function</code>. The incoming gradient may be shared with another node, and may have strides of 0: a
# contiguous clone is yours alone.</details>
# <details><summary>Hint 3: twice</summary>
# A backward is differentiated like any other code, and the all-reduce in it is unknown to autograd again. But what f does backward is what g
# does forward, and the other way round. Each may call the other.</details>
#
# ## Exercise 3: the MLP, its bias once (15 min)
#
# `ParallelMLP(fc1, fc2)` is an `nn.Module` made from two whole `nn.Linear`s, equal on every rank, with biases or without. torch keeps a
# weight as [out, in]: `fc1.weight` [f, h], `fc2.weight` [h, f]. It computes $y = \mathrm{gelu}(x W_1^T + b_1) W_2^T + b_2$ of
# x [N, h], on every rank all of y.
#
# `parameters()` gives this rank's part, in the order of the whole: `fc1.weight` [f/t, h], `fc1.bias` [f/t], `fc2.weight` [h, f/t], and
# `fc2.bias` [h], which all ranks keep whole: its gradient has to be the right one on each, or it drifts apart. That is the order
# in which a module's parameters are set; where a linear has no bias, there is none. The parts do not keep the whole weights alive.
#
# **Budget**: one `all_reduce` of x's bytes forward, one backward, nothing else.
#
# The spec in one process:

# %% name="spec-3" tags=["given"]
def mlp_in_one_process(fc1, fc2, x):
    return fc2(nn.functional.gelu(fc1(x)))

one, minus = torch.tensor(1.0), torch.tensor(-1.0)
gelu = nn.functional.gelu
print(f"gelu of the sum {gelu(one + minus):.3f}, sum of the gelus {gelu(one) + gelu(minus):.3f}: so fc1 by its outputs")

# %% name="exercise-3" tags=["exercise"]
# Exercise lab04.3
class ParallelMLP(nn.Module):
    """An MLP of which each rank has f/t of the inner numbers."""

    def __init__(self, fc1, fc2):
        """Keep this rank's part of two linears."""
        raise NotImplementedError("Exercise 4.3: which part of each weight and bias is this rank's?")

    def forward(self, x):
        """[N, h] -> [N, h]."""
        raise NotImplementedError("Exercise 4.3: where do f and g stand, and where the second bias?")

# %% name="picture-3" tags=["picture"]
dtlab.picture("lab04.3")

# %% name="check-3" tags=["check"]
dtlab.check("lab04.3")

# %% [markdown]
# <details><summary>Hint 1: where to look</summary>
# With the second bias at 1 and all else 0: what does each rank have before g, and all after it? And what is the gradient of
# that bias on rank 1?</details>
# <details><summary>Hint 2: which tools</summary>
# <code>shard</code> along dimension 0 or 1, twice each; <code>nn.Parameter</code>; <code>nn.functional.linear</code> takes a bias or
# None.</details>
# <details><summary>Hint 3: the place of the bias</summary>
# Behind g every rank has the same numbers, and does the same with them: there a whole bias counts once, and its gradient is whole
# on every rank.</details>
#
# ## Exercise 4: attention with a fused weight (20 min)
#
# The lesson's rows came head by head: q, k, v of head 0, then of head 1. A GPT-2 checkpoint has **three blocks**: all of q, then all of k,
# then all of v; in each block head after head, d rows each.
#
# `ParallelAttention(qkv, proj, num_heads)`: `qkv.weight` [3h, h] in three blocks, `proj.weight` [h, h], biases or none. Rank r has
# the r-th run of whole heads. `parameters()`: `qkv.weight` [3h/t, h], again in three blocks, of its own heads;
# `qkv.bias` [3h/t]; `proj.weight` [h, h/t]; `proj.bias` [h]. Called with x [B, S, h], causal. Where the ranks do not divide the heads (even if
# they divide h) it raises a `ValueError` with both numbers.
#
# **Budget**: one `all_reduce` of x's bytes forward, one backward, nothing else.
#
# The spec in one process. `attend` is there for you:

# %% name="spec-4" tags=["given"]
def attention_in_one_process(qkv, proj, num_heads, x):
    heads = [block.unflatten(-1, (num_heads, -1)).transpose(1, 2) for block in qkv(x).chunk(3, -1)]  # [B, a, S, d] each
    return proj(attend(*heads).transpose(1, 2).flatten(2))

num_rows, block = 3 * 16, 16
for owner in range(4):
    rows = range(owner * num_rows // 4, (owner + 1) * num_rows // 4)
    print(f"a straight cut: rank {owner} gets", {"qkv"[at // block] for at in rows})

# %% name="exercise-4" tags=["exercise"]
# Exercise lab04.4
class ParallelAttention(nn.Module):
    """Causal attention of which each rank has whole heads."""

    def __init__(self, qkv, proj, num_heads):
        """Keep this rank's part of two linears; qkv has the rows of q, then k, then v.

        Raises:
            ValueError: the ranks do not divide num_heads.
        """
        raise NotImplementedError("Exercise 4.4: which rows of each block are this rank's?")

    def forward(self, x):
        """[B, S, h] -> [B, S, h]."""
        raise NotImplementedError("Exercise 4.4: how many heads are here, and how wide is each?")

# %% name="picture-4" tags=["picture"]
dtlab.picture("lab04.4")

# %% name="check-4" tags=["check"]
dtlab.check("lab04.4")

# %% [markdown]
# <details><summary>Hint 1: where to look</summary>
# On paper, 4 heads of size 2 on 2 ranks: number the 24 rows, and mark those of rank 0. How many runs are they?</details>
# <details><summary>Hint 2: which tools</summary>
# Three pieces, one of each block, joined: then the same code that splits the whole output splits a rank's. <code>unflatten</code> names
# the number of heads; torch finds their size.</details>
# <details><summary>Hint 3: the second weight</summary>
# A rank's heads give h/t numbers a token, those of its own heads in order: the columns of <code>proj.weight</code> at the same
# places. From there on it is the MLP again.</details>
#
# ## Exercise 5: cross entropy over pieces of a vocabulary (25 min)
#
# The lesson's vocabulary could be divided. 30 words on 4 ranks cannot: each rank has k = 8 columns of logits, rank r the words r k to r k + k - 1, and the last two
# are padding. Whatever stands in padding, it is no word: no probability, no gradient.
#
# `vocab_cross_entropy(logits, targets, vocab_size)`:
#
# - `logits` [N, k]: this rank's columns, with k = `vocab_size` / t rounded up; a rank may have padding only.
# - `targets` [N]: word numbers, the same on every rank; -100 for a token that does not count.
# - returns [N], the loss of each token in nats, on every rank; 0 for those that do not count. Logits of a thousand are no problem.
# - backward gives this rank's columns their gradient, whatever gradient comes in for each token.
#
# **Budget**: at most three all-reduces, of three numbers a token in all; no other collective, so that whole logits are on no rank.
#
# The spec in one process, and how small a mistake looks:

# %% name="spec-5" tags=["given"]
def cross_entropy_in_one_process(logits, targets, vocab_size):
    return nn.functional.cross_entropy(logits[:, :vocab_size], targets, reduction="none")

logits, targets = torch.rand(1000, 32, generator=torch.Generator().manual_seed(0)), torch.arange(1000) % 30
for name, columns in (("30 words", 30), ("padding counted as words", 32)):
    print(f"{name}: mean loss {cross_entropy_in_one_process(logits, targets, columns).mean():.3f}")

# %% name="exercise-5" tags=["exercise"]
# Exercise lab04.5
def vocab_cross_entropy(logits, targets, vocab_size):
    """The loss of every token, from this rank's columns of the logits.

    Shapes: logits [N, k], targets [N] -> [N]
    """
    raise NotImplementedError("Exercise 4.5: which three numbers of a token do the ranks need from each other?")

# %% name="picture-5" tags=["picture"]
dtlab.picture("lab04.5")

# %% name="check-5" tags=["check"]
dtlab.check("lab04.5")

# %% [markdown]
# <details><summary>Hint 1: where to look</summary>
# Write the loss of one token as a logarithm minus a logit. Which of the two is a sum over columns? Who has the other? Then: what does
# a rank bring whose columns are all padding?</details>
# <details><summary>Hint 2: which calls</summary>
# A maximum, which needs no gradient; two sums, and what their gradients are you know from exercise 2. Sums may share a
# call.</details>
# <details><summary>Hint 3: the formula</summary>
# With m the largest logit of all ranks: the logarithm of the sum of exp(logit - m), minus (the target's logit - m). Padding counts as minus
# infinity, or is cut off. The derivative of it is the softmax, less one at the target: autograd finds it by itself if the sums go
# through g.</details>
#
# ## Stretch
#
# Three numbers a token in three calls, one after the other: each waits for the one before. Can it be done in **one** all-gather of three numbers a
# token? Each rank sends its own maximum, its sum below that, and its target's logit. The number to beat: one call instead
# of three, with the same loss for logits of a thousand. From how many ranks on is it more bytes? The check of exercise 5
# allows no all-gather: give this one another name, and compare the losses yourself.
#
# ## Solution
#
# After you have tried: the file `labs/lab04_tensor_parallel/solution.py` in the course's folder (not in copies made by `dtlab release`). Open
# it beside your notebook, and compare cell by cell.
