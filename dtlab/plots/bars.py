"""Rows of numbers as bars from zero, as dots on a logarithmic axis where they lie decades apart, or stacked."""
from dataclasses import dataclass
from math import log10

from dtlab.plots.svg import COLOURS, arrow, diamond, document, label, legend, letter, line, tick_step

_WIDTH, _TOP, _ROW, _WORDS = 650, 34, 34, 84  # _WORDS: room for the number beside a bar


@dataclass(frozen=True)
class Panel:
    """One number of every row.

    Attributes:
        title: quantity and unit.
        values: one per row.
        texts: the values as read, at most 10 characters.
        ticks: ``[(value, text), ...]``, ascending; the axis goes from the first to the last, the same for all values,
            so that pictures compare. What lies beyond ends in an arrow.
        log: a logarithmic axis, with dots, since its left end is no zero.
        hollow: numbers of the rows whose bar is an outline only.
    """

    title: str
    values: list
    texts: list
    ticks: list
    log: bool = False
    hollow: tuple = ()

    def share(self, value):
        """Place of a value on the axis, 0 .. 1 where it lies on it."""
        low, high, value = (log10(v) if self.log else v for v in (self.ticks[0][0], self.ticks[-1][0], value))
        return (value - low) / (high - low)


def bars(rows, panels, *, marked=None, foot="", title, text):
    """Draw panels side by side, a row for each name.

    Args:
        rows: name of each row, at most 20 characters.
        panels: ``Panel`` objects; logarithmic ones get twice the room.
        marked: number of the row to mark, with bold letters and a filled dot.
        foot: one line below, at most 75 characters.
        title: for screen readers.
        text: what the picture says, in words.

    Returns:
        Svg, 650 units wide.
    """
    left = 12 + 8.2 * max(map(len, rows))
    unit = (_WIDTH - left - len(panels) * (_WORDS + 16)) / sum(2 if panel.log else 1 for panel in panels)
    bottom = _TOP + _ROW * len(rows)
    parts = [label(left - 8, _TOP + _ROW * number + 21, name, anchor="end", size=14,
                   weight="bold" if number == marked else "normal") for number, name in enumerate(rows)]
    x = left
    for panel in panels:
        width = unit * (2 if panel.log else 1)
        parts += [label(x, 16, panel.title, size=14, weight="bold"), *_axis(panel, x, width, bottom)]
        for number, (value, said) in enumerate(zip(panel.values, panel.texts)):
            parts += _mark(panel, x, _TOP + _ROW * number, width, value, number == marked, number in panel.hollow)
            parts.append(label(round(x + width + 14, 1), _TOP + _ROW * number + 21, said, size=14,
                               weight="bold" if number == marked else "normal"))
        x = round(x + width + _WORDS + 16, 1)
    parts.append(label(4, bottom + 48, foot, size=15, weight="bold"))
    return document(parts, width=_WIDTH, height=bottom + 60, title=title, text=text)


def _axis(panel, x, width, bottom):
    for value, said in panel.ticks:
        at = round(x + panel.share(value) * width, 1)
        yield line(at, _TOP - 6, at, bottom, stroke="#C8C8C8", width=1)
        yield label(at, bottom + 18, said, anchor="middle", size=14)
    yield line(x, _TOP - 6, x, bottom)


def _mark(panel, x, y, width, value, marked, hollow):
    """A bar, or a dot at the end of a thin line; an arrow where the value lies beyond the axis."""
    share, colour = panel.share(value), COLOURS["communication"]
    end, middle = round(x + max(0, min(share, 1)) * width, 1), y + _ROW / 2
    if panel.log:
        yield line(x, middle, end, middle, stroke=colour, width=3)
        yield (f'<circle cx="{end}" cy="{middle}" r="7" fill="{colour if marked else COLOURS["paper"]}" '
               f'stroke="{COLOURS["outline"]}" stroke-width="2"/>')
    else:
        yield (f'<rect x="{x}" y="{y + 6}" width="{max(0, end - x):.1f}" height="{_ROW - 12}" '
               f'fill="{COLOURS["paper"] if hollow else colour}" '
               f'stroke="{COLOURS["outline"]}"/>')
    if share > 1:
        yield arrow(end - (0 if panel.log else 12), middle, end + 12, middle, width=3)


