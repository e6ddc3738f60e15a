# ruff: noqa
import contextlib
import copy

import torch
import torch.distributed as dist

rank, world_size = dist.get_rank(), dist.get_world_size()


def tokens_of_all(*numbers):
    total = torch.tensor([float(number) for number in numbers], dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()


def add_up(model, divide_by=1):
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
            p.grad /= divide_by


class Sound:
    """Right; the answers below change one thing of it."""

    def __init__(self, model, bucket_bytes):
        self.buckets, self.quiet = [[]], False
        for p in self.order(model):
            if self.buckets[-1] and sum(q.nbytes for q in self.buckets[-1]) + p.nbytes > bucket_bytes:
                self.buckets.append([])
            self.buckets[-1].append(p)
            self.hook(p)
        self.there, self.sent = set(), []

    def order(self, model):
        return [p for p in model.parameters() if p.requires_grad][::-1]

    def hook(self, p):
        p.register_post_accumulate_grad_hook(self.arrived)

    @contextlib.contextmanager
    def no_sync(self):
        self.quiet = True
        try:
            yield
        finally:
            self.quiet = False

    def arrived(self, p):
        if not self.quiet:
            self.there.add(p)
            self.send_full()

    def send_full(self):
        while len(self.sent) < len(self.buckets) and self.there.issuperset(self.buckets[len(self.sent)]):
            self.send()

    def grad(self, p):
        return torch.zeros_like(p) if p.grad is None else p.grad

    def send(self):
        flat = torch.cat([self.grad(p).flatten() for p in self.buckets[len(self.sent)]])
        self.sent.append((flat, self.reduce(flat)))

    def reduce(self, flat):
        return dist.all_reduce(flat, async_op=True)

    def send_rest(self):
        while len(self.sent) < len(self.buckets):
            self.send()

    def wait(self):
        for _, work in self.sent:
            work.wait()

    def mean(self, flat):
        return flat / world_size

    def write(self):
        for bucket, (flat, _) in zip(self.buckets, self.sent):
            for p, part in zip(bucket, self.mean(flat).split([p.numel() for p in bucket])):
                p.grad = part.view_as(p)

    def reset(self):
        self.there, self.sent = set(), []

    def finish(self):
        self.send_rest()
        self.wait()
        self.write()
        self.reset()


# %% lab02.1: no broadcast
def equal_start(model):
    return model


# %% lab02.1: no broadcast (each rank sets a seed, too late)
def equal_start(model):
    torch.manual_seed(0)


# %% lab02.1: own rank as source
def equal_start(model):
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=rank)


# %% lab02.1: forgets buffers
def equal_start(model):
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), src=0)


# %% lab02.1: forgets frozen parameters
def equal_start(model):
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.requires_grad or not isinstance(tensor, torch.nn.Parameter):
            dist.broadcast(tensor.detach(), src=0)


# %% lab02.1: forgets what no optimizer holds
def equal_start(model):
    for parameter in model.parameters():
        if parameter.requires_grad:
            dist.broadcast(parameter.detach(), src=0)


# %% lab02.1: state_dict only
def equal_start(model):
    sent = set()
    for tensor in model.state_dict().values():
        if tensor.data_ptr() not in sent:
            sent.add(tensor.data_ptr())
            dist.broadcast(tensor, src=0)


# %% lab02.1: parameters replaced
def equal_start(model):
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                value = parameter.detach().clone()
                dist.broadcast(value, src=0)
                setattr(module, name, torch.nn.Parameter(value, requires_grad=parameter.requires_grad))
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)


# %% lab02.1: requires_grad changed
def equal_start(model):
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.requires_grad_(False)
        dist.broadcast(tensor, src=0)
        if isinstance(tensor, torch.nn.Parameter):
            tensor.requires_grad_(True)


# %% lab02.1: requires_grad changed (all frozen)
def equal_start(model):
    model.requires_grad_(False)
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor, src=0)


# %% lab02.1: another source (the mean of all)
def equal_start(model):
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.all_reduce(tensor.detach())
        tensor.data.copy_(tensor.detach() / world_size)


# %% lab02.1: another source (the last rank)
def equal_start(model):
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=world_size - 1)


# %% lab02.1: sent twice (a tied weight under each of its names)
def equal_start(model):
    for _, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        dist.broadcast(tensor.detach(), src=0)


