# ruff: noqa
import math

import torch
import torch.distributed as dist
from torch.func import functional_call

from dtlab.checks.lab03_model import all_gather, reduce_scatter

rank, world_size = dist.get_rank(), dist.get_world_size()


# %% lab03.1: overlap of two intervals
def shard_pieces(sizes, world_size):
    shard = math.ceil(sum(sizes) / world_size)
    pieces = [[] for _ in range(world_size)]
    start = 0
    for number, size in enumerate(sizes):
        for rank in range(world_size):
            low, high = max(start, rank * shard), min(start + size, (rank + 1) * shard)
            if low < high:
                pieces[rank].append((number, low - start, high - start))
        start += size
    return shard, pieces


# %% lab03.1: fill one rank after the other
def shard_pieces(sizes, world_size):
    shard = (sum(sizes) + world_size - 1) // world_size
    pieces, rank, room = [[] for _ in range(world_size)], 0, shard
    for number, size in enumerate(sizes):
        done = 0
        while done < size:
            if room == 0:
                rank, room = rank + 1, shard
            take = min(room, size - done)
            pieces[rank].append([number, done, done + take])
            done, room = done + take, room - take
    return [shard, pieces]


# %% lab03.1: an owner for each element
def shard_pieces(sizes, world_size):
    shard = -(-sum(sizes) // world_size)
    elements = [(number, i) for number, size in enumerate(sizes) for i in range(size)]
    pieces = []
    for r in range(world_size):
        mine = elements[r * shard : (r + 1) * shard]
        pieces.append([(n, min(i for m, i in mine if m == n), max(i for m, i in mine if m == n) + 1)
                       for n in sorted({n for n, _ in mine})])
    return shard, pieces


# %% lab03.2: pieces are views of the parameters
class StageOne:
    def __init__(self, groups, optimizer_class):
        self.params = [p for group in groups for p in group["params"]]
        self.shard, pieces = shard_pieces([p.numel() for p in self.params], world_size)
        self.views, mine = [], {}
        for number, start, end in pieces[rank]:
            view = torch.nn.Parameter(self.params[number].detach().view(-1)[start:end])
            self.views.append(view)
            mine[number] = view
        own, number = [], 0
        for group in groups:
            its = [mine[n] for n in range(number, number + len(group["params"])) if n in mine]
            number += len(group["params"])
            if its:
                own.append({**group, "params": its})
        self.optimizer = optimizer_class(own) if own else None

    @torch.no_grad()
    def step(self):
        padding = self.shard * world_size - sum(p.numel() for p in self.params)
        zeros = self.params[0].new_zeros(padding)
        full = torch.cat([*((torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in self.params), zeros])
        grad = full.new_empty(self.shard)
        reduce_scatter(grad, full)
        grad /= world_size
        start = 0
        for view in self.views:
            view.grad = grad[start : start + view.numel()]
            start += view.numel()
        if self.optimizer:
            self.optimizer.step()
        own = grad.new_zeros(self.shard)
        own[:start] = torch.cat([v.detach() for v in self.views]) if self.views else own[:0]
        all_gather(full, own)
        start = 0
        for p in self.params:
            p.copy_(full[start : start + p.numel()].view_as(p))
            start += p.numel()


# %% lab03.2: one flat shard, one slice a group, lists for the calls
class StageOne:
    def __init__(self, groups, optimizer_class):
        self.params = sum((list(group["params"]) for group in groups), [])
        self.sizes = [p.numel() for p in self.params]
        self.shard = -(-sum(self.sizes) // world_size)
        flat = self.line([p.detach() for p in self.params])
        self.own = flat[rank * self.shard : (rank + 1) * self.shard].clone()
        self.groups, start = [], 0
        for group in groups:
            end = start + sum(p.numel() for p in group["params"])
            low, high = [min(max(at - rank * self.shard, 0), self.shard) for at in (start, end)]
            part = torch.nn.Parameter(self.own[low:high])
            self.groups.append((low, high, part))
            start = end
        settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        self.optimizer = optimizer_class([{**s, "params": [part]} for s, (_, _, part) in zip(settings, self.groups)])

    def line(self, tensors):
        flat = torch.zeros(self.shard * world_size, dtype=torch.float64)
        flat[: sum(self.sizes)] = torch.cat([t.flatten() for t in tensors])
        return flat

    def step(self):
        flat = self.line([p.grad if p.grad is not None else torch.zeros_like(p) for p in self.params]) / world_size
        grad = torch.empty(self.shard, dtype=torch.float64)
        dist.reduce_scatter(grad, list(flat.chunk(world_size)))
        for low, high, part in self.groups:
            part.grad = grad[low:high]
        self.optimizer.step()
        shards = [torch.empty_like(self.own) for _ in range(world_size)]
        dist.all_gather(shards, self.own)
        with torch.no_grad():
            for p, new in zip(self.params, torch.cat(shards)[: sum(self.sizes)].split(self.sizes)):
                p.copy_(new.view_as(p))


# %% lab03.2: the parameters live in one line
class StageOne:
    def __init__(self, groups, optimizer_class):
        self.params = [p for group in groups for p in group["params"]]
        total = sum(p.numel() for p in self.params)
        self.k = (total + world_size - 1) // world_size
        self.flat = torch.zeros(self.k * world_size, dtype=torch.float64)
        start = 0
        for p in self.params:
            view = self.flat[start : start + p.numel()].view_as(p)
            view.copy_(p.detach())
            p.data = view
            start += p.numel()
        self.own = self.flat[rank * self.k : (rank + 1) * self.k]
        its, start = [], 0
        for group in groups:
            for p in group["params"]:
                low, high = max(start, rank * self.k), min(start + p.numel(), (rank + 1) * self.k)
                if low < high:
                    part = torch.nn.Parameter(self.flat[low:high])
                    its.append((low - rank * self.k, part, {k: v for k, v in group.items() if k != "params"}))
                start += p.numel()
        self.parts = [(low, part) for low, part, _ in its]
        self.optimizer = optimizer_class([{"params": [part], **rest} for _, part, rest in its]) if its else None

    def step(self):
        grads = torch.zeros_like(self.flat)
        start = 0
        for p in self.params:
            if p.grad is not None:
                grads[start : start + p.numel()] = p.grad.flatten()
            start += p.numel()
        mine = torch.empty_like(self.own)
        work = dist.reduce_scatter(mine, list(grads.chunk(world_size)), async_op=True)
        work.wait()
        for low, part in self.parts:
            part.grad = mine[low : low + part.numel()] / world_size
        if self.optimizer is not None:
            self.optimizer.step()
        all_gather(self.flat, self.own.clone())


# %% lab03.3: each piece is reduced to its owner
class StageTwo:
    def __init__(self, groups, optimizer_class):
        self.params = [p for group in groups for p in group["params"]]
        self.shard, pieces = shard_pieces([p.numel() for p in self.params], world_size)
        self.owners = {p: [] for p in self.params}
        self.mine, own = [], []
        settings = [{k: v for k, v in group.items() if k != "params"} for group in groups for _ in group["params"]]
        for owner, its in enumerate(pieces):
            for number, start, end in its:
                p, piece = self.params[number], None
                if owner == rank:
                    piece = torch.nn.Parameter(p.detach().view(-1)[start:end])
                    own.append({**settings[number], "params": [piece]})
                    self.mine.append(piece)
                self.owners[p].append((owner, start, end, piece))
        self.optimizer = optimizer_class(own) if own else None
        for p in self.params:
            p.register_post_accumulate_grad_hook(self.arrived)

    def arrived(self, p):
        flat = p.grad.flatten()
        flat /= world_size
        for owner, start, end, piece in self.owners[p]:
            part = flat[start:end]
            dist.reduce(part, dst=owner)
            if piece is not None:
                piece.grad = part.clone() if piece.grad is None else piece.grad + part
        p.grad = None

    @torch.no_grad()
    def step(self):
        if self.optimizer:
            self.optimizer.step()
            self.optimizer.zero_grad()
        own = torch.zeros(self.shard, dtype=torch.float64)
        if self.mine:
            flat = torch.cat([piece.detach() for piece in self.mine])
            own[: len(flat)] = flat
        full = own.new_empty(self.shard * world_size)
        all_gather(full, own)
        for p, new in zip(self.params, full[: sum(p.numel() for p in self.params)].split([p.numel() for p in self.params])):
            p.copy_(new.view_as(p))


# %% lab03.3: a shard of each parameter
class StageTwo:
    def __init__(self, groups, optimizer_class):
        self.params, self.shards, own = [], [], []
        for group in groups:
            mine = []
            for p in group["params"]:
                k = -(-p.numel() // world_size)
                padded = torch.zeros(k * world_size, dtype=p.dtype)
                padded[: p.numel()] = p.detach().flatten()
                mine.append(torch.nn.Parameter(padded[rank * k : (rank + 1) * k].clone()))
                self.params.append(p)
            own.append({**group, "params": mine})
            self.shards += mine
        self.optimizer = optimizer_class(own)
        for p, shard in zip(self.params, self.shards):
            p.register_post_accumulate_grad_hook(lambda p, shard=shard: self.reduce(p, shard))

    def reduce(self, p, shard):
        full = torch.zeros(len(shard) * world_size, dtype=p.dtype)
        full[: p.numel()] = p.grad.flatten()
        p.grad = None
        part = torch.empty_like(shard)
        reduce_scatter(part, full)
        part /= world_size
        if shard.grad is None:
            shard.grad = part
        else:
            shard.grad += part

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()
        own = torch.cat([s.detach() for s in self.shards])
        parts = [torch.empty_like(own) for _ in range(world_size)]
        dist.all_gather(parts, own)
        start = 0
        for p, shard in zip(self.params, self.shards):
            whole = torch.cat([part[start : start + len(shard)] for part in parts])[: p.numel()]
            p.data.copy_(whole.view_as(p))
            start += len(shard)


# %% lab03.3: asynchronous, one behind
class StageTwo:
    def __init__(self, groups, optimizer_class):
        self.params = [p for group in groups for p in group["params"]]
        self.k, self.pieces = shard_pieces([p.numel() for p in self.params], world_size)
        self.grads = torch.zeros(self.k, dtype=torch.float64)
        self.where, own, at = {}, [], 0
        number_of = {p: n for n, p in enumerate(self.params)}
        for owner, its in enumerate(self.pieces):
            at = 0
            for number, start, end in its:
                self.where.setdefault(number, []).append((owner, start, end, at))
                at += end - start
        self.parts = []
        for group in groups:
            mine = []
            for p in group["params"]:
                for owner, start, end, at in self.where[number_of[p]]:
                    if owner == rank:
                        part = torch.nn.Parameter(p.detach().flatten()[start:end].clone())
                        mine.append(part)
                        self.parts.append((number_of[p], start, end, at, part))
            if mine:
                own.append({**group, "params": mine})
        self.optimizer = optimizer_class(own) if own else None
        self.before = []
        for number, p in enumerate(self.params):
            p.register_post_accumulate_grad_hook(lambda p, number=number: self.hook(number, p))

    def hook(self, number, p):
        self.drain()
        grad, p.grad = p.grad.flatten() / world_size, None
        for owner, start, end, at in self.where[number]:
            part = grad[start:end].clone()
            self.before.append((dist.reduce(part, owner, async_op=True), owner, at, part))

    def drain(self):
        for work, owner, at, part in self.before:
            work.wait()
            if owner == rank:
                self.grads[at : at + len(part)] += part
        self.before = []

    def step(self):
        self.drain()
        for _, start, end, at, part in self.parts:
            part.grad = self.grads[at : at + len(part)].clone()
        if self.optimizer is not None:
            self.optimizer.step()
        self.grads.zero_()
        with torch.no_grad():
            for number, p in enumerate(self.params):
                new = p.detach().flatten()
                for owner, start, end, at in self.where[number]:
                    value = new[start:end].clone()
                    if owner == rank:
                        value.copy_(next(part for n, s, _, _, part in self.parts if (n, s) == (number, start)))
                    dist.broadcast(value, owner)
                    new[start:end] = value
                p.copy_(new.view_as(p))


# %% lab03.4: one number
@torch.no_grad()
def clip_shards(shard, padding, whole, max_norm, norm_type=2.0):
    shard = shard[: len(shard) - padding]
    whole = list({id(t): t for t in whole}.values())
    mine = [shard] + (whole if rank == 0 else [])
    if math.isinf(norm_type):
        total = torch.stack([t.abs().max() if t.numel() else torch.zeros((), dtype=torch.float64) for t in mine]).max()
        dist.all_reduce(total, op=dist.ReduceOp.MAX)
        norm = total.item()
    else:
        total = sum((t.abs() ** norm_type).sum() for t in mine)
        dist.all_reduce(total)
        norm = total.item() ** (1 / norm_type)
    if norm > max_norm:
        for t in [shard] + whole:
            t.mul_(max_norm / norm)
    return norm


# %% lab03.4: gathers the norms
def clip_shards(shard, padding, whole, max_norm, norm_type=2.0):
    own = shard[: shard.numel() - padding]
    norms = torch.zeros(world_size, dtype=torch.float64)
    if own.numel():
        norms[rank] = torch.linalg.vector_norm(own, norm_type)
    parts = [torch.zeros(1, dtype=torch.float64) for _ in range(world_size)]
    dist.all_gather(parts, norms[rank : rank + 1])
    distinct = []
    for tensor in whole:
        if not any(tensor is other for other in distinct):
            distinct.append(tensor)
    every = torch.cat(parts + [torch.linalg.vector_norm(t.flatten(), norm_type).view(1) for t in distinct])
    norm = torch.linalg.vector_norm(every, norm_type)
    factor = torch.clamp(max_norm / norm, max=1.0)
    for tensor in [own, *distinct]:
        tensor *= factor
    return norm


# %% lab03.5: a layer is computed again in backward
class Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard, owner, number):
        ctx.save_for_backward(x, shard)
        ctx.owner, ctx.number = owner, number
        return owner.compute(number, owner.gather(number, shard.detach()), x)

    @staticmethod
    def backward(ctx, grad):
        x, shard = ctx.saved_tensors
        flat = ctx.owner.gather(ctx.number, shard.detach()).requires_grad_()
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.owner.compute(ctx.number, flat, x)
        grad_x, grad_flat = torch.autograd.grad(y, (x, flat), grad)
        part = torch.empty_like(shard)
        reduce_scatter(part, grad_flat)
        return grad_x, part / world_size, None, None


class StageThree(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.skeletons, self.order, self.shards = [], [], torch.nn.ParameterList()
        seen = {}
        for layer in layers:
            if layer not in seen:
                seen[layer] = len(seen)
                flat = torch.cat([p.detach().flatten() for p in layer.parameters()])
                k = -(-len(flat) // world_size)
                padded = torch.cat([flat, flat.new_zeros(k * world_size - len(flat))])
                self.shards.append(torch.nn.Parameter(padded[rank * k : (rank + 1) * k].clone()))
                self.skeletons.append(layer.to("meta"))
            self.order.append(seen[layer])
        self.__dict__["skeletons"] = self.skeletons

    def gather(self, number, shard):
        full = shard.new_empty(len(shard) * world_size)
        all_gather(full, shard)
        return full

    def compute(self, number, flat, x):
        named, start = {}, 0
        for name, p in self.skeletons[number].named_parameters():
            named[name] = flat[start : start + p.numel()].view(p.shape)
            start += p.numel()
        return functional_call(self.skeletons[number], named, (x,))

    def parameters(self, recurse=True):
        return self.shards.parameters()

    def forward(self, x):
        for number in self.order:
            x = Layer.apply(x, self.shards[number], self, number)
        return x


# %% lab03.5: saved weights are packed away and gathered again
class Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard):
        full = shard.new_empty(len(shard) * world_size)
        all_gather(full, shard.detach())
        return full

    @staticmethod
    def backward(ctx, grad):
        part = grad.new_empty(len(grad) // world_size)
        reduce_scatter(part, grad.contiguous())
        return part / world_size


class StageThree(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers, self.shards, self.shapes = [], {}, {}
        for layer in layers:
            self.layers.append(layer)
            if layer in self.shards:
                continue
            its = list(layer.parameters())
            self.shapes[layer] = [(name, p.shape) for name, p in layer.named_parameters()]
            flat = torch.cat([p.detach().flatten() for p in its])
            flat = torch.nn.functional.pad(flat, (0, -len(flat) % world_size))
            self.shards[layer] = torch.nn.Parameter(flat.chunk(world_size)[rank].clone())
            for p in its:
                p.data = torch.empty(0, dtype=p.dtype)
        self.layers = tuple(self.layers)

    def parameters(self, recurse=True):
        return list(self.shards.values())

    def forward(self, x):
        for layer in self.layers:
            x = self.one(layer, x)
        return x

    def one(self, layer, x):
        shard, again = self.shards[layer], {}
        full = Split.apply(shard)
        storage = full.untyped_storage()._cdata

        def pack(tensor):
            if tensor.untyped_storage()._cdata == storage:
                return tensor.storage_offset(), tensor.size(), tensor.stride()
            return tensor

        def unpack(packed):
            if isinstance(packed, torch.Tensor):
                return packed
            offset, size, stride = packed
            whole = shard.new_empty(len(shard) * world_size)
            all_gather(whole, shard.detach())
            return whole.as_strided(size, stride, offset)

        named, start = {}, 0
        for name, shape in self.shapes[layer]:
            named[name] = full[start : start + shape.numel()].view(shape)
            start += shape.numel()
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return functional_call(layer, named, (x,))


# %% lab03.5: the linear layer written out
class Affine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard, shape):
        ctx.save_for_backward(x, shard)
        ctx.shape = shape
        weight, bias = Affine.gather(shard, shape)
        return x @ weight.T + bias

    @staticmethod
    def gather(shard, shape):
        parts = [torch.empty_like(shard) for _ in range(world_size)]
        dist.all_gather(parts, shard.detach())
        m, n = shape
        flat = torch.cat(parts)
        return flat[: m * n].view(m, n), flat[m * n : m * n + m]

    @staticmethod
    def backward(ctx, grad):
        x, shard = ctx.saved_tensors
        weight, _ = Affine.gather(shard, ctx.shape)
        flat = torch.cat([(grad.T @ x).flatten(), grad.sum(0)]) / world_size
        flat = torch.cat([flat, flat.new_zeros(len(shard) * world_size - len(flat))])
        part = torch.empty_like(shard)
        work = dist.reduce_scatter(part, list(flat.chunk(world_size)), async_op=True)
        grad_x = grad @ weight
        work.wait()
        return grad_x, part, None


class StageThree(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        numbers = {}
        for layer in layers:
            numbers.setdefault(id(layer), len(numbers))
        self.order = [numbers[id(layer)] for layer in layers]
        self.shapes, shards = [], []
        for number in range(len(numbers)):
            layer = layers[self.order.index(number)]
            weight, bias = layer[0].weight.detach(), layer[0].bias.detach()
            k = -(-(weight.numel() + bias.numel()) // world_size)
            flat = torch.zeros(k * world_size, dtype=weight.dtype)
            flat[: weight.numel() + bias.numel()] = torch.cat([weight.flatten(), bias])
            self.shapes.append(tuple(weight.shape))
            shards.append(torch.nn.Parameter(flat[rank * k : (rank + 1) * k].clone()))
        self.shards = torch.nn.ParameterList(shards)

    def forward(self, x):
        for number in self.order:
            x = Affine.apply(x, self.shards[number], self.shapes[number]).tanh()
        return x
