"""Every performance ratio of the course beside its peer, measured side by side: ``python benchmarks/run.py``."""
