"""Native Windows, played on this machine: the course can be read there, and says that ranks need WSL2.

A child process loses what Windows' Python lacks (fcntl, fork, signals, AF_UNIX, ...) before it imports dtlab.
"""
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

COURSE = Path(__file__).resolve().parents[1]
WINDOWS = """
import contextlib, ctypes, importlib.metadata, importlib.util, multiprocessing.connection, os, pathlib, platform, psutil
import selectors, shutil, signal, socket, subprocess, sys, tempfile, types

machine = platform.machine()
platform.system, platform.machine, platform.release = lambda: "Windows", lambda: machine, lambda: "11"
for name in ("fcntl", "resource", "termios", "pwd", "grp", "pty", "torch"):
    sys.modules[name] = None  # importing it raises ImportError
LACKS = {os: "sched_getaffinity fork forkpty register_at_fork memfd_create MFD_CLOEXEC killpg getpgid setpgid setsid "
             "getuid geteuid waitid WNOHANG sysconf uname mkfifo pread pwrite eventfd pidfd_open",
         signal: "SIGKILL SIGSTOP SIGCONT SIGHUP SIGQUIT SIGCHLD SIGUSR1 SIGUSR2 SIGALRM pthread_sigmask pthread_kill "
                 "setitimer siginterrupt sigwait", socket: "AF_UNIX"}
for module, names in LACKS.items():
    for name in names.split():
        vars(module).pop(name, None)
for module in filter(None, (pathlib, sys.modules.get("pathlib._local"))):
    module.WindowsPath = module.PosixPath
os.name, sys.platform = "nt", "win32"
read, no_file = pathlib.Path.read_text, pathlib.Path("absent", "file")
hidden = lambda path: path.parts[1:2] in (("proc",), ("sys",))
pathlib.Path.read_text = lambda path, **more: read(no_file if hidden(path) else path, **more)

class Shell:
    "What a Jupyter kernel shows of itself to dtlab."
    kernel, user_ns, execution_count = object(), {}, 1
    magics_manager = types.SimpleNamespace(magics={"cell": {}})
    def register_magic_function(self, function, magic_kind, magic_name):
        self.magics_manager.magics["cell"][magic_name] = function
    def set_custom_exc(self, kinds, handler):
        pass

shell = Shell()
"""
KERNEL = 'sys.modules["IPython"] = types.SimpleNamespace(get_ipython=lambda: shell)\n'


def on_windows(code):
    program = WINDOWS + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", program], cwd=COURSE, capture_output=True, text=True, timeout=60)


def said(code):
    """What the code prints; it must not fail."""
    reply = on_windows(code)
    assert reply.returncode == 0, reply.stderr
    return reply.stdout


def test_the_doctor_answers_and_names_wsl2():
    text = said("import dtlab; print(dtlab.doctor())")
    assert "1 problem" in text and "Windows 11" in text and "wsl --install" in text


def test_the_doctor_answers_from_the_command_line():
    assert "wsl --install" in on_windows("from dtlab import cli; sys.exit(cli.main(['doctor']))").stdout


@pytest.mark.parametrize("names", [
    "dtlab.cli.lab, dtlab.cli.bootstrap, dtlab.cli.working_copies", "dtlab.plots, dtlab.notes, dtlab.ledger_table",
    "dtlab.widgets.predict, dtlab.widgets.present", "dtlab.ranks, dtlab.ranks.notebook, dtlab.ranks.progress",
])  # fmt: skip
def test_what_a_reader_imports_needs_nothing_that_windows_lacks(names):
    assert said(f"import {names}; print('fine')") == "fine\n"


def test_a_kernel_imports_dtlab_and_launch_names_wsl2():
    text = said(KERNEL + """
        import dtlab
        print(dtlab.current_ranks(), "ranks" in shell.magics_manager.magics["cell"])
        try:
            dtlab.launch(4)
        except dtlab.ConfigError as error:
            print(error)
    """.replace("\n        ", "\n"))
    assert text.startswith("None True\n") and "wsl --install" in text
