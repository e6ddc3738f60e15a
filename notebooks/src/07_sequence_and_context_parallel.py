# %% [markdown]
# # 07 Sequence and context parallelism
#
# Two cuts of the sequence, for two problems: what tensor parallelism leaves whole (A), and sequences that no device can hold (B).
#
# | You will build | Needs | Runs on | Takes | Works on |
# |---|---|---|---|---|
# | Megatron's sequence parallelism; ring attention and Ulysses | [06](../notebooks/06_tensor_parallel.ipynb) | 4 ranks on CPU | A 25 min, B 35 min | Linux; Windows through WSL2; macOS and Colab: not tried |
#
# Words are explained in the [glossary](../notebooks/GLOSSARY.md). The first cell imports what the lesson uses:

# %% name="imports" tags=["timing"]
import torch
import torch.distributed as dist
import torch.nn.functional as F

import dtlab
from dtlab import parallel, theory
from dtlab.data import SyntheticLanguage, batches
from dtlab.models import GPT, GPTConfig, TransformerLayer, cross_entropy
from dtlab.parallel.shared import all_gather_single, reduce_scatter_single
from dtlab.simulate import Hardware, replay

WORLD_SIZE = 4
torch.set_num_threads(1)  # the model here is too small to gain from more
print(dtlab.doctor())

# %% [markdown]
# ## Before you start
#
# <details><summary>Lesson 06's conjugate pair: what do copy and reduce do in forward, and in backward?</summary>
# Copy nothing, then an all-reduce; reduce an all-reduce, then nothing.</details>
# <details><summary>Why does the cross entropy over a cut vocabulary need the maximum over all ranks?</summary>
# Exponentials overflow unless it is subtracted, and sums may be added only with one and the same.</details>
# <details><summary>A ring all-reduce has two halves. Which?</summary>
# A reduce-scatter, then an all-gather.</details>
#
# # Part A: sequence parallelism
#
# ## The problem
#
# What a layer of the 7.5B model keeps on each rank; and what of it is whole there:

# %% name="left-over" tags=["exact"]
s, h, MIB = 2048, 4096, 2**20
sizes = dict(seq_length=s, micro_batch_size=1, hidden_size=h, num_heads=32)
kept = theory.activation_bytes_per_layer
for tp in (1, 2, 4, 8):
    print(f"tp {tp}: {kept(tp_size=tp, **sizes) / MIB:.0f} MiB, whole {10 * s * h / MIB:.0f}")

# %% [markdown]
# Those 80 are $10sbh$ bytes ($s$ tokens, $b$ sequences, $h$ hidden size): inputs of the norms and of the matrices behind them, masks of
# dropout.
#
# ## The idea
#
# Norm, dropout and residual treat each token by itself. So where tensor parallelism has every rank compute them for *all* tokens, let each of $t$
# ranks take a $t$-th: **sequence parallelism** (Megatron's word; DeepSpeed means Part B by it).
#
# ```text
#       tokens cut      |    split region: heads, MLP cut     |        tokens cut
#   [B, S/t, h]  norm   | gather    [B, S, h] matrices    sum |  [B, S/t, h]  dropout, + x
#                       | (for copy)             (for reduce) |
# ```
#
# The matrices need all tokens: an all-gather in the place of *copy*. Of their sum a rank needs its tokens only: a reduce-scatter in the
# place of *reduce*. In backward each becomes the other. With $a$ heads a layer then keeps (Korthikanti et al. 2022)
#
# $$\frac{sbh}{t} \left( 34 + 5 \frac{as}{h} \right) \quad \text{bytes:}$$
#
# all is cut. What must it send?

# %% name="question-1" tags=["exact", "folded"]
# Question 07.1: run me
dtlab.predict("07.1", "Each all-reduce becomes an all-gather and a reduce-scatter. Bytes sent?", choices={"half": "Each of the two is half an all-reduce. But there are two.", "equal": "A ring all-reduce always was a reduce-scatter and an all-gather: lesson 04's insight.", "twice": "Two calls for one, but each sends half."})

# %% [markdown]
# ## Build it
#
# ### Conjugate pairs
#
# These collectives cut the first dimension, so tokens go there:

