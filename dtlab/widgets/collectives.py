"""Explorer of lessons 00 and 01: calls that meet, the ring step by step, what a collective costs."""
from dtlab.errors import ConfigError
from dtlab.plots.messages import messages
from dtlab.widgets.explorer import Control, Explorer, toggle

_CALLS = {  # kind -> the calls of rank 0, and of rank 1 in the order that fits
    "send and recv": (("send", "recv"), ("recv", "send")),
    "two all-reduces": (("all_reduce(X)", "all_reduce(Y)"), ("all_reduce(X)", "all_reduce(Y)")),
}


def collectives(tab=None):
    """Explore how collectives meet, move and cost.

    Args:
        tab: ``"messages"``: which call meets which, on two ranks.

    Raises:
        ConfigError: no such tab.
    """
    if tab not in _TABS:
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


_TABS = {"messages": _messages_tab}
