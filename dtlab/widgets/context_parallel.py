"""Explorer of lesson 07: a long sequence cut among ranks; who has how much attention to compute, and what is sent."""
import functools

from dtlab.errors import ConfigError
from dtlab.plots.bars import stacked
from dtlab.plots.columns import columns
from dtlab.plots.svg import Svg
from dtlab.plots.tensor_parallel import sequence_strip
from dtlab.plots.twin import twin
from dtlab.simulate.hardware import Hardware
from dtlab.simulate.tensor_parallel import context_parallel_attention
from dtlab.theory import GPT_7_5B, LlamaShape
from dtlab.theory import tensor_parallel as theory
from dtlab.theory.units import in_units
from dtlab.widgets.explorer import Control, Explorer, Run, live_ranks

_RANKS = (2, 4, 8, 16)
_WIRE_BYTES = {"ring": theory.ring_attention_wire_bytes, "ulysses": theory.ulysses_wire_bytes}
_NETWORKS = ("InfiniBand EDR", "InfiniBand HDR", "InfiniBand NDR", "InfiniBand XDR", "Ethernet 100", "Ethernet 400")
_TOKENS, _HEADS, _KV_HEADS, _SIZE = 64, 4, 2, 16  # of the run: tokens a rank, heads, those of keys and values, width


def context_parallel():
    """Explore context parallelism on the 7.5B model's attention: chunks, work, time and bytes of each rank.

    On A100s. Its Run button runs ring attention on live ranks, counts the pairs of tokens that each rank attends to
    and the bytes that it sends, and puts them beside what theory says.
    """
    controls = {
        "layout": Control("layout of the sequence", theory.LAYOUTS, "dropdown", text=_words),
        "method": Control("method", theory.METHODS, "dropdown", text=_words),
        "ranks": Control("ranks", lambda values: [its for its in _RANKS if _why_not(its, values) is None],
                         why_not=_why_not),
        "num_kv_heads": Control(f"heads of keys and values (of {GPT_7_5B.num_heads})", (4, 8, 16, 32)),
        "seq_length": Control("sequence [tokens]", (8192, 32768, 65536, 131072), text=lambda its: f"{its:,}"),
        "network": Control("network between nodes of 8", _NETWORKS, "dropdown"),
    }  # fmt: skip
    first = {"layout": "contiguous", "method": "ring", "ranks": 4, "num_kv_heads": 8, "seq_length": 32768,
             "network": "InfiniBand HDR"}  # fmt: skip
    return Explorer(draw_context_parallel, controls, first=first, last={"layout": "zigzag"},
                    move="Switch contiguous -> zig-zag: uneven bars of attention become level. Then take Ulysses and "
                         "drag ranks to the end: no more than there are heads of keys and values.",
                    run=Run("Run ring attention on live ranks", lambda **_: measure(), takes="about 5 s",
                            shows="the lowest picture"))  # fmt: skip


def _words(value):
    return {"zigzag": "zig-zag", "ulysses": "Ulysses"}.get(value, value)


@functools.lru_cache
def _shape(num_kv_heads, seq_length):
    """The 7.5B model with a longer sequence, and with heads of keys and values that heads of queries share."""
    return LlamaShape(num_layers=GPT_7_5B.num_layers, hidden_size=GPT_7_5B.hidden_size, num_heads=GPT_7_5B.num_heads,
                      num_kv_heads=num_kv_heads, vocab_size=GPT_7_5B.vocab_size, seq_length=seq_length)  # fmt: skip


def _why_not(ranks, values):
    """Why so many ranks are not offered; None: they are."""
    try:
        theory.piece_bytes(_shape(values["num_kv_heads"], values["seq_length"]), cp_size=ranks, method=values["method"])
    except ConfigError as error:
        return str(error)
    return None


@functools.lru_cache(64)  # a ring of 16 has thousands of boxes
def _layer(shape, network, ranks, layout, method):
    return context_parallel_attention(shape, Hardware.preset(f"{max(_RANKS)}xA100-80GB", between=network),
                                      cp_size=ranks, layout=layout, method=method)  # fmt: skip


