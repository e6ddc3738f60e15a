"""The techniques, each from scratch: they train as one process does, on the process group that they are given."""
from dtlab.parallel.checkpoint import load_checkpoint, save_checkpoint
from dtlab.parallel.collectives import (
    all_to_all,
    chunk_bounds,
    halving_doubling_all_reduce,
    naive_all_reduce,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    tree_all_reduce,
)
from dtlab.parallel.context_parallel import (
    apply_context_parallel,
    join_sequence,
    ring_attention,
    sequence_positions,
    split_sequence,
    ulysses_attention,
)
from dtlab.parallel.data_parallel import DistributedDataParallel, global_mean
from dtlab.parallel.fsdp import FullyShardedModule
from dtlab.parallel.mappings import (
    all_to_all_region,
    copy_to_tp_region,
    gather_from_sequence_region,
    gather_from_tp_region,
    reduce_from_tp_region,
    reduce_scatter_to_sequence_region,
    scatter_to_sequence_region,
    scatter_to_tp_region,
    split_region_rng,
)
from dtlab.parallel.recompute import recompute
from dtlab.parallel.tensor_parallel import ParallelAttention, ParallelFeedForward, apply_tensor_parallel
from dtlab.parallel.tensor_parallel_grads import clip_grad_norm_
from dtlab.parallel.tensor_parallel_linear import ColumnParallelLinear, RowParallelLinear
from dtlab.parallel.tensor_parallel_vocab import VocabParallelEmbedding, vocab_parallel_cross_entropy, vocab_shard
from dtlab.parallel.zero import ZeroOptimizer

__all__ = [
    "ColumnParallelLinear",
    "DistributedDataParallel",
    "FullyShardedModule",
    "ParallelAttention",
    "ParallelFeedForward",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "ZeroOptimizer",
    "all_to_all",
    "all_to_all_region",
    "apply_context_parallel",
    "apply_tensor_parallel",
    "chunk_bounds",
    "clip_grad_norm_",
    "copy_to_tp_region",
    "gather_from_sequence_region",
    "gather_from_tp_region",
    "global_mean",
    "halving_doubling_all_reduce",
    "join_sequence",
    "load_checkpoint",
    "naive_all_reduce",
    "recompute",
    "reduce_from_tp_region",
    "reduce_scatter_to_sequence_region",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_attention",
    "ring_reduce_scatter",
    "save_checkpoint",
    "scatter_to_sequence_region",
    "scatter_to_tp_region",
    "sequence_positions",
    "split_region_rng",
    "split_sequence",
    "tree_all_reduce",
    "ulysses_attention",
    "vocab_parallel_cross_entropy",
    "vocab_shard",
]
