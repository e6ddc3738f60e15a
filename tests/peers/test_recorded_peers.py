# ruff: noqa: F821  (names that live on the ranks)
"""Megatron-core's layers under the recorder, against bytes and FLOPs counted by hand."""
import pytest
import torch
from torch import nn

import dtlab

pytestmark = [pytest.mark.peers, pytest.mark.ranks]


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
