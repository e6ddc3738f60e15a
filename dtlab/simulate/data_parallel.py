"""A step of data-parallel training, from a list of gradients: when it ends, and what of its communication shows.

Every rank does the same, so one program stands for all of them.
"""
import functools
from bisect import bisect_right
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from dtlab.simulate.boxes import boxes_of_run
from dtlab.simulate.engine import Transfer, simulate
from dtlab.simulate.timeline import Timeline
from dtlab.theory import ModelShape, batch_flops
from dtlab.validate import at_least

_FORWARD, _BACKWARD, _END = (("forward", "forward", ""), ("backward", "backward", ""), ("end", "compute", ""))


class Gradient(NamedTuple):
    """One parameter's: its bytes, and how long backward computes from the one before to it (seconds)."""

    bytes: int
    seconds: float


@functools.lru_cache
def gradients_of(shape: ModelShape, *, batch_size: int, flops_per_s: float, element_size: int = 2) -> tuple:
    """A ``Gradient`` for each parameter of ``dtlab.models.GPT``, in the order in which backward completes them.

    Only matrix products take time: 4 FLOPs a token for each element of a matrix, 8 s h for a layer's attention.

    Args:
        shape: the model; with tied embeddings the table's gradient is complete at the very end.
        batch_size: sequences on a rank (count).
        flops_per_s: what a device reaches.
        element_size: bytes of an element of a gradient; 2: 16 bits.
    """
    tokens = at_least("batch_size", batch_size, 1) * shape.seq_length
    h, f, width, head = shape.hidden_size, shape.ffn_hidden_size, shape.num_heads * shape.head_size, shape.vocab_size
    matrix = lambda elements: (elements, 4 * elements)
    layer = [(h, 0), matrix(h * f), (f, 0), matrix(h * f), (h, 0), (h, 0),       # MLP, its norm
             (h, 0), matrix(h * width), (3 * width, 8 * shape.seq_length * width),  # projection; scores
             matrix(3 * h * width), (h, 0), (h, 0)]  # fmt: skip
    table = [(h * head, 0)]
    if not shape.tie_embeddings:
        table.append(matrix(h * head))
    parts = [(h, 4 * h * head if shape.tie_embeddings else 0), (h, 0), *layer * shape.num_layers,
             (shape.seq_length * h, 0)]  # fmt: skip
    parts = [*table[1:], *parts, *table[:1]]
    return tuple(Gradient(elements * element_size, flops * tokens / flops_per_s) for elements, flops in parts)


def buckets(sizes, bucket_bytes):
    """Gradients that are sent together: for each bucket the place behind its last one.

    A bucket is closed when the next gradient would lift it above ``bucket_bytes``; it has one at least. The rule of
    ``dtlab.parallel.DistributedDataParallel`` for gradients of one dtype.

    Example:
        >>> buckets([3, 1, 9, 2, 2], 4)
        [2, 3, 5]
    """
    filled, ends = [0, *accumulate(sizes)], [0]
    while ends[-1] < len(sizes):
        ends.append(max(bisect_right(filled, filled[ends[-1]] + bucket_bytes) - 1, ends[-1] + 1))
    return ends[1:]


def per_bucket(gradients, *bucket_bytes):
    """For each ``bucket_bytes`` two arrays: each bucket's bytes, and the seconds of backward for it."""
    return _per_bucket(tuple(gradients), bucket_bytes)


@functools.lru_cache(16)  # links and ranks change none of it
def _per_bucket(gradients, bucket_bytes):
    done = np.zeros((2, len(gradients) + 1))
    np.cumsum(np.array(gradients, dtype=float).T, axis=1, out=done[:, 1:])
    sizes = [gradient.bytes for gradient in gradients]
    return [np.diff(done[:, [0, *buckets(sizes, most)]]) for most in bucket_bytes]


