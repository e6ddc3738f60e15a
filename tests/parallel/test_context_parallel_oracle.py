"""torch's own ring attention and ours in float64: the same tokens on each rank, the same numbers, the bytes of both."""
import contextlib
import functools
import importlib
import inspect

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import dtlab
from dtlab.parallel import join_sequence, ring_attention, split_sequence

pytestmark = pytest.mark.ranks
LAYOUTS = ("contiguous", "zigzag")
close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)
NOT_ON_CPU = "aten._scaled_dot_product_flash_attention_for_cpu.default does not have a sharding strategy registered"


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def ranks(request):
    """Live ranks, guarded: a false alarm fails the test."""
    with dtlab.launch(request.param) as pool:
        pool.run(torch.set_num_threads, 1)
        yield pool


def inputs():
    """q, k, v and a gradient of the output: three heads of 5, 24 tokens."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, 24, 5, dtype=torch.float64, generator=generator) for _ in range(4)]


def theirs():
    """The module in which torch has its ring attention: it has moved."""
    for name in ("_context_parallel._attention", "_attention"):
        with contextlib.suppress(ImportError):
            module = importlib.import_module(f"torch.distributed.tensor.experimental.{name}")
            if hasattr(module, "_templated_ring_attention"):
                return module
    raise ImportError("torch has no _templated_ring_attention")


def flash_on_cpu(query, key, value, is_causal, dropout_p=0.0, **its_scale):
    """What torch's ring computes a block with, on the CPU: (output, logsumexp)."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout_p, is_causal)


def flash_on_cpu_backward(query, key, value, out, logsumexp, is_causal, grad_out, **its_scale):
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(grad_out, query, key, value, out, logsumexp, 0.0, is_causal)


def torchs_ring(q, k, v, grad, *, causal, layout):
    """On a rank: output, and gradients of q, k, v, from the parts that torch's context_parallel is made of."""
    ring = theirs()
    by_mesh = "mesh" in inspect.signature(ring._templated_ring_attention).parameters  # up to torch 2.6
    place = dist.init_device_mesh("cpu", (dist.get_world_size(),)) if by_mesh else dist.group.WORLD
    options = ring._cp_options
    before = options.convert_to_f32, options.enable_load_balance
    options.convert_to_f32, options.enable_load_balance = False, layout == "zigzag"
    try:
        out, logsumexp, *_ = ring._templated_ring_attention(place, 2, flash_on_cpu, q, k, v, is_causal=causal)
        grads = ring._templated_ring_attention_backward(
            place, 2, flash_on_cpu_backward, grad, "grad_out", q, k, v, out, logsumexp, is_causal=causal)  # fmt: skip
        return [out, *grads[:3]]
    finally:
        options.convert_to_f32, options.enable_load_balance = before


def our_ring(q, k, v, grad, **options):
    """The same, ours."""
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out = ring_attention(q, k, v, **options)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def both(causal, layout):
    """On a rank: results of its tokens, torch's and ours."""
    mine = [split_sequence(x, dim=2, layout=layout) for x in inputs()]
    return [attention(*mine, causal=causal, layout=layout) for attention in (torchs_ring, our_ring)]


@pytest.mark.parametrize("causal, layout", [(True, "contiguous"), (True, "zigzag"), (False, "contiguous")])
def test_a_ring_of_torchs_parts_gives_the_same(ranks, causal, layout):  # theirs refuses a zigzag that is not causal
    for torchs, ours in ranks.run(both, causal, layout):
        close(ours, torchs)


def torchs_places():
    """On a rank: the numbers of its tokens, and all of them joined again, in torch's layout."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard

    numbers = torch.arange(24.0).view(1, 24)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    with context_parallel(mesh, buffers=[numbers], buffer_seq_dims=[1]):
        mine = numbers.clone()
    return mine, context_parallel_unshard(mesh, [mine], [1])[0]


def our_places():
    mine = split_sequence(torch.arange(24.0).view(1, 24))
    return mine, join_sequence(mine)


def test_a_zigzag_is_what_torch_calls_head_and_tail(ranks):
    for torchs, ours in zip(ranks.run(torchs_places), ranks.run(our_places)):
        close(ours, torchs)


def torchs_context_parallel():
    """On a rank: its tokens of the output, by the public way in."""
    from torch.distributed.tensor.experimental import context_parallel

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    options, (q, k, v, _) = theirs()._cp_options, inputs()
    before, options.convert_to_f32 = options.convert_to_f32, False
    try:
        with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    except NotImplementedError as error:
        return str(error)
    finally:
        options.convert_to_f32 = before


def test_the_public_context_parallel_gives_the_same(ranks):
    """It knows flash and memory-efficient attention of GPUs; on the CPU, torch 2.13 says that it has no rule."""
    torchs = ranks.run(torchs_context_parallel)
    if all(isinstance(its, str) and NOT_ON_CPU in its for its in torchs):
        pytest.skip(torchs[0])
    ours = ranks.run(lambda: ring_attention(*(split_sequence(x, dim=2) for x in inputs()[:3])))
    close(ours, torchs)
