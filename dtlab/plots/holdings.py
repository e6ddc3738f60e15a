"""What each rank holds of each chunk, chunks of a tensor as bars, bytes from rank to rank."""
from dtlab.plots.svg import COLOURS, document, label, line

WIDTH = 318
_LOOKS = {"finished": COLOURS["communication"], "partial": "#B2E2D5", "own": COLOURS["paper"]}
_LEFT, _TALL, _GREY = 52, 34, "#767676"
_STRIP = 210  # units; a timeline beside a table


def holdings(table, words="", *, foot="", column="chunk", width=WIDTH, tall=_TALL, times=None):
    """Draw a table of ranks and chunks.

    Args:
        table: ``table[rank][chunk]``: ``(text, state)``, the state "finished", "partial", "own" or "" (not coloured);
            None: nothing to show, ``words`` says why.
        foot: a line below.
        column: what a column is.
        width, tall: of the picture, and of a row (units).
        times: ``(Timeline, seconds that the width stands for, seconds at which a line is drawn)``: a strip at the right
            of each row, grey where the rank works, coloured where it has messages under way, white where it waits.
    """
    if table is None:
        return _empty(words)
    size, wide = len(table[0]), (width - _LEFT - 2) / len(table[0])
    parts = [label(_LEFT + (number + 0.5) * wide, 14, f"{column} {number}", anchor="middle", size=13)
             for number in range(size)]  # fmt: skip
    for rank, row in enumerate(table):
        y = 22 + rank * tall
        parts.append(label(_LEFT - 6, y + tall / 2 + 5, f"rank {rank}", anchor="end", size=13))
        for chunk, (text, state) in enumerate(row):
            parts += _box(_LEFT + chunk * wide, y, wide, tall, text, _LOOKS.get(state, COLOURS["paper"]),
                          COLOURS["outline"] if state else _GREY)  # fmt: skip
    bottom = 22 + len(table) * tall
    parts.append(label(4, bottom + 18, foot, size=13))
    said = "; ".join(f"rank {rank}: {', '.join(text for text, _ in row)}" for rank, row in enumerate(table))
    text = f"{said}. {foot}"
    if times:
        parts += _strips(*times, width + 16, bottom, tall)
        width, text = width + 16 + _STRIP, f"{text}\n{times[0]!r}"
    return document(parts, width=width, height=bottom + 26, title="What each rank holds", text=text)


def _strips(timeline, until_s, mark_s, x, bottom, tall):
    """What the ranks do over time, in the rows of a table."""
    unit = (_STRIP - 4) / until_s
    parts = [label(x, 14, f"0 to {timeline.step_time_s * 1e6:.0f} us", size=13)]
    boxes = [box for box in timeline.boxes if box.kind != "idle"]
    for box in sorted(boxes, key=lambda its: its.kind == "compute"):
        y = 22 + box.lane.rank * tall + 3
        fill = COLOURS["communication"] if box.lane.channel else "#BBBBBB"
        parts.append(f'<rect x="{x + (box.start_s - timeline.start_s) * unit:.1f}" y="{y}" '
                     f'width="{(box.end_s - box.start_s) * unit:.1f}" height="{tall - 6}" fill="{fill}"/>')  # fmt: skip
    parts += [line(x, y, x + timeline.step_time_s * unit, y, width=0.5) for y in range(22, bottom + 1, tall)]
    return [*parts, line(x + mark_s * unit, 18, x + mark_s * unit, bottom + 4, width=2)]


def cut_bars(cuts, words=""):
    """Draw the chunks of several tensors, a line each.

    Args:
        cuts: ``[(length, [(start, end), ...]), ...]``; None: nothing to show, ``words`` says why.
    """
    if cuts is None:
        return _empty(words)
    parts, y, said = [], 0, []
    for length, bounds in cuts:
        unit = (WIDTH - 70) / max(1, length)
        parts.append(label(4, y + 16, f"{length} elements", size=13, weight="bold"))
        for number, (start, end) in enumerate(bounds):
            top = y + 24 + number * 18
            first, last = (min(max(0, at), length) for at in (start, end))
            parts.append(line(64, top + 16, 64 + unit * length, top + 16, stroke="#BBBBBB", width=1))
            parts.append(label(58, top + 13, f"{start}:{end}", anchor="end", size=12))
            if last > first:
                left, wide = 64 + first * unit, (last - first) * unit
                parts.append(f'<rect x="{left:.1f}" y="{top}" width="{wide:.1f}" height="15" '
                             f'fill="{COLOURS["communication"]}" stroke="{COLOURS["outline"]}"/>')  # fmt: skip
        said.append(f"{length} elements: {', '.join(f'{start}:{end}' for start, end in bounds)}")
        y += 32 + 18 * len(bounds)
    return document(parts, width=WIDTH, height=max(y, 40), title="Chunks", text="; ".join(said))


def traffic(table, words="", *, node_size, foot=""):
    """Draw bytes from rank to rank as shares of S; what crosses the border of a node is coloured.

    Args:
        table: ``table[from][to]``, shares of S; None: nothing to show, ``words`` says why.
        node_size: ranks in a node (count).
        foot: a line below.
    """
    if table is None:
        return _empty(words)
    size, wide = len(table), (WIDTH - _LEFT - 2) / len(table)
    parts = [label(_LEFT + (rank + 0.5) * wide, 14, f"to {rank}", anchor="middle", size=13) for rank in range(size)]
    for source, row in enumerate(table):
        y = 22 + source * _TALL
        parts.append(label(_LEFT - 6, y + 22, f"from {source}", anchor="end", size=13))
        for to, share in enumerate(row):
            crosses = source // node_size != to // node_size
            parts += _box(_LEFT + to * wide, y, wide, _TALL, f"{share:.2f} S" if share else "-",
                          "#F3C9A8" if crosses and share else COLOURS["paper"])  # fmt: skip
    for at in range(node_size, size, node_size):
        x, y = _LEFT + at * wide, 22 + at * _TALL
        parts += [line(x, 22, x, 22 + size * _TALL, width=4), line(_LEFT, y, WIDTH - 2, y, width=4)]
    bottom = 22 + size * _TALL
    parts.append(label(4, bottom + 18, foot, size=13))
    said = "; ".join(f"{share:.2f} S from {source} to {to}" for source, row in enumerate(table)
                     for to, share in enumerate(row) if share)  # fmt: skip
    return document(parts, width=WIDTH, height=bottom + 26, title="Bytes from rank to rank", text=f"{said}. {foot}")


def _box(x, y, wide, tall, text, fill, colour=COLOURS["outline"]):
    size = 13 if len(text) * 9.5 < wide else 11
    return [f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{tall}" fill="{fill}" '
            f'stroke="{COLOURS["outline"]}"/>',
            label(f"{x + wide / 2:.1f}", y + tall / 2 + 5, text, anchor="middle", size=size, fill=colour)]  # fmt: skip


def _empty(words):
    return document([label(4, 24, words, size=14, weight="bold")], width=WIDTH, height=40, title=words, text=words)
