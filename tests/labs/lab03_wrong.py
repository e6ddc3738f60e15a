# ruff: noqa
import math

import torch
import torch.distributed as dist
from torch.func import functional_call

from dtlab.checks.lab03_model import all_gather, pieces as right_pieces, reduce_scatter

rank, world_size = dist.get_rank(), dist.get_world_size()


class SoundOne:
    """Right; the answers below change one thing of it."""

    def __init__(self, groups, optimizer_class):
        self.groups, self.optimizer_class = groups, optimizer_class
        self.params = [p for group in groups for p in group["params"]]
        self.total = sum(p.numel() for p in self.params)
        self.k = self.length()
        self.make()

    def length(self):
        return -(-self.total // world_size)

    def mine(self, start, size):
        low, high = max(rank * self.k - start, 0), min((rank + 1) * self.k - start, size)
        return (low, high) if low < high else None

    def settings(self, group):
        return {key: value for key, value in group.items() if key != "params"}

    def make(self):
        self.parts, own, start = [], [], 0
        for group in self.groups:
            for p in group["params"]:
                cut = self.mine(start, p.numel())
                start += p.numel()
                if cut:
                    part = torch.nn.Parameter(p.detach().flatten()[slice(*cut)].clone())
                    self.parts.append(part)
                    own.append({**self.settings(group), "params": [part]})
        self.optimizer = self.optimizer_class(own) if own else None

    def grad(self, p):
        return torch.zeros_like(p) if p.grad is None else p.grad

    def padded(self, flat):
        return torch.cat([flat, flat.new_zeros(self.k * world_size - len(flat))])

    def line(self):
        return self.padded(torch.cat([self.grad(p).flatten() for p in self.params]))

    def reduce(self):
        full = self.line()
        own = full.new_empty(self.k)
        reduce_scatter(own, full)
        return self.mean(own)

    def mean(self, own):
        return own / world_size

    def update(self, own):
        start = 0
        for part in self.parts:
            part.grad = own[start : start + part.numel()].clone()
            start += part.numel()
        if self.optimizer:
            self.optimizer.step()

    def gather(self):
        own = torch.zeros(self.k, dtype=torch.float64)
        if self.parts:
            flat = torch.cat([part.detach() for part in self.parts])
            own[: len(flat)] = flat
        full = torch.empty(self.k * world_size, dtype=torch.float64)
        all_gather(full, own)
        return full

    @torch.no_grad()
    def write(self, full):
        start = 0
        for p in self.params:
            p.copy_(full[start : start + p.numel()].view_as(p))
            start += p.numel()

    def step(self):
        self.update(self.reduce())
        self.write(self.gather())


class SoundTwo(SoundOne):
    """Right; each parameter's gradient is reduced to the owners of its pieces."""

    def make(self):
        super().make()
        self.owners, start = {}, 0
        self.own = torch.zeros(self.k, dtype=torch.float64)
        for p in self.params:
            its = []
            for owner in range(world_size):
                low, high = max(owner * self.k - start, 0), min((owner + 1) * self.k - start, p.numel())
                if low < high:
                    its.append((owner, low, high, start + low - owner * self.k))
            self.owners[p] = its
            start += p.numel()
            self.hook(p)

    def hook(self, p):
        p.register_post_accumulate_grad_hook(self.arrived)

    def arrived(self, p):
        flat = self.scaled(p.grad.flatten())
        for owner, low, high, at in self.owners[p]:
            part = flat[low:high].clone()
            self.to_owner(part, owner)
            if owner == rank:
                self.keep(at, part)
        self.free(p)

    def scaled(self, flat):
        return flat / world_size

    def to_owner(self, part, owner):
        dist.reduce(part, owner)

    def keep(self, at, part):
        self.own[at : at + len(part)] += part

    def free(self, p):
        p.grad = None

    def clear(self):
        self.own.zero_()

    def reduce(self):
        return self.own

    def step(self):
        super().step()
        self.clear()


class Computed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard, owner, number):
        ctx.save_for_backward(x, shard)
        ctx.owner, ctx.number = owner, number
        return owner.compute(number, owner.gather(number, shard.detach()), x)

    @staticmethod
    def backward(ctx, grad):
        x, shard = ctx.saved_tensors
        flat = ctx.owner.gather_again(ctx.number, shard.detach()).detach().requires_grad_()
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.owner.compute(ctx.number, flat, x)
        grad_x, grad_flat = torch.autograd.grad(y, (x, flat), grad)
        return ctx.owner.of_input(grad_x), ctx.owner.reduce(ctx.number, shard, grad_flat), None, None


