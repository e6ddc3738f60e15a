"""Recordings of programs that need packages which dtlab does not, for those who do not have them.

``deepspeed_zero3``: rank 0 of 4 in the third step of lesson 05's program, with ``deepspeed_engine``.
"""
import os
import pathlib
import warnings

from dtlab.simulate import Recording
from dtlab.validate import one_of

_FOLDER = pathlib.Path(__file__).parent

# One gather a module, and no parameter too small to be cut. Sizes are in elements; the defaults (5e8, 1e9, 1e9, 5e7,
# 1e5) leave a small model whole.
DEEPSPEED_ZERO3 = {"stage": 3, "overlap_comm": False, "reduce_bucket_size": 10_000, "stage3_max_live_parameters": 0,
                   "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0,
                   "stage3_param_persistence_threshold": 0}


def load(name: str) -> Recording:
    """The shipped recording of this name, with the results of all its ranks.

    Raises:
        ConfigError: there is none; the message has the names.
    """
    one_of("name", name, sorted(path.stem for path in _FOLDER.glob("*.jsonl")))
    recording = Recording.load(_FOLDER / f"{name}.jsonl")
    recording.results = recording.meta.get("results")
    return recording


def deepspeed_engine(model, optimizer, *, micro_batch_size: int, zero: dict = DEEPSPEED_ZERO3):
    """DeepSpeed's engine, on a rank: model and optimizer in one. Needs ``dtlab[peers]``.

    Args:
        micro_batch_size: sequences on each rank (count).
        zero: its settings of ``zero_optimization``.
    """
    import torch.distributed as dist

    warnings.simplefilter("ignore", FutureWarning)  # it uses names that torch is about to drop
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    if next(model.parameters()).device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    settings = {"train_micro_batch_size_per_gpu": micro_batch_size, "zero_optimization": zero,
                "zero_allow_untested_optimizer": True, "gradient_clipping": 0.0}  # else 1.0
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
    return engine
