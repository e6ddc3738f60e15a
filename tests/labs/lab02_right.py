# ruff: noqa
import contextlib

import torch
import torch.distributed as dist

rank, world_size = dist.get_rank(), dist.get_world_size()


# %% lab02.1: tensor by tensor
def equal_start(model):
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)


# %% lab02.1: one flat buffer for each kind
@torch.no_grad()
def equal_start(model):
    kinds = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        kinds.setdefault(tensor.dtype, []).append(tensor)
    for tensors in kinds.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.broadcast(flat, 0)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
            tensor.copy_(part.view_as(tensor))


# %% lab02.1: module by module, no name twice
def equal_start(model):
    seen = set()
    for module in model.modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                with torch.no_grad():
                    dist.broadcast(tensor, src=0)
    return model


# %% lab02.2: count first, then one flat reduction
def token_mean_backward(model, micro_batches, loss_of):
    loss_sum, tokens = 0.0, 0
    for batch in micro_batches:
        loss, count = loss_of(model, batch)
        loss.backward()
        loss_sum, tokens = loss_sum + loss.item(), tokens + count
    trained = [p for p in model.parameters() if p.requires_grad]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    flat = torch.cat([torch.tensor([loss_sum, tokens], dtype=torch.float64), *(g.flatten() for g in grads)])
    dist.all_reduce(flat)
    total = max(flat[1].item(), 1)
    for p, part in zip(trained, flat[2:].split([p.numel() for p in trained])):
        p.grad = part.view_as(p) / total
    return flat[0].item() / total


# %% lab02.2: divide the loss, reduce parameter by parameter
def token_mean_backward(model, micro_batches, loss_of):
    pairs = [loss_of(model, batch) for batch in micro_batches]
    numbers = torch.tensor([float(sum(n for _, n in pairs)), float(sum(loss.item() for loss, _ in pairs))],
                           dtype=torch.float64)
    dist.all_reduce(numbers)
    total = max(1.0, numbers[0].item())
    for loss, _ in pairs:
        (loss * world_size / total).backward()
    for p in model.parameters():
        if p.requires_grad:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
            p.grad /= world_size
    return numbers[1] / total


# %% lab02.3: a set of what is there
class Buckets:
    def __init__(self, model, bucket_bytes):
        self.buckets = []
        room = 0
        for p in reversed([p for p in model.parameters() if p.requires_grad]):
            if not self.buckets or p.nbytes > room:
                self.buckets.append([])
                room = bucket_bytes
            self.buckets[-1].append(p)
            room -= p.nbytes
            p.register_post_accumulate_grad_hook(self.arrived)
        self.there, self.sent = set(), []

    def arrived(self, p):
        self.there.add(p)
        while len(self.sent) < len(self.buckets) and self.there.issuperset(self.buckets[len(self.sent)]):
            self.send()

    def send(self):
        bucket = self.buckets[len(self.sent)]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in bucket])
        dist.all_reduce(flat)
        self.sent.append(flat)

    def finish(self):
        while len(self.sent) < len(self.buckets):
            self.send()
        for bucket, flat in zip(self.buckets, self.sent):
            for p, part in zip(bucket, flat.split([p.numel() for p in bucket])):
                p.grad = part.view_as(p) / world_size
        self.there, self.sent = set(), []


# %% lab02.3: flat buffers, filled by hooks that get the gradient
class Buckets:
    def __init__(self, model, bucket_bytes):
        parameters = [p for p in model.parameters() if p.requires_grad][::-1]
        groups, size = [[]], 0
        for p in parameters:
            if groups[-1] and size + p.nbytes > bucket_bytes:
                groups.append([])
                size = 0
            groups[-1].append(p)
            size += p.nbytes
        self.groups = groups
        self.flats = [torch.zeros(sum(p.numel() for p in group), dtype=torch.float64) for group in groups]
        self.reset()
        for number, group in enumerate(groups):
            start = 0
            for p in group:
                view = self.flats[number][start : start + p.numel()].view(p.shape)
                start += p.numel()
                p.register_hook(lambda grad, number=number, view=view: self.arrived(number, view, grad))

    def reset(self):
        self.missing, self.next = [len(group) for group in self.groups], 0

    def arrived(self, number, view, grad):
        view.copy_(grad)
        self.missing[number] -= 1
        while self.next < len(self.groups) and self.missing[self.next] == 0:
            self.send()

    def send(self):
        self.flats[self.next].div_(world_size)
        dist.all_reduce(self.flats[self.next])
        self.next += 1

    def finish(self):
        while self.next < len(self.groups):
            self.send()
        for group, flat in zip(self.groups, self.flats):
            start = 0
            for p in group:
                p.grad = flat[start : start + p.numel()].view(p.shape).clone()
                start += p.numel()
            flat.zero_()
        self.reset()