# %% name="collectives"
def gathered(piece):  # [B, S/t, h] -> [B, S, h]
    rows = piece.transpose(0, 1).contiguous()
    all_gather_single(whole := rows.new_empty(world_size * len(rows), *rows.shape[1:]), rows)
    return whole.transpose(0, 1)

def summed(whole):  # [B, S, h], one term of the sum -> [B, S/t, h] of the sum
    rows = whole.transpose(0, 1).contiguous()
    reduce_scatter_single(mine := torch.empty_like(rows.chunk(world_size)[rank]), rows)
    return mine.transpose(0, 1)

# %% [markdown]
# Lesson 06's *copy* and *reduce* were a conjugate pair: each is the other's backward. So is every message of this lesson:

# %% name="conjugate"
def conjugate(there, back):
    class Pair(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: there(x))
        backward = staticmethod(lambda ctx, grad: back(grad))
    return Pair.apply

enter, leave = conjugate(gathered, summed), conjugate(summed, gathered)

# %% [markdown]
# ### A layer
#
# First the whole layer in one process, in float64. (No dropout here: masks must differ by rank where tokens are cut.)

# %% name="alone"
config = GPTConfig(vocab_size=32, seq_length=24, hidden_size=36, num_heads=12, num_layers=2)

def alone():
    torch.manual_seed(0)
    layer = TransformerLayer(config, dtype=torch.float64)
    x, weights = torch.randn(2, 3, 24, 36, dtype=torch.float64)
    y = layer(x.requires_grad_())
    (y * weights).sum().backward()
    for p in (x, *layer.parameters()):
        p.right, p.grad = p.grad, None
    return layer, x, weights, y

# %% [markdown]
# Then lesson 06's cut: columns of the first matrix, rows of the second. The latter's bias is added once, after the sum. Hooks put
# `enter` and `leave` around the matrices:

# %% name="cut"
mine = lambda whole, dim=1: whole.chunk(world_size, dim)[rank].contiguous()

def part(p, dim):
    its = torch.nn.Parameter(mine(p.detach(), dim))
    its.right = mine(getattr(p, "right", p), dim)  # if it is known
    return its

def cut(layer):
    attention, mlp = layer.self_attention, layer.mlp
    attention.num_heads = attention.num_kv_heads = attention.num_heads // world_size
    for linear in (attention.linear_qkv, mlp.linear_fc1):
        linear.weight, linear.bias = part(linear.weight, 0), part(linear.bias, 0)
        linear.register_forward_pre_hook(lambda module, args: enter(args[0]))
    for linear in (attention.linear_proj, mlp.linear_fc2):
        linear.weight, linear.whole_bias, linear.bias = part(linear.weight, 1), linear.bias, None
        linear.register_forward_hook(lambda module, args, y: leave(y) + module.whole_bias)

# %% [markdown]
# ## Run it on ranks
#
# A rank's loss is its tokens' part of the loss. Norms and `whole_bias` are the same on every rank, but a rank's gradient of them
# comes from its tokens. Right is the sum over ranks. (The matrices see all tokens.)

# %% name="on-ranks"
def step(sums=True):
    layer, x, weights, y_right = alone()
    cut(layer)
    y = layer(mine(x))
    (y * mine(weights)).sum().backward()
    for name, p in layer.named_parameters():
        if sums and ("norm" in name or "whole" in name):
            dist.all_reduce(p.grad)
    return layer, (y, mine(y_right)), (mine(x.grad), mine(x.right))

ranks = dtlab.launch(WORLD_SIZE)

# %% [markdown]
# ## Is it right?
#
# On each rank, against one process: output; input gradient; gradients of all twelve parameters; and how much of
# the right gradient of the first norm's weight the rank has:

# %% name="equal" tags=["exact"]
equal = lambda pair: torch.allclose(*pair, rtol=1e-10, atol=1e-12)

def check(sums=True):
    layer, *pairs = step(sums)
    grads = [(p.grad, p.right) for p in layer.parameters()]
    share = grads[0][0] @ grads[0][1] / grads[0][1].square().sum()  # the first norm's weight
    return *map(equal, pairs), all(map(equal, grads)), round(share.item(), 3)

print(*ranks.run(check), sep="\n")

# %% [markdown]
# ### Break it
#
# Forget the sum:

