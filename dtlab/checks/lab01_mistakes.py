"""Lab 01: the usual mistakes, what shows them, and what a learner is told."""
import functools
import itertools

import numpy as np
import torch

from dtlab.checks import lab01_serial as serial
from dtlab.checks.compare import collectives_used, difference, ratio
from dtlab.checks.exercise import Mistake
from dtlab.checks.exercise import failed as ended
from dtlab.checks.lab01_cuts import BORROWED, failed
from dtlab.checks.lab01_serial import (
    FORBIDDEN,
    GATHER,
    REDUCE,
    SCATTER,
    in_s,
    leaving,
    left_by,
    sent,
    sent_bytes,
    steps_of,
    total_bytes,
    wrong_ranks,
)

# what shows a mistake


def _all_in(call):
    """Whether the ranks wait for each other, all in this call."""
    def seen(evidence, _):
        waits = [text for text in evidence.text.splitlines() if " waits in " in text]
        circle = evidence.failed == "hang" and "wait for each other" in evidence.text
        return circle and all(f" waits in {call}(" in text for text in waits)
    return seen


def _only_at(size):
    return lambda evidence, _: evidence.case.world_size == size and evidence.failed in ("raised", "hang", "guard")


def _in_pairs(evidence, expected):
    if evidence.case.world_size != 4 or not wrong_ranks(evidence, expected):
        return False
    return any(all({peer for peer, _ in sent(evidence.recording, rank, name)} == {rank ^ 1} for rank in range(4))
               for name in (SCATTER, GATHER, REDUCE))  # fmt: skip


def _wrong_on(*sets):
    """Whether exactly one of these sets of ranks has wrong values."""
    return lambda evidence, expected: wrong_ranks(evidence, expected) in [list(ranks) for ranks in sets]


def _wrong_values(test):
    """Whether ``test(theirs, right)`` holds for every wrong tensor, of which there is one."""
    def seen(evidence, expected):
        if not wrong_ranks(evidence, expected):
            return False
        pairs = [(its[key], mine[key]) for its, mine in zip(evidence.results, expected) for key in mine]
        return all(its.shape == mine.shape and test(its, mine) for its, mine in pairs if difference(its, mine))
    return seen


def _untouched(_, parts):
    return parts


def _other_chunk(evidence, expected):
    """Whether every rank with a wrong value holds another chunk's sum."""
    case, name = evidence.case, SCATTER
    for length in case["lengths"]:
        total = torch.from_numpy(serial.after(REDUCE, case, length)[0])
        for rank, result in enumerate(evidence.results):
            theirs = result[serial.label(name, length)]
            chunks = [slice(*its) for its in serial.bounds(length, case.world_size) if its[1] > its[0]]
            if difference(theirs, expected[rank][serial.label(name, length)]) and not any(
                    difference(theirs[its], total[its]) is None for its in chunks):  # fmt: skip
                return False
    return bool(wrong_ranks(evidence, expected))


def _one_step_less(evidence, expected):
    case = evidence.case
    if not wrong_ranks(evidence, expected):
        return False
    for name in {event.phase["name"] for event in evidence.recording.events[0] if "name" in event.phase}:
        steps, messages = steps_of(name, case), len(sent(evidence.recording, 0, name))
        if steps - 2 * len(case["lengths"]) <= messages < steps and messages:
            return f"rank 0 sent {messages} messages in {name}, which has {steps} steps"
    return False


