"""However the notebook's process ends, after five seconds nothing of its ranks is left."""
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from helpers_for_faults import in_test_all, shared_files

KERNEL = """
import os, sys, time, signal, threading
import dtlab
ranks = dtlab.launch({size})

def busy():
    import subprocess, sys, time
    {busy}

print("PIDS", os.getpid(), ranks._nursery.process.pid, *ranks.pids.values(), flush=True)
timer = threading.Timer({after}, lambda: {end})
timer.daemon = True
timer.start()
try:
    ranks.run(busy)
    {idle}
except BaseException as error:
    print(type(error).__name__)
    raise
"""
BUSY = {
    "idle": "pass",
    "loop": "while True: pass",
    "collective": "dist.all_reduce(torch.ones(1)) if rank else time.sleep(60)",
    "child": "subprocess.Popen(['sleep', '60']); print('started'); time.sleep(60)",
    "flood": "while True: print('x' * 100)",
}
ENDS = {
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "exits": "os._exit(0)",
    "terminated": "os.kill(os.getpid(), signal.SIGTERM)",
    "interrupted": "os.kill(os.getpid(), signal.SIGINT)",
}


def start_kernel(size=3, busy="idle", end="killed", after=0.5, idle="time.sleep(60)", **env):
    code = KERNEL.format(size=size, busy=BUSY[busy], end=ENDS[end], after=after, idle=idle)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                            env={**os.environ, **env}, start_new_session=True)  # fmt: skip


def pids_of(kernel):
    for line in kernel.stdout:
        if line.startswith("PIDS"):
            return [int(word) for word in line.split()[1:]]
    raise AssertionError("the kernel said nothing")


def family(pids):
    """Those processes and all below them, while they live."""
    found = set()
    for pid in pids:
        try:
            found |= {psutil.Process(pid), *psutil.Process(pid).children(recursive=True)}
        except psutil.NoSuchProcess:
            pass
    return found


def ports(processes):
    found = set()
    for process in processes:
        name = "net_connections" if hasattr(process, "net_connections") else "connections"  # psutil 5
        try:
            found |= {c.laddr.port for c in getattr(process, name)("tcp") if c.status == "LISTEN"}
        except psutil.Error:
            pass
    return found


def is_gone(process):
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def assert_nothing_left(kernel, within_s=5):
    """Wait for the kernel's end and assert that all it had is gone soon after."""
    files = shared_files()
    pids = pids_of(kernel)
    time.sleep(0.25)
    processes = family(pids)
    used = ports(processes)
    assert len(processes) >= len(pids)
    for _ in kernel.stdout:  # a flood must not block the kernel
        pass
    kernel.wait(60)
    ended = time.monotonic()
    while not all(map(is_gone, processes)) and time.monotonic() - ended < within_s * 5:
        time.sleep(0.02)
    took = time.monotonic() - ended
    left = [p for p in processes if not is_gone(p)]
    assert left == [], left
    assert not used & {c.laddr.port for c in psutil.net_connections("tcp") if c.status == "LISTEN"}
    assert shared_files() <= files
    return took


@pytest.mark.parametrize("end, busy", [
    ("killed", "child"), ("killed", "collective"), ("exits", "loop"), *(
        pytest.param(end, busy, marks=in_test_all) for end, busy in (
            ("killed", "idle"), ("killed", "loop"), ("killed", "flood"), ("exits", "collective"),
            ("terminated", "child"), ("interrupted", "child")))
])  # fmt: skip
def test_nothing_is_left_after_the_notebook_ends(reactions, end, busy):
    took = assert_nothing_left(start_kernel(busy=busy, end=end))
    reactions[f"notebook {end}, ranks: {busy}"].append(took)


def test_the_end_of_the_program_leaves_nothing():
    assert_nothing_left(start_kernel(idle="time.sleep(0.6)", after=50))


def test_a_killed_zygote_takes_its_ranks_along_and_a_new_launch_works():
    import dtlab

    ranks = dtlab.launch(3)
    processes = family(ranks.pids.values())
    os.kill(ranks._nursery.process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 15
    while not all(map(is_gone, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert all(map(is_gone, processes))
    with pytest.raises(dtlab.ConfigError, match="run the launch cell again"):
        ranks.run(lambda: 1)
    assert dtlab.launch(2).run(lambda: 1) == [1, 1]


def test_a_zygote_killed_during_a_cell():
    import threading

    import dtlab

    ranks = dtlab.launch(2)
    threading.Timer(0.3, os.kill, (ranks._nursery.process.pid, signal.SIGKILL)).start()
    with pytest.raises(dtlab.RankError, match="run the launch cell again"):
        ranks.run(time.sleep, 30)
    assert dtlab.launch(2).run(lambda: 1) == [1, 1]


def test_processes_of_ranks_end_with_them():
    import dtlab

    def start():
        import subprocess

        return subprocess.Popen(["sleep", "60"]).pid

    ranks = dtlab.launch(2)
    children = [psutil.Process(pid) for pid in ranks.run(start)]
    ranks.shutdown()
    deadline = time.monotonic() + 15
    while not all(map(is_gone, children)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert all(map(is_gone, children))


def test_shutdown_twice_and_use_after_it():
    import dtlab

    ranks = dtlab.launch(2)
    ranks.shutdown()
    ranks.shutdown()
    assert dtlab.current_ranks() is None and repr(ranks) == "Ranks(2, cpu, shut down)"
    for use in (lambda: ranks.run(print), lambda: ranks.push(a=1), lambda: ranks.pull("a")):
        with pytest.raises(dtlab.ConfigError, match="run the launch cell again"):
            use()


def test_the_context_manager_ends_them():
    import dtlab

    with dtlab.launch(2) as ranks:
        processes = family(ranks.pids.values())
    time.sleep(0.1)
    assert all(map(is_gone, processes))
