"""On a rank: the guard against mistakes that gloo answers with wrong numbers, an abort or an endless wait.

Every call is published before torch gets it, with its facts (reduce operation, root, dtype, shape) and its place in the
reader's code. A collective cannot finish before its last member joins, so the last to arrive sees a mismatch and
refuses; a second comparison when a rank waits closes the gap in which two publish at once. Whoever sees a mistake
writes the text to the board, and every rank stops with it. No call waits longer than it would without the guard.

Caught: collectives that differ in kind, reduce operation, root, dtype, shape or memory layout; the same named calls in
another order; strided tensors where gloo mixes up their elements; outputs that share memory; messages of the wrong size
or type; buffers touched before ``wait``; handles dropped without it; groups made with different ranks. Calls that a
rank leaves out and circles of waits are found by the monitor in the notebook.

Not caught:
    - Swapped calls whose labels say nothing: one line for tensors without names (``for p in params``), messages of
      equal shape without telling names, calls made by torch itself (two DDP modules).
    - A call left out in a loop, if another one fits: it is reported when a rank ends or waits in vain.
    - The size of a message that is received from any source.
    - Writing into a buffer in flight through numpy, C code or a thread of the reader's; a strided buffer in flight.
    - Handles that code of torch or of an installed library holds.
    - A group rank given for a global rank, if a member of the group has that global rank.
    - Values: a wrong divisor, a missing gradient, different seeds.
Calls from threads of the reader's are compared too. torch.compile runs a function eagerly while a handle is open.
"""
import functools
import json
import linecache
import sys

import torch

from dtlab.ranks.board import COLLECTIVE, RECV, SEND, rank_list
from dtlab.ranks.guard_buffers import Buffers
from dtlab.ranks.guard_order import Order, Pair

REDUCE_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
FAMILY = {"all_gather_into_tensor": "all_gather", "all_to_all_single": "all_to_all"}  # gloo runs them alike
_ORDERED = ("allreduce_", "broadcast_", "reduce_", "scatter_", "reduce_scatter_")  # gloo moves bytes in memory order
_OUTPUT_LISTS = ("allgather_", "gather_", "alltoall_")
_NUM_LATE = 4096  # calls of which some peer was not there yet; older ones are compared by that peer


class Operands:
    """How to read the arguments of one c10d operator."""

    def __init__(self, name, names, public):
        self.name, self.public = name, public
        find = lambda *starts: next((i for i, n in enumerate(names) if n.startswith(starts)), None)  # noqa: E731
        self.outputs, self.inputs = find("output"), find("input")
        self.tensors = find("tensor") if self.outputs is None and name != "barrier" else None
        self.reduce, self.root, self.is_async = find("reduce_op"), find("root_rank"), find("async_op")
        self.splits = (find("input_split"), find("output_split"))
        if name == "alltoall_base_":
            self.inputs, self.outputs = names.index("input"), names.index("output")

    def lists(self, args):
        """``(tensors that the call reads, tensors that it writes)``."""
        read = flat(args[self.inputs]) if self.inputs is not None else []
        written = flat(args[self.outputs]) if self.outputs is not None else []
        if self.tensors is not None:
            (read if self.name == "send" else written).extend(flat(args[self.tensors]))
        return read, written

    def root_rank(self, args, members):
        return None if self.root is None else members[args[self.root]]

    def gives_handle(self, args):
        """Whether the caller gets a handle that it must await."""
        return self.is_async is None or self.is_async >= len(args) or bool(args[self.is_async])

    def facts(self, args, members):
        """What the peers' calls are compared with, as JSON."""
        read, written = self.lists(args)
        compared = written if self.name == "scatter_" or not read else read
        ins, outs = self._sizes(args, read, written, len(members))
        return _facts(
            self.public,
            None if self.reduce is None else reduce_name(args[self.reduce]),
            self.root_rank(args, members),
            compared[0].dtype if compared else None,
            () if ins else tuple([t.shape for t in compared]),
            tuple([layout(t) for t in compared]) if self.name in _ORDERED else (),
            ins,
            outs,
        )

    def _sizes(self, args, read, written, n):
        """Elements sent to and expected from each member, of an all_to_all."""
        if self.name == "alltoall_":
            return tuple([t.numel() for t in read]), tuple([t.numel() for t in written])
        if self.name == "alltoall_base_":
            return tuple([_splits(args[i], t[0], n) for i, t in zip(self.splits, (read, written))])
        return (), ()

    def local_mistake(self, args, members, me):
        """What is wrong with a call whatever the peers do; empty if nothing is."""
        read, written = self.lists(args)
        if any(t.layout != torch.strided for t in (*read, *written)):
            return ""
        if self.name in _OUTPUT_LISTS and (pair := overlapping(written)):
            return f"outputs {pair[0]} and {pair[1]} share memory, so one overwrites the other. " + _LIST_CURE
        if self.name in _ORDERED and (wrong := unordered(read, written, self.name)) is not None:
            return strided_text(wrong)
        if self.name == "alltoall_base_" and not written[0].is_contiguous():
            return strided_text(written[0])
        ins, outs = self._sizes(args, read, written, len(members))
        if ins and ins[me] != outs[me]:
            return f"it sends itself {ins[me]} elements and expects {outs[me]}."
        if self.name == "_reduce_scatter_base_" and read[0].numel() != written[0].numel() * len(members):
            n, have, want = len(members), read[0].numel(), written[0].numel()
            return f"the input has {have} elements, but {n} ranks with {want} elements of output each need {n * want}."
        return ""


