"""A schedule: for each rank the list of what it computes. What is sent follows from it: stage s needs the output of
stage s - 1 for its forward, and the gradient that stage s + 1 computes for its backward.
"""
import csv
import io
import os
import re
from dataclasses import dataclass
from typing import NamedTuple

from dtlab.errors import ConfigError

# kinds of actions, as torch.distributed.pipelining writes them
Forward = "F"
Backward = "B"  # gradients of a stage's input and weights
BackwardInput = "I"  # of its input alone
BackwardWeight = "W"  # and later of its weights
Overlap = "OVERLAP_F_B"  # a forward and a backward at once
NAMES = {Forward: "forward", Backward: "backward", BackwardInput: "backward_input", BackwardWeight: "backward_weight"}

_SIMPLE = re.compile(r"(\d+)([FBIW])(\d+)")
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
_IMPLIED = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*")


class Action(NamedTuple):
    """One thing that a rank computes.

    Attributes:
        kind: ``Forward``, ``Backward``, ``BackwardInput``, ``BackwardWeight``; ``Overlap``.
        stage: of the whole model, from 0 (None: the parts know).
        micro_batch: from 0 (None: the parts know).
        parts: of an ``Overlap``: a forward and a backward, which the rank computes at once.

    Example:
        >>> Action(Forward, 0, 3), Action.pair(Action(Forward, 0, 3), Action(Backward, 1, 2))
        (0F3, (0F3;1B2)OVERLAP_F_B)
    """

    kind: str
    stage: "int | None"
    micro_batch: "int | None"
    parts: tuple = ()

    @classmethod
    def pair(cls, forward, backward):
        """A forward and a backward at once."""
        return cls(Overlap, None, None, (forward, backward))

    @property
    def words(self):
        """``"forward, stage 0, micro-batch 3"``."""
        if self.parts:
            return " with ".join(part.words for part in self.parts)
        return f"{NAMES.get(self.kind, self.kind)}, stage {self.stage}, micro-batch {self.micro_batch}"

    def __repr__(self):
        if self.parts:
            return f"({';'.join(map(repr, self.parts))}){self.kind}"
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(repr=False)
class Schedule:
    """What each rank of a pipeline computes, in order; may be edited by hand.

    Attributes:
        actions: for each rank its list of ``Action``s.
        num_stages: stages of the model (count).
        num_micro_batches: of a step (count).
        stage_to_rank: for each stage the rank that has it (None: no rank has).
        name: what to call it.
    """

    actions: list
    num_stages: int
    num_micro_batches: int
    stage_to_rank: tuple
    name: str = "schedule"

    @property
    def num_ranks(self):
        return len(self.actions)

    def check(self):
        """Prove that the schedule can be executed and trains on every micro-batch once; give it back.

        Rules, in this order: *known* actions, on the *place* of their stage; each done *once*; none missing
        (*complete*); a backward after its forward, a weight's after its input's (*order*); what one stage sends to the
        next is received in the same order (*messages*); no ranks that wait for each other (*deadlock*).

        Raises:
            ScheduleError: the first rule that is broken, with rank, stage and micro-batch.
        """
        from dtlab.schedules.check import check

        check(self)
        return self

    def simulate(self, **times):
        """The timeline of the schedule; all arguments are those of ``dtlab.schedules.simulation.simulate``.

        Example:
            >>> from dtlab.schedules import one_f_one_b
            >>> timeline = one_f_one_b(num_stages=4, num_micro_batches=8).simulate(forward_s=1, backward_s=2)
            >>> timeline.step_time_s, round(timeline.bubble_fraction, 3), timeline.peak_in_flight
            (33.0, 0.273, [4.0, 3.0, 2.0, 1.0])
        """
        from dtlab.schedules.simulation import simulate

        return simulate(self, **times)

    def to_csv(self, path=None):
        """The schedule in torch.distributed.pipelining's format: a line for each rank, ``stage kind micro-batch``.

        Args:
            path: a file to write it to as well.

        Returns:
            str.
        """
        text = io.StringIO()
        csv.writer(text).writerows(self.actions)
        if path is not None:
            with open(path, "w", newline="", encoding="utf-8") as file:
                file.write(text.getvalue())
        return text.getvalue()

    @classmethod
    def from_csv(cls, source, name="schedule"):
        """Read what ``to_csv`` or torch wrote; ``check`` says whether it can be executed.

        Empty cells are left out, as are sends, receives and what FSDP does: they follow from the rest.

        Args:
            source: a path, or the text itself, which has a line break.

        Raises:
            ConfigError: a cell that is no action; nothing to compute.
        """
        if isinstance(source, os.PathLike) or "\n" not in source:
            with open(source, newline="", encoding="utf-8") as file:
                source = file.read()
        rows = list(csv.reader(io.StringIO(source)))
        actions = [[action for column, cell in enumerate(row) for action in _actions(cell.strip(), rank, column)]
                   for rank, row in enumerate(rows)]  # fmt: skip
        ranks, micro_batches = {}, set()
        for rank, its in enumerate(actions):
            for part in parts(its):
                ranks.setdefault(part.stage, rank)
                micro_batches.add(part.micro_batch)
        if not ranks:
            raise ConfigError("the schedule has nothing to compute: a line for each rank, such as 0F0,0F1,0B0,0B1")
        return cls(actions, max(ranks) + 1, max(micro_batches) + 1, tuple(map(ranks.get, range(max(ranks) + 1))), name)

    def __repr__(self):
        lines = [f"{self.name}: {self.num_ranks} ranks, {self.num_stages} stages, {self.num_micro_batches} "
                 "micro-batches"]  # fmt: skip
        for rank, its in enumerate(self.actions):
            line = f"rank {rank}: {' '.join(map(repr, its[:40]))}"
            lines.append(line if len(line) <= 120 and len(its) <= 40 else line[:116].rpartition(" ")[0] + " ...")
        return "\n".join(lines)


def parts(actions):
    """Yield the actions, of a pair each part."""
    for action in actions:
        yield from action.parts or (action,)


def _actions(cell, rank, column):
    """Yield the action of a cell, if it has one that is computed."""
    simple, pair = _SIMPLE.fullmatch(cell), _PAIR.fullmatch(cell)
    if simple:
        yield Action(simple[2], int(simple[1]), int(simple[3]))
    elif pair:
        yield Action.pair(*(action for part in pair.groups() for action in _actions(part.strip(), rank, column)))
    elif cell and not _IMPLIED.fullmatch(cell):
        raise ConfigError(f"line {rank + 1}, cell {column + 1} ({cell!r}) is no action: stage, kind (F, B, I or W) and "
                          "micro-batch, such as 2F0, or (2F5;3B1)OVERLAP_F_B")
