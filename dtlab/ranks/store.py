"""On a rank: the store in which a process group finds its members, a small dict in a file that all ranks hold.

Not torch's own FileStore: that opens its path once more when it is destroyed, which may be at any later time (a DDP
module kept by the reader holds one), and would read and lock the store of a later group.
"""
import contextlib
import fcntl
import io
import os
import pickle
import signal
import threading
import time

import torch.distributed as dist

_START = 8  # the file begins with the place where its records end


class MemoryStore(dist.Store):
    """A log of ``(key, value)`` records; ``None`` deletes a key. Every rank reads what is new to it."""

    def __init__(self, fd):
        super().__init__()
        self.fd, self._end, self._values = fd, _START, {}
        self._lock = threading.RLock()  # file locks exclude processes, not threads

    def close(self):
        """Close the file; the group of this store is over."""
        with self._lock:
            os.close(self.fd)
            self.fd = -1

    @contextlib.contextmanager
    def _alone(self):
        with self._lock:
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})  # a stop would leave half a record
            fcntl.lockf(self.fd, fcntl.LOCK_EX)  # ends with its process, whatever happens to it
            try:
                self._read()
                yield
            finally:
                fcntl.lockf(self.fd, fcntl.LOCK_UN)
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _read(self):
        end = max(_START, int.from_bytes(os.pread(self.fd, _START, 0), "little"))
        records = io.BytesIO(os.pread(self.fd, end - self._end, self._end))
        while self._end + records.tell() < end:
            key, value = pickle.load(records)
            self._values[key] = value
        self._end = end

    def _write(self, key, value):
        record = pickle.dumps((key, value))
        os.pwrite(self.fd, record, self._end)
        self._end += len(record)
        self._values[key] = value
        os.pwrite(self.fd, self._end.to_bytes(_START, "little"), 0)

    # what torch calls; see torch.distributed.Store

    def set(self, key, value):
        with self._alone():
            self._write(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key):
        self.wait([key])
        return self._values[key]

    def add(self, key, amount):
        with self._alone():
            total = int(self._values.get(key) or 0) + amount
            self._write(key, str(total).encode())
            return total

    def compare_set(self, key, expected, desired):
        expected, desired = (v.encode() if isinstance(v, str) else bytes(v) for v in (expected, desired))
        with self._alone():
            now = self._values.get(key)
            if now == expected or (now is None and not expected):
                self._write(key, desired)
                return desired
            return expected if now is None else now

    def check(self, keys):
        with self._alone():
            return all(self._values.get(key) is not None for key in keys)

    def wait(self, keys, timeout=None):
        deadline = time.monotonic() + (timeout or self.timeout).total_seconds()
        pause = 1e-3
        while not self.check(keys):
            if time.monotonic() > deadline:
                missing = [key for key in keys if self._values.get(key) is None]
                raise dist.DistStoreError(f"nobody has set {', '.join(missing)}")
            time.sleep(pause)
            pause = min(pause * 1.5, 0.03)  # a wait that uses the processor would count as work

    def delete_key(self, key):
        with self._alone():
            there = self._values.get(key) is not None
            if there:
                self._write(key, None)
            return there

    def num_keys(self):
        with self._alone():
            return sum(value is not None for value in self._values.values())

    def clone(self):
        return self
