"""``dtlab doctor``: the full examination in a terminal."""

from dtlab.examine import doctor


def main(argv) -> int:
    """Print every finding; return 1 if something will go wrong."""
    report = doctor()
    print(report.full())
    return 1 if report.problems else 0
