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
from dtlab.parallel.recompute import recompute
from dtlab.parallel.zero import ZeroOptimizer

__all__ = [
    "DistributedDataParallel",
    "FullyShardedModule",
    "ZeroOptimizer",
    "all_to_all",
    "chunk_bounds",
    "global_mean",
    "halving_doubling_all_reduce",
    "load_checkpoint",
    "naive_all_reduce",
    "recompute",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_reduce_scatter",
    "save_checkpoint",
    "tree_all_reduce",
]
