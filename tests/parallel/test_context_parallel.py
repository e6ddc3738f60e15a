"""Attention over a sequence that ranks share, against one process in float64; by bytes and work; broken on purpose."""
import copy
import functools
import math
import warnings
from collections import Counter
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from live_ranks import pool

import dtlab
from dtlab.errors import ConfigError, GuardError, HangError, RankError
from dtlab.models import GPT, GPTConfig, cross_entropy
from dtlab.parallel import (
    DistributedDataParallel,
    apply_context_parallel,
    apply_tensor_parallel,
    context_parallel_ring,
    gather_from_tp_region,
    global_mean,
    join_sequence,
    recompute,
    ring_attention,
    scatter_to_tp_region,
    sequence_positions,
    split_sequence,
    ulysses_attention,
    vocab_parallel_cross_entropy,
)
from dtlab.theory import LlamaShape, causal_blocks, ring_attention_wire_bytes, ulysses_wire_bytes

LAYOUTS = ("contiguous", "zigzag")
METHODS = {"ring": ring_attention, "ulysses": ulysses_attention}
NUM_STEPS = 5
close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def ranks(request):
    """The same, for all numbers of ranks."""
    live = pool(request.param)
    live.run(torch.set_num_threads, 1)
    return live


class Sizes(NamedTuple):
    """Of an attention; ``tile`` tokens are computed at once."""

    batch_size: int
    num_heads: int
    num_kv_heads: int
    seq_length: int
    head_size: int
    tile: int = 1024


SIZES = [Sizes(2, 12, 12, 24, 5), Sizes(1, 24, 12, 48, 7, tile=3), Sizes(3, 12, 12, 24, 1, tile=2)]
ODD = Sizes(2, 6, 2, 36, 5, tile=2)  # two kv heads; on 4 ranks nine tokens each


def inputs(sizes, dtype=torch.float64, scale=1.0, device="cpu"):
    """q, k, v and a gradient of the output, of the whole sequence: the same in every process."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda heads: torch.randn(sizes.batch_size, heads, sizes.seq_length, sizes.head_size,
                                     dtype=torch.float64, generator=generator)  # fmt: skip
    q, k, v, grad = (draw(sizes.num_kv_heads if i in (1, 2) else sizes.num_heads) for i in range(4))
    return [x.to(device, dtype) for x in (q * scale, k, v, grad)]


def with_grads(attention, q, k, v, grad, **options):
    """Output, and gradients of q, k, v."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = attention(q, k, v, **options)
    out.backward(grad)
    return [out.detach(), q.grad, k.grad, v.grad]


