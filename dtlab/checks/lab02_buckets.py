"""Exercises 3 and 4 of lab 02 on the ranks: their cases, the training loop, what is right, what a recording shows."""
import contextlib
import re

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from dtlab.checks.compare import collectives_used
from dtlab.checks.evidence import Case
from dtlab.checks.lab02_programs import CLOCKS, Net, by_hand, draw_batch, gradients, moved, times, trained
from dtlab.models import cross_entropy
from dtlab.ranks import calls as calls_of_rank
from dtlab.ranks.guard_facts import flat as tensors_in
from dtlab.theory import base_op

RATE, BRANCH = 0.05, ("branch.weight", "branch.bias")
HELD, MANY_STEPS = "buckets of earlier steps that are still held", 6


def draw_case(rng, size, name, bucket_bytes, *, steps=2, micro_batches=1, branch=lambda step, rank, number: True,
          backward_s=0.0, interrupted=False):
    """A case of training steps; ``branch`` says which batches take the model's branch.

    ``interrupted``: before the second step an exception leaves ``no_sync()``.
    """
    batches = [[[(draw_batch(rng, 3, 5), branch(step, rank, number)) for number in range(micro_batches)]
                for rank in range(size)] for step in range(steps)]
    everywhere = all(taken for step in batches for its in step for _, taken in its)
    return Case(size, name, {"seed": rng.randrange(10**6), "bucket_bytes": bucket_bytes, "batches": batches,
                             "micro_batches": micro_batches, "backward_s": backward_s, "everywhere": everywhere,
                             "interrupted": interrupted})


def bucket_cases(rng):
    """Of exercise 3."""
    missing = rng.randrange(3)
    return [
        draw_case(rng, 2, "buckets of at most 100 bytes", 100),
        draw_case(rng, 1, "a bucket for each parameter", 1, steps=MANY_STEPS),
        draw_case(rng, 4, "buckets that fit to the last byte", rng.choice([64, 96])),
        draw_case(rng, 3, "no gradient for branch on one rank", 100, steps=1, branch=lambda s, r, _: r != missing),
        draw_case(rng, 2, "no gradient for branch on any rank", 100, branch=lambda *_: False),
        draw_case(rng, 4, "one bucket, branch missing on another rank each step", 10**6,
                  branch=lambda s, r, _: r != 3 - s),
    ]


def overlap_cases(rng):
    """Of exercise 4."""
    other = rng.randrange(4)
    return [
        draw_case(rng, 2, "one step of two micro-batches", 100, steps=1, micro_batches=2, backward_s=0.03),
        draw_case(rng, 3, "three micro-batches", 100, micro_batches=3),
        draw_case(rng, 1, "two micro-batches", 64, micro_batches=2, steps=MANY_STEPS),
        draw_case(rng, 4, "branch in the first micro-batch only, and on one rank never", rng.choice([64, 96, 130]),
              micro_batches=2, branch=lambda s, r, number: number == 0 and r != (other + s) % 4),
        draw_case(rng, 2, "an exception inside no_sync, between two steps", 100, interrupted=True),
    ]


def _local_loss(model, batch, case):
    (inputs, targets), with_branch = batch
    return cross_entropy(model(inputs, with_branch), targets, reduction="mean") / case["micro_batches"]


def train(case, **made):
    """On every rank: a few steps with the learner's class."""
    with by_hand():
        return train_with(case, *made.values())


def train_with(case, make):
    """On every rank: a few steps; the gradients that each of them used, and how much of the earlier ones is left."""
    model, me, used = Net(case["seed"], case["backward_s"]).eval(), dist.get_rank(), {}
    dist.barrier()  # ranks start together, so that pictures compare
    buckets = make(model, case["bucket_bytes"])
    optimizer = torch.optim.SGD(trained(model).values(), lr=RATE)
    sent, last = _noted(), 0
    for step, batches in enumerate(case["batches"]):
        last = len(sent)
        if step == 1 and case["interrupted"]:
            with contextlib.suppress(InterruptedError), buckets.no_sync():
                raise InterruptedError("this exception leaves no_sync")
        for number, batch in enumerate(batches[me], start=1):
            adds_up = number < case["micro_batches"]
            with buckets.no_sync() if adds_up else contextlib.nullcontext():
                _local_loss(model, batch, case).backward()
        buckets.finish()
        used[f"step {step}"] = gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    now = {storage.cdata for storage in sent[last:]}
    held = {storage.cdata for storage in sent[:last] if not storage.expired()} - now
    used[HELD] = len(held) if len(held) > 2 * len(now) else 0  # gloo's threads may drop one late
    return used


