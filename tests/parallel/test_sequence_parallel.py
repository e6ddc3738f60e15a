"""Sequence parallelism: gradients of which each rank has a part, dropout, lengths, bytes; and broken on purpose."""
import contextlib
import functools
import gc

import pytest
import torch
import torch.distributed as dist
from live_ranks import pool
from split_gpt import close, compare_gradients, serial_gpt
from torch import nn
from torch.utils.checkpoint import checkpoint

import dtlab
from dtlab import theory
from dtlab.errors import ConfigError, RankError
from dtlab.models import GPT, GPTConfig, cross_entropy
from dtlab.parallel import (
    DistributedDataParallel,
    FullyShardedModule,
    ZeroOptimizer,
    apply_context_parallel,
    recompute,
    sequence_positions,
    split_sequence,
    tensor_parallel_grads,
)
from dtlab.parallel.tensor_parallel import apply_tensor_parallel, vocab_parallel_cross_entropy
from dtlab.simulate.tables import live_bytes

CONFIG = GPTConfig(vocab_size=31, seq_length=12, hidden_size=24, num_layers=2, num_heads=4, num_kv_heads=1)
NESTED_BACKWARD = functools.partial(checkpoint, use_reentrant=True)


# gradients of which each rank has a part


class Model(GPT):
    """Layers are called through ``call``."""

    call = staticmethod(lambda layer, x: layer(x))

    def forward(self, tokens):
        """[B, S] -> [B, S, V]."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = self.call(layer, x)
        return self.head(x)


def models(call=None, frozen=(), **options):
    """On a rank: a serial model and its part."""
    torch.set_num_threads(1)
    both = [serial_gpt(CONFIG, Model) for _ in range(2)]
    for model in both:
        model.call = call or model.call
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in frozen))
    return both[0], apply_tensor_parallel(both[1], sequence_parallel=True, **options)


def loss_of(model, seed, counted=slice(None)):
    """The sum over tokens that depend on the seed, of those that count; of the parallel model too."""
    tokens, ids = torch.randint(0, 31, (2, 2, 12), generator=torch.Generator().manual_seed(seed))
    targets = torch.full_like(ids, -100)
    targets[:, counted] = ids[:, counted]
    tokens, targets = (t.to(model.final_layernorm.weight.device) for t in (tokens, targets))
    if isinstance(model.output_layer, nn.Linear):
        return cross_entropy(model(tokens), targets, reduction="sum")
    return vocab_parallel_cross_entropy(model(tokens), targets, vocab_size=31, reduction="sum")


def worst(serial, parallel):
    """The largest difference of gradients that no rank holds a part of: norms' and row biases'."""
    wholes = dict(serial.named_parameters())
    return max((p.grad - wholes[name].grad).abs().max().item() for name, p in parallel.named_parameters()
               if p.grad is not None and p.shape == wholes[name].shape)  # fmt: skip


def assert_equal(serial, parallel):
    assert all((parameter.grad is None) == (not parameter.requires_grad) for parameter in parallel.parameters())
    compare_gradients(parallel, serial)


def accumulated(**how):
    """On a rank: assert that the sum over three backward passes is the serial one."""
    serial, parallel = models(**how)
    for model in (serial, parallel):
        for seed in range(3):
            loss_of(model, seed).backward()
    assert_equal(serial, parallel)


FROZEN = ("input_layernorm", "layers.1.mlp", "linear_qkv.bias")


@pytest.mark.ranks
@pytest.mark.parametrize("how", [{}, {"frozen": FROZEN}, {"call": recompute}, {"call": NESTED_BACKWARD},
                                 {"call": recompute, "frozen": FROZEN, "async_grad_all_reduce": False}])  # fmt: skip
def test_gradients_add_up_as_in_one_process(how):
    pool(4).run(accumulated, **how)


def two_forwards_first():
    """On a rank: both forward passes, then both backward passes; then one backward pass of both losses."""
    serial, parallel = models()
    for model in (serial, parallel):
        for loss in [loss_of(model, seed) for seed in range(2)]:
            loss.backward()
        (loss_of(model, 2) + 3 * loss_of(model, 3)).backward()
    assert_equal(serial, parallel)


@pytest.mark.ranks
def test_passes_may_be_in_flight_together():
    pool(2).run(two_forwards_first)


def thawed():
    """On a rank: a norm that is frozen at first, and one that is another parameter later."""
    serial, parallel = models(frozen=("input_layernorm",))
    for model in (serial, parallel):
        loss_of(model, 0).backward()
        model.requires_grad_(True)
        model.final_layernorm.weight = nn.Parameter(model.final_layernorm.weight.detach() * 2)
        loss_of(model, 1).backward()
    assert_equal(serial, parallel)


@pytest.mark.ranks
def test_parameters_that_are_trained_or_put_in_later_are_summed_too():
    pool(2).run(thawed)


def fails(model, seed, counted=slice(None)):
    """On a rank: a backward pass that fails in the last layer, after other gradients have come."""
    norm = model.layers[1].input_layernorm.weight
    hook = norm.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, seed, counted).backward()
    hook.remove()


def with_another_model():
    """On a rank: after a pass of one model that failed, another one is trained; then the first goes on."""
    (serial, parallel), (_, doomed) = models(), models()
    fails(doomed, 0)
    for model in (serial, parallel):
        loss_of(model, 1).backward()
    assert_equal(serial, parallel)
    with pytest.raises(ConfigError, match="the last backward pass failed"):
        loss_of(doomed, 1).backward()


def that_is_gone():
    """On a rank: what is kept of a pass that failed, while its model is there and when it is gone."""
    _, doomed = models()
    fails(doomed, 0)
    num_passes = len(tensor_parallel_grads._PASSES)
    del doomed
    gc.collect()
    return num_passes, len(tensor_parallel_grads._PASSES)


@pytest.mark.ranks
def test_a_pass_that_failed_concerns_its_own_model_only():
    pool(2).run(with_another_model)
    assert pool(2).run(that_is_gone) == [(1, 0)] * 2


def with_zeros_on_one_rank():
    """On a rank of two: what failed had targets in the first half only, so that the second rank's parts are 0."""
    _, parallel = models()
    fails(parallel, 0, slice(6))
    grad = parallel.final_layernorm.weight.grad
    with pytest.raises(ConfigError, match="the last backward pass failed"):
        loss_of(parallel, 1).backward()
    return grad.any().item()