# %% name="break-sum" tags=["exact"]
print(*ranks.run(check, sums=False), sep="\n")

# %% [markdown]
# Output and input gradient are right, so the first loss is, too. But each rank has its tokens' share of the rest (all shares together
# are 1), and steps by it: norms that were equal drift apart.
#
# ## What does it cost?
#
# *Exact here*: what rank 0 calls, and sends:

# %% name="calls" tags=["exact"]
sent = ranks.record(lambda: step() and None).communication().query("rank == 0")
print(sent[["op", "calls", "wire_bytes"]].to_string(index=False))
formula = 4 * theory.wire_bytes("all_reduce", 8 * 3 * 24 * 36, WORLD_SIZE)
dtlab.reveal("07.1", f"{sent.wire_bytes[:2].sum():,.0f}; lesson 06: {formula:,.0f}", "equal")

# %% [markdown]
# The six small all-reduces are norms and biases (Megatron sends them as one).
#
# And memory? One layer at real size, recorded dry as rank 0 of 8: lesson 06's, ours, and `dtlab.parallel`'s. (The first line takes
# dropout masks of one byte, as on a GPU.)

# %% name="at-size"
def big(way, rows, **sizes):
    F.dropout = lambda x, p, *_: torch.native_dropout(x, p, True)[0]
    shape = GPTConfig(8, s, num_layers=1, dropout=0.1, flash_attention=False, **sizes)
    gpt = GPT(shape, dtype=torch.bfloat16)
    if way == "by hand":
        cut(gpt.layers[0])
    else:
        parallel.apply_tensor_parallel(gpt, sequence_parallel=way == "dtlab's")
    tokens = s if way == "lesson 06" else s // world_size
    x = torch.empty(rows, tokens, shape.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    gpt.layers[0](x).sum().backward()

# %% [markdown]
# First the paper's 22B model, four sequences, which it timed on A100s; then the 7.5B model. Times are *replayed*:

# %% name="recorded" tags=["exact"]
A100 = Hardware.preset("8xA100")
for rows, width, heads in ((4, 6144, 64), (1, 4096, 32)):
    for way in ("lesson 06", "by hand", "dtlab's"):
        dry = dtlab.record_dry(big, way, rows, hidden_size=width, num_heads=heads, world_size=8)
        run, calls = replay(dry, A100), dry.communication()
        first, *_, last = [box for box in run.boxes if box.kind == "forward"]
        ms = [1e3 * (end - first.start_s) for end in (last.end_s, run.step_time_s)]
        print(f"{width} {way:9} keeps {dry.memory().peak_activations[0] / MIB:5,.0f} MiB, sends "
              f"{calls.wire_bytes.sum() / MIB:.0f}; forward {ms[0]:4.1f} ms, all {ms[1]:4.1f}")
print("formula", *(kept(tp_size=8, sequence_parallel=on, **sizes) / MIB for on in (False, True)))

# %% [markdown]
# Ours sends what lesson 06 sends, but autograd keeps the gathered inputs, for the weights' gradients. The library, like the paper, keeps its
# piece and gathers again in backward, under a matrix product: the formula's memory, for a quarter more bytes.
#
# The paper's Table 4 for 22B: forward 7.7 ms, with sequence parallelism 7.2; with backward 19.6 and 19.0. (It fuses operations that are replayed
# here one by one.) In both, forward gains: norms and dropout are shared out. In the replay backward loses most of that (at 7.5B more): where
# *reduce* did nothing, a gather hides under no product.
#
# ### Part A in three lines
#
# - Outside split regions a layer treats tokens one by one: each rank takes a $t$-th of them.
# - All-gather in, reduce-scatter out: the bytes of an all-reduce, and all that a layer keeps is cut.
# - Whole parameters get gradients of some tokens only: sum them.
#
# # Part B: context parallelism
#
# ## Long sequences
#
# All $L = 36$ layers at tp 8 with sequence parallelism and flash attention; and causal attention's share of the FLOPs ($6Lhs$ a token, beside
# $6\Psi$ for $\Psi$ parameters):

# %% name="long" tags=["exact"]
psi, how = theory.transformer_params(theory.GPT_7_5B), dict(tp_size=8, sequence_parallel=True)
for length in (2048, 16384, 131072):
    its_bytes = 36 * kept(**sizes | dict(seq_length=length), **how, flash_attention=True)
    share = 1 / (1 + psi / (36 * h * length))
    print(f"{length:7,} tokens: {its_bytes / 1e9:5.1f} GB of activations, attention {share:.0%}")

# %% [markdown]
# One sequence of 131,072 tokens does not fit an 80 GB device, and more tensor parallelism would leave the node.
# **Context parallelism** cuts the sequence *everywhere*: of $S$ tokens a rank of $n$ keeps $S/n$, from embedding to loss.
# (On 8 ranks that is 16,384.) Only attention mixes tokens: a rank's queries need the keys and values of all tokens before them.
#
# ## Softmax in pieces
#
# For a query with scores $z_j$ and values $v_j$ attention gives $\sum_j e^{z_j} v_j / \sum_j e^{z_j}$. Both sums can be added up piece by piece, if one
# and the same maximum is subtracted from all exponents: lesson 06's again. But it is not known before the last piece. So keep a running
# one, and when it rises from $m$ to $m'$, shrink what is there by $e^{m - m'}$. (The result does not depend on $m$, so it needs no gradient.)

# %% name="add-piece" tags=["exact"]
def add_piece(state, q, k, v, is_seen):  # is_seen: [S of q, S of k], what the mask lets through
    top, total, y = state  # running maximum, sum of exponentials, sum of values
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~is_seen, -torch.inf)
    higher = torch.maximum(top, scores.detach().amax(-1, keepdim=True))
    weights, shrink = (scores - higher).exp(), (top - higher).exp()
    return higher, shrink * total + weights.sum(-1, keepdim=True), shrink * y + weights @ v

