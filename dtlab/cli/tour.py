"""``dtlab tour [--ranks N]``: the course in miniature, in a terminal.

The small GPT on real text, in one process and by the techniques of lessons 00 to 06 on N ranks, in float64; one table
says whether each equals the one process. A technique is a row of ``TECHNIQUES``: a function that runs on every rank and
returns what it trained.
"""
import argparse
import functools
import math
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import dtlab
from dtlab import machine, parallel, theory
from dtlab.data import batches, shard_batch, text_bytes
from dtlab.errors import RankError
from dtlab.models import GPT, GPTConfig, cross_entropy, num_params
from dtlab.validate import at_least

RTOL, ATOL = 1e-10, 1e-12  # float64: sums in another order differ by far less, mistakes by far more

EXPLANATION = """
Equal means, on every rank: the loss of each step, the last gradient of each parameter and each parameter
after {steps} steps, within rtol {rtol:g} of one process.
Sent and peak are recorded on one more run of a single step, start-up included: what the busiest rank sends, and
the most bytes of tensors of all kinds that live on a rank at one time.
Time is not the gain: all ranks ({ranks}) share the cores of this machine ({cores}), which one process has to itself.
What a technique gains on real hardware is what the lessons count and replay."""


@dataclass(frozen=True)
class Job:
    """What every technique trains: same model, same batches, same optimizer."""

    config: GPTConfig = GPTConfig()
    data: bytes = field(default_factory=text_bytes, repr=False)
    num_steps: int = 5
    batch_size: int = 8
    seed: int = 0

    def model(self) -> GPT:
        """The model, initialised by name: the same on every rank without a broadcast."""
        return GPT(self.config, seed=self.seed, dtype=torch.float64)

    def optimizer(self, model) -> torch.optim.Optimizer:
        """A fresh optimizer over the parameters of ``model``."""
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    def batch(self, step: int):
        """Inputs and targets of one step, for all ranks together."""
        return batches(self.data, self.config.seq_length, self.batch_size, self.seed, step)

    def loss(self, logits, targets) -> torch.Tensor:
        """These rows' share of the batch's mean loss; the shares of all ranks add up to it, also where they differ."""
        return cross_entropy(logits, targets, reduction="sum") / (self.batch_size * self.config.seq_length)


class Trained(NamedTuple):
    """What a technique hands back, under the serial model's names and in its full shapes."""

    losses: list  # of the whole batch, one a step
    grads: dict | Callable  # name -> gradient of the last step; where ranks hold shards, the function that joins them
    params: dict  # name -> parameter after it
    step_s: float  # the fastest step: the others wait for whatever else this machine does


def train(job: Job, model, step: Callable) -> Trained:
    """Run the job; ``step(inputs, targets)`` trains on one global batch and returns the loss of all of it."""
    losses, seconds = [], []
    for number in range(job.num_steps):
        start = time.perf_counter()
        losses.append(step(*job.batch(number)).item())
        seconds.append(time.perf_counter() - start)
    named = {name.removeprefix("module."): parameter for name, parameter in model.named_parameters()}
    return Trained(losses, {name: p.grad for name, p in named.items()}, {name: p.detach() for name, p in named.items()},
                   min(seconds))


def serial(job: Job) -> Trained:
    """One process: what all the others must equal."""
    model = job.model()
    optimizer = job.optimizer(model)

    def step(inputs, targets):
        loss = job.loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train(job, model, step)


def data_parallel(job: Job, all_reduce: Callable | None = None) -> Trained:
    """Each rank takes its rows; gradients are added over the ranks before the step, by torch or by ``all_reduce``."""
    model = job.model()
    optimizer = job.optimizer(model)

    def step(inputs, targets):
        inputs, targets = shard_batch((inputs, targets), dist.get_rank(), dist.get_world_size())
        loss = job.loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            (all_reduce or dist.all_reduce)(parameter.grad)
        optimizer.step()
        return add_over_ranks(loss)

    return train(job, model, step)


def data_parallel_by_ring(job: Job) -> Trained:
    """The same, with our all-reduce of messages between neighbours."""
    return data_parallel(job, parallel.ring_all_reduce)


def data_parallel_in_buckets(job: Job) -> Trained:
    """Ours: gradients are sent in buckets while backward still runs."""
    return with_replica(job, parallel.DistributedDataParallel)


def recomputed(job: Job) -> Trained:
    """The same, with each layer's activations computed again in backward."""

    def wrap(model):
        for layer in model.layers:
            layer.forward = functools.partial(parallel.recompute, layer.forward)
        return parallel.DistributedDataParallel(model)

    return with_replica(job, wrap)


def torch_data_parallel(job: Job) -> Trained:
    """The real system: torch's DistributedDataParallel."""
    return with_replica(job, DistributedDataParallel)


