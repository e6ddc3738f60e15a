"""Pictures of the course: SVG strings and curves. Functions take tables and recordings, never tensors."""
from dtlab.plots.curves import curves
from dtlab.plots.messages import messages
from dtlab.plots.ranks_picture import ranks_picture
from dtlab.plots.svg import Svg
from dtlab.plots.timeline import timeline

__all__ = ["Svg", "curves", "messages", "ranks_picture", "timeline"]
