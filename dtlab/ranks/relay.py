"""In the notebook: what ranks print and show. Live while a cell runs; in rank order and folded when it has ended."""
import sys
import time

from dtlab.ranks.board import rank_list
from dtlab.shell import in_notebook, is_headless, notebook_shell

LIVE_AFTER_S = 0.25  # quicker cells show their output once, when they have ended
LIVE_EVERY_S = 0.1
KEPT_CHARS = 200_000  # of each rank's text in one cell; the rest is counted
_LIVE_LINES = 40


class Relay:
    """Collects the output of one cell, rank by rank."""

    def __init__(self, ranks, kept_chars=KEPT_CHARS):
        self.kept_chars = kept_chars  # 0: show nothing
        self.items = {rank: [] for rank in ranks}  # rank -> [(kind, data), ...]; kind stdout, stderr, mime
        self._chars = dict.fromkeys(ranks, 0)  # that they have written
        self._bars = {}  # rank -> text of its progress bar
        self._started = time.monotonic()
        self._last_shown = 0.0
        self._in_notebook, self._live = notebook_shell() is not None, in_notebook()
        self._prints_at_once = not self._in_notebook and not is_headless()
        self._handle = self._shown = None
        self._dirty = False
        self.status = ""  # what a long cell is doing, under its live output

    def add(self, rank, kind, data):
        """Take one piece of a rank's output."""
        if kind == "progress":
            return self._progress(rank, *data)
        is_text = kind != "mime"
        text = self._within(rank, data if is_text else data["text/plain"])
        if is_text:
            self._add_text(rank, kind, text)
        elif text == data["text/plain"]:
            self.items[rank].append((kind, data))
        self._dirty = True
        if text and self._prints_at_once:
            self._print_now(rank, kind, text)

    def _within(self, rank, text):
        """What of a text there is still room for; all of it is counted."""
        room = max(0, self.kept_chars - self._chars[rank])
        self._chars[rank] += len(text)
        return text[:room]

    def _print_now(self, rank, kind, text):
        text = text if kind != "mime" else text + "\n"
        print(_labelled(f"[{rank}] ", text), end="", file=sys.stderr if kind == "stderr" else sys.stdout, flush=True)

    def _add_text(self, rank, kind, text):
        items = self.items[rank]
        # what is left of lines that were drawn over themselves, as progress bars are
        text = "\n".join(line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.split("\n"))
        if items and items[-1][0] == kind:
            items[-1] = kind, items[-1][1] + text
        elif text:
            items.append((kind, text))

    def _progress(self, rank, done, total, text, is_quarter):
        if self._live:
            width = 30 * done // total if total else 0
            bar = f"[{'#' * width}{'.' * (30 - width)}] " if total else ""
            self._bars[rank] = f"{bar}{text}"
            self._dirty = True
            if done == total:
                del self._bars[rank]
                self._add_text(rank, "stdout", text + "\n")
        elif is_quarter:
            self.add(rank, "stdout", text + "\n")

    def tick(self):
        """Refresh the live view, not more often than it can be read."""
        now = time.monotonic()
        if not self._live or now - self._started < LIVE_AFTER_S or now - self._last_shown < LIVE_EVERY_S:
            return
        if self._dirty or self.status:
            self._last_shown, self._dirty = now, False
            self._show_live()

    def _show_live(self):
        lines = "".join(text for text, bundle in self.final() if bundle is None).split("\n")[:-1]
        if len(lines) > _LIVE_LINES:
            lines = ["..."] + lines[-_LIVE_LINES:]
        bar = list(self._bars.values())[:1]
        self._update("\n".join(lines + bar + ([self.status] if self.status else [])))

    def _update(self, text):
        from IPython.display import display

        if text == self._shown:
            return
        self._shown = text
        bundle = {"text/plain": text}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)

    def final(self):
        """The finished cell: ``[(text, None) or (label, MIME bundle), ...]``; ranks with equal output share theirs."""
        if not self.kept_chars:
            return []
        groups = []  # [[ranks], items]
        for rank, items in sorted(self.items.items()):
            items = [*items, *self._notes(rank)]
            same = next((g for g in groups if g[1] == items), None)
            if same:
                same[0].append(rank)
            elif items:
                groups.append([[rank], items])
        return [entry for ranks, items in groups for entry in _entries(rank_list(ranks), items)]

    def _notes(self, rank):
        dropped = self._chars[rank] - self.kept_chars
        return [("stderr", f"... {dropped} more characters are not shown\n")] if dropped > 0 else []

    def finish(self):
        """Show the finished cell."""
        if self._in_notebook:
            self._finish_in_notebook(self.final())
        elif self._prints_at_once:
            for rank in self.items if self.kept_chars else ():
                for note in self._notes(rank):
                    self._print_now(rank, *note)
        else:
            for text, bundle in self.final():
                print(text if bundle is None else _labelled(f"{text}: ", bundle["text/plain"]), end="")

    def _finish_in_notebook(self, entries):
        from IPython.display import display

        if self._handle is not None:  # the live view becomes the first text of the finished cell
            text = entries.pop(0)[0] if entries and entries[0][1] is None else ""
            self._update(text.rstrip("\n"))
        for text, bundle in entries:
            print(text if bundle is None else text + ":\n", end="", flush=True)
            if bundle is not None:
                display(bundle, raw=True)


def _entries(label, items):
    """Texts with a label on each line, joined; rich values by themselves."""
    entries = []
    for kind, data in items:
        if kind == "mime" and len(data) > 1:
            entries.append((label, data))
            continue
        mark = f"{label} (stderr): " if kind == "stderr" else f"{label}: "
        text = _labelled(mark, data["text/plain"] if kind == "mime" else data)
        if entries and entries[-1][1] is None:
            entries[-1] = entries[-1][0] + text, None
        else:
            entries.append((text, None))
    return entries


def _labelled(mark, text):
    """Text with a mark before each line."""
    return "".join(f"{mark}{line}\n" for line in text.removesuffix("\n").split("\n"))
