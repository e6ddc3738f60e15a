"""Exercise 5 of lab 04: cross entropy over a vocabulary in pieces, three numbers a token."""
import torch
import torch.distributed as dist

from dtlab.checks import lab04_model as lab
from dtlab.checks.compare import difference
from dtlab.checks.evidence import Case
from dtlab.checks.exercise import Exercise, Mistake, failed, in_a_try
from dtlab.checks.lab03_model import FLOAT_BYTES, draw

IGNORED = -100


def columns(case):
    """Columns of a rank, padding included."""
    return -(-case["vocab"] // case.world_size)


def loss_cases(rng):
    """Several tries each; of every rank's columns the first and the last are targets."""
    def one(size, vocab, name, *, scale=1.0, padding=2.0, ignored=0):
        k = -(-vocab // size)
        ends = {min(at, vocab - 1) for rank in range(size) for at in (rank * k, rank * k + k - 1)}
        targets = torch.tensor(sorted(ends))
        case = Case(size, name, {"vocab": vocab, "targets": targets, "weights": draw(rng, len(targets)) + 2,
                                 "logits": scale * draw(rng, len(targets), k * size)})  # fmt: skip
        case["logits"][:, vocab:] = padding * scale
        targets[len(targets) - ignored :] = IGNORED
        return case

    four = [one(4, 30, "vocabulary 30"), one(4, 30, "some tokens ignored", ignored=3),
            one(4, 30, "logits of a thousand", scale=1000.0), one(4, 5, "a rank with padding only")]  # fmt: skip
    return [Case(4, "lost", {"tries": four}),
            Case(3, "lost", {"tries": [one(3, 9, "vocabulary 9"), one(3, 8, "all tokens ignored", ignored=6)]}),
            Case(2, "lost", {"tries": [one(2, 5, "vocabulary 5")]}),
            Case(1, "lost", {"tries": [one(1, 5, "vocabulary 5", ignored=1)]})]  # fmt: skip


def lose(case, vocab_cross_entropy):
    """On every rank: of each try the loss of every token, and the gradient of this rank's logits."""
    results, rank = {}, dist.get_rank()
    for one in case["tries"]:
        mine = one["logits"].chunk(case.world_size, -1)[rank].clone()
        logits, targets = mine.clone().requires_grad_(), one["targets"].clone()
        with lab.by_hand():
            loss = vocab_cross_entropy(logits, targets, one["vocab"])
            if loss.shape == targets.shape:
                (loss * one["weights"]).sum().backward()
        unchanged = torch.equal(mine, logits.detach()) and torch.equal(targets, one["targets"])
        results[one.name] = {"loss": loss, "gradient": logits.grad,
                             "given": "" if unchanged else "what was given was written to"}
    return results


def lose_spec(case):
    results = [{} for _ in range(case.world_size)]
    for one in case["tries"]:
        logits = one["logits"].clone().requires_grad_()
        loss = torch.nn.functional.cross_entropy(logits[:, : one["vocab"]], one["targets"], reduction="none")
        (loss * one["weights"]).sum().backward()
        for rank, its in enumerate(results):
            its[one.name] = {"loss": loss.detach(), "gradient": logits.grad.chunk(case.world_size, -1)[rank],
                             "given": ""}  # fmt: skip
    return results


def simulated(case, *, largest=("largest", "own"), exponentials=lab.G, predicted=lab.G, padding=False, first=0, last=0,
              local=False, ignores=True):
    """Loss and gradient of one try on all ranks; the keywords change what a mistake changes.

    Args:
        largest: among the ranks; None: nothing is subtracted.
        padding: has probability.
        first, last: by how much a rank's range of targets begins and ends too late.
        local: targets are taken modulo the columns of a rank, on every rank.
        ignores: tokens that do not count.
    """
    k, t = columns(case), case.world_size
    logits = torch.stack(case["logits"].chunk(t, -1)).requires_grad_()  # [t, N, k]
    real = (torch.arange(k * t) < case["vocab"]).view(t, 1, k)
    seen = logits if padding else logits.masked_fill(~real, -torch.inf)
    top = lab.across(*largest)(seen.detach().amax(-1, keepdim=True)) if largest else 0.0
    total = lab.across(*exponentials)((seen - top).exp().sum(-1))
    ids = case["targets"].expand(t, -1)
    start = torch.arange(t).view(t, 1) * k
    mine = torch.ones_like(ids, dtype=torch.bool) if local else (ids >= start + first) & (ids < start + k + last)
    index = ids % k if local else (ids - start).clamp(0, k - 1)
    looked_up = logits.masked_fill(~real, torch.nan) if local else logits  # whatever is found in padding there
    its = (looked_up - top).gather(-1, index.unsqueeze(-1)).squeeze(-1)
    loss = total.log() - lab.across(*predicted)(torch.where(mine, its, 0.0))
    loss = torch.where(ids == IGNORED, 0.0, loss) if ignores else loss
    (loss * case["weights"]).sum().backward()
    return [{"loss": loss[rank].detach(), "gradient": logits.grad[rank], "given": ""} for rank in range(t)]


# known mistakes


def _as_if(**changed):
    """Whether the first wrong try is as ``simulated``; of a wrong loss the gradient is no matter."""
    def seen(evidence, expected):
        told = simulated(evidence.case, **changed)
        theirs, right = ([its["loss"] for its in all_] for all_ in (evidence.results, expected))
        losses = [its["loss"] for its in told]
        same = difference(losses, right) and not difference(theirs, losses) or not difference(evidence.results, told)
        return same and difference(told, expected) and _measured(evidence, expected)
    return in_a_try(seen)


def _no_number(evidence, _):
    lost = evidence.results[0]["loss"].isnan().nonzero()
    return len(lost) and f"{lost[0].item()} on rank 0"


def _measured(evidence, expected):
    """Of the first rank and token that are wrong: the loss beside the right one; or how far the gradient is off."""
    for rank, (mine, its) in enumerate(zip(evidence.results, expected)):
        for token, (found, right) in enumerate(zip(mine["loss"].tolist(), its["loss"].tolist())):
            if not abs(found - right) < 1e-9:
                return f"token {token} on rank {rank}: {found:.4f} where {right:.4f} is right"
    return lab.measured(evidence.results, expected)


def _only_gradient(test):
    """Whether all losses are right, and ``test(gradient, right, case, rank)`` on some rank where it is not."""
    def seen(evidence, expected):
        theirs, right = ([its["loss"] for its in all_] for all_ in (evidence.results, expected))
        pairs = [(mine["gradient"], its["gradient"]) for mine, its in zip(evidence.results, expected)]
        return not difference(theirs, right) and any(difference(*pair) and test(*pair, evidence.case, rank)
                                                     for rank, pair in enumerate(pairs)) and (
            lab.measured(evidence.results, expected))
    return in_a_try(seen)


def _in_padding(theirs, right, case, rank):
    real = max(0, case["vocab"] - rank * columns(case))
    return real < columns(case) and not difference(theirs[:, :real], right[:, :real])


def _unweighted(theirs, right, case, _):
    return not difference(theirs * case["weights"].unsqueeze(-1), right)


def tokens(case):
    """Tokens of all tries (count)."""
    return sum(len(one["targets"]) for one in case["tries"])


_three = lab.within(lambda case: 3 * len(case["tries"]), lambda case: 3 * FLOAT_BYTES * tokens(case))


LOSS = Exercise(
    "lab04.5", "three numbers a token, no probability for padding", ("vocab_cross_entropy",), loss_cases, lose,
    lose_spec, budget=(_three,), forbidden=("all_gather", "gather", "broadcast", "reduce_scatter"), minutes=25,
    references=lab.REFERENCES,
    mistakes=(
        lab.BORROWED, lab.UNAWAITED, lab.STRIDED, lab.STACK,
        Mistake("largest of nothing", "a rank may have padding only, and the largest of nothing does not exist ({}).",
                failed("raised", says=r"[^\n]*(numel\(\) == 0|empty (tensor|dimension)|non-zero size)[^\n]*")),
        Mistake("target of another rank", "a target of another rank, or -100, was used as an index here ({}).",
                failed("raised", says=r"(index|Target) -?\d+ is out of bounds|index out of (range|bounds)[^\n]*")),
        lab.LENGTHS, lab.ABSENT, lab.CUT_OFF,
        Mistake("writes to its input", "{}: autograd, and who called, still need it.", in_a_try(
            lambda evidence, _: next(filter(None, (its["given"] for its in evidence.results)), False))),
        Mistake("no number", "a loss is no number (token {}): with padding at minus infinity, -inf less -inf and "
                "-inf times 0 are none. Choose with where.", in_a_try(_no_number)),
        Mistake("maximum added up", "the ranks' largest logits were added up ({}): all_reduce adds unless it gets "
                "another op.", _as_if(largest=("sum", "own"))),
        Mistake("local maximum", "each rank subtracts its own largest logit: their exponentials have no common scale "
                "({}).", _as_if(largest=("own", "own"))),
        Mistake("no maximum", "exponentials of large logits are infinite ({}). Subtract the largest one of all ranks.",
                _as_if(largest=None)),
        Mistake("padding with probability", "the columns from the vocabulary on are in the sum of exponentials ({}).",
                _as_if(padding=True)),
        Mistake("exponentials not added up", "each rank has the sum of its own exponentials: about ln t too little, "
                "less than a fresh model can have ({}).", _as_if(exponentials=("own", "own"))),
        Mistake("predicted logit not added up", "only the rank that has a token's target knows its logit, the others "
                "took 0 ({}).", _as_if(predicted=("own", "own"))),
        Mistake("every rank's logit", "a target is looked up on every rank, modulo its columns, and all that was found "
                "was added ({}).", _as_if(local=True)),
        Mistake("edge of a range", "a target in the first or last column of a rank is on no rank, or on two ({}): rank "
                "r has r k to r k + k - 1.", lambda *given: next(filter(None, (
                    _as_if(**{end: by})(*given) for end, by in (("first", 1), ("last", -1), ("last", 1)))), False)),
        Mistake("ignored tokens count", "a token of target -100 has a loss ({}); it has 0, and no gradient.",
                _as_if(ignores=False)),
        Mistake("reduces again", "the losses are right, and a gradient was added over the ranks once more ({}).",
                lambda *given: any(_as_if(**{key: ("sum", "sum") for key in keys})(*given) for keys in (
                    ("exponentials",), ("predicted",), ("exponentials", "predicted"))) and (
                        in_a_try(_measured)(*given))),
        Mistake("gradient in padding", "the losses are right, and the padding gets a gradient ({}).",
                _only_gradient(_in_padding)),
        Mistake("gradient from above ignored", "the losses are right, but backward leaves out the gradient that comes "
                "in ({}), one number for each token.", _only_gradient(_unweighted)),
        Mistake("half a gradient", "the losses are right, but only one of the two sums has a gradient ({}): it is the "
                "softmax, and one less at the target.", lambda *given: _as_if(predicted=("sum", "nothing"))(*given)
                or _as_if(exponentials=("sum", "nothing"))(*given)),
        Mistake("no gradient", "the losses are right, but no gradient comes to the logits.",
                in_a_try(lambda evidence, right: evidence.results[0]["gradient"] is None
                         and not difference(evidence.results[0]["loss"], right[0]["loss"]))),
        Mistake("too many numbers", "the losses are right, but more than three numbers a token travel, in more than "
                "three calls, or by another call than all_reduce.", lab.but(
                    lambda evidence, _: _three(evidence.case, evidence.recording))),
    ))  # fmt: skip
