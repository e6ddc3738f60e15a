"""Initialisation by name: equal at any degree, in any process, in any dtype."""
import copy
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from dtlab.errors import ConfigError
from dtlab.models import GPT, MLP, GPTConfig, ParameterShard, full_parameter, init_by_name, num_params

SMALL = GPTConfig(vocab_size=32, seq_length=8, hidden_size=24, num_layers=4, num_heads=4)


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_shards_of_the_full_tensor_make_up_the_serial_model(degree):
    model = GPT(SMALL, seed=3)
    for name, parameter in model.named_parameters():
        shards = [full_parameter(name, parameter.shape, 3).tensor_split(degree)[rank] for rank in range(degree)]
        assert torch.equal(torch.cat(shards), parameter), name


def test_a_pipeline_stage_equals_its_part_of_the_serial_model():
    serial, part = GPT(SMALL, seed=3), GPT(SMALL).layers[2:]
    init_by_name(part, 3, rename=lambda name: f"layers.{int(name[0]) + 2}{name[1:]}")
    for ours, theirs in zip(part.parameters(), serial.layers[2:].parameters()):
        assert torch.equal(ours, theirs)


class Lower(nn.Module):
    """What rank 1 of 2 has of an nn.Linear(3, 4)."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(2, 3)), nn.Parameter(torch.empty(4))
        self.parameter_shards = {"weight": ParameterShard((4, 3), lambda whole: whole[2:])}


def test_a_module_says_how_its_parameters_are_cut_and_copies_of_it_still_do():
    serial = init_by_name(nn.ModuleDict({"inner": nn.Linear(3, 4)}), 3)
    part = nn.ModuleDict({"inner": Lower()})
    for module in (part, copy.deepcopy(part), part.to("meta").to_empty(device="cpu")):
        init_by_name(module, 3)
        assert torch.equal(module["inner"].weight, serial["inner"].weight[2:])
        assert torch.equal(module["inner"].bias, serial["inner"].bias)


def test_a_part_of_another_shape_is_an_error():
    part = Lower()
    part.parameter_shards["weight"] = ParameterShard((4, 3), lambda whole: whole[1:])
    with pytest.raises(RuntimeError, match="must match"):
        init_by_name(part, 3)


def test_order_of_construction_and_global_seed_do_not_matter():
    torch.manual_seed(1)
    first = GPT(SMALL).state_dict()
    torch.manual_seed(2)
    torch.randn(7)
    second = GPT(SMALL).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_float32_is_float64_rounded():
    single, double = GPT(SMALL), GPT(SMALL, dtype=torch.float64)
    for ours, theirs in zip(single.parameters(), double.parameters()):
        assert torch.equal(ours, theirs.float())


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_first_values_are_the_same_in_every_process(hash_seed):
    code = "from dtlab.models import full_parameter as f; print(*f('a.weight', (2, 2), 0).flatten().tolist())"
    output = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": hash_seed},
                            capture_output=True, text=True, check=True).stdout
    assert [float(x) for x in output.split()] == full_parameter("a.weight", (2, 2), 0).flatten().tolist()


def test_golden_values():
    values = full_parameter("layers.0.mlp.linear_fc1.weight", (4, 2), 0, dtype=torch.float64)
    torch.testing.assert_close(values[0].tolist(), [-0.6113625299012377, -0.873793546924842], rtol=1e-10, atol=0)


def test_another_name_or_seed_is_another_tensor():
    base = full_parameter("a.weight", (4, 4), 0)
    assert not torch.equal(base, full_parameter("b.weight", (4, 4), 0))
    assert not torch.equal(base, full_parameter("a.weight", (4, 4), 1))


def test_biases_norms_and_matrices_start_at_their_scale():
    model = nn.Sequential(nn.Linear(400, 300), nn.LayerNorm(300))
    init_by_name(model, 0)
    assert model[0].bias.eq(0).all() and model[1].weight.eq(1).all() and model[1].bias.eq(0).all()
    assert abs(model[0].weight.std().item() * 20 - 1) < 0.02
    assert abs(full_parameter("token_embedding.weight", (400, 300), 0).std().item() / 0.02 - 1) < 0.02


def test_num_params_counts_a_tied_parameter_once():
    h, layers, vocab, seq = 24, 4, 32, 8
    per_layer = 12 * h * h + 13 * h  # matrices; biases and norms
    tied = vocab * h + seq * h + layers * per_layer + 2 * h
    assert num_params(GPT(SMALL)) == tied
    assert num_params(GPT(GPTConfig(32, 8, 24, 4, 4, tie_embeddings=False))) == tied + vocab * h


def test_two_parameters_under_one_name_are_refused():
    with pytest.raises(ConfigError, match="'layers.0.weight' and 'layers.1.weight' the same name 'weight'"):
        init_by_name(MLP([4, 4, 4]), 0, rename=lambda name: name.split(".")[-1] if "weight" in name else name)


def test_a_negative_seed_is_refused():
    with pytest.raises(ConfigError, match=r"seed \(-1\) must be at least 0"):
        full_parameter("a.weight", (2, 2), -1)


def test_the_meta_device_needs_no_memory():
    assert next(GPT(GPTConfig(hidden_size=12288, num_heads=96), device="meta").parameters()).is_meta


def test_a_tied_weight_stays_tied_when_it_leaves_the_meta_device():
    config = GPTConfig(vocab_size=5, seq_length=3, hidden_size=4, num_layers=1, num_heads=2)
    model = init_by_name(GPT(config, device="meta").to_empty(device="cpu"), 3)
    assert model.output_layer.weight is model.token_embedding.weight
    for mine, whole in zip(model.parameters(), GPT(config, seed=3).parameters(), strict=True):
        assert torch.equal(mine, whole)
