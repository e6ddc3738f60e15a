"""Recordings of programs that need packages which dtlab does not, for those who do not have them.

``deepspeed_zero3``: rank 0 of 4 in the third step of lesson 05's program, with ``deepspeed_engine``.
``megatron_mlp``: rank 0 of 4 in one pass of lesson 06's MLP, with ``with_megatron_linears``.
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


def with_megatron_linears(module):
    """On a rank, put Megatron-core's linears in the place of column and row parallel ones, with their values.

    Args:
        module: an MLP or a whole layer, changed: of its ``linear_qkv`` and ``linear_fc1`` the weight is [out/t, in], of
            its ``linear_proj`` and ``linear_fc2`` [out, in/t], on t ranks; all with a bias.

    Needs ``dtlab[peers]``.
    """
    import torch
    import torch.distributed as dist

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it tells what CUDA packages it misses
        from megatron.core.model_parallel_config import ModelParallelConfig
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    size, dtype = dist.get_world_size(), next(module.parameters()).dtype
    config = ModelParallelConfig(tensor_model_parallel_size=size, use_cpu_initialization=True, params_dtype=dtype)
    options = {"config": config, "init_method": torch.nn.init.zeros_, "bias": True, "skip_bias_add": False,
               "tp_group": dist.group.WORLD}
    for part in [*module.modules()]:
        for name, ours in [*part.named_children()]:
            if name in ("linear_qkv", "linear_fc1"):
                rows, columns = ours.weight.shape
                linear = ColumnParallelLinear(columns, rows * size, gather_output=False, **options)
            elif name in ("linear_proj", "linear_fc2"):
                rows, columns = ours.weight.shape
                linear = RowParallelLinear(columns * size, rows, input_is_parallel=True, **options)
            else:
                continue
            linear.load_state_dict(ours.state_dict(), strict=False)
            linear.register_forward_hook(lambda module, args, outputs: outputs[0])  # beside it a bias not added: None
            setattr(part, name, linear)
    return module
