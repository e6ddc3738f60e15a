"""On a rank: what a communication call is about, what is wrong with it by itself, and whether two calls fit."""
import functools
import json
import math
import sys
import traceback
import zlib

import torch

from dtlab.ranks.board import COLLECTIVE, RECV, RECV_ANY, SEND

REDUCE_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
FAMILY = {"all_gather_into_tensor": "all_gather", "all_to_all_single": "all_to_all"}  # gloo runs them alike
_P2P = {"send": SEND, "recv_": RECV, "recv_any_source_": RECV_ANY}
_NAMES = {  # c10d operator -> the name in torch.distributed
    "allreduce_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather_into_tensor",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter_tensor",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all_single",
    "recv_any_source_": "recv",
    "allreduce_coalesced_": "all_reduce_coalesced",
    "allgather_coalesced_": "all_gather_coalesced",
    "allgather_into_tensor_coalesced_": "all_gather_into_tensor_coalesced",
}
_ORDERED = ("allreduce_", "broadcast_", "reduce_", "scatter_", "reduce_scatter_")  # gloo moves bytes in memory order
_ALL_TO_ALL = ("alltoall_", "alltoall_base_")
_OUTPUT_LISTS = ("allgather_", "gather_", "alltoall_")
_NUM_SHAPES = 32  # that the facts of a call hold; of more tensors a checksum of their sizes is compared
_GAPS = (0,)  # the layout of a tensor that does not fill its part of memory


class Operands:
    """How to read the arguments of one c10d operator. ``read`` and ``written`` below are what ``lists`` returns."""

    def __init__(self, op):
        self.name = op._schema.name.split("::")[1]
        self.public, self.kind = _NAMES.get(self.name, self.name.strip("_")), _P2P.get(self.name, COLLECTIVE)
        names = [a.name for a in op._schema.arguments]
        find = lambda start: next((i for i, n in enumerate(names) if n.startswith(start)), None)
        self.group, self.tag = find("process_group"), find("tag")
        self.peer = {SEND: find("dst"), RECV: find("src")}.get(self.kind)
        self.outputs, self.inputs = find("output"), find("input")
        self.tensors = find("tensor") if self.outputs is None and "barrier" not in self.name else None
        self.shown = self.tensors if self.inputs is None else self.inputs  # what a call is described by
        self.reduce, self.root, self.is_async = find("reduce_op"), find("root_rank"), find("async_op")
        self.splits = find("input_split"), find("output_split")

    def lists(self, args, is_root):
        """``(tensors that the call reads, tensors that it writes)``."""
        read = flat(args[self.inputs]) if self.inputs is not None else []
        written = flat(args[self.outputs]) if self.outputs is not None else []
        if self.tensors is not None:
            only_reads = self.name == "send" or (self.name == "broadcast_" and is_root)
            (read if only_reads else written).extend(flat(args[self.tensors]))
        return read, written

    def gives_handle(self, args):
        """Whether the caller gets a handle that it must await."""
        if self.kind != COLLECTIVE:
            return True
        if self.is_async is None:  # versions of torch whose operators do not tell
            return bool(_local("async_op"))
        return self.is_async >= len(args) or bool(args[self.is_async])

    def facts(self, args, read, written, root, n):
        """What the peers' calls are compared with, as JSON."""
        compared = written if self.name == "scatter_" or not read else read
        ins, outs = self.sizes(args, read, written, n)
        shapes = () if ins else tuple([t.shape for t in compared])
        return _facts(
            self.public,
            None if self.reduce is None else reduce_name(args[self.reduce]),
            root,
            compared[0].dtype if compared else "",
            shapes[:_NUM_SHAPES],
            tuple([layout(t) for t in compared]) if self.name in _ORDERED else (),
            ins,
            outs,
            num=len(shapes),
            sizes=_checksum(shapes) if len(shapes) > _NUM_SHAPES else 0,
        )

    def sizes(self, args, read, written, n):
        """Elements sent to and expected from each member, of an all_to_all."""
        if self.name == "alltoall_":
            return tuple([t.numel() for t in read]), tuple([t.numel() for t in written])
        if self.name == "alltoall_base_":
            return tuple([_splits(args[i], t[0], n) for i, t in zip(self.splits, (read, written))])
        return (), ()

    def local_mistake(self, args, read, written, n, me):
        """What is wrong with a call whatever the peers do; empty if nothing is."""
        if any(t.layout != torch.strided for t in (*read, *written)):
            return ""
        if self.name in _OUTPUT_LISTS and (pair := overlapping(written)):
            cure = "Each needs its own: [torch.zeros(2) for _ in range(n)], not [torch.zeros(2)] * n, or slices apart."
            return f"outputs {pair[0]} and {pair[1]} share memory, so one overwrites the other. {cure}"
        if self.name in _ALL_TO_ALL and n > 1 and share_memory(read, written):
            return "its input and its output share memory, so it overwrites what is not sent yet: pass another output."
        if (wrong := self._unordered(read, written)) is not None:
            shape, strides = "x".join(map(str, wrong.shape)), tuple(wrong.stride())
            return (
                f"this tensor is not contiguous (shape {shape}, strides {strides}), and gloo would mix up its "
                f"elements: pass t.contiguous(), and copy the result back with t.copy_(...)."
            )
        ins, outs = self.sizes(args, read, written, n)
        if ins and ins[me] != outs[me]:
            return f"it sends itself {ins[me]} elements and expects {outs[me]}."
        if self.name == "_reduce_scatter_base_" and read[0].numel() != written[0].numel() * n:
            have, want = read[0].numel(), written[0].numel()
            return f"the input has {have} elements, but {n} ranks with {want} elements of output each need {n * want}."
        return ""

    def _unordered(self, read, written):
        """A tensor whose elements gloo would mix up; None if all lie in memory in one order."""
        if self.name == "alltoall_base_":
            return None if written[0].is_contiguous() else written[0]
        if self.name not in _ORDERED:
            return None
        layouts = {layout(t): t for t in read}
        if self.name == "reduce_scatter_" and _GAPS in layouts:
            layouts[()] = layouts.pop(_GAPS)  # gloo makes inputs with gaps contiguous itself
        layouts |= {layout(t): t for t in written}
        if _GAPS in layouts:
            return layouts[_GAPS]
        return next(t for strides, t in layouts.items() if strides) if len(layouts) > 1 else None


