"""Lab 01: a ring all-reduce of any length in place, in its exact bytes; two nodes; what is known to go wrong."""
import functools
from dataclasses import replace

import torch

from dtlab.checks import lab01_pictures as pictures
from dtlab.checks import lab01_programs as programs
from dtlab.checks import lab01_serial as serial
from dtlab.checks.evidence import Case
from dtlab.checks.exercise import Exercise
from dtlab.checks.lab01_cuts import CUT_MISTAKES
from dtlab.checks.lab01_mistakes import NODE_MISTAKES, ring_mistakes
from dtlab.checks.lab01_serial import FORBIDDEN, GATHER, REDUCE, SCATTER, in_s, leaving, sent, sent_bytes, total_bytes
from dtlab.errors import ConfigError

NODES = "two_node_all_reduce"


# on the ranks


class _Closed:
    """Stands in dtlab.parallel for what its functions need."""

    def __call__(self, *_):
        raise ConfigError("dtlab.parallel is closed in this lab")

    __getattr__ = __call__


def _close_library():
    from dtlab.parallel import collectives

    collectives.dist = collectives.at_least = _Closed()


def _keep_handles():
    """A list of the open sends: in gloo a dropped one may never leave, and nothing tells whether it was awaited."""
    from torch.distributed import distributed_c10d

    from dtlab.ranks import calls

    kept, isend = [], distributed_c10d.isend

    @functools.wraps(isend)
    def keeping(*args, **kwargs):
        is_open = {id(handle()) for handle in calls.current.guard.buffers.handles.values()}
        kept[:] = [handle for handle in kept if id(handle) in is_open]
        kept.append(isend(*args, **kwargs))
        return kept[-1]

    # so that reports name the learner's line
    keeping.__code__ = keeping.__code__.replace(co_filename=distributed_c10d.__file__)
    torch.distributed.isend = distributed_c10d.isend = keeping
    return kept


def reduce_scatter(tensor):
    """Stands in for exercise 2."""
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    chunks = [tensor[start:end] for start, end in serial.bounds(len(tensor), size)]
    spare = torch.empty_like(chunks[0])
    for step in range(1, size):
        sent, added = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        received = spare[:len(added)]
        sending = dist.isend(sent, (rank + 1) % size)
        dist.recv(received, (rank - 1) % size)
        added += received
        sending.wait()


def cut(case, chunk_bounds):
    """The bounds of every pair of a case."""
    _close_library()
    return {serial.cut_key(length, size): chunk_bounds(length, size) for length, size in case["pairs"]}


def in_place(case, **functions):
    """Calls each function on a tensor of each length: what is in the tensors afterwards."""
    import torch.distributed as dist

    from dtlab import phase
    from dtlab.ranks import calls

    _close_library()
    results, rank, kept = {}, dist.get_rank(), _keep_handles()
    for length in case["lengths"]:
        for name, function in functions.items():
            tensor = torch.from_numpy(serial.before(name, case, length)[rank])
            with phase(name):
                function(tensor)
            results[serial.label(name, length)] = tensor
    calls.current.guard.refuse_open()  # in time or not: whether a message is through by now is chance
    kept.clear()
    return results


# exercise 1


class _Alone(Case):
    """A case whose rank is none of the learner's."""

    def __str__(self):
        return self.name


def _cuts(rng):
    drawn = [(rng.randrange(20, 400), rng.randrange(3, 12)) for _ in range(8)]
    traps = [(7, 4), (10, 4), (5, 3), (6, 6), (5, 1), (1, 2), (3, 4), (1, 4), (0, 3)]
    tries = {"short lengths": [(8, 4), (10, 4), (3, 4)], "every length": [*traps, *drawn],
             "a length of 10**12": [(10**12 + rng.randrange(1, 1023), 1024)]}  # fmt: skip
    return [_Alone(1, name, {"pairs": pairs}) for name, pairs in tries.items()]


def _right_cuts(case):
    return [{serial.cut_key(*pair): serial.bounds(*pair) for pair in case["pairs"]}]


