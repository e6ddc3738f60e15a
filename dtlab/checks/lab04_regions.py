"""Exercises 1 and 2 of lab 04: pieces of a tensor and the whole again; f and g."""
import torch
import torch.distributed as dist

from dtlab.checks import lab04_model as lab
from dtlab.checks.compare import difference
from dtlab.checks.evidence import Case
from dtlab.checks.exercise import Exercise, Mistake, failed, in_a_try, when
from dtlab.checks.lab03_model import called, draw

# 1: shard and gather


def cut_cases(rng):
    def whole(shape):
        its = draw(rng, *shape)
        return its.movedim(0, -1).contiguous().movedim(-1, 0) if len(shape) == 3 else its  # strided

    def case(size, *tries):
        return Case(size, "cut", {"tries": [Case(size, f"{' x '.join(map(str, shape))} along {dim}", {
            "whole": whole(shape), "dim": dim}) for shape, dim in tries]})  # fmt: skip

    return [case(4, ((4, 8), 1), ((8, 4), 0)), case(3, ((6,), 0), ((2, 3, 6), -1), ((3, 4), 1), ((4, 3), 0)),
            case(2, ((2, 4, 3), 1), ((2, 4), -2)), case(1, ((3, 2), 1))]  # fmt: skip


def divides(case):
    return case["whole"].shape[case["dim"]] % case.world_size == 0


def pieces(case):
    """The piece of each rank."""
    return [its.clone(memory_format=torch.contiguous_format)
            for its in case["whole"].chunk(case.world_size, case["dim"])]


def cut(case, shard, gather):
    """On every rank: of each try its piece, how that lies in memory, and the whole, gathered from strided pieces."""
    results, rank = {}, dist.get_rank()
    with lab.by_hand():
        for one in case["tries"]:
            whole, dim = one["whole"].clone(), one["dim"]
            if not divides(one):
                wrong = lab.refusal(lambda: shard(whole, dim), whole.shape[dim], one.world_size)  # noqa: B023
                results[one.name] = {"refused": wrong}
                continue
            piece, right = shard(whole, dim), pieces(one)[rank]
            mine = torch.stack([right, -right], -1)[..., 0]
            results[one.name] = {"piece": piece, "memory": _memory(piece), "gathered": gather(mine, dim)}
            unchanged = torch.equal(whole, one["whole"]) and torch.equal(mine, right)
            results[one.name]["given"] = "" if unchanged else "what was given was written to"
    return results


def _memory(piece):
    if not isinstance(piece, torch.Tensor):
        return ""
    held = piece.untyped_storage().nbytes()
    if not piece.is_contiguous():
        return f"the piece is not contiguous: shape {tuple(piece.shape)}, strides {piece.stride()}"
    return f"the piece of {piece.nbytes} bytes holds on to {held}" if held > piece.nbytes else ""


def cut_spec(case):
    right = lambda one, rank: ({"piece": pieces(one)[rank], "memory": "", "gathered": one["whole"], "given": ""}
                               if divides(one) else {"refused": ""})  # fmt: skip
    return [{one.name: right(one, rank) for one in case["tries"]} for rank in range(case.world_size)]


def _as(key, make):
    """In the first wrong try, whether each rank's ``key`` is ``make(case, rank)``, which is not right."""
    def seen(evidence, expected):
        ranks = range(evidence.case.world_size)
        told = [make(evidence.case, rank) for rank in ranks]
        return all(difference(evidence.results[rank][key], told[rank]) is None for rank in ranks) and (
            any(difference(told[rank], expected[rank][key]) for rank in ranks))
    return in_a_try(seen)


def _says(key, text):
    return in_a_try(lambda evidence, _: next((its[key] for its in evidence.results if text in its.get(key, "")), False))


def _every(case, rank):
    dim = case["dim"]
    return case["whole"].index_select(dim, torch.arange(rank, case["whole"].shape[dim], case.world_size))


def _rows(case):
    """The pieces below each other, what lies there read as the whole."""
    return torch.cat(pieces(case)).reshape(case["whole"].shape)


def _own_first(case, rank):
    its = pieces(case)
    return torch.cat([its[rank], *its[:rank], *its[rank + 1 :]], case["dim"])


