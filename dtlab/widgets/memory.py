"""Explorer of lesson 03: what a device has to hold, by category, and which devices it fits."""
from dataclasses import replace

from dtlab.plots.bars import stacked
from dtlab.simulate.hardware import Hardware
from dtlab.theory import (
    GPT_7_5B,
    ModelShape,
    activation_bytes,
    activation_bytes_per_layer,
    model_state_bytes,
    recipe_bytes,
    recompute_flops_factor,
    transformer_params,
)
from dtlab.theory.units import in_units
from dtlab.widgets.explorer import Control, Explorer, toggle

MODELS = {
    "1.5B (GPT-2 XL)": ModelShape(num_layers=48, hidden_size=1600, num_heads=25, seq_length=1024, vocab_size=50257),
    "7.5B": GPT_7_5B,
    "22B": ModelShape(num_layers=48, hidden_size=6144, num_heads=64, seq_length=2048, vocab_size=51200),
}
DEVICES = ("A100-40GB", "A100-80GB", "H200", "B200")  # of as many different memories
RECOMPUTE = {"nothing": None, "selective": "selective", "full": "full"}  # Subtle: a widget takes None as no choice
WORDS = {"optimizer_states": "optimizer states", "scores": "score matrices"}
_TOP_GB = 600


def memory():
    """Explore the memory of training on one device: model states by recipe, activations by sequence and recomputation.

    In GB of 10**9 bytes; tensors alone, without what an allocator rounds up or a device's libraries need.
    """
    return Explorer(draw_memory, CONTROLS, first={"seq_length": 2048, "model": "7.5B"}, last={"seq_length": 8192},
                    move="Drag the sequence from 2,048 to 8,192: the score matrices (S) grow 16 times, all else of the "
                         "activations (A) 4 times, like the table of positions in the states. Then tick flash "
                         "attention.")  # fmt: skip


CONTROLS = {
    "seq_length": Control("sequence [tokens]", (1024, 2048, 4096, 8192, 16384), text=lambda its: f"{its:,}"),
    "flash_attention": toggle("flash attention: no score matrices"),
    "recompute": Control("recompute in backward", lambda values: [  # without scores selective has nothing to drop
        how for how in RECOMPUTE if how != "selective" or not values["flash_attention"]], "dropdown"),
    "micro_batch_size": Control("sequences at once", (1, 2, 4, 8, 16)),
    "recipe": Control("precision", ("adam_mixed", "adam_mixed_fp32_grads", "adam_mixed_both_grads"), "dropdown",
                      text=lambda name: f"{name}: {sum(recipe_bytes(name).values())} bytes a parameter"),
    "model": Control("model", tuple(MODELS), "dropdown"),
}


def fits(num_bytes):
    """The devices with so much memory, smallest first."""
    return [name for name, limit in zip(DEVICES, limits_gb()) if num_bytes <= 1e9 * limit]


def fits_text(num_bytes):
    """The same in words."""
    return f"fits {', '.join(fits(num_bytes)) or 'none of ' + ', '.join(DEVICES)}"


def gb(num_bytes):
    """GB as read: one digit behind the point, two digits below 10 GB, none above 1,000."""
    return f"{num_bytes / 1e9:.{int(num_bytes < 1e12)}f}" if num_bytes >= 1e10 else f"{num_bytes / 1e9:.2g}"


def limits_gb():
    """Memory of the devices, GB."""
    return [Hardware.preset(f"1x{name}").memory_bytes / 1e9 for name in DEVICES]


def draw_memory(seq_length, flash_attention, recompute, micro_batch_size, recipe, model):
    """What one device holds: ``(Svg, numbers)``, bytes by category in ``states`` and ``activations``."""
    shape = replace(MODELS[model], seq_length=seq_length)
    choices = {"micro_batch_size": micro_batch_size, "recompute": RECOMPUTE[recompute],
               "flash_attention": flash_attention}  # fmt: skip
    states = model_state_bytes(transformer_params(shape), recipe=recipe)
    without, kept = (activation_bytes(shape, **{**choices, "flash_attention": its}) for its in (True, flash_attention))
    activations = {"activations": without, "scores": kept - without}
    layer = activation_bytes_per_layer(seq_length=seq_length, hidden_size=shape.hidden_size, num_heads=shape.num_heads,
                                       **choices)  # fmt: skip
    sums = [sum(states.values()), sum(activations.values())]
    total, more = sum(sums), recompute_flops_factor(shape, RECOMPUTE[recompute]) - 1
    parts = {name: [value / 1e9, 0, 0, value / 1e9] for name, value in states.items()}
    parts["activations"] = [0, without / 1e9, 0, without / 1e9]
    parts["scores"] = [0, 0, (kept - without) / 1e9, (kept - without) / 1e9]
    numbers = {"states": states, "activations": activations, "layer_bytes": layer, "total_bytes": total,
               "fits": fits(total), "extra_flops": more}  # fmt: skip
    said = (f"{model}: {gb(sums[0])} GB of states + {gb(sums[1])} GB of activations ({gb(kept - without)} of them "
            f"scores; a layer {in_units(layer, 'B')}) = {gb(total)} GB; {fits_text(total)}. Recomputation adds "
            f"{more:.0%} FLOPs.")
    picture = stacked(["states", "activations", "scores", "together"], parts, x="memory of one device [GB]",
                      texts=[f"{gb(its)} GB" for its in (sums[0], *activations.values(), total)], top=_TOP_GB,
                      words=WORDS, limits=limits_gb(), said="devices:", marked=3,
                      title="Memory of training on one device", text=said)  # fmt: skip
    return picture, numbers