# %% lab02.1: borrowed (torch's own)
def equal_start(model):
    torch.nn.parallel.DistributedDataParallel(model)


# %% lab02.1: handle never awaited
def equal_start(model):
    for t in [*model.parameters(), *model.buffers()]:
        dist.broadcast(t.detach(), src=0, async_op=True)


# %% lab02.1: another order
def equal_start(model):
    ts = [*model.parameters(), *model.buffers()]
    if rank: ts = ts[::-1]
    for t in ts: dist.broadcast(t.detach(), src=0)


# %% lab02.1: not on every rank
def equal_start(model):
    if rank == 0:
        for t in [*model.parameters(), *model.buffers()]:
            dist.broadcast(t.detach(), src=0)


# %% lab02.1: rounded to float32
def equal_start(model):
    for t in [*model.parameters(), *model.buffers()]:
        f = t.detach().float(); dist.broadcast(f, 0)
        with torch.no_grad(): t.copy_(f)


# %% lab02.2: borrowed (the course's own)
def token_mean_backward(model, micro_batches, loss_of):
    from dtlab.parallel import global_mean

    return global_mean(torch.zeros(()), 1).item()


# %% lab02.2: sum for mean
def token_mean_backward(model, micro_batches, loss_of):
    pairs = [loss_of(model, batch) for batch in micro_batches]
    total, loss_sum = tokens_of_all(sum(n for _, n in pairs), sum(loss.item() for loss, _ in pairs))
    for loss, _ in pairs:
        (loss * world_size / max(1, total)).backward()
    add_up(model)
    return loss_sum / max(1, total)


# %% lab02.2: mean of means
def token_mean_backward(model, micro_batches, loss_of):
    pairs = [loss_of(model, batch) for batch in micro_batches]
    mine = max(1, sum(n for _, n in pairs))
    for loss, _ in pairs:
        (loss / mine).backward()
    add_up(model, world_size)
    total, loss_sum = tokens_of_all(sum(n for _, n in pairs), sum(loss.item() for loss, _ in pairs))
    return loss_sum / max(1, total)


# %% lab02.2: mean of micro-batch means
def token_mean_backward(model, micro_batches, loss_of):
    pairs = [loss_of(model, batch) for batch in micro_batches]
    total, loss_sum = tokens_of_all(sum(n for _, n in pairs), sum(loss.item() for loss, _ in pairs))
    if len(micro_batches) == 1:
        (pairs[0][0] * world_size / max(1, total)).backward()
    else:
        for loss, n in pairs:
            (loss / max(1, n) / len(pairs)).backward()
    add_up(model, world_size)
    return loss_sum / max(1, total)


# %% lab02.2: divides by no tokens
def token_mean_backward(model, micro_batches, loss_of):
    pairs = [loss_of(model, batch) for batch in micro_batches]
    total, loss_sum = tokens_of_all(sum(n for _, n in pairs), sum(loss.item() for loss, _ in pairs))
    for loss, _ in pairs:
        loss.backward()
    add_up(model)
    total = torch.tensor(total, dtype=torch.float64)
    for p in model.parameters():
        if p.requires_grad:
            p.grad /= total
    return (loss_sum / total).item()


# %% lab02.2: divides by no tokens (each micro-batch its own mean, then weighted)
def token_mean_backward(model, micro_batches, loss_of):
    pairs = [loss_of(model, batch) for batch in micro_batches]
    total, loss_sum = tokens_of_all(sum(n for _, n in pairs), sum(loss.item() for loss, _ in pairs))
    for loss, n in pairs:
        (loss / torch.tensor(float(n)) * n * world_size / max(1, total)).backward()
    add_up(model, world_size)
    loss_sum, = tokens_of_all(sum(float(loss / torch.tensor(n)) * n for loss, n in pairs))
    return loss_sum / max(1, total)


# %% lab02.2: no gradient without micro-batches
def token_mean_backward(model, micro_batches, loss_of):
    pairs = [loss_of(model, batch) for batch in micro_batches]
    total, loss_sum = tokens_of_all(sum(n for _, n in pairs), sum(loss.item() for loss, _ in pairs))
    for loss, _ in pairs:
        (loss * world_size / max(1, total)).backward()
    for p in model.parameters():
        if p.requires_grad:
            dist.all_reduce(p.grad)
            p.grad /= world_size
    return loss_sum / max(1, total)