_LIST_CURE = "[torch.zeros(2)] * n is n times one tensor: write [torch.zeros(2) for _ in range(n)]."


def flat(tensors):
    """Tensors of a tensor, a list, or a list of lists."""
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [t for part in tensors for t in (part if isinstance(part, (list, tuple)) else [part])]


def _splits(sizes, tensor, n):
    """Elements for each peer."""
    if not sizes:
        return (tensor.numel() // n,) * n
    row = tensor.numel() // tensor.shape[0] if tensor.shape[0] else 0
    return tuple([s * row for s in sizes])


def reduce_name(reduce_op):
    """``SUM`` of torch's opaque object; where torch does not tell, from the frame of distributed_c10d."""
    try:
        return REDUCE_OPS[reduce_op.op()]
    except (AttributeError, RuntimeError, IndexError):
        frame = sys._getframe(1)
        while frame is not None and not frame.f_code.co_filename.endswith("/distributed_c10d.py"):
            frame = frame.f_back
        options = frame and frame.f_locals.get("opts")
        op = getattr(getattr(options, "reduceOp", None), "op", None)
        return str(op).rpartition(".")[2] if op is not None else None


def layout(tensor):
    """Empty if contiguous, the strides of another dense layout, ``(0,)`` if there are gaps."""
    if tensor.layout != torch.strided or tensor.is_contiguous():
        return ()
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape) if n > 1):
        if stride != expected:
            return (0,)
        expected *= size
    return tensor.stride()


def unordered(read, written, name):
    """A tensor whose elements gloo would mix up; None if all lie in memory in one order."""
    if name == "reduce_scatter_":  # gloo copies inputs with gaps itself
        layouts = {layout(t) if layout(t) != (0,) else (): t for t in read} | {layout(t): t for t in written}
    else:
        layouts = {layout(t): t for t in (*read, *written)}
    if len(layouts) <= 1 and (0,) not in layouts:
        return None
    return layouts.get((0,)) if (0,) in layouts else next(t for strides, t in layouts.items() if strides)


def overlapping(tensors):
    """Positions of two outputs that use the same bytes; None if there are none."""
    runs = []
    for i, t in enumerate(tensors):
        if t.numel():
            runs.append((t.data_ptr(), t.data_ptr() + (t.nbytes if t.is_contiguous() else t.itemsize), i))
    runs.sort()
    return next(((a[2], b[2]) for a, b in zip(runs, runs[1:]) if b[0] < a[1]), None)


def strided_text(tensor):
    """What is wrong with a tensor that is not contiguous, and the cure."""
    shape = "x".join(map(str, tensor.shape))
    return (
        f"this tensor is not contiguous (shape {shape}, strides {tuple(tensor.stride())}), and gloo would mix up its "
        f"elements. Pass t.contiguous(), and copy the result back: t.copy_(...)."
    )


@functools.lru_cache(4096)
def _facts(public, reduce, root, dtype, shapes, layouts, ins, outs):
    facts = {"op": public, "reduce": reduce, "root": root, "dtype": str(dtype).removeprefix("torch.") if dtype else ""}
    return json.dumps(facts | {"shapes": shapes, "layouts": layouts, "in": ins, "out": outs})


def shape_text(shapes, dtype):
    """``4x3 float32``, ``4x3 float32 and 1 more``."""
    first = "x".join(map(str, shapes[0])) or "scalar" if shapes else ""
    return f"{first} {dtype}".strip() + (f" and {len(shapes) - 1} more" if len(shapes) > 1 else "")


