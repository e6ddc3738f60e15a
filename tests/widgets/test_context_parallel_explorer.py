"""The explorer of context parallelism: level bars, Ulysses' limit, numbers of theory and the simulator, its marks."""
import re

import pytest

import dtlab
from dtlab.errors import ConfigError
from dtlab.simulate import Hardware, context_parallel_attention
from dtlab.theory import GPT_7_5B, causal_work, ring_attention_wire_bytes, ulysses_wire_bytes
from dtlab.widgets.context_parallel import _shape


@pytest.fixture
def explorer():
    return dtlab.explore.context_parallel()


def numbers(explorer, name, **degrees):
    return explorer.set(**degrees).values[name]


def test_zigzag_levels_the_bars(explorer):
    assert explorer.values["busiest"] == pytest.approx(1.75) and "1.75 x the mean" in explorer.svg
    by_rank = [float(its) for its in re.search(r"Computing by rank: (.*) ms", repr(explorer)).group(1).split(", ")]
    assert [its / by_rank[0] for its in by_rank] == pytest.approx([1, 3, 5, 7], rel=0.01)
    slow = explorer.values["step_time_s"]
    level = explorer.set(layout="zigzag").values
    assert level["busiest"] == pytest.approx(1) and level["step_time_s"] < 0.6 * slow
    assert len(set(re.search(r"Computing by rank: (.*) ms", repr(explorer)).group(1).split(", "))) == 1


def test_both_layouts_have_one_axis_and_the_strip_says_whose_chunks_are_whose(explorer):
    axis = lambda: re.findall(r'text-anchor="end"[^>]*>([\d.]+)<', explorer.svg)
    before = axis()
    assert before[-2:] == ["80", "100"] and "on ranks 0 1 2 3." in repr(explorer)  # the longest bar has 87 ms
    explorer.set(layout="zigzag")
    assert axis() == before and len(before) > 2 and "on ranks 0 1 2 3 3 2 1 0." in repr(explorer)


def test_a_bar_is_as_long_as_a_rank_computes_and_waits(explorer):
    longest = explorer.values["step_time_s"]
    assert f">{1e3 * longest:.1f}</text>" in explorer.svg
    busy = float(re.search(r"Computing by rank: .* (\S+) ms", repr(explorer)).group(1))
    assert 0.1 < 1e3 * longest - busy < 1e3 * explorer.values["exposed_communication_s"]


def test_ulysses_never_offers_more_ranks_than_divide_the_heads_of_keys_and_values(explorer):
    explorer.set(ranks=16, layout="zigzag")
    assert explorer.legal("ranks") == (2, 4, 8, 16)
    assert explorer.set(method="ulysses").values["ranks"] == 8 and explorer.legal("ranks") == (2, 4, 8)
    assert "Ulysses: 2, 4, 8 ranks; not 16: num_kv_heads (8) must be divisible by cp_size (16)" in explorer.svg
    with pytest.raises(ConfigError, match=r"ranks=16 is not legal here; legal: 2, 4, 8: num_kv_heads \(8\) must be"):
        explorer.set(ranks=16)
    assert explorer.set(num_kv_heads=32, ranks=16).values["ranks"] == 16
    assert "Ulysses: 2, 4, 8, 16 ranks<" in explorer.svg
    assert explorer.set(num_kv_heads=4).values["ranks"] == 4


@pytest.mark.parametrize("degrees", [
    {}, {"layout": "zigzag", "ranks": 16}, {"method": "ulysses", "ranks": 8, "num_kv_heads": 32},
    {"method": "ulysses", "ranks": 2, "seq_length": 131072}, {"seq_length": 8192, "ranks": 8},
])  # fmt: skip
def test_numbers_are_those_of_theory_and_of_the_simulator(explorer, degrees):
    values = explorer.set(**degrees).values
    shape, cp_size = _shape(values["num_kv_heads"], values["seq_length"]), values["ranks"]
    wire_bytes = {"ring": ring_attention_wire_bytes, "ulysses": ulysses_wire_bytes}[values["method"]]
    assert values["wire_bytes"] == sum(wire_bytes(shape, cp_size=cp_size).values())
    layer = context_parallel_attention(shape, Hardware.preset("16xA100"), cp_size=cp_size, layout=values["layout"],
                                       method=values["method"])  # fmt: skip
    assert (values["step_time_s"], values["exposed_communication_s"]) == (
        layer.step_time_s, layer.exposed_communication_s)
    share = max(causal_work(cp_size, values["layout"])) if values["method"] == "ring" else 1 / cp_size
    assert values["busiest"] == pytest.approx(cp_size * share)


def test_it_is_the_7_5b_models_attention():
    shape = _shape(8, 32768)
    for name in ("num_layers", "hidden_size", "num_heads", "head_size", "vocab_size"):
        assert getattr(shape, name) == getattr(GPT_7_5B, name)


def test_a_longer_sequence_hides_more_of_the_ring_and_fewer_heads_send_less(explorer):
    explorer.set(layout="zigzag", ranks=16)
    short, long = (explorer.set(seq_length=its).values for its in (8192, 131072))
    shares = [its["exposed_communication_s"] / its["step_time_s"] for its in (short, long)]
    assert shares[1] < shares[0] / 2
    assert numbers(explorer, "wire_bytes", num_kv_heads=4) == numbers(explorer, "wire_bytes", num_kv_heads=32) / 8


def test_what_a_rank_computes_is_said_for_both_methods(explorer):
    assert "each rank computes its tokens, all heads" in explorer.svg
    explorer.set(method="ulysses", ranks=8)
    assert "each rank computes all tokens of 4 heads, 1 of keys and values" in explorer.svg


@pytest.mark.ranks
@pytest.mark.parametrize("size", [2, 3])
def test_run_counts_pairs_and_bytes_beside_the_predicted_ones(explorer, size):
    with dtlab.launch(size):
        explorer.run()
    said = re.findall(r"([a-z-]+) (\d) ([\d.]+) and ([\d.]+)", repr(explorer))
    assert [(layout, int(rank)) for layout, rank, *_ in said] == [
        (its, rank) for its in ("contiguous", "zig-zag") for rank in range(size)]
    for _, _, predicted, counted in said:
        assert float(counted) == pytest.approx(float(predicted), rel=0.04)
    sends, sent = re.search(r"each sends ([\d.]+) kB predicted, ([\d.]+) kB measured", repr(explorer)).groups()
    assert sends == sent and float(sent) > 0 and "measured" in explorer.set(ranks=8).svg
