"""Exercise 2 of lab 02: every token counts once, on whatever rank and in whatever micro-batch."""
import torch
import torch.distributed as dist
from torch import nn

from dtlab.checks import lab02_pictures as pictures
from dtlab.checks.compare import difference, ratio
from dtlab.checks.evidence import Case
from dtlab.checks.exercise import Exercise, Mistake, failed, when
from dtlab.checks.lab02_programs import Net, by_hand, draw_batch, flat, gradients, moved, times, token_loss, trained
from dtlab.checks.lab02_start import BORROWED


class Slope(nn.Module):
    """One weight; a token with number g has the loss g * weight, and so the gradient g."""

    def __init__(self, seed):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))


def slope_loss(model, numbers):
    """The loss summed over the tokens, and how many they are."""
    return model.weight * sum(numbers), len(numbers)


def _tokens(rng, counts):
    """A case of ``counts[rank][micro-batch]`` tokens."""
    batches = [[draw_batch(rng, 3, 5, count) for count in its] for its in counts]
    return {"model": Net, "seed": rng.randrange(10**6), "loss_of": token_loss, "batches": batches}


def weigh_cases(rng):
    odd = lambda: rng.randrange(1, 15, 2)
    slopes = {"model": Slope, "seed": 0, "loss_of": slope_loss, "batches": [[[1.0]], [[5.0, 5.0, 5.0]]]}
    return [
        Case(2, "one token with gradient 1 against three with gradient 5", slopes),
        Case(1, "micro-batches of 1, 0 and 5 tokens", _tokens(rng, [[1, 0, 5]])),
        Case(4, "three micro-batches a rank", _tokens(rng, [[odd(), odd(), odd()] for _ in range(4)])),
        Case(3, "a rank without tokens", _tokens(rng, [[odd(), 0], [0, 0], [0, odd()]])),
        Case(4, "a rank without micro-batches", _tokens(rng, [[odd()], [], [0, odd(), odd()], [odd()]])),
        Case(2, "no token on any rank", _tokens(rng, [[0], [0]])),
    ]


def weigh(case, token_mean_backward):
    """On every rank: the loss it returns and the gradients that stand there."""
    model = case["model"](case["seed"]).eval()
    with by_hand():
        loss = token_mean_backward(model, case["batches"][dist.get_rank()], case["loss_of"])
    return {"loss": loss, "gradients": gradients(model)}


def _sums(case):
    """``[[(tokens, loss sum, gradient sum as one vector) of each micro-batch] of each rank]``."""
    model, ranks = case["model"](case["seed"]).eval(), []
    for its in case["batches"]:
        ranks.append([])
        for batch in its:
            model.zero_grad()
            loss, tokens = case["loss_of"](model, batch)
            loss.backward()
            ranks[-1].append((tokens, loss.item(), flat(gradients(model).values())))
    return ranks


def _mean(parts, at):
    """Sum of a column of ``(tokens, loss, gradient)`` over its tokens; 0 without any."""
    return sum((part[at] for part in parts), 0 * parts[0][at]) / max(1, sum(tokens for tokens, *_ in parts))


def weigh_spec(case):
    parts = [part for its in _sums(case) for part in its]
    names, pieces = trained(case["model"](case["seed"])), {}
    rest = _mean(parts, 2)
    for name, parameter in names.items():
        pieces[name], rest = rest[:parameter.numel()].view(parameter.shape), rest[parameter.numel():]
    return [{"loss": float(_mean(parts, 1)), "gradients": pieces}] * case.world_size


def _gradient_bytes(case):
    return sum(parameter.nbytes for parameter in trained(case["model"](case["seed"])).values())


def weigh_budget(case, recording):
    allowed = _gradient_bytes(case) + 64
    spent = max(moved(recording, rank) for rank in recording.ranks)
    if spent > allowed:
        return f"a rank moves {times(spent, allowed)}: one reduction a step, and room for a few numbers"
    return None


def _theirs(evidence, rank=0):
    return flat(evidence.results[rank]["gradients"].values())


def _right(expected):
    return flat(expected[0]["gradients"].values())


def _is(wrong_value):
    """Whether the gradient on every rank is ``wrong_value(parts of all ranks)``; the text has both first numbers."""
    def seen(evidence, expected):
        wrong = wrong_value(_sums(evidence.case))
        ranks = range(evidence.case.world_size)
        if any(difference(_theirs(evidence, rank), wrong) for rank in ranks) or not difference(wrong, _right(expected)):
            return False
        return f"{wrong[0]:.4g} instead of {_right(expected)[0]:.4g}"
    return when(seen)


def _rank_means(ranks):
    return sum(_mean(its, 2) for its in ranks if its) / len(ranks)


def _means_with_tokens(ranks):
    its = [_mean(parts, 2) for parts in ranks if sum(tokens for tokens, *_ in parts)]
    return sum(its) / max(1, len(its))


def _micro_means(ranks):
    return sum(_mean([part], 2) / len(its) for its in ranks for part in its) / len(ranks)


def _has_nan(evidence, expected):
    is_bad = lambda rank: not torch.isfinite(_theirs(evidence, rank).sum() + float(evidence.results[rank]["loss"]))
    bad = [rank for rank in range(evidence.case.world_size) if is_bad(rank)]
    return bool(bad) and f"{len(bad)} of {evidence.case.world_size} ranks"


def _every_micro_batch(evidence, expected):
    spent, allowed = moved(evidence.recording, 0), _gradient_bytes(evidence.case)
    most = max(map(len, evidence.case["batches"]))
    return most > 1 and spent >= (most - 0.5) * allowed and times(spent, allowed + 64)


