"""On a rank: where a call stands in the reader's code, and whether two ranks make the same calls in another order.

Different lines at one position prove nothing: rank 0 may send from one branch what the others receive in another.
Only labels that *cross* do: X then Y on one rank, Y then X on the other. A call's label is the text of its first
argument and its place, for up to three of the reader's frames; the innermost frame in which two ranks differ decides.
"""
import ast
import contextlib
import functools
import json
import linecache
import os
import sys
import sysconfig
import zlib
from collections import deque
from dataclasses import dataclass

import torch

USERS, PLUMBING, TORCH, LIBRARY = range(4)  # whose file a frame stands in
_PLUMBING = ("/dtlab/ranks/", "/dtlab/record/", "<frozen ", "<string>", "/typing_extensions.py")
_C10D = ("/torch/distributed/distributed_c10d.py", "/torch/distributed/c10d_logger.py", "/torch/_ops.py")
_C10D += ("/torch/utils/_contextlib.py", "/torch/autograd/function.py")
_C10D += ("/torch/utils/_device.py", "/torch/overrides.py")  # set_default_device and other modes stand between
_C10D += ("/torch/utils/_python_dispatch.py", "/torch/utils/flop_counter.py", "/torch/utils/checkpoint.py")
_MESSAGES = ("send", "recv", "isend", "irecv")
FILE, LINE, TEXT, IS_NAME, BRANCHES, FUNCTION = range(6)  # parts of a frame in a label
NUM_FRAMES = 3
_OUTPUT_FIRST = ("all_gather", "reduce_scatter", "all_to_all")
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_TORCH = os.path.dirname(torch.__file__) + os.sep
HISTORY = 64  # positions with different labels that are remembered for each peer and channel

_same_calls = []  # names given with same_call, innermost last


@contextlib.contextmanager
def same_call(name):
    """Tell the guard that calls made inside are one and the same call on all ranks, wherever they stand.

    Args:
        name: any text; ranks that meet must give the same one.

    Example:
        >>> with same_call("grad_sync"):
        ...     pass  # dist.all_reduce(grad), from different functions on different ranks
    """
    _same_calls.append(str(name))
    try:
        yield
    finally:
        _same_calls.pop()


@functools.lru_cache(4096)
def owner(filename):
    """Whose code a file holds."""
    if any(part in filename for part in _PLUMBING) or filename.endswith(_C10D):
        return PLUMBING
    if filename.startswith(_TORCH):
        return TORCH
    if "site-packages" in filename or "dist-packages" in filename:
        return USERS if "/dtlab/" in filename else LIBRARY
    return PLUMBING if filename.startswith(_STANDARD_LIBRARY) else USERS


@dataclass(frozen=True)
class Site:
    """A place in the reader's code from which torch.distributed was called."""

    where: tuple  # (file, line); of no file where torch calls by itself
    label: str  # JSON of its frames, innermost first; FILE, LINE, ... below are their parts
    direct: bool  # the reader's code called torch.distributed itself, and gets the handle
    called: str = ""  # the function for messages that it called: isend or send


_sites = {}  # places in code -> (Site, frames with loop names, code objects kept alive)


def here():
    """The Site of the call that is being made."""
    frames, direct, called, frame = [], True, "", sys._getframe()
    while frame is not None and len(frames) < NUM_FRAMES:
        whose = owner(frame.f_code.co_filename)
        if whose in (USERS, LIBRARY):
            frames.append(frame)
            direct = direct and (len(frames) > 1 or whose == USERS)
        elif whose == TORCH and not frames:
            direct = False
        elif not frames and frame.f_code.co_name in _MESSAGES:
            called = frame.f_code.co_name  # the outermost: send makes an isend
        frame = frame.f_back
    key = called, *((id(f.f_code), f.f_lasti) for f in frames)
    if key not in _sites:
        described = [describe(f) for f in frames]
        label, direct = [d[0] for d in described], direct and bool(frames)
        for level in label if not direct else ():
            level[TEXT], level[IS_NAME] = "", False  # the argument is that of a call into torch
        where = tuple(label[0][:2]) if label else ("torch", 0)
        loops = [(i, d[1]) for i, d in enumerate(described) if d[1] and direct]
        site = Site(where, json.dumps(label), direct, called)
        _sites[key] = site, loops, label, [f.f_code for f in frames]
    site, loops, label, _ = _sites[key]
    if _same_calls:
        return Site(site.where, json.dumps([["", 0, short(_same_calls[-1]), True, [], ""]]), site.direct, called)
    return _with_loop_values(site, loops, label, frames) if loops else site


