"""The course's explorers, by the lesson that shows them: ``dtlab.explore``."""
from dtlab.widgets.collectives import collectives
from dtlab.widgets.data_parallel import data_parallel
from dtlab.widgets.memory import memory
from dtlab.widgets.zero import zero

__all__ = ["collectives", "data_parallel", "memory", "zero"]