def _whole_bytes(case):
    return sum(one["whole"].nbytes for one in case["tries"] if divides(one))


SHARD = Exercise(
    "lab04.1", "pieces along any dimension, and the whole again", ("shard", "gather"), cut_cases, cut, cut_spec,
    budget=(lab.within(lambda case: sum(map(divides, case["tries"])), _whole_bytes),), minutes=10,
    forbidden=("all_reduce", "broadcast", "reduce_scatter"),
    mistakes=(
        lab.BORROWED, lab.UNAWAITED,
        Mistake("one buffer for all", "{}", failed("guard", says=r"outputs \d+ and \d+ share memory[^\n]*")),
        lab.STRIDED, lab.STACK, lab.LENGTHS, lab.ABSENT,
        Mistake("not refused", "{}: a size that the ranks do not divide is refused on every rank, before any call, "
                "with both numbers.", in_a_try(lambda evidence, _: evidence.results[0].get("refused"))),
        Mistake("every t-th", "a rank has every {}th row or column. A piece is a run of neighbours.",
                lambda *given: _as("piece", _every)(*given) and str(given[0].case.world_size)),
        Mistake("always rows", "the pieces are cut along dimension 0, where another was asked for.",
                _as("piece", lambda case, rank: case["whole"].tensor_split(case.world_size)[rank])),
        Mistake("strided piece", "{}. Collectives want elements that lie one after the other.",
                _says("memory", "not contiguous")),
        Mistake("keeps the whole alive", "{}: it is a view of the whole, whose memory is never given back. "
                "contiguous() copies only where it has to.", _says("memory", "holds on")),
        Mistake("joined below each other", "all_gather puts the pieces below each other, whatever the dimension, and "
                "that was read as the whole.", lambda *given: _as("gathered", lambda case, _: _rows(case))(*given)
                or _as("gathered", lambda case, _: torch.cat(pieces(case)))(*given)),
        Mistake("own piece first", "each rank put its own piece first. The order is that of the ranks.",
                _as("gathered", _own_first)),
        Mistake("writes to its input", "{}.", _says("given", "written")),
        Mistake("all_reduce for all_gather", "all is right, but the pieces were put into zeros and added up: twice the "
                "bytes of an all_gather, and a sum of zeros.", lab.but(called("all_reduce"))),
        Mistake("a call a piece", "all is right, but each piece has a call of its own, and each pays a latency.",
                lab.but(lambda evidence, _: any(op in ("broadcast", "send", "all_gather") for op in
                                                lab.all_calls(evidence.recording)))),
    ))  # fmt: skip

# 2: f and g, in computations ("flows") that are written once, for one rank and for all of them in one process


def _block(f, g, x, a, b, c):
    return g(torch.tanh(f(x) @ a) @ b)


def _twice(f, g, x, a, b, c):
    return _block(f, g, _block(f, g, x, a, b, c), a, b, c)


def _shared(f, g, x, a, b, c):
    own = torch.tanh(c)  # before f: its gradient is needed after f's
    return x + _block(lambda x: f(x) + own, g, x, a, b, c)


def _strided(f, g, x, a, b, c):
    wide = torch.tanh(f(x).sum(-1, keepdim=True) * a[..., :1, :]) @ b
    return g(wide[..., ::2])


def _second(f, g, x, a, b, c):
    (grad,) = torch.autograd.grad((_block(f, g, x, a, b, c) ** 2).sum(), x, create_graph=True)
    return grad ** 2


FLOWS = {  # name -> (flow, calls of f and g in it, forward and backward)
    "a block": (_block, 2), "two blocks": (_twice, 4), "a gradient that two need": (_shared, 2),
    "strided tensors": (_strided, 2), "the gradient's gradient": (_second, 4)}  # fmt: skip
ROWS, HIDDEN, OWN = 3, 4, 2


def region_cases(rng):
    def case(size, name, *flows):
        own = {"a": draw(rng, size, HIDDEN, OWN), "b": draw(rng, size, OWN, HIDDEN), "c": draw(rng, size, ROWS, HIDDEN)}
        return Case(size, name, {"x": draw(rng, ROWS, HIDDEN), "weights": draw(rng, ROWS, HIDDEN), **own,
                                 "flows": flows or tuple(FLOWS)})  # fmt: skip

    return [case(4, "a block", "a block"), case(3, "used"), case(2, "used"), case(1, "used")]