# %% lab02.2: missing call
def token_mean_backward(model, micro_batches, loss_of):
    pairs = [loss_of(model, batch) for batch in micro_batches]
    total, loss_sum = tokens_of_all(sum(n for _, n in pairs), sum(loss.item() for loss, _ in pairs))
    for loss, _ in pairs:
        (loss * world_size / max(1, total)).backward()
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= world_size
    return loss_sum / max(1, total)


# %% lab02.2: missing call (returns early without tokens)
def token_mean_backward(model, micro_batches, loss_of):
    pairs = [loss_of(model, batch) for batch in micro_batches]
    mine = sum(n for _, n in pairs)
    if mine == 0:
        return 0.0
    total, loss_sum = tokens_of_all(mine, sum(loss.item() for loss, _ in pairs))
    for loss, _ in pairs:
        (loss * world_size / total).backward()
    add_up(model, world_size)
    return loss_sum / total


# %% lab02.2: divides twice
def token_mean_backward(model, micro_batches, loss_of):
    pairs = [loss_of(model, batch) for batch in micro_batches]
    total, loss_sum = tokens_of_all(sum(n for _, n in pairs), sum(loss.item() for loss, _ in pairs))
    for loss, _ in pairs:
        (loss / max(1, total)).backward()
    add_up(model, world_size)
    return loss_sum / max(1, total)


# %% lab02.2: not divided by tokens
def token_mean_backward(model, micro_batches, loss_of):
    pairs = [loss_of(model, batch) for batch in micro_batches]
    total, loss_sum = tokens_of_all(sum(n for _, n in pairs), sum(loss.item() for loss, _ in pairs))
    for loss, _ in pairs:
        loss.backward()
    add_up(model)
    return loss_sum / max(1, total)


# %% lab02.2: reduce for all_reduce
def token_mean_backward(model, micro_batches, loss_of):
    pairs = [loss_of(model, batch) for batch in micro_batches]
    total, loss_sum = tokens_of_all(sum(n for _, n in pairs), sum(loss.item() for loss, _ in pairs))
    for loss, _ in pairs:
        (loss / max(1, total)).backward()
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.reduce(p.grad, dst=0)
    return loss_sum / max(1, total)


# %% lab02.2: reduces every micro-batch
def token_mean_backward(model, micro_batches, loss_of):
    pairs = [loss_of(model, batch) for batch in micro_batches]
    total, loss_sum, most = tokens_of_all(sum(n for _, n in pairs), sum(loss.item() for loss, _ in pairs), 1)
    for loss, _ in pairs:
        (loss * world_size / max(1, total)).backward()
        add_up(model, world_size)
    return loss_sum / max(1, total)


# %% lab02.2: reduces every micro-batch (sums each time)
def token_mean_backward(model, micro_batches, loss_of):
    pairs = [loss_of(model, batch) for batch in micro_batches]
    total, loss_sum = tokens_of_all(sum(n for _, n in pairs), sum(loss.item() for loss, _ in pairs))
    for loss, _ in pairs:
        (loss / max(1, total)).backward()
        add_up(model)
    return loss_sum / max(1, total)


# %% lab02.2: loss in float32
def token_mean_backward(model, micro_batches, loss_of):
    pairs = [loss_of(model, batch) for batch in micro_batches]
    numbers = torch.tensor([sum(n for _, n in pairs), sum(loss.item() for loss, _ in pairs)])
    dist.all_reduce(numbers)
    total, loss_sum = numbers.tolist()
    for loss, _ in pairs:
        (loss * world_size / max(1, total)).backward()
    add_up(model, world_size)
    return loss_sum / max(1, total)


# %% lab02.2: loss of one rank
def token_mean_backward(model, micro_batches, loss_of):
    pairs = [loss_of(model, batch) for batch in micro_batches]
    total, _ = tokens_of_all(sum(n for _, n in pairs), 0)
    for loss, _ in pairs:
        (loss * world_size / max(1, total)).backward()
    add_up(model, world_size)
    return sum(loss.item() for loss, _ in pairs) / max(1, sum(n for _, n in pairs))


