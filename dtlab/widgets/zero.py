"""Explorer of lessons 04 and 05: what each ZeRO stage holds and sends, on more ranks and with larger batches."""
from dataclasses import replace
from itertools import takewhile

from dtlab.errors import ConfigError
from dtlab.plots.bars import stacked
from dtlab.plots.svg import Svg
from dtlab.plots.twin import twin
from dtlab.simulate.hardware import Hardware
from dtlab.simulate.zero import zero_step, zero_wire_bytes
from dtlab.theory import step_memory, transformer_params, zero_states
from dtlab.theory.units import in_units
from dtlab.widgets.explorer import Control, Explorer, Run, live_ranks
from dtlab.widgets.memory import CONTROLS, MODELS, RECOMPUTE, WORDS, fits, fits_text, gb, limits_gb

_STAGES = (0, 1, 2, 3)
_NAMES = [f"stage {stage}" for stage in _STAGES]
_RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_ALGORITHMS = {"one flat ring": "ring", "nodes of 8 first, then between nodes": None}
_TOPS = {name: (memory_gb, seconds) for name, memory_gb, seconds in zip(MODELS, (200, 200, 500), (2, 4, 12))}
_STATES = ("params", "grads", "optimizer_states")
_WORDS = {**WORDS, "communication": "communication buffers"}
_MOVES = {  # where it opens, what is moved, in words
    "ranks": ({"ranks": 1, "stage": 1}, {"ranks": 1024},
              "Stage 1, drag ranks from 1 to 1,024: model states stop at 4 bytes a parameter. Then switch to stage 3: "
              "they go on down."),
    "batch": ({"ranks": 64, "stage": 3, "flash_attention": True}, {"micro_batch_size": 4},
              "Stage 3, drag sequences at once from 1 to 4: bytes sent stay, computing grows, and the exposed "
              "communication (C) all but goes."),
}  # fmt: skip


def zero(move="ranks"):
    """Explore ZeRO stages on A100s in nodes of 8: memory of a rank, bytes sent, step time and exposed communication.

    Its Run button trains a small GPT on live ranks by each stage and puts marks on what theory says of it.

    Args:
        move: where it opens: ``"ranks"``, stage 1 on one rank; ``"batch"``, stage 3 on 64 ranks with one sequence.

    Raises:
        ConfigError: no such move.
    """
    if move not in [*_MOVES]:
        raise ConfigError(f"zero has no move {move!r}; it has {', '.join(_MOVES)}")
    first, last, words = _MOVES[move]
    controls = {
        "ranks": Control("ranks", _RANKS, text=lambda ranks: f"{ranks:,}"),
        "stage": Control("stage", _STAGES),
        **CONTROLS,
        "collectives": Control("collectives", tuple(_ALGORITHMS), "dropdown"),
    }
    controls = {name: controls.pop(name) for name in [*last, *controls] if name in controls}
    return Explorer(draw_zero, controls, first={"seq_length": 2048, "model": "7.5B", **first}, last=last, move=words,
                    run=Run("Run a small GPT on live ranks", lambda **_: measure(), takes="about 15 s",
                            shows="the lowest picture"))  # fmt: skip


def draw_zero(ranks, stage, seq_length, flash_attention, recompute, micro_batch_size, recipe, model, collectives,
              measured=None):
    """What a rank holds and how a step passes, by stage: ``(Svg, numbers)`` of the chosen one."""
    shape, hardware = replace(MODELS[model], seq_length=seq_length), Hardware.preset(f"{ranks}xA100-80GB")
    choices = {"recompute": RECOMPUTE[recompute], "bucket_bytes": 5 * 10**8}
    rows = [step_memory(shape, micro_batch_size=micro_batch_size, dp_size=ranks, zero_stage=its, optimizer=recipe,
                        flash_attention=flash_attention, **choices) for its in _STAGES]  # fmt: skip
    steps = [zero_step(shape, hardware, num_ranks=ranks, zero_stage=its, batch_size=micro_batch_size, recipe=recipe,
                       algorithm=_ALGORITHMS[collectives], **choices) for its in _STAGES]  # fmt: skip
    sent = [zero_wire_bytes(transformer_params(shape), num_ranks=ranks, zero_stage=its, recipe=recipe)
            for its in _STAGES]
    step, row = steps[stage], rows[stage]
    numbers = {"states": {name: row[name] for name in _STATES}, "activations_bytes": row["activations"],
               "gathered_bytes": row["gathered"], "buckets_bytes": row["buckets"], "fits": fits(sum(row.values())),
               "wire_bytes": sent[stage], "step_time_s": step.step_time_s, "tokens_per_s": step.tokens_per_s,
               "exposed_communication_s": step.exposed_communication_s, "mfu": step.mfu}  # fmt: skip
    pictures = [_memory_picture(rows, stage, _TOPS[model][0]), _time_picture(steps, sent, stage, _TOPS[model][1])]
    titles = ["Memory of a rank; at the right: model states only + all else",
              "A step on A100s; at the right: step time, bytes that a rank sends"]
    if measured:
        pictures.append(measured)
        titles.append("A small GPT on live ranks [MB]: model states predicted (bars) and measured")
    said = (f"Stage {stage} on {ranks:,} x A100: exposed {step.exposed_communication_s:.2f} s, "
            f"{step.tokens_per_s:,.0f} tokens/s, MFU {step.mfu:.0%}")
    text = "\n".join([f"{said}; {fits_text(sum(row.values()))}", *(picture.text for picture in pictures)])
    return Svg(str(twin(pictures, titles, caption=said, size=14)), text), numbers


