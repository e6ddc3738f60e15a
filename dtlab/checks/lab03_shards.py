"""Exercises 1 and 4 of lab 03: which elements lie on which rank; the norm of a gradient in shards."""
import math

import torch
import torch.distributed as dist

from dtlab.checks.compare import difference, ratio
from dtlab.checks.evidence import Case
from dtlab.checks.exercise import Exercise, Mistake, failed, in_a_try, when
from dtlab.checks.lab02_programs import flat, moved
from dtlab.checks.lab03_model import ABSENT, BORROWED, by_hand, cut_line, draw, even, pieces

# 1: pieces


def cut_cases(rng):
    odd = [rng.randrange(1, 30) for _ in range(5)]
    more = [([8], 1), ([5], 4), ([1, 2], 5), ([6, 0, 6], 3), (odd, 3), (odd, 7), ([4, 4, 4, 4], 4)]
    return [Case(2, "called", {"cuts": [([12, 3, 7, 1, 10], 4)]}), Case(1, "called", {"cuts": more})]


def cut_key(sizes, world_size):
    return f"{', '.join(map(str, sizes))} elements for {world_size} rank{'s' * (world_size > 1)}"


def cut(case, shard_pieces):
    """On every rank: the shards of all sizes of a case; before them, in words, which are wrong."""
    with by_hand():
        found = {cut_key(*its): shard_pieces(*its) for its in case["cuts"]}
    return {"": next(filter(None, (_wrong_cut(found[cut_key(*its)], *its) for its in case["cuts"])), ""), **found}


def _wrong_cut(theirs, sizes, n):
    """Which rank's pieces are wrong, in the notation of the picture; empty where they are right, or no such lists."""
    words = lambda its: ", ".join(f"{number}[{start}:{end}]" for number, start, end in its) or "nothing"
    try:
        for rank, (mine, right) in enumerate(zip(theirs[1], pieces(sizes, n)[1])):
            if difference(list(mine), right):
                return f"{cut_key(sizes, n)}: {words(mine)} in the shard of rank {rank} should be {words(right)}"
    except (TypeError, ValueError, IndexError):
        pass
    return ""


def cut_spec(case):
    return [{"": "", **{cut_key(*its): pieces(*its) for its in case["cuts"]}}] * case.world_size


def _cut_as(wrong):
    """Whether all pieces are those of ``wrong(sizes, world_size)``, which are not right."""
    def seen(evidence, _):
        theirs = [evidence.results[0][cut_key(*its)][1] for its in evidence.case["cuts"]]
        told, right = ([make(*its) for its in evidence.case["cuts"]]
                       for make in (wrong, lambda *its: pieces(*its)[1]))  # fmt: skip
        return difference(theirs, told) is None and difference(told, right) is not None
    return when(seen)


def _each(change):
    """Every piece changed: ``change(number, start, end, start of the parameter in the line)``."""
    return _cut_as(lambda sizes, n: [[change(*piece, sum(sizes[: piece[0]])) for piece in its]
                                     for its in pieces(sizes, n)[1]])  # fmt: skip


