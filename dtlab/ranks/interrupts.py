"""In the notebook: an interrupt is noted while dtlab talks to ranks, so that it cuts no message in half."""
import contextlib
import signal
import threading


class Interrupts:
    """How often the reader has interrupted since the cell started."""

    def __init__(self):
        self.count = self.handled = 0

    def note(self, *_):
        """The signal handler."""
        self.count += 1

    def take(self):
        """Whether there is an interrupt that nobody has handled yet."""
        new = self.count > self.handled
        self.handled = self.count
        return new


@contextlib.contextmanager
def held():
    """Note interrupts instead of raising them; one that nobody has handled is raised at the end.

    Only the main thread can do this; elsewhere interrupts do not arrive.
    """
    interrupts = Interrupts()
    ours = threading.current_thread() is threading.main_thread() and callable(signal.getsignal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, interrupts.note) if ours else None
    try:
        yield interrupts
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)
    if interrupts.take():
        raise KeyboardInterrupt
