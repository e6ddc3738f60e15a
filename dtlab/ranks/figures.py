"""The matplotlib backend of ranks: ``plt.show()`` sends the open figures to the notebook."""
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_agg import FigureCanvasAgg as FigureCanvas  # noqa: F401  (name matplotlib looks for)

from dtlab.ranks import console, worker


def show(*_, **__):
    """Show and close all open figures."""
    console.show_open_figures(worker._worker.send_output)


FigureCanvasAgg.manager_class.pyplot_show = classmethod(lambda cls, *, block=None: show())
