"""Lab 02, data parallel: one right answer to each exercise."""
import contextlib

import torch
import torch.distributed as dist


# Exercise lab02.1
def equal_start(model):
    """Give this replica the values of rank 0's: parameters, frozen ones and buffers, in place."""
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)


# Exercise lab02.2
def token_mean_backward(model, micro_batches, loss_of):
    """Leave the gradient of the mean loss over all ranks' tokens in .grad of every trained parameter."""
    sums = torch.zeros(2, dtype=torch.float64)  # of the losses, of the tokens
    for micro_batch in micro_batches:
        loss, tokens = loss_of(model, micro_batch)
        loss.backward()
        sums += torch.tensor([loss.item(), tokens], dtype=torch.float64)
    dist.all_reduce(sums)
    all_tokens = max(1.0, sums[1].item())
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:  # this rank has no micro-batch, and takes part all the same
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= all_tokens
    return sums[0].item() / all_tokens


# Exercise lab02.3
class Buckets:
    """Gradients of a model, averaged over the ranks in planned buckets."""

    def __init__(self, model, bucket_bytes):
        """Plan the buckets and register the hooks."""
        self.plan, room = [], 0
        for parameter in reversed([p for p in model.parameters() if p.requires_grad]):
            if not self.plan or parameter.nbytes > room:
                self.plan.append([])
                room = bucket_bytes
            self.plan[-1].append(parameter)
            room -= parameter.nbytes
            parameter.register_post_accumulate_grad_hook(self._gradient_is_there)
        self._begin_step()

    def _begin_step(self):
        self.there, self.sent = set(), []  # parameters; flat sums, one of each bucket that has left

    def _gradient_is_there(self, parameter):
        self.there.add(parameter)
        while len(self.sent) < len(self.plan) and self.there.issuperset(self.plan[len(self.sent)]):
            self._send_next()

    def _send_next(self):
        # .grad holds the sum of all micro-batches, also where the last one had nothing to add
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.plan[len(self.sent)]]
        flat = torch.cat([part.flatten() for part in parts])
        self._reduce(flat)
        self.sent.append(flat)

    def _reduce(self, flat):
        dist.all_reduce(flat)

    def finish(self):
        """After backward: send what has not left, put the means into .grad, be ready for the next step."""
        while len(self.sent) < len(self.plan):
            self._send_next()
        for bucket, flat in zip(self.plan, self.sent):
            means = (flat / dist.get_world_size()).split([p.numel() for p in bucket])
            for parameter, mean in zip(bucket, means):
                parameter.grad = mean.view_as(parameter)
        self._begin_step()


# Exercise lab02.4
class OverlappedBuckets(Buckets):
    """Buckets that are on their way while backward computes; one reduction a step."""

    def __init__(self, model, bucket_bytes):
        """Plan the buckets and register the hooks."""
        super().__init__(model, bucket_bytes)
        self.adds_up = False

    @contextlib.contextmanager
    def no_sync(self):
        """A context manager: backward inside it sends nothing."""
        before, self.adds_up = self.adds_up, True
        try:
            yield
        finally:
            self.adds_up = before

    def _gradient_is_there(self, parameter):
        if not self.adds_up:
            super()._gradient_is_there(parameter)

    def _reduce(self, flat):
        self.handles.append(dist.all_reduce(flat, async_op=True))

    def finish(self):
        """After the step's last backward: send what has not left, wait for all, put the means into .grad."""
        while len(self.sent) < len(self.plan):
            self._send_next()
        for handle in self.handles:
            handle.wait()
        super().finish()

    def _begin_step(self):
        super()._begin_step()
        self.handles = []


# Exercise lab02.5
diagnosis = {
    "A": "mean of means",
    "B": "sends after backward",
    "C": "steps before wait",
    "D": "sum for mean",
    "E": "reduces every micro-batch",
    "F": "no broadcast",
}
