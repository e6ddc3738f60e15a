"""The board: shared memory in which every rank publishes its communication calls and says where it waits.

Each rank writes only its own part; peers and the notebook read it. A rank's part says where it waits and holds an
append-only log of calls (a ring of fixed-size records; texts stand in a heap beside it). The poison text, written by
the notebook, ends every wait.

Channels: a collective counts calls on its ``group``; a send or receive counts on ``(group, source, destination,
tag)``, each direction by itself. Call ``k`` of a channel on one rank meets call ``k`` of that channel on its peers.
"""
import mmap
import os
import struct
import zlib
from dataclasses import dataclass

from dtlab.ranks import wire

COLLECTIVE, SEND, RECV, RECV_ANY = range(4)  # kind of a call
ANY = -1  # the peer of a receive from any source

_STATE = struct.Struct("<QQQ")  # calls published, call it waits in + 1 (0: none), is no other thread at work
_RECORD = struct.Struct("<QQIiiB3xIIIIII")  # index, channel, seq, peer, tag, kind, texts of: op, ... label
_RECORD_BYTES = 64  # the record and, in the last four bytes, its checksum
NUM_RECORDS = 1 << 14
HEAP_BYTES = 1 << 22
POISON_BYTES = 1 << 16
_SHOWN_CHARS = 2000  # of a text that is only shown; the others are kept whole or not at all
RECENT = 1 << 10  # calls of a channel that can still be looked up by their number
_VERDICT_AT, _VERDICT_BYTES = 64, 4000  # text of a verdict, in the part of the rank that gave it
_HEAP_AT = 4096 + NUM_RECORDS * _RECORD_BYTES  # texts, in the part of a rank
_PART_BYTES = _HEAP_AT + HEAP_BYTES


@dataclass(frozen=True)
class Call:
    """One published call. ``members`` are the global ranks it needs, ``peer`` the other rank of a send or receive.

    ``facts`` and ``label`` are the guard's; see guard.py and guard_order.py.
    """

    index: int
    channel: int
    seq: int
    kind: int
    peer: int
    tag: int
    op: str
    where: str
    what: str
    members: tuple[int, ...]
    facts: str = ""
    label: str = ""

    def __str__(self):
        """``send(4 float32) to rank 1 at cell [3], line 2``."""
        ends = {SEND: f" to rank {self.peer}", RECV: f" from rank {self.peer}", RECV_ANY: " from any rank"}
        return self.op + (f"({self.what})" if self.what else "") + f"{ends.get(self.kind, '')} at {self.where}"


def board_bytes(world_size):
    """Size of a board's file; pages nobody writes cost nothing."""
    return POISON_BYTES + world_size * _PART_BYTES