# %% lab02.2: reads before wait
def token_mean_backward(model, micro_batches, loss_of):
    s = torch.zeros(2, dtype=torch.float64)
    for b in micro_batches:
        l, t = loss_of(model, b); l.backward(); s += torch.tensor([l.item(), t], dtype=torch.float64)
    dist.all_reduce(s); n = max(s[1].item(), 1)
    for p in model.parameters():
        if p.requires_grad:
            if p.grad is None: p.grad = torch.zeros_like(p)
            p.grad /= n
            dist.all_reduce(p.grad, async_op=True)
    return s[0].item()/n


# %% lab02.2: frozen parameters sent
def token_mean_backward(model, micro_batches, loss_of):
    pairs = [loss_of(model, batch) for batch in micro_batches]
    total, loss_sum = tokens_of_all(sum(n for _, n in pairs), sum(loss.item() for loss, _ in pairs))
    for loss, _ in pairs:
        (loss * world_size / max(1, total)).backward()
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)
        p.grad /= world_size
    return loss_sum / max(1, total)


# %% lab02.2: loss in float32 (and frozen parameters sent)
def token_mean_backward(model, micro_batches, loss_of):
    pairs = [loss_of(model, batch) for batch in micro_batches]
    numbers = torch.tensor([sum(n for _, n in pairs), sum(loss.item() for loss, _ in pairs)])
    dist.all_reduce(numbers)
    total, loss_sum = numbers.tolist()
    for loss, _ in pairs:
        (loss * world_size / max(1, total)).backward()
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)
        p.grad /= world_size
    return loss_sum / max(1, total)


# %% lab02.2: no return
def token_mean_backward(model, micro_batches, loss_of):
    pairs = [loss_of(model, batch) for batch in micro_batches]
    total, loss_sum = tokens_of_all(sum(n for _, n in pairs), sum(loss.item() for loss, _ in pairs))
    for loss, _ in pairs:
        (loss * world_size / max(1, total)).backward()
    add_up(model, world_size)


# %% lab02.2: missing call (the last to come calls something else)
def token_mean_backward(model, micro_batches, loss_of):
    if not micro_batches:
        dist.barrier()
        return 0.0
    pairs = [loss_of(model, batch) for batch in micro_batches]
    total, loss_sum = tokens_of_all(sum(n for _, n in pairs), sum(loss.item() for loss, _ in pairs))
    for loss, _ in pairs:
        (loss * world_size / max(1, total)).backward()
    add_up(model, world_size)
    return loss_sum / max(1, total)


# %% lab02.3: sum for mean
class Buckets(Sound):
    def mean(self, flat):
        return flat


# %% lab02.3: divides twice
class Buckets(Sound):
    def reduce(self, flat):
        flat /= world_size
        return dist.all_reduce(flat, async_op=True)


# %% lab02.3: missing call
class Buckets(Sound):
    """Nobody sends what is not full."""

    def send_rest(self):
        pass


# %% lab02.3: sent in order of arrival
class Buckets(Sound):
    def arrived(self, p):
        self.there.add(p)
        for bucket in self.buckets:
            if any(p is q for q in bucket) and self.there.issuperset(bucket):
                flat = torch.cat([q.grad.flatten() for q in bucket])
                dist.all_reduce(flat)
                for q, part in zip(bucket, flat.split([q.numel() for q in bucket])):
                    q.grad = part.view_as(q) / world_size

    def finish(self):
        self.there = set()


# %% lab02.3: tensors compared by value
class Buckets(Sound):
    def arrived(self, p):
        self.there.add(p)
        for bucket in self.buckets:
            if p in bucket and self.there.issuperset(bucket):
                flat = torch.cat([q.grad.flatten() for q in bucket])
                dist.all_reduce(flat)
                for q, part in zip(bucket, flat.split([q.numel() for q in bucket])):
                    q.grad = part.view_as(q) / world_size

    def finish(self):
        self.there = set()


# %% lab02.3: buckets shifted
class Buckets:
    """Filled in the order of arrival, as in the lesson."""

    def __init__(self, model, bucket_bytes):
        self.bytes, self.bucket, self.sent = bucket_bytes, [], []
        for p in model.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self.arrived)

    def arrived(self, p):
        if self.bucket and sum(q.nbytes for q in self.bucket) + p.nbytes > self.bytes:
            self.send()
        self.bucket.append(p)

    def send(self):
        flat = torch.cat([p.grad.flatten() for p in self.bucket])
        dist.all_reduce(flat)
        self.sent.append((self.bucket, flat / world_size))
        self.bucket = []

    def finish(self):
        if self.bucket:
            self.send()
        for bucket, flat in self.sent:
            for p, part in zip(bucket, flat.split([p.numel() for p in bucket])):
                p.grad = part.view_as(p)
        self.sent = []


