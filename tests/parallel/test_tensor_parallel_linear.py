"""Column and row parallel linear layers against nn.Linear, in float64; by calls and bytes; and broken on purpose."""
import functools
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from live_ranks import pool
from torch import nn

import dtlab
from dtlab.errors import ConfigError, RankError
from dtlab.models import init_by_name
from dtlab.models.init import full_parameter
from dtlab.parallel import ColumnParallelLinear, RowParallelLinear, recompute, reduce_from_tp_region

IN, OUT, BATCH, SEQ, SEED = 12, 24, 3, 12, 5  # 1, 2, 3 and 4 divide what is cut
close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)
size_of = lambda *shape: 8 * torch.Size(shape).numel()

KINDS = {
    "column": (ColumnParallelLinear, {}),
    "column, no bias": (ColumnParallelLinear, {"bias": False}),
    "column, gathered": (ColumnParallelLinear, {"gather_output": True}),
    "column, waits": (ColumnParallelLinear, {"async_grad_all_reduce": False}),
    "column, sequence": (ColumnParallelLinear, {"sequence_parallel": True}),
    "column, sequence, waits": (ColumnParallelLinear, {"sequence_parallel": True, "async_grad_all_reduce": False}),
    "row": (RowParallelLinear, {}),
    "row, no bias": (RowParallelLinear, {"bias": False}),
    "row, whole input": (RowParallelLinear, {"input_is_parallel": False}),
    "row, sequence": (RowParallelLinear, {"sequence_parallel": True}),
}


def cuts(kind):
    """In which dim a rank's part of x, y, weight and bias lies; None: it has all."""
    is_column, tokens = "column" in kind, 1 if "sequence" in kind else None
    if is_column:
        return {"x": tokens, "y": None if "gathered" in kind else -1, "weight": 0, "bias": 0}
    return {"x": None if "whole" in kind else -1, "y": tokens, "weight": 1, "bias": None}


def cut(tensor, dim, rank, size):
    return tensor if dim is None or tensor is None else tensor.chunk(size, dim)[rank]


def part_of(kind, rank, size):
    """Function that cuts what has a name, x, y, weight or bias, as the layer does."""
    return lambda name, whole: cut(whole, cuts(kind)[name], rank, size)


def inputs(step=0, device="cpu"):
    """x and a weight for each element of y, so that each gradient is another."""
    shapes = {"x": (BATCH, SEQ, IN), "y": (BATCH, SEQ, OUT)}
    return [full_parameter(f"{name} {step}", shape, 1, dtype=torch.float64).to(device) for name, shape in
            shapes.items()]


def fill_bias(bias, dim=None, rank=0, size=1):
    """Biases start at 0, which would hide one that is added twice."""
    if bias is not None:
        with torch.no_grad():
            bias.copy_(cut(torch.arange(1.0, OUT + 1), dim, rank, size))


def train(layer, part_of, optimizer, mend=lambda layer: None):
    """Five steps: output and gradients of the first one, and the parameters at the end; each as this rank has it."""
    found, optimizer = {}, optimizer(layer.parameters())
    for step in range(5):
        x, each = (part_of(name, whole).clone() for name, whole in zip("xy", inputs(step, layer.weight.device)))
        y = layer(x.requires_grad_())
        optimizer.zero_grad()
        (y * each).sin().sum().backward()
        mend(layer)
        if step == 0:
            grads = {f"grad of {name}": p.grad.clone() for name, p in layer.named_parameters()}
            found = {"y": y.detach(), "grad of x": x.grad, **grads}
        optimizer.step()
    return {**found, **{name: p.detach() for name, p in layer.named_parameters()}}


OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": functools.partial(torch.optim.Adam, lr=0.01),
}


@functools.cache
def serial(optimizer, bias):
    layer = init_by_name(nn.Linear(IN, OUT, bias=bias, dtype=torch.float64), SEED)
    fill_bias(layer.bias)
    return train(layer, lambda name, whole: whole, OPTIMIZERS[optimizer])


def sum_bias_grad(layer):
    """The bias' gradient of row, sequence: of this rank's tokens only."""
    dist.all_reduce(layer.bias.grad)


def make(kind, **more):
    layer, options = KINDS[kind]
    return layer(IN, OUT, seed=SEED, dtype=torch.float64, **options, **more)


