"""The explorer of tensor parallelism: its numbers are theory's and the simulator's, only legal degrees, its marks."""
import contextlib
import re

import pytest

import dtlab
from dtlab.errors import ConfigError
from dtlab.simulate import Hardware, tensor_parallel_layer
from dtlab.theory import GPT_7_5B
from dtlab.theory.tensor_parallel import legal_tp_sizes, tp_layer_collectives, tp_layer_params, tp_layer_wire_bytes
from dtlab.widgets.tensor_parallel import _MODELS, _matrices

SMALL, GROUPED = "small GPT, 12 heads", "Llama 3 8B, 8 kv heads"


@pytest.fixture
def explorer():
    return dtlab.explore.tensor_parallel()


def share(explorer, **degrees):
    return explorer.set(**degrees).values["share"]


def test_dragging_tp_over_the_end_of_a_node_makes_communication_most_of_a_layers_time(explorer):
    assert explorer.values["tp_size"] == 4 and not explorer.values["overlap"]
    few, node, more = (share(explorer, tp_size=its) for its in (4, 8, 16))
    assert few < 0.15 < node < 0.3 and more > 0.8
    assert f"{few:.0%}, {node:.0%}, {more:.0%} of a layer's time" in explorer.move
    assert share(explorer, node_size=16) < 0.6 * more  # all of them in one node


def test_knowing_the_nodes_overlap_and_faster_links_expose_less(explorer):
    flat = share(explorer, tp_size=16)
    assert share(explorer, between="InfiniBand XDR") < flat
    assert share(explorer, between="InfiniBand HDR", collectives="nodes first, then between them") < flat
    assert share(explorer, tp_size=8, overlap=True) < share(explorer, overlap=False)
    assert share(explorer, inside="PCIe 4") > share(explorer, inside="NVLink 4")


@pytest.mark.parametrize("degrees", [
    {"tp_size": 8}, {"tp_size": 16, "sequence_parallel": True, "overlap": True}, {"tp_size": 1},
    {"tp_size": 6, "model": SMALL}, {"tp_size": 32, "model": GROUPED, "node_size": 4},
])  # fmt: skip
def test_numbers_are_those_of_theory_and_of_the_simulator(explorer, degrees):
    values = explorer.set(**degrees).values
    shape, how = _MODELS[values["model"]], {name: values[name] for name in ("tp_size", "sequence_parallel")}
    calls = tp_layer_collectives(shape, micro_batch_size=1, **how)
    assert sum(values["calls"].values()) == len(calls) and {size for *_, size in calls} <= {values["tensor_bytes"]}
    assert values["wire_bytes"] == sum(tp_layer_wire_bytes(shape, micro_batch_size=1, **how).values())
    hardware = Hardware.preset("32xA100", node_size=values["node_size"])
    layer = tensor_parallel_layer(shape, hardware, overlap=values["overlap"], algorithm="ring", **how)
    assert (values["step_time_s"], values["exposed_communication_s"]) == (
        layer.step_time_s, layer.exposed_communication_s)


@pytest.mark.parametrize("model, tp_size", [
    (name, its) for name, shape in _MODELS.items() for its in legal_tp_sizes(shape)])  # fmt: skip
def test_shards_have_all_the_matrix_elements_that_theory_counts_on_a_rank(model, tp_size):
    shape = _MODELS[model]
    params = [its for name in ("attention", "MLP") for its in _matrices(shape, tp_size, name, False)
              if its.kind == "params"]  # fmt: skip
    rows_and_columns = sum(matrix.part[0] * matrix.part[1] for matrix in params)
    biases = 0 if model == GROUPED else sum(matrix.part[1] for matrix in params) + 2 * shape.hidden_size
    assert rows_and_columns + biases == tp_layer_params(shape, tp_size=tp_size) - 2 * shape.hidden_size  # the norms