def _outcome(case, name, out, inputs):
    (out * case["weights"][:, : out.shape[-1]]).sum().backward()
    return {"output": out.detach(), **{f"gradient of {key}": lab.grad_of(its) for key, its in inputs.items()}}


def regions(case, copy_to_region, reduce_from_region):
    """On every rank: what each flow gives, with its gradients; whether f and g leave alone what they get."""
    results, rank, changed = {}, dist.get_rank(), []

    def watched(function, name):
        def call(x):
            before = x.detach().clone()
            y = function(x)
            changed.extend([name] * (not torch.equal(before, x)))
            return y
        return call

    f, g = watched(copy_to_region, "copy_to_region"), watched(reduce_from_region, "reduce_from_region")
    with lab.by_hand():
        for name in case["flows"]:
            own = {key: case[key][rank] for key in "abc"}
            inputs = {key: its.clone().requires_grad_() for key, its in {"x": case["x"], **own}.items()}
            results[name] = _outcome(case, name, FLOWS[name][0](f, g, **inputs), inputs)
    return {"given": f"{changed[0]} writes to what it is given" if changed else "", **results}


def simulated(case, f=lab.F, g=lab.G):
    """What ``regions`` returns, by rank, in one process."""
    results = [{"given": ""} for _ in range(case.world_size)]
    for name in case["flows"]:
        whole = {"x": case["x"].expand(case.world_size, -1, -1), **{key: case[key] for key in "abc"}}
        inputs = {key: its.clone().requires_grad_() for key, its in whole.items()}
        out = _outcome(case, name, FLOWS[name][0](lab.across(*f), lab.across(*g), **inputs), inputs)
        for rank, its in enumerate(results):
            its[name] = {key: value[rank] for key, value in out.items()}
    return results


def _as_if(**ways):
    return lab.is_as(lambda case: simulated(case, **ways))


def _only(*names):
    """Whether these flows are wrong and all others right; how far off the first is."""
    def seen(evidence, expected):
        case = evidence.case
        wrong = {name for name in case["flows"] for mine, its in zip(evidence.results, expected)
                 if difference(mine[name], its[name])}  # fmt: skip
        return wrong and wrong <= set(names) and lab.measured(evidence.results, expected)
    return when(seen)


REGIONS = Exercise(
    "lab04.2", "f and g, as often as you like", ("copy_to_region", "reduce_from_region"), region_cases, regions,
    simulated, budget=(lab.within(lambda case: sum(FLOWS[name][1] for name in case["flows"]),
                       lambda case: sum(FLOWS[name][1] for name in case["flows"]) * case["x"].nbytes),),
    forbidden=lab.ONLY_ALL_REDUCE, minutes=20,
    mistakes=(
        *lab.COMMON,
        Mistake("f and g swapped", "f adds in forward and g in backward ({}). It is the other way round.",
                _as_if(f=lab.G, g=lab.F)),
        *lab.exchanged(_as_if),
        Mistake("writes to its input", "{}: who called still needs it, and autograd may too.",
                when(lambda evidence, _: evidence.results[0]["given"])),
        Mistake("another's gradient", "all is right but where two need one gradient ({}). f adds up what comes "
                "through it: not what comes to x by another way, as a hook on x does, and not in the tensor that "
                "backward gets, where the other one meets the sum.", _only("a gradient that two need")),
        Mistake("no second derivative", "backward cannot be differentiated: {}.",
                failed("raised", says=r"(differentiate twice)[^\n]*")),
        Mistake("wrong second derivative", "outputs and gradients are right, the gradient's gradient is not ({}): what "
                "a collective does to a gradient is part of the graph only if an autograd.Function says how.",
                _only("the gradient's gradient")),
        Mistake("more calls than needed", "all is right, but f does nothing in forward, g nothing in backward.",
                lab.but(lambda evidence, _: len(lab.all_calls(evidence.recording)) > sum(
                    FLOWS[name][1] for name in evidence.case["flows"]))),
    ))  # fmt: skip
