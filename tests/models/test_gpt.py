"""The small GPT and the MLP: fresh loss, golden losses, gradients, refused sizes."""
import math

import pytest
import torch

from dtlab.data import SyntheticLanguage, batches
from dtlab.errors import ConfigError
from dtlab.models import GPT, MLP, GPTConfig, cross_entropy, full_parameter, num_params
from dtlab.models.gpt import written_out_attention

SMALL = dict(vocab_size=64, seq_length=16, hidden_size=48, num_layers=2, num_heads=4)


def train(model, steps, data, lr=3e-3):
    """Losses of ``steps`` AdamW steps on batches of 8."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=lr), []
    for step in range(steps):
        inputs, targets = batches(data, model.config.seq_length, 8, 0, step)
        loss = cross_entropy(model(inputs), targets, reduction="mean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def tokens():
    return SyntheticLanguage(64, seed=0).sample(20_000, seed=0)


@pytest.mark.parametrize("tied", [True, False])
def test_a_fresh_models_loss_is_close_to_ln_256(tied):
    tokens = torch.randint(256, (2, 129), generator=torch.Generator().manual_seed(0))
    loss = cross_entropy(GPT(GPTConfig(tie_embeddings=tied))(tokens[:, :-1]), tokens[:, 1:], reduction="mean")
    assert abs(loss.item() - math.log(256)) < 0.1


def test_golden_losses(tokens):
    golden = [4.171920389, 4.039395431, 3.989772401, 3.925585341, 3.857629692, 3.753250221]
    for dtype, rtol in ((torch.float64, 1e-7), (torch.float32, 1e-4)):
        losses = train(GPT(GPTConfig(**SMALL), dtype=dtype), 6, tokens)
        torch.testing.assert_close(losses, golden, rtol=rtol, atol=0)


def test_golden_losses_of_the_mlp():
    model = MLP([8, 32, 32, 4], dtype=torch.float64)
    x = full_parameter("x", (64, 8), 1, dtype=torch.float64)
    targets = full_parameter("t", (64, 4), 1, dtype=torch.float64).argmax(1)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(4):
        loss = cross_entropy(model(x), targets, reduction="mean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    torch.testing.assert_close(losses, [1.43526235, 1.373318085, 1.338819538, 1.316999181], rtol=1e-7, atol=0)


def test_float64_training_repeats_bit_by_bit(tokens):
    first, second = (train(GPT(GPTConfig(**SMALL), dtype=torch.float64), 3, tokens) for _ in range(2))
    assert first == second


def test_training_beats_counting_tokens_and_stays_above_the_entropy():
    language = SyntheticLanguage(16, seed=0)
    model = GPT(GPTConfig(vocab_size=16, seq_length=16, hidden_size=32, num_layers=1, num_heads=4))
    final = sum(train(model, 120, language.sample(20_000, 0), lr=1e-2)[-20:]) / 20
    assert language.entropy_nats < final < language.unigram_entropy_nats - 0.3


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_gets_a_gradient(tied):
    model = GPT(GPTConfig(**SMALL, tie_embeddings=tied), dtype=torch.float64)
    tokens = torch.arange(32).view(2, 16)
    cross_entropy(model(tokens), tokens, reduction="sum").backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_the_future_does_not_change_the_past():
    model, tokens = GPT(GPTConfig(**SMALL), dtype=torch.float64), torch.arange(16)[None]
    changed = tokens.clone()
    changed[0, 10:] = 63
    torch.testing.assert_close(model(tokens)[:, :10], model(changed)[:, :10], rtol=1e-12, atol=0)
    assert not torch.allclose(model(tokens)[:, 10:], model(changed)[:, 10:])


def test_written_out_attention_equals_flash():
    tokens = torch.arange(32).view(2, 16)
    grads = []
    for flash in (True, False):
        model = GPT(GPTConfig(**SMALL, flash_attention=flash), dtype=torch.float64)
        cross_entropy(model(tokens), tokens, reduction="mean").backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-10, atol=1e-12)


def test_a_score_of_the_future_that_overflows_does_not_reach_the_past():
    q, k, v = (torch.tensor(rows, dtype=torch.float16).view(1, 1, 2, 1) for rows in ([2, 2], [1, 60000], [1, 3]))
    first, second = written_out_attention(q, k, v).flatten().tolist()
    assert first == 1 and math.isnan(second)


def test_a_model_with_another_head_goes_to_other_dtypes_and_devices():
    model = GPT(GPTConfig(**SMALL))
    model.output_layer = torch.nn.Identity()
    assert model.to(torch.float64)(torch.arange(16)[None]).dtype == torch.float64


def test_equal_runs_of_qkv_rows_are_whole_heads():
    attention = GPT(GPTConfig(**SMALL), dtype=torch.float64).layers[0].self_attention
    x = full_parameter("x", (2, 16, 48), 0, dtype=torch.float64)
    partial = torch.zeros_like(x)
    for rank in range(2):  # what tensor parallelism does on 2 ranks, one after the other
        half = GPT(GPTConfig(**SMALL), dtype=torch.float64).layers[0].self_attention
        half.num_heads = half.num_kv_heads = 2
        half.linear_qkv.weight.data = attention.linear_qkv.weight.data.chunk(2)[rank]
        half.linear_qkv.bias.data = attention.linear_qkv.bias.data.chunk(2)[rank]
        half.linear_proj.weight.data = attention.linear_proj.weight.data.chunk(2, dim=1)[rank]
        partial += half(x)
    torch.testing.assert_close(partial, attention(x), rtol=1e-10, atol=1e-12)


def test_embed_layers_head_are_the_forward():
    model, tokens = GPT(GPTConfig(**SMALL)), torch.arange(32).view(2, 16)
    x = torch.cat([model.embed(tokens[:, :6]), model.embed(tokens[:, 6:], first_position=6)], dim=1)
    for layer in model.layers:
        x = layer(x)
    assert torch.equal(model.head(x), model(tokens))


def test_positions_say_where_tokens_stand():
    model, tokens = GPT(GPTConfig(**SMALL), dtype=torch.float64), torch.arange(32).view(2, 16)
    assert torch.equal(model(tokens, positions=torch.arange(16)), model(tokens))
    order = torch.tensor([5, 0, 15, 7])
    assert torch.equal(model.embed(tokens[:, order], positions=order), model.embed(tokens)[:, order])
    with pytest.raises(ConfigError, match=r"positions \[4\] must have one number for each of the 16 tokens"):
        model(tokens, positions=order)
    with pytest.raises(ConfigError, match=r"position 16, but the model has seq_length \(16\), so 0 to 15.*length=17"):
        model(tokens, positions=torch.arange(16) + 1)
    with pytest.raises(ConfigError, match=r"first_position \(4\) and positions both say"):
        model.embed(tokens[:, :4], first_position=4, positions=order)


# kv heads shared by query heads; SwiGLU


def with_kv_heads(num_kv_heads, **options):
    return GPT(GPTConfig(**{**SMALL, "num_heads": 6, **options}, num_kv_heads=num_kv_heads), dtype=torch.float64)


def test_as_many_kv_heads_as_heads_are_the_default():
    assert GPTConfig(**SMALL).num_kv_heads == 4 and GPTConfig(**SMALL) == GPTConfig(**SMALL, num_kv_heads=4)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3])
def test_shared_kv_heads_equal_as_many_heads_with_copies_of_them(num_kv_heads):
    shared, full = with_kv_heads(num_kv_heads), with_kv_heads(6)
    d, queries = 8, 6 // num_kv_heads
    for ours, theirs in zip(shared.layers, full.layers):
        rows = ours.self_attention.linear_qkv.weight.data
        groups = rows.unflatten(0, (num_kv_heads, queries + 2, d))  # q, q, .., k, v of each
        heads = [torch.stack([group[i], group[-2], group[-1]]) for group in groups for i in range(queries)]
        theirs.self_attention.linear_qkv.weight.data.copy_(torch.cat(heads).flatten(0, 1))
    tokens = torch.arange(32).view(2, 16)
    torch.testing.assert_close(shared(tokens), full(tokens), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", [dict(num_kv_heads=2), dict(num_kv_heads=1, flash_attention=False)])
def test_every_parameter_of_shared_kv_heads_and_swiglu_gets_the_right_gradient(options):
    model = GPT(GPTConfig(vocab_size=7, seq_length=5, hidden_size=8, num_layers=1, num_heads=4, ffn_hidden_size=6,
                          swiglu=True, **options), dtype=torch.float64)  # fmt: skip
    tokens = torch.arange(5)[None]
    loss = lambda: cross_entropy(model(tokens), tokens, reduction="sum")
    loss().backward()
    for name, parameter in model.named_parameters():
        flat, grad = parameter.data.view(-1), parameter.grad.view(-1)
        i = int(grad.abs().argmax())
        before = flat[i].item()
        values = []
        for step in (1e-5, -1e-5):
            flat[i] = before + step
            values.append(loss().item())
        flat[i] = before
        assert (values[0] - values[1]) / 2e-5 == pytest.approx(grad[i].item(), rel=1e-4), name


def test_swiglu_is_its_formula():
    mlp = GPT(GPTConfig(**SMALL, ffn_hidden_size=20, swiglu=True), dtype=torch.float64).layers[0].mlp
    x = full_parameter("x", (2, 3, 48), 0, dtype=torch.float64)
    gate, up = (x @ rows.T for rows in (mlp.linear_fc1.weight[:20], mlp.linear_fc1.weight[20:]))
    expected = (gate * gate.sigmoid() * up) @ mlp.linear_fc2.weight.T
    torch.testing.assert_close(mlp(x), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", [dict(num_kv_heads=2), dict(swiglu=True)])
def test_these_models_have_as_many_parameters_as_their_matrices(options):
    config = GPTConfig(**SMALL, **options)
    h, d, f = 48, 12, config.ffn_hidden_size
    qkv, fc1 = (4 + 2 * config.num_kv_heads) * d, f * (2 if config.swiglu else 1)
    layer = (h + 1) * (qkv + fc1 + h) + f * h + h + 4 * h
    assert num_params(GPT(config)) == 64 * h + 16 * h + 2 * layer + 2 * h


def test_dropout_acts_in_training_only():
    model, tokens = GPT(GPTConfig(**SMALL, dropout=0.5)), torch.arange(16)[None]
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_mean_of_means_is_not_the_mean():
    logits = full_parameter("x", (4, 8), 0, dtype=torch.float64)
    targets = torch.tensor([0, -100, -100, -100]), torch.tensor([1, 2, 3, -100])
    both = cross_entropy(torch.cat([logits, logits]), torch.cat(targets), reduction="mean")
    sums = sum(cross_entropy(logits, part, reduction="sum") for part in targets)
    means = sum(cross_entropy(logits, part, reduction="mean") for part in targets) / 2
    assert torch.isclose(sums / 4, both) and not torch.isclose(means, both)
    assert cross_entropy(logits, targets[0], reduction="none").shape == (4,)


@pytest.mark.parametrize("sizes, message", [
    (dict(hidden_size=10, num_heads=4), r"hidden_size \(10\) must be divisible by num_heads \(4\): "
                                        "use hidden_size 8 or 12, or num_heads 1, 2, 5 or 10"),
    (dict(hidden_size=192, num_heads=7), "use hidden_size 189 or 196, or num_heads 1, 2, 3, 4, 6, 8, 12 or 16"),
    (dict(hidden_size=2, num_heads=4), "use hidden_size 4, or num_heads 1 or 2"),
    (dict(num_heads=4, num_kv_heads=3), r"num_heads \(4\) must be divisible by num_kv_heads \(3\): "
                                        "use num_heads 3 or 6, or num_kv_heads 1, 2 or 4"),
    (dict(num_kv_heads=0), r"num_kv_heads \(0\) must be at least 1"),
    (dict(num_layers=0), r"num_layers \(0\) must be at least 1"),
    (dict(vocab_size=1.5), r"vocab_size \(1.5\) must be a whole number"),
    (dict(hidden_size=True), r"hidden_size \(True\) must be a whole number"),
    (dict(dropout=1.0), r"dropout \(1.0\) must be at least 0 and below 1"),
])
def test_impossible_sizes_are_refused(sizes, message):
    with pytest.raises(ConfigError, match=message):
        GPTConfig(**sizes)


def test_impossible_inputs_are_refused():
    with pytest.raises(ConfigError, match=r"the sequence is 17 tokens long, but the model has seq_length \(16\)"):
        GPT(GPTConfig(**SMALL))(torch.zeros(1, 17, dtype=torch.long))
    with pytest.raises(ConfigError, match="'average'.*'sum', 'mean' or 'none'"):
        cross_entropy(torch.zeros(2, 4), torch.zeros(2, dtype=torch.long), reduction="average")
    with pytest.raises(ConfigError, match=r"logits \(2, 4\) need targets of shape \(2,\), not \(3,\)"):
        cross_entropy(torch.zeros(2, 4), torch.zeros(3, dtype=torch.long), reduction="sum")
    with pytest.raises(ConfigError, match="at least two numbers"):
        MLP([8])
