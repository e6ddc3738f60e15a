"""A step of ZeRO on named hardware: when it ends, and what of its communication shows. Pure.

Every rank does the same, so one program stands for all of them:

    stage 0      forward | backward, all_reduce of buckets                 | optimizer
    stage 1, 2   forward | backward, reduce_scatter of buckets             | optimizer of a shard, all_gather of buckets
    stage 3      forward, all_gather of units | backward, all_gather and reduce_scatter of units | optimizer of a shard
"""
import numpy as np

from dtlab.simulate.boxes import boxes_of_run
from dtlab.simulate.data_parallel import gradients_of, per_bucket
from dtlab.simulate.engine import Transfer, simulate
from dtlab.simulate.timeline import Timeline
from dtlab.theory import RECIPES, batch_flops, recipe_bytes, transformer_params, unit_sizes, zero_states
from dtlab.validate import amount, at_least, one_of

_FORWARD, _BACKWARD = ("forward", "forward", ""), ("backward", "backward", "")
_OPTIMIZER, _CALL = ("optimizer", "optimizer", ""), ("call", "compute", "")


def zero_step(shape, hardware, *, num_ranks, zero_stage, batch_size=1, recompute=None, prefetch=True, num_units=None,
              bucket_bytes=5 * 10**8, recipe="adam_mixed", algorithm="ring"):
    """The timeline of a step of the course's ZeRO modules, one rank drawn for all; with tokens/s and MFU of all.

    Matrix products take time at the FLOP/s that the hardware reaches. The optimizer's step takes as long as its bytes
    need: gradients and parameters once, states in and out. Stages 1 and 2 send the same: their parameters are gathered
    bucket by bucket with little to compute beside it.

    Args:
        shape: ``theory.ModelShape``; whether it fits the devices' memory is not asked.
        hardware: ``Hardware`` with at least ``num_ranks`` devices.
        num_ranks: ranks that share the states (count).
        zero_stage: 0 (data parallel) to 3.
        batch_size: sequences on each rank (count).
        recompute: as in ``theory.batch_flops``; its FLOPs are spread evenly over backward.
        prefetch: stage 3: the next unit is gathered while one computes.
        num_units: stage 3: as in ``theory.unit_sizes``; None: each layer is a unit, beside the root's.
        bucket_bytes: stages 0 to 2: as in ``data_parallel.buckets``.
        recipe: one of ``theory.RECIPES``: bytes of the parameters, gradients and states.
        algorithm: of the collectives; None: for each the fastest.

    Raises:
        ConfigError: a stage, recipe or recomputation that is not there, or units that do not divide the layers.

    Example:
        >>> from dtlab.simulate import Hardware
        >>> from dtlab.theory import GPT_7_5B
        >>> for sequences in (1, 4):
        ...     step = zero_step(GPT_7_5B, Hardware.preset("64xA100-80GB"), num_ranks=64, zero_stage=3,
        ...                      batch_size=sequences)
        ...     print(f"{step.step_time_s:.2f} s, exposed {step.exposed_communication_s:.2f} s")
        1.88 s, exposed 1.24 s
        2.63 s, exposed 0.09 s
    """
    one_of("zero_stage", zero_stage, (0, 1, 2, 3))
    at_least("num_ranks", num_ranks, 1), at_least("bucket_bytes", bucket_bytes, 1)
    reached = hardware.peak_flops * hardware.gemm_efficiency
    cost_s = lambda op, sizes: (0 * sizes + hardware.collective_s(op, sizes, range(num_ranks), algorithm)).tolist()
    rank, (param_size, grad_size) = _Rank(), wire_element_sizes(recipe)
    model_flops = batch_flops(shape, batch_size=batch_size)
    forward_s = model_flops / 3 / reached
    backward_s = batch_flops(shape, batch_size=batch_size, recompute=recompute) / reached - forward_s
    if zero_stage < 3:
        gradients = gradients_of(shape, batch_size=batch_size, flops_per_s=reached, element_size=grad_size)
        sizes, seconds = per_bucket(gradients, bucket_bytes)[0]
        op, slower = "reduce_scatter" if zero_stage else "all_reduce", backward_s / (2 * forward_s)
        rank.reduce_buckets(op, forward_s, (seconds * slower).tolist(), cost_s(op, sizes))
    else:
        num_units = shape.num_layers if num_units is None else num_units
        params = np.array(unit_sizes(shape, num_units), dtype=float)
        logits_s = 2 * batch_size * shape.seq_length * shape.hidden_size * shape.vocab_size / reached
        forward = [0.0, *[(forward_s - logits_s) / num_units] * num_units]
        forward[-1] += logits_s  # the root's, which comes last
        backward = [2 * logits_s, *[(backward_s - 2 * logits_s) / num_units] * num_units]
        rank.gather_units(forward, backward, cost_s("all_gather", params * param_size),
                          cost_s("reduce_scatter", params * grad_size), prefetch)  # fmt: skip
    optimizer_s = _optimizer_s(transformer_params(shape), hardware, num_ranks if zero_stage else 1, recipe)
    if zero_stage in (1, 2):
        rank.update_buckets((optimizer_s * sizes / sizes.sum()).tolist(),
                            cost_s("all_gather", sizes * param_size / grad_size))  # fmt: skip
    else:
        rank.run(_OPTIMIZER, optimizer_s)
    return Timeline(rank.boxes(), tokens=num_ranks * batch_size * shape.seq_length,
                    model_flops=num_ranks * model_flops, peak_flops=num_ranks * hardware.peak_flops)  # fmt: skip


