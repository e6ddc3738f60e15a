"""The zygote: a process that has imported torch, never computes, and forks ranks on request.

It is exec'd (it inherits nothing from the kernel), keeps one thread, and ends with its ranks as soon as the notebook's
end of the socket closes, whatever the reason. Where fork is not safe (macOS) it starts each rank as a fresh program
instead; everything else is the same.

It is asked ``(number, "start", settings, rank)`` with five descriptors, ``(number, "kill", [pid, ...])`` or
``(number, "exits")``, and answers ``(number, answer)``. Its first message is ``(method, number of GPUs)``.
"""
import contextlib
import ctypes
import gc
import json
import os
import signal
import subprocess
import sys

from dtlab.ranks.wire import Channel

_RANK_PROGRAM = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from dtlab.ranks import worker; worker.from_shell()"
)
_PR_SET_PDEATHSIG = 1


def die_with_parent(with_signal):
    """Ask Linux to end this process when its parent ends; a second line behind the closed socket."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, with_signal)


def close_all_but(kept):
    """Close every file descriptor of this process except these."""
    for name in os.listdir("/dev/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


def kill_group(pid):
    """Kill a process and those that it has started."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


class Zygote:
    """Holds the pids of living ranks and answers the notebook."""

    def __init__(self, channel, method):
        self.channel, self.method = channel, method
        self.pids = set()  # of living ranks
        self.exits = {}  # pid -> exit status of the others
        self.children = {}  # pid -> Popen, where ranks are started as programs

    def serve(self):
        """Answer until the notebook's end closes, then kill what is left."""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # by way of "finally"
        try:
            while frame := self.channel.receive():
                (number, request, *rest), fds = frame
                self.channel.send(number, getattr(self, "on_" + request)(*rest, fds=fds))
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self.on_kill(self.pids)

    def on_start(self, settings, rank, fds):
        """Start a rank with its descriptors (cells, control, raw output, store, board): its pid, or why not."""
        try:
            pid = self._fork(settings, rank, fds) if self.method == "fork" else self._spawn(settings, rank, fds)
            self.pids.add(pid)
            self.exits.pop(pid, None)  # of an earlier process with this number
            return pid
        except OSError as error:
            return str(error)
        finally:
            for fd in fds:
                os.close(fd)

    def _fork(self, settings, rank, mine):
        pid = os.fork()
        if pid:
            return pid
        try:  # from here on this is the rank
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self.channel.sock.detach()
            close_all_but({0, 1, 2, *mine})  # another rank's socket held here would hide that rank's death
            from dtlab.ranks import worker

            worker.main(settings, rank, mine)
        finally:
            os._exit(1)

    def _spawn(self, settings, rank, mine):
        told = {**settings, "environ": {}}  # the environment does not go where everybody can read it
        argv = [sys.executable, "-c", _RANK_PROGRAM, json.dumps(sys.path), json.dumps([told, rank, mine])]
        child = subprocess.Popen(argv, pass_fds=mine, stdin=subprocess.DEVNULL, env=settings["environ"])
        self.children[child.pid] = child
        return child.pid

    def on_kill(self, pids, fds=()):
        """Kill ranks and the processes they started."""
        for pid in self.pids.intersection(pids):
            kill_group(pid)
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)  # it may have no group of its own yet

    def on_exits(self, fds):
        """How ranks have ended, by pid; what they have started ends too."""
        for pid in list(self.pids):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self.pids.remove(pid)
                if child := self.children.pop(pid, None):
                    child.returncode = status
                kill_group(pid)
                self.exits[pid] = os.waitstatus_to_exitcode(status)
        return self.exits


def preload():
    """Import what ranks need, so that no rank pays for it: the first DDP() alone would import torch._dynamo.

    No garbage is looked for meanwhile: that is a quarter of the time and finds nothing.
    """
    gc.disable()
    import cloudpickle  # noqa: F401
    import numpy  # noqa: F401
    import torch
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor
    import torch.nn.parallel  # noqa: F401

    from dtlab.ranks import calls, worker  # noqa: F401
    from dtlab.record import recorder  # noqa: F401

    calls.install()
    gc.freeze()
    gc.enable()


def main():
    """Run as a program: ``zygote FD METHOD IN_MAIN_THREAD``; the descriptor is the notebook's socket."""
    import socket

    import psutil

    fd, method, in_main_thread = int(sys.argv[2]), sys.argv[3], sys.argv[4] == "1"
    if in_main_thread:  # the signal would come when the *thread* that started us ends
        die_with_parent(signal.SIGTERM)  # not at once: the ranks' own processes are ended first
    channel = Channel(socket.socket(fileno=fd))
    os.set_inheritable(fd, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if method == "fork":
        preload()
        if psutil.Process().num_threads() > 1:  # of something that Python loads at its start: forking is not safe
            method = "spawn"
    channel.send(method, _num_gpus())
    Zygote(channel, method).serve()


def _num_gpus():
    """CUDA devices that are visible, counted through NVML: a process that started CUDA could not be forked."""
    import torch

    try:
        return max(0, torch.cuda._device_count_nvml()) if torch.version.cuda else 0
    except Exception:
        return 0
