"""Random faults in a row, at random moments of random communication: every next cell works and nothing is left."""
# ruff: noqa: F821
import os
import random
import signal
import threading
import time

import psutil
import pytest
from helpers_for_faults import assert_works, live, open_fds, shared_files, stray_processes

from dtlab import RankError

SEED = int(os.environ.get("DTLAB_STORM_SEED", "2"))
WITHIN_S = 15
FAULTS = ["raise", "exit", "kill", "segfault", "sys_exit", "skip", "extra", "other", "swallow", "import_error", "ddp",
          "ddp_kill", "async_left", "cycle", "sleep", "unpicklable", "new_group", "child"]  # fmt: skip
OUTSIDE = ["interrupt", "interrupt_twice", "kill_from_outside", "kill_two", "kill_between"]


def cell_with(fault, guilty, seed):
    """A cell in which all ranks communicate for a while and then rank ``guilty`` does something wrong."""
    import random
    import time

    together = random.Random(seed)
    for _ in range(together.randrange(8)):
        kind, x = together.randrange(4), torch.ones(together.choice([1, 1000, 100_000]))
        if kind == 0:
            dist.all_reduce(x)
        elif kind == 1:
            works = [dist.all_reduce(torch.ones(5), async_op=True) for _ in range(3)]
            [work.wait() for work in works]
        elif kind == 2 and rank < 2:
            dist.send(x, 1 - rank) if rank == 0 else dist.recv(x, 0)
        else:
            torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))(torch.ones(2, 3)).sum().backward()
    time.sleep(random.random() * 0.05)
    if fault.startswith("ddp"):
        loss = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))(torch.ones(2, 3)).sum()
        if rank != guilty:
            loss.backward()
    if fault == "cycle":
        dist.recv(torch.ones(1), (rank + 1) % world_size)
    if fault == "async_left" and rank != guilty:
        return dist.all_reduce(torch.ones(1), async_op=True) and None
    if rank == guilty:
        return misbehave(fault)
    if fault not in ("extra", "new_group", "unpicklable", "async_left"):
        dist.all_reduce(torch.ones(3))


def misbehave(fault):
    import ctypes
    import os
    import subprocess
    import time

    if fault in ("raise", "ddp"):
        raise ValueError("boom")
    if fault == "exit":
        os._exit(3)
    if fault in ("kill", "ddp_kill"):
        os.kill(os.getpid(), 9)
    if fault == "segfault":
        ctypes.string_at(0)
    if fault == "sys_exit":
        raise SystemExit(1)
    if fault == "import_error":
        import no_such_module_anywhere  # noqa: F401
    if fault in ("extra", "other"):
        dist.barrier()
    if fault == "new_group":
        dist.new_group([rank])
    if fault == "unpicklable":
        return (i for i in range(3))
    while fault in ("swallow", "sleep", "child"):
        if fault == "child":
            subprocess.Popen(["sleep", "60"])
        try:
            time.sleep(60)
        except BaseException:
            if fault != "swallow":
                raise


cell_with.__module__ = misbehave.__module__ = "__main__"  # as in a notebook


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def strike(ranks, fault, seed, dice):
    """Run one cell with one fault and check that it fails in time."""
    guilty = dice.randrange(ranks.size)
    started, delay_s = time.monotonic(), dice.random() * 0.4
    if fault == "kill_between":
        os.kill(ranks.pids[guilty], signal.SIGKILL)
        while not ranks._channels[guilty].has_ended():
            time.sleep(0.001)
        return time.sleep(delay_s / 4)
    timers, pids = [], []
    if fault.startswith("interrupt"):
        times = [delay_s, delay_s + 0.1] if fault.endswith("twice") else [delay_s]
        timers = [threading.Timer(t, os.kill, (os.getpid(), signal.SIGINT)) for t in times]
    elif fault.startswith("kill_"):
        pids = list(ranks.pids.values())[: 2 if fault.endswith("two") else 1]
        timers = [threading.Timer(delay_s, os.kill, (pid, signal.SIGKILL)) for pid in pids]
    for timer in timers:
        timer.start()
    ours = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises((RankError, KeyboardInterrupt)):
            ranks.run(cell_with, fault if fault in FAULTS else "swallow", guilty, seed, timeout=0.5)
        signal.signal(signal.SIGINT, lambda *_: None)
    finally:
        for timer in timers:
            timer.join()
        while any(is_alive(pid) for pid in pids):  # the signal may have come when the cell was over
            time.sleep(0.001)
        signal.signal(signal.SIGINT, ours)
    assert time.monotonic() - started < WITHIN_S


@pytest.mark.parametrize("num_faults", [12, pytest.param(200, marks=pytest.mark.long)])
def test_a_storm_of_faults(num_faults, capsys, reactions):
    dice = random.Random(SEED)
    files, fds = shared_files(), None
    faults = [dice.choice(FAULTS + OUTSIDE) for _ in range(num_faults)]
    ranks = live(3)
    for i, fault in enumerate(faults):
        if i % 10 == 9:
            ranks = live(dice.choice([2, 3, 4, 8]))
        started = time.monotonic()
        try:
            strike(ranks, fault, dice.random(), dice)
            reactions["storm"].append(time.monotonic() - started)
            assert_works(ranks)
            assert stray_processes(ranks) == []
        except BaseException as error:
            raise AssertionError(f"fault {i} of seed {SEED}, {fault} on {ranks.size} ranks: {error!r}") from error
        per_rank = open_fds() - 3 * ranks.size
        fds = per_rank if fds is None else fds
        assert per_rank <= fds + 10, (i, fault)
    there = ranks.run(lambda: len(__import__("os").listdir("/proc/self/fd")))
    assert max(there) < 60, there
    assert shared_files() <= files