class Board:
    """A mapping of the board's file. ``rank`` is the writer's own rank, None in the notebook."""

    def __init__(self, fd, world_size, rank=None):
        self.memory = mmap.mmap(fd, board_bytes(world_size))
        self.world_size, self.rank = world_size, rank
        self.readers = [_Reader(self.memory, self._base(r)) for r in range(world_size)]
        self._texts = {}  # text -> its place in this rank's heap
        self._heap_used = 4

    @staticmethod
    def make_file(world_size):
        """File descriptor of a new, empty board."""
        fd = wire.anonymous_file("dtlab-board")
        os.ftruncate(fd, board_bytes(world_size))
        return fd

    def _base(self, rank):
        return POISON_BYTES + rank * _PART_BYTES

    # state

    def state(self, rank):
        """``(calls published, index of the call it waits in or None, whether it has no other thread)`` of a rank."""
        head, waiting, alone = _STATE.unpack_from(self.memory, self._base(rank))
        return head, (waiting - 1 if waiting else None), bool(alone)

    def set_waiting(self, index, alone=True):
        """Say that this rank waits in call ``index``; None when it goes on."""
        waiting = 0 if index is None else index + 1
        struct.pack_into("<QQ", self.memory, self._base(self.rank) + 8, waiting, alone)

    # poison

    @property
    def poisoned(self):
        return self.memory[0] != 0

    def poison_text(self):
        return self.given_verdict()[0] if self.memory[0] == 2 else _text_at(self.memory, 4)

    def poison(self, text):
        """End every wait on the board with this text."""
        _put_text(self.memory, 4, text.encode()[: POISON_BYTES - 8])
        self.memory[0] = 1

    def clear_poison(self):
        self.memory[0] = 0

    def verdict(self, text, is_hanging):
        """A rank has seen a mistake: end every wait. ``is_hanging``: calls are left that will not complete."""
        _put_text(self.memory, self._base(self.rank) + _VERDICT_AT, text.encode()[:_VERDICT_BYTES])
        struct.pack_into("<HB", self.memory, 2, self.rank, int(is_hanging))
        self.memory[0] = 2

    def given_verdict(self):
        """``(text, is_hanging, rank)`` of the mistake that a rank has seen; None if none has."""
        if self.memory[0] != 2:
            return None
        rank, is_hanging = struct.unpack_from("<HB", self.memory, 2)
        return _text_at(self.memory, self._base(rank) + _VERDICT_AT), bool(is_hanging), rank

    # publishing

    def publish(self, channel, seq, kind, peer, tag, op, where, what, members, facts="", label=""):
        """Append a call to this rank's log; its index. The fields are those of ``Call``."""
        base = self._base(self.rank)
        (index,) = struct.unpack_from("<Q", self.memory, base)
        texts = [t[:_SHOWN_CHARS] for t in (op, where, what)] + [",".join(map(str, members)), facts, label]
        record = _RECORD.pack(index, channel, seq, peer, tag, kind, *map(self._text, texts))
        place = base + 4096 + (index % NUM_RECORDS) * _RECORD_BYTES
        self.memory[place : place + len(record)] = record
        struct.pack_into("<I", self.memory, place + _RECORD_BYTES - 4, zlib.crc32(record))
        struct.pack_into("<Q", self.memory, base, index + 1)
        return index

    def _text(self, text):
        place = self._texts.get(text)
        if place is None:
            data = text.encode(errors="replace")
            place = self._heap_used
            if place + 4 + len(data) > HEAP_BYTES:
                return 0  # the heap is full: the call is still counted, its text is lost
            _put_text(self.memory, self._base(self.rank) + _HEAP_AT + place, data)
            self._texts[text] = place
            self._heap_used += 4 + len(data)
        return place

    # reading

    def count(self, rank, channel, kind):
        """Calls of this kind that ``rank`` has published on ``channel``; None when its log ran away."""
        reader = self.readers[rank]
        reader.pump()
        return None if reader.lost else reader.counts.get((channel, kind), 0)

    def call(self, rank, index):
        """The call with this index in a rank's log, or None when the ring has overwritten it."""
        return self.readers[rank].read(index)

    def last_call(self, rank):
        """The call that a rank has published last; None if it has made none."""
        reader = self.readers[rank]
        reader.pump()
        return reader.read(max(reader.last.values())) if reader.last else None

    def pump(self):
        """Read what the ranks have published since the last time."""
        for reader in self.readers:
            reader.pump()

    def matching(self, rank, channel, seq, kind):
        """Fields of a rank's call by its number on a channel; None if it is not published, or too long ago."""
        reader = self.readers[rank]
        reader.pump()
        fields = reader.recent.get((channel, kind, seq % RECENT))
        return fields if fields and fields[2] == seq else None

    def missing(self, rank, call):
        """Ranks whose matching call is not published yet, for a call of ``rank``."""
        if call.kind == COLLECTIVE:
            return [m for m in call.members if m != rank and not self._has(m, call.channel, COLLECTIVE, call.seq)]
        if call.kind == RECV_ANY:
            sent = sum(self._for_anybody(m, rank, call.tag) for m in call.members if m != rank)
            return [] if sent > call.seq else [m for m in call.members if m != rank]
        other = RECV if call.kind == SEND else SEND
        if self._has(call.peer, call.channel, other, call.seq):
            return []
        if call.kind == SEND and self.readers[call.peer].receives_any:
            return []  # it may be taken by a receive from any source
        return [call.peer]

    def _for_anybody(self, source, rank, tag):
        """Messages of ``source`` that are not for receives of ``rank`` that name their source."""
        sent = self.readers[source].sends_to.get((rank, tag), 0)
        return max(0, sent - self.readers[rank].receives.get((source, tag), 0))

    def _has(self, rank, channel, kind, seq):
        count = self.count(rank, channel, kind)
        return count is None or count > seq


