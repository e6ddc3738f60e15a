"""Parameters and FLOPs against models that exist and numbers that were published."""
import doctest

import pytest

from dtlab.errors import ConfigError
from dtlab.models import GPT, GPTConfig
from dtlab.theory import (
    GPT_7_5B,
    ModelShape,
    batch_flops,
    flops,
    mfu,
    model_flops_per_token,
    models,
    train_flops,
    training_days,
    transformer_params,
)

A100 = 312e12


def gpt(layers, hidden, heads, seq=2048, vocab=51200, **more):
    return ModelShape(num_layers=layers, hidden_size=hidden, num_heads=heads, seq_length=seq, vocab_size=vocab, **more)


@pytest.mark.parametrize("tie_embeddings", [True, False])
@pytest.mark.parametrize("sizes", [{}, {"hidden_size": 24, "num_heads": 3, "num_layers": 1},
                                   {"vocab_size": 77, "seq_length": 5, "hidden_size": 8, "num_heads": 8,
                                    "num_layers": 3, "ffn_hidden_size": 13}])
def test_the_formula_counts_every_parameter_of_the_model(sizes, tie_embeddings):
    config = GPTConfig(tie_embeddings=tie_embeddings, **sizes)
    model = GPT(config, device="meta")
    fields = {name: getattr(config, name) for name in ModelShape.__dataclass_fields__ if hasattr(config, name)}
    assert transformer_params(ModelShape(**fields)) == sum(p.numel() for p in model.parameters())


SC21_TABLE_1 = [  # P [1e9], heads, h, l, GPUs, B, TFLOP/s per GPU, PFLOP/s of all; from these: s per step, MFU %
    (1.7, 24, 2304, 24, 32, 512, 137, 4.4, 3.52, 33.6),
    (3.6, 32, 3072, 30, 64, 512, 138, 8.8, 3.71, 33.4),
    (7.5, 32, 4096, 36, 128, 512, 142, 18.2, 3.69, 34.4),
    (18.4, 48, 6144, 40, 256, 1024, 135, 34.6, 9.39, 32.6),
    (39.1, 64, 8192, 48, 512, 1536, 138, 70.8, 14.42, 33.3),
    (76.1, 80, 10240, 60, 1024, 1792, 140, 143.8, 16.01, 33.8),
    (145.6, 96, 12288, 80, 1536, 2304, 148, 227.1, 24.84, 35.6),
    (310.1, 128, 16384, 96, 1920, 2160, 155, 297.4, 37.64, 37.3),
    (529.6, 128, 20480, 105, 2520, 2520, 163, 410.2, 54.16, 39.1),
    (1008.0, 160, 25600, 128, 3072, 3072, 163, 502.0, 102.37, 39.3),
]


@pytest.mark.parametrize("row", SC21_TABLE_1)
def test_megatron_sc21_table_1(row):
    billions, heads, hidden, layers, gpus, batch, tflops, pflops, seconds, percent = row
    shape = gpt(layers, hidden, heads)
    assert transformer_params(shape) / 1e9 == pytest.approx(billions, abs=0.051)
    time_s = batch_flops(shape, batch_size=batch, recompute="full") / (pflops * 1e15)
    assert time_s == pytest.approx(seconds, abs=0.0051)
    assert pflops * 1e3 / gpus == pytest.approx(tflops, abs=1)
    share = mfu(batch_flops(shape, batch_size=batch), time_s=time_s, num_devices=gpus, peak_flops=A100)
    assert 100 * share == pytest.approx(percent, abs=0.051)


@pytest.mark.parametrize("billions, hidden, heads, layers", [
    (1.2, 1536, 16, 40), (2.5, 1920, 20, 54), (4.2, 2304, 24, 64), (8.3, 3072, 32, 72)])
def test_megatron_2019_table_1(billions, hidden, heads, layers):
    params = transformer_params(gpt(layers, hidden, heads, seq=1024))
    assert params / 1e9 == pytest.approx(billions, abs=0.05)
    exact = {1.2: 1.213, 2.5: 2.490, 4.2: 4.199, 8.3: 8.317}[billions]
    assert round(params / 1e9, 3) == exact