def _no_second_half(evidence, expected):
    """Whether every rank sent one half of the messages of an all-reduce, and has its own chunk right, no other."""
    case, size = evidence.case, evidence.case.world_size
    steps = steps_of(REDUCE, case)
    messages = {len(sent(evidence.recording, rank, REDUCE)) for rank in range(size)}
    if size < 2 or messages != {steps // 2}:
        return False
    for length in case["lengths"]:
        key = serial.label(REDUCE, length)
        for result, right in zip(evidence.results, expected):
            whole = [difference(result[key][start:end], right[key][start:end]) is None
                     for start, end in serial.bounds(length, size) if end > start]  # fmt: skip
            if length >= size and sum(whole) != 1:
                return False
    return f"{steps // 2} messages from each rank in {REDUCE}, which has {steps} steps"


def _walks(onward):
    """Whether what comes in lands elsewhere; ``onward``: or the steps take the chunks the way the messages go."""
    def seen(evidence, expected):
        size = evidence.case.world_size
        way = 1 if 1 in {to for to, _ in sent(evidence.recording, 0)} else -1
        for sends, lands in itertools.product(range(size), repeat=2):
            walk = functools.partial(serial.walk, sends=sends, lands=lands, step=way if onward else -way, way=way)
            fits = lands == (sends - way) % size and not (onward and any(GATHER in key for key in expected[0]))
            if not fits and serial.leaves(walk, whole=True)(evidence, expected):
                return f"rank 0 receives chunk {(sends - way) % size} and takes it for chunk {lands}"
        return False
    return seen


def _gather_first(name, parts):
    return serial.ring(SCATTER, serial.ring(GATHER, parts)) if name == REDUCE else serial.ring(name, parts)


def _misplaced(theirs, right):
    return not right.isnan().any() and difference(theirs.sort().values, right.sort().values) is None


def _rounded(theirs, right):
    there = ~right.isnan()
    return torch.allclose(theirs.double()[there], right[there], rtol=1e-5)


def _times(evidence, expected):
    """``2`` where every wrong value is twice the right one."""
    if not wrong_ranks(evidence, expected):
        return False
    found = {times and round(times, 6) for its, mine in zip(evidence.results, expected) for key in mine
             if difference(its[key], mine[key]) for times in [ratio(its[key], mine[key])]}  # fmt: skip
    return f"{found.pop():.4g}" if len(found) == 1 and None not in found else False


def _mean(evidence, expected):
    return evidence.case.world_size > 1 and _times(evidence, expected) == f"{1 / evidence.case.world_size:.4g}"


def _spends(test):
    """``test(case, recording)`` where all values are right; its text is what the learner is told."""
    return lambda evidence, expected: (wrong_ranks(evidence, expected) == [] and evidence.recording is not None
                                       and test(evidence.case, evidence.recording))  # fmt: skip


def _last_bits(evidence, expected):
    return wrong_ranks(evidence, expected) == [] and any(
        difference(its, evidence.results[0], rtol=0.0, atol=0.0) for its in evidence.results)  # fmt: skip


def _whole_tensors(name):
    """Where the busiest rank sent (n-1) S."""
    def test(case, recording):
        most = max(sent_bytes(recording, rank, name) for rank in recording.ranks)
        if case.world_size < 3 or most < (case.world_size - 1) * total_bytes(case):
            return False
        ring = max(serial.ring_bytes(name, case, 0))
        return f"the busiest rank sent {in_s(most, case)}, where a ring sends {in_s(ring, case)}"
    return test


def _one_step_more(*names):
    def test(case, recording):
        steps = {name: steps_of(name, case) for name in names}
        more = {name: len(sent(recording, 0, name)) - steps[name] for name in names}
        return next((f"rank 0 sent {steps[name] + more[name]} messages in {name}, where {steps[name]} are enough"
                     for name in names if 0 < more[name] <= 2 * len(case["lengths"])), False)
    return test


def _spare(names, least):
    """Where a rank held at least so many chunks beside its tensor."""
    def test(case, recording):
        held, may, chunk, _ = max(serial.beside(names, case, recording, rank) for rank in recording.ranks)
        return f"{held:,} bytes, where one chunk has {chunk:,}" if held > may and held >= least * chunk else False
    return test


def _sums(names):
    """Where that happened and a sum was put in a tensor of its own."""
    def test(case, recording):
        made = any(event.op in ("aten.add", "aten.sum") for event in recording.events[0])
        return made and _spare(names, 1.5)(case, recording)
    return test


def _in_gather(case, recording):
    held, _, _, name = max(serial.beside((GATHER,), case, recording, rank) for rank in recording.ranks)
    return f"{held:,} bytes beside the tensor" if held > 0 else False


def _to_everybody(*names):
    def test(case, recording):
        size = case.world_size
        for name in names:
            if size > 3 and {to for to, _ in sent(recording, 0, name)} == set(range(1, size)):
                return f"in {name} rank 0 sent to {size - 1} ranks"
        return False
    return test


def _borrows(evidence, _):
    used = collectives_used(evidence.recording) & set(FORBIDDEN) if evidence.recording is not None else ()
    return ", ".join(sorted(used))


MESSAGES = (
    BORROWED,
    Mistake("a collective called", "{} was called, which makes what you are to build. Only messages between two ranks "
            "count here", _borrows),
    Mistake("all send first", "every rank sends before it receives, so each waits for a neighbour that waits too: "
            "nobody gets to its receive. Short messages may slip through elsewhere, in the network's own buffers",
            _all_in("send")),
    Mistake("all receive first", "every rank waits for a message that nobody has sent: all receive before they send, "
            "or each listens to the neighbour that it sends to", _all_in("recv")),
    Mistake("buffer in use", "a tensor is changed or read while a message still needs it, since nobody has awaited its "
            "handle. Elsewhere this gives wrong numbers on busy machines and right ones on quiet ones",
            failed("guard", "nobody has called wait()")),
    Mistake("handle never awaited", "a handle was dropped without wait(), so nothing says that its message is through. "
            "Where gloo gives it up with its handle, the neighbour waits for ever; elsewhere a test mostly passes",
            failed("guard", "never awaited")),
    Mistake("buffer that does not fit", "what one rank sends is not what the other makes room for. Chunks differ by "
            "one element where the ranks do not divide the length, and a new tensor is float32 unless told otherwise",
            failed("guard", "same number of elements")),
    Mistake("awaited twice", "wait() was called twice on the handle of one message: call it once, in the step that "
            "needs it", failed("guard", "waits a second time")),
    Mistake("n = 1 forgotten", "a single rank has nobody to talk to: a ring of one has no steps, and the tensor is the "
            "sum already", _only_at(1)),
    Mistake("not on 3 ranks", "it passes on 4 ranks and not on 3. Either something is made for 4 ranks: WORLD_SIZE is "
            "4 in this notebook, and world_size is how many ranks there are; or for powers of two: a partner by ^, a "
            "neighbour by &, halves of halves", _only_at(3)),
    Mistake("message missing", "one rank waits for a message that the other never sends, or never takes. As many as "
            "leave for a rank must be received there", ended("hang", says=".* never called .*")),
    Mistake("neighbour by rank ^ 1", "each rank talks to one partner only, rank ^ 1. On two ranks that is the "
            "neighbour on both sides, so it passes there; on four it makes two pairs that never meet", _in_pairs),
)  # fmt: skip

VALUES = (
    Mistake("not in place", "the tensor holds what it held before. The sum was made in another tensor: an = gives a "
            "name to a new one, and leaves the one that was handed over", serial.leaves(_untouched, whole=True)),
    Mistake("rounded to float32", "the values are right to some 7 digits, no further. Somewhere they pass through "
            "float32, torch's default type; tests with small whole numbers cannot see it", _wrong_values(_rounded)),
    Mistake("rank 0 only", "rank 0 has the sum and the others do not. Who looks at rank 0 only, as most printed output "
            "does, finds all well", _wrong_on((1, 2, 3), (1, 2))),
    Mistake("order of arrival", "every sum is there, at the wrong place: the chunks are joined as they arrived, which "
            "is another order on every rank. Where all chunks look alike, as with one value everywhere, it passes",
            _wrong_values(_misplaced)),
    Mistake("remainder dropped", "the last length % n elements take no part: all chunks have length // n. Lengths that "
            "the ranks divide pass", left_by(cuts=serial.dropped)),
    Mistake("other chunks", "the sums are right for chunks that are cut elsewhere than chunk_bounds cuts: the last one "
            "takes the rest", left_by(cuts=serial.rest_last)),
    Mistake("other chunks", "the sums are right for chunks that are cut elsewhere than chunk_bounds cuts: all as long "
            "as the longest, the last ones short or empty", left_by(cuts=serial.rounded_up)),
    Mistake("another chunk finished", "each rank finishes a chunk, and not its own: rank r is to end with chunk r, and "
            "here it ends with another one. The ring is right and starts one chunk too far", _other_chunk),
    Mistake("second half missing", "each rank has finished one chunk, and the others never came: {}. After the "
            "reduce-scatter the finished chunks go round, as in ring_all_gather", _no_second_half),
    Mistake("one step short", "a step is missing: {}. A finished chunk lacks the part of one rank, or a rank lacks one "
            "finished chunk. n ranks need n - 1 steps in each half", _one_step_less),
    *(Mistake("another chunk first", "the second half starts with a chunk that is not finished on its rank: rank r has "
              "finished chunk r, and that one goes first", left_by(gather_start=start)) for start in (0, 2, 3)),
    Mistake("halves in the other order", "the all-gather ran before the reduce-scatter: it handed round chunks that "
            "nobody had added up yet, and these were added then", serial.leaves(_gather_first)),
    Mistake("adds twice", "what comes in is added twice", left_by(times=2)),
    Mistake("overwrites", "what comes in is put in the place of a rank's own part, where it is to be added to it",
            left_by(times=0)),
    Mistake("adds in the second half", "what comes in is added in the second half too. It is finished: it replaces "
            "what stood there", left_by(gathered=1)),
    Mistake("sends what it brought", "a rank sends on what it brought, not what it has just added to, so no sum grows "
            "beyond two ranks. So it is too where the steps take the chunks in the other order. On two ranks that is "
            "all, and it passes", left_by(bring=True)),
    Mistake("mean for sum", "the sums are divided by the number of ranks: asked for is the sum", _mean),
    Mistake("a constant factor", "every wrong value is {} times the right one", _times),
)  # fmt: skip

WALKS = (
    Mistake("taken for another chunk", "what comes in is another chunk than the one it is put to: in the first step "
            "{}. What a rank receives is what its neighbour sends in that step", _walks(False)),
    Mistake("chunks in the other direction", "from step to step the chunks are taken in the direction in which the "
            "messages go, so no rank sends on what came in in the step before. If messages go to the right, the number "
            "of the chunk falls by one in each step; if they go to the left, it rises", _walks(True)),
)  # fmt: skip
LAST_BITS = Mistake("sums that differ", "the ranks add up the same numbers in different orders, so their sums differ "
                    "in the last bit. A sum is made once and handed on, or by all in one order; else replicas that "
                    "should be equal drift apart", _last_bits)  # fmt: skip


def _spending(*names):
    return (
        Mistake("whole tensors sent", "the values are right, and this is no ring: {}. Parts that are summed first need "
                "not be sent one by one. With two ranks both ways send S, and nobody can tell them apart",
                _spends(_whole_tensors(names[-1]))),
        Mistake("one step too many", "the values are right, and there is one step too many: {}. n ranks need n - 1 "
                "steps in each half; what the last one brings is not used, and costs 1/n S",
                _spends(_one_step_more(*names))),
        Mistake("straight to everybody", "the values are right, and this is no ring: {}. Asked for is a ring, where a "
                "rank sends to one neighbour, who hands on what it got: then only links between neighbours are used",
                _spends(_to_everybody(*names))),
        *(Mistake("spare chunk in the second half", "the values are right, and ring_all_gather needs no spare chunk: "
                  "{}. What comes in is finished, so it can be received right into its place", _spends(_in_gather))
          for name in names if name == GATHER),
        Mistake("a second tensor", "the values are right, and beside the tensor there is as much again: {}. No copy of "
                "the whole is needed: what comes in is added at once, to a chunk that is still to be sent",
                _spends(_spare(names, 3))),
        Mistake("a sum beside the spare chunk", "the values are right, and there is more than the spare chunk beside "
                "the tensor: {}. The right side of part = part + received makes another tensor; part += received adds "
                "in place", _spends(_sums(names))),
        Mistake("two spare chunks", "the values are right, and more than one spare chunk is there at once: {}. Look "
                "for a new tensor in each step (its name in a loop keeps the old one until the new one is made), or "
                "for a copy of what is sent", _spends(_spare(names, 1.5))),
    )  # fmt: skip


def ring_mistakes(*names):
    """The mistakes of an exercise that defines these functions of a ring."""
    values = [its for its in VALUES if its.name != "rank 0 only" or SCATTER not in names]  # there all have other sums
    return (*MESSAGES, *values[:2], *WALKS, *values[2:], *_spending(*names), LAST_BITS)


# two nodes


def _left_nodes(least, most):
    def test(case, recording):
        shares = [spent / total_bytes(case) for spent in leaving(recording)]
        return f"{shares[0]:.3g} S left node 0 and {shares[1]:.3g} S node 1" if least <= max(shares) <= most else False
    return test


def _node_sums(name, parts):
    return [parts[rank // 2 * 2] + parts[rank // 2 * 2 + 1] for rank in range(4)]


def _across_only(name, parts):
    return [parts[rank] + parts[(rank + 2) % 4] for rank in range(4)]


def _crossed(name, parts):
    node = _node_sums(name, parts)
    middle, held = serial.bounds(len(parts[0]), 2)[0][1], []
    for rank in range(4):  # to the own half comes the other half of the other node
        halves = [node[rank][:middle] + node[rank - 2][middle:], node[rank][middle:] + node[rank - 2][:middle]]
        held.append(np.concatenate(halves))
    return held


def _own_half(theirs, right):
    """Whether one half is right and the other is not."""
    middle = serial.bounds(len(right), 2)[0][1]
    halves = [torch.isclose(theirs[part], right[part]) for part in (slice(middle), slice(middle, None))]
    return len(right) > 1 and any(one.all() and not two.any() for one, two in (halves, halves[::-1]))


def _one_left_out(theirs, right):
    return len(right) > 1 and len(right) % 2 and (~torch.isclose(theirs, right, rtol=1e-10, atol=1e-12)).sum() == 1


NODE_MISTAKES = (
    *MESSAGES[:8],
    Mistake("not handed on", "a rank waits for a message that never comes. Who has the sum of a node, or the whole "
            "sum, must hand it on to its neighbour", ended("hang", says=r".*recv; .* never called send")),
    *[its for its in MESSAGES if its.name == "message missing"],
    *VALUES[:4],
    Mistake("node sums only", "every rank holds the sum of its own node: nothing of the other node came in",
            serial.leaves(_node_sums)),
    Mistake("partners only", "every rank holds the sum of itself and its partner in the other node: its neighbour in "
            "the node is missing", serial.leaves(_across_only)),
    Mistake("leaders only", "one rank of each node has the sum, the other has not: it must be handed on inside",
            _wrong_on((1, 3), (0, 2), *[(rank,) for rank in range(4)])),
    Mistake("halves crossed", "to one half of a sum the other half of the other node's sum was added: the two that "
            "talk across hold different halves. Ranks 0 and 2 have the first half, 1 and 3 the second",
            serial.leaves(_crossed)),
    Mistake("half a sum", "every rank has one half of the sum right, its own, and never got the other half from its "
            "neighbour in the node", _wrong_values(_own_half)),
    Mistake("remainder dropped", "one element takes no part: an odd length has no two halves of one size, and twice "
            "length // 2 leaves one out", _wrong_values(_one_left_out)),
    *VALUES[-2:],
    Mistake("flat ring", "the values are right, and {}. A ring crosses the border between the nodes with every chunk "
            "that is on its way; sums of a whole node would cross once", _spends(_left_nodes(1.1, 1.9))),
    Mistake("whole tensors across", "the values are right, and {}: both ranks of a node sent the whole tensor over. "
            "After a first sum inside the node, half of it each is enough", _spends(_left_nodes(1.95, 99.0))),
    LAST_BITS,
    Mistake("wrong, and enough sent", "1 S left each node, which is what it takes. What is missing, or elsewhere, "
            "was lost inside a node, or a rank sent across what the other did not take it for",
            lambda evidence, _: leaving(evidence.recording) == [total_bytes(evidence.case)] * 2),
)  # fmt: skip