@pytest.mark.ranks
def test_after_a_pass_that_failed_all_ranks_are_told_also_one_with_zeros():
    assert pool(2).run(with_zeros_on_one_rank) == [True, False]


def broken_halfway(zeroed):
    """On a rank: a backward pass that fails in the first layer, after others have ended."""
    serial, parallel = models()
    loss_of(parallel, 0).backward()
    fails(parallel, 1)
    if zeroed is not None:
        parallel.zero_grad(set_to_none=zeroed)
    loss_of(parallel, 2).backward()
    loss_of(serial, 2).backward()
    assert_equal(serial, parallel)


@pytest.mark.ranks
@pytest.mark.parametrize("zeroed", [True, False])
def test_after_a_pass_that_failed_zero_grad_begins_anew(zeroed):
    pool(2).run(broken_halfway, zeroed)


@pytest.mark.ranks
def test_after_a_pass_that_failed_gradients_are_not_added_to():
    with pytest.raises(RankError, match="the last backward pass failed on the way.*call zero_grad"):
        pool(2).run(broken_halfway, None)


def grid():
    """On a rank of four: its tensor-parallel group, and the one across."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    return groups[dist.get_rank() // 2], groups[2 + dist.get_rank() % 2]


def in_a_grid(wrap, num_micro_batches):
    """On a rank: 2 x 2, tensor parallel inside of data parallel, which has its own batch each."""
    (tp_group, dp_group), rank = grid(), dist.get_rank()
    serial, parallel = models(group=tp_group)
    wrapped = wrap(parallel, dp_group)
    for i in range(num_micro_batches):
        for dp_rank in range(2):
            (loss_of(serial, 2 * i + dp_rank) / 2).backward()
        tokens, targets = torch.randint(0, 31, (2, 2, 12), generator=torch.Generator().manual_seed(2 * i + rank // 2))
        with wrapped.no_sync() if i + 1 < num_micro_batches else contextlib.nullcontext():
            vocab_parallel_cross_entropy(wrapped(tokens), targets, vocab_size=31, reduction="sum",
                                         group=tp_group).backward()  # fmt: skip
    assert_equal(serial, parallel)


def by_torch(model, group):
    return nn.parallel.DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)


def by_dtlab(model, group):
    return DistributedDataParallel(model, group=group, bucket_bytes=2**12)


@pytest.mark.ranks
@pytest.mark.parametrize("wrap", [by_dtlab, by_torch])
def test_data_parallelism_averages_before_the_parts_are_summed(wrap):
    pool(4).run(in_a_grid, wrap, 1)
    pool(4).run(in_a_grid, wrap, 3)


def with_context_parallelism():
    """On a rank: 2 x 2, tensor parallel inside of context parallel, which has half of the tokens each."""
    tp_group, cp_group = grid()
    serial, parallel = models(group=tp_group)
    parallel.forward = functools.partial(GPT.forward, parallel)
    wrapped = DistributedDataParallel(apply_context_parallel(parallel, group=cp_group), group=cp_group)
    tokens, targets = torch.randint(0, 31, (2, 2, 12), generator=torch.Generator().manual_seed(0))
    (loss_of(serial, 0) / 2).backward()
    logits = wrapped(split_sequence(tokens, group=cp_group), positions=sequence_positions(12, group=cp_group))
    vocab_parallel_cross_entropy(logits, split_sequence(targets, group=cp_group), vocab_size=31, reduction="sum",
                                 group=tp_group).backward()  # fmt: skip
    assert_equal(serial, parallel)


@pytest.mark.ranks
def test_context_parallelism_goes_around_it():
    pool(4).run(with_context_parallelism)


def taken(how):
    """On a rank: gradients that are gone before they are summed, or that never came."""
    _, parallel = models()
    norm = parallel.final_layernorm.weight
    if how == "grad, .grad is there":
        loss_of(parallel, 1).backward()
        with pytest.raises(ConfigError, match="torch.autograd.grad"):
            torch.autograd.grad(loss_of(parallel, 0), [norm])
        return loss_of(parallel, 0).backward()  # to .grad, which is not whole any more
    if how == "grad":
        return torch.autograd.grad(loss_of(parallel, 0), [norm])
    if how == "step in backward":
        optimizer = torch.optim.SGD([norm], lr=0.1)
        norm.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        return loss_of(parallel, 0).backward()
    groups = [dist.new_group([rank]) for rank in range(2)]
    if how == "FSDP":
        return loss_of(FullyShardedModule(parallel, group=groups[dist.get_rank()]).module, 0).backward()
    optimizer = ZeroOptimizer(parallel, torch.optim.AdamW, zero_stage=how, group=groups[dist.get_rank()])
    loss_of(parallel, 0).backward()
    optimizer.step()


@pytest.mark.ranks
@pytest.mark.parametrize("how, text", [("grad", "was taken from .grad"), (2, "was taken from .grad"), (1, "changed"),
                                       ("grad, .grad is there", "the last backward pass failed"),
                                       ("step in backward", "an optimizer's step in backward"),
                                       ("FSDP", "was taken from .grad")])  # fmt: skip
def test_gradients_that_are_taken_before_they_are_summed_are_refused(how, text):
    with pytest.raises(RankError, match=text):
        pool(2).run(taken, how)


def step_of_pass():
    """On a rank: two backward passes."""
    _, parallel = models()
    for seed in range(2):
        loss = loss_of(parallel, seed)
        with dtlab.phase("backward", step=seed):
            loss.backward()


@pytest.mark.ranks
def test_parts_are_summed_once_a_pass():
    recording = pool(4).record(step_of_pass)
    h, layers = 24, 2
    norms_and_biases = (layers * (4 + 2) + 2) * h
    shared_heads = layers * 1 * 2 * (h // 4) * (h + 1)  # one set of k and v, with their biases
    for step in range(2):
        sums = [e.bytes for e in recording.events[0] if e.kind == "issue" and e.op == "all_reduce"
                and e.phase.get("step") == step]  # fmt: skip
        assert sums == [8 * (norms_and_biases + shared_heads)]


def forgotten():
    """On a rank, broken on purpose: nobody sums. The loss is right, gradients of norms are this rank's part."""
    watch, tensor_parallel_grads._watch = tensor_parallel_grads._watch, lambda *_: None
    try:
        serial, parallel = models()
        losses = [loss_of(model, 0) for model in (serial, parallel)]
        for loss in losses:
            loss.backward()
    finally:
        tensor_parallel_grads._watch = watch
    close(*losses)
    return worst(serial, parallel), serial.final_layernorm.bias.grad.abs().max().item()


