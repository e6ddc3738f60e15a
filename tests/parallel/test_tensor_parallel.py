"""Tensor parallelism against one process, in float64: whole models, refusals, bytes; and broken on purpose."""
import dataclasses
import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from live_ranks import pool
from torch import nn

import dtlab
from dtlab import theory
from dtlab.errors import ConfigError, RankError
from dtlab.models import GPT, GPTConfig, cross_entropy, init_by_name, num_params
from dtlab.parallel import tensor_parallel
from dtlab.parallel.tensor_parallel import (
    ParallelAttention,
    ParallelFeedForward,
    apply_tensor_parallel,
    clip_grad_norm_,
    gather_from_tp_region,
    vocab_parallel_cross_entropy,
)

LESSON = GPTConfig(seq_length=24)  # hidden 192, 12 heads, 4 layers, 256 tokens
SMALL = GPTConfig(vocab_size=30, seq_length=12, hidden_size=48, num_layers=2, num_heads=12)
NUM_STEPS = 5
close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)


def serial_gpt(config, **factory):
    """With biases and norms that are not all alike."""
    model = GPT(config, seed=1, **{"dtype": torch.float64, **factory})
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 10)
    return model


def batch(config, step):
    """Other tokens in each step and row, some of which do not count."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, config.vocab_size, (2, config.seq_length + 1), generator=generator)
    targets = tokens[:, 1:].masked_fill(torch.rand(2, config.seq_length, generator=generator) < 0.2, -100)
    return tokens[:, :-1], targets


def with_shards(model):
    """Name, parameter and how it is cut out of the whole one."""
    for name, parameter in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        shard = getattr(model.get_submodule(path), "parameter_shards", {}).get(leaf)
        yield name, parameter, shard.take if shard else lambda whole: whole


def keep_embeddings(model, kept):
    """Keep the embeddings' output, whose gradient is that of the layers' input."""
    model.token_embedding.register_forward_hook(lambda module, inputs, y: y.retain_grad() or kept.append(y))


def equals_serial(config, num_steps, *ways):
    """On a rank: assert that parallel models, made in each of these ways, train as the serial one does."""
    torch.set_num_threads(1)
    serial = serial_gpt(config)
    models = [serial, *(apply_tensor_parallel(serial_gpt(config), **options) for options in ways)]
    inputs, optimizers = [[] for _ in models], []
    for model, kept in zip(models, inputs):
        assert model.state_dict().keys() == serial.state_dict().keys()
        keep_embeddings(model, kept)
        optimizers.append(torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6))
    for step in range(num_steps):
        tokens, targets = batch(config, step)
        logits = serial(tokens)
        loss = cross_entropy(logits, targets, reduction="mean")
        losses = [loss]
        for model in models[1:]:
            mine = model(tokens)
            close(gather_from_tp_region(mine)[..., : config.vocab_size], logits, msg="logits: ".__add__)
            losses.append(vocab_parallel_cross_entropy(mine, targets, vocab_size=config.vocab_size, reduction="mean"))
            close(losses[-1], loss, msg="loss: ".__add__)
        for its_loss, optimizer in zip(losses, optimizers):
            optimizer.zero_grad()
            its_loss.backward()
        for model, kept in zip(models[1:], inputs[1:]):
            close(kept[-1].grad, inputs[0][-1].grad, msg="input gradient: ".__add__)
            compare(model, {name: p.grad for name, p in serial.named_parameters()}, "gradient of ", lambda p: p.grad)
        for optimizer in optimizers:
            optimizer.step()
    for model in models[1:]:
        compare(model, dict(serial.named_parameters()), f"after {num_steps} steps ", lambda p: p)


def compare(model, whole, what, of):
    for name, parameter, take in with_shards(model):
        close(of(parameter), take(whole[name]), msg=f"{what}{name}: ".__add__)


BOTH = {}, {"sequence_parallel": True}
SERIALLY = {"async_grad_all_reduce": False}
UNTIED = {"tie_embeddings": False}
VARIANTS = {  # ranks -> sizes and ways
    1: [({"num_kv_heads": 2, "swiglu": True}, BOTH)],
    2: [({"num_kv_heads": 1}, BOTH), ({"num_kv_heads": 4, "swiglu": True, **UNTIED}, [BOTH[1], SERIALLY])],
    3: [({"num_kv_heads": 1, **UNTIED}, BOTH), ({"swiglu": True, "vocab_size": 31, "flash_attention": False}, BOTH)],
    4: [({"num_kv_heads": 1, "flash_attention": False}, BOTH), ({"num_kv_heads": 2, "swiglu": True, **UNTIED}, BOTH),
        ({"num_kv_heads": 4}, [SERIALLY, {**SERIALLY, **BOTH[1]}])],
}  # fmt: skip


def train_all(tp_size):
    """On a rank: the lessons' model and smaller ones of all kinds. Nothing warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        equals_serial(LESSON, NUM_STEPS, *BOTH)
        has_as_many_parameters_as_theory_says(tp_size)
        for sizes, ways in VARIANTS[tp_size]:
            equals_serial(dataclasses.replace(SMALL, **sizes), 2, *ways)


