"""Pictures of the course: SVG strings and curves. Functions take tables and recordings, never tensors."""
from dtlab.plots.bars import Panel, bars
from dtlab.plots.curves import curves
from dtlab.plots.memory import memory
from dtlab.plots.messages import messages
from dtlab.plots.ranks_picture import ranks_picture
from dtlab.plots.ring import ring
from dtlab.plots.svg import Svg
from dtlab.plots.timeline import timeline

__all__ = ["Panel", "Svg", "bars", "curves", "memory", "messages", "ranks_picture", "ring", "timeline"]
