"""The table's arithmetic and its text. Nothing here measures."""
import statistics

HEAD = ("what", "dtlab", "peer", "peer's", "ratio", "reach", "met")
_SCALE = {"s": (1, "s"), "ms": (1e3, "ms"), "MiB": (2**-20, "MiB")}  # samples are in seconds and bytes


def figure(samples, unit):
    """Median, and lowest and highest in brackets: ``"0.12 s [0.10-0.31]"``."""
    scale, name = _SCALE[unit]
    median, low, high = (scale * x for x in (statistics.median(samples), min(samples), max(samples)))
    return f"{median:.3g} {name} [{low:.3g}-{high:.3g}]"


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
    ratio = (reach.ratio if reach else lambda a, b: b / a)(mine, other)
    met = "-" if reach is None else "yes" if reach.is_met(mine, other) else "no"
    return row.what, ours, peer, figure(samples[peer], row.unit), f"{ratio:.3g}x", said, met


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
