"""Tensor parallelism against one process, in float64: whole models, refusals, bytes; and broken on purpose."""
import copy
import dataclasses
import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from live_ranks import pool
from split_gpt import batch, close, compare, compare_gradients, serial_gpt, with_shards
from torch import nn

import dtlab
from dtlab import theory
from dtlab.errors import ConfigError, RankError
from dtlab.models import GPT, GPTConfig, cross_entropy, init_by_name, num_params
from dtlab.parallel import DistributedDataParallel, FullyShardedModule, ZeroOptimizer, tensor_parallel
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


def keep_embeddings(model, kept):
    """Keep the embeddings' output, whose gradient is that of the layers' input."""
    model.token_embedding.register_forward_hook(lambda module, inputs, y: y.retain_grad() or kept.append(y))


def steps(model, num_steps, loss_of):
    """Train: after each backward pass logits, loss and the gradient of the layers' input; parameters have theirs."""
    kept = []
    keep_embeddings(model, kept)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    for step in range(num_steps):
        tokens, targets = batch(model.config, step)
        logits = model(tokens)
        loss = loss_of(logits, targets, reduction="mean")
        optimizer.zero_grad()
        loss.backward()
        yield logits.detach(), loss.detach(), kept[-1].grad
        optimizer.step()


@functools.cache
def serial_steps(config, num_steps):
    """One process: of each step what ``steps`` gives, and gradients; and the parameters at the end."""
    model, found = serial_gpt(config), []
    for values in steps(model, num_steps, cross_entropy):
        found.append((values, {name: p.grad.clone() for name, p in model.named_parameters()}))
    return found, {name: p.detach() for name, p in model.named_parameters()}


def equals_serial(config, serial, *ways):
    """On a rank: assert that parallel models, made in each of these ways, train as the serial one does."""
    loss_of = functools.partial(vocab_parallel_cross_entropy, vocab_size=config.vocab_size)
    found, params = serial
    for options in ways:
        model = serial_gpt(config)
        names = model.state_dict().keys()
        assert apply_tensor_parallel(model, **options).state_dict().keys() == names
        for mine, (whole, grads) in zip(steps(model, len(found), loss_of), found):
            mine = gather_from_tp_region(mine[0])[..., : config.vocab_size], *mine[1:]
            for what, value, its in zip(("logits", "loss", "input gradient"), mine, whole):
                close(value, its, msg=f"{what}: ".__add__)
            compare(model, grads, "gradient of ", lambda p: p.grad)
        compare(model, params, f"after {len(found)} steps ", lambda p: p)


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


def train_all(tp_size, lesson, serials):
    """On a rank: the lessons' model and smaller ones of all kinds. Nothing warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        equals_serial(LESSON, lesson, *BOTH)
        has_as_many_parameters_as_theory_says(tp_size)
        for (sizes, ways), serial in zip(VARIANTS[tp_size], serials):
            equals_serial(dataclasses.replace(SMALL, **sizes), serial, *ways)


def has_as_many_parameters_as_theory_says(tp_size):
    for tied in (True, False):
        config = dataclasses.replace(LESSON, tie_embeddings=tied)
        shape = theory.ModelShape(num_layers=4, hidden_size=192, num_heads=12, seq_length=24, vocab_size=256,
                                  tie_embeddings=tied)  # fmt: skip
        assert num_params(apply_tensor_parallel(GPT(config, device="meta"))) == theory.tp_params(shape, tp_size=tp_size)


def straight(serial):
    """On a rank, broken on purpose: rows cut as if all queries came first, then all keys, then all values."""
    right = tensor_parallel._qkv_rows
    tensor_parallel._qkv_rows = lambda config, rank, size, whole: torch.cat(
        [part.chunk(size)[rank] for part in whole.chunk(3)])
    try:
        equals_serial(SMALL, serial, {})
    finally:
        tensor_parallel._qkv_rows = right


@pytest.mark.ranks
@pytest.mark.parametrize("tp_size", [1, 2, 3, 4])
def test_training_equals_one_process(tp_size):
    serials = [serial_steps(dataclasses.replace(SMALL, **sizes), 2) for sizes, _ in VARIANTS[tp_size]]
    pool(tp_size).run(train_all, tp_size, serial_steps(LESSON, NUM_STEPS), serials)


@pytest.mark.ranks
def test_broken_heads_that_are_cut_apart_give_other_logits():
    with pytest.raises(RankError, match="logits: "):
        pool(4).run(straight, serial_steps(SMALL, 1))


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
    compare_gradients(model, serial)


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
        compare_gradients(parallel, whole)


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


# other dtypes and devices


def passed(kv_heads, how, sequence_parallel, device="cpu"):
    """On a rank: gradients of a model in 16 bits, or of a float64 one on a GPU, held against the serial one's."""
    dtype = {"16 bits": torch.bfloat16, "autocast": torch.float32, "float64": torch.float64}[how]
    config = dataclasses.replace(SMALL, num_kv_heads=kv_heads)
    serial, model = serial_gpt(config), serial_gpt(config, dtype=dtype).to(device)
    apply_tensor_parallel(model, sequence_parallel=sequence_parallel)
    tokens, targets = batch(config)
    cross_entropy(serial(tokens), targets, reduction="sum").backward()
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        logits = model(tokens.to(device))
    loss = vocab_parallel_cross_entropy(logits, targets.to(device), vocab_size=30, reduction="sum")
    loss.backward()
    assert loss.dtype == (torch.float64 if how == "float64" else torch.float32)
    assert logits.dtype == (torch.float64 if how == "float64" else torch.bfloat16)
    assert all(p.grad.dtype == dtype for p in model.parameters())
    compare_gradients(model, serial, close if how == "float64" else within_16_bits)
    norms = [clip_grad_norm_(model, torch.inf).cpu(), nn.utils.clip_grad_norm_(serial.parameters(), torch.inf)]
    (close if how == "float64" else within_16_bits)(*norms, msg="norm: ".__add__)
    return model.final_layernorm.weight.grad.cpu()


