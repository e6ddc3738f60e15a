# ruff: noqa
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dtlab.checks.lab04_model import all_gather, attend

rank, world_size = dist.get_rank(), dist.get_world_size()


# %% lab04.1: narrow and a list
def shard(whole, dim):
    size = whole.size(dim)
    if size % world_size != 0:
        raise ValueError(f"{size} is not divisible by {world_size}")
    return whole.narrow(dim, rank * size // world_size, size // world_size).contiguous().clone()


def gather(piece, dim):
    parts = [torch.empty(piece.shape, dtype=piece.dtype) for _ in range(world_size)]
    dist.all_gather(parts, piece.contiguous())
    return torch.cat(parts, dim=dim)


# %% lab04.1: dimension to the front
def shard(whole, dim):
    n = whole.shape[dim]
    if n // world_size * world_size != n:
        raise ValueError(f"{world_size} ranks, {n} elements")
    k = n // world_size
    return torch.stack(whole.unbind(dim)[rank * k : (rank + 1) * k], dim)


def gather(piece, dim):
    front = piece.movedim(dim, 0).contiguous()
    whole = front.new_empty(world_size * front.shape[0], *front.shape[1:])
    all_gather(whole, front)
    return whole.movedim(0, dim)


# %% lab04.2: two Functions that call each other
class CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return SumOut.apply(grad)


class SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.detach().contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return CopyIn.apply(grad)


def copy_to_region(x):
    return CopyIn.apply(x)


def reduce_from_region(x):
    return SumOut.apply(x)


# %% lab04.2: what is not added here is added there
def total(x):
    out = torch.empty(x.shape, dtype=x.dtype).copy_(x.detach())
    dist.all_reduce(out)
    return out


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return reduce_from_region(grad)


class Adds(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return total(x)

    @staticmethod
    def backward(ctx, grad):
        return copy_to_region(grad)


def copy_to_region(x):
    return Same.apply(x)


def reduce_from_region(x):
    return Adds.apply(x)


# %% lab04.3: parameters and F.linear
class ParallelMLP(nn.Module):
    def __init__(self, fc1, fc2):
        super().__init__()
        with torch.no_grad():
            self.w1 = nn.Parameter(shard(fc1.weight, 0))
            self.b1 = None if fc1.bias is None else nn.Parameter(shard(fc1.bias, 0))
            self.w2 = nn.Parameter(shard(fc2.weight, 1))
            self.b2 = None if fc2.bias is None else nn.Parameter(fc2.bias.clone())

    def forward(self, x):
        h = F.gelu(F.linear(copy_to_region(x), self.w1, self.b1))
        y = reduce_from_region(F.linear(h, self.w2))
        return y if self.b2 is None else y + self.b2


# %% lab04.3: smaller linears, Functions of its own
class Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad


class ParallelMLP(nn.Module):
    def __init__(self, fc1, fc2):
        super().__init__()
        k = fc1.out_features // world_size
        mine = slice(rank * k, (rank + 1) * k)
        self.up = nn.Linear(fc1.in_features, k, bias=fc1.bias is not None, dtype=torch.float64)
        self.down = nn.Linear(k, fc2.out_features, bias=fc2.bias is not None, dtype=torch.float64)
        self.up.weight.data.copy_(fc1.weight.data[mine])
        self.down.weight.data.copy_(fc2.weight.data[:, mine])
        if fc1.bias is not None:
            self.up.bias.data.copy_(fc1.bias.data[mine])
            self.down.bias.data.copy_(fc2.bias.data)

    def forward(self, x):
        y = x.view_as(x)
        if y.requires_grad:
            y.register_hook(self.add)
        y = Sums.apply(torch.nn.functional.gelu(self.up(y)) @ self.down.weight.T)
        return y + self.down.bias if self.down.bias is not None else y

    def add(self, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


# %% lab04.4: three pieces joined
class ParallelAttention(nn.Module):
    def __init__(self, qkv, proj, num_heads):
        super().__init__()
        if num_heads % world_size:
            raise ValueError(f"{num_heads} heads, {world_size} ranks")
        self.a = num_heads // world_size
        with torch.no_grad():
            self.w = nn.Parameter(torch.cat([shard(p, 0) for p in qkv.weight.chunk(3)]))
            self.b = None if qkv.bias is None else nn.Parameter(torch.cat([shard(p, 0) for p in qkv.bias.chunk(3)]))
            self.p = nn.Parameter(shard(proj.weight, 1))
            self.c = None if proj.bias is None else nn.Parameter(proj.bias.clone())

    def forward(self, x):
        q, k, v = F.linear(copy_to_region(x), self.w, self.b).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.a, -1)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        y = reduce_from_region(y @ self.p.T)
        return y if self.c is None else y + self.c


# %% lab04.4: rows by index, a loop over heads
class ParallelAttention(nn.Module):
    def __init__(self, qkv, proj, num_heads):
        super().__init__()
        if num_heads % world_size != 0:
            raise ValueError("%d heads cannot go to %d ranks" % (num_heads, world_size))
        h = proj.in_features
        self.d, self.mine = h // num_heads, num_heads // world_size
        own = [head * self.d + i for head in range(rank * self.mine, (rank + 1) * self.mine) for i in range(self.d)]
        rows = torch.tensor([block * h + i for block in range(3) for i in own])
        self.qkv_weight = nn.Parameter(qkv.weight.detach()[rows])
        self.qkv_bias = nn.Parameter(qkv.bias.detach()[rows]) if qkv.bias is not None else None
        self.proj_weight = nn.Parameter(proj.weight.detach()[:, torch.tensor(own)].contiguous())
        self.proj_bias = nn.Parameter(proj.bias.detach().clone()) if proj.bias is not None else None

    def forward(self, x):
        z = copy_to_region(x) @ self.qkv_weight.T
        if self.qkv_bias is not None:
            z = z + self.qkv_bias
        w, d, heads = self.mine * self.d, self.d, []
        for i in range(self.mine):
            q, k, v = (z[..., block * w + i * d : block * w + (i + 1) * d] for block in range(3))
            scores = (q @ k.transpose(1, 2)) / math.sqrt(d)
            scores = scores + torch.full_like(scores, -math.inf).triu(1)
            heads.append(scores.softmax(-1) @ v)
        y = reduce_from_region(torch.cat(heads, -1) @ self.proj_weight.T)
        return y if self.proj_bias is None else y + self.proj_bias


# %% lab04.5: sums through g, masked padding
def vocab_cross_entropy(logits, targets, vocab_size):
    k = logits.shape[-1]
    words = torch.arange(rank * k, (rank + 1) * k)
    logits = torch.where(words < vocab_size, logits, -math.inf)
    top = logits.detach().max(dim=-1).values
    dist.all_reduce(top, op=dist.ReduceOp.MAX)
    shifted = logits - top.unsqueeze(-1)
    total = reduce_from_region(shifted.exp().sum(-1))
    its = torch.where(words == targets.unsqueeze(-1), shifted, torch.zeros(()).double()).sum(-1)
    loss = total.log() - reduce_from_region(its)
    return loss.masked_fill(targets == -100, 0.0)


# %% lab04.5: a Function with softmax minus one-hot
class Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, vocab_size):
        n, k = logits.shape
        start = rank * k
        x = logits.clone()
        x[:, max(0, min(k, vocab_size - start)) :] = -math.inf
        m = x.amax(1)
        dist.all_reduce(m, dist.ReduceOp.MAX)
        e = (x - m[:, None]).exp()
        mine = (targets >= start) & (targets < start + k)
        index = (targets - start).clamp(0, k - 1)[:, None]
        picked = torch.where(mine, (x - m[:, None]).gather(1, index)[:, 0], 0.0)
        s = e.sum(1)
        dist.all_reduce(s)
        dist.all_reduce(picked)
        counts = targets != -100
        softmax = e / s[:, None]
        softmax.scatter_add_(1, index, -mine.double()[:, None])
        ctx.save_for_backward(softmax * counts[:, None])
        return (s.log() - picked) * counts

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0] * grad[:, None], None, None


