"""This machine as ``Hardware``: speed of one rank and of gloo's (NCCL's) calls, measured on live ranks.

**What a replay on it counts, and what not.** An operation of a live recording takes its thread-CPU time, and ranks take
turns on the cores; a sleep takes its time and no core. Python between operators is in no event; what the recorder adds
to ``cpu_s`` of each is about as much, so neither is corrected: over steps of GPTs the sum of ``cpu_s`` was 0.93 to 1.07
of the step's own, over steps whose operators take some ten microseconds 1.3 to 1.6. A dry recording has FLOPs and bytes
only: roofline plus the overhead of an operator, measured on a step that has hardly any work.

A message between processes costs cores too; that is not counted. On GPUs the clock waits for the device, products are
of float32, and each rank counts as having a device of its own.
"""
import statistics
import time

import numpy as np
import torch
import torch.distributed as dist

from dtlab import machine
from dtlab.errors import ConfigError
from dtlab.simulate.hardware import Hardware
from dtlab.theory import Link

_SIZES = {4096: 4, 2**16: 4, 2**20: 2, 2**22: 1, 2**24: 1}  # bytes of the full buffer -> calls in a row
_ROUNDS = 7  # medians over rounds in which everything takes its turn
_DEFAULT_RANKS = 4
_measured = {}  # (number of ranks, device), or None where there were no ranks -> Hardware, once a process


def calibrate(ranks=None):
    """See ``Hardware.calibrate``."""
    from dtlab.ranks import Ranks, current_ranks, launch

    if not isinstance(ranks, Ranks | None):
        raise ConfigError(f"ranks ({ranks!r}) must be what dtlab.launch returned, or nothing: those that are live")
    ranks = ranks or current_ranks()
    if ranks is None:
        if None not in _measured:
            with launch(_DEFAULT_RANKS) as ranks:
                _measured[None] = calibrate(ranks)
        return _measured[None]
    key = len(ranks), ranks._settings["device"]
    if key not in _measured:
        _measured[key] = _measure(ranks, *key)
    return _measured[key]


def carrier(ranks):
    """Where the tensors of measured calls are: on the device, unless gloo carries them."""
    return "cpu" if ranks._settings["backend"] == "gloo" else ranks._settings["device"]


def _measure(ranks, size, device):
    speed = ranks.run(_time_compute, device, ranks=[0], guard=False)[0]
    times = np.max(ranks.run(_time_calls, carrier(ranks), guard=False), axis=0) if size > 1 else []  # the slowest
    terms = {name: _alpha_beta(row) for name, row in zip(_calls(size), times)}
    latency_s, seconds_per_byte = terms.pop("message", (0.0, 1e-12))  # one rank sends nothing
    link = Link("messages", 1 / seconds_per_byte, latency_s, "measured: from rank 0 to rank 1, in memory")
    return Hardware(
        name="this machine", num_devices=size, node_size=size, inside=link, between=link, **speed,
        measured=tuple((name, size, *pair) for name, pair in terms.items()), source="Hardware.calibrate()",
    )  # fmt: skip


def _alpha_beta(seconds):
    """Latency and seconds per byte, by least squares of the relative errors; both above 0."""
    sizes = np.array(list(_SIZES), dtype=float)
    (latency_s, per_byte), *_ = np.linalg.lstsq(np.stack([1 / seconds, sizes / seconds], 1), np.ones(len(sizes)))
    return float(max(latency_s, min(seconds) / 10)), float(max(per_byte, 1e-13))


# On the ranks.

def _clock(device, cpu_clock):
    """A clock that waits for what was started on a GPU."""
    return cpu_clock if device == "cpu" else lambda: torch.cuda.synchronize() or time.perf_counter()


def _median_s(calls, device, times=15):
    """Seconds of each call, taking turns; thread-CPU seconds on a CPU: what else runs there hardly counts."""
    samples, clock = [], _clock(device, time.thread_time)
    for at in range(times + 2):  # two to warm up
        for call in calls:
            began = clock()
            call()
            samples += [clock() - began] if at > 1 else []
    return [max(statistics.median(samples[at::len(calls)]), 1e-9) for at in range(len(calls))]


def _time_compute(device):
    """The fields of Hardware that say how fast this rank computes."""
    shapes = ((512, 192, 768), (256, 256, 256), (512, 512, 512))  # the first: a layer of the lessons' GPT
    pairs = [(torch.ones(m, k, device=device), torch.ones(k, n, device=device)) for m, k, n in shapes]
    x, out = torch.ones(2, 2**22, device=device), torch.empty(2**22, device=device)
    calls = [*(lambda a=a, b=b: a @ b for a, b in pairs), lambda: torch.add(x[0], x[1], out=out)]
    *products_s, sum_s = _median_s(calls, device)
    rates = [2 * m * k * n / seconds for (m, k, n), seconds in zip(shapes, products_s)]
    on_cpu = device == "cpu"  # where a rank's threads take as many cores as they are
    memory = machine.memory_bytes()[0] / dist.get_world_size() if on_cpu else torch.cuda.mem_get_info()[1]
    return {
        "peak_flops": max(rates), "gemm_efficiency": rates[0] / max(rates), "op_overhead_s": _operator_s(device),
        "memory_bandwidth_bytes_per_s": 3 * out.nbytes / sum_s, "memory_efficiency": 1.0,
        "memory_bytes": memory,
        "cores": max(1, machine.usable_cores() // torch.get_num_threads()) if on_cpu else None,
    }  # fmt: skip


def _operator_s(device):
    """Seconds an operator of a training step costs where its work is next to nothing."""
    from dtlab.record import recorder

    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4, device=device) for _ in range(8)])
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(1, 4, device=device)

    def step():
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    (seconds,) = _median_s([step], device)
    _, rows, *_ = recorder.record(step, ())
    return seconds / sum(row[0] == "compute" for row in rows)


def _calls(size):
    """Name -> a call on ``(full buffer, a chunk of it)``; ``"message"`` goes from rank 0 to rank 1."""
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its older name

    def message(full, chunk):
        if dist.get_rank() < 2:
            (dist.recv if dist.get_rank() else dist.send)(full, 1 - dist.get_rank())

    return {
        "message": message,
        "all_reduce": lambda full, chunk: dist.all_reduce(full),
        "all_gather": lambda full, chunk: dist.all_gather(list(full.chunk(size)), chunk),
        "reduce_scatter": lambda full, chunk: reduce_scatter(chunk, full),
        "broadcast": lambda full, chunk: dist.broadcast(full, 0),
        "barrier": lambda full, chunk: dist.barrier(),
    }


def _time_calls(device):
    """Median seconds of each call and size on this rank, an array [calls, sizes]; all take turns in each round."""
    size, clock = dist.get_world_size(), _clock(device, time.perf_counter)
    buffers = [torch.zeros(num_bytes // 4 // size * size, device=device) for num_bytes in _SIZES]
    samples = []
    for _ in range(_ROUNDS):
        samples.append([])
        for call in _calls(size).values():
            for full, times in zip(buffers, _SIZES.values()):
                chunk = torch.zeros(len(full) // size, device=device)
                dist.barrier()
                began = clock()
                for _ in range(times):
                    call(full, chunk)
                samples[-1].append((clock() - began) / times)
    return np.median(samples, axis=0).reshape(-1, len(_SIZES))
