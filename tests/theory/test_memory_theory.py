"""Bytes of a step against published tables, counts of real models, and what autograd keeps."""
import doctest
import math

import numpy as np
import pytest
import torch

import dtlab
from dtlab.errors import ConfigError
from dtlab.models import GPT, GPTConfig, cross_entropy
from dtlab.models.gpt import TransformerLayer
from dtlab.parallel import FullyShardedModule, ZeroOptimizer
from dtlab.theory import (
    GPT_7_5B,
    RECIPES,
    LlamaShape,
    ModelShape,
    activation_bytes,
    activation_bytes_per_layer,
    batch_flops,
    gathered_bytes,
    in_binary_units,
    layer_params,
    logits_bytes,
    memory,
    mfu,
    micro_batches_in_flight,
    model_state_bytes,
    padding_elements,
    recompute_flops_factor,
    step_memory,
    transformer_params,
    unit_sizes,
    units,
    wire_bytes,
    zero_state_bytes,
    zero_states,
    zero_wire_elements,
)

GIB = 2**30


def gpt(layers, hidden, heads, seq=2048, vocab=51200):
    return ModelShape(num_layers=layers, hidden_size=hidden, num_heads=heads, seq_length=seq, vocab_size=vocab)


# --- parameters

@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_units_of_whole_layers_hold_every_parameter_of_the_model_once(tie_embeddings):
    sizes = {"vocab_size": 77, "seq_length": 5, "hidden_size": 24, "num_heads": 3, "num_layers": 6,
             "tie_embeddings": tie_embeddings}
    model, shape = GPT(GPTConfig(**sizes), device="meta"), ModelShape(**sizes)
    counts = [sum(p.numel() for p in layer.parameters()) for layer in model.layers]
    root = sum(p.numel() for p in model.parameters()) - sum(counts)
    assert counts == [layer_params(shape)] * 6
    assert unit_sizes(shape, 3) == [root, sum(counts[:2]), sum(counts[2:4]), sum(counts[4:])]
    with pytest.raises(ConfigError, match=r"num_layers \(6\) must be divisible by num_units \(4\)"):
        unit_sizes(shape, 4)


def the_llama(shape):
    """Shapes of all weights of a Llama, written out."""
    h, f, d, kv = shape.hidden_size, shape.ffn_hidden_size, shape.head_size, shape.num_kv_heads
    layer = [(shape.num_heads * d, h), (kv * d, h), (kv * d, h), (h, shape.num_heads * d),  # q, k, v, o
             (f, h), (f, h), (h, f), (h,), (h,)]  # gate, up, down, two norms
    vocab = [(shape.vocab_size, h)] * (1 if shape.tie_embeddings else 2)
    return [*vocab, *layer * shape.num_layers, (h,)]


LLAMAS = [  # layers, h, heads, kv heads, f, V, s, tied, parameters as published
    (32, 4096, 32, 32, 11008, 32000, 4096, False, 6_738_415_616),    # Llama 2 7B
    (80, 8192, 64, 8, 28672, 32000, 4096, False, 68_976_648_192),    # Llama 2 70B
    (32, 4096, 32, 8, 14336, 128256, 8192, False, 8_030_261_248),    # Llama 3 8B
    (16, 2048, 32, 8, 8192, 128256, 131072, True, 1_235_814_400),    # Llama 3.2 1B
]  # fmt: skip


@pytest.mark.parametrize("row", LLAMAS)
def test_parameters_of_llamas(row):
    layers, hidden, heads, kv_heads, ffn, vocab, seq, tied, published = row
    shape = LlamaShape(num_layers=layers, hidden_size=hidden, num_heads=heads, num_kv_heads=kv_heads, vocab_size=vocab,
                       ffn_hidden_size=ffn, seq_length=seq, tie_embeddings=tied)
    assert transformer_params(shape) == published == sum(math.prod(weight) for weight in the_llama(shape))


def test_a_llama_without_kv_heads_gives_every_head_its_own():
    sizes = {"num_layers": 2, "hidden_size": 48, "num_heads": 6, "ffn_hidden_size": 100, "vocab_size": 11,
             "seq_length": 5}
    assert LlamaShape(**sizes) == LlamaShape(num_kv_heads=6, **sizes)
    assert transformer_params(LlamaShape(num_kv_heads=3, **sizes)) == transformer_params(LlamaShape(**sizes)) - \
        2 * 2 * 48 * 3 * 8  # layers, keys and values, h, heads, head size
    with pytest.raises(ConfigError, match=r"num_heads \(6\) must be divisible by num_kv_heads \(4\)"):
        LlamaShape(num_kv_heads=4, **sizes)


