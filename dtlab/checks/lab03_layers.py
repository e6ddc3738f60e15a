"""Exercise 5 of lab 03: stage 3, layer by layer: gather, compute, free, and once more in backward."""
import math

import torch
import torch.distributed as dist
from torch import nn

from dtlab.checks import lab03_model as lab
from dtlab.checks.compare import difference, ratio
from dtlab.checks.evidence import Case
from dtlab.checks.exercise import Exercise, Mistake, failed, when
from dtlab.checks.lab02_programs import flat, times

DEEP = (12,) * 21  # 20 layers of 156 numbers: so many that one whole layer more or less is no matter
CATEGORIES = ("params", "grads", "activations", "other")


def layers_of(case):
    """The layers of a case, whole and the same on every rank, in the order in which they are used."""
    generator, made = torch.Generator().manual_seed(case["seed"]), []
    for pair in zip(case["widths"], case["widths"][1:]):
        made.append(nn.Sequential(nn.Linear(*pair, dtype=torch.float64), nn.Tanh()))
        lab.fill(made[-1], generator)
    return [made[number] for number in case["order"]]


def three_cases(rng):
    def case(size, name, widths, order=None, steps=2):
        rows = lambda: (lab.draw(rng, 1, widths[0]), lab.draw(rng, 1, widths[-1]))
        batches = [[rows() for _ in range(size)] for _ in range(steps)]
        return Case(size, name, {"seed": rng.randrange(10**6), "widths": widths, "batches": batches,
                                 "order": order or list(range(len(widths) - 1))})  # fmt: skip

    return [case(4, "20 layers", DEEP, steps=1), case(3, "layers of 16, 5 and 2 numbers", (3, 4, 1, 1)),
            case(2, "one layer used twice", (3, 3, 2), [0, 0, 1]), case(1, "one rank", (3, 4, 2))]  # fmt: skip


def _adam(parameters):
    return torch.optim.Adam(parameters, lr=0.05, eps=0.01)


def three(case, StageThree):
    """On every rank: losses, the input's gradient, and the shards with their gradients after each step."""
    used = {}
    with lab.by_hand():
        model = StageThree(layers_of(case))
        optimizer = _adam(model.parameters())
        lab.mark("made")
        for batches in case["batches"]:
            x, target = batches[dist.get_rank()]
            x.requires_grad_()
            loss = ((model(x) - target) ** 2).mean()
            loss.backward()
            grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            used[f"step {len(used) + 1}"] = {
                "loss": loss.item(), "gradient of x": x.grad, "gradients": grads,
                "shards": [p.detach().clone() for p in model.parameters()]}  # fmt: skip
    return used


