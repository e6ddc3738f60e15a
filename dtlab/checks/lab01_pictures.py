"""The pictures of lab 01: what is to come out, beside what the learner's functions do; also while there are none."""
import functools
import itertools
import re

import numpy as np

from dtlab.checks import lab01_programs as programs
from dtlab.checks import lab01_serial as serial
from dtlab.checks.lab02_pictures import stack
from dtlab.errors import HangError
from dtlab.plots.holdings import cut_bars, holdings, traffic
from dtlab.plots.svg import document, label
from dtlab.plots.twin import twin

_WIDTH = 650
_MANY = "7 parts: so many are added up, some more than once; other: no such sum"


def _beside(pairs, caption):
    """Targets beside the learner's; ``(title, target, title, yours)`` each."""
    rows = [twin([target, yours], [left, right], caption=caption if not number else "")
            for number, (left, target, right, yours) in enumerate(pairs)]  # fmt: skip
    return rows[0] if len(rows) == 1 else stack([("", row) for row in rows], title=caption)


def cuts(case, expected, evidence):
    """The chunks of each pair as bars."""
    def drawn(results):
        its = [(length, results[serial.cut_key(length, size)]) for length, size in case["pairs"]]
        return cut_bars(its)

    try:
        yours = drawn(evidence.results[0]) if evidence.results else cut_bars(None, evidence.in_words)
    except (TypeError, ValueError, KeyError):
        yours = cut_bars(None, "no list of pairs (start, end)")
    return _beside([("target", drawn(expected[0]), "yours", yours)], "Chunks for 4 ranks, as start:end")


def ring(case, expected, evidence):
    """Whose parts each rank holds added up in each chunk, what it sent and what it held beside."""
    names = sorted({key.partition(" of ")[0] for key in expected[0]})
    pairs = []
    for name in names:
        key = serial.label(name, case["lengths"][0])
        right = [serial.ring_bytes(name, case, rank)[0] for rank in range(case.world_size)]
        foot = f"sent by each rank: {_shares(right, case)}"
        target = holdings(_table(case, [its[key].numpy() for its in expected]), foot=foot)
        if evidence.results:
            spent = [serial.sent_bytes(evidence.recording, rank, name) for rank in range(case.world_size)]
            foot = f"sent by each rank: {_shares(spent, case)}"
            yours = holdings(_table(case, [its[key].numpy() for its in evidence.results]), foot=foot)
        else:
            yours = holdings(None, evidence.in_words)
        pairs.append((f"{name}, target", target, "yours", yours))
    return _beside(pairs, f"{case}: the parts in each chunk (sum of 3: all of chunk 3; sum+0: all, and 0 once more; "
                          f"{_MANY})")  # fmt: skip


def _shares(spent, case):
    shares = [f"{its / serial.total_bytes(case):.3g}" for its in spent]
    return f"{shares[0]} S" if len(set(shares)) == 1 else f"{', '.join(shares)} S"


def _table(case, held, cuts=serial.bounds):
    """Of each chunk on each rank, whose parts are added up there, or the sum of which other chunk is there."""
    length, size = case["lengths"][0], case.world_size
    parts, chunks = [serial.part(case, length, rank) for rank in range(size)], cuts(length, size)
    total, table = sum(parts), []
    for rank, theirs in enumerate(held):
        row = [_parts_in(theirs[start:end], [its[start:end] for its in parts], rank) for start, end in chunks]
        for number, (text, _) in enumerate(row):
            found = [other for other, its in enumerate(chunks) if text == "other" and
                     np.array_equal(np.round(total[slice(*its)], 6), np.round(theirs[slice(*chunks[number])], 6))]
            row[number] = (f"sum of {found[0]}", "partial") if found else row[number]
        table.append(row)
    return table


@functools.lru_cache
def _tries(size):
    """How often each rank's part may be in a sum, [tries, ranks]: the shortest sums first."""
    return np.array(sorted(itertools.product(range(6), repeat=size), key=sum))


