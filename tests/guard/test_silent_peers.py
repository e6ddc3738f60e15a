"""DeepSpeed and megatron-core on CPU: the guard says nothing."""

import importlib.util

import pytest

import dtlab

pytestmark = [pytest.mark.ranks, pytest.mark.peers]


def deepspeed_steps(zero_stage):
    import os

    import deepspeed
    import torch
    import torch.distributed as dist

    os.environ.update(LOCAL_RANK=str(dist.get_rank()), RANK=str(dist.get_rank()))
    os.environ.update(WORLD_SIZE=str(dist.get_world_size()), MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(3)])
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": zero_stage, "overlap_comm": zero_stage > 0},
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(4):
        engine.backward(engine(torch.randn(2, 16).bfloat16()).float().square().mean())
        engine.step()


def megatron_layers():
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.model_parallel_config import ModelParallelConfig

    n = dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=n)
    kwargs = {
        "config": ModelParallelConfig(tensor_model_parallel_size=n, use_cpu_initialization=True),
        "init_method": torch.nn.init.normal_,
    }
    embedding = tensor_parallel.VocabParallelEmbedding(24, 16, **kwargs)
    column = tensor_parallel.ColumnParallelLinear(16, 24, bias=True, gather_output=False, **kwargs)
    row = tensor_parallel.RowParallelLinear(24, 16, bias=True, input_is_parallel=True, skip_bias_add=False, **kwargs)
    for step in range(3):
        torch.manual_seed(step)
        x = row(torch.relu(column(embedding(torch.randint(0, 24, (2, 4))))[0]))[0]
        targets = torch.randint(0, 24, (2, 4))
        tensor_parallel.vocab_parallel_cross_entropy(column(x)[0].float(), targets).sum().backward()
    parallel_state.destroy_model_parallel()


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request):
    with dtlab.launch(request.param, timeout=120) as live:
        yield live


def needs(module):
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"needs {module} (extra 'peers')")


@needs("deepspeed")
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_deepspeed(ranks, zero_stage):
    ranks.run(deepspeed_steps, zero_stage)


@needs("megatron")
def test_megatron(ranks):
    ranks.run(megatron_layers)