NOTHING = torch.tensor(-torch.inf), 0, 0
torch.manual_seed(0)
q, k, v = torch.randn(3, 64, 8, dtype=torch.float64)
right, state = F.scaled_dot_product_attention(q, k, v), NOTHING
for piece in zip(k.chunk(4), v.chunk(4)):
    state = add_piece(state, q, *piece, torch.ones(64, 16, dtype=torch.bool))
print("in pieces:", equal((state[2] / state[1], right)))

# %% [markdown]
# This is the **online softmax**. (Flash attention does it within a device.) **Break it**: why not each piece's own softmax, and then the mean?

# %% name="break-mean" tags=["exact"]
parts = [F.scaled_dot_product_attention(q, *kv) for kv in zip(k.chunk(4), v.chunk(4))]
off = sum(parts) / 4 - right
print(f"off by {off.abs().mean():.2f} on values of {right.abs().mean():.2f}")

# %% [markdown]
# Then each piece counts a quarter, however large its exponentials. Sums are added; division comes last.
#
# ## Ring attention
#
# Keys and values go round: in each of $n$ turns a rank adds the piece that it has, and passes it on. For that a message needs a gradient: what went to
# the next rank in forward comes back from it in backward. Conjugate again:

# %% name="pass-on"
def message(x, to):
    came = torch.empty_like(x := x.contiguous())
    works = dist.isend(x, (rank + to) % world_size), dist.irecv(came, (rank - to) % world_size)
    [work.wait() for work in works]
    return came

pass_on = conjugate(lambda x: message(x, 1), lambda grad: message(grad, -1))

# %% [markdown]
# Which tokens does a rank have? A run of them; or, in a **zig-zag**, an early piece and a late one. From positions follows what the causal
# mask lets through. The own piece comes first: there each query sees something.
#
# ```text
# whose piece, in turn   0   1   2   3       whose are the tokens, from first to last
#             rank 0     0  (3) (2) (1)
#             rank 1     1   0  (3) (2)      contiguous   0 0 1 1 2 2 3 3
#             rank 2     2   1   0  (3)      zig-zag      0 1 2 3 3 2 1 0
#             rank 3     3   2   1   0
#                        ( ) contiguous: all is masked
# ```

# %% name="ring"
def positions(r, n, layout, size):  # of rank r of n, which has size tokens
    pieces = torch.arange(n * size).chunk(n if layout == "contiguous" else 2 * n)
    return pieces[r] if layout == "contiguous" else torch.cat([pieces[r], pieces[-1 - r]])

