"""The errors a user of dtlab meets. Every message has the numbers and the cure."""


class DtlabError(Exception):
    """Base of dtlab's own errors. In a notebook only the message is shown, without dtlab's own frames."""

    def _render_traceback_(self):
        """Lines that IPython prints in place of a traceback."""
        return [f"{type(self).__name__}: {self}"]


class ConfigError(DtlabError, ValueError):
    """An argument that cannot work; the message names it, all the numbers, and the nearest legal choice."""


class RankError(DtlabError, RuntimeError):
    """One rank failed; the message starts with that rank's own error and the line it stands on.

    Attributes:
        rank: the rank that failed first.
        cause: the type name of its error, for example ``"ValueError"``; ``"died"`` if its process ended.
        stopped: ranks that were stopped because of it.
    """

    def __init__(self, message, *, rank=None, cause=None, stopped=()):
        super().__init__(message)
        self.rank, self.cause, self.stopped = rank, cause, tuple(stopped)


class GuardError(RankError):
    """The guard saw a mistake and stopped all ranks; the message has the calls side by side with their lines.

    ``rank`` is the rank that saw it, ``cause`` is ``"guard"``.
    """


class RanksInterrupted(KeyboardInterrupt):
    """The reader interrupted a cell on the ranks; the message says what is left of their variables."""

    def _render_traceback_(self):
        """Lines that IPython prints in place of a traceback."""
        return [f"KeyboardInterrupt: {self}"]


class HangError(RankError):
    """Ranks waited for a call that never came; the message says who waits in which call and who is missing.

    Attributes:
        waiting: rank -> the call it waits in, as text.
        missing: ranks that the others waited for.
    """

    def __init__(self, message, *, waiting=None, missing=(), **kwargs):
        super().__init__(message, **kwargs)
        self.waiting, self.missing = dict(waiting or {}), tuple(missing)
