"""The pictures of lab 02: what is to come out, beside what the learner's functions do; also while there are none."""
import re

from dtlab.checks import lab02_programs as programs
from dtlab.checks.compare import difference
from dtlab.checks.evidence import Answer, gather
from dtlab.checks.lab02_buckets import calls, plan, train_with
from dtlab.plots.bars import Panel, bars
from dtlab.plots.svg import COLOURS, box, document, label, line
from dtlab.plots.timeline import timeline
from dtlab.simulate.events import Recording

_WIDTH, _ROW = 650, 26
_EQUAL, _OTHER = "#B8E0D0", COLOURS["paper"]


def _cell(x, y, width, text, good, height=_ROW - 6):
    """A box with a word in it, drawn with an outline only where it is not what it should be."""
    weight = "normal" if good else "bold"
    return [box(x, y, width, height, fill=_EQUAL if good else _OTHER, radius=3),
            label(x + width / 2, y + height - 5, text, anchor="middle", size=13, weight=weight)]


# 1: a table of tensors and ranks


def start(case, expected, evidence):
    """Which tensors have rank 0's first values, on which rank."""
    names = list(expected[0]["tensors"])
    size, y = case.world_size, 52
    parts, said, left, wide = [], [], 230, 80
    for title, x in (("target", left), ("yours", left + 2 * size * 52 + 30)):
        parts.append(label(x, 16, title, size=15, weight="bold"))
        parts += [label(x + rank * (wide + 6) + wide / 2, 40, f"rank {rank}", anchor="middle", size=13)
                  for rank in range(size)]
    for row, name in enumerate(names):
        top = y + row * _ROW
        parts.append(label(left - 10, top + 15, name, anchor="end", size=13))
        for rank in range(size):
            parts += _cell(left + rank * (wide + 6), top, wide, "equal", True)
            theirs = evidence.results[rank]["tensors"].get(name) if evidence.results else None
            good = theirs is not None and difference(theirs, expected[rank]["tensors"][name]) is None
            word = "equal" if good else "differs" if evidence.results else "?"
            parts += _cell(left + 2 * size * 52 + 30 + rank * (wide + 6), top, wide, word, good)
            said += [f"{name} differs on rank {rank}"] if word == "differs" else []
    foot = evidence.in_words or ("equal to what rank 0 had" if not said else f"{len(said)} differ from what rank 0 had")
    parts.append(label(left, y + len(names) * _ROW + 18, foot, size=14, weight="bold"))
    text = f"Target: every tensor equal to rank 0's on every rank. Yours: {'; '.join(said) or foot}"
    return document(parts, width=_WIDTH, height=y + len(names) * _ROW + 30, title="Equal start", text=text)


# 2: the gradient of each rank


def weigh(case, expected, evidence):
    """The gradient that each rank holds, beside the right one; and the bytes handed to calls."""
    rows, values, moved = ["target"], [float(expected[0]["gradients"]["weight"])], [8 + 64]
    for rank in range(case.world_size):
        rows.append(f"rank {rank}")
        values.append(float(evidence.results[rank]["gradients"]["weight"]) if evidence.results else 0.0)
        moved.append(sum(e.bytes for e in evidence.recording.events[rank] if e.kind == "issue")
                     if evidence.recording else 0)
    shown = lambda numbers, form: [form(number) if number == number and (evidence.results or not row) else "?"
                                   for row, number in enumerate(numbers)]
    wrong = [row for row, value in enumerate(values) if not abs(value - values[0]) < 1e-9]
    gradient = Panel("the weight's .grad", [v if v == v else 0.0 for v in values], shown(values, lambda v: f"{v:.3g}"),
                     [(0, "0"), (2, "2"), (4, "4"), (6, "6"), (8, "8")], hollow=wrong)
    sent = Panel("bytes in calls", moved, shown(moved, lambda v: f"{'<= ' if v == 72 else ''}{v:,}"),
                 [(0, "0"), (50, "50"), (100, "100")], hollow=[row for row, its in enumerate(moved) if its > moved[0]])
    foot = evidence.in_words or ("filled: as the target; outline only: not" if wrong else "every rank has the target's")
    drawn = bars(rows, [gradient, sent], marked=0, foot=foot, title="The gradient on each rank",
                 text=f"target {values[0]:.4g}; yours {evidence.in_words or values[1:]}")
    return stack([("One weight. Rank 0: one token of gradient 1; rank 1: three of gradient 5", drawn)],
                 title="The gradient on each rank")


