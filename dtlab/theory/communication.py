"""What one rank sends in a collective, in bytes, modelled on the ring."""
from dtlab.errors import ConfigError

_ENDINGS = ("_coalesced", "_object_list", "_object", "_into_tensor", "_tensor", "_single", "_base")
OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter", "all_to_all",
       "barrier")


def base_op(op):
    """The collective's plain name.

    Example:
        >>> [base_op(op) for op in ("all_gather_into_tensor_coalesced", "reduce_scatter_tensor", "isend")]
        ['all_gather', 'reduce_scatter', 'send']
    """
    op = str(op).lstrip("_")
    for ending in _ENDINGS:
        op = op.removesuffix(ending)
    return {"isend": "send", "irecv": "recv", "alltoall": "all_to_all", "allreduce": "all_reduce"}.get(op, op)


def wire_bytes(op, tensor_bytes, size, *, index=None, root=0, chunks=None):
    """Bytes that one rank sends.

    all_reduce: 2 (n-1)/n S; all_gather, reduce_scatter, all_to_all: (n-1)/n S; broadcast, reduce: S, but 0 for the
    last rank of the chain (broadcast) and the root (reduce); gather: the own chunk, 0 at the root; scatter: (n-1)/n S
    at the root; send: S; recv, barrier: 0. A group of one sends nothing.

    Args:
        op: name in torch.distributed, ``"all_gather_into_tensor"`` as well as ``"all_gather"``.
        tensor_bytes: S, the full buffer: what all_gather ends with, what reduce_scatter starts with.
        size: n, ranks of the group (count, >= 1).
        index: this rank's place in the group, 0 .. n-1; needed for chunks and where a root counts.
        root: the root's place in the group.
        chunks: bytes of each rank's part where they differ (all_to_all: what this rank sends to each): exact then.

    Raises:
        ConfigError: an op that is not known, or chunks that do not fit.

    Example:
        >>> wire_bytes("all_reduce", 16, 4), wire_bytes("all_gather", 16, 4), wire_bytes("all_reduce", 16, 1)
        (24.0, 12.0, 0)
        >>> [wire_bytes("all_gather", 16, 3, index=i, chunks=[6, 6, 4]) for i in range(3)]
        [10, 12, 10]

    Source: ring algorithms as in nccl-tests' PERFORMANCE.md; a rank of the ring hands on to its successor all but the
    chunk that the successor starts with (all_gather) or that it keeps itself (reduce_scatter).
    """
    name = base_op(op)
    if name in ("send", "recv"):
        return tensor_bytes if name == "send" else 0
    if name not in OPS:
        raise ConfigError(f"bytes sent by {op!r} are not known; known are {', '.join(OPS)}, send, recv")
    if size <= 1 or name == "barrier":
        return 0
    if chunks is not None and (len(chunks) != size or sum(chunks) != tensor_bytes or index is None):
        raise ConfigError(f"{op}: chunks ({list(chunks)}) must be one per rank ({size}) with the sum tensor_bytes "
                          f"({tensor_bytes}), and index ({index}) given")
    part = tensor_bytes / size
    own, following = (part, part) if chunks is None else (chunks[index], chunks[(index + 1) % size])
    if name in ("broadcast", "reduce"):
        quiet = (root - 1) % size if name == "broadcast" else root
        return 0 if index == quiet else tensor_bytes
    if name in ("gather", "scatter"):
        return (own if name == "gather" else 0) if index != root else (tensor_bytes - own if name == "scatter" else 0)
    return {"all_reduce": 2 * tensor_bytes - own - following, "all_gather": tensor_bytes - following}.get(
        name, tensor_bytes - own)
