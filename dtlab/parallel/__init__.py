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
from dtlab.parallel.tensor_parallel_linear import ColumnParallelLinear, RowParallelLinear
from dtlab.parallel.tensor_parallel_vocab import VocabParallelEmbedding, vocab_parallel_cross_entropy
from dtlab.parallel.zero import ZeroOptimizer

__all__ = [
    "ColumnParallelLinear",
    "DistributedDataParallel",
    "FullyShardedModule",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "ZeroOptimizer",
    "all_to_all",
    "all_to_all_region",
    "chunk_bounds",
    "copy_to_tp_region",
    "gather_from_sequence_region",
    "gather_from_tp_region",
    "global_mean",
    "halving_doubling_all_reduce",
    "load_checkpoint",
    "naive_all_reduce",
    "recompute",
    "reduce_from_tp_region",
    "reduce_scatter_to_sequence_region",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_reduce_scatter",
    "save_checkpoint",
    "scatter_to_sequence_region",
    "scatter_to_tp_region",
    "split_region_rng",
    "tree_all_reduce",
    "vocab_parallel_cross_entropy",
]