def shard_of(whole, rank, size):
    """A rank's part of a flat layer; NaN, anything, in the padding."""
    length = -(-len(whole) // size)
    return torch.cat([whole, whole.new_full((length * size - len(whole),), math.nan)]).chunk(size)[rank]


def three_spec(case, scale=1.0):
    """What ``three`` returns where all is right; ``scale`` is of every gradient."""
    layers, results = layers_of(case), [{} for _ in range(case.world_size)]
    single, model = list(dict.fromkeys(layers)), nn.Sequential(*layers)
    optimizer = _adam(model.parameters())
    for batches in case["batches"]:
        losses, inputs = [], [x.clone().requires_grad_() for x, _ in batches]
        for x, (_, target) in zip(inputs, batches):
            losses.append(((model(x) - target) ** 2).mean())
            losses[-1].backward()
        for parameter in model.parameters():
            parameter.grad *= scale / case.world_size
        grads = [flat(p.grad for p in layer.parameters()) for layer in single]
        optimizer.step()
        optimizer.zero_grad()
        after = [flat(layer.parameters()) for layer in single]
        for rank, its in enumerate(results):
            its[f"step {len(its) + 1}"] = {
                "loss": losses[rank].item(), "gradient of x": inputs[rank].grad,
                "gradients": [shard_of(whole, rank, case.world_size) for whole in grads],
                "shards": [shard_of(whole, rank, case.world_size) for whole in after]}  # fmt: skip
    return results


# what it may spend


def layer_bytes(case):
    """``{layer: bytes, padded}``, each once."""
    sizes = {number: len(flat(layer.parameters())) for number, layer in zip(case["order"], layers_of(case))}
    return {n: -(-size // case.world_size) * case.world_size * lab.FLOAT_BYTES for n, size in sizes.items()}


def share_bytes(case):
    """Bytes of a rank's shards."""
    return sum(layer_bytes(case).values()) // case.world_size


def sent(recording):
    """Bytes that the busiest rank sends."""
    return round(max(sum(its for *_, its in lab.calls(recording, rank)) for rank in recording.ranks))


def allowed_bytes(case):
    """Gathered twice and reduced once, at each use."""
    whole = sum(layer_bytes(case)[n] for n in case["order"]) * len(case["batches"])
    return 3 * whole * (case.world_size - 1) // case.world_size


def few_bytes(case, recording):
    spent, allowed = sent(recording), allowed_bytes(case)
    return f"a rank sends {times(spent, allowed)}" if spent > allowed else None


def held(recording, rank):
    """Bytes that a rank holds at most in a step, beside optimizer states, by category."""
    return lab.peak(recording, rank, CATEGORIES)


def room(case):
    """Bytes that it may hold: shards and their gradients, a few whole layers, what autograd keeps between layers."""
    between = 4 * sum(case["widths"]) * lab.FLOAT_BYTES
    return 2 * share_bytes(case) + lab.IN_FLIGHT * max(layer_bytes(case).values()) + between


def few_layers(case, recording):
    """Judged where there are so many layers that nothing else counts beside them."""
    spent, allowed = max(sum(held(recording, rank).values()) for rank in recording.ranks), room(case)
    over = spent > allowed and case["widths"] == DEEP
    return f"a rank holds {times(spent, allowed)}: shards and a few whole layers" if over else None


# known mistakes


def _piles_up(evidence, _):
    case = evidence.case
    found = sum(held(evidence.recording, 0).values()) / max(layer_bytes(case).values())
    return few_layers(case, evidence.recording) and (
        f"the bytes of {found:.0f} layers at once, where the whole model has {len(case['order'])}")


def _once(evidence, expected):
    case, recording = evidence.case, evidence.recording
    return sent(recording) <= 0.7 * allowed_bytes(case) and _piles_up(evidence, expected)


def _scaled(factor):
    """Whether all gradients of the first step are ``factor(case)`` times the right ones."""
    def seen(evidence, _):
        wanted = factor(evidence.case)
        told, theirs = ([its["step 1"]["gradients"] for its in results]
                        for results in (three_spec(evidence.case, wanted), evidence.results))  # fmt: skip
        return wanted != 1 and difference(theirs, told) is None and (
            f"{wanted:.3g}")
    return when(seen)


def _shapes(evidence, expected):
    theirs, right = ([tuple(its.shape) for its in each[0]["step 1"]["shards"]] for each in (evidence.results, expected))
    return theirs != right and f"{theirs[:3]}, where {right[:3]} are asked for"


def _missing(what):
    return when(lambda evidence, _: any(step[what] is None or None in [*step[what]][:1] for its in evidence.results
                                        for step in its.values()))  # fmt: skip


def _one_use(evidence, expected):
    (first, *rest), (right, *others) = (its[0]["step 1"]["gradients"] for its in (evidence.results, expected))
    twice = len(set(evidence.case["order"])) < len(evidence.case["order"])
    return twice and difference(first, right) and ratio(first, right) is None and not difference(rest, others)


_NOT_WHOLE = (r"[^\n]*(storage of size 0|setStorage|size mismatch|shapes cannot|mat1 and|mat2 must|"
              r"invalid for input)[^\n]*")  # fmt: skip
STAGE_THREE = Exercise(
    "lab03.5", "gather, free, gather again, free", ("StageThree",), three_cases, three, three_spec,
    budget=(few_bytes, few_layers), forbidden=("all_reduce", "broadcast"), minutes=35,
    mistakes=(
        lab.BORROWED, lab.PADDING, lab.UNAWAITED,
        Mistake("fewer chunks than ranks", "a layer of fewer numbers than ranks has fewer chunks, and the last ranks "
                "have none ({}): pad it first.", failed("raised", says=r"index out of range(?=(?s:.*)(chunk|split))")),
        Mistake("hidden shards", "parameters() gives none: nn.Module does not look into plain lists. "
                "nn.ParameterList shows its tensors.", failed("raised", says="empty parameter list")),
        Mistake("a part computes", "in forward a layer computes with a weight that is not whole, or not of its shape. "
                "Gather it and view it before.", lambda evidence, _: "in forward\n" in evidence.text
                and "in backward\n" not in evidence.text and failed("raised", says=_NOT_WHOLE)(evidence, _)),
        Mistake("frees before backward needs it", "backward meets a weight whose memory is gone: {}. What was freed "
                "after a layer's forward is gathered again before its backward.",
                failed("raised", "died", says=_NOT_WHOLE.replace("(", "(inplace operation|", 1))),
        Mistake("not the shards", "parameters() gives tensors of shapes {}: this rank's shard of each layer, flat and "
                "padded.", when(_shapes)),
        Mistake("no gradient for the shards", "a shard's .grad is None after backward: it has to be part of the graph, "
                "or get its .grad by hand.", _missing("gradients")),
        Mistake("no gradient for the input", "x got no gradient. What stands before these layers, an embedding, would "
                "never be trained.", _missing("gradient of x")),
        Mistake("sum for mean", "every gradient is {} times the right one, the number of ranks: a sum where a mean "
                "belongs.", _scaled(lambda case: case.world_size)),
        Mistake("averages twice", "every gradient is {} times the right one: divided by the number of ranks before the "
                "call and after it.", _scaled(lambda case: 1 / case.world_size)),
        Mistake("one of two uses", "all is right but the gradient of the layer that is used twice: its uses add up.",
                when(_one_use)),
        Mistake("gathers once and keeps", "the values are right, each layer is gathered once and kept until backward: "
                "a rank holds {}. That saves a third of the bytes sent, and costs what stage 3 was for.", when(_once)),
        Mistake("whole layers pile up", "the values are right, but a rank holds {}: layers that were given (who keeps "
                "a module keeps its parameters, a view its whole storage) or gathered (autograd saves weights for "
                "backward), or whole gradients.", when(_piles_up)),
        lab.ALL_REDUCE,
    ))  # fmt: skip
