"""Pipelines: how long a step takes and what share of it is idle, by schedule.

p = ranks, m = micro-batches, v = stages on a rank; F, I, W = seconds of a stage's forward, of its backward for the
input and for the weights. All stages take as long, messages none.
"""
from dtlab.errors import ConfigError
from dtlab.validate import amount, at_least, index_below, one_of

_NARAYANAN = "Narayanan et al. 2021, arXiv:2104.04473, section 2.2"
_QI = "Qi et al. 2023, arXiv:2401.10241, table 2"
SOURCES = {  # by the name of its function in dtlab.schedules
    "gpipe": "Huang et al. 2019, arXiv:1811.06965, section 2.3",
    "one_f_one_b": _NARAYANAN,
    "interleaved_one_f_one_b": _NARAYANAN,
    "zero_bubble_h1": _QI,
    "zero_bubble_h2": _QI,
    "zero_bubble_v": "Qi et al. 2024, arXiv:2405.15362",
    "dualpipe_v": "github.com/deepseek-ai/DualPipe, README",
}


def pipeline_step_s(schedule="one_f_one_b", *, pp_size, num_micro_batches, num_chunks=1, forward_s=1.0, backward_s=2.0,
                    weight_s=None, longest_stage=False):
    """Seconds of a step of a pipeline, without the optimizer: a rank's work v m (F + I + W), and its idle time.

        GPipe, 1F1B, interleaved   (p - 1) (F + I + W)
        ZB-H1                      (p - 1) (F + I) - (min(m, p) - 1) W
        ZB-H2                      as ZB-H1; of its longest stage (p - 1) (F + I) - min(m - 1, 2 (p - 1)) W, at least 0
        ZB-V                       (p - 1) F; of its longest stage 0
        DualPipeV                  (p - 1) (F + 2 I - W), a pair as long as its parts

    Args:
        schedule: the name of its function in ``dtlab.schedules``.
        pp_size: p, ranks (count).
        num_micro_batches: m (count).
        num_chunks: v, of an interleaved schedule; the V-shaped ones have two stages on a rank (count).
        forward_s, backward_s: F, and I + W, of one stage (seconds).
        weight_s: W (seconds); None: half of backward.
        longest_stage: from the first action to the last of the stage where that is longest, as the zero-bubble papers
            count; otherwise of all ranks.

    Raises:
        ConfigError: a schedule that is not known, or one of which no closed form is known at these numbers.

    Example:
        >>> for schedule in ("one_f_one_b", "zero_bubble_h1", "zero_bubble_h2"):
        ...     print([pipeline_step_s(schedule, pp_size=4, num_micro_batches=8, longest_stage=longest)
        ...            for longest in (False, True)])
        [33.0, 33.0]
        [27.0, 27.0]
        [27.0, 24.0]

    Source: ``SOURCES[schedule]``.
    """
    one_of("schedule", schedule, SOURCES)
    p, m = at_least("pp_size", pp_size, 1), at_least("num_micro_batches", num_micro_batches, 1)
    F, both = amount("forward_s", forward_s), amount("backward_s", backward_s)
    W = both / 2 if weight_s is None else amount("weight_s", weight_s)
    v, I = _chunks(schedule, num_chunks), both - W  # noqa: E741
    full = 2 * p - 1 if longest_stage else p  # micro-batches that fill it
    least, shares = {  # micro-batches, and what is to be true of F, I and W
        "interleaved_one_f_one_b": (p if v > 1 else 1, "any"), "zero_bubble_h1": (1, "W <= I"),
        "zero_bubble_h2": (1, "W <= I" if longest_stage and m >= full else "F = I = W"),
        "zero_bubble_v": (full, "F = I = W"), "dualpipe_v": (2 * p, "F = I = W")}.get(schedule, (1, "any"))  # fmt: skip
    if m < least or not {"any": True, "W <= I": W <= I, "F = I = W": F == I == W}[shares]:
        raise ConfigError(f"{schedule}, p = {p}: a closed form is known for num_micro_batches of at least {least} and "
                          f"{shares} (F = forward_s, W = weight_s, I = backward_s - weight_s), not for {m} with "
                          f"F = {F}, I = {I}, W = {W}: dtlab.schedules simulates it")
    gaps = (p - 1) * (F + I) - (min(m, p) - 1) * W
    idle_s = {
        "zero_bubble_h1": gaps,
        "zero_bubble_h2": max(0.0, (p - 1) * (F + I) - min(m - 1, 2 * (p - 1)) * W) if longest_stage else gaps,
        "zero_bubble_v": 0.0 if longest_stage else (p - 1) * F,
        "dualpipe_v": (p - 1) * (F + 2 * I - W),
    }.get(schedule, (p - 1) * (F + both))
    return v * m * (F + both) + idle_s


def bubble_fraction(schedule="one_f_one_b", *, pp_size, num_micro_batches, num_chunks=1, forward_s=1.0, backward_s=2.0,
                    **other):
    """Idle share of a step, idle / (ranks x step time), 0 to 1: (p - 1) / (m + p - 1) of GPipe and 1F1B.

    Args:
        other: all are those of ``pipeline_step_s``.

    Example:
        >>> bubble_fraction("gpipe", pp_size=4, num_micro_batches=1)
        0.75
        >>> round(bubble_fraction("zero_bubble_h1", pp_size=8, num_micro_batches=32), 3)
        0.068

    Source: ``SOURCES[schedule]``.
    """
    step_s = pipeline_step_s(schedule, pp_size=pp_size, num_micro_batches=num_micro_batches, num_chunks=num_chunks,
                             forward_s=forward_s, backward_s=backward_s, **other)
    return 1 - _chunks(schedule, num_chunks) * num_micro_batches * (forward_s + backward_s) / step_s if step_s else 0.0


def zero_bubble_activations(schedule, *, pp_size, pp_rank, activation_bytes=1.0, weight_bytes=None):
    """The most that a rank of ZB-H1 or ZB-H2 holds in flight, with as many micro-batches as the pipeline takes.

    M_B, an activation, (p - r) times in ZB-H1 and 2 (p - r) - 1 times in ZB-H2; and M_W, what of it the weights'
    backward needs, r or 2 r times.

    Args:
        schedule: "zero_bubble_h1" or "zero_bubble_h2".
        pp_size: p, ranks (count).
        pp_rank: r, from 0.
        activation_bytes: M_B; 1: count micro-batches.
        weight_bytes: M_W; None: as much as M_B.

    Example:
        >>> [zero_bubble_activations(name, pp_size=4, pp_rank=1) for name in ("zero_bubble_h1", "zero_bubble_h2")]
        [4.0, 7.0]

    Source: Qi et al. 2023, arXiv:2401.10241, table 2.
    """
    one_of("schedule", schedule, ("zero_bubble_h1", "zero_bubble_h2"))
    p, r = at_least("pp_size", pp_size, 1), index_below("pp_rank", pp_rank, "pp_size", pp_size)
    weight_bytes = activation_bytes if weight_bytes is None else weight_bytes
    if schedule == "zero_bubble_h1":
        return (p - r) * activation_bytes + r * weight_bytes
    return (2 * (p - r) - 1) * activation_bytes + 2 * r * weight_bytes


def _chunks(schedule, num_chunks):
    """Stages on a rank."""
    if schedule in ("zero_bubble_v", "dualpipe_v"):
        return 2
    if schedule != "interleaved_one_f_one_b" and num_chunks != 1:
        raise ConfigError(f"num_chunks ({num_chunks}): {schedule} has one stage on a rank; "
                          "interleaved_one_f_one_b has more")
    return at_least("num_chunks", num_chunks, 1)