def wire_element_sizes(recipe):
    """Bytes of an element of a parameter and of a gradient on the wire; of two gradients the larger one is sent.

    Example:
        >>> wire_element_sizes("adam_mixed"), wire_element_sizes("adam_mixed_both_grads")
        ((2, 2), (2, 4))
    """
    params = recipe_bytes(recipe)["params"]
    return params, max(size for part, size in RECIPES[recipe].items() if part.endswith("grads"))


def zero_wire_bytes(num_params, *, num_ranks, zero_stage, recipe="adam_mixed"):
    """Bytes that a rank sends in a step, on rings: ``theory.zero_wire_elements`` with each element's size.

    Example:
        >>> [round(zero_wire_bytes(7.47e9, num_ranks=64, zero_stage=stage) / 1e9, 1) for stage in (0, 1, 2, 3)]
        [29.4, 29.4, 29.4, 44.1]
    """
    one_of("zero_stage", zero_stage, (0, 1, 2, 3))
    param, grad = wire_element_sizes(recipe)
    sent = (1 - 1 / at_least("num_ranks", num_ranks, 1)) * amount("num_params", num_params)
    return sent * [2 * grad, grad + param, grad + param, grad + 2 * param][zero_stage]


def _optimizer_s(num_params, hardware, num_shards, recipe):
    its = zero_states(num_params, dp_size=num_shards, zero_stage=3, optimizer=recipe)
    moved = its["params"] + its["grads"] + 2 * its["optimizer_states"]
    return moved / (hardware.memory_bandwidth_bytes_per_s * hardware.memory_efficiency)


class _Rank:
    """The program of a rank while it is written: its steps, how they look, and what they send."""

    def __init__(self):
        self.steps, self.looks, self.transfers, self.shows = [], [], [], []

    def run(self, look, seconds, action=None):
        self.steps.append((seconds, action))
        self.looks.append(look)

    def start(self, op, number, time_s):
        """Send bucket or unit ``number``; gives the transfer to wait for."""
        self.transfers.append(Transfer(f"{op} {number}", (0,), "group", 0.0, time_s))
        self.shows.append({0: ("group", op, str(number))})
        self.run(_CALL, 0.0, len(self.transfers) - 1)
        return len(self.transfers) - 1

    def wait(self, *transfers):
        for transfer in transfers:
            self.run(_CALL, 0.0, ~transfer)

    def reduce_buckets(self, op, forward_s, backward, reduce):
        """Forward, and backward with the reduction of each bucket: seconds of both for each."""
        self.run(_FORWARD, forward_s)
        started = []
        for number, (seconds, time_s) in enumerate(zip(backward, reduce)):
            self.run(_BACKWARD, seconds)
            started.append(self.start(op, number, time_s))
        self.wait(*started)

    def update_buckets(self, optimizer, gather):
        """The optimizer's step bucket by bucket, and the all_gather of each: seconds of both."""
        started = []
        for number, (seconds, time_s) in enumerate(zip(optimizer, gather)):
            self.run(_OPTIMIZER, seconds)
            started.append(self.start("all_gather", number, time_s))
        self.wait(*started)

    def gather_units(self, forward, backward, gather, reduce, prefetch):
        """Forward and backward with each unit gathered for both and its gradients reduced: seconds for each unit.

        Unit 0, the root's, comes first in both passes and is held to their end: its gradients are whole at the very
        end.
        """
        order, started = range(len(forward)), []
        for name, seconds, units in (("forward", forward, order), ("backward", backward, [0, *order[:0:-1]])):
            gathers = []
            for place, unit in enumerate(units):
                for its in units[len(gathers):place + 1 + prefetch]:
                    gathers.append(self.start("all_gather", its, gather[its]))
                self.wait(gathers[place])
                self.run((f"{name}, unit {unit}", name, str(unit)), seconds[unit])
                if unit and name == "backward":
                    started.append(self.start("reduce_scatter", unit, reduce[unit]))
        self.wait(*started, self.start("reduce_scatter", 0, reduce[0]))

    def boxes(self):
        programs = {0: self.steps}
        return boxes_of_run(simulate(programs, self.transfers), programs, {0: self.looks}, self.shows)
