"""The split embedding and the loss of split logits against one process, in float64; by calls and bytes; and broken."""
import functools
import math
import warnings

import pytest
import torch
import torch.distributed as dist
from live_ranks import pool
from torch import nn

import dtlab
from dtlab.errors import ConfigError, RankError
from dtlab.models import cross_entropy, init_by_name
from dtlab.models.init import full_parameter
from dtlab.parallel import (
    ColumnParallelLinear,
    VocabParallelEmbedding,
    tensor_parallel_vocab,
    vocab_parallel_cross_entropy,
)
from dtlab.parallel.tensor_parallel_vocab import vocab_shard

VOCAB, HIDDEN, SHAPE = 31, 6, (3, 7)  # padded on 2, 3 and 4 ranks to 32, 33 and 32
close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)


def ids(step=0, vocab_size=VOCAB, ignored=0.0):
    """[3, 7] tokens, the first and the last one of the vocabulary among them."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, vocab_size, SHAPE, generator=generator)
    tokens[0, :2] = torch.tensor([0, vocab_size - 1])
    return tokens.masked_fill(torch.rand(SHAPE, generator=generator) < ignored, -100)


def rows_of(whole, rank, size, padding=0.0):
    """A rank's rows of a table, with padding below the last ones."""
    rows = math.ceil(len(whole) / size)
    padded = torch.cat([whole, torch.full((rows * size - len(whole), *whole.shape[1:]), padding, dtype=whole.dtype)])
    return padded[rank * rows : (rank + 1) * rows]


# the embedding, and an output layer with its weight


class Tied(nn.Module):
    """Embedding, something in between, output layer with the embedding's weight."""

    def __init__(self, is_parallel, device="cpu"):
        super().__init__()
        factory = {"dtype": torch.float64, "device": device}
        self.between = init_by_name(nn.Linear(HIDDEN, HIDDEN, **factory), 1)
        if is_parallel:
            self.token_embedding = VocabParallelEmbedding(VOCAB, HIDDEN, **factory)
            self.output_layer = ColumnParallelLinear(HIDDEN, VOCAB, bias=False, shard=vocab_shard(VOCAB), **factory)
            self.loss = functools.partial(vocab_parallel_cross_entropy, vocab_size=VOCAB, reduction="mean")
        else:
            self.token_embedding = init_by_name(nn.Embedding(VOCAB, HIDDEN, **factory), 0)
            self.output_layer = nn.Linear(HIDDEN, VOCAB, bias=False, **factory)
            self.loss = functools.partial(cross_entropy, reduction="mean")
        self.output_layer.weight = self.token_embedding.weight

    def forward(self, tokens, targets):
        """The loss."""
        return self.loss(self.output_layer(self.between(self.token_embedding(tokens)).tanh()), targets)


