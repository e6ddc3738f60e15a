"""Two ranks' calls as columns of boxes, and which call meets which."""
from dtlab.plots.svg import COLOURS, arrow, box, document, label

_WIDTH, _BOX, _TALL, _TOP, _STEP = 316, 114, 36, 30, 92
_BAD = COLOURS["backward"]


def messages(calls, meetings, *, loop=(), crossing=False, verdict):
    """Draw two ranks side by side, their calls from top to bottom, an arrow for each pair that meets.

    Args:
        calls: for each of the two ranks, the texts of its calls in order.
        meetings: ``(sender, receiver, text)`` for each pair, where a call is ``(rank, index)``; sender and receiver
            of a collective are both ends of one arrow with two heads, and ``text`` says what is made there.
        loop: calls of a circle of waits, each waiting for the next: drawn in red, closed.
        crossing: whether the calls that meet are not those that were meant; those are then joined by dashes.
        verdict: what happens, in at most 45 characters.

    Returns:
        Svg, 316 units wide.
    """
    height = _TOP + _STEP * (max(map(len, calls)) - 1) + _TALL
    parts = [label(_left(rank) + _BOX / 2, 18, f"rank {rank}", anchor="middle", size=15, weight="bold")
             for rank in (0, 1)]
    for rank, column in enumerate(calls):
        for index, text in enumerate(column):
            parts.append(_call(rank, index, text))
            if index:
                parts.append(_then(rank, index, waits=bool(loop)))
    for sender, receiver, text in meetings:
        parts += _meeting(sender, receiver, text, bad=sender in loop or crossing)
    if crossing:
        parts += [arrow(*_edge(0, i), *_edge(1, calls[1].index(text)), dash="3 4", both=True)
                  for i, text in enumerate(calls[0])]
    parts.append(label(_WIDTH / 2, height + 26, verdict, anchor="middle", size=13, weight="bold"))
    return document(parts, width=_WIDTH, height=height + 38, title=f"Calls of two ranks: {verdict}",
                    text=_told(calls, meetings, loop, verdict))


def _told(calls, meetings, loop, verdict):
    name = lambda call: f"rank {call[0]}'s {calls[call[0]][call[1]]}"  # noqa: E731
    if loop:
        waits = "; ".join(f"{name(a)} {'waits for' if a[0] != b[0] else 'comes after'} {name(b)}"
                          for a, b in zip(loop, [*loop[1:], loop[0]]))
        return f"{verdict.capitalize()}.\nIn a circle: {waits}."
    met = "; ".join(f"{name(sender)} meets {name(receiver)}" + (f" ({text})" if text else "")
                    for sender, receiver, text in meetings)
    return f"{verdict.capitalize()}.\nIn pairs: {met}."


def _left(rank):
    return 4 + rank * (_WIDTH - 8 - _BOX)


def _edge(rank, index):
    """Where arrows end at a call: the inner side of its box."""
    return _left(rank) + (0 if rank else _BOX), _TOP + index * _STEP + _TALL / 2


def _call(rank, index, text):
    x, y = _left(rank), _TOP + index * _STEP
    return (box(x, y, _BOX, _TALL, fill=COLOURS["paper"])
            + label(x + _BOX / 2, y + _TALL / 2 + 5, text, anchor="middle", size=13, mono=True))


def _then(rank, index, waits):
    """The order of two calls of one rank; where all wait, the later one waits for the earlier to end."""
    x, below = _left(rank) + _BOX / 2, _TOP + index * _STEP
    above = below - _STEP + _TALL
    ends, look = ((x, below, x, above + 2), {"stroke": _BAD, "width": 3}) if waits else ((x, above, x, below - 2), {})
    side, anchor = (x - 8, "end") if rank == 0 else (x + 8, "start")
    return arrow(*ends, **look) + label(side, (above + below) / 2 + 4, "after" if waits else "then", anchor=anchor)


def _meeting(sender, receiver, text, bad):
    (x1, y1), (x2, y2) = _edge(*sender), _edge(*receiver)
    way = 2 if x2 > x1 else -2
    look = {"stroke": _BAD if bad else COLOURS["communication"], "width": 3, "both": bool(text)}
    parts = [arrow(x1 + (way if text else 0), y1, x2 - way, y2, **look)]
    return [*parts, label((x1 + x2) / 2, (y1 + y2) / 2 - 8, text, anchor="middle", size=13)] if text else parts
