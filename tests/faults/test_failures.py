"""One rank fails, ends, dies, or calls what the others do not: said at once, by cause, and the next cell works.

Functions are defined inside functions, so that they travel by value as those of a notebook do; rank, world_size, dist
and torch in them are the rank's own.
"""
# ruff: noqa: F821
import re

import pytest
from helpers_for_faults import live

from dtlab import ConfigError, HangError, RankError

CASES = [(2, 1), (3, 0), (4, 2), (8, 7)]  # (ranks, guilty rank)
on_every_size = pytest.mark.parametrize("size, guilty", CASES)


def deaths():
    """``(name, function, what the error says)``: rank ``guilty`` fails while the others wait for it."""

    def raises(guilty):
        if rank == guilty:
            raise ValueError("boom")
        dist.all_reduce(torch.ones(2))

    def exits(guilty):
        import os

        if rank == guilty:
            os._exit(3)
        dist.all_reduce(torch.ones(2))

    def is_killed(guilty):
        import os

        if rank == guilty:
            os.kill(os.getpid(), 9)
        dist.broadcast(torch.ones(2), src=guilty)

    def leaves_by_sys_exit(guilty):
        if rank == guilty:
            raise SystemExit(3)
        dist.barrier()

    def crashes_in_c(guilty):
        import ctypes

        if rank == guilty:
            ctypes.string_at(0)
        dist.all_gather_object([None] * world_size, "x")

    return [
        (raises, "rank {g} of {n} failed: ValueError: boom\n.*line"),
        (exits, "rank {g} of {n} died: its process ended with exit code 3"),
        (is_killed, "rank {g} of {n} died: signal 9 .*memory"),
        (leaves_by_sys_exit, "rank {g} of {n} failed: SystemExit: 3"),
        (crashes_in_c, "rank {g} of {n} died: signal 11"),
    ]


@on_every_size
@pytest.mark.parametrize("function, says", deaths(), ids=lambda v: getattr(v, "__name__", None) or "")
def test_one_rank_fails_while_the_others_wait(fails, size, guilty, function, says):
    error = fails(live(size), function.__name__, function, guilty)
    text = str(error)
    assert re.search(says.format(g=guilty, n=size), text, re.S), text
    others = sorted(set(range(size)) - {guilty})
    assert error.rank == guilty and sorted(error.stopped) == others
    assert f"stopped because rank {guilty} failed" in text
    assert "gloo" not in text.lower() and "closed by peer" not in text


def waits_in_c():
    """The others wait inside C++, in the backward pass of DDP, where no Python code can be stopped."""

    def raises_during_ddp_backward(guilty, end):
        import os

        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        loss = model(torch.ones(2, 4)).sum()
        if rank == guilty:
            if end == "raise":
                raise ValueError("boom")
            os._exit(3) if end == "exit" else os.kill(os.getpid(), 9)
        loss.backward()

    return raises_during_ddp_backward


@on_every_size
@pytest.mark.parametrize("end", ["raise", "exit", "kill"])
def test_one_rank_fails_while_the_others_wait_in_ddp(fails, size, guilty, end):
    error = fails(live(size), f"{end} while others are in DDP backward", waits_in_c(), guilty, end)
    assert error.rank == guilty and not isinstance(error, HangError)
    assert error.cause == ("ValueError" if end == "raise" else "died")
    assert "closed by peer" not in str(error)


