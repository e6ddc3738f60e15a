"""The two worlds of a lesson: the notebook's kernel and the ranks, each with its own variables."""
from dtlab.plots.svg import COLOURS, box, document, label, line

_WIDTH, _MARGIN, _GAP, _ROW = 650, 10, 12, 18
_PER_LINE, _TRUNK = 4, 3
_WIRE = {"stroke": COLOURS["communication"], "width": 3}


def ranks_picture(kernel, ranks):
    """Draw the kernel above a box per rank, each with the variables that live there.

    Args:
        kernel: name -> text, the variables of the notebook's kernel.
        ranks: one such dict per rank, rank order.

    Returns:
        Svg, 650 units wide, four ranks a line.

    Example:
        >>> picture = ranks_picture({"results": "[1, 2]"}, [{"x": 0}, {"x": 1}])
        >>> print(picture.text)
        kernel: results = [1, 2]
        rank 0: x = 0
        rank 1: x = 1
    """
    columns = min(_PER_LINE, max(1, len(ranks)))
    width = (_WIDTH - 2 * _MARGIN - (columns - 1) * _GAP) / columns
    kernel_height, rank_height = _height(kernel), max((_height(names) for names in ranks), default=0)
    kernel_width = max(220, min(_WIDTH - 2 * _MARGIN, 9 * max((len(row) for row in _rows(kernel)), default=0) + 24))
    left = (_WIDTH - kernel_width) / 2
    parts = _world(left, _MARGIN, kernel_width, kernel_height, "kernel (this notebook)", kernel, COLOURS["params"])
    bus = _MARGIN + kernel_height + 26
    parts += [line(_WIDTH / 2, _MARGIN + kernel_height, _WIDTH / 2, bus, **_WIRE),
              label(_WIDTH / 2 + 10, bus - 9, "run, push  |  pull, results")]
    if len(ranks) > columns:  # further lines of boxes hang on a trunk at the left edge
        parts.append(line(_TRUNK, bus, _WIDTH / 2, bus, **_WIRE))
    for rank, names in enumerate(ranks):
        row, column = divmod(rank, columns)
        x, y = _MARGIN + column * (width + _GAP), bus + 18 + row * (rank_height + 30)
        middle, wire = x + width / 2, y - 18
        parts += [line(_TRUNK if row else _WIDTH / 2, wire, middle, wire, **_WIRE),
                  line(middle, wire, middle, y, **_WIRE)]
        if row and column == 0:
            parts.append(line(_TRUNK, bus, _TRUNK, wire, **_WIRE))
        parts += _world(round(x, 1), y, round(width, 1), rank_height, f"rank {rank}", names, "#E4E4E4")
    lines = -(-len(ranks) // columns)
    height = bus + 18 + lines * (rank_height + 30) - 30 + _MARGIN
    text = "\n".join(f"{name}: {', '.join(_rows(names)) or 'nothing yet'}"
                     for name, names in [("kernel", kernel), *((f"rank {r}", names) for r, names in enumerate(ranks))])
    title = f"The kernel and {len(ranks)} ranks, each with its own variables"
    return document(parts, width=_WIDTH, height=height, title=title, text=text)


def _rows(names):
    return [f"{name} = {value}" for name, value in names.items()]


def _height(names):
    return 34 + _ROW * max(1, len(names))


def _world(x, y, width, height, title, names, colour):
    """One box with its title bar and its variables."""
    parts = [box(x, y, width, height, fill="#FFFFFF"), box(x, y, width, 22, fill=colour, radius=6),
             label(x + 8, y + 15, title, weight="bold", fill="#FFFFFF" if colour == COLOURS["params"] else "#222222")]
    for row, text in enumerate(_rows(names) or ["(nothing yet)"]):
        limit = int((width - 16) / 7.3)
        text = text if len(text) <= limit else text[: limit - 2] + ".."
        parts.append(label(x + 8, y + 40 + row * _ROW, text, mono=bool(names)))
    return parts
