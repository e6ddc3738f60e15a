"""A ring all-reduce, step by step: what each rank holds of each chunk, and what moves.

Rank r hands chunks to rank r + 1. n - 1 steps add (reduce-scatter, rank r ends with the sum of chunk r), n - 1 more
hand the sums round (all-gather).
"""
from dtlab.plots.svg import COLOURS, arrow, document, label

_WIDTH, _LEFT, _TOP, _TABLE, _WIDEST, _TALLEST = 650, 66, 56, 344, 144, 86
_LOOKS = {  # state -> fill, text, words of the legend
    "own": (COLOURS["paper"], COLOURS["outline"], "own part"),
    "partial": ("#B2E2D5", COLOURS["outline"], "partial sum"),
    "finished": (COLOURS["communication"], COLOURS["outline"], "finished"),
    "passed": (COLOURS["paper"], "#767676", "not needed"),
}


def ring_sends(size, step):
    """``[(from rank, to rank, chunk), ...]`` of one step, counted from 1.

    Example:
        >>> ring_sends(3, 1), ring_sends(3, 3)
        ([(0, 1, 2), (1, 2, 0), (2, 0, 1)], [(0, 1, 0), (1, 2, 1), (2, 0, 2)])
    """
    shift = step if step < size else step - size
    return [(rank, (rank + 1) % size, (rank - shift) % size) for rank in range(size)]


def ring_table(size, step):
    """What every rank holds after a step: ``table[rank][chunk] = (ranks added up, in their order, state)``.

    Example:
        >>> ring_table(2, 1)
        [[((1, 0), 'finished'), ((0,), 'passed')], [((1,), 'passed'), ((0, 1), 'finished')]]
    """
    table = [[((rank,), "own")] * size for rank in range(size)]
    for now in range(1, step + 1):
        sent = [(source, target, chunk, table[source][chunk]) for source, target, chunk in ring_sends(size, now)]
        for source, target, chunk, (terms, state) in sent:
            if now < size:  # reduce-scatter: the receiver adds its part
                terms += table[target][chunk][0]
                table[source][chunk] = (table[source][chunk][0], "passed")
                state = "finished" if len(terms) == size else "partial"
            table[target][chunk] = terms, state
    return table


def ring(size, step, *, tensor_bytes):
    """Draw the table after a step, with the arrows of that step.

    Args:
        size: ranks of the ring (count, 2 .. 8).
        step: steps made, 0 .. 2 (size - 1).
        tensor_bytes: S, the tensor that is reduced; only for the words.

    Returns:
        Svg, 650 units wide, of one height for every size.
    """
    steps, sent = 2 * (size - 1), step * tensor_bytes / size / 2**20
    phase = "start" if step == 0 else "reduce-scatter" if step < size else "all-gather"
    title = f"Step {step} of {steps}: {phase}"
    wide, tall = min(_WIDEST, (_WIDTH - _LEFT - 4) / size), min(_TALLEST, _TABLE / size)
    parts = _legend()
    for chunk in range(size):
        parts.append(label(_LEFT + (chunk + 0.5) * wide, _TOP - 10, f"chunk {chunk}", anchor="middle", size=14))
    table = ring_table(size, step)
    for rank, row in enumerate(table):
        middle = _TOP + (rank + 0.5) * tall
        parts.append(label(_LEFT - 8, round(middle + 5, 1), f"rank {rank}", anchor="end", size=14, weight="bold"))
        for chunk, (terms, state) in enumerate(row):
            parts += _cell(_LEFT + chunk * wide, _TOP + rank * tall, wide, tall, terms, state)
    for source, target, chunk in ring_sends(size, step) if step else ():
        x, down = _LEFT + (chunk + 1) * wide - 8, 1 if target else -1
        ends = (_TOP + (source + 0.5) * tall + down * tall * 0.15, _TOP + (target + 0.5) * tall - down * tall * 0.1)
        parts.append(arrow(x, ends[0], x, ends[1], width=3))
    bytes_said = f"{sent:.4g} of {steps * tensor_bytes / size / 2**20:.4g} MiB sent by each rank"
    parts.append(label(4, _TOP + _TABLE + 26, f"{title}, {bytes_said}", size=15, weight="bold"))
    return document(parts, width=_WIDTH, height=_TOP + _TABLE + 38, title=title,
                    text=f"{title}, {bytes_said}. {_told(size, step, table)}")


def _told(size, step, table):
    finished = sum(state == "finished" for row in table for _, state in row)
    moves = "; ".join(f"{source} to {target}: chunk {chunk}"
                      for source, target, chunk in (ring_sends(size, step) if step else ()))
    return f"Finished sums: {finished} of {size * size}.\nJust sent, rank to rank: {moves or 'nothing yet'}."


def _legend():
    parts, x = [], 4
    for fill, colour, words in _LOOKS.values():
        parts += [f'<rect x="{x}" y="8" width="26" height="18" fill="{fill}" stroke="{COLOURS["outline"]}"/>',
                  label(x + 13, 22, "0", anchor="middle", size=14, fill=colour, weight="bold"),
                  label(x + 32, 22, words, size=14)]
        x += 48 + 8.5 * len(words)
    return [*parts, arrow(x + 2, 17, x + 30, 17, width=3), label(x + 36, 22, "just sent", size=14)]


def _cell(x, y, width, height, terms, state):
    fill, colour, _ = _LOOKS[state]
    inset = 1.5 if state == "finished" else 0
    parts = [f'<rect x="{x + inset:.1f}" y="{y + inset:.1f}" width="{width - 2 * inset:.1f}" '
             f'height="{height - 2 * inset:.1f}" fill="{fill}" stroke="{COLOURS["outline"]}" '
             f'stroke-width="{1 + inset}"/>']
    size, most, aside = (14, 4, 0) if width > 110 else (12, 3, 5)  # ranks a line: fonts differ; beside the arrow
    lines = ["+".join(map(str, terms[at:at + most])) for at in range(0, len(terms), most)]
    for number, text in enumerate(lines):
        text += "+" if number + 1 < len(lines) else ""
        below = (number - (len(lines) - 1) / 2) * (size + 2)
        parts.append(label(f"{x + width / 2 - aside:.1f}", f"{y + height / 2 + 4 + below:.1f}", text, anchor="middle",
                           size=size, weight="bold" if size > 12 and state != "passed" else "normal", fill=colour))
    return parts
