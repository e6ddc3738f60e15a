"""The rows of schedules: how long one takes to simulate, beside the evaluator that a notebook would write."""
from benchmarks.registry import at_most, row
from benchmarks.replay import timed

EVALUATOR = "plain-Python evaluator"


def evaluate(actions, seconds):
    """``(step time, idle share, {action: end})`` of a schedule, without what is held in flight.

    Ranks take turns; each goes on until what it needs has not been computed.
    """
    from dtlab.schedules import BackwardInput, BackwardWeight, Forward

    last = max(action.stage for program in actions for action in program)
    done, clocks, places = {}, [0.0] * len(actions), [0] * len(actions)

    def needed(action):
        """What must have been computed before, as a key of ``done``; None: nothing."""
        if action.kind == Forward:
            return (Forward, action.stage - 1, action.micro_batch) if action.stage else None
        if action.kind == BackwardWeight:
            return BackwardInput, action.stage, action.micro_batch
        if action.stage == last:
            return Forward, action.stage, action.micro_batch
        return BackwardInput, action.stage + 1, action.micro_batch

    has_moved = True
    while has_moved:
        has_moved = False
        for rank, program in enumerate(actions):
            while places[rank] < len(program):
                action = program[places[rank]]
                need = needed(action)
                if need is not None and need not in done:
                    break
                start = max(clocks[rank], done[need] if need else 0.0)
                clocks[rank] = start + seconds[action.kind]
                kind = action.kind if action.kind in (Forward, BackwardWeight) else BackwardInput
                done[kind, action.stage, action.micro_batch] = clocks[rank]
                places[rank] += 1
                has_moved = True
    if any(place < len(program) for place, program in zip(places, actions)):
        raise ValueError("the ranks wait for each other")
    busy = sum(seconds[action.kind] for program in actions for action in program)
    return max(clocks), 1 - busy / (len(actions) * max(clocks)), done


def against_an_evaluator(bench, make):
    """A schedule of 64 stages and 512 micro-batches: ours with each rank's memory track and peak."""
    schedule, samples = make(64, 512), {"dtlab": [], EVALUATOR: []}
    for _ in range(1 if bench.quick else 9):
        seconds, (step_time_s, bubble, _) = timed(evaluate, schedule.actions, {"F": 1, "B": 2, "I": 1, "W": 1})
        samples[EVALUATOR].append(seconds)
        seconds, ours = timed(simulated, schedule)
        assert max(abs(ours[0] - step_time_s), abs(ours[1] - bubble)) < 1e-9
        samples["dtlab"].append(seconds)
    return samples


def simulated(schedule):
    """Step time, idle share, and of each rank what it holds over time and its most."""
    timeline = schedule.simulate(forward_s=1, backward_s=2)
    tracks = [timeline.in_flight(rank) for rank in timeline.ranks]
    return timeline.step_time_s, timeline.bubble_fraction, tracks, timeline.peak_in_flight


@row("simulate 1F1B, 64 stages, 512 micro-batches, with its memory track", "s", {EVALUATOR: at_most(1.0)})
def simulated_1f1b(bench, peers):
    from dtlab.schedules import one_f_one_b

    return against_an_evaluator(bench, one_f_one_b)


@row("simulate ZB-H1, 64 stages, 512 micro-batches, with its memory track", "s", {EVALUATOR: at_most(1.0)})
def simulated_zero_bubble(bench, peers):
    from dtlab.schedules import zero_bubble_h1

    return against_an_evaluator(bench, zero_bubble_h1)
