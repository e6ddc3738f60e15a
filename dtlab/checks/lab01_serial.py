"""Lab 01 in one process: inputs, what is right, what the usual mistakes leave instead, and what a recording shows."""
import numpy as np
import torch

from dtlab.checks.compare import difference
from dtlab.checks.evidence import Case
from dtlab.theory import base_op

ITEM_BYTES = 8  # of a float64
SCATTER, GATHER, REDUCE = "ring_reduce_scatter", "ring_all_gather", "ring_all_reduce"

FORBIDDEN = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter", "all_to_all")


def bounds(length, size):
    """Where the chunks of ``length`` elements start and end: the first ``length % size`` have one element more."""
    least, more = divmod(length, size)
    starts = [rank * least + min(rank, more) for rank in range(size + 1)]
    return list(zip(starts, starts[1:]))


def dropped(length, size):
    """Bounds of somebody who forgets the remainder."""
    return [(rank * (length // size), (rank + 1) * (length // size)) for rank in range(size)]


def rest_last(length, size):
    """Bounds of somebody whose last chunk takes all that is left."""
    return [*dropped(length, size)[:-1], (length // size * (size - 1), length)]


def rounded_up(length, size):
    """Bounds of somebody whose chunks are all as long as the longest, until nothing is left."""
    step = -(-length // size)
    return [(min(rank * step, length), min((rank + 1) * step, length)) for rank in range(size)]


def cases(*tries):
    """A function that draws the cases: ``(ranks, length, ...)`` each; a length of None is drawn too."""
    def draw(rng):
        drawn = []
        for size, *lengths in tries:
            lengths = [rng.randrange(1001, 1100, 4) + 2 if length is None else length for length in lengths]
            *first, last = lengths
            name = f"lengths {', '.join(map(str, first))} and {last}" if first else f"length {last}"
            drawn.append(Case(size, name, {"lengths": lengths, "seed": rng.randrange(2**31)}))
        return drawn
    return draw


def part(case, length, rank):
    """What a rank brings: 1000 rank + place + something drawn between 0 and 1."""
    return 1000.0 * rank + np.arange(length) + np.random.default_rng([case["seed"], length, rank]).random(length)


def before(name, case, length):
    """What the ranks hold before a function runs, by rank; an all-gather finds the finished chunks.

    In numpy: the recorder sees tensors, and a rank's peak is to be the learner's.
    """
    parts = [part(case, length, rank) for rank in range(case.world_size)]
    if name == GATHER:
        total = sum(parts)
        for mine, (start, end) in zip(parts, bounds(length, case.world_size)):
            mine[start:end] = total[start:end]
    return parts


def after(name, case, length):
    """What is right, by rank; NaN where anything may stand."""
    parts = [part(case, length, rank) for rank in range(case.world_size)]
    total = sum(parts)
    if name != SCATTER:
        return [total] * case.world_size
    right = [np.full_like(total, np.nan) for _ in parts]
    for mine, (start, end) in zip(right, bounds(length, case.world_size)):
        mine[start:end] = total[start:end]
    return right


def cut_key(length, size):
    """How a result of exercise 1 is called."""
    return f"chunk_bounds({length}, {size})"


def label(name, length):
    """How a result is called."""
    return f"{name} of length {length}"


def spec(*names):
    """The spec of an exercise that defines these functions."""
    def by_rank(case):
        right = {label(name, length): [torch.from_numpy(its) for its in after(name, case, length)]
                 for length in case["lengths"] for name in names}  # fmt: skip
        return [{key: values[rank] for key, values in right.items()} for rank in range(case.world_size)]
    return by_rank


def ring(name, parts, *, cuts=bounds, start=-1, short=0, times=1, gathered=0, gather_start=1, bring=False):
    """What ranks hold after a ring function in which one thing may be wrong.

    Args:
        cuts: makes the bounds.
        start: the chunk that rank 0 sends first.
        short: steps too few of the first half (count).
        times: how often what comes in is added; 0: it is put in place.
        gathered: the same for the second half.
        gather_start: how many chunks further the second half starts than the first.
        bring: whether a rank sends on what it brought instead of what it just added to.
    """
    size, held = len(parts), [mine.copy() for mine in parts]
    chunks = cuts(len(parts[0]), size)
    halves = ((GATHER, start, short, times), (SCATTER, start + gather_start, 0, gathered))
    for other, first, short, times in halves:
        for step in range(size - 1 - short) if name != other else ():
            source = parts if bring and other == GATHER else held
            sent = [source[r][slice(*chunks[(r + first - step) % size])].copy() for r in range(size)]
            for r in range(size):
                place = held[r][slice(*chunks[(r - 1 + first - step) % size])]
                place[:] = place + times * sent[r - 1] if times else sent[r - 1]
    return held


def walk(name, parts, *, sends, lands, step, way):
    """What ranks hold after one half of a ring in which any chunk may go anywhere.

    In step k rank r sends chunk ``r + sends + k * step`` to rank ``r + way``; what comes in lands in chunk
    ``r + lands + k * step``. An all-reduce has a right first half.
    """
    size, held = len(parts), ring(SCATTER, parts) if name == REDUCE else [mine.copy() for mine in parts]
    chunks = bounds(len(parts[0]), size)
    for k in range(size - 1):
        sent = [held[r][slice(*chunks[(r + sends + k * step) % size])].copy() for r in range(size)]
        for r in range(size):
            place = held[r][slice(*chunks[(r + lands + k * step) % size])]
            place[:] = sent[(r - way) % size] + (place if name == SCATTER else 0)
    return held


def left_by(**wrong):
    """Whether the results are those of ``ring(..., **wrong)``: a ``seen`` of a Mistake."""
    return leaves(lambda name, parts: ring(name, parts, **wrong))


def leaves(model, whole=False):
    """Whether every wrong result is what ``model(name, parts)`` leaves: a ``seen`` of a Mistake.

    ``whole``: also where anything may stand.
    """
    def seen(evidence, expected):
        found = False
        for name, length, key in _keys(evidence, expected):
            theirs = [result[key] for result in evidence.results]
            right = [its[key] for its in expected]
            if all(map(_equal, theirs, right)):
                continue
            told = map(torch.from_numpy, model(name, before(name, evidence.case, length)))
            told = [mine if whole else torch.where(its.isnan(), its, mine) for its, mine in zip(right, told)]
            if not all(map(_equal, theirs, told)):
                return False
            found = True
        return found
    return seen


def wrong_ranks(evidence, expected):
    """Ranks with a wrong value, ascending; None where nothing came back."""
    if evidence.results is None:
        return None
    return [rank for rank, pair in enumerate(zip(evidence.results, expected)) if difference(*pair)]


def _keys(evidence, expected):
    """``(function, length, key)`` of every result; none where nothing came back."""
    if evidence.results is None or any(not isinstance(r, dict) or r.keys() != expected[0].keys()
                                       for r in evidence.results):  # fmt: skip
        return
    for key in expected[0]:
        name, _, length = key.partition(" of length ")
        yield name, int(length), key


def _equal(theirs, right):
    return difference(theirs, right) is None


# what a recording shows


def sent(recording, rank, name=None):
    """``[(to, bytes), ...]`` of the messages that a rank sent, in one function or in all."""
    return [(event.peer, event.wire_bytes) for event in recording.events[rank]
            if event.kind == "issue" and base_op(event.op) == "send" and name in (None, event.phase.get("name"))]


def sent_bytes(recording, rank, name=None):
    """Bytes that a rank sent, in one function or in all."""
    return sum(size for _, size in sent(recording, rank, name))


def traffic(recording):
    """``table[from][to]``: bytes."""
    table = [[0.0] * recording.world_size for _ in recording.ranks]
    for rank in recording.ranks:
        for peer, size in sent(recording, rank):
            table[rank][peer] += size
    return table


def total_bytes(case):
    """S of all lengths of a case together."""
    return ITEM_BYTES * sum(case["lengths"])


def ring_bytes(name, case, rank):
    """Bytes that a rank may send around a ring: to the right, to the left, then finishing other chunks than its own."""
    size, found = case.world_size, []
    for mine in range(rank, rank + (size if name == REDUCE else 1)):
        for way in (1, -1):
            total = 0
            for length in case["lengths"]:
                chunks = [end - start for start, end in bounds(length, size)]
                total += (length - chunks[mine % size]) * (name != GATHER)
                total += (length - chunks[(mine + way) % size]) * (name != SCATTER)
            found.append(ITEM_BYTES * total if size > 1 else 0)
    return found


def beside(names, case, recording, rank):
    """What a rank held at once beside the tensor it was given, in the call that held most beyond what it may.

    Returns ``(held, allowed, those of the longest chunk, name of the function)``, all but the last in bytes.
    """
    calls = sorted((event.start_s, event.end_s, event.op) for event in recording.events[rank]
                   if event.kind == "phase" and event.op in names)  # fmt: skip
    found, lengths = [], {name: iter(case["lengths"]) for name in names}
    for start_s, end_s, name in calls:
        length = next(lengths[name])
        live = most = before = 0
        for event in recording.events[rank]:
            if event.kind in ("alloc", "free") and event.start_s <= end_s:
                live += event.bytes if event.kind == "alloc" else -event.bytes
                before, most = (live, live) if event.start_s < start_s else (before, max(most, live))
        longest = ITEM_BYTES * -(-length // case.world_size)
        found.append((most - before - ITEM_BYTES * length, 0 if name == GATHER else longest, longest, name))
    return max(found, key=lambda its: its[0] - its[1])


def steps_of(name, case):
    """Steps of a function, of all lengths of a case together."""
    return (case.world_size - 1) * (2 if name == REDUCE else 1) * len(case["lengths"])


def in_s(spent, case):
    """Bytes in words: as a number and as a share of S."""
    return f"{spent:,.0f} bytes, {spent / total_bytes(case):.3g} S"


def leaving(recording):
    """Bytes that leave node 0 (ranks 0 and 1) and node 1 (ranks 2 and 3)."""
    table = traffic(recording)
    return [sum(table[rank][peer] for rank in node for peer in range(4) if peer not in node)
            for node in ((0, 1), (2, 3))]  # fmt: skip
