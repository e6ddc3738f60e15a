"""ZeRO stages 1 and 2: every rank computes with the whole model, but updates only its part and keeps states for no more.

    backward   bucket by bucket, from the model's end: reduce_scatter of gradients; this rank gets the mean of its shard
    step       the optimizer updates this rank's shard; all_gather gives every rank the others' shards

    memory of a rank     parameters   gradients   optimizer states       Psi parameters on n ranks
    data parallel        Psi          Psi         K Psi
    stage 1              Psi          Psi         K Psi / n
    stage 2              Psi          Psi / n     K Psi / n               all three: + padding, 2 Psi (n-1)/n sent a step
"""
import contextlib

import torch
from torch import nn

from dtlab.errors import ConfigError


class ZeroOptimizer:
    """An elementwise optimizer whose states are shared out over the ranks of ``group``; gradients are their mean.

    Takes the place of ``DistributedDataParallel`` and the optimizer together: call ``module`` itself, ``backward()``,
    then this object's ``step()`` and ``zero_grad()``. Parameters become views of flat buffers.

    Args:
        module: The same on every rank; parameters, and buffers, get the values of the group's first rank.
        optimizer_class: Of torch or your own, as long as each element's update needs that element only.
        zero_stage: 1 shares optimizer states, 2 gradients too.
        group: Ranks that hold a replica each; None for all.
        bucket_bytes: Largest bucket of more than one parameter.
        overlap: False sends after backward instead of during it.
        master_dtype: Of the shard that the optimizer updates; None: float32 for 16-bit parameters, else their own.
        param_groups: Options for some parameters, as torch's: ``[{"params": [...], "weight_decay": 0.1}, ...]``; None
            for all trainable parameters with ``optimizer_kwargs``.
        optimizer_kwargs: For ``optimizer_class``.
    """

    def __init__(self, module: nn.Module, optimizer_class, *, zero_stage: int = 1, group=None,
                 bucket_bytes: int = 25 * 2**20, overlap: bool = True, master_dtype: torch.dtype | None = None,
                 param_groups: list | None = None, **optimizer_kwargs):  # fmt: skip
        raise NotImplementedError

    @property
    def param_groups(self) -> list:
        """The optimizer's groups; options such as ``lr`` may be changed between steps."""
        raise NotImplementedError

    def step(self) -> None:
        """Update this rank's shards and gather everyone's: afterwards all ranks have the same new parameters.

        Raises:
            ConfigError: no gradient was reduced; parameters are no longer views of the flat buffers.
            FloatingPointError: on every rank: a gradient is NaN or infinite; nothing was updated.
        """
        raise NotImplementedError

    def zero_grad(self) -> None:
        """Forget the gradients."""
        raise NotImplementedError

    @contextlib.contextmanager
    def no_sync(self):
        """Stage 1: backward inside only adds to ``.grad``; the first outside sends the sum.

        Stage 2 keeps no whole gradient to add to: each backward pass is reduced and added to the shard, inside and
        outside. The result is the same, and all is sent each time.
        """
        raise NotImplementedError
        yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients so that the norm of the whole gradient is ``max_norm`` at most; return it before that."""
        raise NotImplementedError

    def sharded_state(self):
        """Parameters, optimizer states and buffers for ``save_checkpoint`` and ``load_checkpoint``."""
        raise NotImplementedError