# 3: calls, a row each


def buckets(case, expected, evidence):
    """The planned buckets and the all_reduces that each rank made in the first step."""
    planned, ranks = plan(case), range(case.world_size)
    found = [calls(evidence.recording, rank) if evidence.recording else [] for rank in ranks]
    found = [its[: len(its) // len(case["batches"])] if evidence.recording else its for its in found]
    rows = max(len(planned), *map(len, found))
    left, wide, unit = 270, 84, 84 / max(size for _, size in planned)
    parts = [label(left - 10, 16, "parameters of each bucket", anchor="end", size=14, weight="bold")]
    for column, title in enumerate(["target", *(f"rank {rank}" for rank in ranks)]):
        x = left + column * (wide + 26)
        parts.append(label(x, 16, title, size=14, weight="bold"))
        its = [size for _, size in planned] if column == 0 else found[column - 1]
        for row in range(rows):
            top, wanted = 26 + row * _ROW, planned[row][1] if row < len(planned) else None
            if row < len(its):
                parts += _cell(x, top, max(46, min(wide + 20, its[row] * unit)), f"{its[row]:,} B", its[row] == wanted)
            elif wanted is not None:
                parts.append(label(x + 4, top + 15, "-", size=13))
    for row, (names, _) in enumerate(planned):
        text = f"{row + 1}. {', '.join(names)}"
        parts.append(label(left - 10, 26 + row * _ROW + 15, text, anchor="end", size=12))
    right = all(its == [size for _, size in planned] for its in found)
    foot = evidence.in_words or ("the calls of one step, in order" + ("" if right else ": not as planned"))
    parts.append(label(left, 26 + rows * _ROW + 18, foot, size=14, weight="bold"))
    text = f"target: {[size for _, size in planned]} bytes; yours: {evidence.in_words or found}"
    return document(parts, width=_WIDTH, height=26 + rows * _ROW + 30, title="all_reduces of a step", text=text)


# 4: timelines


class _Library:
    """The course's own version, as the exercise wants to see it."""

    def __init__(self, model, bucket_bytes):
        from dtlab import parallel

        self.ddp = parallel.DistributedDataParallel(model, bucket_bytes=bucket_bytes, broadcast_buffers=False)
        self.no_sync = self.ddp.no_sync

    def finish(self):
        """At the end of backward all is done."""


def overlap(case, expected, evidence):
    """The timeline of a step of two micro-batches: the course's own, then the learner's, on one scale."""
    target = gather(train_with, Answer({"make": _Library}), ("make",), case)
    lines = [_from_first_layer(its.recording) if its.recording else None for its in (target, evidence)]
    until_s = max((its.step_time_s for its in lines if its), default=0)
    shown = [timeline(drawn, until_s=until_s) if drawn else its.in_words
             for drawn, its in zip(lines, (target, evidence))]
    return stack([("target: micro-batch 1 adds up, micro-batch 2 sends meanwhile", shown[0]),
                  ("yours", shown[1]), ("", _lane(case.world_size))], title="Timelines of a step")  # fmt: skip


def _lane(size):
    return f"Row 0-{size - 1} default_pg: calls of ranks 0 to {size - 1}, all there are (torch's default process group)"


def _from_first_layer(recording):
    """The timeline without what comes before the first layer's forward."""
    events = {}
    for rank, its in recording.events.items():
        first = next((number for number, event in enumerate(its) if event.op == "sleep"), 0)
        events[rank] = its[first:]
    return Recording(events, world_size=recording.world_size).timeline()


# 5: programs seen from outside


def programs_seen():
    """Letter -> what came of it; "right" first. All on the same four ranks."""
    from dtlab.ranks.pool import Ranks

    seen = {}
    with Ranks(4, device="cpu", timeout=20, share_gpu=False, guard=False) as ranks:
        for letter in ("right", *programs.LETTERS):
            results = ranks.run(programs.observed, letter)
            seen[letter] = _Seen(results, ranks.record(programs.observed, letter, 1, programs.SLEEP_S))
    return seen


class _Seen:
    """What is to be seen of one program."""

    def __init__(self, results, recording):
        self.recording, self.lines = recording, _from_first_layer(recording)
        self.gradients = [gradient for _, gradient, _, _ in results]
        steps = zip(*(losses for losses, *_ in results))
        self.losses = [sum(loss for loss, _ in step) / sum(tokens for _, tokens in step) for step in steps]
        self.apart = [max(float((its[at] - results[0][at]).abs().max()) for its in results) for at in (2, 3)]
        events = [e for e in recording.events[0] if e.op == "sleep" or e.kind == "issue"]
        first = next(number for number, event in enumerate(events) if event.op == "sleep")
        self.bytes = sum(e.bytes for e in events[first:])
        order = ["i" if e.kind == "issue" else e.phase["name"][0] for e in events[first:]]
        self.to_come = order[order.index("i") :].count("b")

    def facts(self, right):
        """Lines of numbers beside those of the right program."""
        times = [float(its @ right.gradients[0] / (right.gradients[0] @ right.gradients[0])) for its in self.gradients]
        off = [float((its - scale * right.gradients[0]).norm() / right.gradients[0].norm())
               for its, scale in zip(self.gradients, times)]
        one = max(times) - min(times) < 1e-6
        said = f"{times[0]:.2f} times" if one else f"{min(times):.2f} to {max(times):.2f} times"
        factor = "exactly" if max(off) < 1e-6 else "not one factor" if one else "by rank"
        return [f"gradient of step 0: {said} the right one, {factor}",
                f"replicas apart: {self.apart[0]:.2f} at the start, {self.apart[1]:.2f} after {programs.STEPS} steps",
                f"bytes in calls of a step: {self.bytes / right.bytes:.2f} times those of the right program",
                f"layers whose backward is still to come when the first call starts: {self.to_come}"]


def programs_picture(case, expected, evidence):
    """The right program and the six others: four numbers, the loss, the timeline of rank 0 in a step."""
    seen, rows = programs_seen(), []
    right = seen["right"]
    until_s = max(its.lines.step_time_s for its in seen.values())
    for letter, its in seen.items():
        facts = its.facts(right)
        parts = [label(10, 22 + 20 * number, text, size=13) for number, text in enumerate(facts)]
        parts += _curve(its.losses, right.losses, 480, 4, 160, 66)
        rows.append((f"program {letter}" if len(letter) == 1 else "the right program",
                     document(parts, width=_WIDTH, height=90, title="", text="; ".join(facts))))
        rows.append(("", timeline(its.lines, ranks=[0], until_s=until_s)))
    rows.append(("", _lane(4)))
    return stack(rows, title="Six programs and the right one")


def _curve(losses, right, x, y, width, height):
    """The loss of each step as a line, the right program's dashed."""
    top, low = max(*losses, *right), min(*losses, *right)
    across, up = width / (len(losses) - 1), height / (top - low)
    place = lambda its: " ".join(f"{x + number * across:.1f},{y + (top - its[number]) * up:.1f}"
                                 for number in range(len(its)))
    return [line(x, y + height, x + width, y + height), line(x, y, x, y + height),
            f'<polyline points="{place(right)}" fill="none" stroke="{COLOURS["params"]}" stroke-dasharray="5 4"/>',
            f'<polyline points="{place(losses)}" fill="none" stroke="#0072B2" stroke-width="2.5"/>',
            label(x - 6, y + 12, f"{top:.2f}", anchor="end"), label(x - 6, y + height, f"{low:.2f}", anchor="end"),
            label(x + width, y + height + 14, "loss; dashed: right", anchor="end")]  # fmt: skip


def stack(rows, *, title):
    """Pictures or words under each other, each below its heading."""
    parts, y, said = [], 0, []
    for heading, shown in rows:
        if heading:
            y += 24
            parts.append(label(6, y - 6, heading, size=15, weight="bold"))
        if isinstance(shown, str):
            parts.append(label(20, y + 22, shown, size=14))
            y += 44
        else:
            parts.append(str(shown).replace("<svg ", f'<svg x="0" y="{y}" ', 1))
            y += float(re.search(r'height="([\d.]+)"', str(shown)).group(1)) + 6
        said.append(f"{heading}: {shown if isinstance(shown, str) else shown.text}".removeprefix(": "))
    return document(parts, width=_WIDTH, height=y, title=title, text="\n".join(said))
