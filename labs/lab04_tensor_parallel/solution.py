"""Lab 04, tensor parallelism: one right answer to each exercise."""
# ruff: noqa: F821 (rank and world_size are there, on every rank)
import torch
import torch.distributed as dist
from torch import nn

from dtlab.checks.lab04_model import attend


# Exercise lab04.1
def shard(whole, dim):
    """This rank's piece of a tensor that every rank has whole."""
    length, rest = divmod(whole.shape[dim], world_size)
    if rest:
        raise ValueError(f"dimension {dim} of {whole.shape[dim]} elements cannot be shared by {world_size} ranks")
    piece = whole.new_empty([length if at == dim % whole.dim() else size for at, size in enumerate(whole.shape)])
    return piece.copy_(whole.narrow(dim, rank * length, length))


def gather(piece, dim):
    """The whole tensor, from the pieces of all ranks."""
    below = piece.new_empty(world_size, *piece.shape)
    dist.all_gather([*below], piece.contiguous())
    return below.movedim(0, dim % piece.dim()).flatten(dim % piece.dim(), dim % piece.dim() + 1)


# Exercise lab04.2
class Copy(torch.autograd.Function):
    """f: nothing in forward, a sum in backward."""

    @staticmethod
    def forward(ctx, x):
        """[..] -> [..]."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        """What g does."""
        return Add.apply(grad)


class Add(torch.autograd.Function):
    """g: a sum in forward, nothing in backward."""

    @staticmethod
    def forward(ctx, x):
        """[..] -> [..], in a tensor of its own."""
        total = torch.clone(x, memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, grad):
        """What f does."""
        return Copy.apply(grad)


def copy_to_region(x):
    """f, where a tensor that all ranks have enters what each does alone."""
    return Copy.apply(x)


def reduce_from_region(x):
    """g, where the ranks' parts are added up again."""
    return Add.apply(x)


# Exercise lab04.3
class ParallelMLP(nn.Module):
    """y = g(gelu(f(x) A^T + a) B^T) + b, with a rank's rows of A and a and its columns of B."""

    def __init__(self, fc1, fc2):
        """Keep this rank's part of two linears."""
        super().__init__()
        self.up, self.down = fitting(fc1, rows=True), fitting(fc2, rows=False)

    def forward(self, x):
        """[N, h] -> [N, h]."""
        inside = nn.functional.gelu(self.up(copy_to_region(x)))
        y = reduce_from_region(nn.functional.linear(inside, self.down.weight))
        return y if self.down.bias is None else self.down.bias + y


def fitting(linear, rows):
    """A linear with this rank's rows of another, or with its columns and the whole bias."""
    with torch.no_grad():
        weight, bias = shard(linear.weight, 0 if rows else 1), linear.bias
        bias = shard(bias, 0) if rows and bias is not None else bias
        mine = nn.Linear(*weight.T.shape, bias=bias is not None, dtype=weight.dtype)
        for own, its in zip(mine.parameters(), (weight, bias)):
            own.copy_(its)
    return mine


# Exercise lab04.4
class ParallelAttention(nn.Module):
    """Causal attention of this rank's heads."""

    def __init__(self, qkv, proj, num_heads):
        """Keep this rank's part of two linears; ``qkv`` has the rows of q, then k, then v."""
        super().__init__()
        if num_heads % world_size != 0:
            raise ValueError(f"num_heads ({num_heads}) must be divisible by the number of ranks ({world_size})")
        self.num_heads = num_heads // world_size
        rows_of = lambda its: nn.Parameter(torch.cat([shard(block, 0) for block in its.detach().tensor_split(3)]))
        self.qkv_weight, self.qkv_bias = (its if its is None else rows_of(its) for its in (qkv.weight, qkv.bias))
        self.proj_weight = nn.Parameter(shard(proj.weight.detach(), 1))
        self.proj_bias = proj.bias if proj.bias is None else nn.Parameter(proj.bias.detach().clone())

    def forward(self, x):
        """[B, S, h] -> [B, S, h]."""
        three = nn.functional.linear(copy_to_region(x), self.qkv_weight, self.qkv_bias)  # [B, S, 3h/t]
        q, k, v = three.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)  # [B, a/t, S, d] each
        y = nn.functional.linear(attend(q, k, v).transpose(1, 2).flatten(2), self.proj_weight)
        y = reduce_from_region(y)
        return y if self.proj_bias is None else self.proj_bias + y


# Exercise lab04.5
def vocab_cross_entropy(logits, targets, vocab_size):
    """The loss of every token, from this rank's columns of the logits."""
    first = rank * logits.shape[-1]
    width = min(max(vocab_size - first, 0), logits.shape[-1])  # columns that are no padding
    real = logits[:, :width]
    largest = torch.cat([real.detach(), real.new_full((len(real), 1), -torch.inf)], 1).amax(1, keepdim=True)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    real = real - largest
    is_mine = (targets >= first) & (targets < first + width)
    picked = torch.zeros_like(real.sum(1))
    picked[is_mine] = real[is_mine, targets[is_mine] - first]
    exponentials, predicted = reduce_from_region(torch.stack([real.exp().sum(1), picked]))
    return (exponentials.log() - predicted) * (targets != -100)
