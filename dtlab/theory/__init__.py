"""Closed forms with their sources: bytes, seconds, FLOPs. Pure: no torch, no ranks."""
from dtlab.theory.collectives import (
    ALGORITHMS,
    Cost,
    Link,
    algbw,
    busbw,
    busiest_rank_bytes,
    collective_table,
    collective_time_s,
    ring_all_reduce_bytes,
)
from dtlab.theory.communication import base_op, wire_bytes
from dtlab.theory.flops import batch_flops, mfu, model_flops_per_token, train_flops, training_days
from dtlab.theory.models import GPT_7_5B, ModelShape, transformer_params

__all__ = ["ALGORITHMS", "GPT_7_5B", "Cost", "Link", "ModelShape", "algbw", "base_op", "batch_flops", "busbw",
           "busiest_rank_bytes", "collective_table", "collective_time_s", "mfu", "model_flops_per_token",
           "ring_all_reduce_bytes", "train_flops", "training_days", "transformer_params", "wire_bytes"]