def has_as_many_parameters_as_theory_says(tp_size):
    for tied in (True, False):
        config = dataclasses.replace(LESSON, tie_embeddings=tied)
        shape = theory.ModelShape(num_layers=4, hidden_size=192, num_heads=12, seq_length=24, vocab_size=256,
                                  tie_embeddings=tied)  # fmt: skip
        assert num_params(apply_tensor_parallel(GPT(config, device="meta"))) == theory.tp_params(shape, tp_size=tp_size)


def straight(tp_size):
    """On a rank, broken on purpose: rows cut as if all queries came first, then all keys, then all values."""
    right = tensor_parallel._qkv_rows
    tensor_parallel._qkv_rows = lambda config, rank, size, whole: torch.cat(
        [part.chunk(size)[rank] for part in whole.chunk(3)])
    try:
        equals_serial(SMALL, 1, {})
    finally:
        tensor_parallel._qkv_rows = right


@pytest.mark.ranks
@pytest.mark.parametrize("tp_size", [1, 2, 3, 4])
def test_training_equals_one_process(tp_size):
    pool(tp_size).run(train_all, tp_size)


@pytest.mark.ranks
def test_broken_heads_that_are_cut_apart_give_other_logits():
    with pytest.raises(RankError, match="logits: "):
        pool(4).run(straight, 4)


def owned(config):
    """On a rank: which elements of each whole parameter it has; -1 is padding."""
    model = apply_tensor_parallel(GPT(config, device="meta"))
    whole = {name: parameter.shape for name, parameter in GPT(config, device="meta").named_parameters()}
    counted = lambda shape: torch.arange(1, shape.numel() + 1).view(shape)
    return {name: (take(counted(whole[name])) - 1).flatten().tolist() for name, _, take in with_shards(model)}


@pytest.mark.ranks
@pytest.mark.parametrize("sizes", [{}, {"num_kv_heads": 2, "swiglu": True}])
def test_the_ranks_parts_are_the_whole_model(sizes):
    config = dataclasses.replace(SMALL, num_layers=1, hidden_size=24, ffn_hidden_size=None, seq_length=2, **sizes)
    answers = pool(4).run(owned, config)
    for name in answers[0]:
        parts = [part[name] for part in answers]
        elements = sorted(element for part in parts for element in part if element >= 0)
        assert set(elements) == set(range(max(elements) + 1))
        is_cut = len(set(map(tuple, parts))) > 1
        is_shared = "qkv" in name and sizes
        if is_cut and not is_shared:
            assert len(elements) == len(set(elements))  # and nothing twice
        assert is_cut == any(part in name for part in ("token", "output", "qkv", "proj.weight", "fc1", "fc2.weight"))


def started_on_meta():
    """On a rank: assert that a model that was never whole starts with the parts of the serial one, and trains."""
    for sizes in ({"num_kv_heads": 1}, {"tie_embeddings": False, "swiglu": True}):
        starts_on_meta(dataclasses.replace(SMALL, num_layers=1, **sizes))