class SoundThree(torch.nn.Module):
    """Right; the answers below change one thing of it."""

    def __init__(self, layers):
        super().__init__()
        self.__dict__["skeletons"], self.order, shards, seen = [], [], [], {}
        for layer in layers:
            if layer not in seen:
                seen[layer] = len(seen)
                flat = self.padded(torch.cat([p.detach().flatten() for p in layer.parameters()]))
                shards.append(self.shard(flat))
                self.skeletons.append(self.emptied(layer))
            self.order.append(seen[layer])
        self.shards = torch.nn.ParameterList(shards)

    def padded(self, flat):
        return torch.nn.functional.pad(flat, (0, -len(flat) % world_size))

    def shard(self, flat):
        return torch.nn.Parameter(flat.view(world_size, -1)[rank].clone())

    def emptied(self, layer):
        return layer.to("meta")

    def gather(self, number, shard):
        full = shard.new_empty(len(shard) * world_size)
        all_gather(full, shard)
        return full

    def gather_again(self, number, shard):
        return self.gather(number, shard)

    def compute(self, number, flat, x):
        named, start = {}, 0
        for name, p in self.skeletons[number].named_parameters():
            named[name] = flat[start : start + p.numel()].view(p.shape)
            start += p.numel()
        return functional_call(self.skeletons[number], named, (x,))

    def of_input(self, grad):
        return grad

    def reduce(self, number, shard, grad):
        part = torch.empty_like(shard)
        reduce_scatter(part, grad)
        return part / world_size

    def forward(self, x):
        for number in self.order:
            x = Computed.apply(x, self.shards[number], self, number)
        return x


class SoundClip:
    """Right; the answers below change one thing of it."""

    def squares(self, own, whole, norm_type):
        total = sum((t.abs() ** norm_type).sum() for t in [own, *whole]) + torch.zeros((), dtype=torch.float64)
        return total

    def distinct(self, whole):
        return list({id(t): t for t in whole}.values())

    def own(self, shard, padding):
        return shard[: len(shard) - padding]

    def join(self, own, whole, norm_type):
        if math.isinf(norm_type):
            parts = [t.abs().max() for t in [own, *whole] if t.numel()] + [torch.zeros((), dtype=torch.float64)]
            norm = torch.stack(parts).max()
            dist.all_reduce(norm, dist.ReduceOp.MAX)
            return norm.item()
        total = self.squares(own, whole if rank == 0 else [], norm_type)
        dist.all_reduce(total)
        return total.item() ** (1 / norm_type)

    def factor(self, max_norm, norm, own, whole, norm_type):
        return min(1.0, max_norm / norm) if norm else 1.0

    def scale(self, tensors, factor):
        for tensor in tensors:
            tensor *= factor

    def __call__(self, shard, padding, whole, max_norm, norm_type=2.0):
        own, distinct = self.own(shard, padding), self.distinct(whole)
        norm = self.join(own, distinct, norm_type)
        self.scale([own, *distinct], self.factor(max_norm, norm, own, distinct, norm_type))
        return norm


def with_(**changed):
    sound = type("Changed", (SoundClip,), changed)()
    return lambda shard, padding, whole, max_norm, norm_type=2.0: sound(shard, padding, whole, max_norm, norm_type)