def test_flops_of_a_llama_count_its_three_matrices_and_shared_heads():
    shape = LlamaShape(num_layers=2, hidden_size=48, num_heads=6, num_kv_heads=2, ffn_hidden_size=100, vocab_size=11,
                       seq_length=5)
    products = sum(math.prod(weight) for weight in the_llama(shape)[1:] if len(weight) == 2)  # all but the embeddings
    assert batch_flops(shape, batch_size=3) == 6 * 15 * products + 2 * 12 * 15 * 5 * 48


# --- model states

@pytest.mark.parametrize("recipe, per_param, gb", [
    ("adam_mixed", 16, 107.2), ("adam_mixed_fp32_grads", 18, 120.6), ("adam_mixed_both_grads", 20, 134.0),
    ("adam_fp32", 16, 107.2), ("adam_fp64", 32, 214.4), ("sgd_fp32", 8, 53.6)])
def test_bytes_per_parameter_of_the_recipes(recipe, per_param, gb):
    states = model_state_bytes(6.7e9, recipe=recipe)
    assert sum(RECIPES[recipe].values()) == per_param
    assert sum(states.values()) / 1e9 == pytest.approx(gb)
    assert list(states) == ["params", "grads", "optimizer_states"]


def test_master_weights_are_optimizer_states():
    assert model_state_bytes(1) == {"params": 2, "grads": 2, "optimizer_states": 12}
    assert model_state_bytes(1, recipe="adam_mixed_both_grads") == {"params": 2, "grads": 6, "optimizer_states": 12}


ZERO_TABLE_1 = [  # billions of parameters, ranks, GB at stages 1, 2, 3
    (7.5, 1, "120", "120", "120"), (7.5, 4, "52.5", "41.3", "30"), (7.5, 16, "35.6", "21.6", "7.5"),
    (7.5, 64, "31.4", "16.6", "1.88"), (7.5, 256, "30.4", "15.4", "0.47"), (7.5, 1024, "30.1", "15.1", "0.12"),
    (128, 1, "2048", "2048", "2048"), (128, 4, "896", "704", "512"), (128, 16, "608", "368", "128"),
    (128, 64, "536", "284", "32"), (128, 256, "518", "263", "8"), (128, 1024, "513", "257", "2"),
    (1000, 1, "16000", "16000", "16000"), (1000, 4, "7000", "5500", "4000"), (1000, 16, "4750", "2875", "1000"),
    (1000, 64, "4187", "2218", "250"), (1000, 256, "4046", "2054", "62.5"), (1000, 1024, "4011", "2013", "15.6"),
]


def zero_gb(billions, ranks, stage):
    return zero_state_bytes(billions * 1e9, dp_size=ranks, zero_stage=stage) / 1e9


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("row", ZERO_TABLE_1)
def test_zero_table_1(row, stage):
    """The 7.5B column is rounded, half up; the 128B and 1T columns are cut off."""
    printed = row[1 + stage]
    scale = 10 ** len(printed.partition(".")[2])
    found = zero_gb(*row[:2], stage) * scale
    assert math.floor(found + (0.5 if row[0] == 7.5 else 0)) / scale == float(printed)


def test_cells_of_zero_table_1_that_rounding_would_print_otherwise():
    cells = {(row[0], row[1], stage): (row[1 + stage], zero_gb(*row[:2], stage))
             for row in ZERO_TABLE_1 for stage in (1, 2, 3)}
    off = {cell: (printed, round(found, 2)) for cell, (printed, found) in cells.items()
           if "." not in printed and abs(found - float(printed)) >= 0.5}
    assert off == {(128, 1024, 1): ("513", 513.5), (128, 1024, 2): ("257", 257.75), (1000, 64, 1): ("4187", 4187.5),
                   (1000, 64, 2): ("2218", 2218.75), (1000, 256, 1): ("4046", 4046.88),
                   (1000, 256, 2): ("2054", 2054.69), (1000, 1024, 1): ("4011", 4011.72),
                   (1000, 1024, 2): ("2013", 2013.67)}


def test_zero_figure_1():
    assert [round(zero_gb(7.5, 64, stage), 1) for stage in (0, 1, 2, 3)] == [120, 31.4, 16.6, 1.9]


