"""Megatron-core's layers of tensor parallelism and ours: the same weights, the same input, the same numbers."""
import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dtlab
from dtlab.models.init import full_parameter
from dtlab.parallel import mappings, tensor_parallel

pytestmark = [pytest.mark.peers, pytest.mark.ranks]
IN, OUT, BATCH, SEQ, VOCAB = 12, 24, 3, 12, 36  # 2, 3 and 4 divide what is cut: Megatron's layers pad nothing
close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)
draw = lambda name, *shape: full_parameter(name, shape, 1, dtype=torch.float64)
swap = lambda x: x.transpose(0, 1)  # Megatron's tensors are [S, B, h]


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request):
    """Live ranks, guarded: a false alarm fails the test."""
    pytest.importorskip("megatron.core")
    with dtlab.launch(request.param) as pool:
        pool.run(start)
        yield pool


def start():
    """On a rank: all ranks are Megatron's one tensor-parallel group."""
    global megatron, new_config
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # it tells what CUDA packages it misses
    from megatron.core import ModelParallelConfig, parallel_state
    from megatron.core import tensor_parallel as megatron

    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    new_config = functools.partial(ModelParallelConfig, tensor_model_parallel_size=size, use_cpu_initialization=True,
                                   params_dtype=torch.float64)
    torch.cuda.current_device = lambda: "cpu"  # where it makes the buffers of what it gathers


def cut(tensor, dim):
    """On a rank: its part of a dim, or all of it."""
    return tensor if dim is None else tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous()


def passed(call, x, *parameters):
    """On a rank: output, and gradients of the input and of parameters; each element of y has another, on each rank."""
    leaves, inputs = list(parameters), x
    if x.is_floating_point():
        inputs = x.clone().requires_grad_()
        leaves.insert(0, inputs)
    y = call(inputs)
    each = draw(f"gradient of y on {dist.get_rank()}", *y.shape)
    return [y.detach().clone(), *torch.autograd.grad((y * each).sum(), leaves)]


def assert_same(answers):
    """Each rank gives two lists, ours and theirs."""
    for mine, theirs in answers:
        close(mine, theirs)


# mappings

PAIRS = {  # ours -> Megatron-core's, and whether it cuts sequences: dim 1 of ours, dim 0 of theirs
    "copy_to_tp_region": ("copy_to_tensor_model_parallel_region", False),
    "reduce_from_tp_region": ("reduce_from_tensor_model_parallel_region", False),
    "scatter_to_tp_region": ("scatter_to_tensor_model_parallel_region", False),
    "gather_from_tp_region": ("gather_from_tensor_model_parallel_region", False),
    "scatter_to_sequence_region": ("scatter_to_sequence_parallel_region", True),
    "gather_from_sequence_region": ("gather_from_sequence_parallel_region", True),
    "reduce_scatter_to_sequence_region": ("reduce_scatter_to_sequence_parallel_region", True),
}


def mapped(name):
    """On a rank: by ours and by theirs."""
    of_megatron, is_of_sequences = PAIRS[name]
    x, theirs = draw(f"x on {dist.get_rank()}", BATCH, SEQ, OUT), getattr(megatron, of_megatron)
    call = (lambda x: swap(theirs(swap(x)))) if is_of_sequences else theirs
    return passed(getattr(mappings, name), x), passed(call, x)


@pytest.mark.parametrize("name", PAIRS)
def test_a_mapping_does_what_megatrons_does_forward_and_backward(ranks, name):
    assert_same(ranks.run(mapped, name))


def exchanged():
    """On a rank: some tokens' all columns for all tokens' some columns. Theirs knows no batch."""
    from megatron.core.tensor_parallel.mappings import all_to_all_sp2hp

    ours = functools.partial(mappings.all_to_all_region, scatter_dim=1, gather_dim=0)
    x = draw(f"x on {dist.get_rank()}", SEQ, OUT)
    return passed(ours, x), passed(all_to_all_sp2hp, x)


def test_all_to_all_exchanges_what_megatrons_does(ranks):
    assert_same(ranks.run(exchanged))


# layers

