"""What a learner's functions did on live ranks in one case: values, recording, or how they failed."""
import contextlib
import os
import re
import threading
import time
import types
from dataclasses import dataclass, field

import torch

from dtlab.errors import DtlabError, GuardError, HangError

LIMIT_S = 20.0  # of one case, endless loops included, where a process has a core for itself
_BUSIEST = 5  # a busy machine gives so many times that, at most
LIMIT_BYTES = 10**9  # that a rank may take beyond what it has at its start
_THREAD_BYTES = 80 * 10**6  # of addresses that a thread takes before it does anything
SHOWN_CHARS = 2000  # of what a rank prints in one case; the rest is counted
_RESULT_BYTES = 64 * 10**6  # of what a program returns
_TEXT_CHARS = 3000  # of what an error says
_WORDS = {"not yet": "not yet: the stub is still there", "hang": "a hang: a rank waits for ever",
          "guard": "stopped by the guard", "raised": "an error on a rank", "died": "a rank died",
          "time": "not done in time: an endless loop?"}  # fmt: skip

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
    """What a learner wrote: functions of a notebook, or the text of cells, run on the ranks only.

    Attributes:
        functions: name -> function or class.
        source: ``[(label, text of a cell), ...]``, run in order on every rank; its names come before ``functions``.
        references: name -> function that stands in for an earlier exercise, also inside ``functions``.
    """

    functions: dict = field(default_factory=dict)
    source: tuple = ()
    references: dict = field(default_factory=dict)

    def on_rank(self, names):
        """The functions of these names, on a rank."""
        for function in self.functions.values():
            for one in functions_of(function):
                one.__globals__.update(self.references)
        namespace = {"__name__": "__main__", **_always_there(), **self.functions, **self.references}
        for label, text in self.source:
            exec(_compiled(label, text), namespace)  # on a rank: this is what the learner asked to be run
        missing = [name for name in names if name not in namespace]
        if missing:
            raise NotImplementedError(f"{missing[0]} is not defined")
        return {name: namespace[name] for name in names}


def _always_there():
    """The names that functions of a notebook find on every rank."""
    import dtlab

    dist = torch.distributed
    return {"dtlab": dtlab, "torch": torch, "dist": dist, "device": torch.device("cpu"),
            "rank": dist.get_rank(), "world_size": dist.get_world_size()}  # fmt: skip


def _compiled(label, text):
    """A cell as code whose lines errors can show; magics, which only the notebook knows, are left out."""
    from dtlab.ranks import cells

    filename = f"<{label}>"
    cells.remember_source(filename, label, text)
    try:
        return compile(text, filename, "exec")
    except SyntaxError:
        plain = re.sub(r"(?m)^([ \t]*)[%!].*$", r"\1pass", text)
        if plain == text:
            raise
        return compile(plain, filename, "exec")


def functions_of(thing):
    """A function, or the functions of a class, as a list; empty for anything else."""
    inside = vars(thing).values() if isinstance(thing, type) else [thing]
    return [one for one in inside if isinstance(one, types.FunctionType)]


@dataclass
class Evidence:
    """What came of one case.

    Attributes:
        case: the ``Case``.
        results: what the program returned, by rank, as plain data; None if it failed.
        recording: what the ranks did; None if it failed.
        failed: ``""``, or ``"not yet"``, ``"raised"``, ``"died"``, ``"hang"``, ``"guard"``, ``"time"``.
        text: what the error said.
    """

    case: Case
    results: list | None = None
    recording: object = None
    failed: str = ""
    text: str = ""

    @property
    def in_words(self):
        """How it failed, in a few words for a picture; empty if it did not."""
        return _WORDS.get(self.failed, "")


@dataclass(frozen=True)
class Foreign:
    """Stands for a result that is no plain data, so that nothing of a learner's runs where the verdict is made."""

    text: str

    def __repr__(self):
        return self.text


