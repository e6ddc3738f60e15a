"""On a rank: the guard against mistakes that gloo answers with wrong numbers, an abort or an endless wait.

Every call is published before torch gets it, with its facts (reduce operation, root, dtype, shape) and its place in the
reader's code. A collective cannot finish before its last member joins, so the last to arrive sees a mismatch and
refuses; a second comparison when a rank waits closes the gap in which two publish at once. Whoever sees a mistake
writes the text to the board, and every rank stops with it. No call waits longer than it would without the guard.

Caught: collectives that differ in kind, reduce operation, root, dtype, shape or memory layout; the same named calls in
another order; strided tensors where gloo mixes up their elements; outputs that share memory; messages of the wrong size
or type; buffers touched before ``wait``; handles dropped without it, or awaited twice; groups made with different
ranks. Calls that a rank leaves out and circles of waits are found by the monitor in the notebook.

Not caught:
    - Swapped calls whose labels say nothing: one line for tensors without names (``for p in params``), messages of
      equal shape without telling names, calls in two separate ifs, calls made by torch itself (two DDP modules).
    - A call left out in a loop, if another one fits: it is reported when a rank ends or waits in vain.
    - The size of a message that is received from any source.
    - Touching a buffer in flight through numpy, C code or a thread of the reader's, or later in the backward pass in
      whose hook the call was made; a strided buffer in flight; inside code that torch.compile has compiled before, or
      under another dispatch mode (``FlopCounterMode``).
    - Handles that code of torch or of an installed library holds.
    - A group rank given for a global rank, if a member of the group has that global rank.
    - Values: a wrong divisor, a missing gradient, different seeds.
    - Calls of a rank that has made very many different ones (4 MiB of names, lines and shapes): its texts are full,
      and its new ones are no longer compared.
What follows an early ``return`` is not seen as a branch of its if: named calls that cross on purpose in roles written
so are taken for swapped ones (``dtlab.same_call`` says what is meant).

Calls from threads of the reader's are compared too.
"""
import json
import linecache
import time

from dtlab.ranks.board import COLLECTIVE, RECV, SEND, rank_list
from dtlab.ranks.guard_buffers import Buffers
from dtlab.ranks.guard_facts import call_text, difference
from dtlab.ranks.guard_order import Order, Pair

_PARTNER = {SEND: RECV, RECV: SEND}
_NUM_LATE = 4096  # calls of which some peer was not there yet; older ones are compared by that peer
_NUM_FINE = 1 << 16
_ALIKE = "Every rank of a group makes the same calls in the same order, with fitting arguments."
_MESSAGE = "A message and its receive buffer need the same number of elements and the same dtype."
_SAME_CALL = 'If they are meant to meet, make both inside `with dtlab.same_call("a name"):`.'
_ORDER = {  # what one rank does, unlike all others; what two do; how the sentence ends
    "swapped": ("makes the same calls in another order than", "make the same calls in different orders", ""),
    "shifted": ("is out of step with", "are out of step", ": one left out a call"),
}
_MOMENT_S = 0.3  # for late ranks to come to the call that does not fit


def _one_differs(sides, found, members, does):
    """``rank 1 does ... ranks 0, 2-3`` if all are known and one differs from all others; else empty."""
    if len(sides) != 2 or len(found) != len(members) or len(found) < 3 or min(map(len, sides)) > 1:
        return ""
    one, others = sorted(sides, key=len)
    return f"{rank_list(one)} {does} {rank_list(others)}"


def _lesson(call):
    """What it means that nobody waits for a call."""
    if call.kind == COLLECTIVE:
        return "Nothing says when its result is there: keep the handle, and call wait() on it."
    what = "The message may never leave" if call.kind == SEND else "Nothing says when the message is there"
    return f"{what}: keep the handle, and call wait() on it."


