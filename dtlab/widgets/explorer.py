"""Explorers: a picture that follows its controls.

An explorer is a pure function of named values, and controls over them. It opens on the first end of its key move, the
one change that it is there to show. Readers without a kernel see both ends of the move in one static picture.
"""
from dataclasses import dataclass
from html import escape

from dtlab import shell
from dtlab.errors import ConfigError
from dtlab.plots.twin import twin

_PICTURE = ('<div style="width: 100%; max-width: calc({width}px * var(--dtlab-zoom, 1))">{svg}</div>'
            '<p aria-live="polite" style="min-height: 6em; line-height: 1.5; white-space: pre-line">{text}</p>')
_FULL = {"width": "100%", "max_width": "none"}


@dataclass(frozen=True)
class Control:
    """One knob of an explorer.

    Attributes:
        label: what it sets, with its unit.
        values: the legal values in order, or a function that gives them from the values of all controls (a dict).
        kind: ``"slider"``, ``"stepper"`` (a slider with Back and Next), ``"dropdown"`` or ``"toggle"``.
        text: function that gives a value as the reader sees it.
    """

    label: str
    values: object
    kind: str = "slider"
    text: object = str

    def legal(self, values):
        """The values allowed beside those of the other controls."""
        return tuple(self.values(values) if callable(self.values) else self.values)


def toggle(label):
    """A control that is on or off."""
    return Control(label, (False, True), "toggle", lambda on: "yes" if on else "no")


class Explorer:
    """Controls over a pure function, shown as widgets, driven by a test through ``set``.

    Args:
        draw: called with one keyword argument per control; returns ``(Svg, dict of the numbers shown)``. Every
            picture has the same size, so that the page never jumps.
        controls: name -> Control.
        first: name -> value at the first end of the key move; a control not named starts at its first value.
        last: name -> value, what the key move changes.
        move: the key move in one sentence.
        run: ``(label, measure)`` where something is to be measured: a button calls ``measure`` with the controls'
            values, and from then on ``draw`` gets what it returned last as ``measured`` (None before).

    Raises:
        ConfigError: a value that is not legal.
    """

    def __init__(self, draw, controls, *, first, last, move, run=None):
        self._draw, self.controls, self.move, self._run = draw, controls, move, run
        self._now, self._measured, self._view = {}, None, None
        self._first = self._checked(first)
        self._last = self._checked({**self._first, **last})
        self.set(**self._first)

    def set(self, **degrees):
        """Set several controls at once; computes once, and nothing changes if one value is not legal.

        A control that was not named, and whose value is no longer legal, takes its last legal one.

        Raises:
            ConfigError: no such control, or a value it does not have.
        """
        self._now = self._checked(degrees)
        self._picture, self._numbers = self._drawn(self._now)
        if self._view is not None:
            self._view.show()
        return self

    @property
    def values(self):
        """The controls' values and the numbers shown."""
        return {**self._now, **self._numbers}

    @property
    def svg(self):
        """The picture as it stands now."""
        return str(self._picture)

    def run(self):
        """Measure at the controls' values, as the Run button does, and show it on the picture.

        Raises:
            ConfigError: this explorer has nothing to measure.
        """
        if self._run is None:
            raise ConfigError("this explorer has no Run button: it computes all that it shows; move its controls by "
                              f"set({', '.join(f'{name}=...' for name in self.controls)})")
        self._measured = self._run[1](**self._now)
        return self.set()

    def twin(self):
        """Both ends of the key move in one ``Svg``."""
        ends = [self._first, self._last]
        moved = [name for name in self.controls if self._first[name] != self._last[name]]
        titles = [", ".join(f"{self.controls[name].label}: {self.controls[name].text(end[name])}" for name in moved)
                  for end in ends]
        return twin([self._drawn(end)[0] for end in ends], titles, caption=self.move)

    def view(self):
        """The widgets, made when first asked for."""
        if self._view is None:
            self._view = _View(self)
        return self._view.root

    def legal(self, name):
        """Values that one control may take now."""
        return self.controls[name].legal(self._now)

    def __repr__(self):
        return self._picture.text

    def _repr_mimebundle_(self, include=None, exclude=None):
        return bundle(self)

    def _drawn(self, values):
        measured = {"measured": self._measured} if self._run else {}
        return self._draw(**values, **measured)

    def _checked(self, degrees):
        """All controls' values with ``degrees`` set."""
        for name in set(degrees) - set(self.controls):
            raise ConfigError(f"this explorer has no control {name!r}; it has {', '.join(self.controls)}")
        values = {**self._now, **degrees}
        for name, control in self.controls.items():
            legal = control.legal(values)
            value = values.get(name, legal[0])
            if value not in legal and name in degrees:
                raise ConfigError(f"{name}={value!r} is not legal here; legal: {', '.join(map(repr, legal))}")
            values[name] = legal[legal.index(value)] if value in legal else legal[-1]
        return {name: values[name] for name in self.controls}


