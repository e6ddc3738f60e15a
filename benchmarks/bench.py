"""Engines as processes: started, asked in turn, ended; none outlives the benchmark."""
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

ROOT = pathlib.Path(__file__).resolve().parents[1]
NUM_RANKS = 4
ANSWER_WITHIN_S = 180
_MARK = "DTLAB_BENCH"
_DRIVERS = {  # engine -> program and arguments
    "dtlab": ["on_dtlab.py", str(NUM_RANKS)],
    "ipyparallel": ["on_ipyparallel.py", str(NUM_RANKS)],
    "torch.multiprocessing.spawn": ["on_spawn.py", str(NUM_RANKS)],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}", "on_torchrun.py"],
}


class Driver:
    """One engine's notebook side: a program that answers commands. The constructor waits for its first result."""

    def __init__(self, engine, mark):
        self.engine = engine
        self._log = tempfile.TemporaryFile("w+")
        paths = [str(ROOT), str(ROOT / "benchmarks" / "drivers"), os.environ.get("PYTHONPATH", "")]
        quiet = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # one thread for each rank, in all engines
        loopback = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
        started = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, *_DRIVERS[engine]],
            cwd=ROOT / "benchmarks" / "drivers",
            env={**os.environ, **quiet, **loopback, "PYTHONPATH": os.pathsep.join(filter(None, paths)), _MARK: mark},
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
        self._log.close()


class Bench:
    """Engines side by side. A context manager: at its end no process of theirs is left."""

    def __init__(self, quick=False):
        self.quick = quick
        self.mark = uuid.uuid4().hex
        self._drivers = {}
        self._cold = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for driver in self._drivers.values():
            driver.close()
        for pid in self.left_over():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def left_over(self):
        """Pids of processes that engines have started and that still run."""
        found = []
        for folder in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"{_MARK}={self.mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found

    def driver(self, engine):
        """The engine's driver, started when first asked for."""
        if engine not in self._drivers:
            self._drivers[engine] = Driver(engine, self.mark)
        return self._drivers[engine]

    def in_turn(self, command, engines, rounds, times=1, before=()):
        """Samples of one command by engine: in each round every engine is asked once, for ``times`` samples.

        Args:
            engines: engine -> command, or a list of engines that all know ``command``.
            before: a command and its numbers, once for each engine.
        """
        for engine in engines:
            if before:
                self.driver(engine).ask(*before)
            self.driver(engine)
        samples = {engine: [] for engine in engines}
        for number in range(1 if self.quick else rounds):
            for engine in _rotated(engines, number):
                time.sleep(0.1)  # what the engine before still does in the background is not ours
                samples[engine] += self.driver(engine).ask(command, min(times, 5) if self.quick else times)
        return samples

    def cold(self, engines, rounds=5):
        """Fresh starts in turn, each alone: ``{engine: {"cold_start": [...], "first_ddp": [...], "pss": [...]}}``."""
        new = [engine for engine in engines if engine not in self._cold]
        for engine in new:
            self._cold[engine] = {"cold_start": [], "first_ddp": [], "pss": []}
        for number in range(1 if self.quick else rounds):
            for engine in _rotated(new, number):
                self._start_cold(engine)
        return self._cold

    def _start_cold(self, engine):
        driver, found = Driver(engine, self.mark), self._cold[engine]
        try:
            found["cold_start"].append(driver.cold_start_s)
            if engine != "torchrun":  # its ranks have gone on to DDP()
                found["pss"].append(driver.ask("pss"))
            found["first_ddp"].append(driver.ask("first_ddp"))
        finally:
            driver.close()


def _rotated(engines, by):
    engines = list(engines)
    by %= max(1, len(engines))
    return engines[by:] + engines[:by]