# %% lab03.1: borrowed
def shard_pieces(sizes, world_size):
    import dtlab.parallel

    return right_pieces(sizes, world_size)


# %% lab03.1: whole parameters (one after the other)
def shard_pieces(sizes, world_size):
    found = [[] for _ in range(world_size)]
    for number, size in enumerate(sizes):
        found[number % world_size].append((number, 0, size))
    return max(sum(end for _, _, end in its) for its in found), found


# %% lab03.1: whole parameters (the emptiest rank takes the largest)
def shard_pieces(sizes, world_size):
    found, held = [[] for _ in range(world_size)], [0] * world_size
    for size, number in sorted(((size, number) for number, size in enumerate(sizes)), reverse=True):
        owner = held.index(min(held))
        found[owner].append((number, 0, size))
        held[owner] += size
    return max(held), found


# %% lab03.1: remainder dropped
def shard_pieces(sizes, world_size):
    k, start, found = sum(sizes) // world_size, 0, [[] for _ in range(world_size)]
    for number, size in enumerate(sizes):
        for r in range(world_size):
            low, high = max(r * k - start, 0), min((r + 1) * k - start, size)
            if low < high:
                found[r].append((number, low, high))
        start += size
    return k, found


# %% lab03.1: shards of two lengths
def shard_pieces(sizes, world_size):
    elements = [(number, i) for number, size in enumerate(sizes) for i in range(size)]
    k, rest = divmod(len(elements), world_size)
    found, first = [], 0
    for r in range(world_size):
        its = elements[first : first + k + (r < rest)]
        first += k + (r < rest)
        numbers = sorted({number for number, _ in its})
        found.append([(n, min(i for m, i in its if m == n), 1 + max(i for m, i in its if m == n)) for n in numbers])
    return k + (rest > 0), found