def gather(program, answer, names, case, shown_chars=SHOWN_CHARS):
    """Run ``program(case, **functions)`` on every rank: an ``Evidence``, whatever they do.

    Raises:
        DtlabError: the ranks could not be started, which is no fault of the answer.
    """
    from dtlab.ranks.pool import Ranks

    # ranks of its own: those of the notebook stay the current ones
    with Ranks(case.world_size, device="cpu", timeout=limit_s() / 4, share_gpu=False, guard=True) as ranks:
        ranks.kept_chars, ranks.is_for_once = shown_chars, True
        with _Deadline(ranks) as deadline:
            try:
                recording = ranks.record(_on_rank, program, answer, names, case)
                return Evidence(case, recording.results, recording)
            except DtlabError as error:
                late = deadline.passed_s
                failed = "time" if late else _kind(error)
                text = f"not done after {late:.3g} s: a loop or a sleep without end?" if late else str(error)
                return Evidence(case, failed=failed, text=_in_short(text))


def _kind(error):
    """How a case failed, by the error; what cannot travel to or from a rank counts as raised."""
    if isinstance(error, (HangError, GuardError)):
        return "hang" if isinstance(error, HangError) else "guard"
    cause = getattr(error, "cause", None)
    if cause == "NotImplementedError" and re.search(r"NotImplementedError: (Exercise|\w+ is not defined)", str(error)):
        return "not yet"  # a stub, and nothing that torch has not implemented
    return "died" if cause == "died" else "raised"


def _in_short(text):
    """Without the advice on launch, whose limits are not the learner's here; not longer than can be read."""
    lines = [line for line in text.splitlines() if not line.startswith("If it only needed longer")]
    text = "\n".join(line if len(line) < 300 else f"{line[:300]} ..." for line in lines)
    return text if len(text) < _TEXT_CHARS else f"{text[:_TEXT_CHARS]} ..."


def _on_rank(program, answer, names, case):
    limit_memory(LIMIT_BYTES + _THREAD_BYTES * torch.get_num_threads())
    try:
        return _plain(program(case, **answer.on_rank(names)), [_RESULT_BYTES])
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
    # here the frames that held the memory are gone, so that there is some to tell it
    raise MemoryError(f"more than {LIMIT_BYTES / 1e9:g} GB on one rank")


def _plain(value, room):
    """A result as tensors, numbers, texts, lists and dicts; ``room`` is a list of the bytes that may still be sent."""
    room[0] -= value.nbytes if isinstance(value, torch.Tensor) else len(value) if isinstance(value, (str, bytes)) else 8
    if room[0] < 0:
        raise ValueError(f"the result is larger than {_RESULT_BYTES // 10**6} MB")
    if isinstance(value, torch.nn.Parameter) or type(value) is torch.Tensor:
        return value.detach()
    if isinstance(value, dict):
        return {_plain(key, room): _plain(each, room) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(each, room) for each in value) if type(value) in (list, tuple) else \
            [_plain(each, room) for each in value]
    if value is None or type(value) in (bool, int, float, str, bytes, complex, torch.dtype):
        return value
    if type(value).__module__ == "numpy" and hasattr(value, "item"):
        return _plain(value.tolist(), room)
    return Foreign(f"a value of type {type(value).__name__}")


def limit_memory(more_bytes):
    """Let this process take no more than this beyond what it has; where the system has no such limit, nothing."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        import psutil

        most, (_, hard) = psutil.Process().memory_info().vms + more_bytes, resource.getrlimit(resource.RLIMIT_AS)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def limit_s():
    """Seconds that a case may take now: more where processes wait for a core, though some of them are its own."""
    waiting = os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 1
    return LIMIT_S * min(max(waiting, 1), _BUSIEST)


class _Deadline:
    """Kills the ranks when the time of a case is over: nothing in them is trusted to stop.

    At the end it kills what they have started; processes that left their rank's group would outlive it.
    """

    def __init__(self, ranks):
        self.ranks, self.passed_s, self._done = ranks, 0.0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._done.set()
        self._thread.join()
        self._kill()

    def _watch(self):
        began = time.monotonic()
        while not self._done.wait(0.1):
            if time.monotonic() - began > (most_s := limit_s()) and not self.passed_s:
                self.passed_s = most_s
                self._kill()

    def _kill(self):
        import psutil

        for pid in list(self.ranks.pids.values()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                for one in [*process.children(recursive=True), process]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()