# %% lab02.3: sent in order of arrival (and the rest at the end)
class Buckets(Sound):
    def arrived(self, p):
        self.there.add(p)
        for bucket in self.buckets:
            if any(p is q for q in bucket) and self.there.issuperset(bucket):
                self.send_this(bucket)

    def send_this(self, bucket):
        flat = torch.cat([self.grad(q).flatten() for q in bucket])
        self.sent.append((flat, bucket, dist.all_reduce(flat, async_op=True)))

    def finish(self):
        done = [bucket for _, bucket, _ in self.sent]
        for bucket in self.buckets:
            if not any(bucket is other for other in done):
                self.send_this(bucket)
        for flat, bucket, work in self.sent:
            work.wait()
            for p, part in zip(bucket, flat.split([p.numel() for p in bucket])):
                p.grad = part.view_as(p) / world_size
        self.reset()


# %% lab02.3: hook before accumulation
class Buckets(Sound):
    def hook(self, p):
        p.register_hook(lambda grad: self.arrived(p))


# %% lab02.3: hook before accumulation (without a default)
class Buckets(Sound):
    def hook(self, p):
        p.register_hook(lambda grad: self.arrived(p))

    def grad(self, p):
        return p.grad


# %% lab02.3: hook on a frozen parameter
class Buckets(Sound):
    def order(self, model):
        return list(model.parameters())[::-1]


# %% lab02.3: frozen parameters sent
class Buckets(Sound):
    def order(self, model):
        return list(model.parameters())[::-1]

    def hook(self, p):
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(self.arrived)
        self.frozen = [q for bucket in self.buckets for q in bucket if not q.requires_grad]

    def arrived(self, p):
        self.there |= {p, *self.frozen}
        self.send_full()


# %% lab02.3: bucket never flushed
class Buckets(Sound):
    def __init__(self, model, bucket_bytes):
        super().__init__(model, bucket_bytes)
        self.all = self.buckets
        self.buckets = [bucket for bucket in self.all if bucket is not self.all[-1] or len(self.all) == 1]


# %% lab02.3: state of the last step
class Buckets(Sound):
    def reset(self):
        self.sent = []


# %% lab02.3: one call a parameter
class Buckets(Sound):
    def __init__(self, model, bucket_bytes):
        super().__init__(model, 1)


# %% lab02.3: buckets in forward order
class Buckets(Sound):
    def order(self, model):
        return [p for p in model.parameters() if p.requires_grad]


# %% lab02.3: sends after backward
class Buckets(Sound):
    def send_full(self):
        pass


# %% lab02.3: sends after backward (when all are there)
class Buckets(Sound):
    def send_full(self):
        if len(self.there) == sum(map(len, self.buckets)):
            self.send_rest()


# %% lab02.3: reads before wait
class Buckets(Sound):
    def wait(self):
        pass


# %% lab02.3: nothing is sent
class Buckets(Sound):
    def finish(self):
        pass

    def send_full(self):
        pass


# %% lab02.3: forgets missing gradients
class Buckets(Sound):
    def write(self):
        for bucket, (flat, _) in zip(self.buckets, self.sent):
            for p, part in zip(bucket, self.mean(flat).split([p.numel() for p in bucket])):
                if p.grad is not None:
                    p.grad = part.view_as(p)


# %% lab02.3: state of the last step (sent once and never again)
class Buckets(Sound):
    def reset(self):
        pass


# %% lab02.3: buckets too large
class Buckets(Sound):
    def __init__(self, model, bucket_bytes):
        super().__init__(model, 8 * bucket_bytes)


# %% lab02.3: never written back
class Buckets(Sound):
    def reduce(self, flat):
        dist.all_reduce(flat)

    def wait(self):
        pass

    def write(self):
        pass


