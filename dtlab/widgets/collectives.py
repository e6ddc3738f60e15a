"""Explorer of lessons 00 and 01: calls that meet, the ring step by step, what a collective costs."""
from math import log

from dtlab.errors import ConfigError
from dtlab.plots.bars import Panel, bars
from dtlab.plots.messages import messages
from dtlab.plots.ring import ring, ring_table
from dtlab.simulate.hardware import LINKS
from dtlab.simulate.timeline import unit_of
from dtlab.theory import Link, collective_table
from dtlab.widgets.explorer import Control, Explorer, Tabs, toggle

_COURSE_LINK = Link("25 GB/s, 20 us", 25e9, 20e-6, "the course's example")
_LINKS = {"the course's example": _COURSE_LINK, **LINKS}
_SIZES = tuple(sorted([2**power for power in range(16, 33)] + [25_000_000]))
_RANKS = tuple(sorted([2**power for power in range(1, 11)] + [3, 6, 12, 24, 48, 96, 192, 384, 768, 1000]))
_TIMES = [(10**power, {-6: "1 us", -3: "1 ms", 0: "1 s"}.get(power, "")) for power in range(-6, 3)]
_RING_BYTES = 16 * 2**20
_CALLS = {  # kind -> the calls of rank 0, and of rank 1 in the order that fits
    "send and recv": (("send", "recv"), ("recv", "send")),
    "two all-reduces": (("all_reduce(X)", "all_reduce(Y)"), ("all_reduce(X)", "all_reduce(Y)")),
}


def collectives(tab=None):
    """Explore how collectives meet, move and cost.

    Args:
        tab: ``"messages"``: which call meets which, on two ranks; ``"ring"``: a ring all-reduce, step by step;
            ``"cost"``: bytes and time by algorithm. None: all of them, behind tabs.

    Raises:
        ConfigError: no such tab.
    """
    if tab is None:
        return Tabs({name: make() for name, make in _TABS.items()})
    if tab not in [*_TABS]:
        raise ConfigError(f"collectives has no tab {tab!r}; it has {', '.join(_TABS)}")
    return _TABS[tab]()


def _messages_tab():
    controls = {"calls": Control("calls", tuple(_CALLS), "dropdown"), "swap": toggle("swap rank 1's two calls")}
    return Explorer(draw_messages, controls, first={"swap": False}, last={"swap": True},
                    move="Swap rank 1's two calls: the two arrows close into a loop of waits.")


def draw_messages(calls, swap):
    """Two ranks with two calls each: ``(Svg, {"ends", "as_meant"})``."""
    columns = [_CALLS[calls][0], _CALLS[calls][1][::-1] if swap else _CALLS[calls][1]]
    if calls == "send and recv":
        pairs = [((rank, columns[rank].index("send")), (1 - rank, columns[1 - rank].index("recv")), "")
                 for rank in (0, 1)]
        loop = [(0, 0), (1, 1), (1, 0), (0, 1)] if swap else []  # a call, the one it waits for, what that comes after
        verdict = "a loop of waits: no call ever ends" if swap else "each call finds its partner: all end"
        picture = messages(columns, pairs, loop=loop, verdict=verdict)
    else:  # collectives meet in the order of calls, whatever they were meant for
        pairs = [((0, i), (1, i), f"{mine[-2]} + {theirs[-2]}") for i, (mine, theirs) in enumerate(zip(*columns))]
        verdict = "all end, with wrong sums; a guard refuses" if swap else "each call finds its partner: all end"
        picture = messages(columns, pairs, crossing=swap, verdict=verdict)
    return picture, {"ends": not (swap and calls == "send and recv"), "as_meant": not swap}


def _ring_tab():
    controls = {"ranks": Control("ranks", tuple(range(2, 9))),
                "step": Control("step", lambda values: tuple(range(2 * values["ranks"] - 1)), "stepper")}
    return Explorer(draw_ring, controls, first={"ranks": 4, "step": 0}, last={"step": 3},
                    move="Step on: after n - 1 steps each rank holds one finished sum; n - 1 more hand the sums round.")


def draw_ring(ranks, step):
    """A ring all-reduce of 16 MiB after some steps: ``(Svg, {"steps", "sent_bytes", "finished"})``."""
    finished = sum(state == "finished" for row in ring_table(ranks, step) for _, state in row)
    numbers = {"steps": 2 * (ranks - 1), "sent_bytes": step * _RING_BYTES / ranks, "finished": finished}
    return ring(ranks, step, tensor_bytes=_RING_BYTES), numbers


def _cost_tab():
    controls = {
        "ranks": Control("ranks", _RANKS, text=lambda ranks: f"{ranks:,}"),
        "tensor_bytes": Control("tensor S", _SIZES, text=_size),
        "link": Control("link", tuple(_LINKS), "dropdown", text=_link),
    }
    return Explorer(draw_cost, controls, first={"ranks": 4, "tensor_bytes": 25_000_000}, last={"ranks": 1024},
                    move="Drag ranks from 4 to 1,024 at 25 MB: the ring's bytes stay, its time grows 26 times. "
                         "Then drag the tensor from 64 KiB to 64 MiB: the winner changes.")


def draw_cost(ranks, tensor_bytes, link):
    """What an all-reduce costs by algorithm: ``(Svg, {"fastest", "steps", "busiest_rank_bytes", "time_s"})``.

    The last three are dicts by algorithm.
    """
    table = collective_table("all_reduce", tensor_bytes, size=ranks, link=_LINKS[link])
    best = min(range(len(table)), key=lambda row: table[row].time_s)
    names = [row.algorithm.replace("_", "-") for row in table]
    shares = [row.busiest_rank_bytes / tensor_bytes for row in table]
    panels = [
        Panel("busiest rank sends", shares, [f"{share:,.4g} S" for share in shares],
              list(enumerate(["0", "", "2 S", "", "4 S"]))),
        Panel("time (each line is 10 times the last)", [row.time_s for row in table],
              [_time(row.time_s) for row in table], _TIMES, log=True),
    ]
    told = "; ".join(f"{name} {_size(row.busiest_rank_bytes)}, {row.steps:,}, {_time(row.time_s)}"
                     for name, row in zip(names, table))
    what = f"{_size(tensor_bytes)} on {ranks:,} ranks"
    picture = bars(names, panels, marked=best, foot=f"{what}: {names[best]} is fastest",
                   title=f"Cost of an all-reduce of {what}, {_link(link)}",
                   text=f"{what}. Bytes of the busiest rank, steps, time: {told}.")
    numbers = {field: {row.algorithm: getattr(row, field) for row in table}
               for field in ("steps", "busiest_rank_bytes", "time_s")}
    return picture, {"fastest": table[best].algorithm, **numbers}


def _size(num_bytes):
    """Bytes as read: in powers of 1,024 where they are whole ones, else of 1,000."""
    base, names = (1024, ("B", "KiB", "MiB", "GiB", "TiB")) if num_bytes % 1024 == 0 else (
        1000, ("B", "kB", "MB", "GB", "TB"))
    power = min(max(0, int(log(num_bytes, base) + 1e-9)), 4)
    return f"{num_bytes / base**power:.4g} {names[power]}"


def _time(time_s):
    unit, size = unit_of(time_s)
    return f"{time_s / size:,.3g} {unit}" if time_s < 1000 else f"{time_s:,.0f} s"


def _link(name):
    link = _LINKS[name]
    return f"{name}: {link.bandwidth_bytes_per_s / 1e9:.3g} GB/s, {link.latency_s * 1e6:.3g} us"


_TABS = {"messages": _messages_tab, "ring": _ring_tab, "cost": _cost_tab}