def stacked(rows, parts, *, texts, x, top, words=None, limits=(), said="", marked=None, measured=None, room=8, title,
            text):
    """Draw a bar a row, made of parts: what a number consists of, and what of it fits.

    Args:
        rows: name of each row, at most 12 characters.
        parts: ``{"params": [number for each row], ...}``, from the left; the keys are ``COLOURS``'s.
        texts: what stands at the right of each row.
        x: quantity and unit of the numbers.
        top: where the axis ends, so that pictures compare; a bar that goes on ends in an arrow.
        words: of the legend, where they are not the key.
        limits: numbers at which a dashed line says what fits; ``said`` stands before them.
        marked: number of the row to mark, with heavy outline and bold words.
        measured: for each row the measured sum, a diamond; None where there is none.
        room: for so many characters of ``texts``; the rest is the axis's.
        title: for screen readers.
        text: what the picture says, in words.

    Returns:
        Svg, 650 units wide.
    """
    left, right = 14 + 8 * max(map(len, rows)), 24 + 8.8 * room
    place = lambda value: round(left + min(value / top, 1) * (_WIDTH - left - right), 1)
    first, lines = 40 if limits else 24, [place(limit) for limit in limits]
    bottom = first + _ROW * len(rows)
    drawn = list(legend(parts, 4, words=words, marks=any(measured or ()), size=14))
    for number in range(int(top / (step := tick_step(top, 4)) + 1e-9) + 1):
        drawn += [line(place(number * step), first, place(number * step), bottom + 5, stroke="#C8C8C8", width=1),
                  label(place(number * step), bottom + 19, f"{number * step:.4g}", anchor="middle", size=14)]
    drawn.append(label((left + _WIDTH - right) / 2, bottom + 36, x, anchor="middle", size=14))
    for number, (name, its_text) in enumerate(zip(rows, texts)):
        y, look = first + _ROW * number, {"size": 14, "weight": "bold" if number == marked else "normal"}
        drawn += [label(left - 8, y + 22, name, anchor="end", **look),
                  label(_WIDTH - right + 18, y + 22, its_text, **look)]
        bar = _bar({kind: values[number] for kind, values in parts.items()}, place, y, 2.5 if number == marked else 1)
        drawn += [*bar, *(line(at, y, at, y + _ROW, dash="5 4", width=2) for at in lines)]
        drawn += [letter(kind, at, y + 17, 14) for kind, at in _letters(parts, number, place, lines)]
        if sum(values[number] for values in parts.values()) > top:
            drawn.append(arrow(place(top), y + 17, place(top) + 14, y + 17, width=3))
        if measured and measured[number] is not None:
            drawn.append(diamond(place(measured[number]), y + 17))
    drawn += [label(left - 8, 36, said, anchor="end", size=14)] if limits else []
    drawn += [label(at, 36, f"{limit:g}", anchor="middle", size=14) for limit, at in zip(limits, lines)]
    return document(drawn, width=_WIDTH, height=bottom + 44, title=title, text=text)


def _bar(parts, place, y, outline):
    end = 0
    for kind, value in parts.items():
        start, end = end, end + value
        if value:
            yield (f'<rect x="{place(start)}" y="{y + 4}" width="{place(end) - place(start):.1f}" height="{_ROW - 8}" '
                   f'fill="{COLOURS[kind]}" stroke="{COLOURS["outline"]}" stroke-width="{outline}"/>')


def _letters(parts, number, place, lines):
    """Where a bar's letters stand: in the middle of their part, beside a line that is there; none in narrow parts."""
    end = 0
    for kind, values in parts.items():
        start, end = end, end + values[number]
        middle, room = (place(start) + place(end)) / 2, (place(end) - place(start)) / 2 - 5
        free = [middle + by for by in (0, 12, -12, 20, -20) if abs(by) < room and
                all(abs(middle + by - at) > 8 for at in lines)]  # fmt: skip
        yield from [(kind, free[0])] if free else []