def train_all(optimizer, device="cpu", kinds=tuple(KINDS)):
    """On a rank: every kind of layer."""
    rank, size, found = dist.get_rank(), dist.get_world_size(), {}
    for kind in kinds:
        layer = make(kind, device=device)
        fill_bias(layer.bias, cuts(kind)["bias"], rank, size)
        mend = sum_bias_grad if kind == "row, sequence" else lambda layer: None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found[kind] = train(layer, part_of(kind, rank, size), OPTIMIZERS[optimizer], mend)
    return found


def assert_equals_serial(found, kind, optimizer, rank, size):
    expected, mine = serial(optimizer, "no bias" not in kind), part_of(kind, rank, size)
    assert found.keys() == expected.keys()
    for name, whole in expected.items():
        close(found[name].cpu(), mine(name.split()[-1], whole))


@pytest.mark.ranks
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_output_every_gradient_and_five_steps_are_those_of_nn_linear(num_ranks, optimizer):
    for rank, found in enumerate(pool(num_ranks).run(train_all, optimizer)):
        for kind in KINDS:
            assert_equals_serial(found[kind], kind, optimizer, rank, num_ranks)


@pytest.mark.gpu
@pytest.mark.ranks
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_on_a_gpu():
    with dtlab.launch(2, device="cuda", share_gpu=torch.cuda.device_count() < 2) as ranks:
        for rank, found in enumerate(ranks.run(train_all, "sgd", "cuda")):
            for kind in KINDS:
                assert_equals_serial(found[kind], kind, "sgd", rank, 2)


# first values


def first_values():
    """On a rank: its parts of weights that are put together again."""
    parts = []
    for layer in (ColumnParallelLinear(6, 24, seed=3), RowParallelLinear(24, 6, seed=3)):
        every = [torch.empty_like(layer.weight) for _ in range(dist.get_world_size())]
        dist.all_gather(every, layer.weight.detach())
        parts.append(every)
    return [torch.cat(every, dim) for dim, every in enumerate(parts)]


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_the_parts_at_the_start_are_the_serial_layers(num_ranks):
    column, row = pool(num_ranks).run(first_values)[-1]
    assert torch.equal(column, init_by_name(nn.Linear(6, 24), 3).weight)
    assert torch.equal(row, init_by_name(nn.Linear(24, 6), 3).weight)


