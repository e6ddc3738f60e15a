"""Which part of a matrix, or of a sequence, lies on which rank, with sizes in numbers."""
from typing import NamedTuple

from dtlab.plots.svg import COLOURS, document, label
from dtlab.theory.units import in_units

_WIDTH, _LEFT, _TOP, _TALL, _LONGEST = 650, 66, 30, 104, 88
_LOOKS = {  # kind -> rank 0's colour, the others', letters on both
    "activations": (COLOURS["activations"], "#D6ECF9", COLOURS["outline"], COLOURS["outline"]),
    "params": (COLOURS["params"], "#D9D9D9", COLOURS["paper"], COLOURS["outline"]),
}


class Matrix(NamedTuple):
    """A matrix of a shard map.

    Attributes:
        name: at most 14 characters.
        kind: ``"activations"`` or ``"params"``.
        shape: ``(rows, columns)`` of the whole.
        cut: ``"rows"``, ``"columns"``, or None: every rank has the whole.
        part: ``(rows, columns)`` that a rank has.
    """

    name: str
    kind: str
    shape: tuple
    cut: "str | None"
    part: tuple


def shard_map(matrices, *, num_ranks, node_size, signs=None, lines=(), bytes_per_element=2, title):
    """Draw matrices with the owner of each shard, and their sizes in numbers below.

    Rank 0's shards are dark; a heavy line stands where one node's ranks end. Long sides are drawn shorter than in
    proportion, so that all find room.

    Args:
        matrices: five ``Matrix`` or fewer, in the order of the products.
        num_ranks: ranks among which they are cut (count).
        node_size: ranks in a node (count).
        signs: ``{number of a matrix: letter}``: what is sent before it, a green circle at its left.
        lines: words below, at most 82 characters each.
        bytes_per_element: of all matrices.
        title: for screen readers.

    Returns:
        Svg, 650 units wide.
    """
    pitch, longest = (_WIDTH - _LEFT) / len(matrices), max(max(matrix.shape) for matrix in matrices)
    parts, said, y, end = [], [], _TOP + _TALL + 20, _LEFT
    parts += [label(0, y + 17 * row, name, size=14) for row, name in enumerate(("whole", "cut", "on a rank"))]
    for number, matrix in enumerate(matrices):
        middle = _LEFT + (number + 0.5) * pitch
        tall, wide = (round(most * (side / longest) ** 0.35, 1) for most, side in zip((_TALL, _LONGEST), matrix.shape))
        parts += [label(round(middle, 1), 16, matrix.name, anchor="middle", size=15, weight="bold"),
                  *_shards(matrix, middle - wide / 2, _TOP + (_TALL - tall) / 2, wide, tall, num_ranks, node_size)]
        words = _sizes(matrix, num_ranks, bytes_per_element)
        parts += [label(round(middle, 1), y + 17 * row, text, anchor="middle", size=14)
                  for row, text in enumerate(words)]
        said.append(f"{matrix.name} {', '.join(words)}")
        if number in (signs or {}):
            parts += _sign(signs[number], round((end + middle - wide / 2) / 2, 1))
        end = middle + wide / 2
    y += 17 * len(words) + 8
    parts += [label(0, y + 18 * row, text, size=14) for row, text in enumerate(lines)]
    text = ". ".join(["; ".join(said), *filter(None, lines)])
    return document(parts, width=_WIDTH, height=y + 18 * len(lines) - 6, title=title, text=text)


def _sizes(matrix, num_ranks, bytes_per_element):
    """The lines below a matrix."""
    (rows, columns), cut = matrix.part, "one rank"
    if num_ranks > 1:
        cut = f"{matrix.cut} 0 .. {num_ranks - 1}" if matrix.cut else "whole on each"
    return [f"{matrix.shape[0]:,} x {matrix.shape[1]:,}", cut, f"{rows:,} x {columns:,}",
            in_units(rows * columns * bytes_per_element, "B")]  # fmt: skip


def _shards(matrix, x, y, wide, tall, num_ranks, node_size):
    """A box a rank, its number where there is room, its story as a tooltip."""
    count, by_columns = num_ranks if matrix.cut else 1, matrix.cut == "columns"
    width, height = (wide / count, tall) if by_columns else (wide, tall / count)
    first, others, on_first, on_others = _LOOKS[matrix.kind]
    for rank in range(count):
        left, top = (x + rank * width, y) if by_columns else (x, y + rank * height)
        yield (f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" '
               f'fill="{others if rank else first}" stroke="{COLOURS["outline"]}">'
               f'<title>{matrix.name}: {f"rank {rank}" if matrix.cut else "every rank"}</title></rect>')  # fmt: skip
        if matrix.cut and (width if by_columns else height) >= (9 * len(str(rank)) + 1 if by_columns else 12):
            yield label(round(left + width / 2, 1), round(top + height / 2 + 5, 1), rank, anchor="middle", size=14,
                        fill=on_others if rank else on_first)  # fmt: skip
    for rank in range(node_size, count, node_size):
        at = (x + rank * width, y - 5, 0, tall + 10) if by_columns else (x - 5, y + rank * height, wide + 10, 0)
        yield (f'<path d="M{at[0]:.1f} {at[1]:.1f}l{at[2]:.1f} {at[3]:.1f}" stroke="{COLOURS["outline"]}" '
               'stroke-width="3"/>')


def _sign(letter, x):
    """What is sent between two matrices."""
    y = _TOP + _TALL / 2
    yield (f'<circle cx="{x}" cy="{y}" r="11" fill="{COLOURS["communication"]}" stroke="{COLOURS["outline"]}" '
           'stroke-width="1.5"/>')
    yield label(x, y + 5, letter, anchor="middle", size=15, weight="bold", fill=COLOURS["paper"])


def sequence_strip(chunks, *, seq_length):
    """Draw a sequence from its first token to its last, each chunk with the number of the rank that holds it.

    Args:
        chunks: for each rank the numbers of its chunks, as ``theory.chunks_of`` gives them.
        seq_length: of the whole (tokens).

    Returns:
        Svg, 650 units wide; rank 0's chunks are dark.
    """
    owners = {chunk: rank for rank, its in enumerate(chunks) for chunk in its}
    first, others, *_ = _LOOKS["activations"]
    wide = (_WIDTH - 4) / len(owners)
    parts = [label(2, 14, "token 0", size=14), label(_WIDTH - 2, 14, f"{seq_length - 1:,}", anchor="end", size=14),
             label(_WIDTH / 2, 14, "chunks of the sequence, and the rank that holds each", anchor="middle", size=14)]
    for chunk, rank in sorted(owners.items()):
        parts += [f'<rect x="{2 + chunk * wide:.1f}" y="20" width="{wide:.1f}" height="26" '
                  f'fill="{others if rank else first}" stroke="{COLOURS["outline"]}"/>',
                  label(round(2 + (chunk + 0.5) * wide, 1), 38, rank, anchor="middle", size=14)]  # fmt: skip
    said = " ".join(str(owners[chunk]) for chunk in sorted(owners))
    return document(parts, width=_WIDTH, height=50, title="The rank of each chunk of the sequence",
                    text=f"Chunks of {seq_length // len(owners):,} tokens, on ranks {said}.")  # fmt: skip
