"""The course's explorers, by the lesson that shows them: ``dtlab.explore``."""
from dtlab.widgets.collectives import collectives
from dtlab.widgets.data_parallel import data_parallel

__all__ = ["collectives", "data_parallel"]