@pytest.mark.parametrize("mp_size, printed", [
    (1, (2, 7.6, 14.4, 128)), (2, (4, 15.2, 28.8, 256)), (4, (8, 30.4, 57.6, 500)), (8, (16, 60.8, 115.2, 1000)),
    (16, (32, 121.6, 230.4, 2000))])
def test_zero_table_2(mp_size, printed):
    """Billions of parameters in 32 GB at 64 ranks: rounded first, then multiplied; from 0.5T on to one digit."""
    one = [round(32 / zero_gb(1, 64, stage), 1) for stage in (0, 1, 2, 3)]
    found = [mp_size * billions for billions in one]
    assert [float(f"{n:.1g}") if n > 500 else round(n, 1) for n in found] == list(printed)
    assert mp_size == 1 or round(mp_size * 32 / zero_gb(1, 64, 1), 1) != printed[1]  # 7.64, not 7.6, in every GPU


def test_worked_examples_of_zero():
    gpt2 = {"seq_length": 1024, "micro_batch_size": 32, "hidden_size": 1600, "num_heads": 25}
    states = model_state_bytes(1.5e9)
    assert (states["params"], sum(states.values())) == (3e9, 24e9)
    assert [RECIPES["adam_mixed"]["master weights"] * n for n in (1.5e9, 3e9)] == [6e9, 12e9]  # the fused fp32 buffer
    # 12 elements of 2 bytes, of the 34 bytes that Korthikanti counts beside the scores
    assert round(48 * activation_bytes_per_layer(**gpt2, flash_attention=True) * 24 / 34 / 1e9, 1) == 60.4
    assert round(48 * activation_bytes_per_layer(**gpt2, recompute="full") / 1e9, 2) == 5.03
    assert zero_gb(1000, 1024, 3) == pytest.approx(15.6, abs=0.05)  # "16 TB / 1024 = 16 GB"


def test_the_33_gb_of_checkpoints_in_zero_section_6_are_elements():
    layer = {"seq_length": 1024, "micro_batch_size": 32, "hidden_size": 8192, "num_heads": 64, "recompute": "full"}
    assert round(125 * activation_bytes_per_layer(**layer) / 1e9, 1) == 67.1  # "around 60 GB" in section 3
    assert round(125 * activation_bytes_per_layer(**layer) / 2 / 1e9, 1) == 33.6  # elements, not bytes
    split = activation_bytes_per_layer(**layer, tp_size=16, sequence_parallel=True)
    assert round(125 * split / 1e9, 1) == 4.2  # "about 2 GB"


def test_deepspeeds_estimate_of_stage_2():
    """Its pages say 4 P + 16 P / N, 15.93 GB for 2,851 million on 8; its code 2 P + 18 P / N. Both are GiB."""
    params = 2851e6
    found = zero_state_bytes(params, dp_size=8, zero_stage=2, optimizer="adam_mixed_both_grads")
    assert in_binary_units(found) == "11.3 GiB" and round(found / GIB, 2) == 11.28
    assert round((4 * params + 16 * params / 8) / GIB, 2) == 15.93


def test_shards_of_padded_tensors_and_step_counters_are_exact():
    """Two flat tensors of 10 and 7 elements on 4 ranks: shards of 3 and 2 elements, 20 in all."""
    padding = padding_elements(10, 4) + padding_elements(7, 4)
    found = [zero_states(17, dp_size=4, zero_stage=stage, optimizer="adam_fp64", padding=padding, step_tensors=2)
             for stage in (0, 1, 2, 3)]
    assert [tuple(states.values()) for states in found] == [
        (20 * 8, 20 * 8, 20 * 16 + 8), (20 * 8, 20 * 8, 5 * 16 + 8), (20 * 8, 5 * 8, 5 * 16 + 8),
        (5 * 8, 5 * 8, 5 * 16 + 8)]


def test_a_slider_may_ask_for_many_sizes_at_once():
    ranks = np.array([1, 4, 64])
    found = zero_state_bytes(7.5e9, dp_size=ranks, zero_stage=2)
    assert found.tolist() == [zero_state_bytes(7.5e9, dp_size=int(n), zero_stage=2) for n in ranks]