def _memory_picture(rows, stage, top_gb):
    parts = {name: [row[name] / 1e9 for row in rows] for name in (*_STATES, "activations")}
    parts["communication"] = [(row["gathered"] + row["buckets"]) / 1e9 for row in rows]
    texts = [f"{gb(sum(row[name] for name in _STATES))} + {gb(sum(row[name] for name in row if name not in _STATES))}"
             " GB" for row in rows]  # fmt: skip
    return stacked(_NAMES, parts, texts=texts, x="memory of a rank [GB]", top=top_gb, words=_WORDS, room=15,
                   marked=stage, limits=limits_gb(), said="devices:", title="Memory of a rank by stage",
                   text=f"Model states + all else, by stage: {'; '.join(texts)}")  # fmt: skip


def _time_picture(steps, sent, stage, top_s):
    seconds = [step.seconds(0) for step in steps]
    parts = {kind: [its.get(kind, 0) for its in seconds] for kind in ("forward", "backward", "optimizer")}
    parts["communication"] = [step.exposed_communication_s for step in steps]
    texts = [f"{step.step_time_s:.3g} s, {in_units(its, 'B')}" for step, its in zip(steps, sent)]
    return stacked(_NAMES, parts, texts=texts, x="time [s]", top=top_s, marked=stage, room=15,
                   title="Step time by stage", words={"communication": "communication, exposed"},
                   text=f"Step time and bytes sent, by stage: {'; '.join(texts)}")  # fmt: skip


def measure():
    """Train the lessons' GPT on live ranks by each stage: the picture of the states, predicted and measured.

    In float32 with Adam; measured when backward is over, on the rank that holds most.
    """
    from dtlab.record.calibration import carrier

    with live_ranks() as ranks:
        size, recordings = len(ranks), [ranks.record(_train, stage, carrier(ranks)) for stage in _STAGES]
    num_params = recordings[0].results[0]
    held = [max(map(_states_before_update, recording.events.values())) for recording in recordings]
    sent = [max(sum(event.wire_bytes for event in events if event.phase.get("step") == 1)
                for events in recording.events.values()) for recording in recordings]  # fmt: skip
    states = [zero_states(num_params, dp_size=size, zero_stage=stage, optimizer="adam_fp32") for stage in _STAGES]
    wire = [zero_wire_bytes(num_params, num_ranks=size, zero_stage=stage, recipe="adam_fp32") for stage in _STAGES]
    said = "; ".join(f"{name}: {sum(its.values()) / 1e6:.2f} and {real / 1e6:.2f} MB, sent {out / 1e6:.2f} and "
                     f"{really / 1e6:.2f} MB" for name, its, real, out, really in zip(_NAMES, states, held, wire, sent))
    return stacked(_NAMES, {name: [its[name] / 1e6 for its in states] for name in _STATES}, room=15,
                   texts=[f"{real / 1e6:.1f}, sent {out / 1e6:.1f}" for real, out in zip(held, sent)], words=_WORDS,
                   measured=[its / 1e6 for its in held], top=16 * num_params / 1e6, x="model states of a rank [MB]",
                   title="Model states of a small GPT, predicted and measured",
                   text=f"{num_params:,} parameters on {size} ranks, predicted and measured: {said}.")  # fmt: skip


def _states_before_update(events):
    """Bytes of model states on a rank when its second step's backward is over."""
    from dtlab.simulate.tables import live_bytes

    before = takewhile(lambda event: event.phase.get("updates") != 1, events)
    *_, (_, live) = live_bytes(before)
    return sum(live[name] for name in _STATES)


def _train(stage, device):
    """On a rank: two steps; the number of parameters."""
    import torch

    from dtlab.models import GPT, GPTConfig, cross_entropy
    from dtlab.parallel import DistributedDataParallel, FullyShardedModule, ZeroOptimizer
    from dtlab.record import phase

    model = GPT(GPTConfig(), device=device)
    num_params = sum(parameter.numel() for parameter in model.parameters())
    if stage in (1, 2):
        optimizer = ZeroOptimizer(model, torch.optim.Adam, zero_stage=stage)
    else:
        model = FullyShardedModule(model) if stage else DistributedDataParallel(model)
        optimizer = torch.optim.Adam(model.parameters())
    tokens = torch.arange(128, device=device).unsqueeze(0)
    for step in range(2):
        with phase("step", step=step):
            cross_entropy(model(tokens), tokens, reduction="mean").backward()
            with phase("optimizer", updates=step):
                optimizer.step()
            optimizer.zero_grad()
    return num_params
