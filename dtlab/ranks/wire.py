"""Messages between the notebook and its ranks: small frames on socket pairs, large data in anonymous files.

A frame is a pickled tuple, with file descriptors beside it where it needs them (SCM_RIGHTS). Anything larger than
``INLINE_BYTES`` travels in an anonymous file, so that no frame fills a socket's buffer and nobody blocks while
sending. There are no ports and no named files: when the processes end, nothing is left.
"""
import collections
import contextlib
import os
import pickle
import select
import socket
import struct
import tempfile
import time

INLINE_BYTES = 32 * 1024
_HEADER = struct.Struct("<IB")  # bytes of the frame, number of file descriptors


def anonymous_file(name="dtlab"):
    """File descriptor of an unnamed file in memory (on Linux; elsewhere an unlinked temporary file)."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Channel:
    """One end of a socket pair. ``send`` blocks, ``receive`` waits for one frame, ``receive_ready`` never waits."""

    def __init__(self, sock):
        self.sock = sock
        self.closed = False
        self._bytes = bytearray()
        self._fds = collections.deque()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def fileno(self):
        return self.sock.fileno()

    def send(self, *message, fds=()):
        """Send one frame; True if the other end took it, False if that end is gone."""
        body = pickle.dumps(message, protocol=5)
        data = _HEADER.pack(len(body), len(fds)) + body
        try:
            sent = socket.send_fds(self.sock, [data], fds) if fds else 0
            self.sock.sendall(memoryview(data)[sent:])
        except OSError:
            self.closed = True
        return not self.closed

    def receive(self, timeout=None):
        """The next frame as ``(message, fds)``; None when the other end is gone or ``timeout`` seconds have passed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not (frame := self._take()) and not self.closed:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._fill(left):
                return None
        return frame

    def receive_ready(self):
        """Arrived frames, as ``[(message, fds), ...]``; of a flood only a part, so that others are heard."""
        for _ in range(8):
            if self.closed or not self._fill(0):
                break
        return list(iter(self._take, None))

    def _fill(self, timeout):
        """Wait for bytes, or for the end, and take them; False if nothing came in time."""
        if not self._poll.poll(None if timeout is None else 1000 * timeout):
            return False
        data, fds = b"", []
        with contextlib.suppress(ConnectionError):
            data, fds, *_ = socket.recv_fds(self.sock, 1 << 18, 16)
        self._fds.extend(fds)
        self._bytes += data
        self.closed = self.closed or not data
        return True

    def _take(self):
        if len(self._bytes) < _HEADER.size:
            return None
        size, num_fds = _HEADER.unpack_from(self._bytes)
        end = _HEADER.size + size
        if len(self._bytes) < end:
            return None
        message = pickle.loads(memoryview(self._bytes)[_HEADER.size : end])
        del self._bytes[:end]
        return message, [self._fds.popleft() for _ in range(num_fds)]

    def has_ended(self):
        """Whether the other end is gone; frames that have come stay here until they are taken."""
        return self.closed or (self._fill(0) and self.closed)

    def close(self):
        """Close this end and any descriptor that came with frames nobody took."""
        self.closed = True
        self.sock.close()
        while self._fds:
            os.close(self._fds.popleft())


def channel_pair():
    """Two connected sockets, neither inherited by programs started later."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
