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
from dtlab.theory.pipeline import bubble_fraction, pipeline_step_s, zero_bubble_activations
from dtlab.theory.tensor_parallel import (
    causal_blocks,
    causal_work,
    chunks_of,
    legal_tp_sizes,
    ring_attention_wire_bytes,
    tp_layer_collectives,
    tp_layer_params,
    tp_layer_wire_bytes,
    tp_params,
    ulysses_wire_bytes,
    why_not_tp,
)
from dtlab.theory.units import in_binary_units

__all__ = ["ALGORITHMS", "GPT_7_5B", "RECIPES", "RECOMPUTE", "Cost", "Link", "LlamaShape", "ModelShape",
           "activation_bytes", "activation_bytes_per_layer", "algbw", "base_op", "batch_flops", "bubble_fraction",
           "busbw", "busiest_rank_bytes", "causal_blocks", "causal_work", "chunks_of", "collective_table",
           "collective_time_s", "gathered_bytes", "in_binary_units", "layer_matrices", "layer_params",
           "legal_tp_sizes", "logits_bytes", "mfu", "micro_batches_in_flight", "model_flops_per_token",
           "model_state_bytes", "padding_elements", "pipeline_step_s", "recipe_bytes", "recompute_flops_factor",
           "ring_all_reduce_bytes", "ring_attention_wire_bytes", "step_memory", "tp_layer_collectives",
           "tp_layer_params", "tp_layer_wire_bytes", "tp_params", "train_flops", "training_days", "transformer_params",
           "ulysses_wire_bytes", "unit_sizes", "why_not_tp", "wire_bytes", "zero_bubble_activations",
           "zero_state_bytes", "zero_states", "zero_wire_elements"]
