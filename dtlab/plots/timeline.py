"""Timelines: a lane per rank and per channel, a box per phase, with the micro-batch's number in it."""
from array import array
from html import escape
from math import ceil, floor
from zlib import crc32

from dtlab.errors import ConfigError
from dtlab.plots.svg import COLOURS, document, label, line, tick_step
from dtlab.simulate.boxes import rows
from dtlab.simulate.timeline import unit_of

_WIDTH, _RIGHT = 650, 12
_COMPUTE, _CHANNEL, _THIN, _GAP, _MOST_ROWS = 30, 18, 8, 8, 4  # heights of rows, space between ranks
_COLUMN = 0.5  # units; the finest thing drawn
_LOOKS = {  # kind -> letter, colour, words of the legend
    "forward": ("F", COLOURS["forward"], "forward"),
    "backward": ("B", COLOURS["backward"], "backward"),
    "weight": ("W", COLOURS["weight_grads"], "weight gradient"),
    "optimizer": ("O", COLOURS["optimizer"], "optimizer"),
    "compute": ("X", "#E4E4E4", "other compute"),
    "communication": ("C", COLOURS["communication"], "communication"),
    "idle": ("", None, "idle"),
}


def timeline(source, *, ranks=None, communication=True, until_s=None):
    """Draw a recording's or a simulation's timeline.

    What is shorter than half a unit of the picture's 650 is drawn by what fills most of that half; compute boxes of one
    phase that touch are one box.

    Args:
        source: a ``Timeline``, or a live recording.
        ranks: the ranks to draw; all if not given.
        communication: draw the lanes of communication as well.
        until_s: how much time the picture's width stands for (seconds), so that pictures under each other have one
            scale; the step time if not given.

    Returns:
        Svg.

    Raises:
        ConfigError: a dry recording: it has no times; or ``until_s`` is shorter than the step.
    """
    timeline = source.timeline() if hasattr(source, "events") else source
    until_s = timeline.step_time_s if until_s is None else until_s
    if until_s < timeline.step_time_s:
        raise ConfigError(f"until_s ({until_s} s) must be at least the step time ({timeline.step_time_s} s)")
    boxes = [box for box in timeline.boxes
             if (ranks is None or box.lane.rank in ranks) and (communication or not box.lane.channel)]
    lanes = {}
    for box in boxes:
        lanes.setdefault(box.lane, []).append(box)
    left = 112 if any(lane.channel for lane in lanes) else 66
    scale = (_WIDTH - left - _RIGHT) / (until_s or 1)
    times = array("d", [time_s for box in boxes for time_s in (box.start_s, box.end_s)])
    hatch = f"idle-{crc32(times.tobytes()):08x}"  # its own name in a page of many pictures
    parts, y = _legend({box.kind for box in boxes}, hatch)
    rank = None
    for lane, its in lanes.items():
        y += _GAP if rank not in (None, lane.rank) else 0
        rank, height = lane.rank, _CHANNEL if lane.channel else _COMPUTE
        parts.append(_name(lane, left - 6, y + height / 2 + 5))
        for row, apart in _rows(lane, its):
            parts += [_box(left + x, y, end - x, height - 3, joined, hatch)
                      for x, end, *joined in _drawn(row, timeline.start_s, scale, apart)]
            y, height = y + height, _THIN
    parts += _axis(left, y, until_s, scale)
    title = f"Timeline of {len({lane.rank for lane in lanes})} ranks, {_time(timeline.step_time_s)}"
    return document([_pattern(hatch), *parts], width=_WIDTH, height=y + 44, title=title, text=repr(timeline))


def _name(lane, x, y):
    """A lane's name, at the left of it."""
    name = str(lane) if len(str(lane)) <= 16 else str(lane)[:14] + ".."
    look = {"size": 12} if lane.channel else {"size": 15, "weight": "bold"}
    return label(x, y, name, anchor="end", **look)


def _rows(lane, boxes):
    """The boxes by row: a channel has one per call under way at once, thin after the first; what is too many share.

    Yields ``(boxes, whether they are apart)``.
    """
    packed = rows(boxes) if lane.channel else [boxes]
    most = len(packed) if len(packed) <= _MOST_ROWS else _MOST_ROWS - 1
    yield from ((row, True) for row in packed[:most])
    if packed[most:]:
        yield sum(packed[most:], []), False


