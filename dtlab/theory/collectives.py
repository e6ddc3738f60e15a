"""What a collective costs: steps, bytes of the busiest rank, seconds in the alpha-beta model.

A message of b bytes takes alpha + b / B: ``Link.latency_s`` and ``Link.bandwidth_bytes_per_s``. Ranks send and receive
at once, links are equal and do not disturb one another; the arithmetic of a reduction is not counted (MPICH's gamma).

Letters: S tensor_bytes, the full buffer (what all_gather ends with, what reduce_scatter starts with); n size;
k = floor(log2 n); p = 2 ** k.
"""
import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dtlab.errors import ConfigError
from dtlab.theory.communication import base_op
from dtlab.validate import amount, at_least, one_of


@dataclass(frozen=True)
class Link:
    """One device's way to the others, one direction.

    Attributes:
        name: what it is, ``"NVLink 3"``.
        bandwidth_bytes_per_s: bytes a second for one device, as reached in programs, not as printed on the box.
        latency_s: alpha, seconds of a message without content.
        source: where the numbers come from.

    Raises:
        ConfigError: a bandwidth that is no number above 0, a latency that is none or below 0.
    """

    name: str
    bandwidth_bytes_per_s: float
    latency_s: float
    source: str = ""

    def __post_init__(self):
        amount(f"{self.name}: bandwidth_bytes_per_s", self.bandwidth_bytes_per_s, above_0=True)
        amount(f"{self.name}: latency_s", self.latency_s)

    def time_s(self, num_bytes):
        """Seconds of one message; ``num_bytes`` is a number or a numpy array."""
        return self.latency_s + num_bytes / self.bandwidth_bytes_per_s


class Cost(NamedTuple):
    """One row of ``collective_table``."""

    algorithm: str
    steps: int  # messages one after another
    busiest_rank_bytes: float  # what the rank that sends most sends
    time_s: float


# Flat algorithms: n -> (steps, bytes one after another on the slowest path / S, bytes the busiest rank sends / S).
# Where n is no power of two, n - p ranks first hand their tensor to a partner and get the result back at the end:
# two steps and 2 S more, as in MPICH.

def _pairs(n, steps_per_round, share):
    """An all_reduce among p = 2 ** k ranks, with the two extra steps where n is none."""
    k = n.bit_length() - 1
    extra = n != 1 << k
    steps = steps_per_round * k + 2 * extra
    share = share(k)
    return steps, share + 2 * extra, share + extra


def _recursive_doubling(n):
    return _pairs(n, 1, lambda k: k)


def _halving_doubling(n):
    return _pairs(n, 2, lambda k: 2 * (1 - 0.5**k))


def _reduce_scatter_gather(n):
    """The halving half, then a binomial gather: the root's partner sends half of S in it."""
    k = n.bit_length() - 1
    extra = n != 1 << k
    share = 1 - 0.5**k
    return 2 * k + extra, 2 * share + extra, max(share + 0.5, extra)


def _tree_depth(n):
    """Rounds in which one rank reaches n: ceil(log2 n)."""
    return (n - 1).bit_length()


