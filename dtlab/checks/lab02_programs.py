"""What lab 02 runs: a small model full of traps, its batches, and the programs of its last exercise."""
import contextlib
import random
import sys
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from dtlab.checks.diagnosis import LETTERS as LETTERS
from dtlab.checks.diagnosis import Programs
from dtlab.models import TimedLayer, cross_entropy
from dtlab.record.recorder import quiet, sleep

VOCAB, WIDTH, CLOCKS = 5, 3, 3


class Net(nn.Module):
    """A model of 50 trained numbers with what trips data parallelism; float64, its values drawn from ``seed``.

    The head's weight is the embedding's (tied). ``frozen`` is not trained. ``norm`` has buffers, one of whole numbers,
    and the buffer ``scale`` is in no ``state_dict()``. ``branch`` takes part only where forward is told so. The
    ``clocks`` change nothing; they mark the layers in a recording, and sleep ``backward_s`` seconds in backward.

    Shapes:
        tokens [rows, length] -> logits [rows, length, 5]
    """

    def __init__(self, seed, backward_s=0.0):
        super().__init__()
        kind = {"dtype": torch.float64}
        self.embedding = nn.Embedding(VOCAB, WIDTH, **kind)
        self.frozen = nn.Linear(WIDTH, WIDTH, **kind).requires_grad_(False)
        self.norm = nn.BatchNorm1d(WIDTH, **kind)
        self.branch = nn.Linear(WIDTH, WIDTH, **kind)
        self.middle = nn.Linear(WIDTH, WIDTH, **kind)
        self.head = nn.Linear(WIDTH, VOCAB, **kind)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(WIDTH, **kind), persistent=False)
        self.clocks = nn.ModuleList(TimedLayer(0, backward_s, **kind) for _ in range(CLOCKS)).requires_grad_(False)
        self._fill(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def _fill(self, generator):
        for tensor in named_tensors(self).values():
            if tensor.is_floating_point():
                tensor.copy_(2 * torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype) - 1)
            else:
                tensor.random_(1000, generator=generator)
        self.norm.running_var.abs_().add_(0.5)

    def forward(self, tokens, with_branch=True):
        x = self.clocks[0](self.embedding(tokens))
        x = self.norm((self.scale * self.frozen(x)).flatten(0, 1)).view_as(x)
        x = self.clocks[1](x)
        if with_branch:
            x = x + self.branch(x).tanh()
        return self.head(self.clocks[2](self.middle(x).tanh()))


def named_tensors(model):
    """Name -> parameter or buffer, each tensor once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def trained(model):
    """Name -> parameter that is trained, a tied one once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def gradients(model):
    """Name -> gradient of a trained parameter, a copy; zeros where there is none."""
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in trained(model).items()}


def flat(tensors):
    """One vector of all values."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def draw_batch(rng, rows, length, num_tokens=None):
    """``(inputs, targets)`` [rows, length] each; of the targets ``num_tokens`` count (all if not given)."""
    draw = lambda: torch.tensor([rng.randrange(VOCAB) for _ in range(rows * length)]).view(rows, length)
    inputs, targets = draw(), draw()
    if num_tokens is not None:
        targets.view(-1)[rng.sample(range(rows * length), rows * length - num_tokens)] = -100
    return inputs, targets


def token_loss(model, batch):
    """The loss of a batch summed over the tokens that count, and how many do."""
    inputs, targets = batch
    return cross_entropy(model(inputs), targets, reduction="sum"), int((targets != -100).sum())


@contextlib.contextmanager
def closed(what, *constructors):
    """Refuse torch's classes, each with the name of the method that makes one, and ``dtlab.parallel``."""
    def refuse(*_, **__):
        raise RuntimeError(f"torch's {what} is what this lab builds")

    with contextlib.ExitStack() as patches:
        for its, method in constructors:
            patches.enter_context(mock.patch.object(its, method, refuse))
        yield
    if "dtlab.parallel" in sys.modules:  # ranks of a check are new: only the learner's code can have imported it
        raise RuntimeError("dtlab.parallel is what this lab builds")


def by_hand():
    """Refuse what has been built already."""
    return closed("DistributedDataParallel", (nn.parallel.DistributedDataParallel, "__init__"))


def moved(recording, rank):
    """Bytes of the buffers that a rank hands to its calls."""
    return sum(e.bytes for e in recording.events[rank] if e.kind == "issue")


