"""Every performance ratio beside its peer, measured side by side: ``make bench``.

Engines take turns, so that a machine that grows busy slows all of them; figures are medians, with lowest and highest.
Nothing here fails because something was slow: the last column says whether a goal is met.
"""
import argparse
import importlib.metadata
import os
import pathlib
import platform
import signal
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks import (  # noqa: E402
    collectives,
    data_parallel,
    ranks,
    registry,
    replay,
    schedules,
    steps,
    table,
    tensor_parallel,
    zero,
)
from benchmarks.bench import NUM_RANKS, Bench  # noqa: E402
from dtlab import machine  # noqa: E402


def conditions():
    """Versions, cores and load: figures mean nothing without them."""
    versions = [f"Python {platform.python_version()}"]
    for package in ("torch", "ipyparallel"):
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {package}")
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    return (
        f"{', '.join(versions)}; {platform.system()} {platform.machine()}, {machine.usable_cores()} cores; "
        f"{NUM_RANKS} ranks, gloo, 1 thread each; load {load} at the start"
    )


def measure(row, bench):
    """The lines of one row, one for each peer."""
    missing = {peer: registry.missing_package(peer) for peer in row.peers}
    samples = row.measure(bench, [peer for peer in row.peers if not missing[peer]])
    return [table.line(row, peer, samples, missing[peer]) for peer in row.peers]


def chosen_rows(names):
    """The rows to measure: those named, or all."""
    unknown = [name for name in names if name not in registry.ROWS]
    if unknown:
        raise SystemExit(f"no row is called {', '.join(unknown)}; there are {', '.join(registry.ROWS)}")
    return [row for name, row in registry.ROWS.items() if not names or name in names]


def main(argv=None):
    """Measure and print; 1 only if an engine broke."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", default=[], metavar="ROW", help=", ".join(registry.ROWS))
    parser.add_argument("--quick", action="store_true", help="one round: shows that it works, not how fast")
    args = parser.parse_args(argv)
    rows = chosen_rows(args.only)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that engines are ended
    print(conditions(), flush=True)
    lines, started = [], time.monotonic()
    with Bench(args.quick) as bench:
        for row in rows:
            print(f"  {row.name} ...", file=sys.stderr, flush=True)
            lines += measure(row, bench)
    print("\n" + table.text(lines) + "\n")
    print(f"medians [lowest-highest]; {time.monotonic() - started:.0f} s; load {os.getloadavg()[0]:.1f} at the end")
    if args.quick:
        print("--quick: one round only; these are not figures to quote")
    for engine, trouble in bench.broken.items():
        print(f"{engine} broke: {trouble}", file=sys.stderr)
    return 1 if bench.broken else 0


# imported for their rows
assert collectives and data_parallel and ranks and replay and schedules and steps and tensor_parallel and zero
if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; the engines have ended")
