"""What tells two values apart, in the words of a learner: shape, type, the first index that differs, the ratio.

Where the right tensor has NaN, any value is right.
"""
import torch

from dtlab.theory import base_op

RTOL, ATOL = 1e-10, 1e-12  # float64: sums in another order differ by far less, mistakes by far more


def difference(theirs, right, *, rtol=RTOL, atol=ATOL, place=""):
    """Where ``theirs`` is not ``right``, as a sentence; None where they are equal. Dicts, lists, tensors, numbers."""
    at = f"{place}: " if place else ""
    if isinstance(right, dict):
        if not isinstance(theirs, dict) or theirs.keys() != right.keys():
            return f"{at}{_brief(theirs)} should have {', '.join(map(str, right))}"
        pairs = [(f"{place}{', ' if place else ''}{key}", theirs[key], right[key]) for key in right]
    elif isinstance(right, (list, tuple)):
        if not isinstance(theirs, (list, tuple)) or len(theirs) != len(right):
            return f"{at}{_brief(theirs)} should be {_brief(right)}"
        pairs = [(f"{place}[{number}]", ours, its) for number, (ours, its) in enumerate(zip(theirs, right))]
    elif isinstance(right, torch.Tensor):
        wrong = _tensors(theirs, right, rtol, atol)
        return f"{at}{wrong}" if wrong else None
    else:
        if isinstance(theirs, torch.Tensor) and theirs.numel() == 1 and not isinstance(right, str):
            theirs = theirs.item()
        if isinstance(theirs, torch.Tensor):
            return f"{at}{_brief(theirs)} should be {_brief(right)}"
        rounds = type(right) is int and isinstance(theirs, float)  # no index, even where it is equal
        same = theirs == right and not rounds or (isinstance(right, float) and isinstance(theirs, (int, float))
                                   and abs(theirs - right) <= atol + rtol * abs(right))  # fmt: skip
        told = right == "" and isinstance(theirs, str)  # a program's own sentence on what is wrong
        return None if same else f"{at}{theirs}" if told else f"{at}{_brief(theirs)} should be {_brief(right)}"
    return next(filter(None, (difference(a, b, rtol=rtol, atol=atol, place=where) for where, a, b in pairs)), None)


def _tensors(theirs, right, rtol, atol):
    if not isinstance(theirs, torch.Tensor):
        return f"{_brief(theirs)} should be a tensor of shape {tuple(right.shape)}"
    if theirs.shape != right.shape or theirs.dtype != right.dtype:
        return (f"shape {tuple(theirs.shape)}, {theirs.dtype} should be {tuple(right.shape)}, {right.dtype}")
    close = torch.isclose(theirs, right, rtol=rtol, atol=atol)
    close |= right.isnan()
    if close.all():
        return None
    index = (~close).nonzero()[0].tolist()
    found, wanted = theirs[tuple(index)].item(), right[tuple(index)].item()
    times = ratio(theirs, right)
    tail = f"; every value is {times:.4g} times the right one" if times is not None else ""
    where = f"at {index[0] if len(index) == 1 else index} " if index else ""
    return f"{where}{found:.10g} should be {wanted:.10g}{tail}"


def ratio(theirs, right):
    """By how much all values are too large, if it is one number (other than 1); else None."""
    if not isinstance(theirs, torch.Tensor) or theirs.shape != right.shape or not right.is_floating_point():
        return None
    theirs, right = theirs[~right.isnan()], right[~right.isnan()]
    there = right.abs() > 1e-9
    if not there.any() or not theirs.any() or not torch.isfinite(theirs).all():
        return None
    ratios = (theirs[there] / right[there]).double()
    one = ratios.median()
    same = torch.isclose(ratios, one, rtol=1e-6).all() and abs(one - 1) > 1e-6 and (theirs[~there].abs() < 1e-6).all()
    return one.item() if same else None


def collectives_used(recording):
    """Plain names of the calls that a recording shows, messages included: ``{"all_reduce", "send"}``."""
    return {base_op(op) for op in recording.communication()["op"]}


def sent_bytes(recording):
    """Bytes that each rank sent, by rank order."""
    sent = recording.communication().groupby("rank")["wire_bytes"].sum()
    return [float(sent.get(rank, 0.0)) for rank in recording.ranks]


def _brief(value):
    text = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    return text if len(text) < 80 else text[:77] + "..."