def times(spent, allowed):
    """What was spent beside what may be."""
    return f"{spent:,} bytes where {allowed:,} do, {spent / allowed:.3g} times as many"


# the last exercise: programs that are seen from outside

SIGNS = {  # what each of them looks like
    "sum for mean": "Sums would make the gradient of the first step exactly 4.00 times the right one, on every rank.",
    "averaged twice": "A second division would make the gradient of the first step exactly 0.25 times the right one.",
    "mean of means": "Means of means give equal replicas the same gradient, which is no multiple of the right one.",
    "no broadcast": "Without a broadcast the replicas are apart before the first step.",
    "reduces every micro-batch": "That changes no value: two micro-batches would send 2.00 times the bytes.",
    "sends after backward": "That changes no value and no byte, but no layer is to come when the first call starts.",
    "steps before wait": "Replicas would start equal, use another gradient on each rank, and be apart at the end.",
    "nothing wrong": "Then every number would be that of the right program, and the timeline too.",
}
PROGRAMS = Programs("lab02.5", SIGNS, {
    "A": "3002db7a", "B": "689708b3", "C": "bd55ff8f", "D": "5d5ff6e2", "E": "bf693f05", "F": "2b93a578",
})
CHOICES, is_right = PROGRAMS.choices, PROGRAMS.is_right
STEPS, MICRO_BATCHES, SLEEP_S = 12, 2, 0.02


def _batches(step):
    """Of each rank, its micro-batches: later ranks hold more tokens."""
    rng = random.Random(step)
    batches = [[draw_batch(rng, 4, 5, 1 + 6 * rank) for _ in range(MICRO_BATCHES)]
               for rank in range(dist.get_world_size())]
    return [[(inputs, torch.where(targets < 0, targets, (3 * inputs + 1) % VOCAB)) for inputs, targets in its]
            for its in batches]


class _Early:
    """Sends gradients during backward, two at a time, and leaves .grad as it is."""

    def __init__(self, model):
        self.sends, self.waiting, self.works = False, [], []
        for parameter in trained(model).values():
            parameter.register_post_accumulate_grad_hook(self.arrived)

    def arrived(self, parameter):
        self.waiting += [parameter.grad] * self.sends
        if len(self.waiting) == 2:
            self.works.append(dist.all_reduce(flat(self.waiting), async_op=True))
            self.waiting = []

    def wait(self):
        for work in self.works:
            work.wait()
        self.works = []


def observed(letter, steps=STEPS, backward_s=0.0):
    """On a rank: train with the program of a letter.

    Returns:
        ``(loss sum and tokens of each step, gradient that the first step used, parameters before and after)``.
    """
    from dtlab import parallel

    me, size = dist.get_rank(), dist.get_world_size()
    choice = PROGRAMS.ailing(letter)
    model = Net(me, backward_s).eval()
    own = flat(model.parameters())
    ddp = parallel.DistributedDataParallel(model, bucket_bytes=100, broadcast_buffers=False,
                                           overlap=choice != "sends after backward")
    if choice == "no broadcast":
        nn.utils.vector_to_parameters(own, model.parameters())
    optimizer = torch.optim.SGD(trained(model).values(), lr=0.3)
    optimizer.register_step_pre_hook(lambda *_: sleep(backward_s / 2))  # else too short to be seen
    early = _Early(model) if choice == "steps before wait" else None
    losses, used, before = [], None, flat(model.parameters())
    dist.barrier()
    for step in range(steps):
        batches, sums = _batches(step), []
        total = sum(int((targets != -100).sum()) for its in batches for _, targets in its)
        mine = sum(int((targets != -100).sum()) for _, targets in batches[me])
        divisor = mine if choice == "mean of means" else total / size
        factor = {"sum for mean": size, "averaged twice": 1 / size}.get(choice, 1)
        for number, batch in enumerate(batches[me]):
            adds_up = number < MICRO_BATCHES - 1 and choice != "reduces every micro-batch"
            if early:
                early.sends = not adds_up
            with ddp.no_sync() if adds_up or early else contextlib.nullcontext():
                loss_sum, _ = token_loss(ddp, batch)
                (factor * loss_sum / divisor).backward()
            with quiet():  # the recording is of the step alone
                sums.append(loss_sum.item())
        with quiet():
            used = flat(gradients(model).values()) if used is None else used
        optimizer.step()
        if early:
            early.wait()
        optimizer.zero_grad()
        losses.append((sum(sums), mine))
    with quiet():
        return losses, used, before, flat(model.parameters())
