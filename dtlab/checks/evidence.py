"""What a learner's functions did on live ranks in one case: values, recording, or how they failed."""
import threading
import time
from dataclasses import dataclass, field

from dtlab.errors import DtlabError, GuardError, HangError, RankError

LIMIT_S = 20.0  # of one case, endless loops included
LIMIT_BYTES = 2 * 10**9  # that a rank may take beyond what it has at its start


@dataclass(frozen=True)
class Case:
    """One try: on so many ranks, with these inputs.

    Attributes:
        world_size: ranks (count).
        name: what is special about it, in words for the learner: ``"length 7"``.
        data: what the program needs, by name; tensors, numbers, texts.
    """

    world_size: int
    name: str
    data: dict = field(default_factory=dict)

    def __getitem__(self, key):
        return self.data[key]

    def __str__(self):
        return f"{self.name} on {self.world_size} rank{'s' * (self.world_size > 1)}"


@dataclass(frozen=True)
class Answer:
    """What a learner wrote: functions of a notebook, or the text of exercise cells, run on the ranks only.

    Attributes:
        functions: name -> function or class.
        source: ``[(label, text of a cell), ...]``, run in order on every rank; its names come before ``functions``.
    """

    functions: dict = field(default_factory=dict)
    source: tuple = ()

    def on_rank(self, names):
        """The functions of these names, on a rank."""
        namespace = {"__name__": "__main__", **self.functions}
        for label, text in self.source:
            exec(compile(text, label, "exec"), namespace)  # on a rank: this is what the learner asked to be run
        missing = [name for name in names if name not in namespace]
        if missing:
            raise NotImplementedError(f"{missing[0]} is not defined")
        return {name: namespace[name] for name in names}


@dataclass
class Evidence:
    """What came of one case.

    Attributes:
        case: the ``Case``.
        results: what the program returned, by rank; None if it failed.
        recording: what the ranks did; None if it failed.
        failed: ``""``, or ``"not yet"``, ``"raised"``, ``"died"``, ``"hang"``, ``"guard"``, ``"time"``.
        text: what the error said.
    """

    case: Case
    results: list | None = None
    recording: object = None
    failed: str = ""
    text: str = ""


def gather(program, answer, names, case):
    """Run ``program(case, **functions)`` on every rank: an ``Evidence``, whatever happens."""
    from dtlab.ranks.pool import Ranks

    try:  # ranks of its own: those of the notebook stay the current ones
        with Ranks(case.world_size, device="cpu", timeout=LIMIT_S / 4, share_gpu=False, guard=True) as ranks, \
                _Deadline(ranks) as deadline:
            try:
                recording = ranks.record(_on_rank, program, answer, names, case)
            except DtlabError:
                if deadline.passed:
                    return Evidence(case, failed="time", text=f"not done after {LIMIT_S:g} s: an endless loop?")
                raise
    except HangError as error:
        return Evidence(case, failed="hang", text=str(error))
    except GuardError as error:
        return Evidence(case, failed="guard", text=str(error))
    except RankError as error:
        kind = {"NotImplementedError": "not yet", "died": "died"}.get(error.cause, "raised")
        return Evidence(case, failed=kind, text=str(error))
    except DtlabError as error:  # what cannot travel
        return Evidence(case, failed="raised", text=str(error))
    return Evidence(case, recording.results, recording)


def _on_rank(program, answer, names, case):
    _limit_memory()
    return program(case, **answer.on_rank(names))


def _limit_memory():
    """So that a memory bomb fails in its own process; where the system has no such limit, nothing."""
    try:
        import resource

        import psutil
    except ImportError:
        return
    most = psutil.Process().memory_info().vms + LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


class _Deadline:
    """Kills the ranks when the time of a case is over: nothing in them is trusted to stop."""

    def __init__(self, ranks):
        self.ranks, self.passed, self._done = ranks, False, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._done.set()
        self._thread.join()

    def _watch(self):
        import psutil

        began = time.monotonic()
        while not self._done.wait(0.1):
            if time.monotonic() - began > LIMIT_S and not self.passed:
                self.passed = True
                for pid in list(self.ranks.pids.values()):
                    for process in _family(psutil, pid):
                        process.kill()


def _family(psutil, pid):
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
