"""Who waits for whom, on made-up boards: no processes, no communication."""
import os
import types

import pytest

from dtlab.ranks import board as board_module
from dtlab.ranks import monitor as monitor_module
from dtlab.ranks.board import ANY, COLLECTIVE, RECV, RECV_ANY, SEND, Board, Call, rank_list
from dtlab.ranks.monitor import Look, Monitor, Wait
from dtlab.ranks.run import is_settled


class Group:
    """``n`` ranks on one board; the notebook's own view is ``board``."""

    def __init__(self, n):
        fd = Board.make_file(n)
        self.board, self.ranks = Board(fd, n), [Board(fd, n, r) for r in range(n)]
        os.close(fd)
        self.seqs = {}

    def publish(self, rank, op="all_reduce", kind=COLLECTIVE, peer=ANY, channel=None, tag=0):
        if channel is None:
            ends = (rank, peer) if kind == SEND else (peer, rank)
            channel = hash(op) & 0xFFFF if kind == COLLECTIVE else 1 << 20 | (ends[0] & 0xFF) << 8 | ends[1] & 0xFF
        seq = self.seqs.get((rank, channel, kind), 0)
        self.seqs[rank, channel, kind] = seq + 1
        return self.ranks[rank].publish(channel=channel, seq=seq, kind=kind, peer=peer, tag=tag, op=op,
                                        where=f"cell [1], line {rank + 1}", what="4 float32",
                                        members=range(len(self.ranks)))  # fmt: skip

    def wait(self, rank, *args, **kwargs):
        index = self.publish(rank, *args, **kwargs)
        self.ranks[rank].set_waiting(index)
        return index

    def monitor(self, ranks=None, **kwargs):
        ranks = range(len(self.ranks)) if ranks is None else ranks
        return Monitor(self.board, ranks, {r: os.getpid() for r in ranks}, kwargs.pop("limit_s", 20), **kwargs)

    def stuck(self, ended=(), failed=(), ranks=None):
        """Rank -> the ranks it waits for in vain."""
        monitor = self.monitor(ranks)
        assert monitor.verdict(list(ended), list(failed)) == {}  # never at the first look
        return {r: w.missing for r, w in monitor.verdict(list(ended), list(failed)).items()}


def test_a_call_can_be_read_by_everybody():
    group = Group(3)
    index = group.publish(1, "broadcast")
    for reader in (group.board, *group.ranks):
        call = reader.call(1, index)
        assert str(call) == "broadcast(4 float32) at cell [1], line 2" and call.members == (0, 1, 2)


def test_the_other_kinds_name_their_peer():
    group = Group(3)
    texts = [str(group.board.call(0, group.publish(0, op, kind, peer)))
             for op, kind, peer in (("send", SEND, 2), ("recv", RECV, 1), ("recv", RECV_ANY, ANY))]  # fmt: skip
    ends = [text.split(")")[1].split(" at ")[0] for text in texts]
    assert ends == [" to rank 2", " from rank 1", " from any rank"]


def test_missing_members_of_a_collective():
    group = Group(3)
    index = group.publish(0)
    assert group.board.missing(0, group.board.call(0, index)) == [1, 2]
    group.publish(2)
    assert group.board.missing(0, group.board.call(0, index)) == [1]
    group.publish(1)
    assert group.board.missing(0, group.board.call(0, index)) == []


def test_the_second_call_of_a_channel_meets_the_second_of_its_peers():
    group = Group(2)
    group.publish(0), group.publish(1)
    index = group.publish(0)
    assert group.board.missing(0, group.board.call(0, index)) == [1]


def test_a_send_meets_its_receive_and_any_receive():
    group = Group(3)
    send = group.board.call(0, group.publish(0, "send", SEND, 1))
    assert group.board.missing(0, send) == [1]
    group.publish(1, "recv", RECV, 0)
    assert group.board.missing(0, send) == []
    other = group.board.call(0, group.publish(0, "send", SEND, 2))
    group.publish(2, "recv", RECV_ANY)
    group.board.pump()
    assert group.board.missing(0, other) == []


