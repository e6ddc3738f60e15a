"""Small recordings written by hand, with bytes, peaks and times known."""
from dtlab.simulate import Event, Recording

GROUP = "0-1#0:default_pg"


def alloc(at, storage, size, category=""):
    return Event("alloc", "", at, at, storage=storage, bytes=size, category=category)


def free(at, storage):
    return Event("free", "", at, at, storage=storage)


def compute(start, end, op="aten.mm", flops=0, **phase):
    return Event("compute", op, start, end, flops=flops, phase=phase)


def phase(start, end, name, **details):
    return Event("phase", name, start, end, phase={"name": name, **details})


def call(at, until, op, seq=0, wait_from=None, **fields):
    """An issue that takes no time, and the wait that ends it."""
    size = {name: fields.pop(name) for name in ("bytes", "wire_bytes") if name in fields}
    issue = Event("issue", op, at, at, seq=seq, **size, **fields)
    return [issue, Event("wait", op, at if wait_from is None else wait_from, until, seq=seq, **fields)]


def two_ranks():
    """Rank 0 and 1: forward, backward with one all_reduce in flight, a message from 0 to 1.

    time   0    1    2    3    4    5    6
    rank 0 [ F0 ][    B0       ]wait[ O ]
    rank 1      [ F0 ][  B0    ]wait[ O ]
    """
    events = {}
    for rank in (0, 1):
        message = {"op": "send" if rank == 0 else "recv", "peer": 1 - rank, "bytes": 100}
        events[rank] = [
            alloc(0.0, 1, 1000, "params"),
            *([] if rank == 0 else call(0.0, 1.0, **message, wire_bytes=0)),
            alloc(0.5 + rank, 2, 300, "activations"),
            compute(0.25 + rank, 0.75 + rank, flops=60, name="forward", micro_batch=0),
            phase(0.0 + rank, 1.0 + rank, "forward", micro_batch=0),
            *(call(1.0, 1.0, **message, wire_bytes=100) if rank == 0 else []),
            alloc(2.0, 3, 1000, "grads"),
            compute(2.0, 3.0, flops=120, name="backward", micro_batch=0),
            free(3.0, 2),
            *call(3.0, 5.0, "all_reduce", wait_from=4.0, group=GROUP, bytes=1000, wire_bytes=1000.0)[:1],
            phase(1.0 + rank, 4.0, "backward", micro_batch=0),
            *call(3.0, 5.0, "all_reduce", wait_from=4.0, group=GROUP, bytes=1000, wire_bytes=1000.0)[1:],
            alloc(5.0, 4, 2000, "optimizer_states"),
            phase(5.0, 6.0, "optimizer"),
        ]
    return Recording(events, results=["a", "b"], meta={"dry": False, "note": "by hand"})


def one_f_one_b(num_stages=4, num_micro_batches=8, forward_s=1e-3, backward_s=2e-3):
    """One rank per stage: warm-up forwards, then one forward and one backward in turn; a wait before each message."""
    p, m = num_stages, num_micro_batches
    events, clock, done, orders = {s: [] for s in range(p)}, [0.0] * p, {}, []
    for stage in range(p):
        warmup = min(p - stage - 1, m)
        steady = [action for i in range(m - warmup) for action in (("forward", warmup + i), ("backward", i))]
        orders.append([("forward", i) for i in range(warmup)] + steady
                      + [("backward", i) for i in range(m - warmup, m)])
    while any(orders):
        for stage in range(p):
            while orders[stage]:
                name, i = orders[stage][0]
                source, target = (stage - 1, stage + 1) if name == "forward" else (stage + 1, stage - 1)
                if 0 <= source < p and (name, source, i) not in done:
                    break
                details = {"name": name, "stage": stage, "micro_batch": i}
                start = max(clock[stage], done.get((name, source, i), 0.0))
                if 0 <= source < p:
                    events[stage] += call(clock[stage], start, "irecv", i, peer=source, bytes=4096, phase=details)
                clock[stage] = end = start + (forward_s if name == "forward" else backward_s)
                events[stage] += [compute(start, end, flops=10, **details), phase(start, end, **details)]
                if 0 <= target < p:
                    events[stage] += call(end, end, "isend", i, peer=target, bytes=4096, wire_bytes=4096, phase=details)
                done[name, stage, i] = end
                orders[stage].pop(0)
    return Recording(events)
