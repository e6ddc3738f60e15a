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