def vocab_cross_entropy(logits, targets, vocab_size):
    return Loss.apply(logits, targets, vocab_size)


# %% lab04.2: a hook on a view, setup_context
class Add(torch.autograd.Function):
    @staticmethod
    def forward(x):
        y = torch.empty(x.shape, dtype=x.dtype).copy_(x)
        dist.all_reduce(y)
        return y

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return copy_to_region(grad)


def copy_to_region(x):
    y = x * 1
    if y.requires_grad:
        y.register_hook(reduce_from_region)
    return y


def reduce_from_region(x):
    return Add.apply(x)


# %% lab04.3: in place of the parameters of what is given
class ParallelMLP(nn.Module):
    def __init__(self, fc1, fc2):
        super().__init__()
        self.fc1, self.fc2 = fc1, fc2
        fc1.weight = nn.Parameter(shard(fc1.weight.data, 0))
        if fc1.bias is not None:
            fc1.bias = nn.Parameter(shard(fc1.bias.data, 0))
        fc2.weight = nn.Parameter(shard(fc2.weight.data, 1))

    def forward(self, x):
        y = reduce_from_region(F.gelu(self.fc1(copy_to_region(x))) @ self.fc2.weight.t())
        if self.fc2.bias is not None:
            y += self.fc2.bias
        return y


# %% lab04.4: torch's own attention
class ParallelAttention(nn.Module):
    def __init__(self, qkv, proj, num_heads):
        super().__init__()
        try:
            self.heads = len(shard(torch.arange(num_heads), 0))
        except ValueError as error:
            raise ValueError(f"{num_heads} heads, {world_size} ranks") from error
        self.qkv_weight = nn.Parameter(shard(qkv.weight.detach().unflatten(0, (3, -1)), 1).flatten(0, 1))
        self.qkv_bias = None if qkv.bias is None else nn.Parameter(shard(qkv.bias.detach().view(3, -1), 1).flatten())
        self.proj_weight = nn.Parameter(shard(proj.weight.detach(), -1))
        self.proj_bias = None if proj.bias is None else nn.Parameter(proj.bias.detach().clone())

    def forward(self, x):
        batch, seq, _ = x.shape
        y = F.linear(copy_to_region(x), self.qkv_weight, self.qkv_bias).view(batch, seq, 3, self.heads, -1)
        y = F.scaled_dot_product_attention(*y.permute(2, 0, 3, 1, 4), is_causal=True)
        y = y.transpose(1, 2).reshape(batch, seq, -1)
        y = reduce_from_region(torch.einsum("bsj,hj->bsh", y, self.proj_weight))
        return y if self.proj_bias is None else y + self.proj_bias


# %% lab04.5: a logarithm of each rank's own sum
def vocab_cross_entropy(logits, targets, vocab_size):
    k = math.ceil(vocab_size / world_size)
    words = torch.arange(rank * k, (rank + 1) * k)
    own = torch.where(words < vocab_size, logits, -1e30).logsumexp(1)
    top = own.detach().clone()
    dist.all_reduce(top, op=dist.ReduceOp.MAX)
    predicted = (logits * (targets[:, None] == words)).sum(1)
    total, predicted = reduce_from_region(torch.stack([(own - top).exp(), predicted]))
    return (total.log() + top - predicted).masked_fill(targets == -100, 0)