def _with_loop_values(site, loops, label, frames):
    """Add the text that loop variables hold: ``losses[name]`` is another argument in each pass."""
    label = [list(level) for level in label]
    for i, names in loops:
        variables = frames[i].f_locals
        texts = [short(variables[n]) for n in names if isinstance(variables.get(n), str)]
        if texts:
            label[i][2] += f" [{', '.join(texts)}]"
    return Site(site.where, json.dumps(label), site.direct, site.called)


def short(text):
    """A text of at most 60 characters, different for different texts.

    Example:
        >>> short("weight"), short("w" * 100)
        ('weight', 'wwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwww..90282d0f')
    """
    return text if len(text) <= 60 else f"{text[:50]}..{zlib.crc32(text.encode(errors='replace')):08x}"


def describe(frame):
    """``(label of one frame, names of loop variables that feed its argument)``."""
    filename, line, function = frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
    path = call_path(filename, position(frame))
    if not path:
        return [filename, line, "", False, [], function], []
    argument, text = first_argument(path[-1]), ""
    is_name = argument is not None and not any(isinstance(n, ast.Call) for n in ast.walk(argument))
    if argument is not None:
        text = ast.unparse(argument)
    return [filename, line, text[:80], is_name, branches(path), function], loop_names(path, argument)


def position(frame):
    """``(line, column, end line, end column)`` of what a frame is doing; only the line before Python 3.11."""
    if not hasattr(frame.f_code, "co_positions"):
        return frame.f_lineno, None, None, None
    for i, (line, end_line, column, end_column) in enumerate(frame.f_code.co_positions()):
        if i == frame.f_lasti // 2:
            return line, column, end_line, end_column
    return frame.f_lineno, None, None, None


@functools.lru_cache(64)
def _tree(source):
    try:
        return ast.parse(source)
    except SyntaxError:
        return ast.Module([], [])


def call_path(filename, at):
    """Nodes from the module down to the call at a position; empty where it is not clear which call that is."""
    calls = []

    def visit(node, path):
        path = [*path, node]
        if isinstance(node, ast.Call):
            here = node.lineno, node.col_offset, node.end_lineno, node.end_col_offset
            if here == at or (at[1] is None and node.lineno == at[0]):
                calls.append(path)
        for child in ast.iter_child_nodes(node):
            if getattr(child, "lineno", 0) <= (at[0] or 0) <= getattr(child, "end_lineno", 1 << 30):
                visit(child, path)

    visit(_tree("".join(linecache.getlines(filename))), [])
    return calls[0] if len(calls) == 1 else []


def first_argument(call):
    """The node that tells what a call is about: its first argument, or the object of a method without one.

    Where the first argument is the output (``all_gather(outputs, mine)``), it is the second.
    """
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if len(call.args) > 1 and name.startswith(_OUTPUT_FIRST):
        return call.args[1]
    if call.args:
        return call.args[0]
    if call.keywords:
        return call.keywords[0].value
    return call.func.value if isinstance(call.func, ast.Attribute) else None