def ring_attention(q, k, v, layout):  # [B, a, S/n, d] each
    where = [positions(r, world_size, layout, q.shape[2]) for r in range(world_size)]
    kv, state = torch.stack((k, v)), NOTHING
    for turn in range(world_size):
        kv = pass_on(kv) if turn else kv
        state = add_piece(state, q, *kv, where[rank][:, None] >= where[rank - turn])
    return state[2] / state[1]

# %% [markdown]
# On each rank, contiguous and zig-zag, against one process: output; gradients of q, k and v. Ours, then the library's:

# %% name="check-ring" tags=["exact"]
def check_attention(attention, layout):
    torch.manual_seed(0)
    qkv = torch.randn(3, 2, 12, 24, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.randn_like(qkv[0])
    here = positions(rank, world_size, layout, 24 // world_size)
    y = attention(*qkv[:, :, :, here], layout=layout)
    grad, = torch.autograd.grad((y * weights[:, :, here]).sum(), qkv)
    right = F.scaled_dot_product_attention(*qkv, is_causal=True)
    right_grad, = torch.autograd.grad((right * weights).sum(), qkv)
    return equal((y, right[:, :, here])), equal((grad[:, :, :, here], right_grad[:, :, :, here]))

for attention in (ring_attention, parallel.ring_attention):
    print([ranks.run(check_attention, attention, way) for way in ("contiguous", "zigzag")])

# %% [markdown]
# ### Who has the work?
#
# The mask removes half of all pairs of tokens. Whose?

# %% name="question-2" tags=["exact", "folded"]
# Question 07.2: run me
dtlab.predict("07.2", "Causal attention, 4 ranks, contiguous pieces. Work of the busiest against the mean?", choices={"1.00x": "Without a mask. With it, the first rank's queries see almost nothing.", "1.75x": "The shares are 1, 3, 5, 7: the last rank has 7, the mean is 4.", "4.00x": "Then the last rank would have all of it.", "7.00x": "That is the last rank against the first."})

# %% [markdown]
# Count:

# %% name="work" tags=["exact"]
for layout in ("contiguous", "zigzag"):
    pairs = [(positions(r, 4, layout, 1024) + 1).sum().item() for r in range(4)]  # all up to it
    busiest, first = 4 * max(pairs) / sum(pairs), pairs[3] / pairs[0]
    print(f"{pairs}: busiest {busiest:.2f}x the mean, last {first:.2f}x the first")
dtlab.reveal("07.2", f"{4 * max(theory.causal_work(4)):.2f}x")

# %% [markdown]
# In every turn the ring waits for its slowest rank. The zig-zag's early piece makes up for the late one. (Ours computes what is
# masked, too; the library skips it.)
#
# ## Ulysses
#
# Heads do not mix either. **Ulysses** cuts by heads for the time of attention, with an **all-to-all**: piece c of rank r
# goes to rank c:

# %% name="all-to-all" tags=["exact"]
def swap():
    mine = torch.tensor([10 * rank + to for to in range(world_size)])
    dist.all_to_all_single(came := torch.empty_like(mine), mine)
    return came.tolist()

print(*ranks.run(swap), sep="\n")

# %% [markdown]
# Tens say from whom. Now heads go out, tokens come in; between two of these stands plain attention:

# %% name="ulysses" tags=["exact"]
def exchanged(x, out, grows):
    pieces = torch.stack(x.chunk(world_size, out))
    dist.all_to_all_single(came := torch.empty_like(pieces), pieces)
    return torch.cat([*came], grows)

to_heads = conjugate(lambda x: exchanged(x, 1, 2), lambda grad: exchanged(grad, 2, 1))
to_tokens = conjugate(lambda x: exchanged(x, 2, 1), lambda grad: exchanged(grad, 1, 2))

def ulysses_attention(q, k, v, layout):  # [B, a, S/n, d] each; between them [B, a/n, S, d]
    return to_tokens(F.scaled_dot_product_attention(*map(to_heads, (q, k, v)), is_causal=True))

print(ranks.run(check_attention, ulysses_attention, "contiguous"))

# %% [markdown]
# Level without a zig-zag. (Pieces come by rank, so ours must be contiguous; the library sorts.) But not on more ranks than
# heads, those of keys and values too, unless they are copied, as DeepSpeed does.
#
# ## Bytes
#
# Forward and backward, with $P$ bytes of q on a rank. In our ring keys and values go $n - 1$ turns, and their gradients back: $4 (n-1) P$.
# Ulysses: four tensors there, their gradients back, $8 \frac{n-1}{n} P$.

# %% name="bytes" tags=["exact"]
P = 8 * 2 * 12 * 24 * 5 / WORLD_SIZE
ring, heads = (WORLD_SIZE - 1) * P, 8 * (WORLD_SIZE - 1) / WORLD_SIZE * P
for name, way, formula in (
        ("ring", ring_attention, 4 * ring), ("dtlab's", parallel.ring_attention, 6 * ring),
        ("Ulysses", ulysses_attention, heads), ("dtlab's", parallel.ulysses_attention, heads)):
    its = ranks.run(check_attention, way, "contiguous")  # the library compares shapes, once
    calls = ranks.record(check_attention, way, "contiguous").communication().query("rank == 0")
    print(f"{name:7} {its} formula {formula:7,.0f}, recorded {calls.wire_bytes.sum():7,.0f}")

# %% [markdown]
# The ring sends $n/2$ times as much as Ulysses, but the library sends it under computing. And why has dtlab's ring 6? For what it keeps. 16,384
# tokens on 8 ranks, one layer of 32 heads:

# %% name="kept-ring" tags=["exact"]
def at_length(attention):
    qkv = torch.empty(3, 1, 32, 2**14 // world_size, 128, dtype=torch.bfloat16)
    attention(*qkv.requires_grad_(), layout="zigzag").sum().backward()

for attention in (ring_attention, parallel.ring_attention):
    dry_ring = dtlab.record_dry(at_length, attention, world_size=8)
    print(f"{dry_ring.memory().peak_activations[0] / MIB:,.0f} MiB")

# %% [markdown]
# Autograd keeps every piece that came by, and its weights: $S^2 / n$ numbers a head: of no use for long sequences. The library
# keeps q, k, v, the output and $m + \log \sum e^{z_j - m}$ (scores only block by block); in backward keys and values go round once
# more, with their gradients.
#
# ## Train
#
# For parameters this is *data parallelism*: each rank has all of them, and its tokens' gradient. All have equally many tokens, of the same
# sequences, so lesson 02's mean over ranks is right. And the model must know where tokens stand:

# %% name="train" tags=["exact"]
data = SyntheticLanguage(vocab_size=32).sample(65536, seed=0)

def train(adapt=None):
    gpt = GPT(config, dtype=torch.float64)
    model = parallel.DistributedDataParallel(adapt(gpt)) if adapt else gpt
    here = positions(rank, world_size, "zigzag", 24 // world_size) if adapt else torch.arange(24)
    optimizer, losses = torch.optim.SGD(gpt.parameters(), lr=0.05, momentum=0.9), []
    for step in range(5):
        inputs, targets = batches(data, 24, batch_size=8, seed=0, step=step)
        logits = model(inputs[:, here], positions=here)
        losses.append(cross_entropy(logits, targets[:, here], reduction="mean"))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    return torch.stack(losses).detach(), torch.cat([p.data.flatten() for p in gpt.parameters()])

# %% [markdown]
# Five steps with our ring and the library's, against one process: mean of the losses; all parameters on each rank:

# %% name="train-equal" tags=["exact"]
def by_hand(gpt):
    for layer in gpt.layers:
        layer.self_attention.attend = lambda q, k, v: ring_attention(q, k, v, "zigzag")
    return gpt

alone_losses, alone_vector = train()
for adapt in (by_hand, parallel.apply_context_parallel):
    losses, vectors = map(torch.stack, zip(*ranks.run(train, adapt)))
    print(equal((losses.mean(0), alone_losses)), [equal((its, alone_vector)) for its in vectors])

# %% [markdown]
# ## Turn the knobs
#
# Switch contiguous to zig-zag: four uneven bars become level. (What a bar lacks to the longest, its rank waits.) Then take Ulysses, and drag the
# ranks to the end: 8, the heads of keys and values.

# %% name="explorer" tags=["picture"]
dtlab.explore.context_parallel()

# %% [markdown]
# This lesson's rows of the ledger, from the dry recordings; 16-bit keys and values have 32-bit gradients: $8 (n-1) P$. (*Shipped*: a lesson not yet run here.)

# %% name="ledger" tags=["timing"]
formula = theory.wire_bytes("all_gather", 10 * 2 * s * h, 8)  # and norms' gradients:
dtlab.ledger("07A", dry, round(formula + theory.wire_bytes("all_reduce", 2 * 6 * h, 8)))
dtlab.ledger("07B", dry_ring, 8 * 7 * (2 * h * 2**14 // 8))

# %% [markdown]
# ## In real systems
#
# | here | torch | Megatron-LM | DeepSpeed |
# |---|---|---|---|
# | sequence parallelism | `SequenceParallel` | `sequence_parallel` | - |
# | `enter`, `leave` | DTensor's `Shard(1)` to `Replicate`, `Partial` to `Shard(1)` | `gather_from_`, `reduce_scatter_to_sequence_parallel_region` | - |
# | sum of norms' gradients | DTensor's `Partial` | `finalize_model_grads` | - |
# | ring attention | `context_parallel`, `set_rotate_method("alltoall")` | `context_parallel_size`, `cp_comm_type` `p2p` | - |
# | zig-zag | head-tail load balancer | `get_batch_on_this_cp_rank` | - |
# | Ulysses | - | `cp_comm_type` `a2a` | `DistributedAttention`, `UlyssesSPAttentionHF` |
#
# Torch by default gathers all keys and values at once. Its `context_parallel` has no kernel for CPUs; its parts give our numbers.
# Left out on purpose: dropout of weights, several documents in a sequence.
#
# ## Exercises
#
# 1. *Predict.* Llama 70B has 64 heads, 8 of keys and values. On how many ranks does the library's ring send less than Ulysses?
# 2. *Change.* Let `ring_attention` skip a piece of which the mask lets nothing through. Forward stays right. Backward?
# 3. *Break.* With our ring, give the model no `positions`. What do the losses say?
#
# Computed:

# %% name="answers" tags=["exact", "folded"]
# Answers: run me
llama, ways = theory.LlamaShape(num_layers=80, hidden_size=8192, ffn_hidden_size=28672, num_heads=64, num_kv_heads=8, seq_length=131072, vocab_size=32000), (theory.ring_attention_wire_bytes, theory.ulysses_wire_bytes)
print("1. GB by ring and by Ulysses:", {n: [round(sum(way(llama, cp_size=n).values()) / 1e9, 1) for way in ways] for n in (2, 4, 8)})
plain, add_piece = add_piece, lambda state, q, k, v, is_seen: plain(state, q, k, v, is_seen) if is_seen.any() else state
try:
    ranks.run(check_attention, ring_attention, "contiguous")
except dtlab.RankError as error:
    print("2.", type(error).__name__)
blind, add_piece = lambda gpt: setattr(gpt, "embed", lambda tokens, positions: GPT.embed(gpt, tokens)) or by_hand(gpt), plain
print("3. losses, right and wrong:", *([round(loss, 4) for loss in torch.stack([its for its, _ in ranks.run(train, adapt)]).mean(0).tolist()] for adapt in (by_hand, blind)))

# %% [markdown]
# <details><summary>In words</summary>
#
# On 2 and 4: keys and values are few, and Ulysses sends all queries. Rank 0, contiguous, sees only its own piece: nothing that came by is in its
# graph, so it sends no gradients back, and others wait. Without positions each rank believes that it has the beginning: losses fall as nicely.
#
# </details>
#
# ## Summary
#
# - **Sequence parallelism** cuts tokens where tensor parallelism leaves them whole.
# - **Context parallelism** cuts the sequence everywhere; for parameters it is data parallelism.
# - **Ring attention** passes keys and values round, added up by an **online softmax**; a **zig-zag** levels causal work.
# - **Ulysses** swaps tokens for heads by an **all-to-all**, and back.
#
# References: Korthikanti et al. 2022, [arXiv:2205.05198](https://arxiv.org/abs/2205.05198); Liu et al. 2023,
# [arXiv:2310.01889](https://arxiv.org/abs/2310.01889); Jacobs et al. 2023, [arXiv:2309.14509](https://arxiv.org/abs/2309.14509).