@pytest.mark.ranks
def test_broken_gradients_of_norms_that_are_not_summed_are_a_part_of_the_truth():
    for error, size in pool(4).run(forgotten):
        assert error > size / 4


# lengths


def of_length(length, rows=(1,)):
    """On a rank."""
    model = apply_tensor_parallel(GPT(CONFIG), sequence_parallel=True)
    try:
        with dtlab.phase("forward"):
            model(torch.zeros(*rows, length, dtype=torch.long))
    except ConfigError as error:
        return str(error)


@pytest.mark.ranks
def test_a_length_that_does_not_divide_is_refused_before_anything_is_sent():
    assert pool(4).run(of_length, 8) == [None] * 4
    assert all("tokens [8] must be [batch, sequence]" in text for text in pool(4).run(of_length, 8, ()))
    texts = {11: "11 tokens does not divide by tp_size (4), as sequence_parallel needs: use sequences of 8 or 12 "
                 "tokens, or tp_size 1", 6: "4 or 8 tokens, or tp_size 1, 2", 3: "of 4 tokens"}  # fmt: skip
    for length, text in texts.items():
        answers = pool(4).run(of_length, length)
        assert all(text in answer for answer in answers)
    recording = pool(4).record(of_length, 11)
    assert [e.op for e in recording.events[3] if e.kind == "issue" and e.phase] == []


