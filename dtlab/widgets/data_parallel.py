"""Explorer of lesson 02: how large a bucket of gradients should be, and what of the communication still shows."""
import statistics
import time

import numpy as np

from dtlab.plots.columns import columns
from dtlab.plots.timeline import timeline
from dtlab.plots.twin import twin
from dtlab.simulate.data_parallel import (
    Gradient,
    bucketed_times_s,
    data_parallel_step,
    data_parallel_times_s,
)
from dtlab.simulate.hardware import Hardware
from dtlab.theory import GPT_7_5B, transformer_params
from dtlab.widgets.explorer import Control, Explorer, Run, live_ranks, toggle

_WHOLE = 10**12  # bytes: above any model here
_BUCKETS = {1: "1 param.", 25 * 10**6: "25 MB", 10**8: "100 MB", 25 * 10**7: "250 MB", 5 * 10**8: "500 MB",
            10**9: "1 GB", 2 * 10**9: "2 GB", 4 * 10**9: "4 GB", _WHOLE: "model"}  # fmt: skip
_RANKS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_NETWORKS = ("InfiniBand EDR", "InfiniBand HDR", "InfiniBand NDR", "InfiniBand XDR", "Ethernet 100", "Ethernet 400")
_LAYERS, _FORWARD_S, _BACKWARD_S, _PAYLOAD = 8, 0.005, 0.02, 2**19  # timed layers of 2 MiB, in float32
# number of buckets -> layers in each, overlap
_TIMED = {"8, after backward": (1, False), "8": (1, True), "4": (2, True), "2": (4, True), "1": (8, True)}
_COMPUTE = ("forward", "backward")


def data_parallel():
    """Explore the bucket size of data-parallel training on the 7.5B model: timeline, exposed communication, tokens/s.

    Its Run button trains timed layers on live ranks of this machine and puts marks on what the same simulation says
    of them, with this machine's measured all_reduces.
    """
    controls = {
        "bucket_bytes": Control("bucket", tuple(_BUCKETS), text=_bucket),
        "overlap": toggle("send while backward still runs"),
        "ranks": Control("ranks", _RANKS, text=lambda ranks: f"{ranks:,}"),
        "network": Control("network between nodes of 8", _NETWORKS, "dropdown"),
        "sequences": Control("sequences a rank", (1, 2, 4, 8)),
    }
    first = {"bucket_bytes": 1, "overlap": True, "ranks": 64, "network": "InfiniBand HDR", "sequences": 4}
    return Explorer(draw_data_parallel, controls, first=first, last={"bucket_bytes": _WHOLE},
                    move="Drag the bucket from one parameter to the whole model: the exposed communication (hatched "
                         "in the timeline, green in the columns) shrinks, then comes back.",
                    run=Run("Run timed layers on live ranks", lambda **_: measure(), takes="about 10 s",
                            shows="the lowest picture"))  # fmt: skip


def draw_data_parallel(bucket_bytes, overlap, ranks, network, sequences, measured=None):
    """A step of the 7.5B model on A100s: ``(Svg, numbers)``; ``measured`` is what ``measure`` returned."""
    hardware = Hardware.preset(f"{ranks}xA100-80GB", between=network)
    choices = {"num_ranks": ranks, "batch_size": sequences, "overlap": overlap}
    step = data_parallel_step(GPT_7_5B, hardware, bucket_bytes=bucket_bytes, **choices)
    totals = data_parallel_times_s(GPT_7_5B, hardware, bucket_bytes=list(_BUCKETS), **choices)
    parts = {kind: [seconds] * len(totals) for kind, seconds in step.seconds(0).items() if kind in _COMPUTE}
    compute_s = sum(seconds[0] for seconds in parts.values())
    numbers = {"step_time_s": step.step_time_s, "exposed_communication_s": step.exposed_communication_s,
               "tokens_per_s": step.tokens_per_s, "mfu": step.mfu, "compute_s": compute_s}  # fmt: skip
    sizes = columns(list(_BUCKETS.values()), {**parts, "communication": [total - compute_s for total in totals]},
                    x="bucket", y="step [s]", marked=list(_BUCKETS).index(bucket_bytes),
                    title="Step time by bucket size",
                    text="By bucket: " + ", ".join(f"{name} {total:.3g} s" for name, total in
                                                   zip(_BUCKETS.values(), totals)))  # fmt: skip
    pictures = [timeline(step, until_s=max(step.step_time_s, *totals)), sizes]
    calls = sum(box.kind == "communication" for box in step.boxes)
    titles = [f"One rank, all alike; all_reduces a step: {calls}; hatched: exposed communication", "By bucket size:"]
    if measured:
        pictures.append(measured)
        titles.append("Timed layers on ranks of this machine; columns: predicted")
    return twin(pictures, titles, caption=_said(numbers, ranks)), numbers