def _noted():
    """Weak references to the storages that are handed to calls from now on, a list that grows."""
    noted, issued = [], calls_of_rank.observer.issued

    def note(*facts):
        noted.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors_in(facts[-1][0]))
        issued(*facts)

    calls_of_rank.observer.issued = note
    return noted


def mean_gradients(case, model, step, numbers=slice(None), ranks=None):
    """The mean over the ranks of what each has from the micro-batches ``numbers`` of a step."""
    ranks = range(case.world_size) if ranks is None else ranks
    for rank in ranks:
        for batch in case["batches"][step][rank][numbers]:
            (_local_loss(model, batch, case) / len(ranks)).backward()
    found = gradients(model)
    model.zero_grad()
    return found


def train_spec(case):
    """What ``train`` returns where all is right."""
    model, used = Net(case["seed"]).eval(), {}
    for step in range(len(case["batches"])):
        used[f"step {step}"] = its = mean_gradients(case, model, step)
        with torch.no_grad():
            for name, parameter in trained(model).items():
                parameter -= RATE * its[name]
    return [{**used, HELD: 0}] * case.world_size


# what the recording shows


def plan(case, backwards=True):
    """Parameter names and bytes of each bucket, in order."""
    parts, its = [], list(trained(Net(0)).items())
    for name, parameter in reversed(its) if backwards else its:
        if not parts or parts[-1][1] + parameter.nbytes > case["bucket_bytes"]:
            parts.append(([], 0))
        parts[-1] = [*parts[-1][0], name], parts[-1][1] + parameter.nbytes
    return parts


def sizes(case, backwards=True):
    """Bytes of each bucket, in order."""
    return [size for _, size in plan(case, backwards)]


def calls(recording, rank):
    """Bytes of each all_reduce of a rank, in order."""
    return [e.bytes for e in recording.events[rank] if e.kind == "issue" and base_op(e.op) == "all_reduce"]


def rhythm(recording, rank):
    """What a rank did, a letter each: ``b`` backward of a clock, ``i`` an all_reduce starts, ``w`` it is waited for."""
    letters = []
    for e in recording.events[rank]:
        if e.op == "sleep" and e.phase.get("name") == "backward":
            letters.append("b")
        elif e.kind in ("issue", "wait") and base_op(e.op) == "all_reduce":
            letters.append(e.kind[0])
    return "".join(letters)


def last_passes(case, recording):
    """Of each rank and step, the rhythm of the backward pass that sends, up to its last clock."""
    for rank in recording.ranks:
        its = re.findall(rf"[iw]*(?:b[iw]*){{{CLOCKS}}}", rhythm(recording, rank))
        for one in its[case["micro_batches"] - 1 :: case["micro_batches"]]:
            yield rank, one[: one.rindex("b")]


def planned(case, recording):
    """One call a bucket and step, in the order of backward."""
    right = sizes(case) * len(case["batches"])
    for rank in recording.ranks:
        found = calls(recording, rank)
        if found != right:
            return f"rank {rank} calls all_reduce with {listed(found)} bytes, planned is {listed(right)}"
    barriers = [e for e in recording.events[0] if e.kind == "issue" and base_op(e.op) == "barrier"]
    others = collectives_used(recording) - {"all_reduce", *["barrier"] * (len(barriers) < 2)}  # one is the loop's own
    if others:
        return f"{', '.join(sorted(others))} was called beside the planned all_reduces"
    spent = max(moved(recording, rank) for rank in recording.ranks)
    return f"a rank moves {times(spent, sum(right))}" if spent > sum(right) else None


def starts_early(case, recording):
    """The first bucket leaves while backward still computes (where all gradients are there, and there are more)."""
    late = [rank for rank, before in last_passes(case, recording) if "i" not in before]
    if late and case["everywhere"] and len(plan(case)) > 1:
        return f"on rank {late[0]} the first all_reduce starts after the last layer's backward, so nothing is hidden"
    return None


def waits_late(case, recording):
    """Nobody waits while backward still computes."""
    for rank, before in last_passes(case, recording):
        if "w" in before:
            return f"rank {rank} waits {before.count('w')} times inside backward, which stands still meanwhile"
    return None


def listed(bytes_of_calls):
    """Bytes of calls, in words."""
    more = f" ... ({len(bytes_of_calls)} calls)" if len(bytes_of_calls) > 12 else ""
    return ", ".join(map(str, bytes_of_calls[:12])) + more if bytes_of_calls else "no"