def _parts_in(theirs, parts, rank):
    """``(text, state)`` of one chunk."""
    if np.isnan(theirs).all() and len(theirs):
        return "any", ""
    tries = _tries(len(parts))
    fits = np.isclose(tries @ np.array(parts), theirs, rtol=1e-9, atol=1e-9).all(axis=1)
    if not fits.any():
        return "other", ""
    counts = tries[fits.argmax()].tolist()
    own = [number == rank for number in range(len(parts))]
    state = "finished" if set(counts) == {1} else "own" if counts == own else "partial"
    whole = min(counts)  # how often all parts are in
    if sum(counts) == whole * len(counts):
        whole = max(0, whole - 1)
    rest = [str(number) for number, count in enumerate(counts) for _ in range(count - whole)]
    text = "+".join(["sum" if whole == 1 else f"{whole} sum"] * bool(whole) + rest) or "zero"
    return (text if len(text) < 9 else f"{sum(counts)} parts"), state


def nodes(case, expected, evidence):
    """Bytes from rank to rank, and what leaves each node."""
    flat = [[1.5 * (to == (rank + 1) % 4) for to in range(4)] for rank in range(4)]
    yours = traffic(None, evidence.in_words, node_size=2)
    if evidence.recording:
        share = lambda size: size / serial.total_bytes(case)
        out = serial.leaving(evidence.recording)
        yours = traffic([[share(its) for its in row] for row in serial.traffic(evidence.recording)], node_size=2,
                        foot=f"leaves node 0: {share(out[0]):.3g} S, node 1: {share(out[1]):.3g} S")  # fmt: skip
    flat = traffic(flat, node_size=2, foot="leaves a node: 1.5 S. Target: at most 1 S")
    return _beside([("a flat ring", flat, "yours", yours)], "Sent from rank to rank; coloured: what leaves a node")


def diagnosis(case):
    """Each program: what the ranks hold, what they sent, and when."""
    seen = _programs_seen(case)
    until_s = max(its.step_time_s for *_, its in seen.values() if its)
    _, right, mine = seen["right"]
    pictures, titles = [], []
    for letter, (held, facts, its) in seen.items():
        titles.append("The right program" if letter == "right" else f"Program {letter}")
        if held:
            table = _table(case, held, lambda length, _: [(place, place + 1) for place in range(length)])
            table = [[("sum", state) if state == "finished" else (text, state) for text, state in row] for row in table]
            foot = facts if letter == "right" else f"{facts} (right: {right})"
            pictures.append(holdings(table, foot=f"sent by each rank: {foot}", column="place", width=_WIDTH - 226,
                                     tall=19, times=(its, until_s, mine.step_time_s)))  # fmt: skip
        else:
            lines = [label(4, 18 + 18 * number, line, size=13) for number, line in enumerate(facts.splitlines())]
            pictures.append(document(lines, width=_WIDTH, height=18 * len(lines) + 8, title="", text=facts))
    return twin(pictures, titles, caption="Left: whose parts are added up at each place (sum: all four; sum+0: and 0 "
                "once more; 7 parts: so many, some more than once). Right, replayed on 8 H100: green, messages of the "
                "rank are under way; grey, it computes or starts calls; white, it waits. The line: where the right "
                "program ends")  # fmt: skip


def _programs_seen(case):
    """Letter -> (what the ranks hold, facts in a line, Timeline), "right" first."""
    from dtlab.ranks.pool import Ranks
    from dtlab.simulate import Hardware, replay

    seen = {}
    with Ranks(case.world_size, device="cpu", timeout=5, share_gpu=False, guard=False) as ranks:
        for letter in ("right", *programs.LETTERS):
            try:
                recording = ranks.record(programs.observed, letter, case)
            except HangError as error:
                lines = [re.sub(r" at \S+, line.*", "", line) for line in str(error).splitlines()]
                seen[letter] = None, "\n".join(line for line in lines if "wait" in line), None
                continue
            spent = [serial.sent_bytes(recording, rank) for rank in recording.ranks]
            its = replay(recording, Hardware.preset("8xH100"))
            facts = f"{_shares(spent, case)}; {its.step_time_s * 1e6:.0f} us"
            seen[letter] = [result.numpy() for result in recording.results], facts, its
    return seen
