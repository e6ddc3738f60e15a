"""Live ranks shared by the fault tests, and what must be true after every fault."""
import os
import signal
import threading
import time
import types
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from helpers_for_faults import assert_works, open_fds, shared_files, stray_processes

import dtlab

REACTIONS = defaultdict(list)  # fault -> seconds until the notebook had control back
SLACK = 5  # deadlines are asserted at five times the figure that is promised
PROMISE_S = 3


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.faults)


def pytest_terminal_summary(terminalreporter):
    """Reaction times are printed, never gated beyond the promise."""
    for fault, times in sorted(REACTIONS.items()):
        times = sorted(times)
        line = f"{fault:44} {len(times):3} times, median {times[len(times) // 2]:5.2f} s, most {times[-1]:5.2f} s"
        terminalreporter.write_line(line)


@pytest.fixture(scope="session", autouse=True)
def _end():
    yield
    if dtlab.current_ranks():
        dtlab.current_ranks().shutdown()


@pytest.fixture
def reactions():
    return REACTIONS


@pytest.fixture
def timed():
    """``timed(fault, action, promise_s)`` runs an action within its promise and notes how long it took."""

    def run(fault, action, promise_s=PROMISE_S):
        started = time.monotonic()
        try:
            return action()
        finally:
            took = time.monotonic() - started
            REACTIONS[fault].append(took)
            assert took < promise_s * SLACK, f"{fault}: {took:.1f} s"

    return run


@pytest.fixture
def fails(timed):
    """``fails(ranks, fault, function, ...)``: the error of a cell that must fail, in time, leaving nothing behind."""

    def run(ranks, fault, function, *args, promise_s=PROMISE_S, error=dtlab.RankError, **kwargs):
        fds, files = open_fds(), shared_files()
        with pytest.raises(error) as caught:
            timed(fault, lambda: ranks.run(function, *args, **kwargs), promise_s)
        assert_works(ranks)
        caught.value.__traceback__ = None  # it would hold the cell, and with it a descriptor
        assert open_fds() <= fds + 1
        assert shared_files() <= files
        assert stray_processes(ranks) == []
        return caught.value

    return run


@pytest.fixture
def interrupted(timed):
    """``interrupted(ranks, fault, function)``: interrupt a running cell after a while; the error it ends with."""

    def run(ranks, fault, function, *args, after_s=0.4, times=1, promise_s=PROMISE_S):
        interrupts = [threading.Timer(after_s + 0.2 * i, os.kill, (os.getpid(), signal.SIGINT)) for i in range(times)]
        end = lambda: [os.kill(pid, signal.SIGKILL) for pid in ranks.pids.values()]
        deadline = threading.Timer(after_s + promise_s * SLACK, end)  # else an interrupt that is lost hangs for good
        for timer in [*interrupts, deadline]:
            timer.start()
        started = time.monotonic()
        try:
            with pytest.raises(KeyboardInterrupt) as caught:
                timed(fault, lambda: ranks.run(function, *args), promise_s + after_s)
        finally:
            deadline.cancel()
        REACTIONS[fault][-1] = time.monotonic() - started - after_s
        ours = signal.signal(signal.SIGINT, lambda *_: None)  # the rest of them meets no cell
        for timer in interrupts:
            timer.join()
        signal.signal(signal.SIGINT, ours)
        assert_works(ranks)
        assert stray_processes(ranks) == []
        caught.value.__traceback__ = None
        return caught.value

    return run


@pytest.fixture
def cell():
    """``cell(code)``: run code as a notebook cell does, in a ``__main__`` of its own; returns its namespace."""
    module = types.ModuleType("__main__")
    module.__dict__.update(torch=torch)

    def run(code):
        exec(compile(code, "<cell>", "exec"), module.__dict__)
        return module.__dict__

    return run