def draw_context_parallel(layout, method, ranks, num_kv_heads, seq_length, network, measured=None):
    """A layer's attention on ``ranks`` A100s: ``(Svg, numbers)``; ``measured`` is what ``measure`` returned."""
    shape = _shape(num_kv_heads, seq_length)
    layer = _layer(shape, network, ranks, layout, method)
    seconds = [layer.seconds(rank) for rank in layer.ranks]
    parts = {kind: [1e3 * its[kind] for its in seconds] for kind in ("forward", "backward")}
    busy = [sum(both) for both in zip(*parts.values())]
    parts["communication"] = (1e3 * layer.by_rank().exposed_communication_s).tolist()
    numbers = {"busiest": max(busy) * ranks / sum(busy), "step_time_s": layer.step_time_s,
               "exposed_communication_s": layer.exposed_communication_s,
               "wire_bytes": sum(_WIRE_BYTES[method](shape, cp_size=ranks).values())}  # fmt: skip
    said = (f"{_words(layout)}, {_words(method)}, {ranks} ranks: the busiest computes {numbers['busiest']:.2f} x the "
            f"mean; {in_units(layer.step_time_s, 's')}, at most {in_units(layer.exposed_communication_s, 's')} exposed "
            f"on a rank; each sends {in_units(numbers['wire_bytes'], 'B')}")
    times = columns(layer.ranks, parts, x="rank", y="attention [ms]", size=14, title="Attention of a layer by rank",
                    top=sum(busy) * max(theory.causal_work(ranks, "contiguous")),
                    text=f"Computing by rank: {', '.join(f'{its:.3g}' for its in busy)} ms.")  # fmt: skip
    pictures = [sequence_strip(theory.chunks_of(ranks, layout), seq_length=seq_length), times]
    heads = f"all tokens of {shape.num_heads // ranks} heads, {num_kv_heads // ranks} of keys and values"
    has = heads if method == "ulysses" else "its tokens, all heads; keys and values go round"
    titles = [_offered(num_kv_heads, seq_length), f"A layer's attention; each rank computes {has}"]
    if measured:
        pictures.append(measured)
        titles.append("Small tensors on live ranks: predicted and counted")
    text = "\n".join([said, titles[0], *(picture.text for picture in pictures)])
    return Svg(str(twin(pictures, titles, caption=said, size=14)), text), numbers


def _offered(num_kv_heads, seq_length):
    """What Ulysses allows, and why not more."""
    values = {"method": "ulysses", "num_kv_heads": num_kv_heads, "seq_length": seq_length}
    reasons = {its: _why_not(its, values) for its in _RANKS}
    refused = next((f"; not {its}: {reason.partition(':')[0]}" for its, reason in reasons.items() if reason), "")
    return f"Ulysses: {', '.join(str(its) for its in _RANKS if not reasons[its])} ranks{refused}"


def measure():
    """Run ring attention on live ranks in both layouts: the picture of pairs and bytes, predicted and measured.

    Theory's shares are those of long sequences, in which the diagonal counts half.
    """
    from dtlab.record.calibration import carrier

    with live_ranks() as ranks:
        size, recordings = len(ranks), [ranks.record(_attend, layout, carrier(ranks)) for layout in theory.LAYOUTS]
    shape = LlamaShape(num_layers=1, hidden_size=_HEADS * _SIZE, num_heads=_HEADS, num_kv_heads=_KV_HEADS,
                       seq_length=_TOKENS * size, vocab_size=1)  # fmt: skip
    sends = sum(theory.ring_attention_wire_bytes(shape, cp_size=size, bytes_per_element=4).values())
    sent = max(sum(event.wire_bytes for event in events if event.kind == "issue" and event.op == "send")
               for recording in recordings for events in recording.events.values())  # fmt: skip
    names = [f"{_words(layout)} {rank}" for layout in theory.LAYOUTS for rank in range(size)]
    predicted = [size * share for layout in theory.LAYOUTS for share in theory.causal_work(size, layout)]
    counted = [size * pairs / sum(recording.results) for recording in recordings for pairs in recording.results]
    texts = [f"{its:.3g} and {real:.3g}" for its, real in zip(predicted, counted)]
    said = f"each sends {sends / 1e3:.1f} kB predicted, {sent / 1e3:.1f} kB measured"
    return stacked(names, {"forward": predicted}, texts=texts, measured=counted, top=2, room=14,
                   words={"forward": "pairs of tokens, predicted"}, x=f"pairs / mean; {said}",
                   title="Pairs of tokens by rank, predicted and counted",
                   text="Pairs by layout and rank, predicted and counted: "
                        f"{', '.join(map(' '.join, zip(names, texts)))}; {said}.")  # fmt: skip


def _attend(layout, device):
    """On a rank: ring attention of queries that attend to all alike; how many pairs of tokens it took in."""
    import torch
    import torch.distributed as dist

    from dtlab.parallel.context_parallel import ring_attention, sequence_positions

    positions = sequence_positions(_TOKENS * dist.get_world_size(), layout=layout).to(device)
    make = lambda heads: torch.zeros(1, heads, len(positions), _SIZE, device=device)
    q, k, v = make(_HEADS), make(_KV_HEADS), make(_KV_HEADS)
    v[:, :, positions == 0] = 1.0  # seen by all: its share of n tokens is 1 / n
    q, k, v = (its.requires_grad_() for its in (q, k, v))
    y = ring_attention(q, k, v, layout=layout)
    y.sum().backward()
    return (1 / y[0, 0, :, 0]).round().sum().item()
