"""Zero-bubble schedules and DualPipeV: the weights' gradients, which nobody waits for, fill the gaps.

An order is written as phases ``(how often, "F0 I0 W0")``: kinds of actions, each with one of the rank's two chunks.
Micro-batches are counted on their own.
"""
from collections import Counter, deque

from dtlab.errors import ConfigError
from dtlab.schedules.schedule import Action, Backward, BackwardInput, BackwardWeight, Forward, Schedule
from dtlab.validate import at_least


def zero_bubble_h1(num_stages, num_micro_batches):
    """ZB-H1: 1F1B whose stage s computes weight gradients s micro-batches late; never more in flight than p.

    Example:
        >>> zero_bubble_h1(2, 3)
        ZB-H1: 2 ranks, 2 stages, 3 micro-batches
        rank 0: 0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
        rank 1: 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2

    Source: Qi et al. 2023, arXiv:2401.10241, section 2.2.
    """
    return _handcrafted("ZB-H1", num_stages, num_micro_batches, 0)


def zero_bubble_h2(num_stages, num_micro_batches):
    """ZB-H2: more forwards first, so that no stage idles between its first and last action; for simulation.

    In flight are up to 2p - 1 micro-batches, from m = 2p - 1 on; with fewer they are as many more than ZB-H1's as m
    allows. The last stage ends when it does in ZB-H1: to gain from it the optimizer must not wait for all stages.

    Source: Qi et al. 2023, arXiv:2401.10241, section 2.3.
    """
    return _handcrafted("ZB-H2", num_stages, num_micro_batches, max(0, num_micro_batches - num_stages))


def zero_bubble_v(num_ranks, num_micro_batches):
    """ZB-V: rank r has stages r and 2p - 1 - r, so that the first gradient is born where the first forward was.

    As much in flight as 1F1B's first stage, on each rank, and no stage idles from m = 2p - 1 on. With fewer
    micro-batches weight gradients are computed as soon as a rank has nothing else to do.

    Source: Qi et al. 2024, arXiv:2405.15362; the order is torch.distributed.pipelining's.
    """
    p, m = at_least("num_ranks", num_ranks, 1), at_least("num_micro_batches", num_micro_batches, 1)
    full = max(m, 2 * p - 1)  # what fills the pipeline; micro-batches from m on are left out again
    orders = []
    for r in range(p):
        order = _written(_v_stages(r, p), [
            (2 * (p - r) - 1, "F0"), (r, "F1 F0"), (p - r, "F1 I1 W1"),
            (full - 2 * p + r + 1, "F0 I0 W0 F1 I1 W1"), (p - r - 1, "I0 W0 F1 I1 W1"),
            (r, "I0 I1"), (p - r, "I0 W0"), (r, "W1"), (r, "W0")])  # fmt: skip
        orders.append([action for action in order if action.micro_batch < m])
    return Schedule(orders if m == full else _filled(orders), 2 * p, m, _v_ranks(p), "ZB-V")


def dualpipe_v(num_ranks, num_micro_batches):
    """DualPipeV: in its middle each rank computes a forward and another micro-batch's backward at once, as one pair.

    Rank r has stages r and 2p - 1 - r, and 2p + 1 of their activations in flight. Under a pair the messages of the one
    hide behind the other's work.

    Raises:
        ConfigError: fewer micro-batches than stages.

    Source: DeepSeek-AI 2024, arXiv:2412.19437, section 3.2.1, and github.com/deepseek-ai/DualPipe; the order is
    torch.distributed.pipelining's.
    """
    p, m = at_least("num_ranks", num_ranks, 1), at_least("num_micro_batches", num_micro_batches, 1)
    if m < 2 * p:
        raise ConfigError(f"num_micro_batches ({m}) must be at least 2 num_ranks ({2 * p}), one for each stage")
    actions = []
    for r in range(p):
        half, odd, last = (r + 1) // 2, (r + 1) % 2, r == p - 1
        actions.append(_written(_v_stages(r, p), [
            (2 * (p - r - 1), "F0"), (r + 1, "F0 F1"), (p - r - 1, "I1 W F1"),
            (last, "F0 B1 F1&B0"), (m - 2 * p + r + 1 - last, "F0&B1 F1&B0"), (p - r - 1, "B1 F1&B0"),
            (half, "B1 B0"), (odd, "B1 I0"), (half, "I1 I0"), (p - r - 1, "W I0"), (r + 1, "W")]))  # fmt: skip
    return Schedule(actions, 2 * p, m, _v_ranks(p), "DualPipeV")


def _handcrafted(name, num_stages, num_micro_batches, num_more):
    """ZB-H1 with up to ``num_more`` further forwards first, and weights' gradients as many micro-batches later."""
    p, m = at_least("num_stages", num_stages, 1), at_least("num_micro_batches", num_micro_batches, 1)
    actions = []
    for s in range(p):
        warmup = min(p - s - 1 + min(p - s - 1, num_more), m)
        late, steady = min(s + min(s, num_more), m), m - warmup
        actions.append(_written([s], [
            (warmup, "F0"), (min(late, steady), "F0 I0"), (max(steady - late, 0), "F0 I0 W0"),
            (max(late - steady, 0), "I0"), (m - max(late, steady), "I0 W0"), (late, "W0")]))  # fmt: skip
    return Schedule(actions, p, m, tuple(range(p)), name)


def _v_stages(rank, num_ranks):
    return [rank, 2 * num_ranks - 1 - rank]


def _v_ranks(num_ranks):
    return (*range(num_ranks), *reversed(range(num_ranks)))


def _written(stages, phases):
    """The actions of phases; ``&`` joins a pair, ``W`` without a chunk is the oldest weight's gradient not yet done."""
    actions, counts, pending = [], Counter(), deque()

    def action(kind, chunk=None):
        if chunk is None:
            return pending.popleft()
        stage = stages[int(chunk)]
        key = stage, BackwardInput if kind == Backward else kind
        counts[key] += 1
        if kind == BackwardInput:
            pending.append(Action(BackwardWeight, stage, counts[key] - 1))
        return Action(kind, stage, counts[key] - 1)

    for times, words in phases:
        for word in times * words.split():
            its = [action(*part) for part in word.split("&")]
            actions.append(Action.pair(*its) if len(its) == 2 else its[0])
    return actions


def _filled(orders):
    """Weights' gradients moved to where a rank has nothing else to do, if every action takes as long.

    Or to where it has no room: it holds the activations of as many forwards as there are stages.
    """
    num_stages, held = 2 * len(orders), [0] * len(orders)
    todo = [[action for action in order if action.kind != BackwardWeight][::-1] for order in orders]
    filled, pending, done = [[] for _ in orders], [deque() for _ in orders], set()

    def is_ready(kind, stage, micro_batch, _):
        if kind == Forward:
            return stage == 0 or (kind, stage - 1, micro_batch) in done
        return ((Forward, stage, micro_batch) if stage == num_stages - 1 else (kind, stage + 1, micro_batch)) in done

    while any(todo) or any(pending):
        now = []
        for rank, (its, rest, weights) in enumerate(zip(filled, todo, pending)):
            has_room = held[rank] < num_stages
            if rest and (has_room or rest[-1].kind != Forward) and is_ready(*rest[-1]):
                now.append(rest.pop())
                its.append(now[-1])
                if now[-1].kind == Forward:
                    held[rank] += 1
                else:
                    weights.append(now[-1]._replace(kind=BackwardWeight))
            elif weights:
                its.append(weights.popleft())
                held[rank] -= 1
        done.update(action[:3] for action in now)
    return filled
