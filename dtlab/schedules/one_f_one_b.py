"""GPipe, 1F1B and interleaved 1F1B: three answers to how many forwards come before the first backward."""
from dtlab.errors import ConfigError
from dtlab.schedules.schedule import Action, Backward, Forward, Schedule
from dtlab.validate import at_least


def gpipe(num_stages, num_micro_batches):
    """All forwards, then all backwards.

    Example:
        >>> gpipe(2, 3)
        GPipe: 2 ranks, 2 stages, 3 micro-batches
        rank 0: 0F0 0F1 0F2 0B0 0B1 0B2
        rank 1: 1F0 1F1 1F2 1B0 1B1 1B2

    Source: Huang et al. 2019, arXiv:1811.06965.
    """
    return _one_stage_a_rank("GPipe", num_stages, num_micro_batches, lambda stage: num_micro_batches)


def one_f_one_b(num_stages, num_micro_batches):
    """1F1B: as many forwards as it takes for the first gradient to come back, then a backward after each forward.

    Stage s of p holds min(m, p - s) micro-batches at the most; the step takes as long as GPipe's.

    Example:
        >>> one_f_one_b(2, 3)
        1F1B: 2 ranks, 2 stages, 3 micro-batches
        rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
        rank 1: 1F0 1B0 1F1 1B1 1F2 1B2

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1 (PipeDream-Flush).
    """
    return _one_stage_a_rank("1F1B", num_stages, num_micro_batches, lambda stage: num_stages - stage - 1)


def interleaved_one_f_one_b(num_ranks, num_chunks, num_micro_batches):
    """1F1B of several stages on each rank, which shortens the idle time by their number.

    Rank r has the stages r, r + p, r + 2p ...; it works on groups of about p micro-batches, the first stage of a group
    first. With one chunk it is 1F1B.

    Args:
        num_ranks: p (count).
        num_chunks: v, stages on each rank (count).
        num_micro_batches: m (count), in max(1, m // p) equal groups.

    Raises:
        ConfigError: micro-batches that do not make equal groups, with the nearest numbers that do.

    Example:
        >>> interleaved_one_f_one_b(num_ranks=2, num_chunks=2, num_micro_batches=2)
        interleaved 1F1B: 2 ranks, 4 stages, 2 micro-batches
        rank 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        rank 1: 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.2; groups of other sizes than p as in
    torch.distributed.pipelining.
    """
    p, v, m = (at_least(name, value, 1) for name, value in (
        ("num_ranks", num_ranks), ("num_chunks", num_chunks), ("num_micro_batches", num_micro_batches)))  # fmt: skip
    if v == 1:
        return one_f_one_b(p, m)
    if not _makes_groups(m, p):
        below = next(n for n in range(m, 0, -1) if _makes_groups(n, p))
        above = next(n for n in range(m, m + p) if _makes_groups(n, p))
        raise ConfigError(f"num_micro_batches ({m}) must be divisible by its {m // p} groups, num_micro_batches // "
                          f"num_ranks ({p}): use {below} or {above}; any multiple of num_ranks will do")
    group = m // max(1, m // p)
    steps = [(step // (group * v) * group + step % group, step // group % v) for step in range(m * v)]
    actions = []
    for rank in range(p):
        forwards = [Action(Forward, chunk * p + rank, number) for number, chunk in steps]
        backwards = [Action(Backward, (v - 1 - chunk) * p + rank, number) for number, chunk in steps]
        actions.append(_in_turn(forwards, backwards, 2 * (p - rank - 1) + (v - 1) * group))
    return Schedule(actions, p * v, m, tuple(range(p)) * v, "interleaved 1F1B")


def _makes_groups(num_micro_batches, num_ranks):
    return num_micro_batches % max(1, num_micro_batches // num_ranks) == 0


def _one_stage_a_rank(name, num_stages, num_micro_batches, warmup):
    p, m = at_least("num_stages", num_stages, 1), at_least("num_micro_batches", num_micro_batches, 1)
    actions = [_in_turn([Action(Forward, stage, number) for number in range(m)],
                        [Action(Backward, stage, number) for number in range(m)], warmup(stage)) for stage in range(p)]
    return Schedule(actions, p, m, tuple(range(p)), name)


def _in_turn(forwards, backwards, num_warmup):
    """``num_warmup`` forwards, then a forward and a backward in turn, then the rest of the backwards."""
    num_warmup = min(num_warmup, len(forwards))
    steady = [action for both in zip(forwards[num_warmup:], backwards) for action in both]
    return [*forwards[:num_warmup], *steady, *backwards[len(backwards) - num_warmup:]]