def starts_on_meta(config):
    model = apply_tensor_parallel(GPT(config, device="meta", dtype=torch.float64), sequence_parallel=True)
    assert all(parameter.is_meta for parameter in model.parameters())
    init_by_name(model.to_empty(device="cpu"), 1)
    compare(model, dict(GPT(config, seed=1, dtype=torch.float64).named_parameters()), "start of ", lambda p: p)
    if config.tie_embeddings:
        assert model.output_layer.weight is model.token_embedding.weight
    tokens, targets = batch(config, 0)
    serial = GPT(config, seed=1, dtype=torch.float64)
    cross_entropy(serial(tokens), targets, reduction="sum").backward()
    vocab_parallel_cross_entropy(model(tokens), targets, vocab_size=30, reduction="sum").backward()
    compare(model, {name: p.grad for name, p in serial.named_parameters()}, "gradient of ", lambda p: p.grad)


@pytest.mark.ranks
@pytest.mark.parametrize("tp_size", [4, 3])
def test_a_model_that_no_rank_held_whole_starts_as_the_serial_one(tp_size):
    pool(tp_size).run(started_on_meta)


def single_layers(config):
    """On a rank: the layers by themselves start as the serial ones, and sum their own gradients."""
    for kind, serial in ((ParallelAttention, dtlab.models.Attention), (ParallelFeedForward, dtlab.models.FeedForward)):
        parallel = kind(config, seed=3, dtype=torch.float64)
        whole = init_by_name(serial(config, dtype=torch.float64), 3)
        x = torch.randn(2, 5, config.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        ys = [module(x) for module in (parallel, whole)]
        close(*ys)
        for y in ys:
            y.square().sum().backward()
        compare(parallel, {name: p.grad for name, p in whole.named_parameters()}, "gradient of ", lambda p: p.grad)


@pytest.mark.ranks
def test_attention_and_mlp_can_be_used_by_themselves():
    pool(4).run(single_layers, dataclasses.replace(SMALL, num_kv_heads=2, swiglu=True))


def from_other_seeds():
    """On a rank: the first rank's values, whatever this one's are; what is frozen and in evaluation stays so."""
    torch.set_num_threads(1)
    model = GPT(SMALL, seed=dist.get_rank(), dtype=torch.float64).eval()
    model.layers[0].requires_grad_(False)
    apply_tensor_parallel(model)
    compare(model, dict(GPT(SMALL, seed=0, dtype=torch.float64).named_parameters()), "", lambda p: p)
    trains = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trains == {name for name, _ in model.named_parameters() if "layers.0." not in name}
    assert not any(module.training for module in model.modules())


@pytest.mark.ranks
def test_the_model_starts_with_the_first_ranks_values():
    pool(3).run(from_other_seeds)


# norms


class Parts(nn.Module):
    """A row-parallel layer and a norm, with gradients 3 and 4 of the parts and 12 of what both ranks have."""

    def __init__(self):
        super().__init__()
        self.linear = tensor_parallel.RowParallelLinear(2, 1, bias=False, dtype=torch.float64)
        self.norm = nn.LayerNorm(1, bias=False, dtype=torch.float64)
        self.linear.weight.grad = torch.full((1, 1), 3.0 + dist.get_rank(), dtype=torch.float64)
        self.norm.weight.grad = torch.full((1,), 12.0, dtype=torch.float64)


def norm_of_parts():
    """On a rank: 3, 4 and 12."""
    model = Parts()
    norms = [clip_grad_norm_(model, torch.inf, norm_type=p).item() for p in (2.0, 1.0, torch.inf)]
    clip_grad_norm_(model, 6.5)
    return norms, model.linear.weight.grad.item(), model.norm.weight.grad.item()


@pytest.mark.ranks
def test_parts_count_on_each_rank_and_what_all_have_counts_once():
    for rank, (norms, part, whole) in enumerate(pool(2).run(norm_of_parts)):
        assert norms == pytest.approx([13.0, 19.0, 12.0])
        assert (part, whole) == pytest.approx(((3 + rank) / 2, 6))


def clipped(config, sequence_parallel):
    """On a rank: assert that the norm and the clipped gradients are the serial ones."""
    serial, (tokens, targets) = serial_gpt(config), batch(config, 0)
    parallel = apply_tensor_parallel(serial_gpt(config), sequence_parallel=sequence_parallel)
    cross_entropy(serial(tokens), targets, reduction="sum").backward()
    vocab_parallel_cross_entropy(parallel(tokens), targets, vocab_size=30, reduction="sum").backward()
    close(clip_grad_norm_(parallel, 1.0), nn.utils.clip_grad_norm_(serial.parameters(), 1.0))
    compare(parallel, {name: p.grad for name, p in serial.named_parameters()}, "", lambda p: p.grad)


@pytest.mark.ranks
def test_the_norm_of_a_model_with_shared_heads_and_padding_is_the_serial_one():
    pool(4).run(clipped, dataclasses.replace(SMALL, num_kv_heads=2), True)
    pool(4).run(clipped, dataclasses.replace(SMALL, num_kv_heads=1, tie_embeddings=False), False)


# refusals


def refused(how):
    """On a rank: the error's text, and whether the model is as it was before."""
    rank = dist.get_rank()
    sizes = {"vocab_size": 30, "seq_length": 4, "hidden_size": 24, "num_layers": 1, "num_heads": 4}
    model = GPT(GPTConfig(**{**sizes, **WRONG_SIZES.get(how, {})}))
    wrong = {
        "twice": lambda: apply_tensor_parallel(model),
        "wrapped": lambda: dtlab.parallel.DistributedDataParallel(model),
        "no GPT": lambda: nn.Linear(2, 2),
        "a changed one": lambda: setattr(model.layers[0], "mlp", nn.Identity()) or model,
        "another dtype": lambda: model.to(torch.float64 if rank == 2 else torch.float32),
        "other sizes": lambda: GPT(GPTConfig(**{**sizes, "num_heads": 8 if rank == 1 else 4})),
    }
    model = wrong[how]() if how in wrong else model
    group = dist.new_group([0, 2]) if how == "no member" else None
    as_it_is = lambda: [(name, id(p), p.sum().item()) for name, p in model.named_parameters()]
    before = as_it_is()
    if how == "no member" and rank in (0, 2):
        return None, True
    try:
        apply_tensor_parallel(model, group=group, sequence_parallel=how == "other options" and rank == 3)
    except ConfigError as error:
        return str(error), before == as_it_is()


WRONG_SIZES = {
    "heads": {"num_heads": 6}, "kv heads": {"num_heads": 12, "num_kv_heads": 3}, "ffn": {"ffn_hidden_size": 50},
    "vocabulary": {"vocab_size": 3},
}  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize("how, text", [
    ("heads", "num_heads (6) does not divide by tp_size (4); legal are 1, 2, 3, 6"),
    ("kv heads", "num_kv_heads (3) does not divide by tp_size (4), nor tp_size by num_kv_heads; legal are 1, 3, 6, 12"),
    ("ffn", "ffn_hidden_size (50) does not divide by tp_size (4); legal are 1, 2"),
    ("vocabulary", "vocab_size (3) is below tp_size (4)"), ("twice", "the model is parallel already"),
    ("wrapped", "wrap the plain model"), ("no GPT", "give a dtlab.models.GPT"), ("a changed one", "mlp is a Identity"),
    ("another dtype", "rank 2 has another model"), ("other sizes", "rank 1 has another model"),
    ("other options", "rank 3 has another model or option"), ("no member", "is not in this group"),
])  # fmt: skip
def test_what_cannot_work_is_refused_on_every_rank_and_nothing_changes(how, text):
    answers = pool(4).run(refused, how)
    texts, unchanged = zip(*answers)
    if how == "no member":
        assert all(text in answer for answer in (texts[1], texts[3]))
    else:
        assert len(set(texts)) == 1 and text in texts[0]
    assert all(unchanged)


@pytest.mark.ranks
def test_twelve_heads_on_eight_ranks_are_refused_with_the_legal_degrees():
    text = r"num_heads \(12\) does not divide by tp_size \(8\); legal are 1, 2, 3, 4, 6, 12"
    with pytest.raises(RankError, match=text):
        dtlab.record_dry(lambda: apply_tensor_parallel(GPT(GPTConfig())), world_size=8)
