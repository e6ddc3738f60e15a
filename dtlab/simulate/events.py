"""What a rank did, as a list of events, and the recording that holds one list per rank. Pure: no torch.

**Kinds of events.** All times are seconds since the first rank's recording began; a list is in the order in which
things happened (an event that lasts stands where it ended).

| kind | what happened | fields it uses beside op, start_s, end_s, where, phase |
|---|---|---|
| compute | an operation on tensors; ``sleep``: a timed layer's | cpu_s, flops, bytes (read + written), reads, writes |
| issue | a communication call was handed to the backend | bytes, wire_bytes, group, seq, peer, tag, reads, writes |
| wait | the rank waited for one | the op, group, seq, peer and tag of the issue it ends |
| alloc, free | a storage came to life, or its bytes went | storage, bytes, category (alloc) |
| phase | a `with dtlab.phase(...)` block, from enter to exit | phase |

A synchronous call is an issue and a wait. A storage that changes its size is a second alloc of the same id, or a free
where nothing is left.

**Files** are JSON lines, UTF-8. The first line is the header
``{"dtlab_recording": 1, "world_size": 4, "ranks": [0, 1], "meta": {...}}``: the version of the format, the size of the
world, the ranks that were recorded, and what the recorder noted (``dry``: recorded with fake tensors, so that times
mean nothing; ``groups``: the ranks of each group id; ``tokens``, ``model_flops``). Then one line per event, rank after
rank, ``{"rank": 0, "kind": "compute", "op": "aten.mm", "start_s": 0.0, "end_s": 0.001, ...}``; a field at its default
is left out. The last line, ``{"end": 123}``, counts the events, so that a file cut short is seen. Results of the
function are not kept. A reader refuses a newer version and fields it does not know.
"""
import json
from dataclasses import dataclass, field, fields

from dtlab.errors import ConfigError

VERSION = 1
KINDS = ("compute", "issue", "wait", "alloc", "free", "phase")
CATEGORIES = ("params", "grads", "optimizer_states", "activations", "other")


@dataclass(slots=True)
class Event:
    """One thing that one rank did.

    Attributes:
        kind: one of ``KINDS``; the module's docstring says what each means.
        op: ``"aten.mm"``; for communication the name in torch.distributed, ``"all_reduce"``.
        start_s, end_s: seconds since the first rank's recording began.
        cpu_s: thread-CPU time of a compute event (seconds).
        flops: floating-point operations (a multiply and an add are 2).
        bytes: compute: read + written; issue: the full buffer (nccl-tests' S); alloc, free: the storage's size.
        wire_bytes: issue: what this rank sends, modelled (see ``wire_bytes``) or counted (p2p, our own collectives).
        group: the group's id: its global ranks, creation ordinal and label, ``"0-3#0:default_pg"``.
        seq: number of the call on its channel: the group, or for p2p (source, destination, tag).
        peer: p2p: the other global rank.
        tag: p2p: the message's tag.
        reads, writes: ids of the storages read and written.
        storage: alloc, free: the storage's id.
        category: alloc: one of ``CATEGORIES``; may be corrected until the recording ends.
        where: call site, ``"cell [3], line 4"``.
        phase: what ``dtlab.phase("forward", stage=1, micro_batch=3)`` said, with its first argument under ``"name"``.
    """

    kind: str
    op: str
    start_s: float
    end_s: float
    cpu_s: float = 0.0
    flops: int = 0
    bytes: int = 0
    wire_bytes: float = 0.0
    group: str = ""
    seq: int = -1
    peer: int = -1
    tag: int = 0
    reads: tuple = ()
    writes: tuple = ()
    storage: int = -1
    category: str = ""
    where: str = ""
    phase: dict = field(default_factory=dict)


class Recording:
    """Everything that the recorded ranks did.

    Attributes:
        events: rank -> list of ``Event``.
        world_size: ranks of the world (count); with a dry recording more than were recorded.
        ranks: the recorded ranks, ascending.
        results: what the recorded function returned, by rank order; None where it is not known.
        meta: ``dry`` and whatever else the recorder noted.
        prepared: what ``replay`` keeps of the events; None it to replay changed ones.
    """

    def __init__(self, events, *, world_size=None, results=None, meta=None):
        self.events = {rank: events[rank] for rank in sorted(events)}
        self.ranks = list(self.events)
        self.world_size = world_size if world_size is not None else max(self.ranks, default=-1) + 1
        self.results, self.meta, self.prepared = results, dict(meta or {}), None

    def __repr__(self):
        count = sum(map(len, self.events.values()))
        how = "dry" if self.meta.get("dry") else "live"
        return f"Recording ({how}): {len(self.ranks)} of {self.world_size} ranks, {count:,} events"

    def communication(self):
        """Bytes by collective: a DataFrame with one row per (rank, op, group).

        Columns: rank, op, group, calls (count), tensor_bytes (the full buffers), wire_bytes (what the rank sends).
        """
        from dtlab.simulate import tables

        return tables.communication(self.events)

    def memory(self):
        """Peak memory in bytes: a DataFrame by rank.

        Columns: params, grads, optimizer_states, activations, other and their sum, peak, all at the instant of the
        peak; then peak_params, ... peak_other: the most that each held at any time. A storage counts once.
        """
        from dtlab.simulate import tables

        return tables.memory(self.events)

    def flops(self):
        """Floating-point operations: a DataFrame with one row per (rank, phase, op) that has any.

        Columns: rank, phase (the name given to ``dtlab.phase``), op, calls (count), flops.
        """
        from dtlab.simulate import tables

        return tables.flops(self.events)

    def timeline(self):
        """What each rank did when, as a ``Timeline`` that draws itself in a notebook.

        Raises:
            ConfigError: the recording is dry; ``replay`` gives it times.
        """
        from dtlab.simulate.timeline import Timeline

        return Timeline.of(self)

    def to_chrome_trace(self, path):
        """Write a trace for https://ui.perfetto.dev or chrome://tracing; of a dry one replay's timeline can."""
        from dtlab.simulate.trace import write_chrome_trace

        write_chrome_trace(self, path)

    def save(self, path):
        """Write the recording to a file of JSON lines (all but ``results``)."""
        write_events(path, self.events, world_size=self.world_size, meta=self.meta)

    @classmethod
    def load(cls, path):
        """Read a recording that ``save`` wrote.

        Raises:
            ConfigError: the file is missing, cut short, no recording, or of a newer format.
        """
        events, world_size, meta = read_events(path)
        return cls(events, world_size=world_size, meta=meta)