# %% lab02.3: buckets too large (as in the lesson: closed after adding)
class Buckets:
    def __init__(self, model, bucket_bytes):
        self.bucket_bytes, self.bucket, self.sent = bucket_bytes, [], []
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.gradient_is_there)

    def gradient_is_there(self, parameter):
        self.bucket.append(parameter)
        if sum(p.grad.nbytes for p in self.bucket) >= self.bucket_bytes:
            self.send()

    def send(self):
        joined = torch.cat([p.grad.flatten() for p in self.bucket])
        self.sent.append((self.bucket, joined, dist.all_reduce(joined, async_op=True)))
        self.bucket = []

    def finish(self):
        if self.bucket:
            self.send()
        for parameters, joined, work in self.sent:
            work.wait()
            parts = (joined / world_size).split([p.numel() for p in parameters])
            for parameter, part in zip(parameters, parts):
                parameter.grad = part.view_as(parameter)
        self.sent.clear()


# %% lab02.3: buckets too large (planned, closed after adding)
class Buckets(Sound):
    def __init__(self, model, bucket_bytes):
        super().__init__(model, bucket_bytes)
        self.buckets, size = [[]], 0
        for p in self.order(model):
            self.buckets[-1].append(p)
            size += p.nbytes
            if size >= bucket_bytes:
                self.buckets.append([])
                size = 0
        self.buckets = [bucket for bucket in self.buckets if bucket]


# %% lab02.3: state of the last step (finish resets nothing)
class Buckets:
    def __init__(self, model, bucket_bytes):
        self.plan, size = [[]], 0
        for p in reversed([p for p in model.parameters() if p.requires_grad]):
            if self.plan[-1] and size + p.nbytes > bucket_bytes:
                self.plan.append([])
                size = 0
            self.plan[-1].append(p)
            size += p.nbytes
            p.register_post_accumulate_grad_hook(self.arrived)
        self.there, self.next, self.flat = set(), 0, {}

    def arrived(self, p):
        self.there.add(p)
        while self.next < len(self.plan) and all(q in self.there for q in self.plan[self.next]):
            self.send()

    def send(self):
        parts = [torch.zeros_like(q) if q.grad is None else q.grad for q in self.plan[self.next]]
        self.flat[self.next] = torch.cat([part.flatten() for part in parts])
        dist.all_reduce(self.flat[self.next])
        self.next += 1

    def finish(self):
        while self.next < len(self.plan):
            self.send()
        for number, bucket in enumerate(self.plan):
            means = (self.flat[number] / world_size).split([q.numel() for q in bucket])
            for q, mean in zip(bucket, means):
                q.grad = mean.view_as(q)


# %% lab02.3: state of the last step (the list of sent buckets, zipped)
class Buckets(Sound):
    def reset(self):
        self.there = set()
        self.sent = getattr(self, "sent", [])


# %% lab02.3: forgets missing gradients (copied into None)
class Buckets(Sound):
    def write(self):
        for bucket, (flat, _) in zip(self.buckets, self.sent):
            for p, part in zip(bucket, self.mean(flat).split([p.numel() for p in bucket])):
                p.grad.copy_(part.view_as(p))


# %% lab02.3: buckets planned otherwise (closed when it fits to the last byte)
class Buckets(Sound):
    def __init__(self, model, bucket_bytes):
        super().__init__(model, bucket_bytes - 1)


# %% lab02.3: reads before wait (handles dropped)
class Buckets(Sound):
    def reduce(self, flat):
        dist.all_reduce(flat, async_op=True)

    def wait(self):
        pass


# %% lab02.3: keeps what was sent
class Buckets(Sound):
    all_sent = ()

    def reset(self):
        self.all_sent = [*self.all_sent, *self.sent]
        super().reset()


# %% lab02.4: reduces every micro-batch
class OverlappedBuckets(Sound):
    @contextlib.contextmanager
    def no_sync(self):
        yield
        self.finish()


# %% lab02.4: reduces every micro-batch (no_sync forgotten)
class OverlappedBuckets(Sound):
    def no_sync(self):
        return contextlib.nullcontext()

    def arrived(self, p):
        if len(self.sent) == len(self.buckets):
            self.wait()
            self.write()
            self.reset()
        super().arrived(p)


# %% lab02.4: sends after backward
class OverlappedBuckets(Sound):
    def send_full(self):
        pass


