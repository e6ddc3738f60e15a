"""Lab 02, data parallel: its five exercises, what they may spend, and the mistakes that they know by name."""
from dtlab.checks import lab02_pictures as pictures
from dtlab.checks.compare import difference, ratio
from dtlab.checks.evidence import Case
from dtlab.checks.exercise import Exercise, Mistake, failed, when
from dtlab.checks.lab02_buckets import (
    BRANCH,
    HELD,
    bucket_cases,
    calls,
    last_passes,
    listed,
    mean_gradients,
    overlap_cases,
    plan,
    planned,
    rhythm,
    sizes,  # fmt: skip
    starts_early,
    train,
    train_spec,
    waits_late,
)
from dtlab.checks.lab02_programs import CLOCKS, PROGRAMS, Net, flat, moved, times, trained
from dtlab.checks.lab02_start import BORROWED, START
from dtlab.checks.lab02_tokens import WEIGH

# known mistakes


def _first_step(evidence):
    return [result["step 0"] for result in evidence.results]


def _wrong_names(evidence, expected, step="step 0"):
    """Parameters whose gradient is wrong on some rank in one step."""
    pairs = list(zip(evidence.results, expected))
    return [name for name in expected[0][step] if any(difference(a[step][name], b[step][name]) for a, b in pairs)]


def _equal_to(value, partly=False):
    """Whether the first step's wrong gradients (all of them, or some) are ``value(case, model, rank)``."""
    def seen(evidence, expected):
        case, names = evidence.case, _wrong_names(evidence, expected)
        if not names or not partly and len(names) < len(expected[0]["step 0"]) - len(BRANCH):
            return False
        for rank, mine in enumerate(_first_step(evidence)):
            told, right = value(case, Net(case["seed"]).eval(), rank), expected[rank]["step 0"]
            if any(difference(mine[name], told[name]) for name in names if difference(mine[name], right[name])):
                return False
        return ", ".join(names[:3])
    return when(seen)


def _own(case, model, rank):
    return mean_gradients(case, model, 0, ranks=[rank])


def _factor(wanted):
    def seen(evidence, expected):
        found = [ratio(flat(mine.values()), flat(right["step 0"].values()))
                 for mine, right in zip(_first_step(evidence), expected)]
        return all(its and abs(its / wanted(evidence.case) - 1) < 1e-6 for its in found) and f"{found[0]:.2f}"
    return when(seen)


def _only_branch(evidence, expected):
    """Only branch is wrong, which not every rank has."""
    names = _wrong_names(evidence, expected)
    return not evidence.case["everywhere"] and set(names) <= set(BRANCH) and ", ".join(names)


def _added_up(evidence, expected):
    """Branch is zero where only an earlier micro-batch has it."""
    names = _wrong_names(evidence, expected)
    found = [mine[name] for mine in _first_step(evidence) for name in names]
    return set(names) == set(BRANCH) and evidence.case["micro_batches"] > 1 and not any(
        its.any() for its in found) and ", ".join(names)


def _calls_are(test):
    """Whether rank 0's calls are what ``test(case, calls)`` says."""
    return when(lambda evidence, _: test(evidence.case, calls(evidence.recording, 0)))


def _right_but(seen):
    """Whether all values are right, and ``seen`` all the same: what changes no value explains no wrong one."""
    return when(lambda evidence, expected: not any(map(difference, evidence.results, expected))
                and seen(evidence, expected))  # fmt: skip


def _calls_alone(test):
    return _right_but(_calls_are(test))


def _never_flushed(case, found):
    planned_calls = sizes(case) * len(case["batches"])
    fewer = len(found) < len(planned_calls) and sum(found) < sum(planned_calls)
    return bool(found) and fewer and f"{len(found)} of {len(planned_calls)}"


def _more_bytes(case, found):
    frozen = sum(p.nbytes for p in Net(0).parameters() if not p.requires_grad)
    return sum(found) == (sum(sizes(case)) + frozen) * len(case["batches"]) and f"{frozen} bytes"


def _one_a_parameter(case, found):
    right = len(plan(case)) * len(case["batches"])
    return len(found) == len(trained(Net(0))) * len(case["batches"]) > right and f"{len(found)} calls where {right} do"


def _by_arrival(case, found):
    right, back = (sizes(case, backwards) * len(case["batches"]) for backwards in (True, False))
    return sorted(found) == sorted(right) and found not in (right, back) and f"{listed(found)} bytes"


def _each_micro_batch(case, found):
    right = sum(sizes(case)) * len(case["batches"])
    return case["micro_batches"] > 1 and sum(found) == case["micro_batches"] * right and times(sum(found), right)


def _not_written(evidence, expected):
    """Own gradients stand there though each call was awaited at once."""
    calls_only = rhythm(evidence.recording, 0).replace("b", "")
    return calls_only and not calls_only.replace("iw", "") and _equal_to(_own)(evidence, expected)