def test_a_receive_from_anybody_meets_the_first_send():
    group = Group(3)
    receive = group.board.call(1, group.publish(1, "recv", RECV_ANY))
    assert group.board.missing(1, receive) == [0, 2]
    group.publish(2, "send", SEND, 1)
    group.board.pump()
    assert group.board.missing(1, receive) == []


def test_a_receive_from_anybody_leaves_others_their_sends():
    group = Group(3)
    group.publish(2, "send", SEND, 1), group.publish(1, "recv", RECV, 2)
    receive = group.board.call(1, group.publish(1, "recv", RECV_ANY))
    group.board.pump()
    assert group.board.missing(1, receive) == [0, 2]


def test_a_receive_from_anybody_is_stuck_when_nobody_is_left():
    group = Group(3)
    group.wait(1, "recv", RECV_ANY)
    assert group.stuck(ended=[0]) == {}
    assert group.stuck(ended=[0, 2]) == {1: [0, 2]}


def test_a_log_longer_than_the_ring_is_followed(monkeypatch):
    group = Group(2)
    for _ in range(board_module.NUM_RECORDS + 500):
        group.publish(0)
        group.board.pump()
    index = group.publish(0)
    assert group.board.count(0, group.board.call(0, index).channel, COLLECTIVE) == index + 1
    assert group.board.call(0, 0) is None  # overwritten


def test_a_reader_that_was_overrun_gives_up_and_lets_torch_decide():
    group = Group(2)
    for _ in range(board_module.NUM_RECORDS + 500):
        group.publish(0)
    index = group.publish(1)
    assert group.board.missing(1, group.board.call(1, index)) == [] and not is_settled(group.board)


def test_a_full_heap_loses_texts_and_no_calls():
    group = Group(2)
    for i in range(2200):
        group.publish(0, op=f"{i}" * 1500, channel=7)
    group.board.pump()
    assert group.board.count(0, 7, COLLECTIVE) == 2200
    assert group.board.call(0, 2199).op == "?"


def test_poison_reaches_every_rank_and_can_be_cleared():
    group = Group(2)
    assert not group.ranks[1].poisoned
    group.board.poison("stop \N{SNOWMAN}")
    assert group.ranks[1].poisoned and group.ranks[1].poison_text() == "stop \N{SNOWMAN}"
    group.board.clear_poison()
    assert not group.ranks[0].poisoned


def test_a_wait_for_a_running_rank_is_never_stuck():
    group = Group(3)
    group.wait(0), group.wait(1)
    assert group.stuck() == {}


def test_a_wait_for_an_ended_a_failed_or_an_absent_rank_is_stuck():
    group = Group(3)
    group.wait(0), group.wait(1)
    assert group.stuck(ended=[2]) == group.stuck(failed=[2]) == group.stuck(ranks=[0, 1]) == {0: [2], 1: [2]}


def test_a_cycle_is_stuck_and_what_hangs_on_it_too():
    group = Group(4)
    group.wait(0, "recv", RECV, 1), group.wait(1, "recv", RECV, 2), group.wait(2, "recv", RECV, 1)
    assert group.stuck() == {0: [1], 1: [2], 2: [1]}  # rank 3 runs and waits for nobody


def test_a_chain_that_ends_at_a_running_rank_is_not_stuck():
    group = Group(4)
    group.wait(0, "recv", RECV, 1), group.wait(1, "recv", RECV, 2), group.wait(2, "recv", RECV, 3)
    assert group.stuck() == {}
    assert group.stuck(ended=[3]) == {0: [1], 1: [2], 2: [3]}


def test_different_collectives_on_all_ranks_are_a_cycle():
    group = Group(2)
    group.wait(0, "all_reduce"), group.wait(1, "broadcast")
    assert group.stuck() == {0: [1], 1: [0]}


def test_a_verdict_needs_two_equal_looks():
    group = Group(2)
    group.wait(0)
    monitor = group.monitor()
    assert monitor.verdict([1], []) == {}
    group.ranks[0].set_waiting(None)  # it went on meanwhile
    assert monitor.verdict([1], []) == {}
    group.wait(0)
    assert monitor.verdict([1], []) == {} and list(monitor.verdict([1], [])) == [0]


