"""What is measured: a row for each figure. A lesson adds its own with ``@row`` in a module that run.py imports."""
import importlib.util
import operator
from collections.abc import Callable
from dataclasses import dataclass

ROWS = {}  # name -> Row, in the order of the table
# peer -> package, whose module has the name up to a dash; those that come with torch are always there
_PACKAGES = {"ipyparallel": "ipyparallel", "DeepSpeed": "deepspeed", "Megatron-core": "megatron-core"}


@dataclass(frozen=True)
class Reach:
    """A goal: ``ratio(ours, peer)`` compared with ``bound``."""

    text: str
    ratio: Callable
    compare: Callable
    bound: float
    unit: str = "x"

    def is_met(self, ours, peer):
        return self.compare(self.ratio(ours, peer), self.bound)


def times_faster(bound):
    """The peer's time is at least ``bound`` times ours."""
    return Reach(f">= {bound:g}x faster", lambda ours, peer: peer / ours, operator.ge, bound)


def at_most(bound, text=None):
    """Ours is at most ``bound`` times the peer's (time, memory)."""
    return Reach(text or f"<= {bound:g}x", lambda ours, peer: ours / peer, operator.le, bound)


def at_least(bound):
    """Ours is at least ``bound`` times the peer's (bandwidth)."""
    return Reach(f">= {bound:g}x", lambda ours, peer: ours / peer, operator.ge, bound)


def within(percent):
    """Ours, a prediction, is off by at most so much of the peer's, to either side."""
    return Reach(f"within {percent:g} %", lambda ours, peer: 100 * (ours / peer - 1),
                 lambda error, bound: abs(error) <= bound, percent, " %")  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One figure. ``measure(bench, peers)`` returns its samples, ``{"dtlab": [...], peer: [...]}``, in ``unit``."""

    name: str
    what: str
    unit: str
    peers: dict  # peer -> Reach, or None where no goal is set
    measure: Callable


def row(what, unit, peers):
    """Register a function as the measurement of a row; its name is the row's."""

    def register(measure):
        ROWS[measure.__name__] = Row(measure.__name__, what, unit, peers, measure)
        return measure

    return register


def missing_package(peer):
    """The package to install for a peer, None if it is there."""
    package = _PACKAGES.get(peer.split(",")[0])
    return package if package and importlib.util.find_spec(package.split("-")[0]) is None else None
