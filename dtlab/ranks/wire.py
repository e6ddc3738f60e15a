"""Messages between the notebook and its ranks: small frames on socket pairs, large data in anonymous files.

A frame is a pickled tuple, with file descriptors beside it where it needs them (SCM_RIGHTS). Anything larger than
``INLINE_BYTES`` travels in an anonymous file, so that no frame fills a socket's buffer and nobody blocks while
sending. There are no ports and no named files: when the processes end, nothing is left.
"""
import array
import collections
import os
import pickle
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

    def fileno(self):
        return self.sock.fileno()

    def send(self, *message, fds=()):
        """Send one frame; True if the other end took it, False if that end is gone."""
        body = pickle.dumps(message, protocol=5)
        data = memoryview(_HEADER.pack(len(body), len(fds)) + body)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            sent = self.sock.sendmsg([data], rights)
            while sent < len(data):
                sent += self.sock.send(data[sent:])
        except OSError:
            self.closed = True
        return not self.closed

    def receive(self, timeout=None):
        """The next frame as ``(message, fds)``; None when the other end is gone or ``timeout`` seconds have passed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            frame = self._take()
            if frame or self.closed:
                return frame
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return None
            self.sock.settimeout(left)
            try:
                self._fill(0)
            except TimeoutError:
                return None
            finally:
                self.sock.settimeout(None)

    def receive_ready(self):
        """Arrived frames, as ``[(message, fds), ...]``; of a flood only a part, so that others are heard."""
        try:
            for _ in range(8):
                if self.closed or not self._fill(socket.MSG_DONTWAIT):
                    break
        except (BlockingIOError, InterruptedError):
            pass
        frames = []
        while frame := self._take():
            frames.append(frame)
        return frames

    def _fill(self, flags):
        try:
            data, rights, _, _ = self.sock.recvmsg(1 << 18, socket.CMSG_SPACE(16 * 4), flags)
        except (ConnectionError, ValueError):
            data, rights = b"", ()
        for level, kind, payload in rights:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
                self._fds.extend(fds)
        if not data:
            self.closed = True
        self._bytes += data
        return bool(data)

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
        """Whether the other end is gone and nothing is left to read; takes nothing."""
        try:
            return self.closed or not self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self):
        """Close this end and any descriptor that came with frames nobody took."""
        self.closed = True
        self.sock.close()
        while self._fds:
            os.close(self._fds.popleft())


def channel_pair():
    """Two connected sockets, neither inherited by programs started later."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