class _Reader:
    """Follows one rank's log and keeps its counts."""

    def __init__(self, memory, base):
        self.memory, self.base = memory, base  # not the board: a cycle would keep its descriptor open
        self.next = 0
        self.lost = False
        self.counts = {}  # (channel, kind) -> calls
        self.last = {}  # (channel, kind) -> index of the last call
        self.sends_to = {}  # (destination, tag) -> sends
        self.receives = {}  # (source, tag) -> receives that name it
        self.receives_any = 0
        self.recent = {}  # (channel, kind, seq % RECENT) -> fields of the call
        self._read_texts = {0: "?"}  # place in the heap -> text

    def pump(self):
        head = struct.unpack_from("<Q", self.memory, self.base)[0]
        while self.next < head and not self.lost:
            fields = self._fields(self.next)
            if fields is None:
                self.lost = head - self.next > NUM_RECORDS
                return
            _, channel, seq, peer, tag, kind, *_ = fields
            self.recent[channel, kind, seq % RECENT] = fields
            self.counts[channel, kind] = self.counts.get((channel, kind), 0) + 1
            self.last[channel, kind] = self.next
            if kind == SEND:
                self.sends_to[peer, tag] = self.sends_to.get((peer, tag), 0) + 1
            elif kind == RECV:
                self.receives[peer, tag] = self.receives.get((peer, tag), 0) + 1
            elif kind == RECV_ANY:
                self.receives_any += 1
            self.next += 1

    def _fields(self, index):
        place = self.base + 4096 + (index % NUM_RECORDS) * _RECORD_BYTES
        record = self.memory[place : place + _RECORD.size]
        (checksum,) = struct.unpack_from("<I", self.memory, place + _RECORD_BYTES - 4)
        fields = _RECORD.unpack(record)
        return fields if zlib.crc32(record) == checksum and fields[0] == index else None

    def read(self, index):
        fields = self._fields(index)
        if fields is None:
            return None
        _, channel, seq, peer, tag, kind, *texts = fields
        op, where, what, members, facts, label = (self._text(t) for t in texts)
        members = tuple(int(m) for m in members.split(",") if m.isdigit())
        facts, label = (t if place else "" for t, place in zip((facts, label), texts[4:]))  # lost when the heap is full
        return Call(index, channel, seq, kind, peer, tag, op, where, what, members, facts, label)

    def _text(self, place):
        text = self._read_texts.get(place)
        if text is None:
            text = self._read_texts[place] = _text_at(self.memory, self.base + _HEAP_AT + place)
        return text


def _put_text(memory, at, data):
    memory[at + 4 : at + 4 + len(data)] = data
    struct.pack_into("<I", memory, at, len(data))


def _text_at(memory, at):
    (size,) = struct.unpack_from("<I", memory, at)
    return memory[at + 4 : at + 4 + size].decode(errors="replace")


def rank_list(ranks):
    """``rank 2``, ``ranks 0-3`` or ``ranks 0, 2``.

    Example:
        >>> rank_list([0, 1, 2, 3]), rank_list([2]), rank_list([0, 2, 3])
        ('ranks 0-3', 'rank 2', 'ranks 0, 2-3')
    """
    ranks = sorted(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return "ranks " + ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