@pytest.mark.parametrize("dp_size", [1, 2, 3, 64])
def test_elements_sent_are_those_of_the_collectives(dp_size):
    params = 960
    gradients, once = (wire_bytes(op, params, dp_size) for op in ("reduce_scatter", "all_gather"))
    sent = [zero_wire_elements(params, dp_size=dp_size, zero_stage=stage) for stage in (0, 1, 2, 3)]
    both = gradients + once
    assert sent == pytest.approx([wire_bytes("all_reduce", params, dp_size), both, both, both + once])


# --- activations

E2 = {"seq_length": 2048, "micro_batch_size": 1, "hidden_size": 4096, "num_heads": 32}


@pytest.mark.parametrize("options, mib", [
    ({}, 912.0), ({"tp_size": 8}, 184.0), ({"tp_size": 8, "sequence_parallel": True}, 114.0),
    ({"flash_attention": True}, 272.0), ({"recompute": "selective"}, 272.0), ({"recompute": "full"}, 16.0),
    ({"seq_length": 8192}, 11328.0), ({"seq_length": 8192, "flash_attention": True}, 1088.0)])
def test_activations_of_a_layer(options, mib):
    assert activation_bytes_per_layer(**{**E2, **options}) / 2**20 == mib


def test_activations_of_a_layer_are_bytes_already():
    assert activation_bytes_per_layer(**E2) == 956_301_312


def test_activations_of_a_layer_in_the_papers_six_forms():
    s, b, h, a, t = 96, 3, 240, 12, 4
    sizes = {"seq_length": s, "micro_batch_size": b, "hidden_size": h, "num_heads": a}
    sbh, scores = s * b * h, 5 * a * s / h
    forms = {(1, False, None): 34 + scores, (t, False, None): 10 + 24 / t + scores / t,
             (t, True, None): (34 + scores) / t, (t, False, "selective"): 10 + 24 / t,
             (t, True, "selective"): 34 / t, (t, False, "full"): 2}
    for (tp_size, sequence_parallel, recompute), form in forms.items():
        found = activation_bytes_per_layer(**sizes, tp_size=tp_size, sequence_parallel=sequence_parallel,
                                           recompute=recompute)
        assert found == pytest.approx(sbh * form)


@pytest.mark.parametrize("layers, hidden, heads, scores, saved", [(96, 12288, 96, 80, 70), (105, 20480, 128, 64, 65)])
def test_what_selective_recomputation_saves(layers, hidden, heads, scores, saved):
    """Korthikanti et al., section 5: of GPT-3 and of MT-NLG, per cent."""
    shape = {"seq_length": 2048, "micro_batch_size": 1, "hidden_size": hidden, "num_heads": heads}
    with_scores, without = (activation_bytes_per_layer(**shape, recompute=r) for r in (None, "selective"))
    assert (with_scores - without) / (2048 * hidden) == scores
    assert round(100 * (1 - without / with_scores)) == saved


@pytest.mark.parametrize("pp_size, num_chunks", [(1, 1), (4, 1), (4, 3)])
def test_activations_of_the_first_stage_are_the_papers(pp_size, num_chunks):
    shape, t = gpt(12, 240, 12, seq=96, vocab=1000), 4
    s, b, h, layers, v = 96, 3, 240, 12, 1000
    interleaved = 1 + (pp_size - 1) / (pp_size * num_chunks) if num_chunks > 1 else 1
    extra = s * b * h * layers / t * (pp_size / layers + (pp_size == 1) * 4 / layers * (1 + v / h))
    found = activation_bytes(shape, micro_batch_size=b, tp_size=t, sequence_parallel=True, pp_size=pp_size,
                             num_chunks=num_chunks)
    assert found == pytest.approx(layers * interleaved * s * b * h / t * (34 + 5 * 12 * s / h) + extra)


def test_logits_are_on_the_last_stage_and_the_peak_is_on_the_first():
    shape = gpt(12, 240, 12, seq=96, vocab=1000)
    stages = [activation_bytes(shape, micro_batch_size=2, pp_size=4, pp_rank=r, num_micro_batches=8) for r in range(4)]
    layers = 3 * activation_bytes_per_layer(seq_length=96, micro_batch_size=2, hidden_size=240, num_heads=12)
    logits = logits_bytes(shape, micro_batch_size=2)
    assert logits == 2 * 96 * 1000 * 4
    tokens = 2 * 96 * 240
    assert stages == [4 * layers + 4 * tokens, 3 * layers, 2 * layers, layers + 4 * tokens + logits]