def test_the_two_printed_forms_of_the_flops_of_a_batch():
    shape, b = gpt(96, 12288, 96), 1536
    s, h, layers, v = 2048, 12288, 96, 51200
    full = 96 * b * s * layers * h * h * (1 + s / (6 * h) + v / (16 * layers * h))
    model = 72 * b * s * layers * h * h * (1 + s / (6 * h) + v / (12 * layers * h))
    assert batch_flops(shape, batch_size=b, recompute="full") == pytest.approx(full)
    assert batch_flops(shape, batch_size=b) == pytest.approx(model)


@pytest.mark.parametrize("hidden, heads, layers, gpus, batch, seconds, percent", [
    (6144, 64, 48, 8, 4, 1.1, 41.5), (12288, 96, 96, 64, 64, 13.75, 51.4), (20480, 128, 105, 280, 280, 37.83, 56.0),
    (25600, 160, 128, 512, 512, 71.49, 56.3)])
def test_mfu_of_korthikanti_table_5(hidden, heads, layers, gpus, batch, seconds, percent):
    work = batch_flops(gpt(layers, hidden, heads), batch_size=batch)
    assert 100 * mfu(work, time_s=seconds, num_devices=gpus, peak_flops=A100) == pytest.approx(percent, abs=0.25)


def test_days_of_the_course_model():
    work = train_flops(transformer_params(GPT_7_5B), 150e9)
    days = [training_days(work, num_devices=n, flops_per_s=A100 / 2) for n in (1, 64)]
    assert (round(days[0]), round(days[1], 1)) == (499, 7.8)
    assert round(transformer_params(GPT_7_5B) / 1e9, 2) == 7.47


def test_days_of_megatron_sc21_equation_4():
    """8 T P: 6 N D and the forward a second time."""
    days = [training_days(8 / 6 * train_flops(n, tokens), num_devices=gpus, flops_per_s=x)
            for n, tokens, gpus, x in ((175e9, 300e9, 1024, 140e12), (1e12, 450e9, 3072, 163e12))]
    assert [round(d) for d in days] == [34, 83]  # the paper says 84 of 1 T parameters; it has 1.008 T
    assert round(days[1] * 1.008) == 84


@pytest.mark.parametrize("layers, hidden, heads, batch, gpus, tflops, days", [
    (96, 12288, 96, 1536, 384, 144, 90.05), (96, 12288, 96, 1536, 1536, 44, 73.67),
    (96, 12288, 96, 1536, 384, 153, 84.75),
    (105, 20480, 128, 2560, 640, 138, 169.2), (105, 20480, 128, 2240, 2240, 159, 42.0)])
def test_days_of_megatron_sc21_table_2(layers, hidden, heads, batch, gpus, tflops, days):
    steps = 300e9 / (batch * 2048)
    work = steps * batch_flops(gpt(layers, hidden, heads), batch_size=batch, recompute="full")
    assert training_days(work, num_devices=gpus, flops_per_s=tflops * 1e12) == pytest.approx(days, rel=2e-3)


@pytest.mark.parametrize("layers, hidden, heads, billions, per_token", [
    (32, 4096, 16, 8.63, 0.0550e12), (64, 8192, 32, 62.5, 0.388e12), (118, 18432, 48, 540.35, 3.28e12)])
def test_palm_flops_per_token(layers, hidden, heads, billions, per_token):
    shape = gpt(layers, hidden, heads, head_size=256)
    assert model_flops_per_token(shape, num_params=billions * 1e9) == pytest.approx(per_token, rel=2e-3)


def test_palm_mfu():
    per_token = model_flops_per_token(gpt(118, 18432, 48, head_size=256), num_params=540.35e9)
    assert round(mfu(238.3e3 * per_token, time_s=1, num_devices=6144, peak_flops=275e12), 3) == 0.462


def test_the_causal_switch_halves_the_scores_only():
    shape = gpt(32, 4096, 32, seq=16384)
    full, causal = (model_flops_per_token(shape, num_params=6.7e9, causal=c) / 1e9 for c in (False, True))
    assert (round(full, 1), round(causal, 1)) == (66.0, 53.1)