# dropout


def masked(sequence_parallel):
    """On a rank: what dropouts leave of ones; the same when the generator's state comes back."""
    config = GPTConfig(vocab_size=31, seq_length=8, hidden_size=24, num_layers=1, num_heads=4, dropout=0.5)
    layer = apply_tensor_parallel(GPT(config), sequence_parallel=sequence_parallel).layers[0]
    q, k, v = torch.randn(3, 1, 1, 8, 6, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(5)
    torch.rand(3)
    state, draws = torch.get_rng_state(), []
    for _ in range(2):
        torch.set_rng_state(state)
        draws.append([layer.self_attention.attend(q, k, v), layer.dropout(torch.ones(1, 4, 24)), torch.rand(2)])
    close(*draws)
    layer.eval()
    return *(tensor.tolist() for tensor in draws[0]), layer.self_attention.attend(q, k, v).tolist()


@pytest.mark.ranks
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_masks_differ_where_ranks_have_parts_and_nowhere_else(sequence_parallel):
    weights, hidden, after, evaluated = zip(*pool(4).run(masked, sequence_parallel))
    num_different = lambda values: len(set(map(str, values)))
    assert num_different(weights) == 4  # heads are parts always
    assert num_different(hidden) == (4 if sequence_parallel else 1)
    assert num_different(after) == num_different(evaluated) == 1


def dropped(call, device):
    """On a rank: gradients of a model with dropout."""
    model = Model(GPTConfig(vocab_size=31, seq_length=12, hidden_size=24, num_layers=2, num_heads=4, dropout=0.3),
                  seed=1, dtype=torch.float64)  # fmt: skip
    model.call = call
    apply_tensor_parallel(model.to(device), sequence_parallel=True)
    torch.manual_seed(7)
    loss_of(model, 0).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def recomputed(device="cpu"):
    """On a rank: masks are drawn again when layers are computed again."""
    close(dropped(recompute, device), dropped(lambda layer, x: layer(x), device))


@pytest.mark.ranks
def test_recompute_draws_each_ranks_masks_again():
    pool(2).run(recomputed)


@pytest.mark.gpu
@pytest.mark.ranks
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_recompute_draws_each_ranks_masks_again_on_a_gpu():
    with dtlab.launch(2, device="cuda", share_gpu=torch.cuda.device_count() < 2) as ranks:
        ranks.run(recomputed, "cuda")


# what a layer sends and keeps


def with_small_masks(config, sequence_parallel):
    """On a rank that is played, and ends with it: dropout as on a GPU, with masks of a byte."""
    torch.nn.functional.dropout = lambda x, p, *_: torch.native_dropout(x, p, True)[0]
    one_layer(config, sequence_parallel)


def one_layer(config, sequence_parallel, dtype=torch.bfloat16):
    """On a rank: forward and backward of one layer."""
    model = apply_tensor_parallel(GPT(config, dtype=dtype), sequence_parallel=sequence_parallel)
    length = config.seq_length // (dist.get_world_size() if sequence_parallel else 1)
    x = torch.ones(1, length, config.hidden_size, dtype=dtype).requires_grad_()
    with dtlab.phase("forward"):
        y = model.layers[0](x)
    with dtlab.phase("backward"):
        y.backward(torch.ones_like(y))


@pytest.mark.ranks
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_layer_calls_what_theory_says(sequence_parallel):
    config = GPTConfig(vocab_size=8, seq_length=8, hidden_size=24, num_layers=1, num_heads=4)
    recording = pool(4).record(one_layer, config, sequence_parallel, torch.float64)
    shape = theory.ModelShape(num_layers=1, hidden_size=24, num_heads=4, seq_length=8, vocab_size=8)
    wanted = theory.tp_layer_collectives(shape, micro_batch_size=1, tp_size=4, sequence_parallel=sequence_parallel,
                                         bytes_per_element=8)  # fmt: skip
    if sequence_parallel:
        wanted.append(("backward", "all_reduce", 8 * (4 + 2) * 24))  # norms and row biases, at the end of the pass
    for events in recording.events.values():
        calls = [(e.phase["name"], e.op, e.bytes) for e in events if e.kind == "issue" and e.phase]
        short = lambda op: next(name for name in ("all_gather", "reduce_scatter", "all_reduce") if op.startswith(name))
        assert [(phase, short(op), size) for phase, op, size in calls] == wanted


@pytest.mark.ranks
@pytest.mark.parametrize("tp_size, sequence_parallel, mib", [(1, False, 912), (8, False, 184), (8, True, 114)])
def test_a_layer_keeps_the_bytes_of_the_formula(tp_size, sequence_parallel, mib):
    config = GPTConfig(vocab_size=8, seq_length=2048, hidden_size=4096, num_layers=1, num_heads=32, dropout=0.1,
                       flash_attention=False)  # fmt: skip
    recording = dtlab.record_dry(with_small_masks, config, sequence_parallel, world_size=tp_size)
    events = recording.events[0]
    last = max(i for i, event in enumerate(events) if event.phase.get("name") == "forward")
    *_, (_, live) = live_bytes(events[:last])
    formula = theory.activation_bytes_per_layer(seq_length=2048, micro_batch_size=1, hidden_size=4096, num_heads=32,
                                                tp_size=tp_size, sequence_parallel=sequence_parallel)  # fmt: skip
    assert formula == mib * 2**20
    statistics = 2 * 2 * 2048 * 2  # not in the formula: norms' means and deviations
    assert live["activations"] == formula + statistics // (tp_size if sequence_parallel else 1)