def _said(numbers, ranks):
    return (f"{transformer_params(GPT_7_5B) / 1e9:.2g}B, {ranks:,} A100: step {numbers['step_time_s']:.3g} s, "
            f"exposed {numbers['exposed_communication_s']:.3g} s, {numbers['tokens_per_s']:,.0f} tokens/s, "
            f"MFU {numbers['mfu']:.0%}")


def measure():
    """Train timed layers on live ranks with several buckets: the picture of what was predicted and measured.

    The layers sleep, so ranks do not fight for cores, and the messages are real.
    """
    from dtlab.record.calibration import carrier

    with live_ranks() as ranks:
        sizes = sorted({4 * _PAYLOAD * layers for layers, _ in _TIMED.values()})
        costs_s = np.max(ranks.run(_time_all_reduces, sizes, carrier(ranks), guard=False), axis=0)  # the slowest rank's
        measured = [max(ranks.run(_time_step, layers, overlap, carrier(ranks), guard=False))
                    for layers, overlap in _TIMED.values()]
    all_reduce_s = lambda its: np.interp(its, sizes, costs_s)
    gradients = [Gradient(4 * _PAYLOAD, _BACKWARD_S)] * _LAYERS
    predicted = [bucketed_times_s(_LAYERS * _FORWARD_S, gradients, all_reduce_s, overlap=overlap,
                                  bucket_bytes=[4 * _PAYLOAD * layers])[0] for layers, overlap in _TIMED.values()]
    forward_ms, backward_ms = 1e3 * _LAYERS * _FORWARD_S, 1e3 * _LAYERS * _BACKWARD_S
    exposed_ms = [1e3 * seconds - forward_ms - backward_ms for seconds in predicted]
    measured_ms = [1e3 * seconds for seconds in measured]
    said = ", ".join(f"{name}: {forward_ms + backward_ms + exposed:.0f} and {ms:.0f} ms"
                     for name, exposed, ms in zip(_TIMED, exposed_ms, measured_ms))
    parts = {"forward": [forward_ms] * len(_TIMED), "backward": [backward_ms] * len(_TIMED),
             "communication": exposed_ms}  # fmt: skip
    return columns(list(_TIMED), parts, x="buckets a step", y="step [ms]", measured=measured_ms,
                   title="Timed layers, predicted and measured",
                   text=f"On {len(ranks)} ranks by number of buckets, predicted and measured: {said}.")  # fmt: skip


def _time_all_reduces(sizes, device, rounds=5):
    """On a rank: the median seconds of an all_reduce of each size (bytes); all take turns in each round."""
    import torch
    import torch.distributed as dist

    buffers = [torch.zeros(size // 4, device=device) for size in sizes]
    seconds = []
    for _ in range(rounds + 1):  # the first warms up
        for buffer in buffers:
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(buffer)
            buffer[0].item()  # waits for a GPU
            seconds.append(time.perf_counter() - began)
    return [statistics.median(seconds[at + len(sizes)::len(sizes)]) for at in range(len(sizes))]


def _time_step(layers_a_bucket, overlap, device, steps=3):
    """On a rank: the median seconds of a step of timed layers; it leaves out the first, which warms up."""
    import torch
    import torch.distributed as dist

    from dtlab.models import TimedLayer
    from dtlab.parallel import DistributedDataParallel

    layers = [TimedLayer(_FORWARD_S, _BACKWARD_S, num_params=_PAYLOAD, device=device) for _ in range(_LAYERS)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_bytes=4 * _PAYLOAD * layers_a_bucket,
                                    overlap=overlap)  # fmt: skip
    seconds = []
    for _ in range(steps):
        dist.barrier()
        began = time.perf_counter()
        model(torch.ones(1, device=device)).sum().backward()
        layers[0].payload.grad[0].item()  # waits for a GPU
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _bucket(size):
    return {1: "one parameter", _WHOLE: "the whole model"}.get(size, _BUCKETS[size])
