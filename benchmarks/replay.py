"""The rows of replay: its times against this machine's clock, its own speed, and that of an explorer's slider."""
import time

from benchmarks.registry import row, times_faster, within
from benchmarks.steps import keep_step, make_ddp_step, make_gpt_step, time_steps

CLOCK = "this machine's clock"
RECORDING = "recording it"
FIGURE = "rebuilt matplotlib figure"


def make_timed_step():
    """On a rank: a step of torch's DDP on layers that sleep 120 ms in all, with 4 MiB of gradients."""
    import torch

    from dtlab.models import TimedLayer

    layers = [TimedLayer(0.01, 0.02, num_params=2**18) for _ in range(4)]
    model, x = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=1), torch.ones(4)

    def step():
        model(x).sum().backward()
        model.zero_grad()

    return step


def one_step():
    """On a rank: what is recorded."""
    import __main__

    __main__.guard_bench_step()


def against_the_clock(bench, num_ranks, make, *args):
    """Replayed step on the calibrated machine, and the median unrecorded step of the slowest rank, in turns."""
    import dtlab
    from dtlab.simulate import Hardware, replay

    samples, times = {"dtlab": [], CLOCK: []}, 5
    with dtlab.launch(num_ranks, guard=False) as ranks:
        hardware = Hardware.calibrate(ranks)
        ranks.run(keep_step, make, *args)
        ranks.run(time_steps, times, False)
        for _ in range(1 if bench.quick else 10):
            samples[CLOCK].append(max(ranks.run(time_steps, times, False)))
            samples["dtlab"].append(replay(ranks.record(one_step), hardware).step_time_s)
    return samples


@row("replayed DDP step of the lessons' GPT (hidden 192, 4 layers), 1 rank", "s", {CLOCK: within(25)})
def replayed_step_1_rank(bench, peers):
    return against_the_clock(bench, 1, make_gpt_step)


@row("replayed DDP step of the lessons' GPT, 2 ranks", "s", {CLOCK: within(25)})
def replayed_step_2_ranks(bench, peers):
    return against_the_clock(bench, 2, make_gpt_step)


@row("replayed DDP step of the lessons' GPT, 4 ranks", "s", {CLOCK: within(25)})
def replayed_step_4_ranks(bench, peers):
    return against_the_clock(bench, 4, make_gpt_step)


@row("replayed DDP step, 6 x Linear(256), 2 ranks", "s", {CLOCK: within(25)})
def replayed_small_step(bench, peers):
    return against_the_clock(bench, 2, make_ddp_step, 256)


@row("replayed DDP step of timed layers, 4 ranks", "s", {CLOCK: within(25)})
def replayed_timed_step(bench, peers):
    return against_the_clock(bench, 4, make_timed_step)


@row("replay() again of the lessons' GPT step, 4 ranks", "s", {RECORDING: None})
def replay_time(bench, peers):
    import dtlab
    from dtlab.simulate import Hardware, replay

    samples, hardware = {"dtlab": [], RECORDING: []}, Hardware.preset("8xA100", cores=2)
    with dtlab.launch(4, guard=False) as ranks:
        ranks.run(keep_step, make_gpt_step)
        ranks.run(time_steps, 2, False)
        for _ in range(1 if bench.quick else 5):
            seconds, recording = timed(ranks.record, one_step)
            samples[RECORDING].append(seconds)
            replay(recording, hardware)
            samples["dtlab"] += [timed(replay, recording, hardware)[0] for _ in range(5)]
    return samples


def slide(explorer, name, other, times):
    """Every value of one of an explorer's sliders in turn; the figure has as many boxes as the picture.

    Each round is at another value of another control, so that nothing was worked out before.
    """
    widget = explorer.view() and explorer._view.inputs[name]
    samples = {"dtlab": [], FIGURE: []}
    for choice in explorer.legal(other)[:times]:
        explorer.set(**{other: choice})
        for value in explorer.legal(name):
            if widget.value != value:
                samples["dtlab"].append(timed(setattr, widget, "value", value)[0])
        num_boxes = explorer.svg.count("<rect")
        samples[FIGURE] += [timed(rebuild_figure, num_boxes)[0] for _ in range(3)]
    return samples


@row("slider of bucket sizes: new value to new picture, kernel side", "s", {FIGURE: times_faster(10)})
def slider(bench, peers):
    from dtlab.widgets.explore import data_parallel

    return slide(data_parallel(), "bucket_bytes", "network", 1 if bench.quick else 5)


@row("slider of ranks, with which all bucket sizes are simulated anew", "s", {FIGURE: times_faster(10)})
def slider_anew(bench, peers):
    from dtlab.widgets.explore import data_parallel

    return slide(data_parallel(), "ranks", "network", 1 if bench.quick else 5)


@row("slider of ranks of the ZeRO stages, with which all four are simulated anew", "s", {FIGURE: times_faster(10)})
def slider_of_stages(bench, peers):
    from dtlab.widgets.explore import zero

    return slide(zero(), "ranks", "seq_length", 1 if bench.quick else 4)


@row("slider of the degree of tensor parallelism, with which all are simulated anew", "s", {FIGURE: times_faster(10)})
def slider_of_shards(bench, peers):
    from dtlab.widgets.explore import tensor_parallel

    return slide(tensor_parallel(), "tp_size", "between", 1 if bench.quick else 5)


@row("slider of context parallelism's ranks, with which all of them are simulated anew", "s",
     {FIGURE: times_faster(10)})  # fmt: skip
def slider_of_sequences(bench, peers):
    from dtlab.widgets.explore import context_parallel

    return slide(context_parallel(), "ranks", "network", 1 if bench.quick else 5)


def rebuild_figure(num_boxes):
    """What a notebook does without widgets: a new figure with boxes on four lanes, as PNG."""
    import io

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3))
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for box in range(num_boxes):
        axes.barh(box % 4, 0.9, left=box // 4, color=f"C{box % 3}", edgecolor="black")
    axes.set(xlabel="time [s]", ylabel="rank")
    figure.savefig(io.BytesIO(), format="png")


def timed(call, *args):
    """``(seconds, value)``."""
    began = time.perf_counter()
    value = call(*args)
    return time.perf_counter() - began, value
