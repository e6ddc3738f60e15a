"""On a rank: leave process groups in which calls may hang."""
import contextlib
import os
import socket
import stat
import threading

import torch
import torch.distributed as dist

_LEAVE_S = 0.5  # longest wait for the destructors of groups
_LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")


_left = []  # groups that were left last


def leave_groups():
    """Destroy all process groups.

    Subtle: the destructor waits for gloo's threads, and a call whose sockets were shut while it began waits for ever in
    one. So the last references are dropped in a thread that may be left behind; before torch 2.8 they are kept until
    the next time, because there it waits with the interpreter's lock held.
    """
    groups = list(dist.distributed_c10d._world.pg_map)
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    if torch.__version__ < (2, 8):
        _left[:] = groups
        return
    thread = threading.Thread(target=groups.clear, daemon=True, name="dtlab-leave")
    thread.start()
    thread.join(_LEAVE_S)


def shut_sockets():
    """End every TCP connection of this process to this machine, so that gloo's waits return with an error."""
    for name in os.listdir("/dev/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            sock = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with contextlib.suppress(OSError), sock:
            inet = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
            if inet and sock.getpeername()[0] in _LOOPBACK:  # gloo's; a reader's own connections go further
                sock.shutdown(socket.SHUT_RDWR)