def in_flight_by_trace(pp_size, pp_rank, num_micro_batches, warm_up):
    """Forwards less backwards at the most, counted along one forward, one backward after ``warm_up`` forwards."""
    warm_up = min(warm_up, num_micro_batches)
    steady = num_micro_batches - warm_up
    held = np.cumsum([1] * warm_up + [1, -1] * steady + [-1] * warm_up)
    return held.max()


@pytest.mark.parametrize("pp_size", [1, 2, 3, 5])
@pytest.mark.parametrize("num_micro_batches", [1, 3, 30])
def test_micro_batches_in_flight_are_those_of_the_order_of_one_forward_one_backward(pp_size, num_micro_batches):
    for rank in range(pp_size):
        found = micro_batches_in_flight(pp_size=pp_size, pp_rank=rank, num_micro_batches=num_micro_batches)
        assert found == min(num_micro_batches, pp_size - rank)
        assert found == in_flight_by_trace(pp_size, rank, num_micro_batches, pp_size - rank - 1)
        chunks, chunk_runs = 2, 2 * num_micro_batches
        wanted = in_flight_by_trace(pp_size, rank, chunk_runs, 2 * (pp_size - rank - 1) + (chunks - 1) * pp_size)
        found = micro_batches_in_flight(pp_size=pp_size, pp_rank=rank, num_chunks=chunks,
                                        num_micro_batches=num_micro_batches)
        assert chunks * found == wanted


def native_dropout(x, p=0.5, training=True, inplace=False):
    """With a mask of a byte an element, as on a GPU; F.dropout keeps one in the tensor's own dtype on a CPU."""
    return torch.native_dropout(x, p, training)[0]


def kept_for_backward(layer, x):
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = layer(x)  # noqa: F841  (what is kept lives as long)
    params = {p.untyped_storage()._cdata for p in layer.parameters()}
    return sum(storage.nbytes() for at, storage in kept.items() if at not in params)


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("seq, hidden, heads, batch", [(64, 96, 4, 2), (128, 64, 2, 1)])
def test_a_layer_in_16_bits_keeps_what_the_formula_says(monkeypatch, flash, seq, hidden, heads, batch):
    """And what is small: four statistics of norms a token, and flash's number for each row."""
    monkeypatch.setattr(torch.nn.functional, "dropout", native_dropout)
    sizes = {"seq_length": seq, "hidden_size": hidden, "num_heads": heads}
    config = GPTConfig(**sizes, dropout=0.0 if flash else 0.1, flash_attention=flash)  # flash keeps no mask
    layer = TransformerLayer(config, dtype=torch.bfloat16)
    layer.dropout.p = 0.1
    kept = kept_for_backward(layer, torch.randn(batch, seq, hidden, dtype=torch.bfloat16, requires_grad=True))
    small = 2 * 4 * batch * seq + 4 * batch * heads * seq * flash
    assert kept == small + activation_bytes_per_layer(**sizes, micro_batch_size=batch, flash_attention=flash)
    assert small < 0.04 * kept


# --- FLOPs of recomputation

KORTHIKANTI = [  # hidden, heads, layers, GPUs, batch, full recompute s, present work s, increase %, MFU %, HFU %
    (6144, 64, 48, 8, 4, 1.42, 1.1, 29.0, 41.5, 43.7), (12288, 96, 96, 64, 64, 18.13, 13.75, 31.8, 51.4, 52.8),
    (20480, 128, 105, 280, 280, 49.05, 37.83, 29.7, 56.0, 57.0),
    (25600, 160, 128, 512, 512, 94.42, 71.49, 32.1, 56.3, 57.0)]  # fmt: skip


@pytest.mark.parametrize("hidden, heads, layers, gpus, batch, full_s, time_s, increase, mfu_printed, hfu_printed",
                         KORTHIKANTI)
