"""The communication calls of a recording: told of every call by the kernels of ``dtlab.ranks.calls``.

Those see raw ``torch.distributed``, functional collectives, DDP's reducer, FSDP2 and calls of other threads, each
once. The waits they see are ``Work.wait`` and ``wait_tensor``. A wait that C++ makes by itself (DDP's reducer at the
end of backward) is inferred: it ends when the program first touches what the call fills.
"""
import torch
from torch.distributed import distributed_c10d

from dtlab.ranks.board import RECV, RECV_ANY
from dtlab.ranks.guard_facts import flat
from dtlab.theory.communication import wire_bytes


class Group:
    """What events say of a process group: ``id``, its global ``ranks`` and this rank's ``index`` among them."""

    def __init__(self, group, ranks):
        name = group.group_name
        self.id = f"{_ranks_text(ranks)}#{name if name.isdigit() else name[:8]}:{group.group_desc or 'undefined'}"
        self.ranks, self.index = ranks, group.rank()


def _ranks_text(ranks):
    """``0-3``, ``0-1016:8`` or ``0,3,4``."""
    step = ranks[1] - ranks[0] if len(ranks) > 2 else 1
    if len(ranks) > 1 and all(b - a == step for a, b in zip(ranks, ranks[1:])):
        return f"{ranks[0]}-{ranks[-1]}" + (f":{step}" if step != 1 else "")
    return ",".join(map(str, ranks))


class Calls:
    """Turns calls and waits of one rank into events."""

    def __init__(self, recorder):
        self.recorder, self.memory = recorder, recorder.memory
        self.groups = {}  # name -> Group
        self.in_flight = {}  # id of a storage that a call fills -> [(first byte, end, issue), ...]
        self._issues = {}  # index of a call that has a handle -> issue
        self._seqs = {}
        self._open = set()  # issues without a wait

    def issued(self, started, index, operands, group, members, peer, tag, args):
        """A c10d operator was handed to the backend."""
        root, splits = (None if at is None else args[at] for at in (operands.root, operands.splits[0]))
        reads, writes = operands.lists(args, is_root=False)
        if operands.tensors is not None and operands.kind not in (RECV, RECV_ANY):
            reads = reads or writes
        name = operands.public
        if len(writes) == 1:
            name = name.removesuffix("_coalesced")  # how functional collectives call for a single tensor
        issue = self.add(started, name, group, members, reads, writes, root or 0, splits, peer, tag)
        self._issues[index] = issue

    def functional(self, op, args, out):
        """A functional collective of a dry recording, where it calls no c10d operator."""
        named = dict(zip((a.name for a in op._schema.arguments), args))
        if "group_name" in named and len(named) == len(args):
            group = distributed_c10d._resolve_process_group(named["group_name"])
            members = tuple(torch.distributed.get_process_group_ranks(group))
            reads = flat(args[0])
            name = op._schema.name.split("::")[1].strip("_").removesuffix("_out")
            self.add(0.0, name, group, members, reads, flat(out), named.get("src", 0), named.get("input_split_sizes"))

    def add(self, started, name, group, members, reads, writes, root, splits, peer=-1, tag=0):
        """An issue event, and what is needed to see its wait; what waits call the issue."""
        known = self.groups.get(group.group_name)
        if known is None:
            known = self.groups[group.group_name] = Group(group, members)
        size, wire = _bytes(name, known, reads, writes, root, splits)
        channel = known.id if peer < 0 and "recv" not in name else (known.id, name, peer, tag)
        seq = self._seqs[channel] = self._seqs.get(channel, -1) + 1
        issue = (name, known.id, seq, peer, tag)
        storages = [[s for s in map(self.memory.of, tensors) if s is not None] for tensors in (reads, writes)]
        ids = [tuple({s.id for s in some}) for some in storages]
        self.recorder.add("issue", name, started, bytes=size, wire_bytes=wire, call=issue, reads=ids[0], writes=ids[1])
        self._open.add(issue)
        for tensor in writes:
            storage = self.memory.of(tensor)
            if storage is not None:
                self.in_flight.setdefault(storage.id, []).append((*_extent(tensor), issue))
        return issue

    def waited(self, index, started):
        """``Work.wait`` or ``wait_tensor`` returned, for a call."""
        self._ended(self._issues.pop(index, None), started)

    def waited_for(self, tensor, started):
        """``wait_tensor`` of a dry recording returned."""
        storage = self.memory.of(tensor)
        for *_, issue in self.in_flight.get(storage.id, ())[-1:] if storage else ():
            self._ended(issue, started)

    def touched(self, storage, tensor):
        """An operator is about to use a storage that a call fills: where the bytes meet, the wait is over."""
        start, end = _extent(tensor)
        for first, last, issue in list(self.in_flight[storage.id]):
            if first < end and start < last:
                self._ended(issue, self.recorder.last_end)

    def _ended(self, issue, started):
        if issue not in self._open:
            return
        self._open.discard(issue)
        self.recorder.add("wait", issue[0], started, call=issue)
        for storage_id, calls in list(self.in_flight.items()):
            calls[:] = [c for c in calls if c[2] is not issue]
            if not calls:
                del self.in_flight[storage_id]


def _extent(tensor):
    """First byte and end of a tensor in its storage."""
    size = tensor.element_size()
    start = tensor.storage_offset() * size
    if tensor.numel() == 0:
        return start, start
    return start, start + (sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride())) + 1) * size


def _bytes(name, group, reads, writes, root, splits):
    """``(tensor_bytes, wire_bytes)`` of a call."""
    if name == "barrier":
        return 0, 0.0
    n = len(group.ranks)
    parts = writes if "gather" in name else reads if reads else writes
    sizes = [t.nbytes for t in parts]
    if name in ("gather", "scatter") and group.index != root:
        sizes = [t.nbytes for t in (reads if name == "gather" else writes)] * n  # the root knows the others' sizes
    if splits:
        row = sizes[0] // max(1, sum(splits))
        sizes = [rows * row for rows in splits]
    chunks = sizes if len(sizes) == n and ("gather" in name or "scatter" in name or "all_to_all" in name) else None
    chunks = None if "coalesced" in name else chunks
    return sum(sizes), float(wire_bytes(name, sum(sizes), n, index=group.index, root=root, chunks=chunks))