class Outer(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.inner = ColumnParallelLinear(6, 24, **options)


def named_values():
    """On a rank: weights under a longer name: made at once, and made without memory first."""
    late = Outer(device="meta").to_empty(device="cpu")
    return [init_by_name(outer, 3).inner.weight.detach() for outer in (Outer(), late)]


@pytest.mark.ranks
def test_a_part_of_a_model_starts_with_its_slice_of_the_model():
    for rank, values in enumerate(pool(3).run(named_values)):
        for value in values:
            assert torch.equal(value, full_parameter("inner.weight", (24, 6), 3).chunk(3)[rank])


def own_columns(whole):
    """Columns 0 and 5 + rank: the first one on every rank."""
    return torch.cat([whole[:1], whole[5 + dist.get_rank() :][:1]])


def chosen_columns():
    layer = ColumnParallelLinear(6, 24, seed=3, shard=own_columns)
    return layer.weight.detach(), layer.bias.shape, layer(torch.ones(2, 6)).shape


@pytest.mark.ranks
def test_a_layer_may_have_columns_of_its_own_choice():
    whole = init_by_name(nn.Linear(6, 24), 3).weight
    for rank, (weight, *shapes) in enumerate(pool(2).run(chosen_columns)):
        assert torch.equal(weight, whole[[0, 5 + rank]]) and shapes == [(2,), (2, 2)]


# broken on purpose


def without_f():
    """On a rank: output and input gradient, of the layer and of one that does not sum the gradient."""
    x, found = inputs()[0], []
    layer = make("column")
    for call in (layer, lambda x: F.linear(x, layer.weight, layer.bias)):
        mine = x.clone().requires_grad_()
        y = call(mine)
        y.sin().sum().backward()
        found += [y.detach(), mine.grad]
    return found


@pytest.mark.ranks
def test_broken_without_the_sum_of_the_gradient_the_output_does_not_tell():
    for y, x_grad, same, wrong in pool(2).run(without_f):
        assert torch.equal(y, same)
        assert (wrong - x_grad).norm() > 0.1 * x_grad.norm()


def bias_on_each_rank():
    """On a rank: broken: the bias is added before the sum."""
    layer, x = make("row"), inputs()[0].chunk(dist.get_world_size(), -1)[dist.get_rank()]
    fill_bias(layer.bias)
    return (reduce_from_tp_region(F.linear(x, layer.weight, layer.bias)) - layer(x)).detach(), layer.bias.detach()


@pytest.mark.ranks
def test_broken_with_a_bias_on_each_rank_it_counts_once_a_rank():
    for excess, bias in pool(3).run(bias_on_each_rank):
        close(excess, (2 * bias).expand_as(excess))


# communication


def recorded_step(kind, freeze=()):
    """On a rank: one step; the collectives are in phases of their own."""
    layer, (rank, size) = make(kind), (dist.get_rank(), dist.get_world_size())
    for name in freeze:
        if name != "x":
            getattr(layer, name).requires_grad_(False)
    x = cut(inputs()[0], cuts(kind)["x"], rank, size).clone().requires_grad_("x" not in freeze)
    with dtlab.phase("ahead"):
        y = layer(x)
    if y.requires_grad:
        with dtlab.phase("back"):
            y.sum().backward()


def collectives(recording, rank=0):
    """(phase, operation without its variants' names, bytes) of each call."""
    short = lambda op: next(name for name in ("all_reduce", "all_gather", "reduce_scatter") if name in op)
    return [(e.phase["name"], short(e.op), e.bytes) for e in recording.events[rank] if e.kind == "issue"]


X, Y = size_of(BATCH, SEQ, IN), size_of(BATCH, SEQ, OUT)
SEQUENCE = [("ahead", "all_gather", X), ("back", "all_gather", X), ("back", "reduce_scatter", X)]
CALLS = {
    "column": [("back", "all_reduce", X)],
    "column, waits": [("back", "all_reduce", X)],
    "column, gathered": [("ahead", "all_gather", Y), ("back", "all_reduce", X)],
    "column, sequence": SEQUENCE,
    "column, sequence, waits": SEQUENCE,
    "row": [("ahead", "all_reduce", Y)],
    "row, whole input": [("ahead", "all_reduce", Y), ("back", "all_gather", X)],
    "row, sequence": [("ahead", "reduce_scatter", Y), ("back", "all_gather", Y)],
}


@pytest.mark.ranks
@pytest.mark.parametrize("kind", CALLS)
def test_each_layer_makes_the_calls_that_it_says(kind):
    recording = pool(3).record(recorded_step, kind)
    assert all(collectives(recording, rank) == CALLS[kind] for rank in range(3))


@pytest.mark.ranks
def test_alone_no_layer_talks():
    assert [collectives(pool(1).record(recorded_step, kind)) for kind in KINDS] == [[]] * len(KINDS)


@pytest.mark.ranks
@pytest.mark.parametrize("kind, freeze, calls", [
    ("column", ["x"], []),
    ("column", ["weight"], CALLS["column"]),
    ("column", ["x", "weight"], []),
    ("column", ["x", "weight", "bias"], []),
    ("column, sequence", ["x"], SEQUENCE[:2]),
    ("column, sequence", ["weight"], [SEQUENCE[0], SEQUENCE[2]]),
    ("column, sequence", ["x", "weight", "bias"], SEQUENCE[:1]),
    ("row, whole input", ["x"], CALLS["row"]),
])  # fmt: skip
def test_what_needs_no_gradient_is_not_sent(kind, freeze, calls):
    assert collectives(pool(2).record(recorded_step, kind, freeze)) == calls


def order(recording):
    """What backward does: calls, waits, and products."""
    is_of_backward = lambda e: e.phase.get("name") == "back"
    names = {"issue": "start", "wait": "wait", "compute": "product"}
    return [names[e.kind] for e in recording.events[0] if is_of_backward(e) and e.kind in names
            and (e.kind != "compute" or e.op in ("aten.mm", "aten.bmm"))]  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize("kind, steps", [
    ("column", ["product", "start", "product", "wait"]),
    ("column, waits", ["product", "start", "wait", "product"]),
    ("column, sequence", ["start", "product", "start", "wait", "product", "wait"]),
    ("column, sequence, waits", ["start", "wait", "product", "start", "wait", "product"]),
])  # fmt: skip
def test_the_gradients_sum_is_on_its_way_while_the_weights_is_computed(kind, steps):
    assert order(pool(2).record(recorded_step, kind)) == steps


# ways to use it


def in_groups():
    """On a rank of four: two groups of two, each with an input of its own."""
    group = [dist.new_group([a, a + 1]) for a in (0, 2)][dist.get_rank() // 2]
    x = inputs(dist.get_rank() // 2)[0].requires_grad_()
    y = make("row, whole input", group=group)(make_square(group)(x))
    y.sin().sum().backward()
    return y.detach(), x.grad


def make_square(group=None):
    return ColumnParallelLinear(IN, IN, gather_output=True, group=group, seed=SEED, dtype=torch.float64)


@pytest.mark.ranks
def test_groups_work_by_themselves():
    for rank, (y, x_grad) in enumerate(pool(4).run(in_groups)):
        x = inputs(rank // 2)[0].requires_grad_()
        square, out = (init_by_name(nn.Linear(IN, n, dtype=torch.float64), SEED) for n in (IN, OUT))
        expected = out(square(x))
        expected.sin().sum().backward()
        close(y, expected.detach())
        close(x_grad, x.grad)


def used_oddly():
    """On a rank: an output used twice, strides that are no plain ones, one dimension, recomputed, without gradients."""
    rank, size, found = dist.get_rank(), dist.get_world_size(), []
    layer, x = make("column, gathered"), inputs()[0][:2, :2]
    odd = x.transpose(0, 1).contiguous().transpose(0, 1)
    for call in (layer, lambda x: recompute(layer, x), lambda x: layer(odd * 0 + x.flip(0).flip(0)),
                 lambda x: torch.stack([torch.stack([layer(row) for row in rows]) for rows in x])):
        mine = x.clone().requires_grad_()
        layer.weight.grad, y = None, call(mine)
        (y.sin().sum() + y.transpose(0, 1).cos().sum()).backward()
        found.append([y.detach(), mine.grad, layer.weight.grad])
    for context in (torch.no_grad, torch.inference_mode):
        for kind in ("column, sequence", "row, sequence"):
            with context():
                assert not make(kind)(cut(x, cuts(kind)["x"], rank, size)).requires_grad
    return found


@pytest.mark.ranks
def test_odd_uses_give_the_same():
    for first, *others in pool(2).run(used_oddly):
        assert len(others) == 3
        for other in others:
            close(other, first)


def trained_in_16_bits(how):
    """On a rank: dtypes and values of what comes out and of gradients: of both layers one after the other."""
    dtype = torch.bfloat16 if how == "16 bits" else torch.float32
    first = ColumnParallelLinear(IN, OUT, seed=1, dtype=dtype)
    second = RowParallelLinear(OUT, IN, seed=2, dtype=dtype)
    x = inputs()[0].to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        y = second(first(x))
    y.float().square().sum().backward()
    return [y.detach(), x.grad, first.weight.grad, second.bias.grad]


@pytest.mark.ranks
@pytest.mark.parametrize("how", ["16 bits", "autocast"])
def test_in_16_bits_dtypes_are_those_of_nn_linear_and_values_close(how):
    dtype = torch.bfloat16 if how == "16 bits" else torch.float32
    first, second = nn.Linear(IN, OUT, dtype=dtype), nn.Linear(OUT, IN, dtype=dtype)
    init_by_name(first, 1), init_by_name(second, 2)
    x = inputs()[0].to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        y = second(first(x))
    y.float().square().sum().backward()
    for rank, found in enumerate(pool(2).run(trained_in_16_bits, how)):
        expected = [y.detach(), x.grad, first.weight.grad.chunk(2)[rank], second.bias.grad]
        for ours, theirs in zip(found, expected):
            torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05 * theirs.abs().max().item())


def backward_in_autocast(kind):
    """On a rank: gradients of a float32 pass, and of the same one whose backward() is called inside of autocast."""
    layer, found = KINDS[kind][0](IN, OUT, seed=1, **KINDS[kind][1]), []
    for inside in (False, True):
        x = cut(inputs()[0].float(), cuts(kind)["x"], dist.get_rank(), dist.get_world_size()).requires_grad_()
        loss, layer.weight.grad = layer(x).square().sum(), None
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            loss.backward()
        found.append([x.grad, layer.weight.grad])
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["column", "column, sequence"])
def test_backward_computes_in_the_dtype_of_forward(kind):
    for outside, inside in pool(2).run(backward_in_autocast, kind):
        torch.testing.assert_close(inside, outside, rtol=1e-6, atol=1e-6)


def autocast_double():
    with torch.autocast("cpu", torch.bfloat16):
        return make("column")(inputs()[0]).dtype


@pytest.mark.ranks
def test_autocast_leaves_float64_alone():
    assert pool(2).run(autocast_double) == [torch.float64] * 2


def big_step(sequence_parallel):
    """On a rank that is played: both layers of an MLP of real size."""
    options = {"sequence_parallel": sequence_parallel, "dtype": torch.bfloat16}
    first, second = ColumnParallelLinear(4096, 16384, **options), RowParallelLinear(16384, 4096, **options)
    tokens = 2048 // (8 if sequence_parallel else 1)
    x = torch.empty(1, tokens, 4096, dtype=torch.bfloat16).requires_grad_()
    with dtlab.phase("ahead"):
        y = second(first(x))
    with dtlab.phase("back"):
        y.sum().backward()


@pytest.mark.ranks
def test_layers_of_real_size_are_recorded_dry():
    size = 2 * 2048 * 4096
    plain, sequence = (dtlab.record_dry(big_step, flag, world_size=8) for flag in (False, True))
    assert collectives(plain) == [("ahead", "all_reduce", size), ("back", "all_reduce", size)]
    names = ["all_gather", "reduce_scatter", "all_gather", "all_gather", "reduce_scatter"]
    assert collectives(sequence) == [(phase, name, size) for phase, name in zip(["ahead"] * 2 + ["back"] * 3, names)]


# mistakes


def refusals():
    """On a rank of four: every message."""
    group = dist.new_group([0, 1])
    column, row = ColumnParallelLinear(4, 8), RowParallelLinear(4, 8, sequence_parallel=True)
    outside = dist.GroupMember.NON_GROUP_MEMBER if dist.get_rank() < 2 else group
    texts = []
    for call in (
        lambda: ColumnParallelLinear(4, 10),
        lambda: RowParallelLinear(6, 4),
        lambda: ColumnParallelLinear(0, 8),
        lambda: ColumnParallelLinear(4, 8, group=outside),
        lambda: column(torch.ones(2, 5)),
        lambda: column(torch.ones(2, 4, dtype=torch.float64)),
        lambda: row(torch.ones(4, 1)),
        lambda: row(torch.ones(1, 6, 1)),
        lambda: ColumnParallelLinear(4, 8, sequence_parallel=True)(torch.ones(8, 4)),
        lambda: RowParallelLinear(4, 8, input_is_parallel=False)(torch.ones(2, 1)),
    ):
        try:
            call()
        except ConfigError as error:
            texts.append(str(error))
    return texts


@pytest.mark.ranks
def test_impossible_sizes_and_inputs_are_refused_on_every_rank_with_the_numbers():
    parts = [
        r"out_features (10) must be divisible by tp_size (4): use out_features 8 or 12, or tp_size 1, 2, 5 or 10",
        "in_features (6) must be divisible by tp_size (4): use in_features 4 or 8, or tp_size 1, 2, 3 or 6",
        "in_features (0) must be at least 1",
        "is not in this group",
        "x [2, 5], float32, must be [.., 4], float32 as the weight is",
        "x [2, 4], float64, must be [.., 4], float32 as the weight is",
        "x [4, 1] must be [batch, sequence, 1]: sequence_parallel=True cuts dim 1",
        "x.shape[1] (6) must be divisible by the ranks of the group (4)",
        "x [8, 4] must be [batch, sequence, 4]",
        "x [2, 1], float32, must be [.., 4]",
    ]
    for texts in pool(4).run(refusals):
        assert len(texts) == len(parts)
        for text, part in zip(texts, parts):
            assert part in text


def another_dtype_on_one_rank():
    dtype = torch.float64 if dist.get_rank() == 1 else torch.float32
    RowParallelLinear(4, 8, dtype=dtype)(torch.ones(2, 4 // dist.get_world_size(), dtype=dtype))


@pytest.mark.ranks
def test_another_dtype_on_one_rank_is_found_before_it_is_sent():
    with pytest.raises(RankError, match="float64"):
        pool(2).run(another_dtype_on_one_rank)


def twice_differentiated():
    x = inputs()[0].requires_grad_()
    (grad,) = torch.autograd.grad(make("column")(x).sin().sum(), x, create_graph=True)
    grad.sum().backward()


@pytest.mark.ranks
def test_a_gradient_of_the_gradient_is_refused():
    with pytest.raises(RankError, match="once_differentiable"):
        pool(2).run(twice_differentiated)
