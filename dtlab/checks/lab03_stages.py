"""Exercises 2 and 3 of lab 03: stages 1 and 2 on parameters in two groups, cut where they happen to be."""
import torch.distributed as dist

from dtlab.checks import lab03_model as lab
from dtlab.checks.compare import difference
from dtlab.checks.evidence import Case
from dtlab.checks.exercise import Exercise, Mistake, failed, when
from dtlab.checks.lab02_programs import flat, moved, times

DEEP = (5,) * 25  # 24 layers of 30 numbers: so many that one whole layer more or less is no matter


def _case(rng, size, name, *, widths=(3, 4, 2), steps=2, micro_batches=1, optimizer="AdamW", absent=None):
    """A case of training steps; on the rank ``absent`` the model's branch takes no part."""
    rows = lambda rank: (lab.draw(rng, 3, widths[0]), lab.draw(rng, 3, widths[-1]), rank != absent)
    batches = [[[rows(rank) for _ in range(micro_batches)] for rank in range(size)] for _ in range(steps)]
    return Case(size, name, {"seed": rng.randrange(10**6), "widths": widths, "batches": batches,
                             "optimizer": optimizer})  # fmt: skip


def one_cases(rng):
    """Of exercise 2."""
    return [_case(rng, 4, "two steps of AdamW"),
            _case(rng, 3, "SGD with momentum, no gradient for branch on one rank", widths=(3, 5, 4), optimizer="SGD",
                  absent=rng.randrange(3)),
            _case(rng, 4, "three numbers", widths=(1, 1), steps=3),
            _case(rng, 2, "a step of SGD", steps=1, optimizer="SGD"), _case(rng, 1, "two steps of AdamW")]  # fmt: skip


def two_cases(rng):
    """Of exercise 3."""
    return [_case(rng, 4, "24 layers", widths=DEEP, steps=1),
            _case(rng, 3, "three micro-batches a step", widths=(3, 5, 4, 3), micro_batches=3),
            _case(rng, 2, "SGD with momentum, two micro-batches a step", micro_batches=2, optimizer="SGD"),
            _case(rng, 1, "two micro-batches a step", micro_batches=2)]  # fmt: skip


def train(case, **made):
    """On every rank: the parameters after each step with the learner's class."""
    (make,), model, steps = made.values(), lab.Net(case["seed"], case["widths"]), {}
    with lab.by_hand():
        sharded = make(lab.decay_groups(model), lab.OPTIMIZERS[case["optimizer"]][0])
        for batches in case["batches"]:
            its = batches[dist.get_rank()]
            lab.mark("backward begins")
            for batch in its:
                (lab.loss_of(model, batch) / len(its)).backward()
            lab.mark("backward ends")
            sharded.step()
            steps[f"step {len(steps) + 1}"] = {name: p.detach().clone() for name, p in model.named_parameters()}
            model.zero_grad()
    return steps


def train_spec(case):
    steps = lab.serial(case)
    return [{f"step {number}": its for number, its in enumerate(steps, 1)}] * case.world_size


# what it may spend


def sizes_of(case):
    """Elements of each parameter, as they lie in the groups."""
    return [p.numel() for group in lab.decay_groups(lab.Net(0, case["widths"])) for p in group["params"]]


