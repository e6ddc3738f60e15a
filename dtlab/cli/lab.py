"""``dtlab lab``: working copies in work/, then JupyterLab on lesson 00. Nothing is reported to anybody."""
import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from dtlab.cli import bootstrap, working_copies

_QUIET = {"fetchNews": "false", "checkForUpdates": False}  # no news pop-up, no question to any server


def main(argv) -> int:
    """Make the working copies and run JupyterLab until it is stopped; return its exit code."""
    options = _options(argv)
    copies = [Path(path) for path in working_copies.make_all()]
    first = next((path for path in sorted(copies) if path.name.startswith("00")), bootstrap.ROOT)
    env = {**os.environ, **settings(bootstrap.ROOT / "work" / ".lab")}
    target = first.relative_to(bootstrap.ROOT).as_posix() if first != bootstrap.ROOT else ""
    return _serve(command(target, options), env, target)


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
    args = [f"--ServerApp.root_dir={bootstrap.ROOT}", f"--port={options.port}", "--log-level=WARN",
            "--ServerApp.answer_yes=True"]
    if options.no_browser or not has_display():
        args.append("--no-browser")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        args.append("--allow-root")  # in containers everybody is root
    return [sys.executable, "-m", "jupyterlab", *args, *([target] if target else [])]


def _serve(command, env, target) -> int:
    server = subprocess.Popen(command, cwd=bootstrap.ROOT, env=env)
    signal.signal(signal.SIGTERM, lambda *_: server.terminate())
    try:
        address = _address(server, target)
        if address:
            print(f"JupyterLab: {address}\nCtrl-C stops it.", flush=True)
        return server.wait()
    except KeyboardInterrupt:  # the terminal has told the server too
        return server.wait()
    finally:
        if server.poll() is None:
            server.terminate()


def _address(server, target, limit_s=60):
    """Address with its token, read from the file that the server writes when it is up; None if it ended."""
    from jupyter_core.paths import jupyter_runtime_dir

    path = Path(jupyter_runtime_dir(), f"jpserver-{server.pid}.json")
    end = time.monotonic() + limit_s
    while server.poll() is None and time.monotonic() < end:
        try:
            info = json.loads(path.read_text())
            return f"{info['url']}lab/tree/{target}?token={info['token']}"
        except (OSError, ValueError):
            time.sleep(0.1)
    return None
