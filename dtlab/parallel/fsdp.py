"""Fully sharded: ZeRO stage 3. Each rank holds 1/n of every parameter, gradient and optimizer state.

A *unit* is a part of the model whose parameters become whole together, when they are needed, and go right after:

    forward    gather unit 0 | compute 0, gather 1 | free 0, compute 1, gather 2 | ...
    backward   gather the last | compute it, gather the one before | free it, reduce-scatter its gradients, compute ...

Letters: n ranks of the group, Psi parameters (count), each unit's padded to a multiple of n.
"""
from torch import nn


class FullyShardedModule(nn.Module):
    """``module`` with parameters, gradients and so optimizer states sharded over the ranks of ``group``.

    ``parameters()`` are this rank's flat shards, one for each unit (two where a unit has frozen parameters too): make
    the optimizer from them, after wrapping. Any elementwise optimizer is right.

    Args:
        module: The same on every rank; its values are those of the group's first rank. Changed in place: while a unit
            is sharded, its modules hold placeholders that know their shape and say who they are when computed with.
        units: The submodules that are gathered one by one, or a class of which all instances are; None: the entries
            of the ``ModuleList``s. What is left is the root's unit, whole from the first use to the last.
        group: Ranks that share the model; None for all.
        prefetch: Start to gather the next unit while this one computes, forward and backward.
        reshard_after_forward: False keeps units whole between forward and backward: 2 Psi sent instead of 3.
        param_dtype: Dtype of gathered parameters and of the computation; None: the shards'.
        reduce_dtype: Dtype in which gradients are added over the ranks; None: ``param_dtype``.
    """

    def __init__(self, module: nn.Module, *, units=None, group=None, prefetch: bool = True,
                 reshard_after_forward: bool = True, param_dtype=None, reduce_dtype=None, device=None, init=None):
        super().__init__()

    def no_sync(self):
        """Backward inside keeps whole gradients, 1 Psi on every rank; the first backward outside reduces the sum."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0):
        """Scale the gradient so that the norm of the whole one is at most ``max_norm``; returns the norm before."""

    def gathered(self, *modules):
        """Context in which the parameters of ``modules`` (none: of all) are whole, on every rank."""

    def full_state_dict(self):
        """The state dict of ``module`` with whole parameters, on every rank."""

    def sharded_state(self, optimizer=None):
        """What ``save_checkpoint`` and ``load_checkpoint`` take."""
