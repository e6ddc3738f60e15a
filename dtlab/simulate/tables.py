"""Tables read off the events of a recording: bytes sent, bytes held, floating-point operations."""
import pandas as pd

from dtlab.errors import ConfigError
from dtlab.simulate.events import CATEGORIES


def _sums(events, kind, keys, sums):
    """One row per (rank, *keys): how many events of a kind, and the sums of some of their fields."""
    rows = {}
    for rank, its in events.items():
        for event in its:
            if event.kind == kind and (kind == "issue" or event.flops):
                row = rows.setdefault((rank, *(key(event) for key in keys.values())), [0] * (1 + len(sums)))
                row[0] += 1
                for column, name in enumerate(sums, start=1):
                    row[column] += getattr(event, name)
    columns = ["rank", *keys, "calls", *sums.values()]
    table = pd.DataFrame([(*key, *row) for key, row in rows.items()], columns=columns)
    return table if rows else table.astype(dict.fromkeys(["rank", "calls", *sums.values()], "int64"))


def communication(events):
    """Calls and bytes per (rank, op, group), in the order of the first call."""
    return _sums(events, "issue", {"op": lambda e: e.op, "group": lambda e: e.group},
                 {"bytes": "tensor_bytes", "wire_bytes": "wire_bytes"})


def flops(events):
    """FLOPs per (rank, phase, op), in the order of the first call; ops without any are left out."""
    return _sums(events, "compute", {"phase": lambda e: e.phase.get("name", ""), "op": lambda e: e.op},
                 {"flops": "flops"})


def live_bytes(events):
    """Yield ``(event, {category: live bytes})`` after each alloc and free of one rank; always the same dict.

    A storage counts once, at its latest size and under its latest category; a free of an unknown one changes nothing.
    """
    held, live = {}, dict.fromkeys(CATEGORIES, 0)
    for event in events:
        if event.kind not in ("alloc", "free"):
            continue
        category, size = held.pop(event.storage, ("other", 0))
        live[category] -= size
        if event.kind == "alloc":
            category = event.category or "other"
            if category not in live:
                raise ConfigError(f"storage {event.storage} has category {category!r}: none of {', '.join(CATEGORIES)}")
            held[event.storage] = category, event.bytes
            live[category] += event.bytes
        yield event, live


def memory(events):
    """By rank: each category at the instant of the (first) highest total, and each one's own peak, in bytes."""
    rows = []
    for its in events.values():
        at_peak, own = dict.fromkeys(CATEGORIES, 0), dict.fromkeys(CATEGORIES, 0)
        for _, live in live_bytes(its):
            own = {name: max(own[name], live[name]) for name in own}
            if sum(live.values()) > sum(at_peak.values()):
                at_peak = dict(live)
        rows.append({**at_peak, "peak": sum(at_peak.values()), **{f"peak_{name}": own[name] for name in CATEGORIES}})
    columns = [*CATEGORIES, "peak", *(f"peak_{name}" for name in CATEGORIES)]
    return pd.DataFrame(rows, index=pd.Index(list(events), name="rank"), columns=columns)
