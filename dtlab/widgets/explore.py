"""The course's explorers, by the lesson that shows them: ``dtlab.explore``."""
from dtlab.widgets.collectives import collectives
from dtlab.widgets.context_parallel import context_parallel
from dtlab.widgets.data_parallel import data_parallel
from dtlab.widgets.memory import memory
from dtlab.widgets.tensor_parallel import tensor_parallel
from dtlab.widgets.zero import zero

__all__ = ["collectives", "context_parallel", "data_parallel", "memory", "tensor_parallel", "zero"]