def _frozen_too(evidence, expected):
    if any(map(difference, evidence.results, expected)):
        return False
    frozen = sum(p.nbytes for p in evidence.case["model"](0).parameters() if not p.requires_grad)
    more = moved(evidence.recording, 0) - _gradient_bytes(evidence.case) - frozen
    return frozen > 64 and 0 <= more <= 64 and f"{frozen} bytes"


def _rounded_loss(evidence, expected):
    right = expected[0]["loss"]
    losses = [float(theirs["loss"]) for theirs in evidence.results]
    return all(abs(its - right) < 1e-5 * abs(right) for its in losses) and any(
        difference(its, right) for its in losses) and (
        not difference(_theirs(evidence), _right(expected)))


def _own_loss(evidence, expected):
    same = not difference([r["gradients"] for r in evidence.results], [x["gradients"] for x in expected])
    wrong = any(difference(its["loss"], right["loss"]) for its, right in zip(evidence.results, expected))
    return same and wrong and (
        f"rank 0 returns {float(evidence.results[0]['loss']):.4g}, right is {expected[0]['loss']:.4g}")


def _gradient_ratio(evidence, expected):
    its = [ratio(_theirs(evidence, rank), _right(expected)) for rank in range(evidence.case.world_size)]
    return its[0] if None not in its and max(its) - min(its) < 1e-6 * abs(its[0]) else None


def _factor(of_case):
    """Whether all gradients are ``of_case(case)`` times the right ones."""
    def seen(evidence, expected):
        found, wanted = _gradient_ratio(evidence, expected), of_case(evidence.case)
        return found is not None and abs(found / wanted - 1) < 1e-6 and f"{found:.2f}"
    return when(seen)


def _rank_0_only(evidence, expected):
    wrong = [bool(difference(_theirs(evidence, rank), _right(expected))) for rank in range(evidence.case.world_size)]
    return not wrong[0] and any(wrong)


def _num_tokens(case):
    return sum(tokens for its in _sums(case) for tokens, *_ in its)


WEIGH = Exercise(
    "lab02.2", "every token counts once, on whatever rank and in whatever micro-batch", ("token_mean_backward",),
    weigh_cases, weigh, weigh_spec, budget=(weigh_budget,), minutes=20,
    draw=pictures.weigh, hint="How many tokens are there, and who knows that number?",
    mistakes=(
        BORROWED,
        Mistake("divides by no tokens",
            "NaN on {}: somebody divides 0 by 0. A rank or a micro-batch without tokens adds nothing; with full "
            "batches it never happens, with padded ones it takes every rank along.", when(_has_nan)),
        Mistake("no gradient without micro-batches",
            "a rank that has no micro-batch ran no backward, so its .grad is None. It still has to take part, with "
            "zeros.", failed("raised", says=r"NoneType")),
        Mistake("missing call",
            "a rank without tokens left out a call that the others wait for. As long as every rank has tokens nothing "
            "shows it.",
            failed("hang", "guard",
                   says=r"never (made that call|called)|shapes differ|(not make the same|makes another) call")),
        Mistake("reads before wait",
            "a gradient is read, or left, while its all_reduce is under way: each handle needs its wait.",
            failed("guard", says=r"wait\(\)")),
        Mistake("mean of means",
            "the gradient is the mean of the ranks' means, {}: a rank with one token counts as much as a rank with "
            "three. With equal numbers of tokens both are the same.", _is(_rank_means)),
        Mistake("mean of means",
            "the gradient is the mean of the means of the ranks that have tokens, {}: a token on a rank with few "
            "counts more than another.", _is(_means_with_tokens)),
        Mistake("mean of micro-batch means",
            "the gradient is the mean of the micro-batches' means, {}: a micro-batch with one token counts as much "
            "as one with five.", _is(_micro_means)),
        Mistake("sum for mean",
            "every gradient is {}x the right one, the number of ranks: added up over the ranks, and then not made a"
            " mean. On one rank it is right.", _factor(lambda case: case.world_size)),
        Mistake("divides twice",
            "every gradient is {}x the right one, 1 / ranks: one division too many. The number of all tokens, or a "
            "mean over the ranks: only one of them.", _factor(lambda case: 1 / case.world_size)),
        Mistake("not divided by tokens",
            "every gradient is {}x the right one, the number of all tokens: the sum of the losses, not their mean. "
            "It grows with the batch.", _factor(_num_tokens)),
        Mistake("reduce for all_reduce",
            "rank 0 has the right gradient, others have not. From the next step on the replicas differ, and rank "
            "0's loss says nothing of it.", when(_rank_0_only)),
        Mistake("reduces every micro-batch",
            "the result may be right, but {}: a reduction after every micro-batch. Gradients add up in "
            ".grad; they need to travel once a step.", when(_every_micro_batch)),
        Mistake("frozen parameters sent",
            "all is right, but {} too many go into collectives: those of frozen parameters, which have no gradient.",
            when(_frozen_too)),
        Mistake("loss in float32",
            "the gradients are right, and the loss to seven digits: it was rounded to float32 on its way, as is a "
            "tensor made of a Python number. Of tokens, float32 counts only 16 million.", when(_rounded_loss)),
        Mistake("loss of one rank",
            "the gradients are right, but the loss is not that of all tokens: {}. A mean of the ranks' numbers is "
            "no mean over tokens either.", when(_own_loss)),
    ))  # fmt: skip