_FIELDS = {f.name: f for f in fields(Event)}
_DEFAULTS = {name: () if name in ("reads", "writes") else {} if name == "phase" else f.default
             for name, f in _FIELDS.items()}
_AMOUNTS = ("cpu_s", "flops", "bytes", "wire_bytes")
_TYPES = {"int": int, "float": (int, float), "str": str, "tuple": list, "dict": dict}


def write_events(path, events, *, world_size, meta=None):
    """Write ``{rank: [Event, ...]}`` to a file; the module's docstring has the format."""
    with open(path, "w", encoding="utf-8") as file:
        def put(entry):
            file.write(json.dumps(entry, separators=(",", ":"), default=plain) + "\n")

        put({"dtlab_recording": VERSION, "world_size": world_size, "ranks": list(events), "meta": dict(meta or {})})
        for rank, its in events.items():
            for event in its:
                values = ((name, getattr(event, name)) for name in _FIELDS)
                put({"rank": rank, **{name: value for name, value in values if value != _DEFAULTS[name]}})
        put({"end": sum(map(len, events.values()))})


def read_events(path):
    """Read a file of events.

    Returns:
        ``({rank: [Event, ...]}, world_size, meta)``.

    Raises:
        ConfigError: the file is missing, cut short, no recording, or of a newer format.
    """
    try:
        with open(path, encoding="utf-8") as file:
            return _parse(path, file)
    except FileNotFoundError:
        raise ConfigError(f"there is no recording {str(path)!r}") from None
    except (OSError, TypeError) as error:  # a folder, not allowed, no path
        raise ConfigError(f"{path!r} cannot be read as a recording: {error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{str(path)!r} is no dtlab recording: it is not text") from None


def plain(value):
    """A number of numpy or torch as Python's own, for json."""
    if not hasattr(value, "item"):
        raise ConfigError(f"a recording on disk holds numbers and text, not {type(value).__name__} ({value!r})")
    return value.item()


def _parse(path, file):
    header = _entry(file.readline())
    version = (header or {}).get("dtlab_recording")
    if not isinstance(version, int) or version < 1:
        raise ConfigError(f"{str(path)!r} is no dtlab recording: its first line is no header")
    if version > VERSION:
        raise ConfigError(f"{str(path)!r} has format {version}, newer than {VERSION}, which this dtlab reads: "
                          "update dtlab, or record again")
    try:
        events = {int(rank): [] for rank in header["ranks"]}
        world_size, meta = int(header["world_size"]), dict(header["meta"])
        if not all(rank in range(world_size) for rank in events):
            raise ValueError
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ConfigError(f"{str(path)!r} is no dtlab recording: its header lacks ranks, world_size or meta, "
                          "or a rank is not in the world") from None
    count = 0
    for number, line in enumerate(file, start=2):
        entry = _entry(line)
        if entry is None and line.endswith("\n"):
            raise ConfigError(f"{str(path)!r} is damaged: line {number} is no JSON object")
        if entry is None:
            break  # the last line, cut in the middle
        if "end" in entry:
            if entry["end"] != count:
                raise ConfigError(f"{str(path)!r} is damaged: it should have {entry['end']:,} events and has {count:,}")
            return events, world_size, meta
        rank = entry.pop("rank", None)
        wrong = _wrong(entry) if rank in events else f"rank {rank!r} is not in the header's {list(events)}"
        if wrong:
            raise ConfigError(f"{str(path)!r} is damaged: line {number}: {wrong}")
        entry.update((name, tuple(entry[name])) for name in ("reads", "writes") if name in entry)
        events[rank].append(Event(**entry))
        count += 1
    raise ConfigError(f"{str(path)!r} is cut short after {count:,} events: its last line is missing; save it again")


def _entry(line):
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def _wrong(entry):
    """What is wrong with an event's fields, or None."""
    for name, value in entry.items():
        if name not in _FIELDS:
            return f"an event has no field {name!r}"
        kind = _FIELDS[name].type.__name__
        if not isinstance(value, _TYPES[kind]) or isinstance(value, bool):
            return f"{name} ({value!r}) should be of type {kind}"
        if kind == "float" and not abs(value) < 1e300 or name in _AMOUNTS and not 0 <= value < 1e300:
            return f"{name} ({value!r}) cannot be"
    missing = [name for name in ("kind", "op", "start_s", "end_s") if name not in entry]
    if missing:
        return f"an event lacks {', '.join(missing)}"
    return None if entry["kind"] in KINDS else f"kind {entry['kind']!r} is none of {', '.join(KINDS)}"