def flat(value):
    """The tensors in a value: itself, or those in nested lists and tuples, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for part in value for t in flat(part)] if isinstance(value, (list, tuple)) else []


def _splits(sizes, tensor, n):
    """Elements for each peer."""
    if not sizes:
        return (tensor.numel() // n,) * n
    return tuple([s * math.prod(tensor.shape[1:]) for s in sizes])


def reduce_name(reduce_op):
    """``SUM`` of torch's opaque object; in versions that do not tell, from the frame of distributed_c10d."""
    try:
        return REDUCE_OPS[reduce_op.op()]
    except (AttributeError, RuntimeError, IndexError):
        op = getattr(getattr(_local("opts"), "reduceOp", None), "op", None)
        return None if op is None else str(op).rpartition(".")[2]


def _local(name):
    """A variable of the function in distributed_c10d that is running; None if there is none."""
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if frame.f_code.co_filename.endswith("/distributed_c10d.py"):
            return frame.f_locals.get(name)
    return None


def layout(tensor):
    """Empty if contiguous, the strides of another dense layout, ``_GAPS`` if there are gaps."""
    if tensor.layout != torch.strided or tensor.is_contiguous():
        return ()
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape) if n > 1):
        if stride != expected:
            return _GAPS
        expected *= size
    return tensor.stride()


def overlapping(tensors):
    """Positions of two outputs that use the same bytes; None if there are none."""
    runs = sorted((*_bytes(t), i) for i, t in enumerate(tensors) if t.numel())
    return next(((a[2], b[2]) for a, b in zip(runs, runs[1:]) if b[0] < a[1]), None)


def share_memory(read, written):
    """Whether a tensor that is read uses bytes of one that is written."""
    spans = [[_bytes(t) for t in tensors if t.numel()] for tensors in (read, written)]
    return any(a < d and c < b for a, b in spans[0] for c, d in spans[1])


def _bytes(tensor):
    """First address of a tensor and the one behind it; of one with gaps, only its first element."""
    first = tensor.data_ptr()
    return first, first + (tensor.nbytes if tensor.is_contiguous() else tensor.itemsize)


@functools.lru_cache(1024)
def _checksum(shapes):
    """Of the number of elements of each tensor."""
    return zlib.crc32(str([math.prod(shape) for shape in shapes]).encode())


@functools.lru_cache(4096)
def _facts(public, reduce, root, dtype, shapes, layouts, ins, outs, **more):
    facts = {"op": public, "reduce": reduce, "root": root, "dtype": str(dtype).removeprefix("torch.")}
    return json.dumps(facts | {"shapes": shapes, "layouts": layouts, "in": ins, "out": outs} | more)


def facts_without_tensors(op, **more):
    """Facts of a call that has none but its name and, for ``new_group``, its ranks."""
    return _facts(op, None, None, "", (), (), (), (), **more)


def call_text(facts):
    """``all_reduce(4x3 float32, SUM)``."""
    f = json.loads(facts)
    if "ranks" in f:
        return f"new_group(ranks={f['ranks']})"
    shapes = f["shapes"]
    what = f"{'x'.join(map(str, shapes[0])) or 'scalar' if shapes else ''} {f['dtype']}".strip()
    parts = [what + (f" and {f['num'] - 1} more" if len(shapes) > 1 else ""), f["reduce"]]
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
        if a["ranks"] != b["ranks"]:
            return "the ranks of the new group differ"
        same = a["name"] == b["name"]
        return "" if same else "torch names a local group by the number of groups a rank is in, and that differs"
    if a["in"] and (a["in"][j] != b["out"][i] or b["in"][i] != a["out"][j]):
        return "what one rank sends is not what the other expects"
    for what, words in (("reduce", "reduce operations"), ("root", "roots"), ("dtype", "dtypes")):
        if a[what] != b[what] and None not in (a[what], b[what]):
            return f"the {words} differ"
    counts = [(f.get("num"), f.get("sizes")) for f in (a, b)]  # a barrier has none
    if counts[0] != counts[1] or not all(map(_same_shape, a["shapes"], b["shapes"])):
        return "the shapes differ"
    if a["layouts"] != b["layouts"]:
        return "the memory layouts differ (a transposed tensor on one rank): pass t.contiguous()"
    return ""


def _same_shape(a, b):
    return a == b if len(a) == len(b) else math.prod(a) == math.prod(b)
