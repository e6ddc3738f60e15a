"""What lab 03 runs: its model and training in one process, its closed doors, and bytes read off a recording."""
import contextlib
import functools
import sys

import torch
import torch.distributed as dist
from torch import nn

from dtlab.checks.exercise import Mistake, failed, when
from dtlab.checks.lab01_serial import bounds
from dtlab.checks.lab02_programs import closed, named_tensors
from dtlab.record import phase
from dtlab.simulate.tables import live_bytes
from dtlab.theory import base_op

FLOAT_BYTES = 8
IN_FLIGHT = 6  # layers that may be whole at once: two in use, the rest not yet let go by the threads of a backend
OPTIMIZERS = {  # name -> class, tensors that it keeps of a parameter's shape, bytes that it keeps beside them
    # of so large an eps that a wrong factor shows: Adam divides factors away
    "AdamW": (functools.partial(torch.optim.AdamW, eps=0.01), 2, 4),
    "SGD": (functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), 1, 0),
}
# under the name that this torch has for them; no functions of our own, so that reports name the learner's line
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class Net(nn.Module):
    """Tanh layers of a few numbers in float64, drawn from ``seed``; ``branch`` takes part where a batch says so.

    Shapes:
        x [rows, widths[0]] -> [rows, widths[-1]]
    """

    def __init__(self, seed, widths=(3, 4, 2)):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*pair, dtype=torch.float64) for pair in zip(widths, widths[1:]))
        self.branch = nn.Parameter(torch.empty(widths[-1], dtype=torch.float64))
        fill(self, torch.Generator().manual_seed(seed))

    def forward(self, x, with_branch=True):
        for layer in self.layers:
            x = layer(x).tanh()
        return x * self.branch if with_branch else x


@torch.no_grad()
def fill(module, generator):
    """Give a module values of -1 .. 1."""
    for tensor in named_tensors(module).values():
        tensor.copy_(2 * torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype) - 1)


def decay_groups(model):
    """Two groups for an optimizer: matrices with weight decay, the rest without and with twice the rate."""
    matrices, rest = ([p for p in model.parameters() if (p.dim() > 1) is is_matrix] for is_matrix in (True, False))
    return [{"params": matrices, "lr": 0.05, "weight_decay": 0.1}, {"params": rest, "lr": 0.1, "weight_decay": 0.0}]


def cut_line(sizes, cuts):
    """``[[(number, start, end), ...], ...]``: the pieces of parameters in each cut of the line that they form."""
    found = []
    for first, last in cuts:
        start, its = 0, []
        for number, elements in enumerate(sizes):
            low, high = max(first - start, 0), min(last - start, elements)
            its += [(number, low, high)] * (low < high)
            start += elements
        found.append(its)
    return found