def _dropped(sizes, n):
    return cut_line(sizes, [(rank * (sum(sizes) // n), (rank + 1) * (sum(sizes) // n)) for rank in range(n)])


def _each_alone(sizes, n):
    its = [pieces([size], n)[1] for size in sizes]
    return [[(number, *piece[1:]) for number, cuts in enumerate(its) for piece in cuts[rank]] for rank in range(n)]


def _whole(evidence, expected):
    """Whether the pieces of some line are whole parameters, and wrong."""
    for sizes, n in evidence.case["cuts"]:
        theirs, right = (its[0][cut_key(sizes, n)][1] for its in (evidence.results, expected))
        found = sorted(tuple(piece) for its in theirs for piece in its)
        if difference(theirs, right) and found == [(number, 0, size) for number, size in enumerate(sizes)]:
            return True
    return False


def _other_length(evidence, expected):
    theirs, keys = evidence.results[0], [cut_key(*its) for its in evidence.case["cuts"]]
    wrong = next(key for key in keys if theirs[key][0] != expected[0][key][0])
    return not any(difference(theirs[key][1], expected[0][key][1]) for key in keys) and (
        f"{theirs[wrong][0]} where {expected[0][wrong][0]} is right ({wrong})")


def _own_pieces(evidence, expected):
    """Whether each rank returned its own list, no list of lists."""
    return not any(difference(theirs[key][1], expected[0][key][1][rank]) for rank, theirs in enumerate(evidence.results)
                   for key in map(lambda its: cut_key(*its), evidence.case["cuts"]))  # fmt: skip


PIECES = Exercise(
    "lab03.1", "every element on one rank, every shard of one length", ("shard_pieces",), cut_cases, cut, cut_spec,
    minutes=10,
    mistakes=(
        BORROWED,
        Mistake("only its own pieces", "a rank returns its own pieces. Asked for is a list with those of every rank, "
                "in the order of the ranks.", when(_own_pieces)),
        Mistake("whole parameters", "every parameter lies on one rank as a whole: the rank with the large embedding "
                "saves nothing, however many ranks there are.", when(_whole)),
        Mistake("remainder dropped", "a shard has total // world_size elements, and the rest lies on no rank: nobody "
                "would ever train it.", _cut_as(_dropped)),
        Mistake("shards of two lengths", "some ranks have an element more than others, which no collective of equal "
                "parts can gather: round up, and let padding fill the end.", _cut_as(even)),
        Mistake("each parameter cut", "each parameter is cut among all ranks, and padded by itself. Here all of them "
                "form one line, which is cut once.", _cut_as(_each_alone)),
        Mistake("places in the line", "start and end count from the beginning of the line, not inside the parameter.",
                _each(lambda number, start, end, at: (number, at + start, at + end))),
        Mistake("last element inside", "each end is the last element inside the piece. In slices it is one past it.",
                _each(lambda number, start, end, _: (number, start, end - 1))),
        Mistake("another shard length", "the pieces are right, the length of a shard is not: {}. It is the same on "
                "every rank, padding included.", when(_other_length)),
    ))  # fmt: skip

# 4: clipping


def clip_cases(rng):
    """Several tries each, so that ranks are started three times only; what has to be there to trap is not drawn."""
    def one(name, length, whole, *, size=3, max_norm=0.5, norm_type=2.0, padding=0, filler=100.0, zero=False):
        shards, its = ([draw(rng, *shape) * (not zero) for shape in shapes] for shapes in ([(length,)] * size, whole))
        found = Case(size, name, {"shards": shards, "padding": padding, "whole": its, "tied": False,
                                  "max_norm": max_norm, "norm_type": norm_type})  # fmt: skip
        for rank in range(size):
            shards[rank][len(own(found, rank)) :] = filler  # what happened to lie there
        return found

    thirteen = one("shards 3 and 4, 12 on both", 1, [(1,)], size=2, max_norm=6.5)
    for tensor, value in zip([*thirteen["shards"], *thirteen["whole"]], (3.0, 4.0, 12.0)):
        tensor.fill_(value)
    tied, equal = one("a tied gradient in the list twice", 3, [(2, 3)]), one("two gradients of equal values", 3, [(3,)])
    tied.data["tied"], equal["whole"][1:] = True, [equal["whole"][0].clone()]
    largest = [one("the largest value as the norm", 2, [(4,)], norm_type=math.inf, padding=3),
               one("the largest value, which all have", 2, [(4,)], norm_type=math.inf)]  # fmt: skip
    for its in (largest[0]["shards"][0], largest[1]["whole"][0]):
        its[:2] = torch.tensor([1.5, -2.0])  # the others are smaller
    return [Case(2, "clipped", {"tries": [thirteen]}),
            Case(1, "clipped", {"tries": [one("one rank", 3, [(2,)], size=1)]}),
            Case(3, "clipped", {"tries": [
                one("seven numbers in shards of three", 3, [(2, 2), (3,)], padding=2),
                one("a rank with padding only", 2, [], padding=3),
                one("NaN in the padding", 2, [(2,)], padding=3, filler=math.nan),
                tied, equal, *largest,
                one("the largest value, a rank with nothing", 2, [], norm_type=math.inf, padding=3),
                one("the sum of absolute values as the norm", 3, [(2,)], norm_type=1.0, padding=1),
                one("a norm below the limit, long shards", 200, [(2,)], max_norm=1e3),  # too long to be gathered
                one("nothing but zeros", 2, [(2,)], zero=True)]})]  # fmt: skip


def own(case, rank):
    """A rank's shard without padding."""
    shard = case["shards"][rank]
    behind = (case.world_size - 1 - rank) * len(shard)  # elements on later ranks
    return shard[: len(shard) - min(len(shard), max(0, case["padding"] - behind))]


def clip(case, clip_shards):
    """On every rank: of each try the norm that it returns, and what stands in the gradients then."""
    rank, results = dist.get_rank(), {}
    for one in case["tries"]:
        shard, whole = one["shards"][rank].clone(), [its.clone() for its in one["whole"]]
        given = whole + whole[:1] * one["tied"]
        with by_hand():
            norm = clip_shards(shard, len(shard) - len(own(one, rank)), given, one["max_norm"], one["norm_type"])
        results[one.name] = {"norm": norm, "shard": shard, "whole": whole}
    return results


def _norm(case, values):
    return float(torch.linalg.vector_norm(flat([torch.zeros(1).double(), *values]), case["norm_type"]))


def _shards(case):
    return [own(case, rank) for rank in range(case.world_size)]


def _factor(case, norm):
    return min(1.0, case["max_norm"] / (norm or 1.0))


def _right(case):
    """The norm of the whole gradient."""
    return _norm(case, [*_shards(case), *case["whole"]])


def _local(case, rank):
    return _norm(case, [own(case, rank), *case["whole"]])


def _clipped(case, rank):
    scale, theirs = _factor(case, _right(case)), torch.full_like(case["shards"][rank], math.nan)  # padding: anything
    theirs[: len(own(case, rank))] = own(case, rank) * scale
    return {"norm": _right(case), "shard": theirs, "whole": [its * scale for its in case["whole"]]}


def clip_spec(case):
    return [{one.name: _clipped(one, rank) for one in case["tries"]} for rank in range(case.world_size)]


def clip_budget(case, recording):
    spent, allowed = max(moved(recording, rank) for rank in recording.ranks), 64 * len(case["tries"])
    return f"a rank hands {spent:,} bytes to calls, where a few numbers do (64 bytes)" if spent > allowed else None


def _norm_is(value):
    """Whether each rank's norm is ``value(case, rank)``, and wrong; says them."""
    def seen(evidence, expected):
        case, theirs = evidence.case, [float(its["norm"]) for its in evidence.results]
        told, right = [value(case, rank) for rank in range(case.world_size)], expected[0]["norm"]
        return difference(theirs, told) is None and any(difference(its, right) for its in theirs) and (
            f"{', '.join(f'{its:.5g}' for its in theirs)} instead of {right:.5g}")
    return in_a_try(seen)


def _scaled(test):
    """Whether all norms are right and ``test(case, rank, factors of the shard and of each whole one)`` on some rank."""
    def seen(evidence, expected):
        case = evidence.case
        for rank, its in enumerate(evidence.results):
            pairs = [(its["shard"][: len(own(case, rank))], own(case, rank)), *zip(its["whole"], case["whole"])]
            found = [1.0 if torch.equal(*pair) else ratio(*pair) or math.nan for pair in pairs if len(pair[0])]
            if not difference(its["norm"], expected[rank]["norm"]) and test(case, rank, found):
                right = _factor(case, _right(case))
                return f"rank {rank}: {', '.join(f'{one:.10g}' for one in found)} where {right:.10g} is right"
        return False
    return in_a_try(seen)


def _all_near(factors, wanted):
    return all(abs(its / wanted - 1) < 1e-9 for its in factors)


def _not_finite(evidence, _):
    return any(not torch.isfinite(flat([its["shard"][: len(own(evidence.case, rank))], *its["whole"]])).all()
               for rank, its in enumerate(evidence.results))  # fmt: skip


def _masked(evidence, _):
    """Whether all norms are NaN, which stands in the padding only."""
    return _norm(evidence.case, evidence.case["shards"]) != _norm(evidence.case, evidence.case["shards"]) and all(
        math.isnan(its["norm"]) for its in evidence.results)


def _behind_padding(case):
    """What ``shard[:-padding]`` leaves of the shards: nothing where there is no padding."""
    return [own(case, rank) for rank in range(case.world_size) if len(own(case, rank)) < len(case["shards"][rank])]


def _sum_of_ranks(case, once):
    """The ranks' norms added up, what all have counted on rank 0 only or everywhere."""
    return sum(_norm(case, [own(case, rank), *case["whole"] * (not once or not rank)])
               for rank in range(case.world_size))  # fmt: skip




CLIP = Exercise(
    "lab03.4", "one norm and one factor for all ranks", ("clip_shards",), clip_cases, clip, clip_spec,
    budget=(clip_budget,), minutes=10,
    mistakes=(
        BORROWED, ABSENT,
        Mistake("no norm", "nothing came back (is there a return?)", in_a_try(
            lambda evidence, _: any(its["norm"] is None for its in evidence.results))),
        Mistake("largest of nothing", "a shard may be all padding, and there may be nothing else: the largest of "
                "nothing does not exist ({}).", failed("raised", says=(
                    r"[^\n]*(numel\(\) == 0|empty (tensor|dimension|sequence|iterable)|non-empty|no identity)[^\n]*"))),
        Mistake("masked by zero", "the norm is NaN, as is what stands in the padding: 0 times it is NaN too. Cut it "
                "off.", in_a_try(_masked)),
        Mistake("divides by zero", "something was divided by a norm of 0{}.", lambda evidence, expected:
                failed("raised", says="ZeroDivisionError")(evidence, expected) and ", which is an error"
                or in_a_try(_not_finite)(evidence, expected) and ", which gives NaN"),
        Mistake("local norm", "every rank took the norm of what it holds itself: {}. Ranks then scale by different "
                "factors, and the parts of one gradient no longer point its way.", _norm_is(_local)),
        Mistake("replicated counted again", "{}: what every rank has whole was counted once for each rank.",
                _norm_is(lambda case, _: _norm(case, [*_shards(case), *case["whole"] * case.world_size]))),
        Mistake("norms added", "{}: norms do not add up; their squares do, if it is the 2-norm.",
                _norm_is(lambda case, _: sum(_norm(case, [its]) for its in [*_shards(case), *case["whole"]]))),
        Mistake("padding counted", "{}: padding is no gradient, and nobody promises that it is zero.",
                _norm_is(lambda case, _: _norm(case, [*case["shards"], *case["whole"]]))),
        Mistake("tied counted twice", "{}: one tensor stands in the list under two names. It is one gradient.",
                _norm_is(lambda case, _: _norm(case, [*_shards(case), *case["whole"] * (1 + case["tied"])]))),
        Mistake("always the 2-norm", "{}: the 2-norm, where another was asked for.",
                _norm_is(lambda case, _: float(flat([*_shards(case), *case["whole"]]).norm()))),
        Mistake("equal taken for tied", "{}: tensors of equal values are two gradients. One that is tied is the same "
                "object twice.", _norm_is(lambda case, _: _norm(case, [
                    *_shards(case), *{tuple(its.flatten().tolist()): its for its in case["whole"]}.values()]))),
        Mistake("no shard", "{}: what lies in a shard without padding was not counted. shard[:-padding] is empty "
                "where padding is 0.", _norm_is(lambda case, _: _norm(case, [*_behind_padding(case), *case["whole"]]))),
        Mistake("always the square root", "{}: the sum of powers is to be taken to 1 / p, which is 0.5 for p = 2.",
                _norm_is(lambda case, _: _right(case) ** (min(case["norm_type"], 1e3) / 2))),
        Mistake("largest values added", "{}: the ranks' largest values were added up. Their maximum is asked for.",
                lambda *given: _norm_is(lambda case, _: _sum_of_ranks(case, True))(*given)
                or _norm_is(lambda case, _: _sum_of_ranks(case, False))(*given)),
        Mistake("largest without its sign", "{}: the largest value, where the largest absolute value is asked for.",
                _norm_is(lambda case, _: float(flat([*_shards(case), *case["whole"]]).max()))),
        Mistake("nothing clipped", "the norm is right, and no gradient changed ({}). Was a copy scaled?",
                _scaled(lambda case, _, its: _factor(case, _right(case)) < 1 and _all_near(its, 1.0))),
        Mistake("only the shard scaled", "the norm is right, the shard is scaled, what all have is not ({}).",
                _scaled(lambda case, _, its: _factor(case, _right(case)) < 1 and _all_near(its[1:], 1.0)
                        and _all_near(its[:1], _factor(case, _right(case))))),
        Mistake("scaled up", "a gradient below the limit was made larger ({}).",
                _scaled(lambda _, __, its: max(its) > 1)),
        Mistake("scaled twice", "the tied gradient, which stands in the list twice, was scaled twice ({}).",
                _scaled(lambda case, _, its: case["tied"] and _all_near(its[1:], _factor(case, _right(case)) ** 2))),
        Mistake("different factors", "the norm is right, but a rank scales by the norm of its own part ({}).",
                _scaled(lambda case, rank, its: _all_near(its, _factor(case, _local(case, rank)))
                        and _local(case, rank) < _right(case))),
        Mistake("torch's 1e-6", "the factor is max_norm / (norm + 1e-6), as in torch ({}). Here it is max_norm / norm.",
                _scaled(lambda case, _, its: _all_near(its, _factor(case, _right(case) + 1e-6)))),
        Mistake("gathers gradients", "all is right, but shards travel for it. One number from each rank is enough.",
                when(lambda evidence, _: clip_budget(evidence.case, evidence.recording))),
    ))  # fmt: skip