def _larger(case, found):
    right, allowed = sizes(case), case["bucket_bytes"]
    steps = len(case["batches"])
    return sum(found) == sum(right) * steps and len(found) < len(right) * steps and (
        f"bucket_bytes is {allowed}, and buckets of {listed(found[: len(found) // steps])} bytes were sent")


def _otherwise(case, found):
    right = sizes(case) * len(case["batches"])
    return found != right and sum(found) == sum(right) and f"bucket_bytes is {case['bucket_bytes']}"


def _inside_no_sync(evidence, _expected):
    """How many all_reduces of rank 0 start in a micro-batch that only adds up."""
    number, found, count = 0, 0, evidence.case["micro_batches"]
    for e in evidence.recording.events[0]:
        number += e.op == "sleep" and e.phase.get("name") == "forward"
        found += e.kind == "issue" and number > 0 and (number - 1) // CLOCKS % count < count - 1
    return bool(found) and f"{found} all_reduces of rank 0 start"


def _stuck(evidence, _expected):
    """The hooks send in the step before an exception inside no_sync, and not in the one after it."""
    its = [before for rank, before in last_passes(evidence.case, evidence.recording) if rank == 0]
    return evidence.case["interrupted"] and "i" in its[0] and "i" not in its[1]


def _only_later(evidence, expected):
    wrong = [_wrong_names(evidence, expected, step) for step in expected[0] if step.startswith("step")]
    return not wrong[0] and ", ".join(next(filter(None, wrong), [])[:3])


def _held(evidence, expected):
    """How many buckets of earlier steps are held, where all else is right."""
    held = [its[HELD] for its in evidence.results]
    wrong = any(difference({**its, HELD: 0}, right) for its, right in zip(evidence.results, expected))
    return not wrong and any(held) and str(max(held))


