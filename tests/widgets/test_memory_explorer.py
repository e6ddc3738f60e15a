"""The explorer of memory: its numbers are theory's, its move, and what it offers."""
from dataclasses import replace

import pytest

import dtlab
from dtlab.errors import ConfigError
from dtlab.plots.svg import COLOURS
from dtlab.simulate import Hardware
from dtlab.theory import (
    GPT_7_5B,
    activation_bytes,
    activation_bytes_per_layer,
    batch_flops,
    model_state_bytes,
    transformer_params,
)
from dtlab.widgets.memory import DEVICES, fits, limits_gb


@pytest.fixture
def explorer():
    return dtlab.explore.memory()


def activations(explorer, **degrees):
    return explorer.set(**degrees).values["activations"]


@pytest.mark.parametrize("degrees", [
    {}, {"seq_length": 8192, "micro_batch_size": 4}, {"flash_attention": True}, {"recompute": "selective"},
    {"recompute": "full"}, {"flash_attention": True, "recompute": "full", "recipe": "adam_mixed_both_grads"},
])  # fmt: skip
def test_numbers_are_those_of_theory(explorer, degrees):
    values = explorer.set(**degrees).values
    shape = replace(GPT_7_5B, seq_length=values["seq_length"])
    recompute = {"nothing": None}.get(values["recompute"], values["recompute"])
    choices = {**{name: values[name] for name in ("micro_batch_size", "flash_attention")}, "recompute": recompute}
    states = model_state_bytes(transformer_params(shape), recipe=values["recipe"])
    assert values["states"] == states
    assert sum(values["activations"].values()) == activation_bytes(shape, **choices)
    assert values["total_bytes"] == sum(states.values()) + activation_bytes(shape, **choices)
    assert values["layer_bytes"] == activation_bytes_per_layer(
        seq_length=shape.seq_length, hidden_size=4096, num_heads=32, **choices)
    more = batch_flops(shape, batch_size=1, recompute=recompute) / batch_flops(shape, batch_size=1) - 1
    assert values["extra_flops"] == pytest.approx(more)


def test_score_matrices_grow_with_the_square_of_the_sequence_and_go_with_flash_attention(explorer):
    short, long = activations(explorer), activations(explorer, seq_length=8192)
    assert long["scores"] == 16 * short["scores"] and long["activations"] == pytest.approx(4 * short["activations"])
    assert activations(explorer, flash_attention=True) == {"activations": long["activations"], "scores": 0}


def test_the_move_and_its_ends_are_the_curriculums(explorer):
    assert explorer.values["layer_bytes"] == 912 * 2**20 and explorer.values["fits"] == ["B200"]
    assert "119.5 GB of states" in repr(explorer)
    assert explorer.set(seq_length=8192).values["layer_bytes"] == 11328 * 2**20 and explorer.values["fits"] == []
    assert "fits none of A100-40GB, A100-80GB, H200, B200" in repr(explorer)


def test_scores_and_all_else_have_a_number_and_a_colour_of_their_own_however_narrow_they_are(explorer):
    assert all(f">{said}<" in explorer.svg for said in ("activations", "10.7 GB", "scores", "24.2 GB"))
    assert COLOURS["scores"] not in (COLOURS["activations"], COLOURS["optimizer_states"])
    assert "34.9 GB of activations (24.2 of them scores; a layer 956 MB)" in repr(explorer)


def test_selective_recomputation_is_not_offered_where_there_are_no_scores(explorer):
    assert explorer.legal("recompute") == ("nothing", "selective", "full")
    assert explorer.set(recompute="selective").set(flash_attention=True).values["recompute"] == "full"
    with pytest.raises(ConfigError, match=r"recompute='selective' is not legal here; legal: 'nothing', 'full'"):
        explorer.set(recompute="selective")


def test_recipes_say_their_bytes_a_parameter(explorer):
    assert explorer.set(recipe="adam_mixed_fp32_grads: 18 bytes a parameter").values["states"]["grads"] == (
        4 * transformer_params(GPT_7_5B))


def test_devices_are_those_of_the_presets_by_growing_memory():
    limits = limits_gb()
    assert limits == sorted(limits) == [Hardware.preset(f"1x{name}").memory_bytes / 1e9 for name in DEVICES]
    assert fits(80e9) == ["A100-80GB", "H200", "B200"] and fits(80e9 + 1) == ["H200", "B200"]