# %% lab02.3: a missing gradient stays None where nobody has it
class Buckets:
    def __init__(self, model, bucket_bytes):
        self.plan, self.count, self.works = [], {}, []
        for p in reversed(list(filter(lambda p: p.requires_grad, model.parameters()))):
            if not self.plan or sum(q.nbytes for q in self.plan[-1]) + p.nbytes > bucket_bytes:
                self.plan.append([])
            self.plan[-1].append(p)
            number = len(self.plan) - 1
            p.register_post_accumulate_grad_hook(lambda _, number=number: self.one_more(number))

    def one_more(self, number):
        self.count[number] = self.count.get(number, 0) + 1
        while len(self.works) < len(self.plan) and self.count.get(len(self.works), 0) == len(self.plan[len(self.works)]):
            self.go()

    def go(self):
        bucket = self.plan[len(self.works)]
        parts = [p.grad.reshape(-1) if p.grad is not None else p.new_zeros(p.numel()) for p in bucket]
        flat = torch.cat(parts).detach()
        self.works.append((bucket, flat, dist.all_reduce(flat, async_op=True)))

    def finish(self):
        [self.go() for _ in range(len(self.plan) - len(self.works))]
        for bucket, flat, work in self.works:
            work.wait()
            offset = 0
            for p in bucket:
                mean = flat[offset : offset + p.numel()].view(p.shape) / world_size
                offset += p.numel()
                if p.grad is not None:
                    p.grad.copy_(mean)
                elif mean.any():
                    p.grad = mean
        self.works.clear()
        self.count.clear()


# %% lab02.4: a set of what is there
class OverlappedBuckets:
    def __init__(self, model, bucket_bytes):
        self.buckets, size = [[]], 0
        for p in reversed([p for p in model.parameters() if p.requires_grad]):
            if self.buckets[-1] and size + p.nbytes > bucket_bytes:
                self.buckets.append([])
                size = 0
            self.buckets[-1].append(p)
            size += p.nbytes
            p.register_post_accumulate_grad_hook(self.arrived)
        self.there, self.sent, self.quiet = set(), [], False

    @contextlib.contextmanager
    def no_sync(self):
        self.quiet = True
        try:
            yield
        finally:
            self.quiet = False

    def arrived(self, p):
        if self.quiet:
            return
        self.there.add(p)
        while len(self.sent) < len(self.buckets) and self.there.issuperset(self.buckets[len(self.sent)]):
            self.send()

    def send(self):
        bucket = self.buckets[len(self.sent)]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in bucket])
        self.sent.append((flat, dist.all_reduce(flat, async_op=True)))

    def finish(self):
        while len(self.sent) < len(self.buckets):
            self.send()
        for bucket, (flat, work) in zip(self.buckets, self.sent):
            work.wait()
            for p, part in zip(bucket, flat.split([p.numel() for p in bucket])):
                p.grad = part.view_as(p) / world_size
        self.there, self.sent = set(), []


# %% lab02.4: gradients live in the buckets
class OverlappedBuckets:
    def __init__(self, model, bucket_bytes):
        self.sync = True
        self.groups = []
        for p in reversed([p for p in model.parameters() if p.requires_grad]):
            if not self.groups or sum(q.nbytes for q in self.groups[-1]) + p.nbytes > bucket_bytes:
                self.groups.append([])
            self.groups[-1].append(p)
        self.flats = [torch.empty(sum(p.numel() for p in group), dtype=group[0].dtype) for group in self.groups]
        self.left = [set(group) for group in self.groups]
        self.works = []
        for number, group in enumerate(self.groups):
            for p in group:
                p.register_post_accumulate_grad_hook(lambda p, number=number: self.hook(number, p))

    class Quiet:
        def __init__(self, owner):
            self.owner = owner

        def __enter__(self):
            self.owner.sync = False

        def __exit__(self, *_):
            self.owner.sync = True

    def no_sync(self):
        return self.Quiet(self)

    def hook(self, number, p):
        if self.sync:
            self.left[number].discard(p)
            while len(self.works) < len(self.groups) and not self.left[len(self.works)]:
                self.start()

    def views(self, number):
        group = self.groups[number]
        return zip(group, self.flats[number].split([p.numel() for p in group]))

    def start(self):
        number = len(self.works)
        for p, view in self.views(number):
            view.copy_(p.grad.flatten()) if p.grad is not None else view.zero_()
        self.flats[number] /= world_size
        self.works.append(dist.all_reduce(self.flats[number], async_op=True))

    def finish(self):
        while len(self.works) < len(self.groups):
            self.start()
        for work in self.works:
            work.wait()
        for number in range(len(self.groups)):
            for p, view in self.views(number):
                p.grad = view.view_as(p).clone()
        self.left = [set(group) for group in self.groups]
        self.works = []


# %% lab02.5: the six of them
diagnosis = {"A": "mean of means", "B": "sends after backward", "C": "steps before wait", "D": "sum for mean",
             "E": "reduces every micro-batch", "F": "no broadcast"}
