"""What a notebook shows of an explorer: its widgets and a static picture."""
from html import escape
from itertools import groupby

from dtlab import shell

_PICTURE = ('<div style="width: 100%; max-width: calc({width}px * var(--dtlab-zoom, 1))">{svg}</div>'
            '<p aria-live="polite" style="min-height: 6em; line-height: 1.5; white-space: pre-line">{text}</p>')
_FULL = {"width": "100%", "max_width": "none"}
_WRAPPED = {**_FULL, "flex_flow": "row wrap", "grid_gap": "0 16px"}


def bundle(explorer):
    """What a notebook shows: the widgets where somebody watches, and always a static picture and its text.

    That is the twin of a fresh explorer, else its present state.
    """
    static = explorer.twin() if explorer.is_fresh() else explorer.now()
    try:
        shown = explorer.view()._repr_mimebundle_() if shell.in_notebook() else {}
    except ImportError:  # ipywidgets is not installed
        shown = {}
    return {**shown, "image/svg+xml": str(static), "text/plain": static.text}


class View:
    """The widgets of one explorer, in step with its values both ways."""

    def __init__(self, explorer):
        import ipywidgets

        self.explorer, self.quiet = explorer, False
        self.inputs = {name: self._input(ipywidgets, name, control) for name, control in explorer.controls.items()}
        self.picture = ipywidgets.HTML(layout=_FULL)
        rows = [ipywidgets.HTML(f'<b style="line-height: 1.5">{escape(explorer.move)}</b>', layout=_FULL)]
        for is_small, its in groupby(explorer.controls.items(), lambda its: its[1].kind in ("dropdown", "toggle")):
            inputs = [self._row(ipywidgets, name, control) for name, control in its]
            rows += [ipywidgets.Box(inputs, layout=_WRAPPED)] if is_small else inputs
        if explorer._run:
            self.button = ipywidgets.Button(description=explorer._run.label, layout={"width": "auto"})
            self.button.on_click(self._pressed)
            self.said = ipywidgets.HTML()
            rows.append(ipywidgets.HBox([self.button, self.said]))
        self.root = ipywidgets.VBox([*rows, self.picture], layout=_FULL)
        self.show()

    def show(self):
        """Bring widgets and picture to the explorer's values, without an echo."""
        explorer, self.quiet = self.explorer, True
        try:
            for name, widget in self.inputs.items():
                with widget.hold_sync():
                    options = self._options(name)
                    if hasattr(widget, "options") and widget.options != options:
                        widget.options = options
                    widget.value = explorer._now[name]
        finally:
            self.quiet = False
        width = explorer.svg.split('viewBox="0 0 ', 1)[1].split(" ", 1)[0]
        svg = explorer.svg.replace("<svg ", '<svg style="width: 100%; height: auto; display: block" ', 1)
        self.picture.value = _PICTURE.format(width=width, svg=svg, text=escape(repr(explorer)))

    def _options(self, name):
        return tuple((self.explorer.controls[name].text(value), value) for value in self.explorer.legal(name))

    def _input(self, ipywidgets, name, control):
        look = {"description": control.label, "style": {"description_width": "initial"},
                "value": self.explorer._now[name]}
        if control.kind == "toggle":
            widget = ipywidgets.Checkbox(indent=False, layout={"width": "max-content"}, **look)
        else:
            kind = ipywidgets.Dropdown if control.kind == "dropdown" else ipywidgets.SelectionSlider
            width = "max-content" if control.kind == "dropdown" else "min(100%, 46em)"
            widget = kind(options=self._options(name), layout={"width": width}, **look)
        widget.observe(lambda change: self.quiet or self.explorer.set(**{name: change["new"]}), names="value")
        return widget

    def _row(self, ipywidgets, name, control):
        if control.kind != "stepper":
            return self.inputs[name]
        buttons = [ipywidgets.Button(description=text, layout={"width": "auto"}) for text in ("Back", "Next")]
        for button, way in zip(buttons, (-1, 1)):
            button.on_click(lambda _, way=way: self._step(name, way))
        return ipywidgets.HBox([*buttons, self.inputs[name]])

    def _step(self, name, way):
        legal = self.explorer.legal(name)
        place = legal.index(self.explorer._now[name]) + way
        if 0 <= place < len(legal):
            self.explorer.set(**{name: legal[place]})

    def _pressed(self, button):
        button.disabled, self.said.value = True, f"runs, {self.explorer._run.takes} ..."
        try:
            self.explorer.run()
            self.said.value = f"measured: see {self.explorer._run.shows}"
        except Exception as error:  # any: the reader must see it here, not in a log
            self.said.value = f"<pre>{escape(f'{type(error).__name__}: {error}')}</pre>"
        except BaseException:
            self.said.value = "interrupted"
            raise
        finally:
            button.disabled = False