class Tabs:
    """Explorers behind tabs, driven as one: ``tab`` is a further control.

    Args:
        explorers: name of the tab -> Explorer.
    """

    def __init__(self, explorers):
        self.explorers, self.tab, self._box = explorers, next(iter(explorers)), None

    def set(self, tab=None, **degrees):
        """Change to a tab, or stay; then as ``Explorer.set`` there.

        Raises:
            ConfigError: no such tab, no such control there, or a value it does not have.
        """
        tab = self.tab if tab is None else tab
        if tab not in [*self.explorers]:
            raise ConfigError(f"there is no tab {tab!r}; there are {', '.join(self.explorers)}")
        self.explorers[tab].set(**degrees)
        self.tab = tab
        if self._box is not None:
            self._box.selected_index = list(self.explorers).index(tab)
        return self

    @property
    def values(self):
        """The tab, its controls' values and the numbers it shows."""
        return {"tab": self.tab, **self.explorers[self.tab].values}

    @property
    def svg(self):
        """The picture of the tab as it stands now."""
        return self.explorers[self.tab].svg

    def twin(self):
        """The twins of all tabs, one above the other."""
        names = ", ".join(self.explorers)
        return twin([explorer.twin() for explorer in self.explorers.values()], list(self.explorers), caption=names)

    def view(self):
        """The widgets, made when first asked for."""
        if self._box is None:
            import ipywidgets

            views = [explorer.view() for explorer in self.explorers.values()]
            self._box = ipywidgets.Tab(views, titles=tuple(self.explorers))
            self._box.selected_index = list(self.explorers).index(self.tab)
            self._box.observe(lambda change: self.set(tab=list(self.explorers)[change["new"] or 0]), "selected_index")
        return self._box

    def __repr__(self):
        return repr(self.explorers[self.tab])

    def _repr_mimebundle_(self, include=None, exclude=None):
        return bundle(self)


def bundle(explorer):
    """What a notebook shows: the widgets where somebody watches, and always the static twin and its text."""
    static = explorer.twin()
    try:
        shown = explorer.view()._repr_mimebundle_() if shell.in_notebook() else {}
    except ImportError:  # ipywidgets is not installed
        shown = {}
    return {**shown, "image/svg+xml": str(static), "text/plain": static.text}


class _View:
    """The widgets of one explorer, in step with its values both ways."""

    def __init__(self, explorer):
        import ipywidgets

        self.explorer, self.quiet = explorer, False
        self.inputs = {name: self._input(ipywidgets, name, control) for name, control in explorer.controls.items()}
        self.picture = ipywidgets.HTML(layout=_FULL)
        rows = [ipywidgets.HTML(f'<b style="line-height: 1.5">{escape(explorer.move)}</b>', layout=_FULL)]
        rows += [self._row(ipywidgets, name, control) for name, control in explorer.controls.items()]
        if explorer._run:
            self.button = ipywidgets.Button(description=explorer._run[0], layout={"width": "auto"})
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
        button.disabled, self.said.value = True, "runs ..."
        try:
            self.explorer.run()
            self.said.value = "measured"
        except Exception as error:  # any: the reader must see it here, not in a log
            self.said.value = f"<pre>{escape(f'{type(error).__name__}: {error}')}</pre>"
        except BaseException:
            self.said.value = "interrupted"
            raise
        finally:
            button.disabled = False
