"""In the notebook: the handle on the zygote process, which starts and buries ranks."""
import atexit
import contextlib
import os
import subprocess
import sys
import threading
import time

from dtlab.errors import RankError
from dtlab.ranks.wire import Channel, channel_pair
from dtlab.ranks.zygote import kill_group

READY_WITHIN_S = 120  # imports on a slow, loaded machine
_QUIET = {  # read by libraries when they are first imported
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


class Nursery:
    """One zygote. Started in the background: the constructor returns at once, ``wait_ready`` waits for its imports."""

    def __init__(self):
        self.owner = os.getpid()
        self.method = os.environ.get("DTLAB_START_METHOD") or ("fork" if sys.platform == "linux" else "spawn")
        mine, theirs = channel_pair()
        argv = [sys.executable, "-c", _PROGRAM, repr(sys.path), str(theirs.fileno()), self.method]
        argv.append(str(int(threading.current_thread() is threading.main_thread())))
        self.process = subprocess.Popen(
            argv,
            pass_fds=[theirs.fileno()],
            env={**os.environ, **_QUIET},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        theirs.close()
        self.channel = Channel(mine)
        self.num_gpus = None  # known when it is ready
        self._asked = 0  # requests; an interrupted one may still be answered
        self.killed = set()  # pids of ranks that were to end

    @property
    def alive(self):
        return self.owner == os.getpid() and self.process.poll() is None and not self.channel.closed

    def wait_ready(self):
        """Wait for the zygote's imports.

        Raises:
            RankError: it could not start; the message holds the last line of what it said.
        """
        if self.num_gpus is None:
            frame = self.channel.receive(READY_WITHIN_S)
            if frame is None:
                said = self._last_words()
                self.close()
                raise RankError(f"the process that starts ranks did not come up: {said}. Try `dtlab doctor`.")
            self.method, self.num_gpus = frame[0]

    def _last_words(self):
        self.process.kill()
        lines = self.process.stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"it gave no sign for {READY_WITHIN_S} s"

    def _ask(self, *request, fds=(), within_s=READY_WITHIN_S):
        """The zygote's answer to a request; None if it gives none."""
        self._asked += 1
        self.channel.send(self._asked, *request, fds=fds)
        while frame := self.channel.receive(within_s):
            number, answer = frame[0]
            if number == self._asked:
                return answer
        return None

    def start(self, settings, fds_by_rank):
        """Start one process for each rank; rank -> pid. The descriptors stay open here."""
        self.wait_ready()
        pids = {}
        for rank, fds in fds_by_rank.items():
            pids[rank] = answer = self._ask("start", settings, rank, fds=fds)
            if answer is None:
                raise RankError("the process that starts ranks has ended; run the launch cell again")
            if isinstance(answer, str):
                cure = "Launch fewer ranks, or free memory and process slots."
                raise RankError(f"rank {rank} could not be started: {answer}. {cure}")
        return pids

    def exits(self):
        """Exit status (negative: signal) of ranks that have ended, by pid."""
        return self._ask("exits", within_s=0.5) or {}

    def exit_status(self, pid, wait_s=0.5):
        """Exit status of a rank that has ended, None if it is not known in time."""
        deadline = time.monotonic() + wait_s
        while (status := self.exits().get(pid)) is None and self.alive and time.monotonic() < deadline:
            time.sleep(0.002)
        return status

    def kill(self, pids):
        """Kill ranks and what they started."""
        self.killed.update(pids)
        self._ask("kill", list(pids), within_s=0.5)

    def close(self):
        """End the zygote and all its ranks."""
        if self.owner != os.getpid():
            return
        self.channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(3)
        if self.process.poll() is None:
            kill_group(self.process.pid)
            self.process.wait()
        self.process.stderr.close()


_PROGRAM = "import sys, ast; sys.path[:] = ast.literal_eval(sys.argv[1]); from dtlab.ranks.zygote import main; main()"
_current = None


def nursery():
    """The zygote of this process, started when first asked for, and again if it has died."""
    global _current
    if _current is not None and not _current.alive:
        _current.close()
        _current = None
    if _current is None:
        _current = Nursery()
    return _current


@atexit.register
def close():
    """End the zygote, if there is one."""
    global _current
    if _current is not None:
        _current.close()
        _current = None