def _drawn(boxes, start_s, scale, apart):
    """``[(x, end, first, last), ...]``: a column shows the box that fills most of it; runs of one look are joined."""
    looks, runs = {}, []  # column -> look -> (filled, first, last); [column, end, look, first, last]
    for number, box in enumerate(boxes):
        left, right = (box.start_s - start_s) * scale / _COLUMN, (box.end_s - start_s) * scale / _COLUMN
        of_its_own = number if box.kind == "communication" and right - left > 4 else -1
        key = box.kind, box.label, box.text, of_its_own
        begin, end = floor(left), max(ceil(right), floor(left) + 1)
        columns = range(begin, end)
        if apart and end - begin > 2:  # nobody else is on the columns in between
            runs.append([begin + 1, end - 1, key, box, box])
            columns = begin, end - 1
        for column in columns:
            its = looks.setdefault(column, {})
            filled, first, _ = its.get(key, (0, box, box))
            its[key] = filled + min(right, column + 1) - max(left, column), first, box
    for column, its in looks.items():
        key = max(its, key=lambda key: its[key][0]) if len(its) > 1 else next(iter(its))
        runs.append([column, column + 1, key, *its[key][1:]])
    joined = []
    for run in sorted(runs, key=lambda run: run[0]):
        if joined and (joined[-1][2], joined[-1][1]) == (run[2], run[0]):
            joined[-1][1], joined[-1][4] = run[1], run[4]
        else:
            joined.append(run)
    return [(begin * _COLUMN, end * _COLUMN, first, last) for begin, end, _, first, last in joined]


def _box(x, y, width, height, boxes, hatch):
    """Boxes joined to one, with its words and, where it is wide enough to be pointed at, its story as a tooltip."""
    box, last = boxes
    letter, colour, _ = _LOOKS[box.kind]
    shape = f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill="{colour or f"url(#{hatch})"}"'
    if width < 3:
        return shape + "/>"
    story = escape(f"{box.lane}: {box.label}, {_time(last.end_s - box.start_s)}")
    shape += f' stroke="{COLOURS["outline"]}"><title>{story}</title></rect>'
    if box.kind in ("communication", "compute"):
        texts = [f"{box.label} {box.text}".strip(), box.label, box.text or letter]
    else:
        texts = [letter + box.text, box.text or letter]
    sizes = [size for size in (14, 12) if size < height - 2]  # 12 here is 18 px on a projector
    text, size = next(((text, size) for text in texts for size in sizes if _long(text) * size + 1 <= width), ("", 12))
    where = f"{x + width / 2:.1f}", f"{y + height / 2 + size * 0.36:.1f}"
    return shape + label(*where, text, anchor="middle", size=size, weight="bold") if text else shape


def _long(text):
    """Width of bold text in units of its size: digits are narrow."""
    return sum(0.56 if sign.isdigit() else 0.64 for sign in text)


def _pattern(name):
    """The hatch of waiting."""
    return (f'<defs><pattern id="{name}" width="7" height="7" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><rect width="7" height="7" fill="#FFFFFF"/>'
            '<line x1="0" y1="0" x2="0" y2="7" stroke="#767676" stroke-width="2.5"/></pattern></defs>')


def _legend(kinds, hatch):
    """A box with its letter and a word for each kind that is drawn; and where they end."""
    parts, x, y = [], 8, 8
    for kind, (letter, colour, words) in _LOOKS.items():
        width = 44 + 7 * len(words)
        if kind in kinds:
            x, y = (x, y) if x + width - 10 <= _WIDTH else (8, y + 24)
            parts.append(f'<rect x="{x}" y="{y}" width="22" height="18" fill="{colour or f"url(#{hatch})"}" '
                         f'stroke="{COLOURS["outline"]}"/>')
            parts += [label(x + 11, y + 14, letter, anchor="middle", size=14, weight="bold"),
                      label(x + 27, y + 14, words, size=13)]
            x += width
    return parts, y + 32


def _time(time_s):
    name, size = unit_of(time_s)
    return f"{time_s / size:.3g} {name}"


def _axis(left, y, total_s, scale):
    """Ticks at 1, 2 or 5 times a power of ten."""
    name, size = unit_of(total_s)
    total = total_s / size or 1
    step = tick_step(total, 4)
    yield line(left, y + 2, _WIDTH - _RIGHT, y + 2)
    for number in range(int(total / step + 1e-9) + 1):
        x = left + number * step * size * scale
        yield line(round(x, 1), y + 2, round(x, 1), y + 7)
        yield label(round(x, 1), y + 20, f"{number * step:.4g}", anchor="middle", size=13)
    yield label((left + _WIDTH - _RIGHT) / 2, y + 37, f"time [{name}]", anchor="middle", size=13)