def bucketed_step(forward_s, gradients, all_reduce_s, *, bucket_bytes, overlap=True):
    """``(engine.Run, its programs)`` of forward, backward and the all_reduces of all buckets, on one rank.

    Args:
        forward_s: seconds of forward.
        gradients: ``Gradient``s in the order of backward.
        all_reduce_s: function from an array of bytes to their seconds.
        bucket_bytes: as in ``buckets``.
        overlap: send a bucket when its last gradient is there; else all of them after backward.
    """
    ((sizes, seconds),) = per_bucket(gradients, bucket_bytes)
    transfers = [Transfer(f"all_reduce of bucket {number}", (0,), "all_reduces", 0.0, time_s)
                 for number, time_s in enumerate(all_reduce_s(sizes).tolist())]
    numbers = range(len(transfers))
    if overlap:
        backward = list(zip(seconds.tolist(), numbers))
    else:
        backward = [(float(seconds.sum()), None), *((0.0, number) for number in numbers)]
    programs = {0: [(forward_s, None), *backward, *((0.0, ~number) for number in numbers)]}
    return simulate(programs, transfers), programs


def bucketed_times_s(forward_s, gradients, all_reduce_s, *, bucket_bytes, overlap=True):
    """Seconds of ``bucketed_step`` for a list of ``bucket_bytes``, worked out without a simulation: ``[float, ...]``.

    The all_reduces follow each other, so a step ends with the longest of: a bucket is complete, then it and all behind
    it are sent without a gap.
    """
    parts = per_bucket(gradients, *bucket_bytes)
    cost_s = all_reduce_s(np.concatenate([sizes for sizes, _ in parts]))
    times, start = [], 0
    for _, seconds in parts:
        its, start = cost_s[start : start + len(seconds)], start + len(seconds)
        complete = seconds.cumsum()
        sent = (complete if overlap else complete[-1]) + its[::-1].cumsum()[::-1]
        times.append(forward_s + float(max(complete[-1], sent.max())))
    return times


def _model(shape, hardware, *, num_ranks, batch_size=1, algorithm="ring"):
    """``forward_s, gradients, all_reduce_s`` of a model: at the FLOP/s that the hardware reaches, no optimizer."""
    reached = hardware.peak_flops * hardware.gemm_efficiency
    gradients = gradients_of(shape, batch_size=batch_size, flops_per_s=reached)
    all_reduce_s = lambda sizes: hardware.collective_s("all_reduce", sizes, range(num_ranks), algorithm)
    return batch_flops(shape, batch_size=batch_size) / 3 / reached, gradients, all_reduce_s


def data_parallel_times_s(shape, hardware, *, bucket_bytes, overlap=True, **choices):
    """Seconds of ``data_parallel_step`` for a list of ``bucket_bytes``, quickly."""
    return bucketed_times_s(*_model(shape, hardware, **choices), bucket_bytes=bucket_bytes, overlap=overlap)


def data_parallel_step(shape, hardware, *, num_ranks, bucket_bytes, batch_size=1, overlap=True, algorithm="ring"):
    """The timeline of a model's ``bucketed_step``, one rank drawn for all; with tokens/s and MFU of all of them.

    Args:
        shape: ``theory.ModelShape``; whether it fits the devices' memory is not asked.
        hardware: ``Hardware`` with at least ``num_ranks`` devices.
        num_ranks: replicas (count).
        bucket_bytes: as in ``buckets``; gradients are of 16 bits.
        batch_size: sequences on each rank (count).
        overlap: as in ``bucketed_step``.
        algorithm: of the all_reduces; None: for each the fastest.
    """
    parts = _model(shape, hardware, num_ranks=num_ranks, batch_size=batch_size, algorithm=algorithm)
    run, programs = bucketed_step(*parts, bucket_bytes=bucket_bytes, overlap=overlap)
    looks = {0: [_FORWARD, *[_BACKWARD] * (len(programs[0]) - len(run.moved) - 1), *[_END] * len(run.moved)]}
    shows = [{0: ("all_reduces", "all_reduce", "")}] * len(run.moved)
    return Timeline(boxes_of_run(run, programs, looks, shows), tokens=num_ranks * batch_size * shape.seq_length,
                    model_flops=num_ranks * batch_flops(shape, batch_size=batch_size),
                    peak_flops=num_ranks * hardware.peak_flops)  # fmt: skip