# budgets of the ring


def ring_traffic(*names):
    """A rank sends the bytes of a ring to its neighbours, in no more messages than its steps."""
    def over(case, recording):
        for rank in range(case.world_size):
            for name in names:
                spent, may = sent_bytes(recording, rank, name), serial.ring_bytes(name, case, rank)
                if spent not in may:
                    ring = in_s(may[0], case)
                    return f"rank {rank} sent {in_s(spent, case)} in {name}; around a ring it sends {ring}"
                steps, messages = serial.steps_of(name, case), len(sent(recording, rank, name))
                if messages > steps:
                    return f"rank {rank} sent {messages} messages in {name}, which has {steps} steps in all"
                near = {(rank + way) % case.world_size for way in (1, -1)}
                far = {to for to, _ in sent(recording, rank, name)} - near
                if far:
                    return f"rank {rank} sent to rank {min(far)} in {name}, which is none of its neighbours"
        return None
    return over


def one_chunk(*names):
    """A rank holds no more than one spare chunk beside its tensor, and none in an all-gather."""
    def over(case, recording):
        for rank in range(case.world_size):
            held, may, _, name = serial.beside(names, case, recording, rank)
            if held > may:
                return (f"at its peak rank {rank} held {held:,} bytes beside the tensor in {name}, where {may:,} are "
                        "enough")  # fmt: skip
        return None
    return over


def _ring(key, title, names, minutes, hint, references, **more):
    cases = serial.cases((4, 8), (4, 7), (3, 1, 2, 7, 8), (2, 1, 7, 8), (1, 1, 7), (4, 1, 3, 10, None))
    return Exercise(key, title, names, cases, in_place, serial.spec(*names), forbidden=FORBIDDEN,
                    budget=(ring_traffic(*names), one_chunk(*names)), mistakes=ring_mistakes(*names),
                    hint=hint, references=references, minutes=minutes, draw=pictures.ring, **more)  # fmt: skip


# exercise 4


def between_nodes(case, recording):
    """At most S leaves a node; less cannot be enough."""
    for node, spent in enumerate(leaving(recording)):
        if spent > total_bytes(case):
            return f"{in_s(spent, case)} left node {node}; 1 S is enough"
        if spent < total_bytes(case):
            return f"{in_s(spent, case)} left node {node}, which needs 1 S: something went another way than by messages"
    return None


EXERCISES = (
    Exercise("lab01.1", "chunk bounds for any length and n", ("chunk_bounds",), _cuts, cut, _right_cuts,
             mistakes=CUT_MISTAKES, minutes=10, draw=pictures.cuts,
             hint="write the sizes of 7 elements on 4 ranks in a row: how many chunks have one element more, and how "
                  "many elements stand before chunk r?"),
    _ring("lab01.2", "ring reduce-scatter in place, any length", (SCATTER,), 20,
          "follow one chunk: where does the sum of chunk r start if it is to end at rank r?",
          {"chunk_bounds": serial.bounds}),
    _ring("lab01.3", "all-gather, then all-reduce, in the bytes of a ring and one spare chunk", (GATHER, REDUCE), 20,
          "which chunk is finished on rank r when the second half begins, and which one comes in first?",
          {"chunk_bounds": serial.bounds, SCATTER: reduce_scatter}, replicated=True),
    Exercise("lab01.4", "two nodes of two ranks: at most 1 S leaves a node", (NODES,),
             serial.cases((4, 8), (4, 7), (4, 1, 3, 10, None)), in_place, serial.spec(NODES), forbidden=FORBIDDEN,
             budget=(between_nodes,), mistakes=NODE_MISTAKES, replicated=True, minutes=15,
             draw=pictures.nodes,
             references={"chunk_bounds": serial.bounds},
             hint="what is the least that node 1 must learn of node 0? Make that inside the node first"),
    programs.PROGRAMS.as_exercise(_Alone(1, "diagnosis", {"lengths": [7], "seed": 1}),
                                  lambda case, *_: pictures.diagnosis(replace(case, world_size=4))),
)  # fmt: skip
