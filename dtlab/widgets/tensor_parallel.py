"""Explorer of lesson 06: who owns which part of a layer's matrices, and what sending between them costs."""
from collections import Counter
from dataclasses import replace

from dtlab.errors import ConfigError
from dtlab.plots.bars import stacked
from dtlab.plots.columns import columns
from dtlab.plots.tensor_parallel import Matrix, shard_map
from dtlab.plots.twin import twin
from dtlab.simulate.hardware import Hardware
from dtlab.simulate.tensor_parallel import MEGATRON_2019, tensor_parallel_layer
from dtlab.theory import GPT_7_5B, LlamaShape, ModelShape, base_op
from dtlab.theory import tensor_parallel as theory
from dtlab.theory.units import in_units
from dtlab.widgets.explorer import Control, Explorer, Run, live_ranks, toggle

_MOST = 32  # ranks
_TOKENS = 96  # of the run's sequence
_MODELS = {
    "7.5B": GPT_7_5B,
    "small GPT, 12 heads": ModelShape(num_layers=4, hidden_size=192, num_heads=12, seq_length=128, vocab_size=256),
    "Llama 3 8B, 8 kv heads": LlamaShape(num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8,
                                         ffn_hidden_size=14336, seq_length=8192, vocab_size=128256),
}  # fmt: skip
_INSIDE = ("PCIe 4", "NVLink 2", "NVLink 3", "NVLink 4", "NVLink 5")
_BETWEEN = ("Ethernet 100", "InfiniBand EDR", "InfiniBand HDR", "InfiniBand NDR", "InfiniBand XDR")
_ALGORITHMS = {"one flat ring": "ring", "nodes first, then between them": None}
_PUBLISHED = {its: MEGATRON_2019[its][-1] / 100 for its in (4, 8)}
_SENT = {  # sequence_parallel -> what f and g do
    False: ("f: forward nothing; backward all_reduce of the gradient of X",
            "g: forward all_reduce of Y; backward nothing"),
    True: ("f: forward all_gather of X; backward all_gather of X again, reduce_scatter of its gradient",
           "g: forward reduce_scatter of Y; backward all_gather of its gradient"),
}  # fmt: skip
_KINDS = ("forward", "backward")


def tensor_parallel():
    """Explore a layer cut by tensor parallelism: shards and their owners, collectives, bytes, share of the time.

    On A100s. Its Run button runs a small GPT's layer on live ranks and puts marks on the bytes that theory foretells.
    """
    controls = {
        "tp_size": Control("tp: ranks that share a layer", _legal, why_not=_why_not),
        "matrices": Control("matrices", ("MLP", "attention"), "dropdown"),
        "sequence_parallel": toggle("sequence parallel: outside, each rank keeps a piece of the tokens"),
        "overlap": toggle("in backward, send while weight gradients are computed"),
        "node_size": Control("devices of a node", (4, 8, 16)),
        "inside": Control("link inside a node", _INSIDE, "dropdown"),
        "between": Control("link between nodes", _BETWEEN, "dropdown"),
        "collectives": Control("collectives", tuple(_ALGORITHMS), "dropdown"),
        "model": Control("model", tuple(_MODELS), "dropdown"),
    }
    first = {"tp_size": 4, "sequence_parallel": False, "node_size": 8, "inside": "NVLink 3",
             "between": "InfiniBand HDR", "model": "7.5B"}  # fmt: skip
    hardware, (few, node, more) = _hardware(8, "NVLink 3", "InfiniBand HDR"), (4, 8, 16)
    shares = [f"{_share(tensor_parallel_layer(GPT_7_5B, hardware, tp_size=its, overlap=False)):.0%}"
              for its in (few, node, more)]  # fmt: skip
    return Explorer(draw_tensor_parallel, controls, first=first, last={"tp_size": more},
                    move=f"Drag tp {few} -> {node} -> {more}, in nodes of 8, in one ring: communication takes "
                         f"{', '.join(shares)} of a layer's time. Then change nodes, links and collectives.",
                    run=Run("Run a small GPT's layer on live ranks", lambda **_: measure(), takes="about 5 s",
                            shows="the lowest picture"))  # fmt: skip


def _hardware(node_size, inside, between):
    return Hardware.preset(f"{_MOST}xA100-80GB", node_size=node_size, inside=inside, between=between)


def _legal(values):
    return [size for size in range(1, _MOST + 1) if _why_not(size, values) is None]