def branches(path):
    """Branches that a node stands in: ``[[line of the if, which branch], ...]``."""
    found = []
    for node, child in zip(path, path[1:]):
        if isinstance(node, (ast.If, ast.IfExp)):
            orelse = node.orelse if isinstance(node.orelse, list) else [node.orelse]
            body = node.body if isinstance(node.body, list) else [node.body]
            if child in body or child in orelse:
                found.append([node.lineno, int(child in orelse)])
        elif isinstance(node, ast.Match):
            found.append([node.lineno, node.cases.index(child) if child in node.cases else -1])
    return found


def loop_names(path, argument):
    """Targets of the for loops around a call whose values its argument uses."""
    if argument is None:
        return []
    used = {n.id for n in ast.walk(argument) if isinstance(n, ast.Name)}
    names = []
    for node in path:
        if isinstance(node, ast.For):
            targets = [n.id for n in ast.walk(node.target) if isinstance(n, ast.Name)]
            names += targets if used.intersection(targets) else []
    return names


# crossing


@dataclass(frozen=True)
class Pair:
    """One position at which the labels of two ranks differ."""

    seq: int
    mine: list  # frames of this rank's label
    theirs: list
    root: int = -1  # of a call in which one of the two is the root
    calls: tuple = ()  # what both ranks called there, for messages

    def decisive(self):
        """The innermost frames in which the labels differ; None where one label only has more frames."""
        return next(((a, b) for a, b in zip(self.mine, self.theirs) if a != b), None)

    def exclusive(self):
        """The ifs in whose different branches the ranks stand: there they do different things on purpose."""
        ifs = set()
        for a, b in zip(self.mine, self.theirs):
            other = dict(map(tuple, b[BRANCHES]))
            ifs |= {(a[FILE], line) for line, branch in a[BRANCHES] if other.get(line, branch) != branch}
        return ifs


def moves_on(earlier, later):
    """Whether one rank, from one label of its own to a later one, went down its code or on in a loop of names.

    A rank that goes back begins another pass; one that stands in another function says nothing on the order.
    """
    for a, b in zip(reversed(earlier), reversed(later)):
        if a[:3] != b[:3]:
            return a[FILE] == b[FILE] and a[FUNCTION] == b[FUNCTION] and a[LINE] <= b[LINE]
    return False


def is_swapped(earlier, later):
    """Whether two ranks have made two named calls in different orders, within one pass through the code."""
    first, second = earlier.decisive(), later.decisive()
    if first is None or second is None or earlier.root != later.root:
        return False
    (a, b), (c, d) = first, second
    if not all(frame[IS_NAME] for frame in (a, b, c, d)):
        return False
    if earlier.exclusive() and later.exclusive() and not earlier.exclusive() & later.exclusive():
        return False  # roles that swap from one if to the next
    return c[TEXT] == b[TEXT] != d[TEXT] == a[TEXT] and _both_move_on(earlier, later)


def is_shifted(earlier, later):
    """Whether one rank makes now what the other made before: one of them has left out a call."""
    first, second = earlier.decisive(), later.decisive()
    if first is None or second is None or later.root >= 0 or earlier.exclusive() or later.exclusive():
        return False
    (a, b), (c, d) = first, second
    repeats = (c == b and c[TEXT]) or (d == a and d[TEXT])
    return bool(repeats) and _both_move_on(earlier, later)


def _both_move_on(earlier, later):
    return moves_on(earlier.mine, later.mine) and moves_on(earlier.theirs, later.theirs)


class Order:
    """Follows the labels of this rank and its peers on each channel."""

    def __init__(self):
        self._pairs = {}  # (channel, peer) -> the last positions with different labels

    def compare(self, key, pair, p2p):
        """Note a position with different labels; ``("swapped" or "shifted", earlier pair)`` if it proves a mistake."""
        pairs = self._pairs.setdefault(key, deque(maxlen=HISTORY))
        verdict = None
        for earlier in [p for p in reversed(pairs) if p.seq < pair.seq]:
            if is_swapped(earlier, pair):
                verdict = "swapped", earlier
            elif not p2p and is_shifted(earlier, pair):
                verdict = verdict or ("shifted", earlier)
        pairs.append(pair)
        return verdict
