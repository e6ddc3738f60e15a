"""torch's DTensors and ours in float64: a GPT cut by both gives the same numbers, and sends the same bytes."""
import functools

import pytest
import torch
import torch.distributed as dist
from live_ranks import pool
from split_gpt import batch, close, compare, serial_gpt

from dtlab.models import GPTConfig, cross_entropy
from dtlab.parallel import apply_tensor_parallel, vocab_parallel_cross_entropy

pytestmark = pytest.mark.ranks
CONFIG = GPTConfig(vocab_size=36, seq_length=12, hidden_size=24, num_layers=2, num_heads=12, tie_embeddings=False)


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def ranks(request):
    """Live ranks, guarded: a false alarm fails the test."""
    return pool(request.param)


def by_dtensor(model, sequence_parallel):
    """On a rank: torch's tensor parallelism, layer by layer."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    between = Shard(1) if sequence_parallel else Replicate()  # of what stands between the split regions
    columns = functools.partial(ColwiseParallel, input_layouts=Replicate())
    enter = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
    plan = {"token_embedding": RowwiseParallel(input_layouts=Replicate()),
            "output_layer": ColwiseParallel(input_layouts=between, use_local_output=False)}
    if sequence_parallel:
        plan |= {"dropout": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=between),
                 "final_layernorm": SequenceParallel()}
    for i, layer in enumerate(model.layers):
        plan |= {f"layers.{i}.{name}": style for name, style in (
            ("self_attention", enter), ("mlp", enter),
            ("self_attention.linear_qkv", columns()), ("mlp.linear_fc1", columns()),
            ("self_attention.linear_proj", RowwiseParallel(output_layouts=between)),
            ("mlp.linear_fc2", RowwiseParallel(output_layouts=between)))}
        if sequence_parallel:
            plan |= {f"layers.{i}.{name}": SequenceParallel() for name in ("input_layernorm", "pre_mlp_layernorm")}
        layer.self_attention.num_heads //= dist.get_world_size()  # what it sees of a cut weight
        layer.self_attention.num_kv_heads //= dist.get_world_size()
    return parallelize_module(model, dist.init_device_mesh("cpu", (dist.get_world_size(),)), plan)


def passed(model, loss_of):
    """On a rank: logits, loss, and the gradient of what enters the first layer; parameters have theirs."""
    kept = []
    model.token_embedding.register_forward_hook(lambda module, inputs, y: y.retain_grad() or kept.append(y))
    tokens, targets = batch(CONFIG, num_rows=3)
    logits = model(tokens)
    loss = loss_of(logits, targets)
    loss.backward()
    return logits.detach(), loss.detach(), kept[0].grad


def pass_of_dtensor(sequence_parallel):
    """As ``passed``, and the model. Its loss does not gather logits either."""
    from torch.distributed.tensor.parallel import loss_parallel

    model = by_dtensor(serial_gpt(CONFIG), sequence_parallel)
    with loss_parallel():
        return model, passed(model, functools.partial(cross_entropy, reduction="sum"))


def pass_of_ours(sequence_parallel):
    model = apply_tensor_parallel(serial_gpt(CONFIG), sequence_parallel=sequence_parallel)
    loss_of = functools.partial(vocab_parallel_cross_entropy, vocab_size=CONFIG.vocab_size, reduction="sum")
    return model, passed(model, loss_of)


def whole(tensor):
    """Without torch's wrapping: of a part that is still to be summed, the sum."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def compare_all(sequence_parallel):
    """On a rank: assert that both give the same."""
    torchs, (its_logits, its_loss, its_input_grad) = pass_of_dtensor(sequence_parallel)
    ours, (logits, loss, input_grad) = pass_of_ours(sequence_parallel)
    close(logits, its_logits.to_local(), msg="logits: ".__add__)
    close(loss, whole(its_loss), msg="loss: ".__add__)
    close(input_grad, its_input_grad, msg="input gradient: ".__add__)
    for what, of in (("", lambda p: p.data), ("gradient of ", lambda p: p.grad)):
        compare(ours, {name: whole(of(p)) for name, p in torchs.named_parameters()}, what, of)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_logits_loss_input_gradient_and_every_weights_gradient_are_dtensors(ranks, sequence_parallel):
    ranks.run(compare_all, sequence_parallel)


def unsummed():
    """On a rank: the gradient of a norm, ours, and what torch's has on this rank, a part of the sum."""
    name = "layers.0.input_layernorm.weight"
    torchs, ours = (make(True)[0].get_parameter(name).grad for make in (pass_of_dtensor, pass_of_ours))
    return ours, torchs.to_local()


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_broken_without_the_sum_a_norms_gradient_is_of_the_ranks_own_tokens(ranks):
    answers = ranks.run(unsummed)
    assert all((part - mine).norm() > 0.1 * mine.norm() for mine, part in answers)
    close(sum(part for _, part in answers), answers[0][0])


# bytes


def start(make, sequence_parallel):
    """On a rank: keep a layer, and what enters it."""
    global kept
    x = torch.ones(3, CONFIG.seq_length // (dist.get_world_size() if sequence_parallel else 1), CONFIG.hidden_size)
    layer = make(serial_gpt(CONFIG), sequence_parallel=sequence_parallel).layers[0]
    for part in (layer.input_layernorm, layer.pre_mlp_layernorm):
        part.requires_grad_(False)  # ours sums their gradients at the end of a pass, torch's leaves that to others
    for part in (layer.self_attention.linear_proj, layer.mlp.linear_fc2):
        part.bias.requires_grad_(False)  # ours sums these too, torch's has gathered what they are of
    kept = layer, x.double().requires_grad_()


def layer_pass():
    layer, x = kept
    layer(x).sum().backward()


def calls(ranks, make, sequence_parallel):
    """Rank 0's collectives of a layer: op -> (calls, bytes of the whole tensors)."""
    ranks.run(start, make, sequence_parallel)
    rows = ranks.record(layer_pass).communication().query("rank == 0").groupby("op")
    return {op.split("_into")[0].removesuffix("_tensor"): (its.calls.sum(), its.tensor_bytes.sum()) for op, its in rows}


@pytest.mark.parametrize("ranks", [2, 3, 4], indirect=True)
def test_a_layer_sends_what_dtensors_does_and_gathers_again_what_it_does_not_keep(ranks):
    each = 8 * 3 * CONFIG.seq_length * CONFIG.hidden_size
    ours, torchs = ([calls(ranks, make, sp) for sp in (False, True)] for make in (apply_tensor_parallel, by_dtensor))
    assert ours[0] == torchs[0] == {"all_reduce": (4, 4 * each)}
    assert torchs[1] == {"all_gather": (4, 4 * each), "reduce_scatter": (4, 4 * each)}
    assert ours[1] == {"all_gather": (6, 6 * each), "reduce_scatter": (4, 4 * each)}