# %% lab03.1: each parameter cut
def shard_pieces(sizes, world_size):
    ks = [-(-size // world_size) for size in sizes]
    found = [[(n, r * k, min((r + 1) * k, size)) for n, (k, size) in enumerate(zip(ks, sizes)) if r * k < size]
             for r in range(world_size)]
    return sum(ks), found


# %% lab03.1: places in the line
def shard_pieces(sizes, world_size):
    k, found = right_pieces(sizes, world_size)
    return k, [[(n, a + sum(sizes[:n]), b + sum(sizes[:n])) for n, a, b in its] for its in found]


# %% lab03.1: last element inside
def shard_pieces(sizes, world_size):
    k, found = right_pieces(sizes, world_size)
    return k, [[(n, a, b - 1) for n, a, b in its] for its in found]


# %% lab03.1: another shard length (rounded down)
def shard_pieces(sizes, world_size):
    return sum(sizes) // world_size, right_pieces(sizes, world_size)[1]


# %% lab03.1: another shard length (an element too many where the ranks divide it)
def shard_pieces(sizes, world_size):
    return sum(sizes) // world_size + 1, right_pieces(sizes, world_size)[1]


# %% lab03.1: only its own pieces
def shard_pieces(sizes, world_size):
    k, found = right_pieces(sizes, world_size)
    return k, found[rank]


# %% lab03.2: borrowed (torch's own)
class StageOne:
    def __init__(self, groups, optimizer_class):
        from torch.distributed.optim import ZeroRedundancyOptimizer

    def step(self):
        pass


# %% lab03.2: unsharded states
class StageOne:
    def __init__(self, groups, optimizer_class):
        self.optimizer = optimizer_class(groups)

    def step(self):
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(p.grad)
                p.grad /= world_size
        self.optimizer.step()


# %% lab03.2: no all-gather
class StageOne(SoundOne):
    def gather(self):
        full = self.padded(torch.cat([p.detach().flatten() for p in self.params]))
        if self.parts:
            own = torch.cat([part.detach() for part in self.parts])
            full[rank * self.k : rank * self.k + len(own)] = own
        return full


# %% lab03.2: forgets padding
class StageOne(SoundOne):
    def padded(self, flat):
        return flat

    def reduce(self):
        full = self.line()
        own = full.new_empty(self.k if (rank + 1) * self.k <= len(full) else len(full) - rank * self.k)
        reduce_scatter(own, full)
        return own / world_size


# %% lab03.2: remainder dropped
class StageOne(SoundOne):
    def length(self):
        return self.total // world_size

    def padded(self, flat):
        return flat[: self.k * world_size]

    @torch.no_grad()
    def write(self, full):
        old = torch.cat([p.detach().flatten() for p in self.params])
        old[: len(full)] = full
        super().write(old)


# %% lab03.2: own gradient (nothing is reduced)
class StageOne(SoundOne):
    def reduce(self):
        return self.line().view(world_size, -1)[rank].clone()


# %% lab03.2: sum for mean
class StageOne(SoundOne):
    def mean(self, own):
        return own


# %% lab03.2: averages twice
class StageOne(SoundOne):
    def line(self):
        return super().line() / world_size


# %% lab03.2: one group's settings
class StageOne(SoundOne):
    def settings(self, group):
        return super().settings(self.groups[0])


# %% lab03.2: states made anew
class StageOne(SoundOne):
    def step(self):
        self.make()
        super().step()


# %% lab03.2: gradients never cleared
class StageOne(SoundOne):
    before = 0

    def mean(self, own):
        self.before = self.before + own / world_size
        return self.before


# %% lab03.2: forgets missing gradients
class StageOne(SoundOne):
    def grad(self, p):
        return p.grad


# %% lab03.2: not on every rank (returns where it has no piece)
class StageOne(SoundOne):
    def step(self):
        if self.parts:
            super().step()


# %% lab03.2: all_reduce for reduce_scatter
class StageOne(SoundOne):
    def reduce(self):
        full = self.line()
        dist.all_reduce(full)
        return full.view(world_size, -1)[rank] / world_size


# %% lab03.2: a call a piece (each parameter alone)
class StageOne(SoundOne):
    def gather(self):
        full, start = [], 0
        for p in self.params:
            value = p.detach().flatten().clone()
            for owner in range(world_size):
                low, high = max(owner * self.k - start, 0), min((owner + 1) * self.k - start, p.numel())
                if low < high:
                    part = value[low:high].clone()
                    if owner == rank:
                        before = max(0, start - rank * self.k)
                        part.copy_(torch.cat([its.detach() for its in self.parts])[before : before + high - low])
                    dist.broadcast(part, owner)
                    value[low:high] = part
            start += p.numel()
            full.append(value)
        return torch.cat(full)


# %% lab03.2: gathers gradients
class StageOne(SoundOne):
    def reduce(self):
        full = self.line()
        every = torch.empty(world_size * len(full), dtype=torch.float64)
        all_gather(every, full)
        return every.view(world_size, world_size, -1).mean(0)[rank]

    def gather(self):
        own = super().gather()
        reduce_scatter(own.new_empty(self.k), own)
        return own


# %% lab03.2: reads before wait
class StageOne(SoundOne):
    def reduce(self):
        full = self.line()
        own = full.new_empty(self.k)
        work = dist.reduce_scatter(own, list(full.chunk(world_size)), async_op=True)
        mean = own / world_size
        work.wait()
        return mean


# %% lab03.2:  (four ranks only)
class StageOne(SoundOne):
    def mean(self, own):
        return own / 4


# %% lab03.2:  (every step on rank 0 only)
class StageOne(SoundOne):
    def update(self, own):
        if rank == 0:
            super().update(own)


# %% lab03.2: missing gradients shift
class StageOne(SoundOne):
    def line(self):
        return self.padded(torch.cat([p.grad.flatten() for p in self.params if p.grad is not None]))


# %% lab03.2: settings lost (only lr)
class StageOne(SoundOne):
    def settings(self, group):
        return {"lr": group["lr"]}


# %% lab03.3: frees nothing (the hook returns None)
class StageTwo(SoundTwo):
    def free(self, p):
        return None

    def clear(self):
        super().clear()
        for p in self.params:
            p.grad = None

    def arrived(self, p):
        self.before = getattr(self, "before", {})
        full = p.grad
        p.grad = full - self.before.get(p, 0)
        super().arrived(p)
        p.grad = full
        self.before[p] = full.clone()

    def step(self):
        super().step()
        self.before = {}


# %% lab03.3: frees nothing (reduces after backward)
class StageTwo(SoundTwo):
    def hook(self, p):
        pass

    def step(self):
        for p in self.params:
            self.arrived(p)
        super().step()


# %% lab03.3: frees nothing (zeroed, not freed)
class StageTwo(SoundTwo):
    def free(self, p):
        p.grad.zero_()


# %% lab03.3: frees nothing (asynchronous, all at the end)
class StageTwo(SoundTwo):
    def arrived(self, p):
        self.open = getattr(self, "open", [])
        flat = p.grad.flatten() / world_size
        for owner, low, high, at in self.owners[p]:
            part = flat[low:high].clone()
            self.open.append((dist.reduce(part, owner, async_op=True), owner, at, part, p.grad))
        p.grad = None

    def step(self):
        for work, owner, at, part, _ in self.open:
            work.wait()
            if owner == rank:
                self.keep(at, part)
        self.open = []
        super().step()


# %% lab03.3: hook before accumulation
class StageTwo(SoundTwo):
    def hook(self, p):
        p.register_hook(lambda _: self.arrived(p))


# %% lab03.3: only the last micro-batch
class StageTwo(SoundTwo):
    def keep(self, at, part):
        self.own[at : at + len(part)] = part


# %% lab03.3: all_reduce for reduce_scatter
class StageTwo(SoundTwo):
    def to_owner(self, part, owner):
        dist.all_reduce(part)


# %% lab03.3: gathers gradients
class StageTwo(SoundTwo):
    def to_owner(self, part, owner):
        every = [torch.empty_like(part) for _ in range(world_size)]
        dist.all_gather(every, part)
        part.copy_(sum(every))


# %% lab03.3:  (everything is reduced to rank 0)
class StageTwo(SoundTwo):
    def to_owner(self, part, owner):
        dist.reduce(part, 0)
        part *= 1 if owner == 0 else 2


# %% lab03.3: hook before accumulation (the loop's last parameter)
class StageTwo(SoundTwo):
    def hook(self, p):
        p.register_post_accumulate_grad_hook(lambda _: self.arrived(self.params[-1]))


# %% lab03.3: late binding
class StageTwo(SoundTwo):
    def make(self):
        super().make()
        self.owners = dict.fromkeys(self.params, self.owners[self.params[-1]])


# %% lab03.3: steps with zeros (cleared before the step)
class StageTwo(SoundTwo):
    def update(self, own):
        start = 0
        for part in self.parts:
            part.grad = own[start : start + part.numel()]
            start += part.numel()
        self.clear()
        if self.optimizer:
            self.optimizer.step()


# %% lab03.4: local norm (clip_grad_norm_ of the own part)
def clip_shards(shard, padding, whole, max_norm, norm_type=2.0):
    own = shard[: len(shard) - padding]
    every = torch.cat([own, *(t.flatten() for t in whole)])
    norm = torch.linalg.vector_norm(every, norm_type).item()
    for tensor in [own, *whole]:
        tensor *= min(1.0, max_norm / norm)
    return norm


# %% lab03.4: replicated counted again
def clip_shards(shard, padding, whole, max_norm, norm_type=2.0):
    own = shard[: len(shard) - padding]
    total = sum((t.abs() ** 2).sum() for t in [own, *whole])
    dist.all_reduce(total)
    for tensor in [own, *whole]:
        tensor *= min(1.0, max_norm / total.sqrt())
    return total.sqrt()


# %% lab03.4: norms added
def join(self, own, whole, norm_type):
    norm = own.norm() + (sum(t.norm() for t in whole) if rank == 0 else 0)
    dist.all_reduce(norm)
    return norm.item()

clip_shards = with_(join=join)


# %% lab03.4: padding counted
clip_shards = with_(own=lambda self, shard, padding: shard)


# %% lab03.4: tied counted twice
class Twice(SoundClip):
    def join(self, own, whole, norm_type):
        return super().join(own, whole * (1 + self.tied), norm_type)

    def distinct(self, whole):
        self.tied = len(whole) > len(super().distinct(whole))
        return super().distinct(whole)

def clip_shards(shard, padding, whole, max_norm, norm_type=2.0):
    return Twice()(shard, padding, whole, max_norm, norm_type)


# %% lab03.4: always the 2-norm
class Two(SoundClip):
    def join(self, own, whole, norm_type):
        return super().join(own, whole, 2.0)

def clip_shards(shard, padding, whole, max_norm, norm_type=2.0):
    return Two()(shard, padding, whole, max_norm, norm_type)


# %% lab03.4: largest values added
class Added(SoundClip):
    def join(self, own, whole, norm_type):
        if not math.isinf(norm_type):
            return super().join(own, whole, norm_type)
        norm = torch.tensor(max([0.0, *(t.abs().max().item() for t in [own, *whole] if t.numel())]), dtype=torch.float64)
        dist.all_reduce(norm)
        return norm.item()

def clip_shards(shard, padding, whole, max_norm, norm_type=2.0):
    return Added()(shard, padding, whole, max_norm, norm_type)


# %% lab03.4: nothing clipped (copies are scaled)
def scale(self, tensors, factor):
    for tensor in tensors:
        tensor = tensor * factor

clip_shards = with_(scale=scale)


# %% lab03.4: scaled up
clip_shards = with_(factor=lambda self, max_norm, norm, *_: max_norm / (norm or max_norm))


# %% lab03.4: scaled twice
def clip_shards(shard, padding, whole, max_norm, norm_type=2.0):
    sound = SoundClip()
    own = sound.own(shard, padding)
    norm = sound.join(own, sound.distinct(whole), norm_type)
    sound.scale([own, *whole], sound.factor(max_norm, norm, own, whole, norm_type))
    return norm


# %% lab03.4: different factors
def factor(self, max_norm, norm, own, whole, norm_type):
    local = torch.linalg.vector_norm(torch.cat([own, *(t.flatten() for t in whole)]), norm_type).item()
    return min(1.0, max_norm / (local or 1.0))

clip_shards = with_(factor=factor)


# %% lab03.4: torch's 1e-6
clip_shards = with_(factor=lambda self, max_norm, norm, *_: min(1.0, max_norm / (norm + 1e-6)))


# %% lab03.4: divides by zero
clip_shards = with_(factor=lambda self, max_norm, norm, *_: torch.tensor(min(max_norm, norm), dtype=torch.float64) / norm)


# %% lab03.4: not on every rank (no call with nothing but padding)
class Quiet(SoundClip):
    def join(self, own, whole, norm_type):
        return super().join(own, whole, norm_type) if own.numel() else 1.0

def clip_shards(shard, padding, whole, max_norm, norm_type=2.0):
    return Quiet()(shard, padding, whole, max_norm, norm_type)


# %% lab03.4: padding counted (of the largest)
class Largest(SoundClip):
    def join(self, own, whole, norm_type):
        return super().join(self.given if math.isinf(norm_type) else own, whole, norm_type)

    def own(self, shard, padding):
        self.given = shard
        return super().own(shard, padding)

def clip_shards(shard, padding, whole, max_norm, norm_type=2.0):
    return Largest()(shard, padding, whole, max_norm, norm_type)


# %% lab03.4: largest without its sign
def join(self, own, whole, norm_type):
    if not math.isinf(norm_type):
        return SoundClip.join(self, own, whole, norm_type)
    norm = torch.tensor(max([0.0, *(t.max().item() for t in [own, *whole] if t.numel())]), dtype=torch.float64)
    dist.all_reduce(norm, dist.ReduceOp.MAX)
    return norm.item()

clip_shards = with_(join=join)


# %% lab03.4: largest of nothing
def join(self, own, whole, norm_type):
    if not math.isinf(norm_type):
        return SoundClip.join(self, own, whole, norm_type)
    norm = torch.stack([t.abs().max() for t in [own, *whole]]).max()
    dist.all_reduce(norm, dist.ReduceOp.MAX)
    return norm.item()

clip_shards = with_(join=join)


# %% lab03.4: masked by zero
def own(self, shard, padding):
    shard *= torch.arange(len(shard)) < len(shard) - padding
    return shard

clip_shards = with_(own=own)


# %% lab03.4: gathers gradients (as they are)
class Gathers(SoundClip):
    def own(self, shard, padding):
        self.padding = padding
        return super().own(shard, padding)

    def join(self, own, whole, norm_type):
        own = torch.cat([own, own.new_zeros(self.padding)])
        every = own.new_empty(len(own) * world_size)
        all_gather(every, own)
        return torch.linalg.vector_norm(torch.cat([every, *(t.flatten() for t in whole)]), norm_type).item()

def clip_shards(shard, padding, whole, max_norm, norm_type=2.0):
    return Gathers()(shard, padding, whole, max_norm, norm_type)


# %% lab03.4: equal taken for tied
def distinct(self, whole):
    found = []
    for tensor in whole:
        if not any(tensor.shape == other.shape and torch.equal(tensor, other) for other in found):
            found.append(tensor)
    return found

clip_shards = with_(distinct=distinct)


# %% lab03.4: no shard (cut by a negative index)
clip_shards = with_(own=lambda self, shard, padding: shard[:-padding])


# %% lab03.4: always the square root
def join(self, own, whole, norm_type):
    norm = SoundClip.join(self, own, whole, norm_type)
    return norm if math.isinf(norm_type) else norm ** (norm_type / 2)

clip_shards = with_(join=join)


# %% lab03.4: only the shard scaled
clip_shards = with_(scale=lambda self, tensors, factor: SoundClip.scale(self, tensors[:1], factor))


# %% lab03.4: no norm
def clip_shards(*given):
    with_()(*given)


# %% lab03.4: divides by zero (of Python)
clip_shards = with_(factor=lambda self, max_norm, norm, *_: min(1.0, max_norm / norm))


# %% lab03.5: borrowed (torch's own)
class StageThree(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        from torch.distributed.fsdp import fully_shard
        self.layers = torch.nn.Sequential(*layers)
        fully_shard(self.layers)

    def forward(self, x):
        return self.layers(x)


# %% lab03.5: whole layers pile up (the given modules are kept)
class StageThree(SoundThree):
    def emptied(self, layer):
        return layer


# %% lab03.5: whole layers pile up (a shard is a view)
class StageThree(SoundThree):
    def shard(self, flat):
        return torch.nn.Parameter(flat.view(world_size, -1)[rank])


# %% lab03.5: gathers once and keeps
class StageThree(SoundThree):
    def gather(self, number, shard):
        self.__dict__.setdefault("kept", {})[number] = super().gather(number, shard)
        return self.kept[number]

    def gather_again(self, number, shard):
        return self.kept.pop(number)


# %% lab03.5: gathers once and keeps (autograd saves the weights)
class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard):
        full = shard.new_empty(len(shard) * world_size)
        all_gather(full, shard)
        return full

    @staticmethod
    def backward(ctx, grad):
        part = grad.new_empty(len(grad) // world_size)
        reduce_scatter(part, grad.contiguous())
        return part / world_size


class StageThree(SoundThree):
    def forward(self, x):
        for number in self.order:
            full = Gathered.apply(self.shards[number])
            x = self.compute(number, full, x)
            del full
        return x


# %% lab03.5: whole layers pile up (gathered again, all at once, before backward)
class StageThree(SoundThree):
    def forward(self, x):
        y = super().forward(x)
        self.__dict__["whole"] = {}
        y.register_hook(self.all)
        return y

    def all(self, grad):
        for number in set(self.order):
            self.whole[number] = self.gather(number, self.shards[number].detach())

    def gather_again(self, number, shard):
        return self.whole[number]


# %% lab03.5: whole layers pile up (whole gradients wait for the end)
class StageThree(SoundThree):
    def reduce(self, number, shard, grad):
        self.__dict__.setdefault("grads", []).append(grad)
        return super().reduce(number, shard, grad)


# %% lab03.5: sum for mean
class StageThree(SoundThree):
    def reduce(self, number, shard, grad):
        return super().reduce(number, shard, grad) * world_size


# %% lab03.5: averages twice
class StageThree(SoundThree):
    def reduce(self, number, shard, grad):
        return super().reduce(number, shard, grad / world_size)


# %% lab03.5: all_reduce for reduce_scatter
class StageThree(SoundThree):
    def reduce(self, number, shard, grad):
        dist.all_reduce(grad)
        return grad.view(world_size, -1)[rank] / world_size


# %% lab03.5: forgets padding
class StageThree(SoundThree):
    def padded(self, flat):
        return flat

    def shard(self, flat):
        k = -(-len(flat) // world_size)
        return torch.nn.Parameter(flat[rank * k : (rank + 1) * k].clone())


# %% lab03.5: frees before backward needs it
class StageThree(SoundThree):
    def forward(self, x):
        for number in self.order:
            full = Gathered.apply(self.shards[number])
            x = self.compute(number, full, x)
            full.untyped_storage().resize_(0)
        return x


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard):
        full = shard.new_empty(len(shard) * world_size)
        all_gather(full, shard)
        return full

    @staticmethod
    def backward(ctx, grad):
        part = grad.new_empty(len(grad) // world_size)
        reduce_scatter(part, grad.contiguous())
        return part / world_size


# %% lab03.5: not the shards (the whole flat layers)
class StageThree(SoundThree):
    def shard(self, flat):
        return torch.nn.Parameter(flat.clone())

    def gather(self, number, shard):
        return shard.clone()

    def reduce(self, number, shard, grad):
        part = grad.new_empty(len(grad) // world_size)
        reduce_scatter(part, grad)
        full = torch.empty_like(grad)
        all_gather(full, part / world_size)
        return full


# %% lab03.5: no gradient for the shards
class StageThree(SoundThree):
    def reduce(self, number, shard, grad):
        super().reduce(number, shard, grad)


# %% lab03.5: no gradient for the input
class StageThree(SoundThree):
    def forward(self, x):
        return super().forward(x.detach())


# %% lab03.5: one of two uses (.grad is set, not added to)
class StageThree(SoundThree):
    def reduce(self, number, shard, grad):
        self.shards[number].grad = super().reduce(number, shard, grad)


# %% lab03.5:  (four ranks only)
class StageThree(SoundThree):
    def reduce(self, number, shard, grad):
        return super().reduce(number, shard, grad) * world_size / 4


# %% lab03.5: hidden shards
class StageThree(SoundThree):
    def __init__(self, layers):
        super().__init__(layers)
        own = list(self.shards)
        del self.shards
        self.shards = own


# %% lab03.5: fewer chunks than ranks
class StageThree(SoundThree):
    def padded(self, flat):
        return flat

    def shard(self, flat):
        return torch.nn.Parameter(flat.chunk(world_size)[rank].clone())


# %% lab03.5: a part computes (parameters cut in place)
class StageThree(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = torch.nn.Sequential(*layers)
        for p in self.layers.parameters():
            p.data = p.detach().flatten().chunk(world_size)[rank].clone()

    def forward(self, x):
        return self.layers(x)
