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
from dtlab.theory.flops import (
    RECOMPUTE,
    batch_flops,
    mfu,
    model_flops_per_token,
    recompute_flops_factor,
    train_flops,
    training_days,
)
from dtlab.theory.memory import (
    RECIPES,
    activation_bytes,
    activation_bytes_per_layer,
    gathered_bytes,
    logits_bytes,
    micro_batches_in_flight,
    model_state_bytes,
    padding_elements,
    recipe_bytes,
    step_memory,
    unit_sizes,
    zero_state_bytes,
    zero_states,
    zero_wire_elements,
)
from dtlab.theory.models import GPT_7_5B, LlamaShape, ModelShape, layer_matrices, layer_params, transformer_params
from dtlab.theory.units import in_binary_units

__all__ = ["ALGORITHMS", "GPT_7_5B", "RECIPES", "RECOMPUTE", "Cost", "Link", "LlamaShape", "ModelShape",
           "activation_bytes", "activation_bytes_per_layer", "algbw", "base_op", "batch_flops", "busbw",
           "busiest_rank_bytes", "collective_table", "collective_time_s", "gathered_bytes",
           "in_binary_units", "layer_matrices", "layer_params", "logits_bytes", "mfu",
           "micro_batches_in_flight", "model_flops_per_token", "model_state_bytes", "padding_elements",
           "recipe_bytes", "recompute_flops_factor", "ring_all_reduce_bytes", "step_memory", "train_flops",
           "training_days", "transformer_params", "unit_sizes", "wire_bytes", "zero_state_bytes",
           "zero_states", "zero_wire_elements"]
