"""The pictures of lab 03: what is to come out, beside what the learner's functions do; also while there are none."""
import math

from dtlab.checks import lab03_layers as layers
from dtlab.checks import lab03_stages as stages
from dtlab.checks.lab02_pictures import stack
from dtlab.checks.lab02_programs import moved
from dtlab.checks.lab03_shards import cut_key
from dtlab.plots.bars import Panel, bars
from dtlab.plots.columns import columns
from dtlab.plots.svg import COLOURS, box, document, label

FILLS = ("#B8E0D0", "#F3C9A8", "#D5DCEB", "#EBD3E2", "#E5E5E5")  # of the parameters, one after the other


# 1: shard map


def cuts(case, expected, evidence):
    """Each rank's shard as a row, its pieces coloured and named by parameter; padding is white."""
    (sizes, n), *_ = case["cuts"]
    try:
        yours = shard_map(*evidence.results[0][cut_key(sizes, n)]) if evidence.results else evidence.in_words
    except (TypeError, ValueError, KeyError):
        yours = "no pair of a length and the pieces of each rank"
    target = shard_map(*expected[0][cut_key(sizes, n)])
    rows = [(f"target: parameters of {', '.join(map(str, sizes))} elements", target), ("yours", yours)]
    return stack(rows, title="Shards")


def shard_map(length, its, called=str, rest="padding"):
    """Of each rank a row: its pieces ``(number, start, end)`` of so many elements, and the ``rest``."""
    parts, unit = [], 570 / max([1, length, *(sum(end - start for _, start, end in mine) for mine in its)])
    for rank, mine in enumerate(its):
        x, y = 70, 6 + 34 * rank
        parts.append(label(60, y + 19, f"rank {rank}", anchor="end", size=13))
        padding = length - sum(end - start for _, start, end in mine)
        for number, start, end in [*mine, *[(None, 0, padding)] * (padding > 0)]:
            wide, name = (end - start) * unit, rest if number is None else f"{called(number)}[{start}:{end}]"
            name = name if number is None or wide > 8 * len(name) else called(number)
            fill = COLOURS["paper"] if number is None else FILLS[number % len(FILLS)]
            parts += [box(round(x, 1), y, round(wide, 1), 26, fill=fill, radius=0),
                      label(round(x + wide / 2, 1), y + 18, name, anchor="middle", size=13)]  # fmt: skip
            x += wide
    said = "; ".join(f"rank {rank}: {', '.join(f'{called(n)}[{a}:{b}]' for n, a, b in mine)}"
                     for rank, mine in enumerate(its))
    return document(parts, width=650, height=12 + 34 * len(its), title="Shards", text=f"{said}; {length} elements each")


# 2, 3, 5: memory by category


def _memory(case, evidence, whole, allowed, found, foot):
    """Columns of bytes by category: unsharded, what is allowed, and what ``found(rank)`` says."""
    ranks = range(case.world_size)
    its = [whole, allowed, *(found(rank) if evidence.recording else dict.fromkeys(whole, 0) for rank in ranks)]
    names = ["unsharded", "allowed", *(f"rank {rank}" for rank in ranks)]
    said = "; ".join(f"{name}: {each}" for name, each in zip(names, its))
    foot += f"; from below: {', '.join(name[0].upper() for name in whole)}"  # thin ones have no letter
    drawn = columns(names, {name: [each[name] / 1000 for each in its] for name in whole}, x=foot, y="peak [kB]",
                    marked=1, title="Memory by category", text=f"{said}. {foot}")  # fmt: skip
    return stack([(f"{case}; yours: {evidence.in_words or 'measured'}", drawn)], title="Memory by category")


def _stage(case, evidence, allowed, held):
    """Of stage 1 or 2: ``allowed`` bytes of gradients, where a rank holds ``held(recording, rank)``."""
    params, recording = stages.shard_bytes(case, 1), evidence.recording
    each = lambda grads, states: {"params": params, "grads": grads, "optimizer_states": states}
    spent = f"{max(moved(recording, rank) for rank in recording.ranks):,} of" if recording else "at most"
    return _memory(case, evidence, each(params, stages.state_bytes(case, 1)), each(allowed, stages.state_bytes(case)),
                   lambda rank: each(held(recording, rank), stages.states(recording, rank)),
                   f"handed to calls: {spent} {stages.allowed_moves(case):,} bytes")  # fmt: skip


def stage_one(case, expected, evidence):
    """Whole parameters and gradients, a share of the states."""
    whole = stages.shard_bytes(case, 1)
    return _stage(case, evidence, whole, lambda *_: whole)


def stage_two(case, expected, evidence):
    """Whole parameters, a share of the states, and of gradients a share and what is on its way."""
    return _stage(case, evidence, stages.gradient_room(case), stages.gradients_held)


def stage_three(case, expected, evidence):
    """A share of everything, and a few layers whole."""
    whole, share, recording = sum(layers.layer_bytes(case).values()), layers.share_bytes(case), evidence.recording
    each = lambda params, grads, activations, other=0: {"params": params, "grads": grads,
                                                        "activations": activations + other}  # fmt: skip
    few = layers.room(case) - 2 * share
    spent = f"{layers.sent(recording):,} of" if recording else "at most"
    return _memory(case, evidence, each(whole, whole, few), each(share, share, few),
                   lambda rank: each(**layers.held(recording, rank)),
                   f"sent: {spent} {layers.allowed_bytes(case):,} bytes; A: activations, gathered layers, the rest")


# 4: norm and factor


def clip(case, expected, evidence):
    """The norm that each rank has, and what became of the gradient that all have whole."""
    name, ranks = case["tries"][0].name, range(case.world_size)
    panels, said = [], []
    for title, ticks, get in (("norm", (0, 10, 20), lambda its: its["norm"]),
                              ("12, clipped", (0, 6, 12), lambda its: its["whole"][0])):
        values = [float(get(expected[0][name])), *(number_of(get, evidence.results[rank][name]) if evidence.results
                                                   else math.nan for rank in ranks)]  # fmt: skip
        none = "no number" if evidence.results else "?"
        shown = [none if math.isnan(value) else f"{value:.4g}" for value in values]
        wrong = [row for row, value in enumerate(values) if not abs(value - values[0]) < 1e-9]
        panels.append(Panel(title, [max(0.0, v) if math.isfinite(v) else 0.0 for v in values], shown,
                            [(at, str(at)) for at in ticks], hollow=wrong))
        said.append(f"{title}: target {shown[0]}, yours {', '.join(shown[1:])}")
    foot = evidence.in_words or "filled: as the target; outline only: not"
    drawn = bars(["target", *(f"rank {rank}" for rank in ranks)], panels, marked=0, foot=foot, title="Norm",
                 text=f"{'; '.join(said)}. {foot}")
    return stack([("Shards of 3 and of 4, 12 on both ranks, to be clipped to 6.5", drawn)], title="Norm")


def number_of(get, its):
    """What ``get`` reads as a number; NaN where there is none."""
    try:
        return float(get(its))
    except (TypeError, ValueError, RuntimeError, LookupError, AttributeError):
        return math.nan
