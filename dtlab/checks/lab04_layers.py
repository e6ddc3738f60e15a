"""Exercises 3 and 4 of lab 04: MLP and attention, cut so that each needs one all-reduce forward and one backward."""
import torch
from torch import nn

from dtlab.checks import lab04_model as lab
from dtlab.checks.compare import difference
from dtlab.checks.evidence import Case
from dtlab.checks.exercise import Exercise, Mistake, failed, when
from dtlab.checks.lab03_model import draw, fill

# layers: {"first.weight": [out, h], "first.bias": [out], "second.weight": [h, in], "second.bias": [h]}


def whole_layers(case):
    """The two linears, whole and the same on every rank."""
    generator, bias = torch.Generator().manual_seed(case["seed"]), case["bias"]
    made = [nn.Linear(*pair, bias=bias, dtype=torch.float64) for pair in zip(case["widths"], case["outs"])]
    for linear in made:
        fill(linear, generator)
    return made


def weights_of(case):
    """Name -> whole tensor."""
    return {f"{name}.{key}": its.detach() for name, linear in zip(case["names"], whole_layers(case))
            for key, its in linear.named_parameters()}  # fmt: skip


def taken(case, weights, rank, how="runs"):
    """A rank's part of whole tensors; ``how`` names rows of the first linear, as ``rows`` says."""
    first, second = case["names"]
    rows, columns = rows_of(case, rank, how)
    part = {f"{first}.weight": lambda its: its[rows], f"{first}.bias": lambda its: its[rows],
            f"{second}.weight": lambda its: its[:, columns]}  # fmt: skip
    return {name: part.get(name, lambda its: its)(its).clone() for name, its in weights.items()}


def rows_of(case, rank, how):
    """``(rows of the first, columns of the second)`` of a rank.

    "runs" of whole heads, as they should be; "straight" without regard to q, k and v; "every" t-th head; "within" a
    part of every head.
    """
    into, size = case["widths"][1], case.world_size
    heads = torch.arange(into).view(case["heads"], -1)  # [a, d]
    columns = {"every": lambda: heads[rank::size], "within": lambda: heads.chunk(size, 1)[rank]}.get(
        how, lambda: heads.chunk(size)[rank])().flatten()  # fmt: skip
    rows = torch.cat([columns + block * into for block in range(case["blocks"])])
    return torch.arange(case["outs"][0]).chunk(size)[rank] if how == "straight" else rows, columns


def layer(case, **made):
    """On every rank: output, gradients, and this rank's part of the parameters with what they keep in memory."""
    (make,), more = made.values(), case["more"]
    with lab.by_hand():
        model, x = make(*whole_layers(case), *more), case["x"].clone().requires_grad_()
        y = model(x)
        if y.shape == case["weights"].shape:
            (y * case["weights"]).sum().backward()
        parameters, names = list(model.parameters()), list(weights_of(case))
        few, t = case["refuses"], case.world_size
        refused = lab.refusal(lambda: make(*whole_layers(case), few), few, t) if few else ""
        storages = {its.untyped_storage().data_ptr(): its.untyped_storage().nbytes() for its in parameters}
    return {"shapes": [tuple(its.shape) for its in parameters],
            "parameters": {name: its.detach() for name, its in zip(names, parameters)},
            "output": y, "gradient of x": x.grad,
            "gradients": {name: lab.grad_of(its) for name, its in zip(names, parameters)},
            "memory": _memory(sum(storages.values()), sum(its.nbytes for its in parameters)),
            "refused": refused}  # fmt: skip


def _memory(held, needed):
    return f"parameters of {needed} bytes hold on to {held}" if held > needed else ""


# what comes out, for one rank with everything or for t ranks in one process: tensors [t, ...]


def _linear(x, weights, name, bias=True):
    y = (x.flatten(1, -2) @ weights[f"{name}.weight"].mT).unflatten(1, x.shape[1:-1])
    if bias and f"{name}.bias" in weights:
        y = y + weights[f"{name}.bias"].view(len(y), *[1] * (y.dim() - 2), -1)
    return y


def _inside(case, x, weights, heads, causal, by_head):
    """Between input and last linear: GELU, or attention of so many heads on a rank."""
    y = _linear(x, weights, case["names"][0])
    if case["blocks"] == 1:
        return nn.functional.gelu(y)
    cut = lambda its: its.unflatten(-1, (heads, -1)).transpose(-2, -3)
    q, k, v = cut(y).chunk(3, -1) if by_head else map(cut, y.chunk(3, -1))
    return lab.attend(q, k, v, causal).transpose(-2, -3).flatten(-2)


_BIAS = {  # the factor of the second bias inside g on each rank, where it is not outside
    "each": torch.ones, "first": lambda t: torch.eye(t)[0], "share": lambda t: torch.ones(t) / t}  # fmt: skip