def _subtree(n):
    """Ranks in the largest subtree under a binomial tree's root."""
    half = 1 << (_tree_depth(n) - 1)
    return max(n - half, half // 2, 1)


def _bruck_all_to_all(n):
    """Round j carries the chunks whose distance has bit j set: n / 2 of n chunks where n is a power of two."""
    share = sum(i.bit_count() for i in range(n)) / n
    return _tree_depth(n), share, share


def _ring(n):
    return n - 1, (n - 1) / n, (n - 1) / n


def _logarithmic(n):
    return _tree_depth(n), (n - 1) / n, (n - 1) / n


_FLAT = {
    "all_reduce": {
        "naive": lambda n: (2 * (n - 1), 2 * (n - 1), n - 1),  # all to rank 0, one by one, and back
        "ring": lambda n: (2 * (n - 1), 2 * (n - 1) / n, 2 * (n - 1) / n),
        "tree": lambda n: (2 * _tree_depth(n), 2 * _tree_depth(n), _tree_depth(n)),
        "halving_doubling": _halving_doubling,
        "recursive_doubling": _recursive_doubling,
    },
    "all_gather": {"ring": _ring, "recursive_doubling": _logarithmic, "bruck": _logarithmic},
    "reduce_scatter": {"ring": _ring, "recursive_halving": _logarithmic},
    "broadcast": {
        "tree": lambda n: (_tree_depth(n), _tree_depth(n), _tree_depth(n)),
        "scatter_all_gather": lambda n: (_tree_depth(n) + n - 1, 2 * (n - 1) / n, 2 * (n - 1) / n),
    },
    "reduce": {"tree": lambda n: (_tree_depth(n), _tree_depth(n), 1),
               "reduce_scatter_gather": _reduce_scatter_gather},
    "gather": {"tree": lambda n: (_tree_depth(n), (n - 1) / n, _subtree(n) / n)},
    "scatter": {"tree": _logarithmic},
    "all_to_all": {"pairwise": _ring, "bruck": _bruck_all_to_all},
    "barrier": {"dissemination": lambda n: (_tree_depth(n), 0, 0)},
}
_POWERS_OF_TWO_ONLY = {("all_gather", "recursive_doubling"), ("reduce_scatter", "recursive_halving")}

# hierarchical: (op, between nodes?), in order; between nodes each device carries its node_size-th part of S
_PHASES = {
    "all_reduce": (("reduce_scatter", False), ("all_reduce", True), ("all_gather", False)),
    "all_gather": (("all_gather", True), ("all_gather", False)),
    "reduce_scatter": (("reduce_scatter", False), ("reduce_scatter", True)),
}
_HALVING = {"all_reduce": "halving_doubling", "all_gather": "recursive_doubling", "reduce_scatter": "recursive_halving"}

ALGORITHMS = {op: (*flat, *(["hierarchical"] if op in _PHASES else [])) for op, flat in _FLAT.items()}


@functools.cache
def _terms(op, algorithm, n, node_size):
    """``(steps, share)`` of S inside and between nodes, and the busiest rank's share; None where not to be had.

    A flat algorithm has all of its terms between.
    """
    if algorithm != "hierarchical":
        if n > 1 and (op, algorithm) in _POWERS_OF_TWO_ONLY and n & (n - 1):
            return None
        steps, share, sent = _FLAT[op][algorithm](n) if n > 1 else (0, 0, 0)
        return (0, 0), (steps, share), sent
    if node_size is None or not 1 < node_size < n or n % node_size:
        return None
    inside, between, busiest = np.zeros(2), np.zeros(2), 0.0
    for phase, is_between in _PHASES[op]:
        count, part = (n // node_size, 1 / node_size) if is_between else (node_size, 1)
        steps, share, sent = _FLAT[phase]["ring" if count & (count - 1) else _HALVING[phase]](count)
        (between if is_between else inside)[:] += steps, share * part
        busiest += sent * part
    return tuple(inside.tolist()), tuple(between.tolist()), busiest


def _checked(op, tensor_bytes, algorithm, size, node_size):
    """``{algorithm: terms}`` of what is asked for, or of all that can be had."""
    amount("tensor_bytes", tensor_bytes)
    op = base_op(op)
    one_of("op", op, ALGORITHMS)
    size = at_least("size", size, 1)
    if algorithm is None:
        found = {name: _terms(op, name, size, node_size) for name in ALGORITHMS[op]}
        return {name: terms for name, terms in found.items() if terms is not None}
    one_of("algorithm", algorithm, ALGORITHMS[op])
    terms = _terms(op, algorithm, size, node_size)
    if terms is None and algorithm != "hierarchical":
        raise ConfigError(f"{algorithm} of {op} needs a size ({size}) that is a power of two; ring takes any")
    if terms is None:
        raise ConfigError(f"hierarchical of {op} needs a node_size ({node_size}) above 1 and below size ({size}) that "
                          f"divides it")
    return {algorithm: terms}


def _seconds(terms, tensor_bytes, inside, between):
    (steps_in, share_in), (steps, share), _ = terms
    time = steps * between.latency_s + share / between.bandwidth_bytes_per_s * tensor_bytes
    if steps_in:
        time = time + steps_in * inside.latency_s + share_in / inside.bandwidth_bytes_per_s * tensor_bytes
    return time


def _links(size, link, node_size, link_between):
    """The link that flat algorithms are priced at: the slower kind as soon as the group leaves its node."""
    spans_nodes = node_size is not None and at_least("node_size", node_size, 1) < at_least("size", size, 1)
    if spans_nodes and link_between is None:
        raise ConfigError(f"a group of {size} in nodes of {node_size} needs link_between as well as link")
    for name, its in (("link", link), *([("link_between", link_between)] if spans_nodes else [])):
        if not isinstance(its, Link):
            raise ConfigError(f"{name} ({its!r}) must be a Link(name, bandwidth_bytes_per_s, latency_s)")
    return link_between if spans_nodes else link


def collective_time_s(op: str, tensor_bytes, *, size: int, link: Link, algorithm: str | None = None,
                      node_size: int | None = None, link_between: Link | None = None):
    """Seconds of one collective call, alpha-beta model.

    Args:
        op: name in torch.distributed, ``"all_reduce"``, ``"all_gather_into_tensor"``.
        tensor_bytes: S, the full buffer in bytes; a number or a numpy array.
        size: n, ranks of the group (count). A group of one takes 0 s.
        link: the link of each device; with ``node_size``, the one inside a node.
        algorithm: one of ``ALGORITHMS[op]``; None takes the fastest of them (for each element of an array).
        node_size: ranks of the group that share a node (count). Below ``size``, flat algorithms are priced at
            ``link_between`` throughout, and "hierarchical" joins in: inside the nodes at ``link``, and between them
            each device carries its node_size-th part by its own ``link_between``.

    Raises:
        ConfigError: unknown op or algorithm; an algorithm that this size does not have (the logarithmic all_gather by
            doubling and reduce_scatter by halving take powers of two, hierarchical takes whole nodes).

    Example:
        >>> link = Link("InfiniBand", 25e9, 20e-6)
        >>> [round(1e3 * collective_time_s("all_reduce", 25e6, size=1024, link=link, algorithm=a), 1)
        ...  for a in ("ring", "halving_doubling")]
        [42.9, 2.4]

    Source: the costs in MPICH's src/mpi/coll (6a79bf6), which are those of Thakur, Rabenseifner, Gropp 2005. A tree
    for n ranks has ceil(log2 n) rounds. Not here: pipelined trees and chains, as NCCL has them.
    """
    flat = _links(size, link, node_size, link_between)
    times = [_seconds(terms, tensor_bytes, link, flat)
             for terms in _checked(op, tensor_bytes, algorithm, size, node_size).values()]
    return np.minimum.reduce(times) if isinstance(tensor_bytes, np.ndarray) else min(times)


def busiest_rank_bytes(op: str, tensor_bytes, *, size: int, algorithm: str, node_size: int | None = None):
    """Bytes sent by the rank that sends most; arguments as in ``collective_time_s``.

    Example:
        >>> [busiest_rank_bytes("all_reduce", 16, size=n, algorithm=a) for a in ("naive", "ring") for n in (4, 64)]
        [48, 1008, 24.0, 31.5]
    """
    (terms,) = _checked(op, tensor_bytes, str(algorithm), size, node_size).values()  # None: one has to be named
    return terms[2] * tensor_bytes


def ring_all_reduce_bytes(tensor_bytes, size: int):
    """Bytes that each rank of a ring sends in an all_reduce: 2 (n-1)/n S."""
    return busiest_rank_bytes("all_reduce", tensor_bytes, size=size, algorithm="ring")


def collective_table(op: str, tensor_bytes, *, size: int, link: Link, node_size: int | None = None,
                     link_between: Link | None = None) -> list[Cost]:
    """Every algorithm that this op has at this size, one ``Cost`` each; arguments as in ``collective_time_s``.

    Example:
        >>> for row in collective_table("all_reduce", 25e6, size=8, link=Link("InfiniBand", 25e9, 20e-6)):
        ...     sent, time = row.busiest_rank_bytes / 1e6, 1e3 * row.time_s
        ...     print(f"{row.algorithm:18} {row.steps:2} {sent:3.0f} MB {time:5.2f} ms")
        naive              14 175 MB 14.28 ms
        ring               14  44 MB  2.03 ms
        tree                6  75 MB  6.12 ms
        halving_doubling    6  44 MB  1.87 ms
        recursive_doubling  3  75 MB  3.06 ms
    """
    flat = _links(size, link, node_size, link_between)
    return [Cost(name, int(steps_in + steps), sent * tensor_bytes, _seconds(terms, tensor_bytes, link, flat))
            for name, terms in _checked(op, tensor_bytes, None, size, node_size).items()
            for (steps_in, _), (steps, _), sent in [terms]]


def algbw(tensor_bytes, time_s):
    """Algorithm bandwidth of nccl-tests: S / t, bytes per second."""
    return amount("tensor_bytes", tensor_bytes) / amount("time_s", time_s, above_0=True)


def busbw(op: str, tensor_bytes, time_s, *, size: int):
    """Bus bandwidth of nccl-tests: algbw times what each link must carry of S at least, bytes per second.

    Comparable across ops and sizes, and with the link itself, for algorithms that send the least (a flat ring). The
    factor: all_reduce 2 (n-1)/n; all_gather, reduce_scatter, all_to_all, gather, scatter (n-1)/n; broadcast, reduce 1;
    0 for a group of one.

    Example:
        >>> [busbw(op, 1e9, 0.5, size=4) / 1e9 for op in ("all_reduce", "all_gather", "broadcast")]
        [3.0, 1.5, 2.0]

    Source: nccl-tests doc/PERFORMANCE.md (a0b82b2).
    """
    op = base_op(op)
    one_of("op", op, [name for name in ALGORITHMS if name != "barrier"])
    if at_least("size", size, 1) == 1:
        return 0.0
    factor = 1 if op in ("broadcast", "reduce") else (size - 1) / size * (2 if op == "all_reduce" else 1)
    return factor * algbw(tensor_bytes, time_s)