def serial_attention(q, k, v, *, causal):
    k, v = (x.repeat_interleave(q.size(1) // k.size(1), dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def on_ranks(method, sizes, layout, causal, **kind):
    """On a rank: output and gradients of its tokens, joined with those of the others."""
    before, context_parallel_ring.TILE = context_parallel_ring.TILE, sizes.tile
    try:
        mine = [split_sequence(x, dim=2, layout=layout) for x in inputs(sizes, **kind)]
        outputs = with_grads(METHODS[method], *mine, causal=causal, layout=layout)
        return [join_sequence(x, dim=2, layout=layout).cpu() for x in outputs]
    finally:
        context_parallel_ring.TILE = before


def assert_serial(ranks, method, sizes, layout, causal, **kind):
    wanted = with_grads(serial_attention, *inputs(sizes), causal=causal)
    for results in ranks.run(on_ranks, method, sizes, layout, causal, **kind):
        close(results, wanted)


# which tokens are whose


def places(seq_length, layout):
    """On a rank: its positions, and a tensor of the whole sequence that was split and joined again."""
    whole = torch.arange(6.0 * seq_length).view(2, seq_length, 3)
    mine = split_sequence(whole, layout=layout)
    assert torch.equal(mine, whole[:, sequence_positions(seq_length, layout=layout)])
    is_same = torch.equal(join_sequence(mine, layout=layout), whole)
    return sequence_positions(seq_length, layout=layout).tolist(), is_same


@pytest.mark.ranks
def test_each_token_is_on_one_rank_and_joined_in_its_place(ranks):
    n = ranks.size
    for layout in LAYOUTS:
        positions, is_same = zip(*ranks.run(places, 24, layout))
        assert all(is_same) and sorted(sum(positions, [])) == list(range(24))
        chunks = [list(range(24))[i * 24 // (2 * n):(i + 1) * 24 // (2 * n)] for i in range(2 * n)]
        pairs = [(r, 2 * n - 1 - r) if layout == "zigzag" else (2 * r, 2 * r + 1) for r in range(n)]
        assert list(positions) == [chunks[a] + chunks[b] for a, b in pairs]


def joined_loss(seq_length):
    """On a rank: the gradient of a parameter by which tokens are multiplied, for a loss of the joined sequence."""
    w = torch.ones((), dtype=torch.float64, requires_grad=True)
    whole = torch.arange(1.0, seq_length + 1, dtype=torch.float64)
    (join_sequence(split_sequence(whole, dim=0) * w, dim=0) * whole).sum().backward()
    dist.all_reduce(w.grad)
    return w.grad / dist.get_world_size()


@pytest.mark.ranks
def test_a_loss_of_the_joined_sequence_has_its_gradient_in_the_mean_over_the_ranks():
    for grad in pool(4).run(joined_loss, 8):
        assert grad == sum(i * i for i in range(1, 9))


@pytest.mark.ranks
@pytest.mark.parametrize("seq_length, layout, text", [
    (10, "contiguous", r"seq_length \(10\) must be divisible by 4: .* 4 ranks .* Use seq_length 8 or 12$"),
    (10, "zigzag", r"seq_length \(10\) must be divisible by 8: .* Use seq_length 8 or 16$"),
    (12, "zigzag", r"seq_length \(12\) must be divisible by 8: .* 8 or 16, or layout='contiguous'$"),
    (3, "zigzag", r"seq_length \(3\) must be divisible by 8: .* Use seq_length 8$"),
    (0, "zigzag", r"seq_length \(0\) must be at least 1$"),
    (8, "spiral", r"layout \('spiral'\) must be 'contiguous' or 'zigzag'$"),
])  # fmt: skip
def test_lengths_that_do_not_divide_are_refused_with_the_next_ones(seq_length, layout, text):
    def refused():
        for call in (sequence_positions, lambda length, layout: split_sequence(torch.zeros(1, length), layout=layout)):
            with pytest.raises(ConfigError, match=text):
                call(seq_length, layout=layout)

    pool(4).run(refused)


# attention


@pytest.mark.ranks
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
def test_attention_equals_one_process(ranks, method, layout, causal):
    for sizes in SIZES:
        assert_serial(ranks, method, sizes, layout, causal)


@pytest.mark.gpu
@pytest.mark.ranks
@pytest.mark.parametrize("method", METHODS)
def test_on_a_gpu(method):
    if torch.cuda.device_count() < (2 if method == "ring" else 1):
        pytest.skip("a ring's messages need an NVIDIA GPU for each of two ranks; Ulysses one for both")
    with dtlab.launch(2, device="cuda", share_gpu=torch.cuda.device_count() < 2) as ranks:
        for layout in LAYOUTS:
            assert_serial(ranks, method, SIZES[1], layout, True, device="cuda")


@pytest.mark.ranks
@pytest.mark.parametrize("method", METHODS)
def test_with_nothing_but_defaults_all_functions_take_one_layout(method):
    def program():
        q, k, v, _ = inputs(SIZES[0])
        out = METHODS[method](*(split_sequence(x, dim=2) for x in (q, k, v)))
        close(join_sequence(out, dim=2), serial_attention(q, k, v, causal=True))

    pool(4).run(program)


@pytest.mark.ranks
def test_a_ring_takes_fewer_kv_heads_than_ranks_and_an_odd_number_of_tokens(ranks):
    for causal in (True, False):
        assert_serial(ranks, "ring", ODD, "contiguous", causal)
    assert_serial(ranks, "ring", ODD._replace(seq_length=48), "zigzag", True)


@pytest.mark.ranks
def test_scores_of_thousands_stay_finite(ranks):
    wanted = serial_attention(*inputs(SIZES[1], scale=1000.0)[:3], causal=True)
    for layout in LAYOUTS:
        for out, *grads in ranks.run(on_ranks, "ring", SIZES[1], layout, True, scale=1000.0):
            close(out, wanted)
            assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.ranks
def test_keys_of_minus_infinity_have_no_weight_as_in_one_process():
    def program():
        q, k, v, _ = inputs(SIZES[1])
        q, k[:, :, 6:12, 0] = q.abs(), -math.inf  # of rank 1's first block, its own
        out = ring_attention(*(split_sequence(x, dim=2) for x in (q, k, v)))
        close(join_sequence(out, dim=2), serial_attention(q, k, v, causal=True))

    pool(4).run(program)


@pytest.mark.ranks
def test_sixteen_bits_are_summed_in_thirty_two(ranks):
    for dtype in (torch.bfloat16, torch.float16):
        q, k, v, grad = inputs(SIZES[1], dtype=dtype)
        wanted = with_grads(serial_attention, *(x.double() for x in (q, k, v, grad)), causal=True)
        last_bit = torch.finfo(dtype).eps
        for results in ranks.run(on_ranks, "ring", SIZES[1], "zigzag", True, dtype=dtype):
            assert {x.dtype for x in results} == {dtype}
            torch.testing.assert_close(results[0].double(), wanted[0], rtol=last_bit, atol=last_bit / 8)
            for mine, exact in zip(results[1:], wanted[1:]):  # backward starts from an output of 16 bits
                assert (mine.double() - exact).norm() < last_bit * exact.norm()


@pytest.mark.ranks
def test_autocast_does_not_undo_the_thirty_two_bits():
    def both(dtype):
        mine = [split_sequence(x, dim=2) for x in inputs(SIZES[0], dtype=dtype)]
        plain = with_grads(ring_attention, *mine)
        with torch.autocast("cpu", dtype=torch.bfloat16):  # backward too
            return list(map(torch.equal, with_grads(ring_attention, *mine), plain))

    for dtype in (torch.bfloat16, torch.float32):
        assert pool(4).run(both, dtype) == [[True] * 4] * 4


@pytest.mark.ranks
def test_no_warning_is_given():
    def program():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for method in METHODS:
                on_ranks(method, SIZES[0], "zigzag", True)

    pool(4).run(program)


@pytest.mark.ranks
def test_recomputing_a_layer_sends_its_messages_again_and_gives_the_same_gradients():
    def program():
        x = torch.randn(1, 6, 36, dtype=torch.float64, generator=torch.Generator().manual_seed(dist.get_rank()))
        layer = apply_context_parallel(GPT(GROUPED, dtype=torch.float64)).layers[0]
        grads = []
        for call in (layer, functools.partial(recompute, layer)):
            layer.zero_grad()
            call(x.requires_grad_()).square().sum().backward()
            grads.append([p.grad.clone() for p in layer.parameters()])
        close(*grads)

    pool(4).run(program)


@pytest.mark.ranks
def test_ranks_of_a_group_share_a_sequence_of_their_own():
    def in_pairs():
        pairs = [dist.new_group([0, 3]), dist.new_group([1, 2])]
        mine = dist.get_rank() in (1, 2)
        group, other = pairs[mine], pairs[not mine]
        tensors = [x + mine for x in inputs(ODD)]
        parts = [split_sequence(x, dim=2, group=group) for x in tensors]
        results = with_grads(ring_attention, *parts, group=group)
        close([join_sequence(x, dim=2, group=group) for x in results],
              with_grads(serial_attention, *tensors, causal=True))  # fmt: skip
        for call in (lambda: ring_attention(*parts[:3], group=other), lambda: sequence_positions(8, group=other)):
            with pytest.raises(ConfigError, match=f"rank {dist.get_rank()} is not in this group"):
                call()

    pool(4).run(in_pairs)


# the whole model


LESSONS = GPTConfig(seq_length=24)  # hidden 192, 12 heads, 4 layers
CONFIG = GPTConfig(vocab_size=31, seq_length=24, hidden_size=36, num_layers=2, num_heads=12)
GROUPED = GPTConfig(vocab_size=31, seq_length=24, hidden_size=36, num_layers=2, num_heads=6, num_kv_heads=2)


class Trained(NamedTuple):
    """What must be equal."""

    losses: list
    grads: list  # a dict of gradients for each step
    params: dict


def global_batch(config, step, is_masked):
    """Three sequences; with a mask, ranks have different numbers of tokens that count."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, config.vocab_size, (3, config.seq_length + 1), generator=generator)
    mask = torch.rand(3, config.seq_length, generator=generator) < 0.4 * is_masked
    return tokens[:, :-1], tokens[:, 1:].masked_fill(mask, -100)


def train(model, loss_of, mean_of=lambda loss: loss.item()):
    """Five steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, grads = [], []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = loss_of(step)
        loss.backward()
        losses.append(mean_of(loss.detach()))
        grads.append({name.removeprefix("module."): p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
    return Trained(losses, grads, {name.removeprefix("module."): p for name, p in model.state_dict().items()})


@functools.cache
def serial(config, is_masked):
    """One process with whole sequences."""
    model = GPT(config, seed=0, dtype=torch.float64)

    def loss_of(step):
        tokens, targets = global_batch(config, step, is_masked)
        return cross_entropy(model(tokens), targets, reduction="mean")

    return train(model, loss_of)


def in_parts(config, is_masked, method, layout):
    """On a rank: its tokens; the model starts from a seed of its own."""
    model = GPT(config, seed=dist.get_rank(), dtype=torch.float64)
    names = [name for name, _ in model.named_parameters()]
    ddp = DistributedDataParallel(apply_context_parallel(model, method=method, layout=layout))
    assert [name for name, _ in model.named_parameters()] == names

    def loss_of(step):
        tokens, targets = (split_sequence(x, layout=layout) for x in global_batch(config, step, is_masked))
        logits = ddp(tokens, positions=sequence_positions(config.seq_length, layout=layout))
        if is_masked:
            return global_mean(cross_entropy(logits, targets, reduction="sum"), (targets >= 0).sum())
        return cross_entropy(logits, targets, reduction="mean")  # of this rank's tokens

    def mean_of(loss):
        dist.all_reduce(loss)
        return loss.item() / dist.get_world_size()

    return train(ddp, loss_of, mean_of)


@pytest.mark.ranks
@pytest.mark.parametrize("config, is_masked, method, layout", [
    (CONFIG, False, "ring", "zigzag"), (CONFIG, True, "ring", "contiguous"), (GROUPED, True, "ring", "zigzag"),
    (CONFIG, False, "ulysses", "contiguous"), (CONFIG, True, "ulysses", "zigzag"),
])  # fmt: skip
def test_training_equals_one_process(ranks, config, is_masked, method, layout):
    reference = serial(config, is_masked)
    for trained in ranks.run(in_parts, config, is_masked, method, layout):
        close(torch.tensor(trained.losses, dtype=torch.float64), torch.tensor(reference.losses, dtype=torch.float64))
        close(trained.grads, reference.grads)
        close(trained.params, reference.params)


@pytest.mark.ranks
def test_the_lessons_model_trains_as_in_one_process():
    def program():
        trained = in_parts(LESSONS, False, "ring", "zigzag")
        return torch.tensor(trained.losses, dtype=torch.float64), trained.params

    reference = serial(LESSONS, False)
    for losses, params in pool(4).run(program):
        close(losses, torch.tensor(reference.losses, dtype=torch.float64))
        close(params, reference.params)


def in_a_grid(method):
    """On a rank of 4: layers cut over ranks 0, 1 and over 2, 3, sequences over 0, 2 and over 1, 3."""
    rank, pairs = dist.get_rank(), [dist.new_group(pair) for pair in ([0, 1], [2, 3], [0, 2], [1, 3])]
    tp_group, cp_group = pairs[rank // 2], pairs[2 + rank % 2]
    model, whole = (GPT(CONFIG, dtype=torch.float64) for _ in range(2))
    apply_context_parallel(apply_tensor_parallel(model, group=tp_group), method=method, group=cp_group)
    ddp = DistributedDataParallel(model, group=cp_group)
    tokens, targets = global_batch(CONFIG, 0, False)
    mine = [split_sequence(x, group=cp_group) for x in (tokens, targets)]
    logits = ddp(mine[0], positions=sequence_positions(CONFIG.seq_length, group=cp_group))
    vocab_parallel_cross_entropy(logits, mine[1], vocab_size=CONFIG.vocab_size, reduction="mean",
                                 group=tp_group).backward()  # fmt: skip
    cross_entropy(whole(tokens), targets, reduction="mean").backward()
    for p in whole.parameters():
        p.data = p.grad
    wanted = dict(apply_tensor_parallel(whole, group=tp_group).named_parameters())  # cut as the parameters are
    close({name: p.grad for name, p in model.named_parameters()}, {name: wanted[name].detach() for name in wanted})


@pytest.mark.ranks
@pytest.mark.parametrize("method", METHODS)
def test_layers_and_sequences_are_cut_at_once(method):
    pool(4).run(in_a_grid, method)


# broken on purpose


@pytest.mark.ranks
def test_broken_positions_of_another_layout_give_a_loss_like_any_if_nobody_compares_them():
    def loss_of(config):
        model = apply_context_parallel(GPT(config, dtype=torch.float64))
        model._forward_pre_hooks.clear()  # what compares them
        tokens, targets = map(split_sequence, global_batch(config, 0, False))
        positions = sequence_positions(config.seq_length, layout="contiguous")
        loss = cross_entropy(model(tokens, positions=positions), targets, reduction="mean").detach()
        dist.all_reduce(loss)
        return loss.item() / dist.get_world_size()

    right = cross_entropy(GPT(CONFIG, dtype=torch.float64)(global_batch(CONFIG, 0, False)[0]),
                          global_batch(CONFIG, 0, False)[1], reduction="mean").item()  # fmt: skip
    (loss,) = set(pool(4).run(loss_of, CONFIG))
    assert loss != pytest.approx(right, rel=1e-5) and loss == pytest.approx(math.log(31), rel=0.02)


def test_broken_the_mean_of_the_chunks_softmaxes():
    q, k, v, _ = inputs(Sizes(1, 4, 4, 32, 8))
    right = serial_attention(q, k, v, causal=False)
    chunks = [serial_attention(q, *pair, causal=False) for pair in zip(k.chunk(4, 2), v.chunk(4, 2))]
    error = (torch.stack(chunks).mean(0) - right).abs().mean()
    assert error == pytest.approx(0.07, abs=0.005) and right.abs().mean() == pytest.approx(0.21, abs=0.005)


def without_shrinking(out, largest, total, scores, values):
    """As ``_online_softmax``, but what was summed before stays as it was when a larger score comes."""
    largest = torch.maximum(largest, scores.amax(-1, keepdim=True))
    weights = (scores - largest).exp()
    return out + weights @ values, largest, total + weights.sum(-1, keepdim=True)


@pytest.mark.ranks
def test_broken_sums_that_are_not_scaled_down_for_a_larger_score():
    def broken():
        right, context_parallel_ring._online_softmax = context_parallel_ring._online_softmax, without_shrinking
        try:
            return on_ranks("ring", SIZES[0], "zigzag", True)
        finally:
            context_parallel_ring._online_softmax = right

    out = pool(4).run(broken)[0][0]
    assert (out - serial_attention(*inputs(SIZES[0])[:3], causal=True)).abs().max() > 0.01


# bytes, work, order, memory


def recorded(method, sizes, dtype, layout="zigzag", causal=True):
    """On a rank: forward and backward, recorded after a first call that compares shapes."""
    mine = [split_sequence(x, dim=2, layout=layout) for x in inputs(sizes, dtype=dtype)]
    for step in range(2):
        with dtlab.phase("step", step=step):
            q, k, v = (x.clone().requires_grad_() for x in mine[:3])
            out = METHODS[method](q, k, v, causal=causal, layout=layout)
        with dtlab.phase("back", step=step):
            out.backward(mine[3])


def sent(recording, rank):
    """Calls and bytes of the second step, forward and backward."""
    issues = [e for e in recording.events[rank] if e.kind == "issue" and e.phase.get("step") == 1]
    forward, backward = ([e for e in issues if e.phase["name"] == name] for name in ("step", "back"))
    return [(Counter(e.op for e in part), sum(e.wire_bytes for e in part)) for part in (forward, backward)]


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_is_sent_is_what_theory_says(ranks, dtype):
    n, shape = ranks.size, LlamaShape(num_layers=1, hidden_size=72, num_heads=24, num_kv_heads=12, seq_length=48,
                                      vocab_size=31)  # fmt: skip
    sizes = Sizes(2, 24, 12, 48, 3)
    for method, theory in (("ring", ring_attention_wire_bytes), ("ulysses", ulysses_wire_bytes)):
        wanted = theory(shape, cp_size=n, micro_batch_size=2, bytes_per_element=dtype.itemsize)
        calls = {"ring": [Counter(send=n - 1, recv=n - 1), Counter(send=2 * (n - 1), recv=2 * (n - 1))],
                 "ulysses": [Counter(all_to_all_single=4 * (n > 1))] * 2}  # fmt: skip
        recording = ranks.record(recorded, method, sizes, dtype)
        for rank in range(n):
            ops, sent_bytes = zip(*sent(recording, rank))
            assert list(ops) == [+its for its in calls[method]]
            assert list(sent_bytes) == pytest.approx([wanted["forward"], wanted["backward"]], rel=1e-14)


@pytest.mark.ranks
def test_the_next_keys_and_values_travel_while_a_block_is_computed():
    recording = pool(4).record(recorded, "ring", Sizes(1, 2, 2, 64, 4), torch.float64)
    for name in ("step", "back"):
        events = [e for e in recording.events[2] if e.phase.get("step") == 1 and e.phase["name"] == name]
        waits = {(e.op, e.seq, e.peer): i for i, e in enumerate(events) if e.kind == "wait"}
        hidden = [any(between.flops for between in events[i : waits[e.op, e.seq, e.peer]])
                  for i, e in enumerate(events) if e.kind == "issue" and e.op == "send"]  # fmt: skip
        assert hidden == ([True] * 3 if name == "step" else [True] * 5 + [False])  # the last gradients go home


def pairs(layout):
    """On a rank: pairs of tokens whose scores it computes, and of those that the mask leaves, for each source."""
    computed, seen, right = {}, Counter(), context_parallel_ring._scores
    blocks, source_of_block = context_parallel_ring._Ring.blocks, []

    def noted_blocks(ring, source):
        for block in blocks(ring, source):
            source_of_block.append(source)
            yield block

    def counted(*args):
        scores = right(*args)
        computed[source_of_block[-1]] = computed.get(source_of_block[-1], 0) + scores.numel()
        seen[source_of_block[-1]] += int(scores.isfinite().sum())
        return scores

    context_parallel_ring._scores, context_parallel_ring._Ring.blocks = counted, noted_blocks
    before, context_parallel_ring.TILE = context_parallel_ring.TILE, 16
    try:
        ring_attention(*(split_sequence(x, dim=2, layout=layout) for x in inputs(Sizes(1, 1, 1, 512, 1))[:3]),
                       layout=layout)
    finally:
        context_parallel_ring._scores, context_parallel_ring._Ring.blocks = right, blocks
        context_parallel_ring.TILE = before
    return [[table.get(source, 0) for source in range(dist.get_world_size())] for table in (computed, seen)]


@pytest.mark.ranks
def test_a_zigzag_gives_all_ranks_equal_work_in_each_step_and_contiguous_chunks_do_not():
    for layout, busiest, last_to_first in (("contiguous", 1.75, 7), ("zigzag", 1, 1)):
        computed, seen = zip(*pool(4).run(pairs, layout))
        assert sum(map(sum, seen)) == 512 * 513 // 2  # each pair once
        shares = [[count / sum(map(sum, seen)) for count in its] for its in seen]
        assert shares == [pytest.approx(its, abs=1 / 512) for its in causal_blocks(4, layout)]
        work = [sum(its) for its in seen]
        assert max(work) / (sum(work) / 4) == pytest.approx(busiest, rel=0.02)
        assert work[-1] / work[0] == pytest.approx(last_to_first, rel=0.02)
        assert sum(map(sum, computed)) < 1.07 * sum(map(sum, seen))  # what is hidden is not computed
        by_step = [[its[(rank - step) % 4] for rank, its in enumerate(computed)] for step in range(4)]
        assert all(len(set(its)) == 1 for its in by_step) == (layout == "zigzag")


def dry_attention(seq_length):
    """On a played rank: forward and backward of 2 heads of 128, in 16 bits."""
    length = seq_length // dist.get_world_size()
    q, k, v = (torch.zeros(1, 2, length, 128, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    ring_attention(q, k, v).sum().backward()


@pytest.mark.ranks
def test_memory_falls_with_the_ranks_and_no_rank_ever_holds_all_keys_or_scores():
    seq_length, saved, largest = 16384, {}, {}
    for n in (4, 8):
        recording = dtlab.record_dry(dry_attention, seq_length, world_size=n, ranks=[1])
        saved[n] = recording.memory().peak_activations[1]
        largest[n] = max(e.bytes for e in recording.events[1] if e.kind == "alloc")
    tokens = seq_length // 4 * 2  # of both heads
    assert saved[4] == tokens * (4 * 128 * 2 + 4) and saved[8] == saved[4] / 2  # q, k, v, output; logsumexp in 32 bits
    all_keys_and_values, scores = 2 * 2 * seq_length * 128 * 2, 2 * 1024 * 1024 * 4
    assert largest == {4: scores, 8: scores} and scores < all_keys_and_values == 16 * 2**20


# refused


def refused(text, call):
    with pytest.raises(ConfigError, match=text):
        call()


def call_with(method, changed_rank=None, **changes):
    """On a rank: attention on 2 x 6 x 4 x 3; one rank, or None for all, with other dtypes, sizes or options."""
    options = {"causal": True, "layout": "zigzag"} | {"q": (2, 6, 4, 3), "k": (2, 6, 4, 3), "v": (2, 6, 4, 3)}
    if changed_rank is None or dist.get_rank() == changed_rank:
        options |= changes
    make = lambda its: torch.zeros(its, requires_grad=True) if isinstance(its, tuple) else its
    return METHODS[method](**{name: make(its) for name, its in options.items()})


DIFFERENT = [
    ({"q": torch.zeros(2, 6, 4, 3, dtype=torch.float64, requires_grad=True)},
     r"rank 2 has other arguments than rank 0. .*: rank 0 has q float32 \[2, 6, 4, 3\]; rank 2 has q float64"),
    ({"q": (2, 6, 6, 3), "k": (2, 6, 6, 3), "v": (2, 6, 6, 3)},
     r"rank 0 has q float32 \[2, 6, 4, 3\]; rank 2 has q float32 \[2, 6, 6, 3\]"),
    ({"causal": False}, "rank 0 has causal True; rank 2 has causal False"),
    ({"layout": "contiguous"}, "rank 0 has layout 'zigzag'; rank 2 has layout 'contiguous'"),
    ({"k": None}, r"rank 0 has k float32 \[2, 6, 4, 3\]; rank 2 has k NoneType"),
    ({"q": torch.zeros(2, 6, 4, 3), "k": torch.zeros(2, 6, 4, 3), "v": torch.zeros(2, 6, 4, 3)},
     "rank 0 has a gradient needed True; rank 2 has a gradient needed False"),
]  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("changes, text", DIFFERENT)
def test_what_differs_on_one_rank_is_refused_on_all(method, changes, text):
    pool(4).run(lambda: refused(text, lambda: call_with(method, changed_rank=2, **changes)))


@pytest.mark.ranks
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("changes", [{"causal": False}, {"layout": "contiguous"}, dict.fromkeys("qkv", (2, 12, 2, 3)),
                                     {"q": (2, 24, 4, 3)}], ids=str)  # fmt: skip
def test_what_differs_after_good_calls_of_both_kinds_is_found_by_the_guard(method, changes):
    def program():
        twelve = dict.fromkeys("qkv", (2, 12, 4, 3))
        for its in (changes, {}):
            call_with(method, **twelve | its).sum().backward()
        call_with(method, **twelve | (changes if dist.get_rank() == 2 else {}))

    with pytest.raises((GuardError, HangError), match="rank 2"):
        pool(4).run(program)


SMALL = (2, 3, 4, 3)
ILLEGAL = [
    ("ring", {"q": (2, 4, 3)}, r"q float32 \[2, 4, 3\], k .*: give tensors of floating-point numbers, \[batch_size, "),
    ("ring", {"k": torch.zeros(2, 6, 4, 3, dtype=torch.long)}, r"k int64 \[2, 6, 4, 3\].*: give tensors of floating"),
    ("ring", {"v": (2, 6, 4, 5)}, r"v float32 \[2, 6, 4, 5\]: dtype and all sizes must be equal"),
    ("ring", {"k": (2, 6, 5, 3), "v": (2, 6, 5, 3)}, "dtype and all sizes must be equal"),
    ("ring", {"q": torch.zeros(2, 6, 4, 3, dtype=torch.float64)}, "dtype and all sizes must be equal"),
    ("ring", {"k": (2, 4, 4, 3), "v": (2, 4, 4, 3)}, r"heads of q \(6\) must be divisible by heads of k and v \(4\)"),
    ("ring", dict.fromkeys("qkv", (2, 6, 3, 3)), r"seq_length \(12\) must be divisible by 8: .* 8 or 16, or layout="),
    ("ring", {"layout": "spiral"}, "layout .'spiral'. must be 'contiguous' or 'zigzag'"),
    ("ring", {"causal": "no"}, r"causal \('no'\) must be True or False"),
    ("ring", dict.fromkeys("qkv", (2, 0, 4, 3)), r"q float32 \[2, 0, 4, 3\].*: give tensors .* with a head at least"),
    ("ring", dict.fromkeys("qkv", torch.zeros(2, 6, 4, 3, device="meta")), "give tensors .* not on the meta device"),
    ("ulysses", {}, r"num_heads \(6\) and num_kv_heads \(6\) must be divisible by cp_size \(4\): .* 1, 2, 3, 6;"),
    ("ulysses", {"q": (2, 12, 4, 3), "k": SMALL, "v": SMALL}, r"\(12\) and num_kv_heads \(3\) .*: use cp_size 1, 3;"),
]  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize("method, changes, text", ILLEGAL)
def test_what_does_not_fit_is_refused_on_all_ranks(method, changes, text):
    pool(4).run(lambda: refused(text, lambda: call_with(method, **changes)))


@pytest.mark.ranks
def test_models_that_cannot_share_a_sequence_are_refused():
    def program():
        apply = functools.partial(apply_context_parallel, GPT(CONFIG))
        refused("method .'torus'. must be 'ring' or 'ulysses'", lambda: apply(method="torus"))
        refused("layout .'spiral'. must be", lambda: apply(layout="spiral"))
        refused("Linear has no module with attend", lambda: apply_context_parallel(torch.nn.Linear(2, 2)))
        refused("of type NoneType: give a torch.nn.Module", lambda: apply_context_parallel(None))
        with_dropout = GPT(GPTConfig(hidden_size=12, num_layers=1, num_heads=2, dropout=0.1))
        refused(r"dropout \(0.1\) on attention weights", lambda: apply_context_parallel(with_dropout))

    pool(4).run(program)


class Bare(torch.nn.Module):
    """An attention that knows no dropout."""

    def attend(self, q, k, v):
        """What is replaced."""


@pytest.mark.ranks
def test_a_model_is_changed_once_and_its_copy_talks_to_the_same_ranks():
    def program():
        pair = dist.new_group([0, 2] if dist.get_rank() % 2 == 0 else [1, 3], use_local_synchronization=True)
        model = apply_context_parallel(GPT(CONFIG), group=pair)
        refused("attention of this GPT has been replaced already", lambda: apply_context_parallel(model))
        assert "attend" in vars(apply_context_parallel(Bare()))
        tokens = global_batch(CONFIG, 0, False)[0]
        call = lambda its: its(split_sequence(tokens, group=pair), positions=sequence_positions(24, group=pair))
        assert torch.equal(call(copy.deepcopy(model)), call(model))

    pool(4).run(program)


@pytest.mark.ranks
def test_ranks_with_parts_of_one_model_cannot_share_a_sequence():
    def program():
        rank, pairs = dist.get_rank(), [dist.new_group(pair) for pair in ([0, 1], [2, 3], [0, 2], [1, 3])]
        model = apply_tensor_parallel(GPT(CONFIG), group=pairs[rank // 2])
        both = fr"is tensor-parallel over ranks \[{rank // 2 * 2}, {rank // 2 * 2 + 1}\], and this group has ranks"
        refused(both, lambda: apply_context_parallel(model))
        refused(both, lambda: apply_context_parallel(model, group=pairs[rank // 2]))
        apply_context_parallel(model, group=pairs[2 + rank % 2])

    pool(4).run(program)


WRONG_POSITIONS = [
    (24, None, r"positions \(None\) must say where .* each of a rank's 6 tokens stands: give positions=sequence_pos"
               r"itions\(24, layout='zigzag', group=group\)"),
    (24, lambda: sequence_positions(24, layout="contiguous"), "token 3 of rank 0 stands at position 3, but attention "
                                                              "takes it to be at 21: for tokens by split_sequence"),
    (24, lambda: torch.arange(6) + 6 * dist.get_rank(), "token 3 of rank 0 stands at position 3"),
    (24, lambda: sequence_positions(16), r"positions \(\[4\]\) must say where"),
    (32, lambda: sequence_positions(32), r"32 tokens long, 8 on each of 4 ranks, but .* seq_length \(24\): cut it, or"),
    (32, None, "the sequence is 32 tokens long"),
    (12, lambda: sequence_positions(12, layout="contiguous"), r"seq_length \(12\) must be divisible by 8"),
    (24, lambda: None if dist.get_rank() == 2 else sequence_positions(24), r"positions \(None\) must"),
    (24, lambda: sequence_positions(24) + 10 * (dist.get_rank() == 2), "token 0 of rank 2 stands at position 16, but "),
]  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize("seq_length, positions, text", WRONG_POSITIONS)
def test_tokens_that_stand_elsewhere_are_refused_on_all_ranks(seq_length, positions, text):
    def program():
        model = apply_context_parallel(GPT(CONFIG, dtype=torch.float64))
        tokens = torch.zeros(2, seq_length // 4, dtype=torch.long)
        refused(text, lambda: model(tokens, positions=positions and positions()))

    pool(4).run(program)


@pytest.mark.ranks
def test_positions_that_one_rank_forgets_after_a_good_call_are_named():
    def program():
        model = apply_context_parallel(GPT(CONFIG))
        for step in range(2):
            its = None if step and dist.get_rank() == 2 else sequence_positions(24)
            model(torch.zeros(2, 6, dtype=torch.long), its)

    with pytest.raises(RankError, match=r"rank 2 of 4 failed: ConfigError: positions \(None\) must say"):
        pool(4).run(program)


def step_without_values():
    """On a played rank."""
    model = apply_context_parallel(GPT(CONFIG))
    tokens = split_sequence(torch.zeros(2, 24, dtype=torch.long))
    model(tokens, positions=sequence_positions(24)).sum().backward()
    refused(r"positions \(None\) must say", lambda: model(tokens))


@pytest.mark.ranks
def test_a_dry_recording_compares_no_values_but_wants_positions():
    recording = dtlab.record_dry(step_without_values, world_size=4, ranks=[1])
    assert {e.op for e in recording.events[1] if e.kind == "issue"} == {"send", "recv"}


def test_without_ranks_there_is_nobody_to_share_with():
    x = torch.zeros(1, 1, 4, 2)
    for call in (lambda: sequence_positions(8), lambda: join_sequence(x), lambda: split_sequence(x),
                 lambda: ring_attention(x, x, x), lambda: ulysses_attention(x, x, x),
                 lambda: apply_context_parallel(GPT(CONFIG))):  # fmt: skip
        refused("this process is no rank", call)


@pytest.mark.ranks
@pytest.mark.parametrize("layout, causal", [("contiguous", False), ("contiguous", True), ("zigzag", True)])
def test_gradients_are_those_of_finite_differences(layout, causal):
    def check():
        def attention(q, k, v):  # of whole tensors, the same on each rank, as its output is
            q, k, v = (scatter_to_tp_region(x, dim=2) for x in (q, k, v))
            return gather_from_tp_region(ring_attention(q, k, v, causal=causal, layout=layout), dim=2)

        tensors = inputs(Sizes(1, 2, 1, 4, 2))[:3]
        return torch.autograd.gradcheck(attention, [x.requires_grad_() for x in tensors])

    assert pool(2).run(check) == [True, True]