def call_text(facts):
    """``all_reduce(4x3 float32, SUM)``."""
    f = json.loads(facts)
    if "ranks" in f:
        return f"new_group(ranks={f['ranks']})"
    parts = [shape_text(f["shapes"], f["dtype"]), f["reduce"]]
    parts += [f"root {f['root']}"] if f["root"] is not None else []
    parts += [f"sends {f['in']}, expects {f['out']} elements"] if f["in"] else []
    return f"{f['op']}({', '.join(filter(None, parts))})"


@functools.lru_cache(4096)
def difference(mine, theirs, i, j):
    """How two calls do not fit, in words; empty if they do. ``i`` and ``j`` are the callers' places in the group."""
    a, b = json.loads(mine), json.loads(theirs)
    names = [FAMILY.get(f["op"], f["op"]) for f in (a, b)]
    if names[0] != names[1] and set(names) != {"send", "recv"}:
        return "the calls are different"
    if "ranks" in a:
        return "" if a["ranks"] == b["ranks"] else "the ranks of the new group differ"
    if a["in"] and b["in"]:
        if a["in"][j] != b["out"][i] or b["in"][i] != a["out"][j]:
            return "what one rank sends is not what the other expects"
    for what, words in (("reduce", "reduce operations"), ("root", "roots"), ("dtype", "dtypes")):
        if a[what] != b[what] and None not in (a[what], b[what]):
            return f"the {words} differ"
    if len(a["shapes"]) != len(b["shapes"]) or any(not _same_shape(s, t) for s, t in zip(a["shapes"], b["shapes"])):
        return "the shapes differ"
    if a["layouts"] != b["layouts"]:
        return "the memory layouts differ (a transposed tensor on one rank): pass t.contiguous()"
    return ""


def _same_shape(a, b):
    numel = lambda shape: functools.reduce(lambda x, y: x * y, shape, 1)  # noqa: E731
    return a == b if len(a) == len(b) else numel(a) == numel(b)


_ADVICE = {
    COLLECTIVE: "Every rank of a group makes the same calls in the same order, with fitting arguments.",
    SEND: "A message and its receive buffer need the same number of elements and the same dtype.",
}
_SAME_CALL = 'If they are meant to meet, make both inside `with dtlab.same_call("a name"):`.'


