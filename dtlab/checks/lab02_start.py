"""Exercise 1 of lab 02: replicas start equal."""
import torch.distributed as dist

from dtlab.checks import lab02_pictures as pictures
from dtlab.checks.compare import difference
from dtlab.checks.evidence import Case
from dtlab.checks.exercise import Exercise, Mistake, failed, when
from dtlab.checks.lab02_programs import Net, by_hand, moved, named_tensors, times, trained

BORROWED = Mistake("borrowed",
    "{}: write it with the collectives of torch.distributed.",
    failed("raised", says=r"(torch's DistributedDataParallel|dtlab.parallel) is what this lab builds"))


def start_cases(rng):
    seeds = lambda size: {"seeds": rng.sample(range(10**6), size)}
    return [Case(size, "ranks seeded differently", seeds(size)) for size in (2, 4, 1, 3)]


def start(case, equal_start):
    """On every rank: the tensors after the call, and what must not change."""
    model = Net(case["seeds"][dist.get_rank()])
    before = named_tensors(model)
    with by_hand():
        equal_start(model)
    after = named_tensors(model)
    replaced = [name for name in after if after[name] is not before.get(name)]
    return {"tensors": {name: tensor.detach() for name, tensor in after.items()}, "trained": list(trained(model)),
            "replaced": replaced}


def start_spec(case):
    model = Net(case["seeds"][0])
    tensors = {name: tensor.detach() for name, tensor in named_tensors(model).items()}
    return [{"tensors": tensors, "trained": list(trained(model)), "replaced": []}] * case.world_size


def start_budget(case, recording):
    allowed = sum(tensor.nbytes for tensor in named_tensors(Net(0)).values())
    spent = max(moved(recording, rank) for rank in recording.ranks)
    if case.world_size > 1 and spent > allowed:
        return f"a rank moves {times(spent, allowed)}: each tensor once"
    return None


def _unequal(evidence, expected):
    """Names of the tensors that differ from rank 0's first values on some rank."""
    pairs = [(theirs["tensors"], right["tensors"]) for theirs, right in zip(evidence.results, expected)]
    return [name for name in expected[0]["tensors"] if any(difference(a.get(name), b[name]) for a, b in pairs)]


def _only(group):
    """Whether what differs is all of one kind: ``group(model)`` names it."""
    def seen(evidence, expected):
        wrong = _unequal(evidence, expected)
        return bool(wrong) and set(wrong) <= set(group(Net(0))) and ", ".join(wrong)
    return when(seen)


def _frozen(model):
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


def _nothing_sent(evidence, expected):
    return len(_unequal(evidence, expected)) == len(expected[0]["tensors"]) and not moved(evidence.recording, 0)


def _tied_twice(evidence, expected):
    model = Net(0)
    once = sum(tensor.nbytes for tensor in named_tensors(model).values())
    twice = moved(evidence.recording, 0) - once == model.head.weight.nbytes
    return not _unequal(evidence, expected) and twice and start_budget(evidence.case, evidence.recording)


def _rounded(evidence, expected):
    its = [(theirs["tensors"], right["tensors"]) for theirs, right in zip(evidence.results, expected)]
    return all(difference(*pair, rtol=1e-6, atol=1e-6) is None for pair in its) and bool(_unequal(evidence, expected))


def _another_source(evidence, expected):
    mine = evidence.results[0]["tensors"]
    changed = [name for name in _unequal(evidence, expected) if difference(mine[name], expected[0]["tensors"][name])]
    return bool(changed) and ", ".join(changed[:3])


START = Exercise(
    "lab02.1", "replicas start equal: parameters, frozen ones and buffers", ("equal_start",), start_cases, start,
    start_spec, budget=(start_budget,), minutes=10, draw=pictures.start,
    hint="Which tensors does the model hold beside those that the optimizer gets?",
    mistakes=(
        BORROWED,
        Mistake("no broadcast",
            "nothing was sent, so nobody can know rank 0's values. With values of their own seeds replicas differ at "
            "step 0 and stay as far apart, because all take the same steps. The loss falls all the same, and with "
            "equal seeds no test sees it.", when(_nothing_sent)),
        Mistake("own rank as source",
            "every rank broadcasts from itself, so nobody gives anything to the others. On one rank that is right; "
            "on more, all must name the same source.", failed("guard", says="the roots differ")),
        Mistake("handle never awaited",
            "a broadcast that was only started has not happened: each handle needs its wait.",
            failed("guard", says=r"wait\(\)")),
        Mistake("another order",
            "the ranks broadcast other tensors at the same time: all make the same calls in the same order.",
            failed("guard", says="do not make the same call|makes another call")),
        Mistake("not on every rank",
            "{}: a broadcast is a call of all ranks, of those that receive too.",
            failed("hang", says=r"ranks? [\d, -]+ never made that call")),
        Mistake("parameters replaced",
            "these are other tensors than before: {}. An optimizer or a hook made earlier holds the old one and "
            "trains what the model no longer uses. Change the values, keep the tensor.",
            when(lambda e, _: ", ".join(e.results[-1]["replaced"][:3]))),
        Mistake("requires_grad changed",
            "the trained parameters are no longer the same: {}. Equal values are not enough: what was frozen stays "
            "frozen, what was trained stays trained.",
            when(lambda e, x: ", ".join({*e.results[-1]["trained"]} ^ {*x[0]["trained"]}))),
        Mistake("rounded to float32",
            "the values are right to some 7 digits, no further: somewhere they pass through float32.", when(_rounded)),
        Mistake("another source",
            "rank 0's own values changed ({}): all ranks are to get what rank 0 has, not an average, nor another "
            "rank's. An average of random weights is too small for a start.", when(_another_source)),
        Mistake("state_dict only",
            "{} differs: a buffer with persistent=False stands in no state_dict, and the model computes with it all"
            " the same.", _only(lambda model: ["scale"])),
        Mistake("forgets buffers",
            "the parameters are equal, the buffers are not: {}. With equal seeds nothing shows it, nor does the "
            "loss; in evaluation each rank normalises with numbers of its own.",
            _only(lambda model: dict(model.named_buffers()))),
        Mistake("forgets frozen parameters",
            "what is trained is equal, what is frozen is not: {}. No optimizer touches it, so it never becomes "
            "equal, and every gradient that passes through it is wrong.", _only(_frozen)),
        Mistake("sent twice",
            "all is equal, but {}: a tied weight is one tensor with two names, and a model may hold many such.",
            when(_tied_twice)),
        Mistake("forgets what no optimizer holds",
            "only trained parameters are equal; frozen ones and buffers are not: {}.",
            _only(lambda model: [*_frozen(model), *dict(model.named_buffers())])),
    ))  # fmt: skip