def with_replica(job: Job, wrap: Callable) -> Trained:
    """Train through a wrapper that averages gradients over the ranks during backward."""
    model = job.model()
    replica = wrap(model)
    optimizer = job.optimizer(replica)

    def step(inputs, targets):
        inputs, targets = shard_batch((inputs, targets), dist.get_rank(), dist.get_world_size())
        loss = job.loss(replica(inputs), targets)
        optimizer.zero_grad()
        (loss * dist.get_world_size()).backward()  # Subtle: it averages over the ranks, our shares add up
        optimizer.step()
        return add_over_ranks(loss)

    return train(job, replica, step)


def zero(job: Job, zero_stage: int = 1) -> Trained:
    """Ours: replicas that share out the optimizer's states, at stage 2 the gradients too."""
    model = job.model()
    optimizer = parallel.ZeroOptimizer(model, torch.optim.AdamW, zero_stage=zero_stage, lr=1e-3)
    shards = []  # of the last step's gradient

    def step(inputs, targets):
        inputs, targets = shard_batch((inputs, targets), dist.get_rank(), dist.get_world_size())
        loss = job.loss(model(inputs), targets)
        (loss * dist.get_world_size()).backward()  # Subtle: it averages over the ranks, our shares add up
        shards[:] = [(bucket.shards, bucket.grad) for bucket in optimizer.buckets]
        optimizer.step()
        return add_over_ranks(loss)

    joined = lambda: {name: whole for layout, shard in shards for name, whole in layout.join(shard).items()}
    return train(job, model, step)._replace(grads=joined)


def fully_sharded(job: Job) -> Trained:
    """Ours: parameters are shared out too, and whole only while their unit computes."""
    wrapped, names = [], [name for name, _ in job.model().named_parameters()]

    def wrap(model):
        wrapped.append(parallel.FullyShardedModule(model))
        return wrapped[0]

    def params():
        whole = wrapped[0].full_state_dict()
        return {name: whole[name] for name in names}

    def grads():
        for shard in wrapped[0].parameters():
            shard.data = shard.grad  # Subtle: it gathers what stands in the shards, and the parameters are read by now
        return params()

    return with_replica(job, wrap)._replace(params=params, grads=grads)


def tensor_parallel(job: Job) -> Trained:
    """Ours: each rank has a part of every matrix; all take all rows."""
    model = parallel.apply_tensor_parallel(job.model())
    optimizer = job.optimizer(model)

    def step(inputs, targets):
        loss = parallel.vocab_parallel_cross_entropy(model(inputs), targets, vocab_size=job.config.vocab_size,
                                                     reduction="mean")  # fmt: skip
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    shards = {f"{path}.{name}": shard for path, module in model.named_modules()
              for name, shard in getattr(module, "parameter_shards", {}).items()}  # fmt: skip
    joined = lambda parts: {name: join_parts(part, shards[name]) if name in shards else part
                            for name, part in parts.items()}  # fmt: skip
    trained = train(job, model, step)
    return trained._replace(params=lambda: joined(trained.params), grads=lambda: joined(trained.grads))


def join_parts(part: torch.Tensor, shard) -> torch.Tensor:
    """The whole tensor, of which each rank has a part that ``shard`` cuts out, none of them the same."""
    numbers = torch.arange(1, math.prod(shard.full_shape) + 1).view(shard.full_shape)
    whole = part.new_zeros(numbers.numel() + 1)
    whole[shard.take(numbers).flatten()] = part.flatten()  # padding has number 0
    dist.all_reduce(whole)
    return whole[1:].view(shard.full_shape)