SIZES_DIFFER = r"the shapes differ|do not make the same call"
COMMON = (
    BORROWED,
    Mistake("no context manager",
        "`with buckets.no_sync():` needs something that begins and ends. A function with a yield becomes that by "
        "@contextlib.contextmanager above it; without it, it is a generator only, and without a yield it is None.",
        failed("raised", says=r"context manager protocol|AttributeError: __enter__")),
    Mistake("hook on a frozen parameter",
        "a frozen parameter gets no gradient, so autograd takes no hook for it: only what is trained belongs into a"
        " bucket.", failed("raised", says=r"that doesn't require")),
    Mistake("tensors compared by value",
        "a tensor was looked for in a list with `in`, which compares numbers, element by element. Two tensors are "
        "the same parameter if they are one object; a set or a dict asks for that.",
        failed("raised", says=r"The size of tensor a|Boolean value of Tensor")),
    Mistake("reads before wait",
        "a bucket is read or written while its all_reduce is under way. With small tensors it often goes well, and "
        "under load the gradient is a stale one: half added up, or not at all.",
        failed("guard", says=r"nobody has called wait|never awaited")),
    Mistake("missing call",
        "a bucket of a rank that got no gradient for one of its parameters never becomes full, and is never sent. "
        "With a gradient for each parameter nothing shows it.",
        failed("hang", says=r"ranks? [\d, -]+ never made that call")),
    Mistake("buckets shifted",
        "the ranks' buckets hold different parameters, so that their calls do not fit. What goes into which bucket,"
        " and the order of the buckets, must not depend on which gradients arrive.",
        failed("guard", says=SIZES_DIFFER)),
    Mistake("forgets missing gradients",
        "finish meets a .grad that is None: this rank got no gradient for that parameter. It sends zeros for it, and "
        "takes the mean of the others all the same.", failed("raised", says=r"(?s)NoneType.*, in finish\b()")),
    Mistake("hook before accumulation",
        "a hook reads a .grad that is still None. If it is its own parameter's, the hook runs before the gradient "
        "stands there; if it is another's, that one has not arrived.", failed("raised", says="NoneType")),
    Mistake("sum for mean",
        "every gradient is {}x the right one, the number of ranks: the sum over the ranks instead of their mean. On"
        " one rank both are the same.", _factor(lambda case: case.world_size)),
    Mistake("divides twice",
        "every gradient is {}x the right one, 1 / ranks: one division too many (or one by the micro-batches, where "
        "they are as many).",
        _factor(lambda case: 1 / case.world_size)),
    Mistake("frozen parameters sent",
        "{} too many are sent each step: frozen parameters lie in the buckets, and have no gradient to send.",
        _calls_alone(_more_bytes)),
    Mistake("nothing is sent",
        "no bucket was sent: every rank steps with its own gradient. On one rank that is right, and on more the "
        "loss falls all the same.", when(lambda evidence, _: not moved(evidence.recording, 0))),
    Mistake("reduces every micro-batch",
        "{}: the buckets go out after each micro-batch. The values may come out right: only the bytes tell for "
        "sure.", _calls_are(_each_micro_batch)),
    Mistake("no_sync without effect",
        "no_sync had no effect: {} inside it, where none is due. What later micro-batches add is not in what was sent.",
        when(_inside_no_sync)),
    Mistake("forgets what no_sync added up",
        "{}: a parameter that the last micro-batch does not use has a gradient all the same, from the ones before. "
        "It is in .grad, and was counted as zero.", when(_added_up)),
    Mistake("forgets missing gradients",
        "{}: on a rank without a gradient of its own the mean must stand in .grad afterwards all the same, or this "
        "replica steps differently. With a gradient everywhere nothing shows it.", when(_only_branch)),
    Mistake("only the last micro-batch",
        "the gradient is that of the last micro-batch: what no_sync added up in .grad before is left out. With one "
        "micro-batch a step nothing shows it.",
        _equal_to(lambda case, model, _: mean_gradients(case, model, 0, slice(-1, None)))),
    Mistake("hook before accumulation",
        "{}: what was sent lacks the gradient that had just arrived. The hook ran before it was added to .grad. If "
        "there was one from an earlier pass, that one was sent.",
        _equal_to(lambda case, model, _: mean_gradients(case, model, 0, slice(None, -1)), partly=True)),
    Mistake("state of the last step",
        "the first step is right, the second is not ({}): it starts with what the first one left, such as full "
        "buckets or a count. A test of one step never sees it.", when(_only_later)),
    Mistake("bucket never flushed",
        "{} all_reduces were called: what is left at the end of backward in a bucket that is not full was not sent."
        " When the sizes happen to fit, nothing is left.", _calls_are(_never_flushed)),
    Mistake("never written back",
        "every rank still has its own gradient when finish returns. The buckets were sent and awaited, but the means "
        "do not stand in .grad.", when(_not_written)),
    Mistake("steps before wait",
        "every rank still has its own gradient when finish returns, though the mean is under way: the step uses a "
        "stale one. The replicas drift apart from now on.", _equal_to(_own)),
    Mistake("buckets too large",
        "{}: all is sent, in larger buckets than planned. A parameter that would make a bucket larger begins the "
        "next one; bytes are counted, and a float64 has 8.", _calls_alone(_larger)),
    Mistake("sent in order of arrival",
        "the buckets leave in the order in which they happen to become full: {}. Here all ranks agree by luck. A "
        "rank that lacks a gradient would call for another bucket than the others.", _calls_alone(_by_arrival)),
    Mistake("one call a parameter",
        "{}: each parameter goes alone and pays the latency of a call of its own. On one machine that costs little,"
        " on 64 more than the bytes do.", _calls_alone(_one_a_parameter)),
    Mistake("buckets in forward order",
        "the buckets are planned from the first parameter on. Backward starts with the last one: the first bucket "
        "is full only at the end, and the others wait behind it.",
        _calls_alone(lambda case, found: found == sizes(case, False) * len(case["batches"]))),
    Mistake("buckets planned otherwise",
        "all is sent, and the buckets are others than planned. {}: a parameter begins the next bucket only if it "
        "would make this one larger than that.", _calls_alone(_otherwise)),
    Mistake("keeps what was sent",
        "the gradients are right, and buckets of earlier steps are still held when a later one ends: {}. A list of "
        "handles or of flat tensors grows in every step, is awaited and written back again, and takes memory and time "
        "until there is none. What belongs to one step ends with it.", when(_held)),
)  # fmt: skip
LATE = Mistake("sends after backward",
    "the values and the bytes are right, but the first bucket leaves only when backward has ended. No value shows "
    "it; the step takes as long as computing and sending one after the other. A no_sync without an end does it too.",
    _right_but(lambda evidence, _: starts_early(evidence.case, evidence.recording)))  # fmt: skip
WAITS = Mistake("waits inside backward",
    "the buckets leave early, but backward waits for each of them: {}. Start them there, wait for them in finish.",
    _right_but(lambda evidence, _: waits_late(evidence.case, evidence.recording)))  # fmt: skip
STUCK = Mistake("stays in no_sync after an exception",
    "an exception left no_sync, and in the step after it the hooks still send nothing during backward. What no_sync "
    "changes it has to restore then too: try ... finally.", when(_stuck))  # fmt: skip

BUCKETS = Exercise(
    "lab02.3", "gradients travel in planned buckets, also those that are not there", ("Buckets",), bucket_cases, train,
    train_spec, budget=(planned, starts_early), minutes=25, draw=pictures.buckets,
    hint="Compare the calls of two ranks, one of which has no gradient for branch: which call comes first on each?",
    mistakes=(*COMMON, LATE))  # fmt: skip

OVERLAP = Exercise(
    "lab02.4", "one reduction a step, under way while backward computes", ("OverlappedBuckets",), overlap_cases, train,
    train_spec, budget=(planned, starts_early, waits_late), minutes=20,
    draw=pictures.overlap, hint="In which of the micro-batches may a hook send, and what does .grad hold at that time?",
    mistakes=(STUCK, *COMMON, LATE, WAITS))  # fmt: skip

DIAGNOSE = PROGRAMS.as_exercise(Case(1, "diagnosis", {}), pictures.programs_picture)

EXERCISES = (START, WEIGH, BUCKETS, OVERLAP, DIAGNOSE)
