"""The table's arithmetic and its text. Nothing here measures."""
import statistics

from benchmarks.registry import times_faster

HEAD = ("what", "dtlab", "peer", "peer's", "ratio", "reach", "met")
_UNITS = {"s": ((1, "s"), (1e3, "ms")), "MiB": ((2**-20, "MiB"),), "GB/s": ((1e-9, "GB/s"),)}
# of samples in seconds, bytes and bytes a second


def figure(samples, unit):
    """Median, and lowest and highest in brackets: ``"0.12 s [0.10-0.31]"``; below a tenth of a second in ms."""
    numbers = statistics.median(samples), min(samples), max(samples)
    scale, name = _UNITS[unit][0 if unit != "s" or numbers[0] >= 0.1 else 1]
    median, low, high = (_digits(scale * x) for x in numbers)
    return f"{median} {name} [{low}-{high}]"


def _digits(number):
    """Three digits, never an exponent."""
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.3g}"


def line(row, peer, samples, missing=None):
    """One line of the table: ours beside one peer.

    Args:
        row: the Row. ``samples`` are what it measured, by engine; without an entry for the peer, the line says why.
        missing: package that the peer needs and that is not installed.
    """
    reach = row.peers[peer]
    ours = figure(samples["dtlab"], row.unit) if samples.get("dtlab") else "-"
    said = reach.text if reach else "-"
    if missing:
        return row.what, ours, peer, f"peer not installed: pip install {missing}", "-", said, "-"
    if not samples.get(peer) or not samples.get("dtlab"):
        return row.what, ours, peer, "not measured", "-", said, "-"
    mine, other = statistics.median(samples["dtlab"]), statistics.median(samples[peer])
    measure = reach or next(filter(None, row.peers.values()), times_faster(1))
    met = "-" if reach is None else "yes" if reach.is_met(mine, other) else "no"
    ratio = f"{_digits(measure.ratio(mine, other))}{measure.unit}"
    return row.what, ours, peer, figure(samples[peer], row.unit), ratio, said, met


def text(lines):
    """Aligned columns; a row's description and our figure stand once, beside its first peer."""
    shown, before = [HEAD], None
    for cells in lines:
        shown.append(("", "", *cells[2:]) if cells[:2] == before else cells)
        before = cells[:2]
    widths = [max(len(cells[i]) for cells in shown) for i in range(len(HEAD))]
    drawn = ["  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip() for cells in shown]
    drawn.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(drawn)