def quiet(monitor, seconds=100):
    for rank in monitor._moved_at:
        monitor._moved_at[rank] -= seconds
    return monitor


def test_an_open_call_of_a_quiet_rank_is_a_wait_inside_cpp():
    group = Group(2)
    group.publish(0)
    assert group.monitor().look([1], []).waits == {}  # it may still compute
    assert quiet(group.monitor()).look([1], []).waits[0].missing == [1]
    assert quiet(group.monitor()).look([], []).waits == {}  # rank 1 may still come
    assert quiet(group.monitor(communicates=lambda rank: True)).look([], []).waits[0].missing == [1]


def test_the_limit_counts_from_the_last_progress_of_anybody():
    group = Group(2)
    group.wait(0)
    assert not group.monitor(limit_s=1).limit_reached([], [])
    monitor = quiet(group.monitor(limit_s=1))
    assert monitor.limit_reached([], [])
    monitor.moved(1)
    assert not monitor.limit_reached([], [])
    assert not quiet(group.monitor(limit_s=None)).limit_reached([], [])


class Clock:
    """Time that passes only where a test says so, and processor seconds of rank 1 that a test hands out."""

    def __init__(self, monkeypatch, monitor):
        self.now, self.used_s, self.monitor = 1000.0, 0.0, monitor
        monkeypatch.setattr(monitor_module, "time", types.SimpleNamespace(monotonic=lambda: self.now))
        monitor._use = lambda rank: (self.used_s if rank == 1 else 0.0, 0)
        monitor._moved_at = dict.fromkeys(monitor._moved_at, self.now)

    def passes(self, seconds, share, looks_every_s=0.25):
        """Rank 1 gets ``share`` of a core. Whether the limit was reached at any look."""
        end, reached = self.now + seconds, False
        while self.now < end:
            self.now += looks_every_s
            self.used_s += share * looks_every_s
            self.monitor.watch_progress([0, 1])
            reached = reached or self.monitor.limit_reached([], [])
        return reached


def one_waits(monkeypatch):
    group = Group(2)
    monitor = group.monitor(limit_s=1.5)
    group.wait(0)
    return Clock(monkeypatch, monitor)


@pytest.mark.parametrize("share", [1.0, 0.08, 0.04, 0.025])
def test_a_rank_that_others_leave_little_of_the_processor_makes_progress(monkeypatch, share):
    assert not one_waits(monkeypatch).passes(20, share)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01])
def test_a_rank_that_uses_next_to_nothing_makes_none(monkeypatch, share):
    assert one_waits(monkeypatch).passes(5, share)


def test_time_in_which_the_notebook_itself_got_no_processor_does_not_count(monkeypatch):
    clock = one_waits(monkeypatch)
    assert not clock.passes(1, share=0)
    assert not clock.passes(6, share=0, looks_every_s=6)  # the machine stood still
    assert clock.passes(2, share=0)


def test_the_limit_needs_somebody_who_waits():
    assert not quiet(Group(2).monitor(limit_s=1)).limit_reached([], [])


def test_open_calls_and_settled_boards():
    group = Group(2)
    assert is_settled(group.board)
    group.publish(0)
    assert not is_settled(group.board) and [w.missing for w in group.monitor().open_calls(0)] == [[1]]
    group.publish(1)
    assert is_settled(group.board) and group.monitor().open_calls(0) == []
    group.publish(0, "recv", RECV, 1)
    assert not is_settled(group.board)


def test_stuck_is_pure_logic():
    call = Call(0, 1, 0, COLLECTIVE, -1, 0, "all_reduce", "cell [1], line 1", "", (0, 1, 2))
    look = Look({0: Wait(call, [1]), 1: Wait(call, [2]), 3: Wait(call, [0, 4])}, running=[2], ended=[4], failed=[])
    assert sorted(look.stuck()) == [3]


@pytest.mark.parametrize("ranks, text", [([0], "rank 0"), ([3, 1, 2], "ranks 1-3"), ([0, 2, 3, 7], "ranks 0, 2-3, 7")])
def test_lists_of_ranks(ranks, text):
    assert rank_list(ranks) == text
