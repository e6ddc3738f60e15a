"""Ranks start whatever the machine around them looks like. Each test is a program of its own."""
import os
import socket
import subprocess
import sys
import time

from helpers_for_faults import in_test_all

CHECK = """
import dtlab
import torch
def total():
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)
    return x.item()
"""
PLAIN = CHECK + """
with dtlab.launch(4) as ranks:
    assert ranks.run(total) == [6.0] * 4
print("fine")
"""


def start(code, *before, **env):
    return subprocess.Popen([*before, sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, env={**os.environ, **env})  # fmt: skip


def outcome(program):
    """``(last line of its output, its stderr)``."""
    out, err = program.communicate(timeout=120)
    assert program.returncode == 0, err[-2000:]
    return out.strip().splitlines()[-1], err


def test_a_listener_on_the_usual_port_and_another_notebook_at_the_same_second():
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", 29500))
            sock.listen()
        except OSError:
            pass  # somebody listens there already, which is as good
        programs = [start(PLAIN), start(PLAIN)]
        assert [outcome(p) for p in programs] == [("fine", "")] * 2


def test_a_host_name_that_nobody_knows_and_a_preset_interface():
    """It needs no ``if __name__ == "__main__"`` either, and no rank runs the program's top level again."""
    unshare = ["unshare", "--uts", "sh", "-c", 'hostname no-such-host.invalid && exec "$@"', "sh"]
    try:
        subprocess.run([*unshare, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        unshare = []  # not permitted here
    out, err = start('print("top")\n' + PLAIN, *unshare, GLOO_SOCKET_IFNAME="utun9").communicate(timeout=120)
    assert out.splitlines() == ["top", "fine"] and len(err.splitlines()) == 1
    assert "GLOO_SOCKET_IFNAME=utun9 is not used" in err


def test_a_notebook_that_has_computed_with_threads_before():
    code = """
import torch
torch.set_num_threads(2)
x = torch.rand(300, 300, requires_grad=True)
(x @ x).sum().backward()
import matplotlib.pyplot
""" + CHECK + """
for _ in range(3):
    ranks = dtlab.launch(3)
    assert ranks.run(total) == [3.0] * 3
    assert ranks.run(lambda: float((torch.ones(300, 300) @ torch.ones(300, 300))[0, 0])) == [300.0] * 3
print("fine")
"""
    assert outcome(start(code)) == ("fine", "")


def test_an_interrupt_meant_for_the_notebook_does_not_reach_the_ranks():
    code = CHECK + """
import os, signal
ranks = dtlab.launch(2)
ranks.push(kept=1)
try:
    os.killpg(0, signal.SIGINT)
    import time; time.sleep(1)
except KeyboardInterrupt:
    pass
assert ranks.pull("kept") == [1, 1] and ranks.run(total) == [1.0, 1.0]
print("fine")
"""
    assert outcome(start(code, "setsid", "--wait")) == ("fine", "")


def test_few_file_descriptors_and_three_hundred_kept_results():
    code = CHECK + """
import os
ranks = dtlab.launch(4)
fds = lambda: len(os.listdir("/proc/self/fd"))
there = lambda: ranks.run(lambda: len(__import__("os").listdir("/proc/self/fd")))
kept, before, before_there = [], fds(), there()
for i in range(300):
    kept += ranks.run(lambda: [torch.ones(100_000 * (k == 0) + 5) for k in range(4)])
after, after_there = fds(), there()
assert abs(after - before) <= 10, (before, after)
assert all(abs(a - b) <= 10 for a, b in zip(before_there, after_there)), (before_there, after_there)
assert all(v[0].sum() == 100_005 for v in kept)
print("fine")
"""
    assert outcome(start(code, "sh", "-c", 'ulimit -n 256; exec "$@"', "sh")) == ("fine", "")


def test_twenty_five_launches_in_a_row_leave_the_descriptors_as_they_were():
    code = CHECK + """
import os, time
fds = lambda: len(os.listdir("/proc/self/fd"))
zygote = lambda: len(os.listdir(f"/proc/{ranks._nursery.process.pid}/fd"))
times = []
for i in range(25):
    started = time.monotonic()
    ranks = dtlab.launch(1 + i % 4)
    times.append(time.monotonic() - started)
    assert len(ranks.run(total)) == 1 + i % 4
    if i == 3:
        before = fds(), zygote()
ranks = dtlab.launch(4)
assert (fds(), zygote()) == before, (before, fds(), zygote())
print(max(times[1:]))
"""
    assert float(outcome(start(code))[0]) < 15


def test_spawn_instead_of_fork_does_the_same():
    code = CHECK + """
import os, time
ranks = dtlab.launch(2)
assert ranks._nursery.method == "spawn"
assert ranks.run(total) == [1.0, 1.0]
ranks.push(x=torch.ones(3)); ranks.run_cell("x += rank", "cell [1]")
assert [v[0].item() for v in ranks.pull("x")] == [1, 2]
def fails():
    if rank: raise ValueError("boom")
    dist.all_reduce(torch.ones(1))
def dies():
    import os
    if rank: os._exit(3)
    dist.all_reduce(torch.ones(1))
def skips():
    if rank: dist.all_reduce(torch.ones(1))
for fault, says in ((fails, "ValueError: boom"), (skips, "never made that call"), (dies, "exit code 3")):
    try:
        ranks.run(fault)
    except dtlab.RankError as error:
        assert says in str(error), error
    else:
        raise AssertionError(fault)
    assert ranks.run(total) == [1.0, 1.0]
pids = list(ranks.pids.values())
ranks.shutdown()
time.sleep(0.2)
assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
print("fine")
"""
    last, err = outcome(start(code, DTLAB_START_METHOD="spawn"))
    assert last == "fine", err


@in_test_all
def test_a_spawned_rank_leaves_nothing_when_its_notebook_is_killed():
    from test_ends import assert_nothing_left, start_kernel

    assert_nothing_left(start_kernel(size=2, busy="child", after=1.5, DTLAB_START_METHOD="spawn"))


@in_test_all
def test_a_program_that_ends_with_an_error_ends_at_once():
    started = time.monotonic()
    program = start(CHECK + "ranks = dtlab.launch(2)\nraise ValueError('mine')")
    _, err = program.communicate(timeout=120)
    assert program.returncode == 1 and err.rstrip().endswith("ValueError: mine")
    assert time.monotonic() - started < 60
