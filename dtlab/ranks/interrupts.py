"""In the notebook: an interrupt is noted while dtlab talks to ranks, so that it cuts no message in half."""
import contextlib
import signal
import threading


class Interrupts:
    """Whether the reader has interrupted."""

    new = False  # one that nobody has handled yet

    def note(self, *_):
        """The signal handler."""
        self.new = True

    def take(self):
        """Whether there is a new one; it is handled then."""
        new, self.new = self.new, False
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