# %% lab02.4: waits inside backward
class OverlappedBuckets(Sound):
    def reduce(self, flat):
        work = dist.all_reduce(flat, async_op=True)
        work.wait()
        return work


# %% lab02.4: waits inside backward (no async_op)
class OverlappedBuckets(Sound):
    def reduce(self, flat):
        return dist.all_reduce(flat)

    def wait(self):
        pass


# %% lab02.4: reads before wait
class OverlappedBuckets(Sound):
    def wait(self):
        pass


# %% lab02.4: steps before wait
class OverlappedBuckets(Sound):
    def finish(self):
        self.send_rest()
        self.pending = self.sent
        self.reset()


# %% lab02.4: only the last micro-batch
class OverlappedBuckets(Sound):
    def __init__(self, model, bucket_bytes):
        self.last = {}
        super().__init__(model, bucket_bytes)

    def hook(self, p):
        p.register_hook(lambda grad: self.there_is(p, grad))

    def there_is(self, p, grad):
        self.last[p] = grad
        self.arrived(p)

    def grad(self, p):
        return self.last.get(p, torch.zeros_like(p))

    def reset(self):
        super().reset()
        self.last.clear()


# %% lab02.4: hook before accumulation
class OverlappedBuckets(Sound):
    def hook(self, p):
        p.register_hook(lambda grad: self.arrived(p))


# %% lab02.4: nothing is sent
class OverlappedBuckets(Sound):
    @contextlib.contextmanager
    def no_sync(self):
        self.quiet = True
        yield

    def send_rest(self):
        if not self.quiet:
            super().send_rest()


# %% lab02.4: forgets what no_sync added up
class OverlappedBuckets(Sound):
    def grad(self, p):
        return p.grad if p in self.there else torch.zeros_like(p)


# %% lab02.4: sum for mean
class OverlappedBuckets(Sound):
    def mean(self, flat):
        return flat


# %% lab02.4: state of the last step
class OverlappedBuckets(Sound):
    def reset(self):
        self.sent = []


# %% lab02.4: no_sync without effect
class OverlappedBuckets(Sound):
    @contextlib.contextmanager
    def no_sync(self):
        self.is_quiet = True
        yield
        self.is_quiet = False

    def arrived(self, p):
        self.there.add(p)
        self.send_full()


# %% lab02.4: no_sync without effect (an empty context)
class OverlappedBuckets(Sound):
    @contextlib.contextmanager
    def no_sync(self):
        yield


# %% lab02.4: stays in no_sync after an exception
class OverlappedBuckets(Sound):
    @contextlib.contextmanager
    def no_sync(self):
        self.quiet = True
        yield
        self.quiet = False


# %% lab02.4: keeps what was sent (and writes all of it back, the last step's at the end)
class OverlappedBuckets(Sound):
    def __init__(self, model, bucket_bytes):
        super().__init__(model, bucket_bytes)
        self.entries, self.number = [], 0

    def send_full(self):
        while self.number < len(self.buckets) and self.there.issuperset(self.buckets[self.number]):
            self.send()

    def send(self):
        bucket = self.buckets[self.number]
        flat = torch.cat([self.grad(p).flatten() for p in bucket])
        self.entries.append((dist.all_reduce(flat, async_op=True), flat, bucket))
        self.number += 1

    def finish(self):
        while self.number < len(self.buckets):
            self.send()
        for handle, flat, bucket in self.entries:
            handle.wait()
            flat /= world_size
            for p, part in zip(bucket, flat.split([p.numel() for p in bucket])):
                p.grad = part.view_as(p)
        self.there, self.number = set(), 0


# %% lab02.4: no context manager
class OverlappedBuckets(Sound):
    def no_sync(self):
        self.quiet = True
        try:
            yield
        finally:
            self.quiet = False


# %% lab02.4: no context manager (nothing at all)
class OverlappedBuckets(Sound):
    def no_sync(self):
        self.quiet = True


# %% lab02.5: another mistake
diagnosis = {"A": "mean of means", "B": "sends after backward", "C": "no broadcast", "D": "sum for mean",
             "E": "reduces every micro-batch", "F": "steps before wait"}


# %% lab02.5: another mistake (none of the choices)
diagnosis = {"A": "gremlins", "B": "sends after backward", "C": "steps before wait", "D": "sum for mean",
             "E": "reduces every micro-batch", "F": "no broadcast"}
