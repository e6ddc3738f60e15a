"""One progress bar for all ranks."""
import sys
import time

EVERY_S = 0.1


def progress(iterable, text="", total=None):
    """Iterate and show how far rank 0 is: one bar in the notebook, plain lines elsewhere.

    On ranks other than 0 it only iterates. In the notebook itself, outside rank code, it prints the plain lines.

    Args:
        iterable: what to go through.
        text: name of the work, in front of the count.
        total: number of items, if ``len`` does not tell.

    Yields:
        The items of ``iterable``.
    """
    if total is None:
        total = len(iterable) if hasattr(iterable, "__len__") else None
    worker = getattr(sys.modules.get("dtlab.ranks.worker"), "_worker", None)
    if worker is not None and worker.rank != 0:
        yield from iterable
        return
    shown_at = 0.0
    for done, item in enumerate(iterable, 1):
        yield item
        line = f"{text} {done}".strip() + (f"/{total}" if total is not None else "")
        quarter = total and any(done == -(-total * part // 4) for part in (1, 2, 3, 4))
        if worker is None and quarter:
            print(line)
        elif worker is not None and (quarter or time.monotonic() - shown_at > EVERY_S):
            shown_at = time.monotonic()
            worker.send_output("progress", (done, total, line, quarter))
