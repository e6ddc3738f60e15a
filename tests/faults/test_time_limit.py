"""The time limit counts only while nobody makes progress; slow work is shown as running, never as dead."""
# ruff: noqa: F821
import re

import pytest
from helpers_for_faults import assert_works, live

from dtlab import ConfigError, HangError


def test_the_limit_names_who_waits_and_where_the_missing_rank_is(fails):
    def one_sleeps():
        import time

        if rank == 1:
            time.sleep(60)
        dist.all_reduce(torch.ones(4))

    error = fails(live(3), "time limit of 1 s", one_sleeps, timeout=1, promise_s=2, error=HangError)
    text = str(error)
    assert "no rank made progress for 1 s while ranks 0, 2 waited in all_reduce" in text
    assert re.search(r"rank 1 is at .*test_time_limit.py, line \d+", text)
    assert "timeout=3 on launch or run" in text and error.missing == (1,)


def test_the_limit_sees_a_wait_inside_cpp(fails):
    def one_sleeps():
        import time

        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        loss = model(torch.ones(2, 4)).sum()
        if rank == 1:
            time.sleep(60)
        loss.backward()

    fails(live(2), "time limit of 1 s, DDP backward", one_sleeps, timeout=1, promise_s=3, error=HangError)


def test_the_limit_ends_calls_that_all_have_made_in_another_order(fails):
    def swapped():
        first, second = (dist.all_reduce, dist.broadcast) if rank else (dist.broadcast, dist.all_reduce)
        works = [call(torch.ones(3), async_op=True, **({"src": 0} if call is dist.broadcast else {}))
                 for call in (first, second)]  # fmt: skip
        [work.wait() for work in works]

    asked = {"timeout": 1, "guard": False}  # the guard would see it at once
    error = fails(live(2), "time limit of 1 s, swapped calls", swapped, **asked, promise_s=3, error=HangError)
    assert "Is their order the same on every rank" in str(error)


def lost_message():
    """``(function)``: rank 0 throws the handle of a send away before rank 1 receives; gloo's thread runs in circles."""

    def and_ends():
        if rank == 0:
            dist.isend(torch.ones(3), 1)
        dist.all_reduce(torch.ones(1))
        if rank == 1:
            dist.recv(torch.zeros(3), 0)

    def and_sleeps():
        import time

        if rank == 0:
            dist.isend(torch.ones(3), 1)
        dist.all_reduce(torch.ones(1))
        if rank == 1:
            dist.irecv(torch.zeros(3), 0).wait()
        time.sleep(60)

    def and_goes_on():
        if rank == 0:
            dist.isend(torch.ones(3), 1)
        dist.all_reduce(torch.ones(1))
        if rank == 1:
            work = dist.irecv(torch.zeros(3), 0)
            dist.send(torch.ones(1), 0)  # what is lost stops the pair, in both directions
            work.wait()
        elif rank == 0:
            dist.recv(torch.zeros(1), 1)

    return [and_ends, and_sleeps, and_goes_on]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("function", lost_message(), ids=lambda f: f.__name__)
def test_a_message_that_is_lost_is_reported_with_its_handle(fails, function, size):
    asked = {"timeout": 1, "guard": False}  # the guard would see it at once
    error = fails(live(size), "time limit of 1 s, lost message", function, **asked, promise_s=2, error=HangError)
    text = str(error)
    assert re.search(r"no rank made progress for 1 s while ranks? [01-]+ waited in ", text)
    assert re.search(r"rank 0 threw away the handle of isend\(3 float32\) at test_time_limit.py, line \d+: ", text)
    assert "timeout=" not in text


def test_a_lost_message_is_reported_where_threads_have_no_names(fails, monkeypatch):
    from dtlab.ranks import monitor

    monkeypatch.setattr(monitor, "_event_loop_s", lambda pid: 0.0)
    asked = {"timeout": 1, "guard": False}
    fails(live(2), "time limit of 1 s, lost message", lost_message()[0], **asked, promise_s=2, error=HangError)


def test_a_transfer_that_takes_longer_than_the_limit_is_progress():
    def large():
        x = torch.full((3 * 10**7,), rank + 1.0)
        for _ in range(3):
            dist.all_reduce(x)
        dist.broadcast(x, 0)
        return x[-1].item()

    assert live(2).run(large, timeout=0.3) == [12.0, 12.0]