def mismatches():
    """``(function, what the error says)``: the ranks' calls do not fit."""

    def skips_a_collective(guilty):
        if rank != guilty:
            dist.all_reduce(torch.ones(2, 3))

    def skips_an_async_collective(guilty):
        if rank != guilty:
            dist.all_reduce(torch.ones(2, 3), async_op=True)

    def makes_an_extra_collective(guilty):
        dist.all_reduce(torch.ones(2))
        if rank == guilty:
            dist.broadcast(torch.ones(2), src=guilty)

    def calls_another_collective(guilty):
        dist.barrier() if rank == guilty else dist.all_reduce(torch.ones(2))

    def runs_one_batch_more(guilty):
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        for _ in range(3 if rank == guilty else 2):
            model(torch.ones(2, 4)).sum().backward()

    def builds_ddp_alone(guilty):
        if rank == guilty:
            torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))

    def builds_ddp_alone_and_others_go_on(guilty):
        if rank == guilty:
            torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        dist.all_reduce(torch.ones(2))

    def makes_a_group_without_the_others(guilty):
        if rank == guilty:
            dist.new_group([guilty])

    def makes_a_local_group_alone(guilty):
        if rank == guilty:
            dist.new_group([guilty, (guilty + 1) % world_size], use_local_synchronization=True)

    def skips_a_monitored_barrier(guilty):
        if rank != guilty:
            dist.monitored_barrier()

    def receives_from_anybody_in_vain(guilty):
        if rank == guilty:
            dist.recv(torch.zeros(1))

    return [
        (makes_a_local_group_alone, "rank {g} waits in new_group; .*never made that call"),
        (skips_a_monitored_barrier, "in monitored_barrier; rank {g} never made that call"),
        (receives_from_anybody_in_vain, "rank {g} waits in recv; .*never called send"),
        (skips_a_collective, "in all_reduce; rank {g} never made that call.*2x3 float32"),
        (skips_an_async_collective, "started all_reduce; rank {g} never made that call"),
        (makes_an_extra_collective, "rank {g} waits in broadcast; .*never made that call"),
        (calls_another_collective, "wait for each other"),
        (runs_one_batch_more, "rank {g}"),
        (builds_ddp_alone, "rank {g} waits in .*never made that call"),
        (builds_ddp_alone_and_others_go_on, "wait for each other"),
        (makes_a_group_without_the_others, "rank {g} waits in new_group; .*never made that call"),
    ]


@on_every_size
@pytest.mark.parametrize("function, says", mismatches(), ids=lambda v: getattr(v, "__name__", None) or "")
def test_calls_that_do_not_fit_are_told_at_once(fails, size, guilty, function, says):
    error = fails(live(size), function.__name__, function, guilty, error=HangError, guard=False)
    assert re.search(says.format(g=guilty), str(error), re.S), str(error)
    assert "line" in str(error)
    if function.__name__.startswith("skips"):
        assert error.missing == (guilty,)


def cycles():
    """Everybody sends, or everybody receives, before the partner does the other thing."""

    def send_send():
        if rank < 2:
            dist.send(torch.ones(2), dst=1 - rank)
            dist.recv(torch.ones(2), src=1 - rank)

    def recv_recv():
        if rank < 2:
            dist.recv(torch.ones(2), src=1 - rank)
            dist.send(torch.ones(2), dst=1 - rank)

    def ring_of_sends():
        dist.send(torch.ones(2), dst=(rank + 1) % world_size)
        dist.recv(torch.ones(2), src=(rank - 1) % world_size)

    return [send_send, recv_recv, ring_of_sends]


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("function", cycles(), ids=lambda f: f.__name__)
def test_a_cycle_of_waits_is_drawn(fails, size, function):
    error = fails(live(size), function.__name__, function, error=HangError)
    text = str(error)
    assert "wait for each other: 0 -> 1 -> " in text, text
    if function.__name__ == "ring_of_sends":
        assert " -> ".join(map(str, [*range(size), 0])) in text and sorted(error.waiting) == list(range(size))
    else:
        assert sorted(error.waiting) == [0, 1]


def test_the_first_of_two_errors_is_the_cause(fails):
    def both(guilty):
        import time

        time.sleep(0.1 * (rank != guilty))
        raise ValueError("first") if rank == guilty else KeyError("later")

    error = fails(live(4), "two errors", both, 2)
    assert error.rank == 2 and "rank 2 of 4 failed: ValueError: first" in str(error)
    assert "failed too: KeyError" in str(error)


def test_the_same_error_on_all_ranks_is_told_once(fails):
    def all_fail():
        raise ValueError("the same")

    assert str(fails(live(4), "all fail", all_fail)).startswith("ranks 0-3 of 4 failed: ValueError: the same\n")


def test_variables_of_surviving_ranks_are_kept_and_the_loss_is_said(fails):
    ranks = live(3)
    ranks.push(kept="yes")

    def dies():
        import os

        if rank == 1:
            os._exit(0)
        dist.barrier()

    error = fails(ranks, "variables after a death", dies)
    assert "rank 1 is new and has no variables; ranks 0, 2 kept theirs" in str(error)
    assert ranks.pull("kept", ranks=[0, 2]) == ["yes", "yes"]
    with pytest.raises(RankError, match="rank 1 of 3 failed: .*no variable 'kept'"):
        ranks.pull("kept")


def test_a_rank_that_dies_between_cells_is_replaced(capsys):
    import os

    ranks = live(3)
    os.kill(ranks.pids[2], 9)
    import time

    time.sleep(0.3)
    assert ranks.run(lambda: rank) == [0, 1, 2]
    assert "rank 2 had ended since the last cell (signal 9" in capsys.readouterr().err


