"""On a rank: run cells and functions in the rank's namespace, and describe what went wrong."""
import ast
import linecache
import sys
import traceback
import types

import torch.distributed as dist

from dtlab.errors import ConfigError, DtlabError
from dtlab.ranks import calls, console
from dtlab.ranks.guard_order import USERS, owner
from dtlab.ranks.settings import PREDEFINED

_ENGINE = ("/dtlab/ranks/", "/dtlab/record/", "/dtlab/checks/")
_CURES = {"initialize the default process group twice": "the ranks are in a group already: leave this line out"}
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed", "recv failed")


class Namespace:
    """The variables of one rank: a fresh ``__main__`` module."""

    def __init__(self):
        self.module = types.ModuleType("__main__")
        sys.modules["__main__"] = self.module
        self.vars = self.module.__dict__
        self.vars["__builtins__"] = __builtins__
        self.pushed, self.predefined = set(), {}

    def predefine(self, **values):
        """Set the names that are always there."""
        self.predefined.update(values)
        self.vars.update(values)

    def put_back(self):
        """Give the predefined names their values again; those that a cell has changed."""
        changed = [n for n, value in self.predefined.items() if self.vars.get(n) is not value]
        self.vars.update(self.predefined)
        return changed

    def push(self, values):
        """Set variables; they win over the notebook's own in functions run here."""
        self.vars.update(values)
        self.pushed.update(values)

    def names(self):
        """The names a reader has put here."""
        return sorted(n for n in self.vars if not n.startswith("_") and n not in PREDEFINED)

    def bind(self, function_globals):
        """Let a function from the notebook see this rank's variables too.

        Raises:
            ConfigError: a name has a value on both sides.
        """
        clashes = []
        for name, value in self.vars.items():
            if name not in function_globals or name.startswith("__"):
                function_globals.setdefault(name, value)
            elif name in self.pushed or name in PREDEFINED or isinstance(value, types.ModuleType):
                function_globals[name] = value
            else:
                clashes.append(name)
        if clashes:
            names = ", ".join(sorted(clashes))
            raise ConfigError(
                f"{names}: the function uses this name, and it exists both in the notebook and on the ranks. Rename "
                f"one of the two, pass the value as an argument, or push it (then the rank's own is used)"
            )

    def keep_globals(self, function_globals, before):
        """Bring back what a function assigned with ``global``."""
        for name, value in function_globals.items():
            if not name.startswith("__") and (name not in before or before[name] is not value):
                self.vars[name] = value


def run_code(code, label, namespace, show):
    """Run a cell; show the value of its last expression unless a semicolon ends it."""
    filename = f"<{label}>"
    remember_source(filename, label, code)
    tree = ast.parse(code, filename)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        line = code.split("\n")[tree.body[-1].end_lineno - 1].encode()
        if not line[tree.body[-1].end_col_offset :].lstrip().startswith(b";"):
            last = ast.Expression(tree.body.pop().value)
    exec(compile(tree, filename, "exec"), namespace.vars)
    if last is not None:
        value = eval(compile(last, filename, "eval"), namespace.vars)
        if value is not None:
            namespace.vars["_"] = value
            show(value)


def run_function(function, args, kwargs, all_globals, namespace):
    """Call a function from the notebook with this rank's variables behind the notebook's."""
    for function_globals in all_globals:
        namespace.bind(function_globals)
    before = [dict(g) for g in all_globals]
    try:
        return function(*args, **kwargs)
    finally:
        for function_globals, old in zip(all_globals, before):
            namespace.keep_globals(function_globals, old)


def remember_source(filename, label, source):
    """Let tracebacks show the lines of a cell, and messages call it by its label."""
    calls.name_file(filename, label)
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)


def describe_error(error):
    """What the notebook needs to report an exception: plain data."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not any(p in f.filename for p in _ENGINE)]
    if isinstance(error, SyntaxError) and error.lineno and error.filename:
        source = (error.text or linecache.getline(error.filename, error.lineno)).rstrip()
        frames = [traceback.FrameSummary(error.filename, error.lineno, "<module>", line=source, lookup_line=False)]
    users = [f for f in frames if owner(f.filename) == USERS]
    own = users or frames[-1:]
    deepest = [] if not frames or frames[-1] in own or isinstance(error, DtlabError) else [frames[-1]]
    message = error.msg if isinstance(error, SyntaxError) else _text_of(error)
    if isinstance(error, SyntaxError) and own and own[0].line and own[0].line.lstrip()[:1] in "%!":
        message = "magics (%...) and shell lines (!...) work in the notebook, not on ranks"
    message += next((f" ({cure})" for text, cure in _CURES.items() if text in message), "")
    return {
        "type": type(error).__name__,
        "message": message if len(message) < 5000 else message[:5000] + " ...",
        "frames": [(*_place(f), f.name, f.line) for f in own + deepest],
        "traceback": "".join(traceback.format_exception(error)),
        "place": "{}, line {}".format(*_place(users[-1])) if users else "",
        "call": _call_of(error),
        "group_ended": "gloo" in message or not dist.is_initialized(),
        "lost_peer": isinstance(error, RuntimeError) and any(text in message for text in _LOST),
        "name": getattr(error, "name", None) if isinstance(error, NameError) else None,
    }


def _place(frame):
    return calls.label_of(frame.filename), frame.lineno


def _text_of(error):
    """``str(error)``, also of an exception whose own ``__str__`` fails."""
    try:
        return str(error)
    except Exception as second:
        return f"(its text cannot be shown: {type(second).__name__})"


def _call_of(error):
    """The communication call in which a rank was stopped: a second stop may hide the first, which knew it."""
    while error is not None:
        if call := getattr(error, "call", ""):
            return call
        error = error.__context__
    return ""


def show_value(value, show):
    """Send a value to the notebook as a cell shows it; a figure is shown once, so pyplot forgets it."""
    from dtlab.record.recorder import quiet

    with quiet():  # a tensor's text is made by operators
        bundle = console.mime_bundle(value)
    show("mime", bundle)
    console.close_figure(value)
