"""Lab 03, ZeRO: one right answer to each exercise."""
# ruff: noqa: F821 (rank and world_size are there, on every rank)
import math

import torch
import torch.distributed as dist
from torch import nn

from dtlab.checks.lab03_model import all_gather, reduce_scatter


# Exercise lab03.1
def shard_pieces(sizes, world_size):
    """Cut parameters of these sizes (elements), laid end to end, into one shard for each rank."""
    shard_numel = -(-sum(sizes) // world_size)
    pieces, begin = [[] for _ in range(world_size)], 0  # begin: where the parameter lies in the line
    for number, size in enumerate(sizes):
        for owner, its in enumerate(pieces):
            start = max(begin, owner * shard_numel)
            end = min(begin + size, (owner + 1) * shard_numel)
            if start < end:
                its.append((number, start - begin, end - begin))
        begin += size
    return shard_numel, pieces


# Exercise lab03.2
class StageOne:
    """An optimizer whose states are cut among the ranks."""

    def __init__(self, groups, optimizer_class):
        """Keep this rank's pieces of the parameters, and make an optimizer for them."""
        self.parameters = [p for group in groups for p in group["params"]]
        self.shard_numel, self.pieces = shard_pieces([p.numel() for p in self.parameters], world_size)
        settings = [group for group in groups for _ in group["params"]]
        self.own, its = [], []
        for number, start, end in self.pieces[rank]:
            piece = nn.Parameter(self.parameters[number].detach().view(-1)[start:end])  # shares its memory
            self.own.append(piece)
            its.append({**settings[number], "params": [piece]})
        self.optimizer = optimizer_class(its) if its else None

    def line(self, tensors, length):
        """The tensors end to end, with zeros behind them."""
        flat = self.parameters[0].new_zeros(length)
        if tensors:
            values = torch.cat([tensor.detach().flatten() for tensor in tensors])
            flat[: len(values)] = values
        return flat

    def reduced(self):
        """This rank's shard of the mean gradient."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        shard = self.parameters[0].new_empty(self.shard_numel)
        reduce_scatter(shard, self.line(grads, self.shard_numel * world_size))
        return shard / world_size

    def step(self):
        """Average .grad over the ranks, update the own pieces, give all parameters to all."""
        shard, start = self.reduced(), 0
        for piece in self.own:
            piece.grad = shard[start : start + piece.numel()]
            start += piece.numel()
        if self.optimizer is not None:
            self.optimizer.step()
        full = shard.new_empty(self.shard_numel * world_size)
        all_gather(full, self.line(self.own, self.shard_numel))
        sizes = [p.numel() for p in self.parameters]
        with torch.no_grad():
            for parameter, new in zip(self.parameters, full[: sum(sizes)].split(sizes)):
                parameter.copy_(new.view_as(parameter))


# Exercise lab03.3
class StageTwo(StageOne):
    """An optimizer whose states and gradients are cut among the ranks."""

    def __init__(self, groups, optimizer_class):
        """As in stage 1; and see to it that gradients leave as they come."""
        super().__init__(groups, optimizer_class)
        self.grads = self.line([], self.shard_numel)
        self.owners = {p: [] for p in self.parameters}  # parameter -> [(rank, start, end, place in its shard), ...]
        for owner, its in enumerate(self.pieces):
            place = 0
            for number, start, end in its:
                self.owners[self.parameters[number]].append((owner, start, end, place))
                place += end - start
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self.gradient_is_there)

    def gradient_is_there(self, parameter):
        """Reduce each piece to its owner, and keep nothing else."""
        flat, parameter.grad = parameter.grad.flatten() / world_size, None
        for owner, start, end, place in self.owners[parameter]:
            part = flat[start:end]
            dist.reduce(part, dst=owner)
            if owner == rank:
                self.grads[place : place + len(part)] += part

    def reduced(self):
        """It has come in already; the next step begins with zeros."""
        grads, self.grads = self.grads, torch.zeros_like(self.grads)
        return grads


# Exercise lab03.4
def clip_shards(shard, padding, whole, max_norm, norm_type=2.0):
    """Scale all gradients in place so that their norm over all ranks is at most max_norm."""
    shard = shard[: len(shard) - padding]
    whole = list({id(tensor): tensor for tensor in whole}.values())
    counted = torch.cat([shard.new_zeros(1), shard, *(tensor.flatten() for tensor in whole if rank == 0)]).abs()
    if math.isinf(norm_type):
        norm = counted.max()
        dist.all_reduce(norm, op=dist.ReduceOp.MAX)
    else:
        power = counted.pow(norm_type).sum()
        dist.all_reduce(power)
        norm = power ** (1 / norm_type)
    if norm > max_norm:
        for tensor in [shard, *whole]:
            tensor *= max_norm / norm
    return norm.item()


# Exercise lab03.5
class Sharded(torch.autograd.Function):
    """One layer: forward keeps its input and the shard, backward computes the layer again."""

    @staticmethod
    def forward(ctx, x, shard, skeleton):
        """Gather, compute, free."""
        ctx.save_for_backward(x, shard)
        ctx.skeleton = skeleton
        return computed(skeleton, gathered(shard), x)

    @staticmethod
    def backward(ctx, grad):
        """Gather again, compute with a graph, send the gradients off, free."""
        x, shard = ctx.saved_tensors
        x, full = x.detach().requires_grad_(), gathered(shard).requires_grad_()
        with torch.enable_grad():
            y = computed(ctx.skeleton, full, x)
        of_x, of_layer = torch.autograd.grad(y, (x, full), grad)
        mean = torch.empty_like(shard)
        reduce_scatter(mean, of_layer)
        return of_x, mean / world_size, None


def gathered(shard):
    """The whole flat layer."""
    full = shard.new_empty(len(shard) * world_size)
    all_gather(full, shard.detach())
    return full


def computed(skeleton, full, x):
    """What a layer makes of x with its parameters taken from a flat tensor."""
    named, start = {}, 0
    for name, parameter in skeleton.named_parameters():
        named[name] = full[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    return torch.func.functional_call(skeleton, named, (x,))


class StageThree(nn.Module):
    """Layers of which a rank keeps a shard, and which are whole only while they compute."""

    def __init__(self, layers):
        """Cut each distinct layer, keep this rank's shard, let the whole ones go."""
        super().__init__()
        distinct = list(dict.fromkeys(layers))
        self.order = [distinct.index(layer) for layer in layers]
        self.shards = nn.ParameterList()
        for layer in distinct:
            flat = torch.cat([p.detach().flatten() for p in layer.parameters()])
            flat = nn.functional.pad(flat, (0, -len(flat) % world_size))
            self.shards.append(nn.Parameter(flat.view(world_size, -1)[rank].clone()))
        # shapes without bytes; in a tuple, so that their parameters are none of this module's
        self.skeletons = tuple(layer.to("meta") for layer in distinct)

    def forward(self, x):
        """The layers one after the other."""
        for number in self.order:
            x = Sharded.apply(x, self.shards[number], self.skeletons[number])
        return x