def add_over_ranks(loss: torch.Tensor) -> torch.Tensor:
    """The loss of the whole batch from this rank's share of it."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total


class Technique(NamedTuple):
    """One row of the table."""

    name: str
    program: Callable[[Job], Trained]  # runs on every rank
    why_not: Callable = lambda config, num_ranks: None  # for numbers of ranks that it does not know


TECHNIQUES = [
    Technique("data parallel, by hand", data_parallel),
    Technique("data parallel, our ring all-reduce", data_parallel_by_ring),
    Technique("data parallel in buckets", data_parallel_in_buckets),
    Technique("data parallel, recomputed", recomputed),
    Technique("torch DistributedDataParallel", torch_data_parallel),
    Technique("ZeRO stage 1", zero),
    Technique("ZeRO stage 2", functools.partial(zero, zero_stage=2)),
    Technique("fully sharded (ZeRO stage 3)", fully_sharded),
    Technique("tensor parallel", tensor_parallel, theory.why_not_tp),
]


class Row(NamedTuple):
    """What a rank reports of one technique: small, whatever the size of the model."""

    difference: str | None
    losses: list
    step_s: float


def run_and_compare(program: Callable, job: Job, reference: Trained) -> Row:
    """On a rank: train by ``program``, compare with the serial result here, report the first difference."""
    trained = program(job)
    for part in ("params", "grads"):
        if callable(getattr(trained, part)):  # only here: to join them is no part of the technique, and not recorded
            trained = trained._replace(**{part: getattr(trained, part)()})
    return Row(first_difference(trained, reference), trained.losses, trained.step_s)


def first_difference(trained: Trained, reference: Trained) -> str | None:
    """The first thing of ``trained`` that is not equal to the serial result, in words; None if all is equal."""
    for what, ours, theirs in (("loss of step", by_step(trained.losses), by_step(reference.losses)),
                               ("gradient of", trained.grads, reference.grads),
                               ("parameter", trained.params, reference.params)):
        if ours.keys() != theirs.keys():
            return f"{what} {sorted(ours.keys() ^ theirs.keys())[0]} is not on both sides"
        for name, value in ours.items():
            words = tensor_difference(value, theirs[name])
            if words:
                return f"{what} {name} {words}"
    return None


def by_step(losses: list) -> dict:
    """Losses as tensors under the number of their step."""
    return {str(step): torch.tensor(loss, dtype=torch.float64) for step, loss in enumerate(losses)}


def tensor_difference(ours: torch.Tensor | None, theirs: torch.Tensor) -> str | None:
    """Where two tensors differ first, with both values and the ratio of their sizes; None if they are equal."""
    if ours is None or ours.shape != theirs.shape:
        return f"is {'missing' if ours is None else tuple(ours.shape)}, serial has {tuple(theirs.shape)}"
    close = torch.isclose(ours, theirs, rtol=RTOL, atol=ATOL)
    if close.all():
        return None
    index = tuple((~close).nonzero()[0].tolist())
    ratio = (ours.norm() / theirs.norm()).item()
    place = f"at {list(index)} " if index else ""
    return f"{place}is {ours[index].item():.9g}, serial has {theirs[index].item():.9g} (size x {ratio:.7g})"


def show_technique(ranks, technique: Technique, job: Job, reference: Trained, width: int) -> bool:
    """Run one technique, print its row, and say whether it equals serial on every rank."""
    if reason := technique.why_not(job.config, len(ranks)):
        print(f"{technique.name:<{width}}  left out: {reason}", flush=True)
        return True
    try:
        rows = ranks.run(run_and_compare, technique.program, job, reference)
    except RankError as error:
        print(f"{technique.name:<{width}}  FAILED\n{textwrap.indent(str(error), '  ')}", flush=True)
        return False
    wrong = [(rank, row.difference) for rank, row in enumerate(rows) if row.difference]
    cost = recorded_cost(ranks, technique.program, job)
    print_row(technique.name, "NO" if wrong else "yes", rows[0].losses, max(row.step_s for row in rows), cost, width)
    if wrong:
        print(f"  rank {wrong[0][0]}: {wrong[0][1]}", flush=True)
    return not wrong


def recorded_cost(ranks, program: Callable, job: Job, on=None) -> tuple:
    """``(bytes that the busiest rank sends, largest peak of a rank in bytes)`` of one step, from a recording."""

    def one_step(job):
        program(job)  # what it trained is not sent back

    recording = ranks.record(one_step, replace(job, num_steps=1), ranks=on)
    sent = recording.communication().groupby("rank")["wire_bytes"].sum()
    return (sent.max() if len(sent) else 0), recording.memory()["peak"].max()


def print_row(name: str, verdict: str, losses: list, step_s: float, cost: tuple, width: int) -> None:
    """One line of the table."""
    sent, peak = (f"{value / 1e6:.1f}" for value in cost)
    fell = f"{losses[0]:.4f} -> {losses[-1]:.4f}"
    print(f"{name:<{width}}  {verdict:<16}  {fell}  {1e3 * step_s:16.0f}  {sent:>8}  {peak:>8}", flush=True)


def run_tour(num_ranks: int, job: Job, techniques) -> int:
    """Print the table; 0 if every technique equals serial, 1 if anything differs."""
    with dtlab.launch(num_ranks, guard=False) as ranks:  # it would cost time
        equal = print_table(ranks, job, techniques)
    print(EXPLANATION.format(steps=job.num_steps, rtol=RTOL, ranks=num_ranks, cores=machine.usable_cores()))
    if not all(equal):
        print(f"\n{equal.count(False)} of {len(equal)} techniques did not equal one process.")
    return 0 if all(equal) else 1


def print_table(ranks, job: Job, techniques) -> list:
    """Run one process, then every technique, a row each; a list of "equals serial"."""
    width = max(len(technique.name) for technique in techniques)
    print(f"The small GPT ({num_params(job.model()):,} parameters, float64) on {len(job.data):,} bytes of text: "
          f"{job.num_steps} steps of {job.batch_size} x {job.config.seq_length} tokens.\n")
    print(f"{'':<{width}}  equal to serial?  loss              fastest step, ms  sent, MB  peak, MB")
    reference = serial(job)
    alone = recorded_cost(ranks, serial, job, on=[0])
    print_row("one process", "reference", reference.losses, reference.step_s, alone, width)
    return [show_technique(ranks, technique, job, reference, width) for technique in techniques]


def main(argv=None, *, techniques=TECHNIQUES, job: Job | None = None) -> int:
    """Parse the command line, run the tour, return the exit code."""
    parser = argparse.ArgumentParser(prog="dtlab tour", description="Every technique, on live ranks, in one table.")
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="number of ranks (default 4)")
    num_ranks = at_least("--ranks", parser.parse_args(argv).ranks, 1)
    torch.set_num_threads(machine.usable_cores())
    return run_tour(num_ranks, job or Job(), techniques)