def _why_not(tp_size, values):
    """Why a degree is not offered; None where it is."""
    shape = _MODELS[values["model"]]
    try:
        reason = theory.why_not_tp(shape, tp_size)
    except ConfigError as error:  # no number at all
        return str(error)
    if reason is None and values["sequence_parallel"] and shape.seq_length % tp_size:
        reason = f"seq_length ({shape.seq_length}), which sequence parallelism cuts, does not divide by it"
    return reason


def _share(layer):
    """Exposed communication of a layer's time."""
    return layer.exposed_communication_s / layer.step_time_s


def draw_tensor_parallel(tp_size, matrices, sequence_parallel, overlap, node_size, inside, between, collectives, model,
                         measured=None):
    """A layer on ``tp_size`` A100s: ``(Svg, numbers)``; ``measured`` is what ``measure`` returned."""
    shape, hardware = _MODELS[model], _hardware(node_size, inside, between)
    legal = _legal({"model": model, "sequence_parallel": sequence_parallel})
    layers = [tensor_parallel_layer(shape, hardware, tp_size=its, sequence_parallel=sequence_parallel, overlap=overlap,
                                    algorithm=_ALGORITHMS[collectives]) for its in legal]  # fmt: skip
    layer, choices = layers[legal.index(tp_size)], {"tp_size": tp_size, "sequence_parallel": sequence_parallel}
    calls = theory.tp_layer_collectives(shape, micro_batch_size=1, **choices)
    sent = sum(theory.tp_layer_wire_bytes(shape, micro_batch_size=1, **choices).values())
    numbers = {"step_time_s": layer.step_time_s, "exposed_communication_s": layer.exposed_communication_s,
               "share": _share(layer), "calls": dict(Counter(op for _, op, _ in calls)), "wire_bytes": sent,
               "tensor_bytes": calls[0][2] if calls else 0}  # fmt: skip
    values = {"model": model, "sequence_parallel": sequence_parallel}
    illegal = next(its for its in range(2, _MOST) if its not in legal)
    lines = [*_said(numbers, sequence_parallel, tp_size // theory.num_kv_heads(shape)),
             f"No tp {illegal}: {_why_not(illegal, values)}"]
    pictures = [shard_map(_matrices(shape, tp_size, matrices, sequence_parallel), num_ranks=tp_size,
                          node_size=node_size, signs={1: "f", 4: "g"}, lines=lines, title=f"Shards of {matrices}"),
                _times(legal, layers, tp_size)]
    titles = [f"{matrices}: Y = Z B; dark: rank 0's shards; heavy line: where a node's ranks end",
              _published(legal, layers)]
    if measured:
        pictures.append(measured)
        titles.append("A small GPT's layer on live ranks; (+ n): gradients of norms and biases, once a pass")
    caption = (f"tp {tp_size}: a layer takes {in_units(layer.step_time_s, 's')}, {numbers['share']:.0%} exposed; "
               f"a rank sends {in_units(sent, 'B')}")
    return twin(pictures, titles, caption=caption, size=14), numbers


def _said(numbers, sequence_parallel, kv_sharers):
    """What f and g send, in three lines."""
    if not numbers["calls"]:
        return ["f and g: nothing", "", "One rank has all"]
    counts = " + ".join(f"{count} {op}" for op, count in numbers["calls"].items())
    shared = f"; {kv_sharers} ranks share a kv head" if kv_sharers > 1 else ""
    size = in_units(numbers["tensor_bytes"], "B")
    return [*_SENT[sequence_parallel], f"A layer in all: {counts}, each of {size}{shared}"]


def _published(legal, layers):
    """What is left of a layer's time for computing, beside what was published."""
    ours = {its: f"{1 - _share(layer):.0%}" for its, layer in zip(legal, layers)}
    here = [ours.get(its, "-") for its in _PUBLISHED]
    there = [f"{real:.0%}" for real in _PUBLISHED.values()]
    return (f"Efficiency at tp {', '.join(map(str, _PUBLISHED))}: {', '.join(here)}; Megatron-LM 2019, V100s, weak "
            f"scaling: {', '.join(there)}")


def _matrices(shape, tp_size, matrices, sequence_parallel):
    """The matrices of a pair of products: X, A cut by columns, what is between, B cut by rows, Y."""
    s, h, t, is_llama = shape.seq_length, shape.hidden_size, tp_size, isinstance(shape, LlamaShape)
    if matrices == "MLP":
        inner, kv, ours = shape.ffn_hidden_size, 0, shape.ffn_hidden_size // t
        whole, part = ((2 * inner, 2 * ours) if is_llama else (inner, ours))
        names = ("A: gate, up", "Z = SwiGLU", "B: down") if is_llama else ("A: fc1", "Z = GELU(X A)", "B: fc2")
    else:
        inner, kv = shape.num_heads * shape.head_size, 2 * shape.head_size
        ours, names = inner // t, ("A: q, k, v", "Z: heads", "B: proj")
        whole = inner + kv * theory.num_kv_heads(shape)
        part = ours + kv * max(theory.num_kv_heads(shape) // t, 1)
    outside = ("rows", (s // t, h)) if sequence_parallel else (None, (s, h))
    return [Matrix("X", "activations", (s, h), *outside),
            Matrix(names[0], "params", (h, whole), "columns", (h, part)),
            Matrix(names[1], "activations", (s, inner), "columns", (s, ours)),
            Matrix(names[2], "params", (inner, h), "rows", (ours, h)),
            Matrix("Y", "activations", (s, h), *outside)]  # fmt: skip


def _times(legal, layers, tp_size):
    parts = {kind: [1e3 * layer.seconds(0)[kind] for layer in layers] for kind in _KINDS}
    parts["communication"] = [1e3 * layer.exposed_communication_s for layer in layers]
    names = [f"tp {its}: {_share(layer):.0%}" for its, layer in zip(legal, layers)]
    said = ", ".join(f"{name} of {in_units(layer.step_time_s, 's')}" for name, layer in zip(names, layers))
    return columns(names, parts, x="ranks that share a layer: share of exposed communication", y="a layer [ms]",
                   marked=legal.index(tp_size), size=14, title="Time of a layer by degree",
                   text=f"Exposed communication of a layer's time: {said}.")  # fmt: skip


def measure():
    """Run a layer of the lessons' GPT on live ranks, without and with sequence parallelism: the picture of its bytes.

    In float32, whose elements have four bytes.

    Raises:
        ConfigError: so many ranks cannot share 12 heads.
    """
    from dtlab.record.calibration import carrier

    shape, rows = replace(_MODELS["small GPT, 12 heads"], seq_length=_TOKENS), []
    with live_ranks() as ranks:
        size = len(ranks)
        for how in (False, True):
            choices = {"micro_batch_size": 1, "tp_size": size, "sequence_parallel": how, "bytes_per_element": 4}
            calls, sent = theory.tp_layer_collectives(shape, **choices), theory.tp_layer_wire_bytes(shape, **choices)
            events = ranks.record(_run_layer, how, carrier(ranks)).events[0]
            rows += [(f"{'sp, ' if how else ''}{phase}", sent[phase] / 1e3,
                      *_counted(events, phase, [op for its, op, _ in calls if its == phase])) for phase in _KINDS]
    names, predicted, measured, said = zip(*rows)
    pairs = "; ".join(f"{name}: {its:.1f} and {real:.1f} kB, {words}" for name, its, real, words in rows)
    return stacked(names, {"communication": predicted}, texts=said, measured=measured, room=21,
                   top=1.2 * max(predicted + measured), x="sent by a rank for one layer [kB]",
                   title="Bytes of a layer, predicted and measured",
                   text=f"On {size} ranks, predicted and measured: {pairs}.")  # fmt: skip


def _counted(events, phase, ops):
    """What a rank sent in a phase by these collectives (kB), and how many they and others were, in words."""
    events = [event for event in events if event.kind == "issue" and event.phase.get("name") == phase]
    its_own = [event for event in events if base_op(event.op) in ops]
    beside = f" (+ {len(events) - len(its_own)})" if len(events) > len(its_own) else ""
    return sum(event.wire_bytes for event in its_own) / 1e3, f"calls {len(ops)} and {len(its_own)}{beside}"


def _run_layer(sequence_parallel, device):
    """On a rank: forward and backward of one layer."""
    import torch
    import torch.distributed as dist

    from dtlab.models import GPT, GPTConfig
    from dtlab.parallel.tensor_parallel import apply_tensor_parallel
    from dtlab.record import phase

    config = GPTConfig(num_layers=1, seq_length=_TOKENS)
    layer = apply_tensor_parallel(GPT(config, device=device), sequence_parallel=sequence_parallel).layers[0]
    tokens = _TOKENS // (dist.get_world_size() if sequence_parallel else 1)
    x = torch.ones(1, tokens, config.hidden_size, device=device, requires_grad=True)
    with phase("forward"):
        y = layer(x)
    with phase("backward"):
        y.sum().backward()
