"""Engines as processes: started, asked in turn, ended; none outlives the benchmark."""
import collections
import contextlib
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid

from benchmarks.drivers import work

ROOT = pathlib.Path(__file__).resolve().parents[1]
NUM_RANKS = 4
ANSWER_WITHIN_S = 180
_DRIVERS = {  # engine -> program and arguments
    "dtlab": ["on_dtlab.py", str(NUM_RANKS)],
    "ipyparallel": ["on_ipyparallel.py", str(NUM_RANKS)],
    "torch.multiprocessing.spawn": ["on_spawn.py", str(NUM_RANKS)],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}", "on_torchrun.py"],
}
_AFTER_COLD_START = {  # what a fresh driver is asked, in this order
    "dtlab": ["first_ddp", "pss"],
    "ipyparallel": ["pss_before_ddp", "first_ddp", "pss", "pss_all"],
    "torchrun": ["first_ddp"],
}


class Driver:
    """One engine's notebook side: a program that answers commands. The constructor waits for its first result."""

    def __init__(self, engine, mark):
        self.engine, self.mark = engine, f"{mark}-{engine}"
        self._log = tempfile.TemporaryFile("w+")
        paths = [str(ROOT), str(ROOT / "benchmarks" / "drivers"), os.environ.get("PYTHONPATH", "")]
        environ = {
            work.MARK: self.mark,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
            "OMP_NUM_THREADS": "1",  # one thread for each rank, in all engines
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        started = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, *_DRIVERS[engine]],
            cwd=ROOT / "benchmarks" / "drivers",
            env={**os.environ, **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,  # Ctrl-C is answered by the benchmark alone
        )
        self._lines = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self._answer()
        except BaseException:
            self.close()
            raise
        self.cold_start_s = time.perf_counter() - started

    def _read(self):
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _answer(self):
        try:
            line = self._lines.get(timeout=ANSWER_WITHIN_S)
        except queue.Empty:
            raise RuntimeError(f"{self.engine} did not answer within {ANSWER_WITHIN_S} s") from None
        if line is None:
            self.process.wait(10)
            self._log.seek(0)
            said = self._log.read().strip().splitlines()
            raise RuntimeError(f"{self.engine} ended: {said[-1] if said else 'it said nothing'}")
        return json.loads(line)["value"]

    def ask(self, command, *numbers):
        """Run one command of the driver; its answer."""
        self.process.stdin.write(" ".join(map(str, (command, *numbers))) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self):
        """End it: its input ends, then what is left is killed."""
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        kill_marked(self.mark)
        self._log.close()


def kill_marked(mark):
    """Kill what drivers with this mark have started and left, and see it gone."""
    deadline = time.monotonic() + 10
    while (left := work.pids_started(mark)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


class Bench:
    """Engines side by side. A context manager: at its end no process of theirs is left."""

    def __init__(self, quick=False):
        self.quick = quick
        self.mark = uuid.uuid4().hex
        self._drivers = {}
        self._cold = collections.defaultdict(lambda: collections.defaultdict(list))
        self.broken = {}  # engine -> what happened; it is asked no more

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._close_drivers()
        kill_marked(self.mark)

    def driver(self, engine):
        """The engine's driver, started when first asked for."""
        if engine not in self._drivers:
            self._drivers[engine] = Driver(engine, self.mark)
        return self._drivers[engine]

    def in_turn(self, questions, rounds, times=1, before=()):
        """Samples by name; in each round everybody is asked once, for ``times`` samples.

        Args:
            questions: name -> (engine, command).
            before: a command with its numbers that every engine runs first.
        """
        for engine in _engines(questions):
            self._attempt(engine, lambda driver: before and driver.ask(*before))
        samples = {name: [] for name in questions}
        for number in range(1 if self.quick else rounds):
            for name in _rotated(questions, number):
                engine, command = questions[name]
                time.sleep(0.1)  # what the engine before still does in the background is not ours
                count = min(times, 5) if self.quick else times
                samples[name] += self._attempt(engine, lambda driver: driver.ask(command, count)) or []  # noqa: B023
        return samples

    def _attempt(self, engine, action):
        """What ``action`` returns for the engine's driver; None if the engine is broken, or breaks now."""
        try:
            return None if engine in self.broken else action(self.driver(engine))
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            self.broken[engine] = str(error)
            if engine in self._drivers:
                self._drivers.pop(engine).close()

    def cold(self, questions, rounds=5):
        """Samples by name, from fresh starts in turn, each alone; all questions about an engine share its starts.

        Args:
            questions: name -> (engine, what); what is ``cold_start`` or one of _AFTER_COLD_START.
        """
        new = [engine for engine in _engines(questions) if engine not in self._cold]
        if new:
            self._close_drivers()
        for number in range(1 if self.quick else rounds):
            for engine in _rotated(new, number):
                self._attempt(engine, self._start_cold)
                self._close_drivers()
        found = {name: self._cold[engine][what] for name, (engine, what) in questions.items()}
        return {name: [x for x in samples if x is not None] for name, samples in found.items()}

    def _start_cold(self, driver):
        found = self._cold[driver.engine]
        found["cold_start"].append(driver.cold_start_s)
        for question in _AFTER_COLD_START[driver.engine]:
            found[question].append(driver.ask(question))
        found["cold_start_and_ddp"].append(driver.cold_start_s + found["first_ddp"][-1])

    def _close_drivers(self):
        while self._drivers:
            self._drivers.popitem()[1].close()


def _engines(questions):
    return list(dict.fromkeys(engine for engine, _ in questions.values()))


def _rotated(names, by):
    names = list(names)
    by %= max(1, len(names))
    return names[by:] + names[:by]
