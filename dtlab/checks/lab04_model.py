"""What lab 04 runs: t ranks in one process, what an answer is told, closed doors."""
import contextlib
import re

import torch
import torch.distributed as dist

from dtlab.checks.compare import difference, ratio
from dtlab.checks.exercise import Mistake, failed, when
from dtlab.checks.lab02_programs import closed, moved, times
from dtlab.checks.lab03_model import all_gather as all_gather
from dtlab.checks.lab03_model import calls


def attend(q, k, v, causal=True):
    """Attention of heads, each by itself: softmax(q k^T / sqrt(d)) v.

    Shapes:
        q, k, v, y [..., heads, S, d]
    """
    scores = q @ k.mT / q.shape[-1] ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1) & causal
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ v


# t ranks in one process: the first dimension of every tensor stands for them


class _Across(torch.autograd.Function):
    """One thing among the ranks in forward, another in backward."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.ways = backward, forward
        return _WAYS[forward](x)

    @staticmethod
    def backward(ctx, grad):
        return _Across.apply(grad, *ctx.ways), None, None


_WAYS = {
    "own": lambda x: x.clone(),
    "sum": lambda x: x.sum(0, keepdim=True).expand_as(x).clone(),
    "mean": lambda x: x.mean(0, keepdim=True).expand_as(x).clone(),
    "nothing": lambda x: torch.zeros_like(x),
    "largest": lambda x: x.amax(0, keepdim=True).expand_as(x).clone(),
}


def across(forward, backward):
    """A function of ``x`` [t, ...]: ``f`` is ``across("own", "sum")``, ``g`` the other way round."""
    return lambda x: _Across.apply(x, forward, backward)


F, G = ("own", "sum"), ("sum", "own")


# on the ranks


@contextlib.contextmanager
def by_hand():
    """Refuse what has been built already; at the end, handles that nobody awaited."""
    from torch.distributed.device_mesh import DeviceMesh

    from dtlab.ranks import calls

    with closed("DTensor", (DeviceMesh, "__init__")):
        yield
        calls.current.guard.refuse_open()  # in time or not: whether a call is through by now is chance


def shard(whole, dim):
    """Stands in for exercise 1."""
    size, cuts = whole.shape[dim], dist.get_world_size()
    if size % cuts:
        raise ValueError(f"{cuts} ranks cannot have equal parts of {size}")
    return whole.tensor_split(cuts, dim)[dist.get_rank()].clone(memory_format=torch.contiguous_format)


def gather(piece, dim):
    """Stands in for exercise 1."""
    all_pieces = list(piece.new_empty(dist.get_world_size(), *piece.shape))
    dist.all_gather(all_pieces, piece.contiguous())
    return torch.cat(all_pieces, dim)


class _Region(torch.autograd.Function):
    """Adds over the ranks in forward or in backward."""

    @staticmethod
    def forward(ctx, x, adds):
        ctx.adds, y = adds, x.clone(memory_format=torch.contiguous_format)
        if adds:
            dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        return _Region.apply(grad, not ctx.adds), None


REFERENCES = {  # of exercises 1 and 2
    "shard": shard, "gather": gather, "copy_to_region": lambda x: _Region.apply(x, False),
    "reduce_from_region": lambda x: _Region.apply(x, True)}  # fmt: skip


def refusal(make, *numbers):
    """What is wrong about how ``make()`` refuses sizes; empty if by a ValueError with the numbers in it."""
    try:
        make()
    except ValueError as error:
        missing = [str(number) for number in numbers if str(number) not in re.findall(r"\d+", str(error))]
        return f"its ValueError says {error}, without {' and '.join(missing)}" if missing else ""
    except (NotImplementedError, MemoryError):
        raise
    except Exception as error:
        return f"{type(error).__name__} ({error}) where a ValueError is asked for"
    return "no ValueError came"


def grad_of(tensor):
    """A gradient, zeros where there is none."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


# read off what came


def off(theirs, right):
    """How far a value is off, as a share of the right one: ``"65 %"``."""
    return f"{100 * float((theirs - right).norm() / right.norm()):.3g} %"


def is_as(simulate):
    """A ``seen``: all ranks' results are those of ``simulate(case)``, which are not right."""
    def seen(evidence, expected):
        told = simulate(evidence.case)
        return difference(evidence.results, told) is None and difference(told, expected) is not None and (
            measured(evidence.results, expected))
    return when(seen)


