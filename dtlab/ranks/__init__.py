"""Live ranks: ``launch`` starts them, ``run``, ``push``, ``pull`` and ``%%ranks`` talk to them.

Notebook side: pool, settings, run, relay, monitor, report, nursery, notebook, interrupts. Zygote: zygote. Rank side:
worker, store, leaving, cells, console, calls, guard, guard_facts, guard_order, guard_buffers, figures. Shared: wire,
parcels, board.
"""
from dtlab.ranks.pool import Ranks, current_ranks, launch

__all__ = ["Ranks", "current_ranks", "launch"]
