"""Live ranks: ``launch`` starts them, ``run``, ``push``, ``pull`` and ``%%ranks`` talk to them.

Notebook side: pool, run, relay, monitor, report, nursery, notebook, interrupts, environ. Zygote: zygote. Rank side:
worker, store, cells, console, calls, figures. Shared: wire, parcels, board.
"""
from dtlab.ranks.pool import Ranks, current_ranks, launch

__all__ = ["Ranks", "current_ranks", "launch"]
