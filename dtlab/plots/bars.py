"""Rows of numbers as bars from zero, or as dots on a logarithmic axis where they lie decades apart."""
from dataclasses import dataclass
from math import log10

from dtlab.plots.svg import COLOURS, arrow, document, label, line

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