def pieces(sizes, world_size):
    """Exercise 1: ``(elements of a shard, the pieces of each rank)``."""
    length = -(-sum(sizes) // world_size)
    return length, cut_line(sizes, [(rank * length, (rank + 1) * length) for rank in range(world_size)])


def even(sizes, world_size):
    """Shards that differ by an element, as they are not wanted here."""
    return cut_line(sizes, bounds(sum(sizes), world_size))


def draw(rng, *shape):
    """Values in -1 .. 1 [shape], float64, from a ``random.Random``."""
    values = [rng.uniform(-1, 1) for _ in range(torch.Size(shape).numel())]
    return torch.tensor(values, dtype=torch.float64).view(shape)


def loss_of(model, batch):
    """The mean squared error of a batch."""
    x, target, *with_branch = batch
    return ((model(x, *with_branch) - target) ** 2).mean()


def serial(case, *, scale=1.0, ranks=None, numbers=slice(None), anew=False, one_group=False, adds_up=False,
           settings=("lr", "weight_decay")):  # fmt: skip
    """Name -> parameter after each step, in one process; the keywords change what a mistake changes."""
    model, steps, optimizer = Net(case["seed"], case["widths"]), [], None
    ranks = range(case.world_size) if ranks is None else ranks
    for batches in case["batches"]:
        if anew or optimizer is None:
            first, rest = ({key: its for key, its in group.items() if key in ("params", *settings)}
                           for group in decay_groups(model))  # fmt: skip
            groups = [first, {**first, "params": rest["params"]} if one_group else rest]
            optimizer = OPTIMIZERS[case["optimizer"]][0](groups)
        for rank in ranks:
            for batch in batches[rank][numbers]:
                (scale * loss_of(model, batch) / len(batches[rank]) / len(ranks)).backward()
        optimizer.step()
        steps.append({name: p.detach().clone() for name, p in model.named_parameters()})
        if not adds_up:
            optimizer.zero_grad()
    return steps


# on the ranks


@contextlib.contextmanager
def by_hand():
    """Refuse what has been built already."""
    from torch.distributed import fsdp
    from torch.distributed._composable_state import _State

    with closed("sharding", (_State, "__init__"), (fsdp.FullyShardedDataParallel, "__init__")):
        yield
        if "torch.distributed.optim.zero_redundancy_optimizer" in sys.modules:  # as dtlab.parallel: only by a learner
            raise RuntimeError("torch's sharding is what this lab builds")


def mark(name):
    """Put a mark into the recording."""
    with phase(name):
        pass


# read off the recording


def calls(recording, rank):
    """``[(plain name, bytes of its buffer, bytes sent), ...]`` of a rank's calls, in order."""
    return [(base_op(e.op), e.bytes, e.wire_bytes) for e in recording.events[rank] if e.kind == "issue"]


def called(name):
    """Whether a call was made: a ``seen`` of a Mistake."""
    return when(lambda evidence, _: any(op == name for op, *_ in calls(evidence.recording, 0)))


def peak(recording, rank, categories, start="made", until=None):
    """What some categories hold at the instant at which they hold most together: ``{category: bytes}``.

    Counted from one mark to another (to the end where there is none). Of ``"-name"`` only what is held beyond what was
    there at the first mark.
    """
    best, inside, before, live = {}, False, None, {}
    steps = live_bytes(recording.events[rank])
    for event in recording.events[rank]:
        if event.kind in ("alloc", "free"):
            _, live = next(steps)
        elif event.kind == "phase" and event.op in (start, until):
            inside = event.op == start
            before = dict(live) if before is None else before
        if inside:
            now = {name.strip("-"): live[name.strip("-")] - before[name[1:]] * (name[0] == "-") if name[0] == "-"
                   else live[name] for name in categories}  # fmt: skip
            best = now if sum(now.values()) > sum(best.values()) else best
    return best


# mistakes that several exercises know

BORROWED = Mistake("borrowed", "{}: write it with the collectives of torch.distributed.",
    failed("raised", says=r"(torch's sharding|dtlab.parallel) is what this lab builds"))  # fmt: skip
PADDING = Mistake("forgets padding",
    "the ranks' parts are not equally long ({}): pad with zeros until the number of ranks divides the line. With a "
    "length that they divide nothing shows it.",
    failed("raised", "guard", says=r"(?i)[^\n]*(elements of output each|shapes differ|split_with_sizes|split the input|"
                                   r"must be divisible|output times world|invalid (input|tensor) size)[^\n]*"))
UNAWAITED = Mistake("reads before wait",
    "a tensor is read or written while its call is under way: each handle needs its wait.",
    failed("guard", says=r"wait\(\)|called wait"))  # fmt: skip
ABSENT = Mistake("not on every rank",
    "{}: a rank without a gradient, without a piece, with nothing but padding takes part in every call all the same.",
    failed("hang", "guard", says=r"ranks? [\d, -]+ never made that call|(not make the same|makes another) call"))
ALL_REDUCE = Mistake("all_reduce for reduce_scatter",
    "all is right, but whole gradients were reduced to every rank, which needs its own part: twice the bytes.",
    called("all_reduce"))  # fmt: skip