def test_a_rank_that_dies_after_its_part_is_replaced():
    def leave_late():
        import os
        import threading

        if rank == 1:
            threading.Timer(0.2, os._exit, (5,)).start()

    ranks = live(3)
    ranks.run(leave_late)
    import time

    time.sleep(0.5)
    assert ranks.run(lambda: rank) == [0, 1, 2]


def test_a_swallowed_error_of_one_rank_still_ends_the_wait(fails):
    def swallows():
        try:
            if rank == 0:
                raise ValueError("boom")
        except ValueError:
            pass
        if rank != 0:
            dist.barrier()

    assert "rank 0 has finished its cell" in str(fails(live(3), "a swallowed error", swallows, error=HangError))


def test_what_a_missing_rank_did_last_is_told(fails):
    def one_too_many():
        for _ in range(2 if rank == 0 else 1):
            dist.all_reduce(torch.ones(1))

    text = str(fails(live(3), "one call too many", one_too_many, error=HangError))
    assert "rank 1 has finished its cell; its last call was all_reduce(1 float32)" in text


@pytest.mark.parametrize("leave", ["program", "fork"])
def test_a_dead_rank_is_noticed_although_it_left_a_process_behind(fails, leave):
    def leaves_a_process(leave):
        import os
        import time

        if rank == 1:
            if leave == "program":
                os.system("setsid sleep 20 &")
            elif os.fork() == 0:
                os.setsid()
                time.sleep(20)
                os._exit(0)
            os._exit(3)
        dist.all_reduce(torch.ones(1))

    error = fails(live(3), f"dies, leaves a {leave} behind", leaves_a_process, leave)
    assert "rank 1 of 3 died" in str(error)


def test_a_stopped_rank_names_the_readers_line(fails):
    def waits_for_a_program():
        import subprocess

        if rank == 0:
            raise ValueError("boom")
        subprocess.run(["sleep", "20"])

    error = fails(live(2), "waits for a program", waits_for_a_program)
    assert re.search(r"rank 1: stopped because rank 0 failed, at test_failures.py, line \d+", str(error))


def test_an_exception_without_a_text_is_told(fails):
    def raises_it():
        class Mute(Exception):
            def __str__(self):
                raise ValueError

        if rank == 1:
            raise Mute

    assert "rank 1 of 2 failed: Mute: (its text cannot be shown" in str(fails(live(2), "mute", raises_it))


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_whose_other_thread_sends_later_is_not_hung(size):
    def receives_while_a_thread_sends():
        import threading
        import time

        def sends():
            time.sleep(0.8)
            dist.send(torch.ones(1), (rank + 1) % world_size, tag=1)

        mine, thread = torch.zeros(1), threading.Thread(target=sends)
        thread.start()
        dist.recv(mine, (rank - 1) % world_size, tag=1)
        thread.join()
        return mine.item()

    assert live(size).run(receives_while_a_thread_sends) == [1.0] * size


def test_receives_from_anybody_beside_one_that_names_its_source():
    def receives():
        if rank == 1:
            first, second = torch.zeros(1), torch.zeros(1)
            named = dist.irecv(second, src=0)
            anybody = dist.irecv(first)
            anybody.wait()
            named.wait()
            return first.item(), second.item()
        import time

        time.sleep(0.5 * (rank == 0))
        dist.send(torch.full((1,), float(rank)), 1)

    assert live(3).run(receives)[1] in [(2.0, 0.0), (0.0, 2.0)]


def test_a_cell_that_ends_the_group_is_told_and_the_next_works(fails):
    def ends_it():
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()

    def begins_it_again():
        dist.init_process_group("gloo")

    ranks = live(2)
    assert "leave destroy_process_group() out" in str(fails(ranks, "destroy_process_group", ends_it))
    assert "in a group already: leave this line out" in str(fails(ranks, "init_process_group", begins_it_again))


def test_the_ranks_own_names_are_put_back(capsys):
    ranks = live(2)
    ranks.run_cell("for rank in range(7): pass\ndist = 5", "cell")
    assert ranks.run(lambda: (rank, dist.get_rank())) == [(0, 0), (1, 1)]
    assert "rank, dist: the ranks' own names, put back" in "".join(capsys.readouterr())
    with pytest.raises(ConfigError, match="my_rank"):
        ranks.push(rank=5)
    assert ranks.run(lambda: list(dtlab.progress([1, 2]))) == [[1, 2]] * 2
