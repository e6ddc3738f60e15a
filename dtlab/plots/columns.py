"""Stacked columns from zero: what a number is made of, for each choice of a knob; marks say what was measured."""
from dtlab.plots.svg import COLOURS, diamond, document, label, legend, letter, line, tick_step

_WIDTH, _TOP, _HEIGHT, _LEFT, _RIGHT = 650, 30, 150, 66, 20
_WORDS = {"communication": "exposed communication"}


def columns(names, parts, *, x, y, marked=None, measured=None, top=None, size=12, title, text):
    """Draw one column a name, with its parts on each other.

    Args:
        names: under each column, at most 11 characters for 9 columns.
        parts: ``{"forward": [number for each name], ...}``, from below; the keys are ``COLOURS``'s.
        x, y: what the names are, and quantity and unit of the numbers.
        marked: number of the column to mark with a heavy outline and bold words.
        measured: for each name the measured height of the column, a diamond with its number; None where there is none.
        top: the axis goes at least so far up, so that pictures compare.
        size: of the letters; 14 is 18 px on a projector.
        title: for screen readers.
        text: what the picture says, in words.

    Returns:
        Svg, 650 units wide.
    """
    totals = [sum(values) for values in zip(*parts.values())]
    measured = measured or [None] * len(names)
    step, top = _ticks(max([top or 0, *totals, *(value for value in measured if value is not None)]))
    height = lambda value: value / top * _HEIGHT
    pitch = (_WIDTH - _LEFT - _RIGHT) / len(names)
    large = max(size, 13)
    drawn = list(legend(parts, _LEFT, words=_WORDS, marks=any(value is not None for value in measured), size=large))
    for number in range(round(top / step) + 1):
        at = round(_TOP + _HEIGHT - height(number * step), 1)
        drawn += [line(_LEFT, at, _WIDTH - _RIGHT, at, stroke="#C8C8C8", width=1),
                  label(_LEFT - 6, at + 4, f"{number * step:.4g}", anchor="end", size=size)]
    drawn.append(f'<text transform="translate(14 {_TOP + _HEIGHT / 2}) rotate(-90)" text-anchor="middle" '
                 f'font-size="{large}" fill="{COLOURS["outline"]}">{y}</text>')
    drawn.append(label((_LEFT + _WIDTH - _RIGHT) / 2, _TOP + _HEIGHT + 33, x, anchor="middle", size=large))
    for number, name in enumerate(names):
        left, base, is_marked = _LEFT + pitch * number, _TOP + _HEIGHT, number == marked
        for kind, values in parts.items():
            tall = height(values[number])
            base -= tall
            drawn.append(f'<rect x="{left + 0.16 * pitch:.1f}" y="{base:.1f}" width="{0.68 * pitch:.1f}" '
                         f'height="{tall:.1f}" fill="{COLOURS[kind]}" stroke="{COLOURS["outline"]}" '
                         f'stroke-width="{2.5 if is_marked else 1}"/>')
            if tall > 15:
                drawn.append(letter(kind, left + pitch / 2, base + tall / 2, large))
        weight = "bold" if is_marked else "normal"
        middle = round(left + pitch / 2, 1)
        drawn += [label(middle, round(base - 5, 1), f"{totals[number]:.3g}", anchor="middle", size=size,
                        weight=weight),
                  label(middle, _TOP + _HEIGHT + 16, name, anchor="middle", size=size, weight=weight)]
        if measured[number] is not None:
            right, at = left + 0.84 * pitch, _TOP + _HEIGHT - height(measured[number])
            drawn += [diamond(right, at),
                      label(round(right + 9, 1), round(at + 4, 1), f"{measured[number]:.3g}", size=size)]
    return document(drawn, width=_WIDTH, height=_TOP + _HEIGHT + 40, title=title, text=text)


def _ticks(most):
    """``(step, top)`` of an axis with room for the words on a column."""
    most = most * 1.12 or 1
    step = tick_step(most, 3)
    return step, step * -(-most // step)

