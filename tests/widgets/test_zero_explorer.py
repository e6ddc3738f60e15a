"""The explorer of ZeRO stages: its numbers are theory's and the simulator's, its two moves, and its marks."""
import re
from dataclasses import replace

import pytest

import dtlab
from dtlab.errors import ConfigError
from dtlab.simulate import Hardware
from dtlab.simulate.zero import zero_step
from dtlab.theory import GPT_7_5B, step_memory, transformer_params, zero_states, zero_wire_elements


@pytest.fixture
def explorer():
    return dtlab.explore.zero()


def states_gb(explorer, **degrees):
    return sum(explorer.set(**degrees).values["states"].values()) / 1e9


def test_stage_1_stops_at_4_bytes_a_parameter_and_stage_3_goes_on_down(explorer):
    four_gb = 4e-9 * transformer_params(GPT_7_5B)
    at_1 = [states_gb(explorer, ranks=ranks) for ranks in explorer.legal("ranks")]
    assert at_1[0] == pytest.approx(119.5, abs=0.05) and at_1 == sorted(at_1, reverse=True)
    assert four_gb < at_1[-1] < 1.004 * four_gb
    assert states_gb(explorer, stage=3) == pytest.approx(at_1[0] / 1024)


def test_a_larger_batch_hides_stage_3_and_sends_no_more():
    explorer = dtlab.explore.zero("batch")
    first = explorer.values
    assert (first["stage"], first["ranks"], first["micro_batch_size"]) == (3, 64, 1)
    last = explorer.set(micro_batch_size=4).values
    assert first["exposed_communication_s"] > 0.6 * first["step_time_s"]
    assert last["exposed_communication_s"] < 0.04 * last["step_time_s"]
    assert last["wire_bytes"] == first["wire_bytes"] == pytest.approx(44.1e9, rel=1e-3)


@pytest.mark.parametrize("degrees", [
    {"ranks": 64}, {"ranks": 8, "stage": 2, "recompute": "full"}, {"ranks": 512, "stage": 3, "flash_attention": True},
    {"ranks": 16, "stage": 0, "seq_length": 4096, "micro_batch_size": 2},
])  # fmt: skip
def test_numbers_are_those_of_theory_and_of_the_simulator(explorer, degrees):
    values = explorer.set(**degrees).values
    shape = replace(GPT_7_5B, seq_length=values["seq_length"])
    recompute = {"nothing": None}.get(values["recompute"], values["recompute"])
    choices = {"zero_stage": values["stage"], "recompute": recompute, "bucket_bytes": 5 * 10**8}
    rows = step_memory(shape, dp_size=values["ranks"], micro_batch_size=values["micro_batch_size"],
                       flash_attention=values["flash_attention"], **choices)
    assert values["states"] == zero_states(transformer_params(shape), dp_size=values["ranks"],
                                           zero_stage=values["stage"])  # fmt: skip
    assert [values[f"{name}_bytes"] for name in ("activations", "gathered", "buckets")] == [
        rows[name] for name in ("activations", "gathered", "buckets")]
    assert values["wire_bytes"] == pytest.approx(2 * zero_wire_elements(
        transformer_params(shape), dp_size=values["ranks"], zero_stage=values["stage"]))
    step = zero_step(shape, Hardware.preset(f"{values['ranks']}xA100-80GB"), num_ranks=values["ranks"],
                     batch_size=values["micro_batch_size"], **choices)
    for name in ("step_time_s", "exposed_communication_s", "tokens_per_s", "mfu"):
        assert values[name] == pytest.approx(getattr(step, name))


def test_what_the_picture_says_of_each_stage_is_zeros_table(explorer):
    explorer.set(ranks=64)
    assert re.findall(r">([\d.]+) \+ [\d.]+ GB<", explorer.svg) == ["119.5", "31.3", "16.6", "1.9"]
    assert repr(explorer).startswith("Stage 1 on 64 x A100: exposed 0.84 s")
    assert "fits A100-80GB, H200, B200" in repr(explorer) and explorer.values["fits"] == ["A100-80GB", "H200", "B200"]


def test_a_model_with_32_bit_gradients_sends_more(explorer):
    sent = [explorer.set(ranks=64, stage=3, recipe=name).values["wire_bytes"]
            for name in ("adam_mixed", "adam_mixed_fp32_grads")]
    assert sent[1] == pytest.approx(sent[0] * 4 / 3)


def test_collectives_that_know_the_nodes_expose_less(explorer):
    flat, by_node = (explorer.set(ranks=64, stage=3, collectives=name).values["exposed_communication_s"]
                     for name in explorer.legal("collectives"))
    assert by_node < flat / 10


def test_a_move_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="zero has no move 'tokens'; it has ranks, batch"):
        dtlab.explore.zero("tokens")


@pytest.mark.ranks
def test_run_puts_marks_on_the_predicted_bars(explorer):
    with dtlab.launch(3):
        explorer.run()
    said = re.findall(r"stage (\d): ([\d.]+) and ([\d.]+) MB, sent ([\d.]+) and ([\d.]+) MB", repr(explorer))
    assert [int(stage) for stage, *_ in said] == [0, 1, 2, 3]
    for _, *numbers in said:
        predicted, measured, sends, sent = map(float, numbers)
        assert measured == pytest.approx(predicted, rel=0.01) and sent == pytest.approx(sends, rel=0.01)
    assert explorer.svg.count(">measured<") == 1 and "measured" in explorer.set(ranks=8).svg
