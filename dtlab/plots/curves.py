"""Curves over steps or sizes (matplotlib), in the course's one look."""
import io

from dtlab.plots.svg import Svg, titled

LOOK = {
    "figure.figsize": (6.5, 3), "font.size": 10, "axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False,
    "axes.spines.right": False, "svg.hashsalt": "dtlab", "svg.fonttype": "none", "legend.frameon": False,
}
_STYLES = [("#4D4D4D", "-", "o"), ("#0072B2", "--", "s"), ("#009E73", ":", "^"), ("#CC79A7", "-.", "D")]


def curves(series, *, x, y, xs=None):
    """Draw one line per entry of ``series``; told apart by colour, dash and marker.

    Args:
        series: name -> list of numbers.
        x: what the horizontal axis shows, with its unit.
        y: what the vertical axis shows, with its unit.
        xs: horizontal positions; 0, 1, 2, ... if not given.

    Returns:
        Svg, with the matplotlib ``axes`` as an attribute; pyplot's state is not touched.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(LOOK):
        figure = Figure(layout="constrained")
        axes = figure.subplots()
        for (name, values), (colour, dash, marker) in zip(series.items(), _STYLES * len(series)):
            positions = range(len(values)) if xs is None else xs
            axes.plot(positions, values, dash, color=colour, marker=marker, label=name, markersize=5,
                      markevery=max(1, len(values) // 10))
        axes.set(xlabel=x, ylabel=y)
        if xs is None or all(isinstance(position, int) for position in xs):  # no step 2.5
            axes.xaxis.get_major_locator().set_params(integer=True)
        if len(series) > 1:
            axes.legend()
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = "\n".join(f"{name}: {y} from {values[0]:.4g} to {values[-1]:.4g}, {len(values)} points"
                     for name, values in series.items())
    picture = Svg(titled(out.getvalue(), f"{y} over {x}: {', '.join(series)}"), text)
    picture.axes = axes
    return picture
