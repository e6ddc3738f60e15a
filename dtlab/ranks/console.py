"""On a rank: what code prints and shows becomes messages to the notebook, whole lines at a time."""
import base64
import io
import os
import sys
import threading

_RICH = {  # method of an object -> MIME type
    "_repr_html_": "text/html",
    "_repr_svg_": "image/svg+xml",
    "_repr_png_": "image/png",
    "_repr_markdown_": "text/markdown",
    "_repr_latex_": "text/latex",
}
_REPR_CHARS = 100_000


class Stream(io.TextIOBase):
    """``sys.stdout`` or ``sys.stderr`` of a rank. Sends complete lines, so that no label ever splits one."""

    def __init__(self, name, send):
        self.name, self._send = name, send
        self._partial = ""
        self._lock = threading.RLock()
        self._owner = os.getpid()

    encoding, errors = "utf-8", "replace"

    def writable(self):
        return True

    def fileno(self):
        return 1 if self.name == "stdout" else 2

    @property
    def buffer(self):
        """Binary twin for code that writes bytes."""
        return open(self.fileno(), "wb", buffering=0, closefd=False)

    def write(self, text):
        if not isinstance(text, str):
            raise TypeError(f"write() takes text, not {type(text).__name__}")
        if os.getpid() != self._owner:  # a process forked by the rank (DataLoader) has no channel of its own
            os.write(self.fileno(), text.encode(errors="replace"))
            return len(text)
        with self._lock:
            whole, newline, self._partial = (self._partial + text).rpartition("\n")
            if newline:
                self._send(self.name, whole + newline)
            if "\r" in self._partial:  # a bar drawn over itself: keep what would be seen
                self._partial = self._partial[self._partial.rstrip("\r").rfind("\r") + 1 :]
        return len(text)

    def finish(self):
        """Send an unfinished last line; at the end of a cell."""
        with self._lock:
            if self._partial:
                self._send(self.name, self._partial + "\n")
                self._partial = ""


def mime_bundle(value):
    """MIME type -> data for a value shown in a cell; plain text always."""
    text = repr(value)
    if len(text) > _REPR_CHARS:
        text = f"{text[:_REPR_CHARS]} ... ({len(text)} characters)"
    bundle = {"text/plain": text}
    if _is_figure(value):
        png = io.BytesIO()
        value.savefig(png, format="png", bbox_inches="tight")
        return {**bundle, "image/png": base64.b64encode(png.getvalue()).decode()}
    if own := _of_method(value, "_repr_mimebundle_"):
        return {**bundle, **own}
    for method, mime in _RICH.items():
        if (data := _of_method(value, method)) is not None:
            bundle[mime] = base64.b64encode(data).decode() if isinstance(data, bytes) else data
    return bundle


def _of_method(value, name):
    """What a method of a value gives, without the metadata beside it; None if it has none, or fails."""
    method = getattr(type(value), name, None)
    if method is None or isinstance(value, type):
        return None
    try:
        made = method(value)
    except Exception:
        return None  # plain text is there
    return made[0] if isinstance(made, tuple) else made


def _is_figure(value):
    figures = sys.modules.get("matplotlib.figure")
    return figures is not None and isinstance(value, figures.Figure)


def close_figure(value):
    """Let pyplot forget a figure that was shown."""
    if _is_figure(value) and "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close(value)


def show_open_figures(send):
    """Send every figure left open in pyplot and close it, as a notebook cell does at its end."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    for number in pyplot.get_fignums() if pyplot is not None else ():
        figure = pyplot.figure(number)
        send("mime", mime_bundle(figure))
        pyplot.close(figure)
