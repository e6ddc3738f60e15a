"""The pictures of lab 04: what is to come out, beside what the learner's functions do; also while there are none."""
import math

from dtlab.checks import lab04_layers as layers
from dtlab.checks.lab02_pictures import stack
from dtlab.checks.lab02_programs import moved
from dtlab.checks.lab03_model import FLOAT_BYTES
from dtlab.checks.lab03_pictures import FILLS, number_of, shard_map
from dtlab.checks.lab04_loss import tokens
from dtlab.plots.bars import Panel, bars
from dtlab.plots.svg import box, document, label
from dtlab.plots.twin import twin

# 1: whose piece an element is in


def cuts(case, expected, evidence):
    """Each try's whole: the rank of every element; by the pieces that came, and as rank 0 has gathered it."""
    rows = []
    for one in case["tries"]:
        right = [its[one.name]["piece"] for its in expected]
        yours = [its[one.name] for its in evidence.results or []]
        owners = {value: str(rank) for rank, its in enumerate(right) for value in its.flatten().tolist()}
        grids = [_grid(one["whole"], owners), *(_words(evidence.in_words) for _ in range(2 * (not yours)))]
        if yours:
            held = [its["piece"].flatten().tolist() if hasattr(its["piece"], "flatten") else [] for its in yours]
            mine = {value: ",".join(str(rank) for rank, its in enumerate(held) if value in its) for value in owners}
            whole = yours[0]["gathered"]
            fits = getattr(whole, "shape", None) == one["whole"].shape
            grids += [_grid(one["whole"], mine), _grid(whole, owners) if fits else _words("another shape")]
        titles = ("target", "your pieces", "gathered on rank 0")
        rows.append(("", twin(grids, titles, caption=f"{one.name}: whose piece each element is in")))
    return stack(rows, title="Pieces")


def _grid(whole, owners):
    rows = [[owners.get(value, "?") or "-" for value in row] for row in whole.tolist()]
    parts = []
    for y, row in enumerate(rows):
        for x, owner in enumerate(row):
            fill = FILLS[int(owner)] if owner.isdigit() else "none"
            parts += [box(2 + 24 * x, 2 + 20 * y, 24, 20, fill=fill, radius=0),
                      label(14 + 24 * x, 17 + 20 * y, owner, anchor="middle", size=13)]
    return document(parts, width=10 + 24 * len(rows[0]), height=4 + 20 * len(rows), title="Owners",
                    text="; ".join(" ".join(row) for row in rows))  # fmt: skip


def _words(words):
    return document([label(4, 20, words, size=13)], width=206, height=30, title=words, text=words)


# 2 to 5: numbers that all ranks should have


def _numbers(case, expected, evidence, heading, quantities, foot=""):
    """Bars: ``quantities`` are ``(title, function of a rank's result)``; the axis is in parts of the target."""
    panels, said, ranks, turned = [], [], range(case.world_size), False
    for title, get in quantities:
        right = float(get(expected[0]))
        values = [right, *(number_of(get, its) for its in evidence.results or [math.nan] * case.world_size)]
        none = "no number" if evidence.results else "?"
        shown = [none if math.isnan(value) else f"{value:.4g}" for value in values]
        shares = [max(0.0, value / right) if math.isfinite(value) else 0.0 for value in values]
        turned |= any(value * right < 0 for value in values)
        wrong = [row for row, value in enumerate(values) if not abs(value - right) < 1e-9]
        panels.append(Panel(title, shares, shown, [(0, "0"), (1, "target"), (2, "")], hollow=wrong))
        said.append(f"{title}: target {shown[0]}, yours {', '.join(shown[1:])}")
    foot = (evidence.in_words or f"filled: as the target; outline only: not{'; no bar: of other sign' * turned}") + foot
    drawn = bars(["target", *(f"rank {rank}" for rank in ranks)], panels, marked=0, foot=foot, title=heading,
                 text=f"{'; '.join(said)}. {foot}")  # fmt: skip
    return stack([(heading, drawn)], title=heading)


def _last(*keys):
    """A function of a result to the last number of what is found by these keys; a first token sees nothing else."""
    def get(its):
        for key in keys:
            its = its[key]
        return its.flatten()[-1]
    return get


def regions(case, expected, evidence):
    """Output and gradient of x on each rank."""
    (name,) = case["flows"]
    return _numbers(case, expected, evidence, "g(tanh(f(x) A) B): the last number of each", [
        ("output", _last(name, "output")), ("gradient of x", _last(name, "gradient of x"))])  # fmt: skip


_LAYER = [("output", _last("output")), ("gradient of x", _last("gradient of x"))]


def mlp(case, expected, evidence):
    """Output, gradient of x and of the second bias on each rank."""
    return _numbers(case, expected, evidence, f"{case}: the last number of each", [
        *_LAYER, ("of the bias", _last("gradients", "fc2.bias"))])  # fmt: skip


def attention(case, expected, evidence):
    """Which rows of q, k and v each rank has, target and yours; output and gradient of x."""
    whole = layers.weights_of(case)["qkv.weight"]
    numbers = _numbers(case, expected, evidence, "The last number of each", _LAYER)
    try:
        yours = _rows(whole, evidence.results) if evidence.results else evidence.in_words
    except (LookupError, TypeError):
        yours = "no weight of q, k and v"
    target = _rows(whole, expected)
    return stack([("target: rows of q, k and v", target), ("yours", yours), ("", numbers)], title="Heads")


def _rows(whole, results):
    """A map of the rows of the fused weight that results have; those that are no such rows are left white."""
    places, into, its = {tuple(row): at for at, row in enumerate(whole.tolist())}, len(whole) // 3, []
    for result in results:
        mine = []
        for row in result["parameters"]["qkv.weight"].tolist():
            block, at = divmod(places.get(tuple(row), -1), into)
            if mine and mine[-1][0] == block and mine[-1][2] == at:
                mine[-1][2] += 1
            elif block >= 0:
                mine.append([block, at, at + 1])
        its.append(mine)
    return shard_map(max(len(result["parameters"]["qkv.weight"]) for result in results), its, "qkv".__getitem__,
                     rest="other rows")


def loss(case, expected, evidence):
    """The loss of two tokens on each rank; what was sent."""
    one, recording, allowed = case["tries"][0], evidence.recording, 3 * FLOAT_BYTES * tokens(case)
    of = lambda token: (f"loss of token {token}", lambda its: its[one.name]["loss"].flatten()[token])
    spent = f"{max(moved(recording, rank) for rank in recording.ranks):,}, " if recording else ""
    columns = len(one["logits"][0])
    return _numbers(case, expected, evidence,
                    f"{one}: the last {columns - one['vocab']} of {columns} columns are padding",
                    [of(0), of(len(one["targets"]) - 1)], f"; bytes to calls: {spent}allowed {allowed}")