def test_mfu_and_hfu_of_korthikanti_table_5(hidden, heads, layers, gpus, batch, full_s, time_s, increase, mfu_printed,
                                            hfu_printed):
    """HFU as printed counts the scores' forward three times more; selective recomputation does it once more."""
    shape, run = gpt(layers, hidden, heads), {"time_s": time_s, "num_devices": gpus, "peak_flops": 312e12}
    share = mfu(batch_flops(shape, batch_size=batch), **run)
    assert 100 * share == pytest.approx(mfu_printed, abs=0.25)  # 1.1 s has two digits
    extra = recompute_flops_factor(shape, "selective") - 1
    assert 100 * share * (1 + 3 * extra) == pytest.approx(hfu_printed, abs=0.15)
    assert mfu(batch_flops(shape, batch_size=batch, recompute="selective"), **run) == pytest.approx(share * (1 + extra))
    s, h, v = 2048, hidden, 51200
    printed = 72 * batch * layers * s * h * h * (1 + s / (3 * h) + v / (12 * h * layers))
    assert printed / batch_flops(shape, batch_size=batch) == pytest.approx(1 + 3 * extra)
    exact = 72 * batch * layers * s * h * h * (1 + 2 * s / (9 * h) + v / (12 * h * layers))
    assert batch_flops(shape, batch_size=batch, recompute="selective") == pytest.approx(exact)
    assert 100 * (full_s / time_s - 1) == pytest.approx(increase, abs=0.15)
    assert full_s / time_s < recompute_flops_factor(shape, "full")  # present work does some over again, too


@pytest.mark.parametrize("layers, hidden, heads, printed", [(96, 12288, 96, 2.7), (105, 20480, 128, 1.6)])
def test_extra_flops_of_selective_recomputation_as_printed_are_three_times_too_many(layers, hidden, heads, printed):
    extra = 100 * (recompute_flops_factor(gpt(layers, hidden, heads), "selective") - 1)
    assert 3 * extra == pytest.approx(printed, abs=0.06) and extra < 1


def test_percent_of_peak_in_megatron_sc21_counts_recomputation():
    """163 of 312 TFLOP/s at 1T: 52 % is HFU; MFU is 39.3 %."""
    assert round(100 * 163 / 312) == 52
    shape = gpt(128, 25600, 160)
    assert 100 * 502 / 3072 / 0.312 / recompute_flops_factor(shape, "full") == pytest.approx(39.3, abs=0.05)


# --- what stage 3 gathers, and all rows

@pytest.mark.parametrize("units, gb", [(1, 14.9), (4, 3.7), (36, 0.4)])
def test_gathered_units_of_the_course_model(units, gb):
    params = transformer_params(GPT_7_5B)
    assert round(gathered_bytes([params / units] * units) / 1e9, 1) == gb


def test_the_largest_neighbours_are_what_prefetching_holds():
    sizes = [5, 1, 9, 2, 2, 8]
    assert [gathered_bytes(sizes, held=n, bytes_per_param=1) for n in (1, 2, 3, 9)] == [9, 11, 15, 27]
    assert gathered_bytes(sizes, held=2, root_params=4) == 2 * (11 + 4)


def test_a_stage_3_of_one_unit_needs_more_than_stage_2():
    """A model gathered at once is there whole, beside the shards, and so are its gradients."""
    shape, options = gpt(8, 1024, 16, vocab=5000), {"dp_size": 4, "recompute": "full"}
    total = {(stage, units): sum(step_memory(shape, zero_stage=stage, num_units=units, **options).values())
             for stage, units in ((1, 1), (2, 1), (3, 1), (3, 8))}
    assert total[3, 8] < total[2, 1] < total[1, 1] and total[3, 1] > total[2, 1]


def test_rows_of_a_step():
    shape = gpt(4, 64, 4, seq=32, vocab=1000)
    params, layer = transformer_params(shape), layer_params(shape)
    root = params - 4 * layer
    rows = {stage: step_memory(shape, dp_size=2, zero_stage=stage, bucket_bytes=4000) for stage in (0, 1, 2, 3)}
    assert {stage: (r["gathered"], r["buckets"]) for stage, r in rows.items()} == {
        0: (0, 0), 1: (0, 0), 2: (0, 2 * 64 * 1000), 3: (2 * (root + 2 * layer), 2 * root)}
    assert {r["activations"] for r in rows.values()} == {activation_bytes(shape, micro_batch_size=1)}
    wide = step_memory(shape, dp_size=2, zero_stage=2)["buckets"]
    assert wide == 2 * params  # all gradients are in one bucket of 25 MiB
    alone = step_memory(shape, dp_size=2, zero_stage=3, prefetch=False)
    assert (alone["gathered"], alone["params"]) == (2 * (root + layer), params)


TOY = {"vocab_size": 64, "seq_length": 128, "hidden_size": 96, "num_layers": 8, "num_heads": 4}


