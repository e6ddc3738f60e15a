# ruff: noqa: F821  (names that live on the ranks)
"""DeepSpeed's ZeRO and Megatron-core's layers under the recorder, against bytes and FLOPs counted by hand."""
import pytest
import torch
from torch import nn

import dtlab

pytestmark = [pytest.mark.peers, pytest.mark.ranks]
LAYER = 512 * 512 * 4  # bytes of a weight


@pytest.fixture(scope="module")
def ranks():
    with dtlab.launch(2, guard=False) as pool:
        yield pool


def of_step(recording, rank, step):
    """``(op -> bytes of the calls above 1 kB, FLOPs)`` of one step."""
    events = [e for e in recording.events[rank] if e.phase.get("step") == step]
    issues = [e for e in events if e.kind == "issue" and e.bytes > 1000]
    sent = {op: sum(e.bytes for e in issues if e.op == op) for op in {e.op for e in issues}}
    return sent, sum(e.flops for e in events)


@pytest.mark.parametrize("stage, wanted", [
    (0, {"all_reduce": 2 * LAYER}),
    (1, {"all_reduce": 2 * LAYER, "all_gather_into_tensor": 2 * LAYER}),
    (2, {"all_reduce": 2 * LAYER, "all_gather_into_tensor": 2 * LAYER}),
    (3, {"reduce_scatter_tensor": 2 * LAYER, "all_gather_into_tensor": 2 * LAYER}),
])  # fmt: skip
def test_deepspeed_zero(ranks, stage, wanted):
    pytest.importorskip("deepspeed")

    def program(stage):
        import os

        os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank))
        import deepspeed

        model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.GELU(), nn.Linear(512, 512, bias=False))
        zero = {"stage": stage, "overlap_comm": False, "reduce_bucket_size": 10**6}
        zero.update({"stage3_param_persistence_threshold": 0} if stage == 3 else {})
        config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
        optimizer = torch.optim.AdamW(model.parameters())
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
        for step in range(2):
            with dtlab.phase("step", step=step):
                engine.backward(engine(torch.ones(4, 512)).square().mean())
                engine.step()

    recording = ranks.record(program, stage)
    shards = 2 if stage else 1
    for r in range(2):
        # 2 products in forward, 4 in backward, less the gradient of the input
        assert of_step(recording, r, 1) == (wanted, 5 * 2 * 4 * 512 * 512)
        row = recording.memory().loc[r]
        counters = 4 * (1 if stage else 2)  # Adam's step counters: one for each tensor it updates
        assert row.peak_optimizer_states == 2 * 2 * LAYER // shards + counters


def test_megatron_layers(ranks):
    pytest.importorskip("megatron.core")

    def program():
        from megatron.core import parallel_state
        from megatron.core import tensor_parallel as tp
        from megatron.core.transformer.transformer_config import TransformerConfig

        parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
        config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True)
        options = {"config": config, "init_method": lambda w: nn.init.normal_(w, std=0.02)}
        embedding = tp.VocabParallelEmbedding(128, 64, **options)
        column = tp.ColumnParallelLinear(64, 256, bias=False, gather_output=False, **options)
        row = tp.RowParallelLinear(256, 64, bias=False, input_is_parallel=True, skip_bias_add=False, **options)
        tokens = torch.arange(32).view(8, 4)
        with dtlab.phase("step", step=0):
            out, _ = row(nn.functional.gelu(column(embedding(tokens))[0]))
            out.sum().backward()

    recording = ranks.record(program)
    activation = 8 * 4 * 64 * 4
    for r in range(2):
        # all_reduces: the embedding and the row-parallel product in forward, the column-parallel one in backward
        assert of_step(recording, r, 0) == ({"all_reduce": 3 * activation}, 3 * 2 * 2 * 32 * 64 * 256 // 2)
        assert recording.memory().loc[r].peak_grads == 4 * (128 * 64 + 2 * 64 * 256) // 2
