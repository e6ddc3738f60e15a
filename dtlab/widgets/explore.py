"""The course's explorers, by the lesson that shows them: ``dtlab.explore``."""
from dtlab.widgets.collectives import collectives

__all__ = ["collectives"]