def flow(case, parts, f=lab.F, g=lab.G, bias="once", heads=None, causal=True, by_head=False):
    """Output and gradients by rank, of ranks with these parts."""
    t, name = len(parts), case["names"][1]
    f, g = lab.across(*f), lab.across(*g)
    weights = {key: torch.stack([its[key] for its in parts]).requires_grad_() for key in parts[0]}
    x = case["x"].expand(t, *case["x"].shape).clone().requires_grad_()
    y = _linear(_inside(case, f(x), weights, heads or case["heads"] // t, causal, by_head), weights, name, bias=False)
    own = weights.get(f"{name}.bias", torch.zeros(t, 1))
    own = (f(own) if bias == "copied" else own).view(t, *[1] * (y.dim() - 2), -1)
    y = g(y + _BIAS[bias](t).view(t, *[1] * (y.dim() - 1)) * own) if bias in _BIAS else g(y) + own
    (y * case["weights"]).sum().backward()
    return [(y[rank].detach(), x.grad[rank], {key: its.grad[rank] for key, its in weights.items()})
            for rank in range(t)]  # fmt: skip


def _result(output, of_x, parameters, gradients):
    return {"shapes": [tuple(its.shape) for its in parameters.values()], "parameters": parameters, "output": output,
            "gradient of x": of_x, "gradients": gradients, "memory": "", "refused": ""}  # fmt: skip


def layer_spec(case):
    """What ``layer`` returns where all is right: one process with everything, cut."""
    weights = weights_of(case)
    ((output, of_x, gradients),) = flow(case, [weights])
    return [_result(output, of_x, taken(case, weights, rank), taken(case, gradients, rank))
            for rank in range(case.world_size)]  # fmt: skip


def simulated(case, how="runs", **changed):
    """What ``layer`` returns if ranks have other parts or do other things with them."""
    parts = [taken(case, weights_of(case), rank, how) for rank in range(case.world_size)]
    return [_result(output, of_x, part, gradients) for part, (output, of_x, gradients) in
            zip(parts, flow(case, parts, **changed))]  # fmt: skip


# cases


def _case(rng, size, name, widths, outs, names, *, blocks=1, heads=1, bias=True, shape=(3,), refuses=0, more=()):
    x, weights = draw(rng, *shape, widths[0]), draw(rng, *shape, outs[1])
    return Case(size, name, {"seed": rng.randrange(10**6), "widths": widths, "outs": outs, "names": names, "x": x,
                             "weights": weights, "blocks": blocks, "heads": heads, "bias": bias, "refuses": refuses,
                             "more": more})  # fmt: skip


def mlp_cases(rng):
    def case(size, hidden, ffn, bias=True):
        name = f"{hidden} hidden, {ffn} inside{'' if bias else ', no bias'}"
        return _case(rng, size, name, (hidden, ffn), (ffn, hidden), ("fc1", "fc2"), heads=ffn, bias=bias)

    return [case(4, 4, 8), case(3, 4, 9), case(2, 5, 4, bias=False), case(1, 3, 4)]


def attention_cases(rng):
    def case(size, heads, head_size, bias=True, refuses=0):
        h, name = heads * head_size, f"{heads} heads of {head_size}{'' if bias else ', no bias'}"
        return _case(rng, size, name, (h, h), (3 * h, h), ("qkv", "proj"), blocks=3, heads=heads, bias=bias,
                     shape=(2, 4), refuses=refuses, more=(heads,))  # fmt: skip

    return [case(4, 4, 4), case(3, 6, 2, bias=False, refuses=2), case(2, 4, 3), case(1, 2, 3)]


# known mistakes


def _as_if(how="runs", **changed):
    return lab.is_as(lambda case: simulated(case, how, **changed))


def _rows(how):
    """Whether the fused weight's rows are taken as ``how`` says, whatever is done with them; says which rank 0 has."""
    def seen(evidence, expected):
        case, whole = evidence.case, weights_of(evidence.case)
        told = [taken(case, whole, rank, how)["qkv.weight"] for rank in range(case.world_size)]
        theirs, right = ([its["parameters"]["qkv.weight"] for its in all_] for all_ in (evidence.results, expected))
        found = (rows_of(case, 0, how)[0] // case["widths"][1]).bincount(minlength=3).tolist()
        return not difference(theirs, told) and difference(told, right) and (
            ", ".join(f"{count} of {name}" for count, name in zip(found, "qkv")))
    return when(seen)


def _heads(evidence, expected):
    """Into how many heads a rank's part was cut, if not into its own."""
    width = evidence.case["widths"][1] // evidence.case.world_size
    return next((str(count) for count in range(1, width + 1) if width % count == 0
                 and _as_if(heads=count)(evidence, expected)), False)  # fmt: skip


def _shapes(test):
    """Whether the shapes are wrong, and ``test(theirs, right, whole)``; says them."""
    def seen(evidence, expected):
        theirs, right = (its[-1]["shapes"] for its in (evidence.results, expected))
        whole = [tuple(its.shape) for its in weights_of(evidence.case).values()]
        return theirs != right and test(theirs, right, whole) and f"{theirs} where {right} are asked for"
    return when(seen)


_twice = lab.within(lambda _: 2, lambda case: 2 * case["x"].nbytes)
_LAYERS = (
    *lab.COMMON,
    Mistake("forgets bias=False", "a linear without bias has None there: {}.",
            failed("raised", says=r"'NoneType' object[^\n]*")),
    Mistake("parts do not fit", "{}: of the first weight a rank has [out / t, in], of its bias as many, of the second "
            "weight [out, in / t]. torch keeps a weight as [out, in].",
            failed("raised", says=r"(mat1 and mat2 shapes|The expanded size of)[^\n]*")),
    Mistake("whole weights", "every rank keeps the whole weights ({}): t times the memory, and nothing is saved.",
            _shapes(lambda theirs, _, whole: theirs == whole)),
    Mistake("another order", "parameters() gives the parts in another order ({}): it is that in which they are set.",
            _shapes(lambda theirs, right, _: sorted(theirs) == sorted(right))),
    Mistake("bias cut too", "the second bias belongs to whole outputs, and every rank has it whole ({}).",
            _shapes(lambda theirs, right, _: len(theirs) == 4 and theirs[:3] == right[:3])),
    Mistake("every t-th", "a rank has every t-th row, not a run of neighbours. The results are right, but a "
            "checkpoint cut in runs would not fit.", _as_if("every")),
    Mistake("keeps the whole alive", "{}: a part is a view of the whole weight, whose memory is never given "
            "back.", when(lambda evidence, _: evidence.results[0]["memory"])),
    Mistake("bias on each rank", "the second bias is inside the sum on every rank, and is in the output as often "
            "as there are ranks ({}).", _as_if(bias="each")),
    Mistake("bias on rank 0 only", "the output is right, but only rank 0's second bias gets a gradient ({}): the "
            "others stand still, and after a step it is no longer the same on all.", _as_if(bias="first")),
    Mistake("a share of the bias", "the output is right, but each rank adds 1/t of the second bias inside the sum, and "
            "its gradient is 1/t of the right one ({}).", _as_if(bias="share")),
    Mistake("bias gradient added up", "the output is right, but the gradient of the second bias, which every rank has "
            "whole, was added over the ranks ({}).", _as_if(bias="copied")),
    *lab.exchanged(_as_if),
    Mistake("too many calls", "all is right, but one all_reduce forward and one backward do.",
            lab.but(lambda evidence, _: _twice(evidence.case, evidence.recording))),
)  # fmt: skip

MLP = Exercise(
    "lab04.3", "two all-reduces, the bias once", ("ParallelMLP",), mlp_cases, layer, layer_spec, budget=(_twice,),
    forbidden=lab.ONLY_ALL_REDUCE, references=lab.REFERENCES, minutes=15, mistakes=_LAYERS)  # fmt: skip

ATTENTION = Exercise(
    "lab04.4", "whole heads of a fused weight", ("ParallelAttention",), attention_cases, layer, layer_spec,
    budget=(_twice,), forbidden=lab.ONLY_ALL_REDUCE, references=lab.REFERENCES, minutes=20,
    mistakes=(
        Mistake("not refused", "made with 2 heads of 6: {}. 3 ranks cannot share them, though 3 divides the width.",
                when(lambda evidence, _: evidence.results[0]["refused"])),
        Mistake("cut straight", "the fused weight was cut into runs of rows. Its rows are all of q, then all of k, "
                "then all of v, so rank 0 got {}.", _rows("straight")),
        Mistake("parts of every head", "a rank has some rows of every head (rank 0: {}). A softmax needs all of a "
                "head's q and k: a whole head is the least that a rank can have alone.", _rows("within")),
        Mistake("heads of another size", "the parameters are right, but the number of heads that a rank's q, k "
                "and v were cut into is {}, not its own: unflatten(-1, (heads, -1)).", _heads),
        Mistake("head by head", "the parameters are right, but what comes out was read head by head ({}), as in the "
                "lesson: here a rank has three blocks too.", _as_if(by_head=True)),
        Mistake("looks ahead", "the parameters are right, but a token sees what comes after it ({}).",
                _as_if(causal=False)),
        *_LAYERS,
    ))  # fmt: skip