def test_a_rank_that_sleeps_and_then_joins_is_waited_for():
    def sleeps_first():
        import time

        if rank == 0:
            time.sleep(1.5)
        dist.barrier()
        return rank

    assert live(3).run(sleeps_first, timeout=5) == [0, 1, 2]


def busy():
    """``(function)``: rank 1 works for longer than the limit of 0.8 s while the others wait for it, then joins."""

    def computes():
        import time

        end = time.monotonic() + 1.8
        while rank == 1 and time.monotonic() < end:
            torch.ones(200, 200) @ torch.ones(200, 200)
        dist.barrier()

    def loops_in_python():
        import time

        end = time.monotonic() + 1.8
        while rank == 1 and time.monotonic() < end:
            pass
        dist.barrier()

    def talks():
        import time

        for i in range(6):
            if rank == 1:
                print(i)
                time.sleep(0.3)
        dist.barrier()

    def imports():
        if rank == 1:
            import slow_to_import  # noqa: F401
        dist.barrier()

    def reads_a_subprocess():
        import subprocess

        if rank == 1:
            subprocess.run(["sh", "-c", "i=0; while [ $i -lt 4 ]; do sleep 0.5; echo $i; i=$((i+1)); done"], check=True)
        dist.barrier()

    def waits_for_a_busy_child():
        import subprocess
        import sys

        code = "import time; end = time.time() + 1.8\nwhile time.time() < end: pass"
        if rank == 1:
            subprocess.run([sys.executable, "-c", code], check=True)
        dist.barrier()

    return [computes, loops_in_python, talks, imports, reads_a_subprocess, waits_for_a_busy_child]


@pytest.mark.parametrize("function", busy(), ids=lambda f: f.__name__)
def test_a_busy_rank_is_never_reported(function, tmp_path, monkeypatch):
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(1.8)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    ranks = live(2)
    ranks.run(function, timeout=0.8)
    assert_works(ranks)


def test_a_pair_that_talks_keeps_a_waiting_third_alive():
    def two_talk():
        import time

        if rank < 2:
            for _ in range(7):
                time.sleep(0.25)
                if rank == 0:
                    dist.send(torch.ones(1), dst=1)
                else:
                    dist.recv(torch.ones(1), src=0)
        dist.barrier()

    live(3).run(two_talk, timeout=0.8)


def test_no_limit_is_reported_while_nobody_waits():
    def all_sleep():
        import time

        time.sleep(1.6)

    live(2).run(all_sleep, timeout=0.5)


def test_an_async_call_is_no_wait_while_its_owner_computes():
    def overlaps():
        import time

        work = dist.all_reduce(torch.ones(2), async_op=True) if rank == 0 else None
        time.sleep(0.7 * (rank + 1))
        work = work or dist.all_reduce(torch.ones(2), async_op=True)
        work.wait()

    live(2).run(overlaps, timeout=5)


def test_receive_before_the_send_of_a_slow_partner():
    def pair():
        import time

        x = torch.zeros(2)
        if rank == 0:
            work = dist.irecv(x, src=1)
            time.sleep(0.6)
            work.wait()
        else:
            time.sleep(1.2)
            dist.send(torch.ones(2), dst=0)
        return x.sum().item()

    assert live(2).run(pair) == [2, 0]


@pytest.mark.parametrize("timeout", [0, -1, "5", True, float("nan")])
def test_a_limit_that_cannot_be_meant_is_refused(timeout):
    with pytest.raises(ConfigError, match="seconds above 0, or None"):
        live(2).run(lambda: 1, timeout=timeout)


def test_the_limit_of_launch_counts_for_every_cell(fails):
    import dtlab

    def one_sleeps():
        import time

        time.sleep(60) if rank else dist.barrier()

    ranks = dtlab.launch(2, timeout=0.7)
    assert "no rank made progress for 0.7 s" in str(fails(ranks, "time limit of 0.7 s", one_sleeps, error=HangError))
    ranks.shutdown()


def test_a_wait_in_the_store_counts_for_the_limit(fails):
    def asks_for_a_key():
        if rank == 0:
            dist.distributed_c10d._get_default_store().get("nobody sets this")
        else:
            dist.all_reduce(torch.ones(1))

    error = fails(live(2), "time limit of 0.7 s, in the store", asks_for_a_key, timeout=0.7, error=HangError)
    assert "rank 1 waited in all_reduce" in str(error)