def shard_bytes(case, ranks=None):
    """Bytes of one of so many shards, whether the line is cut or each parameter."""
    return sum(-(-size // (ranks or case.world_size)) for size in sizes_of(case)) * lab.FLOAT_BYTES


def state_bytes(case, ranks=None):
    """Bytes of the optimizer states of such a shard."""
    _, copies, beside = lab.OPTIMIZERS[case["optimizer"]]
    return copies * shard_bytes(case, ranks) + beside * len(sizes_of(case))


def states(recording, rank):
    """Bytes that a rank's optimizer states took at most."""
    return int(recording.memory()["peak_optimizer_states"][rank])


def few_states(case, recording):
    for rank in recording.ranks:
        spent, allowed = states(recording, rank), state_bytes(case)
        if spent > allowed:
            return f"of optimizer states, rank {rank} holds {times(spent, allowed)}"
        if not spent and lab.pieces(sizes_of(case), case.world_size)[1][rank]:
            return f"rank {rank} holds no optimizer states: make them with the class that is given"
    return None


def two_calls(case, recording):
    """One reduce_scatter and one all_gather a step."""
    found, wanted = [op for op, *_ in lab.calls(recording, 0)], ["reduce_scatter", "all_gather"] * len(case["batches"])
    fits = found == wanted or case.world_size == 1
    return None if fits else f"rank 0 calls {', '.join(found[:6])}, where one {wanted[0]} and one {wanted[1]} a step do"


def allowed_moves(case):
    """Bytes that may be handed to calls: each gradient once a micro-batch, each parameter once a step."""
    return sum(len(its[0]) + 1 for its in case["batches"]) * shard_bytes(case) * case.world_size


def few_bytes(case, recording):
    spent, allowed = max(moved(recording, rank) for rank in recording.ranks), allowed_moves(case)
    return f"a rank hands to calls {times(spent, allowed)}" if spent > allowed else None


def gradients_held(recording, rank):
    """Bytes of gradients that a rank holds at most during backward, on their way included."""
    return sum(lab.peak(recording, rank, ("grads", "-other"), "backward begins", "backward ends").values())


def gradient_room(case):
    """Bytes that it may hold: its shard, and a few layers on their way."""
    layers = [n * m + m for n, m in zip(case["widths"], case["widths"][1:])]
    return shard_bytes(case) + lab.IN_FLIGHT * max(layers) * lab.FLOAT_BYTES


def few_gradients(case, recording):
    """Judged where there are so many layers that nothing else counts beside them."""
    spent, allowed = max(gradients_held(recording, rank) for rank in recording.ranks), gradient_room(case)
    over = spent > allowed and case["widths"] == DEEP
    return f"of gradients, a rank holds during backward {times(spent, allowed)}" if over else None


# known mistakes


def _is(step=0, **changed):
    """Whether the steps up to this one are wrong as ``serial`` makes them; functions are called with the case."""
    def seen(evidence, expected):
        keywords = {key: its(evidence.case) if callable(its) else its for key, its in changed.items()}
        told = lab.serial(evidence.case, **keywords)[: step + 1]
        right, *theirs = ([*its.values()][: step + 1] for its in (expected[0], *evidence.results))
        return difference(told, right) and not any(difference(mine, told) for mine in theirs)
    return when(seen)


def _line(values):
    """All values end to end, as the groups have them: matrices first."""
    return flat(sorted(values.values(), key=lambda its: its.dim() < 2))


def _parts_of(case, whole, rank):
    """A rank's shard of a line."""
    length = lab.pieces(sizes_of(case), case.world_size)[0]
    return whole[rank * length : (rank + 1) * length]


def _stale(evidence, expected):
    """By rank, which elements the first step left as they were; None where something else is wrong."""
    before, found = _line(dict(lab.Net(evidence.case["seed"], evidence.case["widths"]).named_parameters())), []
    for mine, right in zip(evidence.results, expected):
        mine, right = _line(mine["step 1"]), _line(right["step 1"])
        wrong = (mine - right).abs() > 1e-10
        if (mine != before)[wrong].any():
            return None
        found.append(wrong)
    return found


def _never_gathered(evidence, expected):
    stale, case = _stale(evidence, expected), evidence.case
    return stale and all(its.any() and not _parts_of(case, its, rank).any() for rank, its in enumerate(stale))


def _rest_stale(evidence, expected):
    stale = _stale(evidence, expected)
    rest = stale and len(stale[0]) % evidence.case.world_size
    return rest and all(its[-rest:].all() and not its[:-rest].any() for its in stale) and f"{rest} elements"


def _own_gradient(evidence, _):
    """Each rank's shard was stepped with that rank's own gradient."""
    case, ranks = evidence.case, range(evidence.case.world_size)
    told = flat(_parts_of(case, _line(lab.serial(case, ranks=[rank])[0]), rank) for rank in ranks)
    return case.world_size > 1 and not any(difference(_line(mine["step 1"]), told) for mine in evidence.results)


def _first_steps(evidence):
    """The line of rank 0 after its first step, and where its last parameter begins."""
    return _line(evidence.results[0]["step 1"]), sum(sizes_of(evidence.case)[:-1])


def _shifted(evidence, expected):
    """Whether all is wrong from the place on where one rank has no gradient, and nothing before it."""
    sizes, (mine, _) = sizes_of(evidence.case), _first_steps(evidence)
    matrices = len(lab.decay_groups(lab.Net(0, evidence.case["widths"]))[0]["params"])  # branch is next
    wrong = (mine - _line(expected[0]["step 1"])).abs() > 1e-10
    at = sum(sizes[:matrices])
    absent = any(not batch[2] for its in evidence.case["batches"][0] for batch in its)
    return absent and wrong[at:].all() and not wrong[:at].any()


def _late(evidence, expected):
    """Whether no parameter but the last was stepped with a gradient."""
    mine, last = _first_steps(evidence)
    told, right = _line(lab.serial(evidence.case, scale=0.0)[0]), _line(expected[0]["step 1"])
    return last and not difference(mine[:last], told[:last]) and difference(mine[last:], told[last:]) and (
        difference(mine[last:], right[last:]))


def _right_and(test):
    """Whether the parameters are right, and ``test(case, recording)`` tells something."""
    return when(lambda evidence, expected: difference(evidence.results, expected) is None
                and test(evidence.case, evidence.recording))  # fmt: skip


def _unsharded(case, recording):
    spent = min(states(recording, rank) for rank in recording.ranks)
    return few_states(case, recording) and spent >= state_bytes(case, 1) and (
        f"{case.world_size} times the optimizer state bytes of a shard ({spent:,} where {state_bytes(case):,} do)")


COMMON = (
    lab.BORROWED, lab.PADDING, lab.ABSENT, lab.UNAWAITED,
    Mistake("unsharded states", "right parameters, but {}: every rank keeps the states of the whole model. The loss is "
            "right for ever, and nothing was saved.", _right_and(_unsharded)),
    Mistake("no all-gather", "every rank has stepped its own shard, and the rest stands as it was. The first loss does "
            "not tell: the ranks split at the second step.", when(_never_gathered)),
    Mistake("remainder dropped", "the last {} were never trained: shards of total // ranks leave a rest, which lies on "
            "no rank.", when(_rest_stale)),
    Mistake("own gradient", "every rank steps its shard with its own gradient: nothing was averaged.",
            when(_own_gradient)),
    Mistake("sum for mean", "the step is that of a gradient as many times too large as there are ranks. Adam hides "
            "such a factor unless its eps is large, as here; SGD shows it.", _is(scale=lambda case: case.world_size)),
    Mistake("averages twice", "the step is that of a gradient divided by the number of ranks twice: before the call "
            "and after it.", _is(scale=lambda case: 1 / case.world_size)),
    Mistake("only the last micro-batch", "the step uses the last micro-batch only: what a hook brings is added to "
            "what came before.", _is(numbers=slice(-1, None))),
    Mistake("one group's settings", "all is stepped with the rate and decay of the first group. A shard may hold "
            "pieces of both.", _is(one_group=True)),
    Mistake("settings lost", "a group's settings did not come along: the class steps with its own defaults. Take all "
            "that a group has but its list, whatever the names.", lambda evidence, expected: any(
                _is(settings=kept)(evidence, expected) for kept in ((), ("lr",), ("weight_decay",)))),
    Mistake("steps with zeros", "the step is that of a gradient of zeros: the shard was cleared before it was used (a "
            "slice is a view, no copy), or nothing ever came in.", _is(scale=0.0)),
    Mistake("states made anew", "the first step is right, the second begins again: momentum, variance and step counter "
            "are as if there had been none. Make the optimizer once.", _is(1, anew=True)),
    Mistake("gradients never cleared", "the first step is right, the second has the first one's gradient in it too.",
            _is(1, adds_up=True)),
)  # fmt: skip

STAGE_ONE = Exercise(
    "lab03.2", "own states, step, all-gather", ("StageOne",), one_cases, train, train_spec, replicated=True,
    budget=(few_states, two_calls, few_bytes), forbidden=("all_reduce",), references={"shard_pieces": lab.pieces},
    minutes=25,
    mistakes=(*COMMON, lab.ALL_REDUCE,
        Mistake("forgets missing gradients", "a .grad is None on some rank: it has no gradient for that parameter, and "
                "sends zeros for it.", failed("raised", says="NoneType")),
        Mistake("missing gradients shift", "all is wrong from the place on where one rank has no gradient: what was "
                "left out moved the rest of its line. Put zeros there.", when(_shifted)),
        Mistake("gathers gradients", "all is right, but every rank gets all ranks' gradients: as many times the bytes "
                "as there are ranks, and the memory for them.", _right_and(few_bytes)),
        Mistake("a call a piece", "all is right, but pieces or parameters go one by one, and each pays a latency.",
                _right_and(lambda case, recording: len(lab.calls(recording, 0)) > 2 * len(case["batches"]))),
    ))  # fmt: skip

STAGE_TWO = Exercise(
    "lab03.3", "gradients leave as they come", ("StageTwo",), two_cases, train, train_spec, replicated=True,
    budget=(few_states, few_bytes, few_gradients), forbidden=("all_reduce",), references={"shard_pieces": lab.pieces},
    minutes=20,
    mistakes=(*COMMON, lab.ALL_REDUCE,
        Mistake("hook before accumulation", "a hook reads a .grad that is None: it runs before the gradient stands "
                "there; or it is a lambda in a loop, and looks at the parameter that the loop ended with.",
                failed("raised", says="NoneType")),
        Mistake("late binding", "only the last parameter got a gradient: a lambda in a loop reads the loop's variables "
                "when it is called, at their last values. Bind them: lambda p, n=n: ...", when(_late)),
        Mistake("gathers gradients", "the parameters are right, but gradients travel more than once a micro-batch, or "
                "to more ranks than their owner.", _right_and(few_bytes)),
        Mistake("frees nothing", "the parameters are right, but {}. Whole gradients are there together: they wait for "
                "step(), or .grad, a list or a buffer holds them after they were sent. That is stage 1.",
                _right_and(few_gradients)),
    ))  # fmt: skip
