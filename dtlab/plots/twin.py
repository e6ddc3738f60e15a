"""Several pictures in one: the static twin of an explorer, for readers without a kernel."""
import re
import textwrap

from dtlab.plots.svg import document, label

_WIDTH, _GAP, _LINE = 650, 14, 18


def twin(pictures, titles, *, caption, size=13):
    """Pictures beside each other where they fit into 650 units, else one above the other.

    Args:
        pictures: ``Svg`` objects, drawn in order.
        titles: one line above each.
        caption: what to see in them, above all.
        size: of the letters.

    Returns:
        Svg, whose text has the caption and every picture's own text.
    """
    sizes = [_size(picture) for picture in pictures]
    beside = sum(width for width, _ in sizes) + _GAP * (len(sizes) - 1) <= _WIDTH
    lines = textwrap.wrap(caption, 76 * 13 // size)
    parts = [label(0, 14 + _LINE * number, words, size=size, weight="bold") for number, words in enumerate(lines)]
    x, y, bottom = 0, _LINE * len(lines) + 8, 0
    for picture, title, (width, height) in zip(pictures, titles, sizes):
        parts += [label(x + 2, y + 14, title, size=size),
                  str(picture).replace("<svg ", f'<svg x="{x}" y="{y + 22}" ', 1)]
        bottom = max(bottom, y + 22 + height)
        x, y = (x + width + _GAP, y) if beside else (0, bottom + _GAP)
    text = "\n".join([caption, *(f"{title}\n{picture.text}" for picture, title in zip(pictures, titles))])
    width = max(_WIDTH, *(width for width, _ in sizes))
    return document(parts, width=width, height=round(bottom), title=caption, text=text)


def _size(picture):
    """Width and height in units."""
    width, height = re.search(r'viewBox="\S+ \S+ (\S+) (\S+)"', str(picture)).groups()
    return float(width), float(height)
