"""An interrupt gives control back, whatever the ranks do; variables are kept where possible and said where not."""
# ruff: noqa: F821
import os
import signal
import threading

import pytest
from helpers_for_faults import assert_works, live

SIZES = [2, 4]


def gentle():
    """Work that a stop can end; the rank and its variables stay."""

    def hung_in_a_collective():
        if rank:
            dist.all_reduce(torch.ones(2))
        else:
            import time

            time.sleep(60)

    def hung_in_ddp_backward():
        import time

        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        loss = model(torch.ones(2, 4)).sum()
        while rank == 0:
            time.sleep(0.01)
        loss.backward()

    def sleeps():
        import time

        time.sleep(60)

    def runs_a_python_loop():
        while True:
            pass

    def prints_a_flood():
        while True:
            print("x" * 300)

    def writes_a_flood_in_pieces():
        import sys

        while True:
            sys.stdout.write("y")
            sys.stderr.write("z\n")

    def computes():
        while True:
            torch.ones(300, 300) @ torch.ones(300, 300)

    def catches_exceptions():
        import time

        while True:
            try:
                time.sleep(60)
            except Exception:
                pass

    def communicates_without_end():
        while True:
            dist.all_reduce(torch.ones(1000))

    return [v for v in list(locals().values())]


def stubborn():
    """Work that nothing ends but the end of its process; the loss of its variables is said."""

    def swallows_everything():
        import time

        while True:
            try:
                time.sleep(60)
            except BaseException:
                pass

    def waits_in_c():
        import ctypes

        ctypes.PyDLL(None).sleep(60)  # holds the GIL

    return [swallows_everything, waits_in_c]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("function", gentle(), ids=lambda f: f.__name__)
def test_an_interrupt_keeps_variables(interrupted, size, function):
    ranks = live(size)
    ranks.push(kept=7)
    interrupted(ranks, f"interrupt: {function.__name__}", function)
    assert ranks.pull("kept") == [7] * size


@pytest.mark.parametrize("function", stubborn(), ids=lambda f: f.__name__)
def test_an_interrupt_ends_stubborn_code_and_says_what_is_lost(interrupted, function):
    error = interrupted(live(2), f"interrupt: {function.__name__}", function)
    assert "ranks 0-1 are new and have no variables" in str(error)


def test_an_interrupt_inside_an_import_leaves_no_half_module(interrupted, tmp_path, monkeypatch):
    (tmp_path / "slow_module.py").write_text(
        "import os, time\nslow = not os.path.exists(__file__ + '.fast')\ntime.sleep(60 * slow)\nlast = 2\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def imports():
        import slow_module

        return slow_module.last

    ranks = live(2)
    interrupted(ranks, "interrupt: in an import", imports)
    (tmp_path / "slow_module.py.fast").touch()
    assert ranks.run(imports) == [2, 2]


def test_many_interrupts_in_a_row_end_it_at_once(interrupted):
    def swallows_everything():
        import time

        while True:
            try:
                time.sleep(60)
            except BaseException:
                pass

    interrupted(live(3), "interrupt: pressed four times", swallows_everything, times=4)


def test_an_interrupt_of_one_rank_only(interrupted):
    def one_sleeps():
        import time

        if rank == 1:
            time.sleep(60)
        return rank

    ranks = live(3)
    ranks.push(kept=1)
    assert "new" not in str(interrupted(ranks, "interrupt: one rank is left", one_sleeps))
    assert ranks.pull("kept") == [1, 1, 1]


@pytest.mark.parametrize("after_s", [0.001, 0.003, 0.01, 0.02, 0.05])
def test_an_interrupt_at_any_moment_of_a_short_cell(after_s):
    ranks = live(2)
    for _ in range(6):
        timer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            ranks.run(lambda: dist.barrier())
            timer.join()
        except KeyboardInterrupt:
            pass
        finally:
            timer.join()
        assert_works(ranks)


def test_an_interrupt_of_launch_leaves_nothing(interrupted):
    import dtlab

    for after_s in (0.0, 0.02, 0.06, 0.12):
        timer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            dtlab.launch(4)
            timer.join()
        except KeyboardInterrupt:
            pass
        finally:
            timer.join()
        assert_works(dtlab.launch(3))


def test_an_interrupt_stops_what_the_ranks_had_started(interrupted):
    def starts_a_child():
        import subprocess
        import time

        subprocess.Popen(["sleep", "60"])
        while True:
            try:
                time.sleep(60)
            except BaseException:
                pass

    interrupted(live(2), "interrupt: with child processes", starts_a_child)


def test_an_interrupted_pull_keeps_variables():
    ranks = live(2)
    ranks.run_cell(
        "class Slow:\n    def __reduce__(self):\n        import time; time.sleep(60)\nslow, kept = Slow(), 3", "cell"
    )
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        ranks.pull("slow")
    timer.join()
    assert ranks.pull("kept") == [3, 3]
    assert_works(ranks)