def start(stage):
    """On a rank: the toy model in 16 bits with 32-bit masters, and a first step, so that states are there."""
    global kept
    torch.nn.functional.dropout = native_dropout
    config = GPTConfig(**TOY, dropout=0.1, flash_attention=False)
    if stage == 3:
        model = FullyShardedModule(GPT(config), param_dtype=torch.bfloat16)
        kept = model, torch.optim.AdamW(model.parameters())
    else:
        model = GPT(config, dtype=torch.bfloat16)
        kept = model, ZeroOptimizer(model, torch.optim.AdamW, zero_stage=stage, bucket_bytes=2**17)
    train_step()


def train_step():
    """On a rank: a step on four sequences."""
    model, optimizer = kept
    tokens = torch.arange(512).view(4, 128) % TOY["vocab_size"]
    optimizer.zero_grad()
    cross_entropy(model(tokens).float(), tokens, reduction="mean").backward()
    optimizer.step()


@pytest.mark.ranks
def test_a_recorded_step_peaks_within_5_percent_of_what_is_foretold():
    """What is not foretold: the gradient of the logits, and temporaries."""
    with dtlab.launch(4) as ranks:
        for stage in (1, 2, 3):
            ranks.run(start, stage)
            memory = ranks.record(train_step).memory()
            rows = step_memory(ModelShape(**TOY), micro_batch_size=4, dp_size=4, zero_stage=stage, bucket_bytes=2**17)
            assert memory.peak.max() == pytest.approx(sum(rows.values()), rel=0.05)
            states = memory.peak_params + memory.peak_optimizer_states  # FullyShardedModule's masters are its params
            held = rows["params"] * (stage < 3) + rows["optimizer_states"]
            assert states.max() - held <= 4 * 30  # Adam's step counters: one a unit or bucket


@pytest.mark.parametrize("call, words", [
    (lambda: model_state_bytes(5, recipe="adam"), r"recipe \('adam'\) must be 'adam_mixed'"),
    (lambda: zero_states(5, dp_size=2, zero_stage=4), r"zero_stage \(4\) must be 0, 1, 2 or 3"),
    (lambda: zero_states(5, dp_size=0, zero_stage=1), r"dp_size \(0\) must be a number of at least 1"),
    (lambda: zero_wire_elements(5, dp_size=0.5, zero_stage=2), r"dp_size \(0.5\) must be a number of at least 1"),
    (lambda: model_state_bytes(5, recipe=["adam_mixed"]), r"recipe \(\['adam_mixed'\]\) must be"),
    (lambda: activation_bytes_per_layer(**{**E2, "hidden_size": -8}), r"hidden_size \(-8\) must be at least 1"),
    (lambda: logits_bytes(GPT_7_5B, micro_batch_size=-1), r"micro_batch_size \(-1\) must be at least 1"),
    (lambda: gathered_bytes([-5]), r"unit_params \(-5\) must be a number of at least 0"),
    (lambda: step_memory(GPT_7_5B, bucket_bytes=-1), r"bucket_bytes \(-1\) must be at least 1"),
    (lambda: zero_states(5, dp_size=2, zero_stage=1, padding=-1), r"padding \(-1\) must be at least 0"),
    (lambda: zero_wire_elements(5, dp_size=2, zero_stage="2"), r"zero_stage \('2'\) must be"),
    (lambda: activation_bytes_per_layer(**E2, tp_size=3), r"num_heads \(32\) must be divisible by tp_size \(3\)"),
    (lambda: activation_bytes_per_layer(**E2, recompute=True), r"recompute \(True\) must be None, 'selective' or"),
    (lambda: micro_batches_in_flight(pp_size=2, pp_rank=2), r"pp_rank \(2\) must be below pp_size \(2\)"),
    (lambda: activation_bytes(GPT_7_5B, micro_batch_size=1, pp_size=5), r"num_layers \(36\) must be divisible by pp_s"),
    (lambda: gathered_bytes([]), r"unit_params \(\[\]\) must hold"),
    (lambda: gathered_bytes([1], held=0), r"held \(0\) must be at least 1"),
    (lambda: batch_flops(GPT_7_5B, batch_size=1, recompute=True), r"recompute \(True\) must be"),
])  # fmt: skip
def test_what_cannot_be_is_refused(call, words):
    with pytest.raises(ConfigError, match=words):
        call()


@pytest.mark.parametrize("module", [memory, units])
def test_docstring_examples(module):
    result = doctest.testmod(module)
    assert result.attempted > 0 and result.failed == 0