def within_16_bits(part, right, msg):
    """As far as all elements together go."""
    error = (part.double() - right).norm() / right.norm()
    assert error < 0.06, msg(f"{error:.3f} of its norm")


@pytest.mark.ranks
@pytest.mark.parametrize("how", ["16 bits", "autocast"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_models_in_16_bits_have_the_serial_gradients_and_copies_stay_equal(how, sequence_parallel):
    first, *others = pool(4).run(passed, 2, how, sequence_parallel)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.gpu
@pytest.mark.ranks
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
@pytest.mark.parametrize("kv_heads, sequence_parallel", [(12, False), (1, True)])
def test_on_a_gpu(kv_heads, sequence_parallel):
    with dtlab.launch(2, device="cuda", share_gpu=torch.cuda.device_count() < 2) as ranks:
        ranks.run(passed, kv_heads, "float64", sequence_parallel, "cuda")


# copies


def copied():
    """On a rank: a copy of a model with a group trains as the serial one, by itself."""
    group = dist.new_group([0, 1])
    config = dataclasses.replace(SMALL, num_kv_heads=1)
    serial, model = serial_gpt(config), apply_tensor_parallel(serial_gpt(config), group=group, sequence_parallel=True)
    twin = copy.deepcopy(model)
    assert twin.output_layer.weight is twin.token_embedding.weight is not model.token_embedding.weight
    tokens, targets = batch(config)
    for _ in range(2):
        cross_entropy(serial(tokens), targets, reduction="sum").backward()
        vocab_parallel_cross_entropy(twin(tokens), targets, vocab_size=30, reduction="sum", group=group).backward()
    compare_gradients(twin, serial)
    assert all(p.grad is None for p in model.parameters())
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(twin)
    close(average(tokens), model(tokens))


@pytest.mark.ranks
def test_a_copy_of_a_model_with_a_group_is_a_model_of_that_group():
    pool(2).run(copied)


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
    compare_gradients(parallel, serial)


def clipped_in_a_grid():
    """On a rank of four: two copies of a model, of parts on ranks 0 and 1, and 2 and 3."""
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    serial, parallel = serial_gpt(SMALL), apply_tensor_parallel(serial_gpt(SMALL), group=group)
    for model in (serial, parallel):
        for p in model.parameters():
            p.grad = p.detach().clone()
    close(clip_grad_norm_(parallel, 1.0), nn.utils.clip_grad_norm_(serial.parameters(), 1.0))
    compare_gradients(parallel, serial)
    texts = []
    for wrong in (serial, list(parallel.parameters())):
        with pytest.raises(ConfigError) as error:
            clip_grad_norm_(wrong, 1.0)
        texts.append(str(error.value))
    return texts


@pytest.mark.ranks
def test_the_norm_is_over_the_layers_own_group():
    for of_serial, of_list in pool(4).run(clipped_in_a_grid):
        assert "model is of type GPT with layers of 0 tensor-parallel groups" in of_serial
        assert "model is of type list" in of_list


@pytest.mark.ranks
def test_the_norm_of_a_model_with_shared_heads_and_padding_is_the_serial_one():
    pool(4).run(clipped, dataclasses.replace(SMALL, num_kv_heads=2), True)
    pool(4).run(clipped, dataclasses.replace(SMALL, num_kv_heads=1, tie_embeddings=False), False)


# refusals


class Lora(nn.Linear):
    """A linear whose ``forward`` may be another."""


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
        "a linear of another kind": lambda: setattr(model.layers[0].mlp, "linear_fc1", Lora(24, 96)) or model,
        "one with more": lambda: model.layers[0].register_module("adapter", nn.Linear(24, 24)) or model,
        "no bias": lambda: setattr(model.layers[0].mlp.linear_fc1, "bias", None) or model,
        "no dropout": lambda: setattr(model.layers[0], "dropout", nn.Identity()) or model,
        "a layer twice": lambda: model.layers.__setitem__(1, model.layers[0]) or model,
        "tied": lambda: setattr(model.layers[0].pre_mlp_layernorm, "bias", model.final_layernorm.bias) or model,
        "on meta": lambda: model.to("meta" if rank == 1 else "cpu"),
        "another dtype": lambda: model.to(torch.float64 if rank == 2 else torch.float32),
        "other sizes": lambda: GPT(GPTConfig(**{**sizes, "num_heads": 8 if rank == 1 else 4})),
    }
    model = wrong[how]() if how in wrong else model
    group = dist.new_group([0, 2]) if how == "no member" else None
    as_it_is = lambda: [(name, id(p), p.is_meta or p.sum().item()) for name, p in model.named_parameters()]
    before = as_it_is()
    if how == "no member" and rank in (0, 2):
        return None, True
    try:
        apply_tensor_parallel(model, group=group, sequence_parallel=how == "other options" and rank == 3)
    except ConfigError as error:
        return str(error), before == as_it_is()


WRONG_SIZES = {
    "heads": {"num_heads": 6}, "kv heads": {"num_heads": 12, "num_kv_heads": 3}, "ffn": {"ffn_hidden_size": 50},
    "vocabulary": {"vocab_size": 3}, "a layer twice": {"num_layers": 2},
}  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize("how, text", [
    ("heads", "num_heads (6) does not divide by tp_size (4); legal are 1, 2, 3, 6"),
    ("kv heads", "num_kv_heads (3) does not divide by tp_size (4), nor tp_size by num_kv_heads; legal are 1, 3, 6, 12"),
    ("ffn", "ffn_hidden_size (50) does not divide by tp_size (4); legal are 1, 2"),
    ("vocabulary", "vocab_size (3) is below tp_size (4)"), ("twice", "the model is parallel already"),
    ("wrapped", "wrap the plain model"), ("no GPT", "give a dtlab.models.GPT"), ("a changed one", "mlp is a Identity"),
    ("a linear of another kind", "layers.0.mlp.linear_fc1 is a test_tensor_parallel.Lora, not a Linear as in a plain"),
    ("one with more", "layers.0.adapter is a Linear, not there as in"), ("tied", "and layers.0.pre_mlp_layernorm.bias"),
    ("no bias", "linear_fc1.bias is missing, not [96]"), ("no dropout", "dropout is a Identity, not a Dropout"),
    ("a layer twice", "layers.1.input_layernorm.weight is [24] and"), ("on meta", "[30, 24] on meta, trainable"),
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


def over_the_same_ranks(wrap):
    """On a rank of four, 2 x 2: averaging, or sharding, over ranks with other parts; then over those with the same."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    model = apply_tensor_parallel(GPT(SMALL), group=pairs[dist.get_rank() // 2])
    texts = []
    for group in (None, pairs[dist.get_rank() // 2]):
        with pytest.raises(ConfigError) as error:
            wrap(model, group=group)
        texts.append(str(error.value))
    wrap(model, group=pairs[2 + dist.get_rank() % 2])
    return texts


@pytest.mark.ranks
@pytest.mark.parametrize("wrap", [
    DistributedDataParallel, FullyShardedModule, functools.partial(ZeroOptimizer, optimizer_class=torch.optim.SGD),
])  # fmt: skip
def test_ranks_with_parts_of_one_model_are_not_averaged_over(wrap):
    for rank, texts in enumerate(pool(4).run(over_the_same_ranks, wrap)):
        mine = [0, 1] if rank < 2 else [2, 3]
        for text, its in zip(texts, ([0, 1, 2, 3], mine)):
            assert f"tensor-parallel over ranks {mine}, and this group has ranks {its}" in text