def train(is_parallel, optimizer, device="cpu"):
    """Five steps: losses, the gradients of the first one, and the parameters at the end."""
    model, found = Tied(is_parallel, device), {}
    optimizer = optimizer(model.parameters())
    for step in range(5):
        loss = model(ids(step).to(device), ids(step + 10, ignored=0.3).to(device))
        optimizer.zero_grad()
        loss.backward()
        found[f"loss {step}"] = loss.detach()
        if step == 0:
            found.update({f"grad of {name}": p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
    return {**found, **{name: p.detach() for name, p in model.named_parameters()}}


OPTIMIZERS = [
    functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    functools.partial(torch.optim.AdamW, lr=0.01),
]


def train_without_warnings(*args):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return train(True, *args)


def assert_equals_serial(all_found, optimizer):
    expected = train(False, optimizer)
    for rank, found in enumerate(all_found):
        assert found.keys() == expected.keys()
        for name, whole in expected.items():
            close(found[name].cpu(), rows_of(whole, rank, len(all_found)) if "embedding" in name else whole)


@pytest.mark.ranks
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["sgd", "adamw"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_tied_embedding_head_and_loss_train_as_one_process_and_padding_stays_zero(num_ranks, optimizer):
    assert_equals_serial(pool(num_ranks).run(train_without_warnings, optimizer), optimizer)


@pytest.mark.gpu
@pytest.mark.ranks
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_on_a_gpu():
    with dtlab.launch(2, device="cuda", share_gpu=torch.cuda.device_count() < 2) as ranks:
        assert_equals_serial(ranks.run(train_without_warnings, OPTIMIZERS[0], "cuda"), OPTIMIZERS[0])


def looked_up(vocab_size):
    """On a rank: the weight at the start, what is looked up, and the weight's gradient."""
    layer = VocabParallelEmbedding(vocab_size, HIDDEN, seed=2, dtype=torch.float64)
    y = layer(ids(vocab_size=vocab_size))
    y.sin().sum().backward()
    return layer.weight.detach(), y.detach(), layer.weight.grad


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks, vocab_size", [(1, 5), (2, 31), (3, 31), (4, 5), (4, 4)])
def test_an_embedding_is_nn_embeddings_also_on_a_rank_that_has_padding_only(num_ranks, vocab_size):
    serial = init_by_name(nn.Embedding(vocab_size, HIDDEN, dtype=torch.float64), 2)
    expected = serial(ids(vocab_size=vocab_size))
    expected.sin().sum().backward()
    for rank, (weight, y, grad) in enumerate(pool(num_ranks).run(looked_up, vocab_size)):
        assert torch.equal(weight, rows_of(serial.weight.detach(), rank, num_ranks))
        close(y, expected.detach())
        close(grad, rows_of(serial.weight.grad, rank, num_ranks))


# the loss


def whole_logits(vocab_size=VOCAB, scale=3.0, dtype=torch.float64):
    return full_parameter("x", (*SHAPE, vocab_size), 0, dtype=torch.float64).mul(scale * vocab_size**0.5).to(dtype)


def my_part(logits):
    """A rank's columns; what stands in the padding would be the most likely of all."""
    part = rows_of(logits.movedim(-1, 0), dist.get_rank(), dist.get_world_size(), padding=50.0)
    return part.movedim(0, -1).requires_grad_()  # strides are no plain ones


def losses_of(logits, targets, reductions=("sum", "mean", "none")):
    """On a rank: for each reduction the loss, and the gradient of this rank's columns."""
    found = []
    for reduction in reductions:
        part = my_part(logits)
        loss = vocab_parallel_cross_entropy(part, targets, vocab_size=logits.shape[-1], reduction=reduction)
        (loss * torch.arange(1.0, 1 + loss.numel(), dtype=loss.dtype).view(loss.shape)).sum().backward()
        found.append((loss.detach(), part.grad))
    return found


def expected_losses(logits, targets, reductions=("sum", "mean", "none")):
    found = []
    for reduction in reductions:
        whole = logits.clone().requires_grad_()
        loss = cross_entropy(whole, targets, reduction=reduction)
        (loss * torch.arange(1.0, 1 + loss.numel(), dtype=loss.dtype).view(loss.shape)).sum().backward()
        found.append((loss.detach(), whole.grad))
    return found


def assert_same_losses(num_ranks, logits, targets, same=close):
    for rank, found in enumerate(pool(num_ranks).run(losses_of, logits, targets)):
        for (loss, grad), (expected, whole_grad) in zip(found, expected_losses(logits, targets)):
            same(loss, expected)
            same(grad, rows_of(whole_grad.movedim(-1, 0), rank, num_ranks).movedim(0, -1))  # 0 in the padding


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks, vocab_size", [(1, 31), (2, 31), (3, 31), (4, 31), (4, 5), (3, 3)])
def test_loss_and_gradient_are_those_of_whole_logits(num_ranks, vocab_size):
    assert_same_losses(num_ranks, whole_logits(vocab_size), ids(1, vocab_size, ignored=0.3))


@pytest.mark.ranks
def test_large_logits_do_not_overflow():
    assert_same_losses(2, whole_logits(scale=1e4), ids(1))


@pytest.mark.ranks
def test_tokens_that_cannot_be_and_tokens_that_all_do_not_count():
    logits, same = whole_logits(), functools.partial(close, equal_nan=True)
    logits[..., 3] = float("-inf")
    assert_same_losses(3, logits, ids(1).masked_fill(ids(1) == 3, 4), same)
    assert_same_losses(3, whole_logits(), torch.full(SHAPE, -100), same)


@pytest.mark.ranks
def test_a_nan_on_one_rank_reaches_the_losses_of_all():
    logits = whole_logits()
    logits[1, 2, 20] = float("nan")
    for found in pool(2).run(losses_of, logits, ids(1), ["none"]):
        assert found[0][0].isnan().nonzero().tolist() == [[1, 2]]


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_16_bits_are_widened_to_32(dtype):
    logits, targets = whole_logits(dtype=dtype), ids(1, ignored=0.3)
    for found in pool(2).run(losses_of, logits, targets):
        for (loss, grad), (expected, _) in zip(found, expected_losses(logits, targets)):
            assert loss.dtype == expected.dtype == torch.float32 and grad.dtype == dtype
            torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


def kept_for_backward():
    """On a rank: shapes and dtypes of what autograd keeps, of a loss from 32-bit logits."""
    kept, part = [], my_part(whole_logits(dtype=torch.float32))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append((tuple(t.shape), t.dtype)) or t, lambda t: t):
        losses = vocab_parallel_cross_entropy(part, ids(), vocab_size=VOCAB, reduction="none")
    losses.sum().backward(retain_graph=True)
    first = part.grad.clone()
    losses.sum().backward()
    return kept, torch.equal(part.grad, 2 * first)


@pytest.mark.ranks
def test_only_probabilities_and_targets_are_kept_and_backward_leaves_them_as_they_are():
    for kept, is_same_again in pool(2).run(kept_for_backward):
        assert kept == [((*SHAPE, 16), torch.float32), (SHAPE, torch.int64)] and is_same_again


def without_the_third_sum():
    """On a rank: broken: each rank divides by the sum of its own exponentials."""
    part, count = my_part(whole_logits(32, scale=0.01)), [0]
    all_reduce = tensor_parallel_vocab._all_reduce

    def forgetful(*args):
        count[0] += 1
        return args[0] if count[0] == 3 else all_reduce(*args)

    tensor_parallel_vocab._all_reduce = forgetful
    try:
        return vocab_parallel_cross_entropy(part, ids(), vocab_size=32, reduction="mean").item()
    finally:
        tensor_parallel_vocab._all_reduce = all_reduce


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_broken_without_the_sum_of_exponentials_the_loss_is_too_low_by_ln_t(num_ranks):
    right = cross_entropy(whole_logits(32, scale=0.01), ids(), reduction="mean").item()
    for wrong in pool(num_ranks).run(without_the_third_sum):
        assert right - wrong == pytest.approx(math.log(num_ranks), abs=0.01)


# communication


def recorded(dtype):
    """On a rank: embedding, and loss."""
    layer = VocabParallelEmbedding(VOCAB, HIDDEN, dtype=dtype)
    with dtlab.phase("embedding"):
        layer(ids()).sum().backward()
    part = my_part(whole_logits(dtype=dtype))
    with dtlab.phase("loss"):
        loss = vocab_parallel_cross_entropy(part, ids(), vocab_size=VOCAB, reduction="sum")
    with dtlab.phase("back"):
        loss.backward()


@pytest.mark.ranks
@pytest.mark.parametrize("dtype, of_embedding, of_loss", [(torch.float64, 8, 8), (torch.bfloat16, 2, 4)])
def test_one_sum_for_the_embedding_and_three_of_a_number_a_token_for_the_loss(dtype, of_embedding, of_loss):
    recording = pool(3).record(recorded, dtype)
    for rank in range(3):
        calls = [(e.phase["name"], e.op, e.bytes) for e in recording.events[rank] if e.kind == "issue"]
        assert calls == [("embedding", "all_reduce", 21 * HIDDEN * of_embedding),
                         ("loss", "all_reduce", (21 + 2) * of_loss), *[("loss", "all_reduce", 21 * of_loss)] * 2]


@pytest.mark.ranks
def test_alone_nothing_is_sent():
    assert not [e for e in pool(1).record(recorded, torch.float64).events[0] if e.kind == "issue"]


def of_real_size():
    """On a rank that is played: 51,200 tokens over 8 ranks."""
    embedding = VocabParallelEmbedding(51200, 4096, dtype=torch.bfloat16)
    x = embedding(torch.zeros(1, 2048, dtype=torch.long))
    logits = nn.functional.linear(x, embedding.weight)
    vocab_parallel_cross_entropy(logits, torch.zeros(1, 2048, dtype=torch.long), vocab_size=51200,
                                 reduction="mean").backward()  # fmt: skip


@pytest.mark.ranks
def test_a_vocabulary_of_real_size_is_recorded_dry():
    recording = dtlab.record_dry(of_real_size, world_size=8)
    assert [e.bytes for e in recording.events[0] if e.kind == "issue"] == [2048 * 4096 * 2, 2050 * 4, *[2048 * 4] * 2]


# mistakes


def refusals():
    """On a rank of four: every message."""
    loss = functools.partial(vocab_parallel_cross_entropy, vocab_size=VOCAB, reduction="sum")
    embedding = VocabParallelEmbedding(VOCAB, HIDDEN)
    tokens, logits = torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 3, 8)
    outside = dist.GroupMember.NON_GROUP_MEMBER
    texts = []
    for call in (
        lambda: VocabParallelEmbedding(3, HIDDEN),
        lambda: VocabParallelEmbedding(VOCAB, 0),
        lambda: VocabParallelEmbedding(VOCAB, HIDDEN, group=outside),
        lambda: embedding(tokens + 31),
        lambda: embedding(tokens - 1),
        lambda: loss(logits, tokens + 31),
        lambda: loss(logits, tokens - 99),
        lambda: loss(logits[..., :7], tokens),
        lambda: loss(logits, tokens[:1]),
        lambda: loss(logits, tokens, reduction="average"),
        lambda: loss(logits, tokens, group=outside),
    ):
        try:
            call()
        except ConfigError as error:
            texts.append(str(error))
    return texts


@pytest.mark.ranks
def test_impossible_sizes_and_tokens_are_refused_on_every_rank_with_the_numbers():
    parts = [
        "vocab_size (3) is below tp_size (4): some ranks would have no token; use tp_size 3 at most",
        "hidden_size (0) must be at least 1",
        "is not in this group",
        "tokens[0, 0] is 31, which is no token: they are 0 to 30 (vocab_size 31)",
        "tokens[0, 0] is -1",
        "targets[0, 0] is 31, which is no token: they are 0 to 30 (vocab_size 31)",
        "targets[0, 0] is -99",
        "logits [2, 3, 7] must be [2, 3, 8] for targets [2, 3]: a rank has 8 columns of vocab_size (31)",
        "logits [2, 3, 8] must be [1, 3, 8] for targets [1, 3]",
        "reduction ('average') must be 'sum', 'mean' or 'none'",
        "is not in this group",
    ]
    for texts in pool(4).run(refusals):
        assert len(texts) == len(parts)
        for text, part in zip(texts, parts):
            assert part in text


def of_other(what):
    """On a rank of three: the error's text; the middle one has other targets, or another option."""
    is_other, targets = dist.get_rank() == 1, ids(1, ignored=0.3)
    if is_other and what == "batch":
        targets = ids(2, ignored=0.3)
    if is_other and what == "order":
        targets = targets.flip(0)
    if is_other and what == "one target":
        targets[2, 4] = 99
    logits, vocab_size = my_part(whole_logits()), 32 if is_other and what == "vocab_size" else 31
    reduction = "sum" if is_other and what == "reduction" else "mean"
    try:
        return vocab_parallel_cross_entropy(logits, targets, vocab_size=vocab_size, reduction=reduction).item()
    except ConfigError as error:
        return str(error)


@pytest.mark.ranks
@pytest.mark.parametrize("what", ["batch", "order", "one target", "vocab_size", "reduction"])
def test_other_targets_or_options_on_one_rank_are_refused_on_all(what):
    assert isinstance(pool(3).run(of_other, "nothing")[0], float)
    answers = pool(3).run(of_other, what)
    assert all("differ between the ranks of the tensor-parallel group" in answer for answer in answers)


def with_other_tokens():
    """On a rank, broken on purpose: each has tokens of its own."""
    return VocabParallelEmbedding(VOCAB, HIDDEN, dtype=torch.float64)(ids(dist.get_rank())).detach()


@pytest.mark.ranks
def test_broken_with_other_tokens_on_each_rank_the_embedding_is_of_neither_and_does_not_tell():
    serial = init_by_name(nn.Embedding(VOCAB, HIDDEN, dtype=torch.float64), 0)
    first, second = pool(2).run(with_other_tokens)
    assert torch.equal(first, second)
    assert all((first - serial(ids(rank))).abs().max() > 0.01 for rank in range(2))


def one_rank_in_64_bits():
    dtype = torch.float32 if dist.get_rank() else torch.float64
    vocab_parallel_cross_entropy(my_part(whole_logits(dtype=dtype)), ids(), vocab_size=VOCAB, reduction="sum")


@pytest.mark.ranks
def test_another_dtype_on_one_rank_is_found_before_it_is_sent():
    with pytest.raises(RankError, match="float64"):
        pool(2).run(one_rank_in_64_bits)