class Guard:
    """The guard of one rank, for the life of a process group. ``on`` in guarded cells."""

    def __init__(self, board, label_of):
        self.board, self.rank, self.label_of = board, board.rank, label_of
        self.on = False
        self.order, self.buffers = Order(), Buffers(self._touched)
        self._late = {}  # index -> (call, peers that had not published theirs)
        self._fine = set()  # pairs of calls that were compared and fit

    # refusing

    def refuse(self, text, *, is_hanging):
        """Stop all ranks with this text. ``is_hanging``: calls are left in gloo that will not complete."""
        from dtlab.ranks import calls

        if calls.current is not None:  # else: a process that a rank has forked
            self.board.verdict(text, is_hanging)
            raise calls.Stopped(text)

    def check_local(self, operands, args, members, site):
        """Refuse a call that is wrong whatever the peers do, or that uses a buffer in flight."""
        wrong = operands.local_mistake(args, members, members.index(self.rank))
        if wrong:
            call = f"  rank {self.rank}  {call_text(operands.facts(args, members))}  {self._place(*site.where)}"
            self.refuse(f"rank {self.rank}: {wrong}\n{call}", is_hanging=False)
        if self.buffers.handles:
            read, written = operands.lists(args)
            for tensor in read:
                self.buffers.touch(tensor, False, site)
            for tensor in written:
                self.buffers.touch(tensor, True, site)

    def _touched(self, index, how, site):
        call = self.board.call(self.rank, index)
        if call is None:
            return  # so many calls ago that its text is gone
        state = "may still be on its way" if call.kind == SEND else "may not be filled yet"
        lines = [
            f"rank {self.rank} {how} a buffer that {state}: nobody has called wait() on this",
            self._line([self.rank], call),
            f"  {how} it at {self._place(*site.where)}",
        ]
        self.refuse("\n".join(lines), is_hanging=True)

    # comparing

    def compare(self, index, wanted, channel, seq, kind, members, site, facts):
        """Compare a call that was just published with those of the peers that are there."""
        mine = (index, channel, seq, kind, members, site.label, facts)
        late = [peer for peer in wanted if peer != self.rank and not self._compare_with(peer, *mine)]
        if late:
            self._late[index] = mine, late
            if len(self._late) > _NUM_LATE:
                self._late.pop(next(iter(self._late)))

    def catch_up(self, index):
        """The peers that were late have published: compare now."""
        mine, late = self._late.pop(index, (None, ()))
        for peer in late:
            self._compare_with(peer, *mine)

    def _compare_with(self, peer, index, channel, seq, kind, members, label, facts):
        """True if the peer's call is there, and fits."""
        other_kind = {SEND: RECV, RECV: SEND}.get(kind, kind)
        record = self.board.matching(peer, channel, seq, other_kind)
        if record is None:
            return False
        key = peer, channel, record[-2:], label, facts
        if key in self._fine:
            return True
        theirs = self.board.call(peer, record[0])
        if theirs is None or not theirs.facts or not facts:
            return True
        wrong = difference(facts, theirs.facts, members.index(self.rank), members.index(peer))
        if wrong:
            self._mismatch(wrong, peer, channel, seq, kind, members)
        if label == theirs.label or not label or not theirs.label:
            if len(self._fine) > 1 << 16:
                self._fine.clear()
            self._fine.add(key)
        else:
            self._compare_labels(peer, self.board.call(self.rank, index), theirs)
        return True

    def _mismatch(self, wrong, peer, channel, seq, kind, members):
        both, is_message = rank_list((self.rank, peer)), kind != COLLECTIVE
        what = "do not agree on a message" if is_message else "do not make the same call"
        groups = {}
        for rank in sorted((self.rank, peer) if is_message else members):
            their_kind = kind if rank == self.rank else {SEND: RECV, RECV: SEND}.get(kind, kind)
            record = self.board.matching(rank, channel, seq, their_kind)
            call = record and self.board.call(rank, record[0])
            if call:
                groups.setdefault((call.facts, call.where, call.kind), (call, []))[1].append(rank)
        lines = [self._line(ranks, call) for call, ranks in groups.values()]
        advice = _ADVICE[SEND if is_message else COLLECTIVE]
        self.refuse("\n".join([f"{both} {what}: {wrong}", *lines, advice]), is_hanging=True)

    def _compare_labels(self, peer, mine, theirs):
        root = json.loads(mine.facts).get("root")
        root = root if root is not None and (root == self.rank) != (root == peer) else -1
        pair = Pair(mine.seq, json.loads(mine.label), json.loads(theirs.label), root, (mine, theirs))
        verdict = self.order.compare((mine.channel, mine.kind, peer), pair, mine.kind != COLLECTIVE)
        if not verdict:
            return
        how, earlier = verdict
        what = "make the same calls in different orders" if how == "swapped" else "are out of step: one left out a call"
        lines = [f"{rank_list((self.rank, peer))} {what}. Results since the first of these are wrong:"]
        for one in (earlier, pair):
            mine, theirs = (self._line([r], call) for r, call in zip((self.rank, peer), one.calls))
            lines += [mine, theirs] if self.rank < peer else [theirs, mine]
        self.refuse("\n".join([*lines, _SAME_CALL]), is_hanging=True)

    # end of a cell

    def finish(self, is_ok):
        """At the end of a cell: refuse handles that were dropped without ``wait``; texts of those still open."""
        from dtlab.ranks import calls

        if calls.current is not None:
            calls.current._last = None
        handles = list(self.buffers.handles.values())
        calls_of = lambda some: [c for c in (self.board.call(self.rank, h.index) for h in some) if c]  # noqa: E731
        dropped = calls_of(h for h in handles if h.work() is None)
        if not is_ok or dropped:
            self.buffers.forget()
        if is_ok and dropped and self.on:
            lines = [f"rank {self.rank} dropped a handle without wait(), so nothing says that the call was done:"]
            lines += [self._line([self.rank], call) for call in dropped]
            self.refuse("\n".join(lines), is_hanging=True)
        return list(map(str, calls_of(handles))) if is_ok and self.on else []

    # words

    def _line(self, ranks, call):
        """``rank 0  all_reduce(2 float32, SUM)  cell [3], line 4:  dist.all_reduce(x)``."""
        name, bracket, rest = call_text(call.facts).partition("(")
        name += {SEND: f" to rank {call.peer}", RECV: f" from rank {call.peer}"}.get(call.kind, "")
        frames = json.loads(call.label or "[]")
        place = self._place(*frames[0][:2]) if frames and frames[0][0] else call.where
        return f"  {rank_list(ranks)}  {name}{bracket}{rest}  {place}"

    def _place(self, filename, line):
        """``cell [3], line 4:  dist.all_reduce(x)``."""
        source = linecache.getline(filename, line).strip()[:90]
        return f"{self.label_of(filename)}, line {line}" + (f":  {source}" if source else "")