def measured(theirs, right):
    """Of the first value that is wrong on each rank: how far, and what the ranks have."""
    for rank, (mine, its) in enumerate(zip(theirs, right)):
        for place, found, wanted in _leaves(mine, its):
            if difference(found, wanted):
                by = ratio(found, wanted)
                far = f"{by:.4g} times the right one" if by else f"{off(found, wanted)} off"
                return f"{place} {far} on rank {rank}"
    return ""


def _leaves(theirs, right, place=""):
    if isinstance(right, dict):
        for key in right:
            yield from _leaves(theirs[key], right[key], f"{place}, {key}" if place else key)
    elif isinstance(right, torch.Tensor):
        yield place, theirs, right


def but(seen):
    """A ``seen`` for answers whose values are right."""
    return when(lambda *given: not difference(given[0].results, given[1]) and seen(*given))


def all_calls(recording, rank=0):
    """Plain names of a rank's calls, in order."""
    return [op for op, *_ in calls(recording, rank)]


def within(most_calls, most_bytes):
    """A budget rule: ``most_calls(case)`` calls of a rank, and bytes handed to them; one rank alone is free."""
    def rule(case, recording):
        if case.world_size == 1:
            return None
        found, allowed = len(all_calls(recording)), most_calls(case)
        if found > allowed:
            return f"rank 0 makes {found} calls ({', '.join(all_calls(recording)[:6])}), where {allowed} do"
        spent, allowed = max(moved(recording, rank) for rank in recording.ranks), most_bytes(case)
        return f"a rank hands to calls {times(spent, allowed)}" if spent > allowed else None
    return rule


# mistakes that several exercises know

BORROWED = Mistake("borrowed", "{}: write it with the collectives of torch.distributed.",
    failed("raised", says=r"(torch's DTensor|dtlab.parallel) is what this lab builds"))  # fmt: skip
STRIDED = Mistake("strided tensor sent",
    "a call got a tensor whose elements do not lie one after the other ({}): a slice of columns, or the expanded "
    "gradient of a sum. gloo would send what lies between, without a word.",
    failed("guard", "raised", says=r"shape \S+, strides [^)]*\)|ensors? must be contiguous"))
UNAWAITED = Mistake("reads before wait",
    "a tensor is read or written while its call is under way: each handle needs its wait.",
    failed("guard", "hang", says=r"wait\(\)|called wait|never awaited"))  # fmt: skip
ABSENT = Mistake("not on every rank",
    "{}: every rank makes every call, whatever its own part holds.",
    failed("hang", "guard", says=r"ranks? [\d, -]+ never made that call|(not make the same|makes another) call"))
STACK = Mistake("a stack asked for",
    "all_gather into one tensor got one with a dimension more than the pieces ({}). gloo puts them below each other, "
    "[t n, ..]: view it as [t, n, ..] afterwards.",
    failed("raised", says=r"invalid tensor size at index 0 \(expected [^\n]*"))
LENGTHS = Mistake("two lengths", "the ranks hand tensors of different shapes to one call ({}).",
    failed("guard", "raised", says=r"[^\n]*(shapes differ|sizes differ)[^\n]*"))
CUT_OFF = Mistake("cut off from autograd",
    "{}: what a collective writes is no part of the graph. An autograd.Function says what its gradient is.",
    failed("raised", says=r"(does not require grad|not have been used in the graph)[^\n]*"))
COMMON = (BORROWED, UNAWAITED, STRIDED, LENGTHS, ABSENT, CUT_OFF)
ONLY_ALL_REDUCE = ("all_gather", "reduce_scatter", "broadcast", "reduce", "gather")  # the others, forbidden


def exchanged(as_if):
    """Mistakes of f and g; ``as_if(f=, g=)`` is a ``seen`` for what comes of other ones."""
    return (
        Mistake("no f", "the output is right; the gradient of x is what came through this rank's own part, another one "
                "on each rank ({}). The loss cannot see it at the first step.", as_if(f=("own", "own"))),
        Mistake("g reduces again", "the output is right; the gradient behind the sum, which all ranks have whole, was "
                "added over them once more ({}).", as_if(g=("sum", "sum"))),
        Mistake("no g", "each rank has its own part of the sum ({}).", as_if(g=("own", "own"))),
        Mistake("mean for sum", "a mean over the ranks, where parts of a sum are to be added ({}).", lambda *given: (
            as_if(g=("mean", "own"))(*given) or as_if(f=("own", "mean"))(*given)
            or as_if(f=("own", "mean"), g=("mean", "own"))(*given))))  # fmt: skip