def test_kaplan_counts_the_causal_half_without_embeddings():
    """Forward 2 N + 2 L n_ctx d_attn with N = 12 L d^2; training is three times that."""
    layers, d, context = 24, 1024, 1024
    forward = 2 * 12 * layers * d**2 + 2 * layers * context * d
    shape = gpt(layers, d, 16, seq=context)
    assert model_flops_per_token(shape, num_params=12 * layers * d**2, causal=True) == 3 * forward


@pytest.mark.parametrize("layers, hidden, heads, paper, reproduced", [
    (10, 640, 10, 1.03, 1.025), (20, 1024, 16, 1.1, 1.101), (24, 1280, 10, 1.08, 1.083), (26, 1792, 14, 1.04, 1.044),
    (28, 2048, 16, 1.03, 1.033), (40, 3584, 28, 0.99, 0.994)])
def test_chinchilla_table_a4(layers, hidden, heads, paper, reproduced):
    """FLOPs counted fully / 6 N D: no logits, 3 FLOPs per softmax entry, relative positions in N (d^2 + 2d a layer)."""
    s, vocab = 2048, 32000
    shape = gpt(layers, hidden, heads, seq=s, vocab=vocab)
    work = batch_flops(shape, batch_size=1) - 6 * s * hidden * vocab + 9 * layers * heads * s * s
    params = transformer_params(shape) - s * hidden + layers * (hidden**2 + 2 * hidden)
    ratio = work / train_flops(params, s)
    assert round(ratio, 3) == reproduced
    assert ratio == pytest.approx(paper, abs=0.0051)


def test_per_token_and_per_batch_counts_agree_up_to_what_is_no_matrix_product():
    """6 N also counts biases, norms and the position table, which batch_flops does not."""
    shape = GPT_7_5B
    per_token = model_flops_per_token(shape)
    assert batch_flops(shape, batch_size=3) / (3 * shape.seq_length) == pytest.approx(per_token, rel=2e-3)


def test_mfu_above_one_warns():
    with pytest.warns(UserWarning, match="MFU 1.50 is above 1"):
        assert mfu(3e12, time_s=1, num_devices=2, peak_flops=1e12) == 1.5


@pytest.mark.parametrize("call, name", [
    (lambda: train_flops("7", 5), "num_params"), (lambda: train_flops(7e9, -1), "num_tokens"),
    (lambda: mfu(1, time_s=0, num_devices=1, peak_flops=1), "time_s"),
    (lambda: mfu(float("nan"), time_s=1, num_devices=1, peak_flops=1), "model_flops"),
    (lambda: training_days(1, num_devices=0, flops_per_s=1), "num_devices"),
    (lambda: model_flops_per_token(GPT_7_5B, num_params=-1), "num_params"),
    (lambda: batch_flops(GPT_7_5B, batch_size=-1), "batch_size"),
])  # fmt: skip
def test_amounts_that_cannot_be_are_refused(call, name):
    with pytest.raises(ConfigError, match=rf"{name} \(.*\) must be"):
        call()


def test_mfu_of_one_does_not_warn(recwarn):
    assert mfu(2e12, time_s=1, num_devices=2, peak_flops=1e12) == 1 and not recwarn.list


@pytest.mark.parametrize("fields, words", [
    ({"hidden_size": 10}, r"hidden_size \(10\) must be divisible by num_heads \(4\)"),
    ({"vocab_size": 0}, r"vocab_size \(0\) must be at least 1"), ({"ffn_hidden_size": 0}, "ffn_hidden_size")])
def test_a_shape_that_cannot_be_is_refused(fields, words):
    sizes = {"num_layers": 1, "hidden_size": 8, "num_heads": 4, "seq_length": 4, "vocab_size": 16}
    with pytest.raises(ConfigError, match=words):
        ModelShape(**{**sizes, **fields})


@pytest.mark.parametrize("module", [flops, models])
def test_docstring_examples(module):
    result = doctest.testmod(module)
    assert result.attempted > 0 and result.failed == 0