LINEARS = {  # class, options, whether there is a bias, the dim in which x is cut
    "column": ("ColumnParallelLinear", {"gather_output": False}, True, None),
    "column, no bias": ("ColumnParallelLinear", {"gather_output": False}, False, None),
    "column, gathered": ("ColumnParallelLinear", {"gather_output": True}, True, None),
    "column, sequence": ("ColumnParallelLinear", {"sequence_parallel": True}, True, 1),
    "row": ("RowParallelLinear", {"input_is_parallel": True}, True, -1),
    "row, no bias": ("RowParallelLinear", {"input_is_parallel": True}, False, -1),
    "row, whole input": ("RowParallelLinear", {"input_is_parallel": False}, True, None),
    "row, sequence": ("RowParallelLinear", {"input_is_parallel": True, "sequence_parallel": True}, True, -1),
}


def linears(kind):
    """On a rank: ours, and theirs with the same values; its config says if sequences are cut."""
    name, options, bias, _ = LINEARS[kind]
    ours = getattr(tensor_parallel, name)(IN, OUT, bias=bias, seed=5, dtype=torch.float64, **options)
    if bias:
        with torch.no_grad():
            ours.bias.copy_(cut(draw("b", OUT), 0 if "Column" in name else None))
    options = dict(options)
    config = new_config(sequence_parallel=options.pop("sequence_parallel", False))
    theirs = getattr(megatron, name)(IN, OUT, config=config, init_method=nn.init.zeros_, bias=bias,
                                     skip_bias_add=False, **options)
    theirs.load_state_dict(ours.state_dict(), strict=False)
    return ours, theirs


def through_linears(kind):
    ours, theirs = linears(kind)
    x = cut(draw("x", BATCH, SEQ, IN), LINEARS[kind][-1])
    return passed(ours, x, *ours.parameters()), passed(lambda x: swap(theirs(swap(x))[0]), x, *theirs.parameters())


@pytest.mark.parametrize("kind", LINEARS)
def test_a_linear_layer_gives_what_megatrons_gives_and_so_do_its_gradients(ranks, kind):
    assert_same(ranks.run(through_linears, kind))


def tokens():
    return torch.randint(0, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))


def looked_up():
    """On a rank: by ours and by theirs."""
    ours = tensor_parallel.VocabParallelEmbedding(VOCAB, IN, seed=5, dtype=torch.float64)
    theirs = megatron.VocabParallelEmbedding(VOCAB, IN, config=new_config(), init_method=nn.init.zeros_)
    theirs.load_state_dict(ours.state_dict())
    return [passed(layer, tokens(), layer.weight) for layer in (ours, theirs)]


def test_the_split_embedding_looks_up_what_megatrons_does(ranks):
    assert_same(ranks.run(looked_up))


# the loss


def losses(dtype):
    """On a rank: of each token, and the gradient of this rank's logits, by ours and by theirs."""
    ours = functools.partial(tensor_parallel.vocab_parallel_cross_entropy, vocab_size=VOCAB, reduction="none")
    theirs = lambda logits, targets: megatron.vocab_parallel_cross_entropy(logits.clone(), targets)  # it overwrites
    part = cut(draw("x", BATCH, SEQ, VOCAB) * 20, -1).to(dtype)
    return [passed(lambda logits: loss(logits, tokens()), part) for loss in (ours, theirs)]  # noqa: B023


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_loss_and_gradient_are_megatrons_as_far_as_its_float32_goes(ranks, dtype):
    for mine, theirs in ranks.run(losses, dtype):
        assert [x.dtype for x in mine] == [dtype] * 2 and theirs[0].dtype == torch.float32
        assert mine[0].max() > 5  # logits are far from all alike
        for ours, its in zip(mine, theirs):
            torch.testing.assert_close(ours, its.to(dtype), rtol=1e-5, atol=1e-6)


# broken on purpose


def with_other_rows():
    """On a rank: theirs has the next rank's columns of the weight."""
    ours, theirs = linears("column")
    with torch.no_grad():
        rank, size = dist.get_rank(), dist.get_world_size()
        theirs.weight.copy_(full_parameter("weight", (OUT, IN), 5, dtype=torch.float64).chunk(size)[(rank + 1) % size])
    x = draw("x", BATCH, SEQ, IN)
    return [passed(call, x) for call in (ours, lambda x: theirs(x)[0])]


def test_broken_by_another_ranks_columns_output_and_gradient_differ(ranks):
    for mine, theirs in ranks.run(with_other_rows):
        assert all((a - b).norm() > 0.1 * b.norm() for a, b in zip(mine, theirs))