class Guard:
    """The guard of one rank, for the life of a process group. ``on`` in guarded cells."""

    def __init__(self, board, label_of):
        self.board, self.rank, self.label_of = board, board.rank, label_of
        self.on = False
        self.order, self.buffers = Order(), Buffers(self._touched)
        self.dropped = []  # (index, has a later call been awaited) of handles that were thrown away since the last look
        self._late = {}  # index -> (call, peers that had not published theirs)
        self._fine = set()  # pairs of calls that were compared and fit

    def enter(self, on):
        """At the start of a cell."""
        self.on = on
        if not on:
            self.forget()

    def forget(self):
        """Stop watching what is in flight."""
        self.buffers.forget()
        self.dropped.clear()

    # refusing

    def refuse(self, text, *, is_hanging):
        """Stop all ranks with this text. ``is_hanging``: calls are left in gloo that will not complete."""
        from dtlab.ranks import calls

        if calls.current is not None:  # else: a process that a rank has forked
            if self.board.poisoned:
                calls.current.stop()  # another rank was first
            self.board.verdict(text, is_hanging)
            raise calls.Stopped(text)

    def examine(self, operands, name, args, members, site):
        """Facts of a call, and the tensors it reads and writes; refuses one that is wrong whatever the peers do."""
        root = None if operands.root is None else members[args[operands.root]]
        read, written = operands.lists(args, root == self.rank)
        facts = operands.facts(name, args, read, written, root, len(members))
        wrong = operands.local_mistake(args, read, written, len(members), members.index(self.rank))
        if wrong:
            call = f"  rank {self.rank}  {call_text(facts)}  {self._place(*site.where)}"
            self.refuse(f"rank {self.rank}: {wrong}\n{call}", is_hanging=False)
        for tensor in read:
            self.buffers.touch(tensor, False, site)
        for tensor in written:
            self.buffers.touch(tensor, True, site)
        return facts, read, written

    def _touched(self, index, how, site):
        call = self.board.call(self.rank, index)
        if call is None:
            return  # so many calls ago that its text is gone
        state = "may still be on its way" if call.kind == SEND else "may not be filled yet"
        lines = [
            f"rank {self.rank} {how} a buffer that {state}: nobody has called wait() on:",
            self._line([self.rank], call),
            f"  {how} it at {self._place(*site.where)}",
        ]
        self.refuse("\n".join(lines), is_hanging=True)

    # comparing

    def compare(self, mine, wanted):
        """Compare a call that was just published with those of the peers that are there."""
        late = [peer for peer in wanted if peer != self.rank and not self._compare_with(peer, mine)]
        if late:
            self._late[mine.index] = mine, late
            if len(self._late) > _NUM_LATE:
                self._late.pop(next(iter(self._late)))

    def catch_up(self, index):
        """The peers that were late have published: compare now."""
        mine, late = self._late.pop(index, (None, ()))
        for peer in late:
            self._compare_with(peer, mine)

    def _compare_with(self, peer, mine):
        """True if the peer's call is there, and fits."""
        record = self.board.matching(peer, mine.channel, mine.seq, _PARTNER.get(mine.kind, mine.kind))
        if record is None:
            return False
        key = peer, mine.channel, record[-2:], mine.label, mine.facts
        if key in self._fine:
            return True
        theirs = self.board.call(peer, record[0])
        if theirs is None or not theirs.facts:
            return True
        wrong = difference(mine.facts, theirs.facts, mine.members.index(self.rank), mine.members.index(peer))
        if wrong:
            self._mismatch(wrong, peer, mine)
        if mine.label == theirs.label or not theirs.label:
            if len(self._fine) > _NUM_FINE:
                self._fine.clear()
            self._fine.add(key)
        else:
            self._compare_labels(peer, mine, theirs)
        return True

    def _mismatch(self, wrong, peer, mine):
        if mine.kind != COLLECTIVE:
            pair = {self.rank: mine, peer: self.board.partner(mine)}
            head, found, last = f"{rank_list(pair)} do not agree on a message: {wrong}", pair, _MESSAGE
        else:
            found, last = self._everybody(mine), _ALIKE
            sides = self._sides(mine.members, found)
            both = [side[0] for side in sides[:2]]
            wrong = difference(*(found[r].facts for r in both), *map(mine.members.index, both))
            head = _one_differs(sides, found, mine.members, "makes another call than")
            head = f"{head or rank_list(both) + ' do not make the same call'}: {wrong}"
        groups = {}
        for rank, call in sorted(found.items()):
            groups.setdefault((call.facts, call.where, call.kind), (call, []))[1].append(rank)
        lines = [self._line(ranks, call) for call, ranks in groups.values()]
        self.refuse("\n".join([head, *lines, last]), is_hanging=True)

    def _everybody(self, mine):
        """Rank -> its call at this position of a channel. Late ranks get a moment, so that all can be named."""
        from dtlab.ranks import calls

        deadline = time.monotonic() + _MOMENT_S
        while True:
            records = {r: self.board.matching(r, mine.channel, mine.seq, COLLECTIVE) for r in mine.members}
            if all(records.values()) or time.monotonic() > deadline or self.board.poisoned:
                break
            time.sleep(1e-3)
        if self.board.poisoned and calls.current is not None:
            calls.current.stop()
        found = {r: self.board.call(r, record[0]) for r, record in records.items() if record}
        return {r: call for r, call in found.items() if call is not None and call.facts}

    @staticmethod
    def _sides(members, found):
        """Ranks whose calls fit each other, side by side."""
        sides = []
        fit = lambda a, b: not difference(found[a].facts, found[b].facts, members.index(a), members.index(b))
        for rank in sorted(found):
            if side := next((s for s in sides if fit(s[0], rank)), None):
                side.append(rank)
            else:
                sides.append([rank])
        return sides

    def _compare_labels(self, peer, mine, theirs):
        root = json.loads(mine.facts).get("root")
        root = root if root is not None and (root == self.rank) != (root == peer) else -1
        pair = Pair(mine.seq, json.loads(mine.label), json.loads(theirs.label), root, (mine, theirs))
        verdict = self.order.compare((mine.channel, mine.kind, peer), pair, mine.kind != COLLECTIVE)
        if not verdict or (mine.kind != COLLECTIVE and not self._in_one_go(verdict[1], pair)):
            return
        how, earlier = verdict
        self.refuse(self._order_text(how, peer, earlier, pair), is_hanging=True)

    def _order_text(self, how, peer, earlier, later):
        """Who makes calls in another order, and the lines of both positions."""
        members, calls = later.calls[0].members, (earlier.calls, later.calls)
        found = [{self.rank: mine, peer: theirs} for mine, theirs in calls]
        one, both, rest = _ORDER[how]
        head = f"{rank_list((self.rank, peer))} {both}"
        if later.calls[0].kind == COLLECTIVE:
            everybody = [self._everybody(mine) for mine, _ in calls]
            labels = {}
            for rank in sorted(set(everybody[0]) & set(everybody[1])):
                labels.setdefault(tuple(calls[rank].label for calls in everybody), []).append(rank)
            if differs := _one_differs(list(labels.values()), everybody[1], members, one):
                head, found = differs, everybody
        lines = [f"{head}{rest}. Results since the first of these are wrong:"]
        for position in found:
            groups = {}
            for rank, call in sorted(position.items()):
                groups.setdefault((call.facts, call.label, call.kind), (call, []))[1].append(rank)
            lines += [self._line(ranks, call) for call, ranks in groups.values()]
        return "\n".join([*lines, _SAME_CALL])

    def _in_one_go(self, earlier, later):
        """Whether both ranks made two messages one after the other; an answer between them means buffers take turns."""
        for rank, first, last in zip((self.rank, later.calls[0].peer), earlier.calls, later.calls):
            between = (self.board.call(rank, i) for i in range(first.index + 1, last.index))
            if any(call is None or call.kind == _PARTNER[last.kind] for call in between):
                return False
        return True

    # end of a cell

    def refuse_dropped(self):
        """Refuse handles that were thrown away without ``wait``; that of a send may be dropped after an answer."""
        if not self.dropped or not self.on:
            return
        dropped, self.dropped = self.dropped, []
        dropped = [(self.board.call(self.rank, i), later) for i, later in dropped if i in self.buffers.handles]
        lost = [call for call, later in dropped if call is not None and not (later and self.board.is_taken(call))]
        for call in (call for call, _ in dropped if call is not None and call not in lost):
            self.buffers.close(call.index)
        self._refuse_unawaited(lost)

    def refuse_open(self):
        """Refuse handles that nobody has awaited yet, though they are kept and their messages may be through."""
        if self.on:
            calls = (self.board.call(self.rank, index) for index in self.buffers.handles)
            self._refuse_unawaited([call for call in calls if call is not None])

    def refuse_second_wait(self, index):
        """Refuse ``wait`` on the handle of a message that was awaited before: in gloo that waits for another one."""
        import torch.distributed as dist

        call = self.board.call(self.rank, index) if self.on and dist.get_backend() == dist.Backend.GLOO else None
        if call is not None:
            head = f"rank {self.rank} waits a second time for one message, and gloo then waits for another, for ever. "
            self.refuse(f"{head}Call wait() once on:\n{self._line([self.rank], call)}", is_hanging=False)

    def _refuse_unawaited(self, lost):
        if lost:
            ops = " and ".join(sorted({call.op for call in lost}))
            lines = [f"rank {self.rank}: handle of {ops} never awaited. {_lesson(lost[0])}"]
            lines += [self._line([self.rank], call) for call in lost]
            self.refuse("\n".join(lines), is_hanging=True)

    def finish(self, is_ok):
        """At the end of a cell: refuse handles that were dropped without ``wait``; texts of those still open."""
        from dtlab.ranks import calls

        if calls.current is not None:
            calls.current._last = None
        if not is_ok:
            self.forget()
        self.refuse_dropped()
        handles = [self.board.call(self.rank, index) for index in self.buffers.handles] if self.on else []
        return [str(call) for call in handles if call is not None]  # None: its text is gone, after many calls

    # words

    def _line(self, ranks, call):
        """``rank 0  all_reduce(2 float32, SUM)  cell [3], line 4:  dist.all_reduce(x)``."""
        if not call.facts:
            return f"  {rank_list(ranks)}  {call}"  # the rank's texts are full
        frames = json.loads(call.label or "[]")
        place = self._place(*frames[0][:2]) if frames and frames[0][0] else call.where
        return f"  {rank_list(ranks)}  {call_text(call.facts)}{call.ends}  {place}"

    def _place(self, filename, line):
        """``cell [3], line 4:  dist.all_reduce(x)``."""
        source = linecache.getline(filename, line).strip()[:90]
        return f"{self.label_of(filename)}, line {line}" + (f":  {source}" if source else "")
