"""``dtlab lab``: working copies in work/, then JupyterLab on lesson 00. Nothing is reported to anybody."""

import argparse
import json
import os
import sys
from pathlib import Path
from urllib.parse import quote

from dtlab.cli import bootstrap, working_copies
from dtlab.examine import system_finding

_QUIET = {"fetchNews": "false", "checkForUpdates": False}  # no news pop-up, no question to any server

QUIET_KERNELS = [  # what would warn in the terminal of a reader who can do nothing about it
    "--ServerApp.websocket_ping_interval=90000",  # not shorter than its time-out
    "--KernelManager.transport_encryption=auto",  # between the server and its kernels
]


def main(argv) -> int:
    """Make the working copies, then become JupyterLab; it prints its address and opens a browser where there is one."""
    options = _options(argv)
    system = system_finding()
    if system.level != "ok":
        print(system.line())
    first = min(working_copies.make_all())
    env = {**os.environ, **settings(bootstrap.ROOT / "work" / ".lab")}
    os.chdir(bootstrap.ROOT)
    return bootstrap.become(command(first.relative_to(bootstrap.ROOT).as_posix(), options), env)


def _options(argv):
    parser = argparse.ArgumentParser(prog="dtlab lab", description="Open JupyterLab on your working copies.")
    parser.add_argument("--no-browser", action="store_true", help="print the address, open no browser")
    parser.add_argument("--port", type=int, default=8888, help="the first port to try (default 8888)")
    return parser.parse_args(argv)


def has_display() -> bool:
    """Whether a browser window can open here."""
    if sys.platform != "linux":
        return True
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "WSL_DISTRO_NAME"))


def settings(folder) -> dict:
    """Environment variables that point JupyterLab at settings without news and update checks.

    A folder that ``JUPYTERLAB_SETTINGS_DIR`` already names is used instead; what the reader changed later is kept.
    """
    chosen = Path(os.environ.get("JUPYTERLAB_SETTINGS_DIR", Path(folder, "settings")))
    path = chosen / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_QUIET, indent=2) + "\n")
    workspaces = os.environ.get("JUPYTERLAB_WORKSPACES_DIR", str(Path(folder, "workspaces")))
    return {"JUPYTERLAB_SETTINGS_DIR": str(chosen), "JUPYTERLAB_WORKSPACES_DIR": workspaces}


def command(target, options) -> "list[str]":
    """The JupyterLab command line: the clone as root, warnings only, one Ctrl-C stops it."""
    args = [
        f"--ServerApp.root_dir={bootstrap.ROOT}",
        f"--port={options.port}",
        "--log-level=WARN",
        "--ServerApp.answer_yes=True",
        *QUIET_KERNELS,
        f"--LabApp.default_url=/lab/tree/{quote(target)}",
    ]
    if options.no_browser or not has_display():
        args.append("--no-browser")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        args.append("--allow-root")  # in containers everybody is root
    return [sys.executable, "-m", "jupyterlab", *args]