def test_neighbours_of_a_product_fit_each_other():
    for name in ("attention", "MLP"):
        x, a, z, b, y = _matrices(GPT_7_5B, 8, name, False)
        assert x.part[1] == a.part[0] and z.part[1] == b.part[0] and y.part == (z.part[0], b.part[1])
        assert name == "attention" or z.part == (x.part[0], a.part[1])
        cut = _matrices(GPT_7_5B, 8, name, True)
        assert [its.part for its in (cut[0], cut[4])] == [(2048 // 8, 4096)] * 2 and cut[1:4] == [a, z, b]
        assert [its.cut for its in (x, a, z, b, y)] == [None, "columns", "columns", "rows", None]
        assert cut[0].cut == cut[4].cut == "rows"


def test_f_stands_before_a_and_g_behind_b_nodes_end_in_heavy_lines_and_the_degree_is_marked(explorer):
    heavy = lambda **degrees: explorer.set(**degrees).svg.count('stroke-width="3"')
    assert heavy(tp_size=16, node_size=4) - heavy(node_size=8) == 3 * (3 - 1)  # of A, Z and B
    bold = re.findall(r'<text x="([\d.]+)"[^>]*font-weight="bold"[^>]*>([^<]*)<', explorer.svg)
    found = {words: float(x) for x, words in bold}
    names = ["X", "f", "A: fc1", "Z = GELU(X A)", "B: fc2", "g", "Y"]
    assert [found[name] for name in names] == sorted(found[name] for name in names)
    assert [words for words in found if re.fullmatch(r"tp \d+: \d+%", words)] == ["tp 16: 86%"]


def test_only_legal_degrees_are_offered_and_a_line_says_why(explorer):
    assert explorer.legal("tp_size") == legal_tp_sizes(GPT_7_5B) == (1, 2, 4, 8, 16, 32)
    assert "No tp 3: num_heads (32) does not divide by tp_size (3); legal are 1, 2, 4, 8, 16, 32" in (
        explorer.svg)
    assert explorer.set(model=SMALL).legal("tp_size") == (1, 2, 3, 4, 6, 12)
    assert "No tp 5: num_heads (12)" in explorer.svg
    assert explorer.set(sequence_parallel=True).legal("tp_size") == (1, 2, 4)  # of 128 tokens
    assert "No tp 3: seq_length (128), which sequence parallelism cuts" in explorer.svg


@pytest.mark.parametrize("degrees, words", [
    ({"tp_size": 8}, r"tp_size=8 is not legal here; legal: 1, 2, 3, 4, 6, 12: num_heads \(12\) does not divide by"),
    ({"tp_size": 3, "sequence_parallel": True}, r"legal: 1, 2, 4: seq_length \(128\), which sequence parallelism cuts"),
    ({"tp_size": "many"}, "tp_size='many' is not legal here; legal: 1, 2, 3, 4, 6, 12: .* must be a whole number"),
    ({"tp_size": 0}, "tp_size=0 is not legal here; legal: 1, 2, 3, 4, 6, 12: .* must be at least 1"),
])  # fmt: skip
def test_an_illegal_degree_is_refused_with_the_legal_ones_and_the_reason(explorer, degrees, words):
    explorer.set(model=SMALL, tp_size=4)
    with pytest.raises(ConfigError, match=words):
        explorer.set(**degrees)
    assert explorer.values["tp_size"] == 4


def test_what_f_and_g_send_follows_sequence_parallelism(explorer):
    assert "f: forward nothing; backward all_reduce" in explorer.svg and "4 all_reduce, each of 16.8 MB" in explorer.svg
    said = explorer.set(sequence_parallel=True).svg
    assert "6 all_gather + 4 reduce_scatter, each of 16.8 MB" in said
    ops = re.findall("all_gather|reduce_scatter", " ".join(re.findall(r">[fg]: (.*?)<", said)))
    assert [2 * ops.count(op) for op in ("all_gather", "reduce_scatter")] == [6, 4]  # of attention and of the MLP
    assert "f and g: nothing" in explorer.set(tp_size=1).svg


def test_more_ranks_than_heads_of_keys_and_values_share_them(explorer):
    explorer.set(model=GROUPED, matrices="attention")
    assert "share a kv head" not in explorer.set(tp_size=8).svg
    assert "; 2 ranks share a kv head" in explorer.set(tp_size=16).svg


def test_the_published_efficiency_stands_beside_ours(explorer):
    ours = [f"{1 - share(explorer, tp_size=its):.0%}" for its in (4, 8)]
    assert f"Efficiency at tp 4, 8: {', '.join(ours)}; Megatron-LM 2019, V100s, weak scaling: 82%, 77%" in explorer.svg
    assert re.search(r"tp 4, 8: \d+%, -;", explorer.set(model=SMALL).svg)


def test_a_run_on_ranks_that_cannot_share_the_heads_is_refused_before_it_starts(explorer, monkeypatch):
    monkeypatch.setattr("dtlab.widgets.tensor_parallel.live_ranks", lambda: contextlib.nullcontext(range(5)))
    with pytest.raises(ConfigError, match=r"num_heads \(12\) does not divide by tp_size \(5\); legal are 1, 2, 3, 4"):
        explorer.run()


@pytest.mark.ranks
@pytest.mark.parametrize("size", [2, 3])
def test_run_puts_measured_bytes_and_calls_on_the_predicted_ones(explorer, size):
    with dtlab.launch(size):
        explorer.run()
    said = re.findall(r"((?:sp, )?\w+): ([\d.]+) and ([\d.]+) kB, calls (\d+) and (\d+)", repr(explorer))
    assert [name for name, *_ in said] == ["forward", "backward", "sp, forward", "sp, backward"]
    for _, predicted, measured, calls, counted in said:
        assert predicted == measured and float(measured) > 0 and calls == counted
    assert re.search(r"sp, backward: .* \(\+ 1\)\.$", repr(explorer)) and repr(explorer).count("(+ 1)") == 1
    assert "measured" in explorer.set(tp_size=8).svg
