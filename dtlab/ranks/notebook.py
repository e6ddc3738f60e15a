"""IPython side: the ``%%ranks`` magic, names of cells in messages, and a hint when a name lives on the other side."""
import linecache
import os
import re
import sys
import threading

from dtlab.errors import ConfigError
from dtlab.shell import notebook_shell

_USAGE = "%%ranks [RANKS] [--timeout SECONDS] [--record NAME], for example %%ranks 0,2 --timeout 30"


def setup(shell):
    """Register the magic and the hint in a shell; start the zygote in the background in a Jupyter kernel."""
    if "ranks" not in shell.magics_manager.magics["cell"]:
        shell.register_magic_function(_ranks_magic, magic_kind="cell", magic_name="ranks")
        shell.set_custom_exc((NameError,), _show_name_error)
    kernel = getattr(shell, "kernel", None) is not None and os.name != "nt"  # on Windows launch says what to do
    if kernel and threading.current_thread() is threading.main_thread():
        from dtlab.ranks.nursery import nursery

        nursery()


def _ranks_magic(line, cell):
    """Run the cell on ranks: %%ranks, %%ranks 1, %%ranks 0,2 --timeout 30, %%ranks --record name."""
    from dtlab.ranks.pool import current_ranks

    pool = current_ranks()
    if pool is None:
        raise ConfigError("there are no ranks yet: run a cell with ranks = dtlab.launch(4) first")
    chosen, timeout, record = parse_line(line)
    label = f"cell [{_cell_number()}]"
    recording = pool.run_cell("\n" + cell, label, chosen, timeout, record=bool(record))  # line 1 is the magic's
    if record:
        sys.modules["IPython"].get_ipython().user_ns[record] = recording


def _cell_number():
    """The number in the prompt of the cell that runs."""
    shell = sys.modules["IPython"].get_ipython()
    numbers = getattr(shell.compile, "_filename_map", {})  # execution_count is one ahead in newer versions
    return max(numbers.values(), default=shell.execution_count)


def parse_line(line):
    """``(ranks or None, timeout or ..., name of the recording or None)`` of a magic's line.

    Example:
        >>> parse_line("0,2-3 --timeout 3 --record step")
        ([0, 2, 3], 3.0, 'step')
    """
    timeout, record = ..., None
    try:
        if option := re.search(r"--timeout(=|\s+)(\S+)", line):
            timeout = float(option[2])
            line = line[: option.start()] + line[option.end() :]
        if option := re.search(r"--record(=|\s+)([^\W\d]\w*)(?!\S)", line):
            record = option[2]
            line = line[: option.start()] + line[option.end() :]
        return _parse_ranks(line.strip()), timeout, record
    except ValueError:
        raise ConfigError(f"{line.strip()!r} is not understood: {_USAGE}") from None


def _parse_ranks(text):
    if text in ("", "all"):
        return None
    ranks = []
    for part in text.removeprefix("[").removesuffix("]").split(","):
        first, dash, last = part.partition("-")
        some = range(int(first), int(last) + 1) if dash else [int(first)]
        if not some:
            raise ValueError
        ranks += some
    return ranks


def cell_sources(filenames):
    """File name -> (label, source), for those of the files that are cells of this notebook; for tracebacks on ranks."""
    shell = notebook_shell()
    numbers = getattr(shell.compile, "_filename_map", {}) if shell is not None else {}
    cells = [name for name in filenames if name in numbers and len(linecache.cache.get(name, ())) > 2]
    return {name: (f"cell [{numbers[name]}]", "".join(linecache.cache[name][2])) for name in cells}


def missing_name_hint(name):
    """The cure for a name that a rank does not know but the notebook does; empty for another, or None."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is not None and name in shell.user_ns:
        return f"{name} lives in the notebook, not on the ranks: ranks.push({name}={name})"
    return ""


def _show_name_error(shell, kind, error, traceback, tb_offset=None):
    """Show a NameError of the notebook, and say so if the name lives on the ranks."""
    from dtlab.ranks.pool import current_ranks

    pool, name = current_ranks(), getattr(error, "name", None)
    hint = ""
    if name in ("rank", "world_size", "dist", "device"):
        hint = f"{name} is a name of the ranks: begin the cell with %%ranks"
    elif pool is not None and any(name in names for names in pool.names.values()):
        hint = f"{name} lives on the ranks: ranks.pull({name!r})"
    if hint:  # add_note would do, from Python 3.11
        shown = shell.InteractiveTB.structured_traceback(kind, error, traceback, tb_offset)
        error._render_traceback_ = lambda: [*shown, hint]
    shell.showtraceback((kind, error, traceback), tb_offset=tb_offset)
