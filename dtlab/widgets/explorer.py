"""Explorers: a picture that follows its controls.

An explorer is a pure function of named values, and controls over them. It opens on the first end of its key move, the
one change that it is there to show. Readers without a kernel see both ends of the move in one static picture.
"""
import contextlib
from dataclasses import dataclass
from typing import NamedTuple

from dtlab.errors import ConfigError
from dtlab.plots.twin import twin
from dtlab.widgets.view import View, bundle


@dataclass(frozen=True)
class Control:
    """One knob of an explorer.

    Attributes:
        label: what it sets, with its unit.
        values: the legal values in order, or a function that gives them from the values of all controls (a dict).
        kind: ``"slider"``, ``"stepper"`` (a slider with Back and Next), ``"dropdown"`` or ``"toggle"``.
        text: function that gives a value as the reader sees it.
        why_not: function of a value and of the values of all controls that says why it is not legal, or None.
    """

    label: str
    values: object
    kind: str = "slider"
    text: object = str
    why_not: object = lambda value, values: None

    def legal(self, values):
        """The values allowed beside those of the other controls."""
        return tuple(self.values(values) if callable(self.values) else self.values)


def toggle(label):
    """A control that is on or off."""
    return Control(label, (False, True), "toggle", lambda on: "yes" if on else "no")


class Run(NamedTuple):
    """What the Run button does.

    Attributes:
        label: its words.
        measure: function of the controls' values (keywords); ``draw`` gets what it returned last as ``measured``.
        takes: roughly how long, ``"about 10 s"``.
        shows: where to look afterwards.
    """

    label: str
    measure: object
    takes: str = "some seconds"
    shows: str = "the picture"


@contextlib.contextmanager
def live_ranks():
    """For ``measure``: the ranks that are live, or four that end with the measurement.

    Raises:
        ConfigError: one rank is live; others in its place would end it.
    """
    import dtlab

    ranks = dtlab.current_ranks()
    if ranks is None:
        with dtlab.launch(4) as ranks:
            yield ranks
    elif len(ranks) < 2:
        raise ConfigError("measuring takes 2 ranks at least, and 1 is live; others in its place would end it, with "
                          "its variables: launch more yourself, ranks = dtlab.launch(4), and run again")
    else:
        yield ranks


class Explorer:
    """Controls over a pure function, shown as widgets, driven by a test through ``set``.

    Args:
        draw: called with one keyword argument per control; returns ``(Svg, dict of the numbers shown)``. Every
            picture has the same size, so that the page never jumps.
        controls: name -> Control.
        first: name -> value at the first end of the key move; a control not named starts at its first value.
        last: name -> value, what the key move changes.
        move: the key move in one sentence.
        run: a ``Run`` where something is to be measured: a button calls its ``measure``; before that ``draw`` gets
            None as ``measured``.

    Raises:
        ConfigError: a value that is not legal.
    """

    def __init__(self, draw, controls, *, first, last, move, run=None):
        self._draw, self.controls, self.move, self._run = draw, controls, move, run and Run(*run)
        self._now, self._measured, self._view = {}, None, None
        self._first = self._checked(first)
        self._last = self._checked({**self._first, **last})
        self.set(**self._first)

    def set(self, **degrees):
        """Set several controls at once; computes once, and nothing changes if one value is not legal.

        A value is given as ``legal`` has it, or as the screen shows it: ``25_000_000`` or ``"25 MB"``.
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

    def is_fresh(self):
        """Whether it stands at the first end of its key move, and nothing was measured."""
        return self._now == self._first and self._measured is None

    def now(self):
        """The picture as it stands now, an ``Svg``, below the values of its controls."""
        values = (f"{control.label}: {control.text(self._now[name])}" for name, control in self.controls.items())
        return twin([self._picture], [""], caption=", ".join(values))

    def run(self):
        """Measure at the controls' values, as the Run button does, and show it on the picture.

        Raises:
            ConfigError: this explorer has nothing to measure.
        """
        if self._run is None:
            raise ConfigError("this explorer has no Run button: it computes all that it shows; move its controls by "
                              f"set({', '.join(f'{name}=...' for name in self.controls)})")
        self._measured = self._run.measure(**self._now)
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
            self._view = View(self)
        return self._view.root

    def legal(self, name):
        """Values that one control may take now.

        Raises:
            ConfigError: no such control.
        """
        self._known(name)
        return self.controls[name].legal(self._now)

    def __repr__(self):
        return self._picture.text

    def _repr_mimebundle_(self, include=None, exclude=None):
        return bundle(self)

    def _known(self, *names):
        for name in names:
            if name not in [*self.controls]:
                its = ", ".join(f"{name} (on the screen: {control.label})" if control.label != name else name
                                for name, control in self.controls.items())
                raise ConfigError(f"this explorer has no control {name!r}; it has {its}")

    def _drawn(self, values):
        measured = {"measured": self._measured} if self._run else {}
        return self._draw(**values, **measured)

    def _checked(self, degrees):
        """All controls' values with ``degrees`` set."""
        self._known(*degrees)
        values = {**self._now, **degrees}
        for name, control in self.controls.items():
            legal = control.legal(values)
            value = values.get(name, legal[0])
            place = _place(value, legal, control.text)
            if place is None and name in degrees:
                reason = control.why_not(value, values)
                raise ConfigError(f"{name}={value!r} is not legal here; legal: {_listed(legal, control.text)}"
                                  + (f": {reason}" if reason else ""))
            values[name] = legal[-1 if place is None else place]
        return {name: values[name] for name in self.controls}


def _place(value, legal, text):
    """Where a value, or its text on the screen, stands among the legal ones; None if it does not."""
    if getattr(value, "shape", ()) != ():  # an array is no value
        return None
    return next((place for place, its in enumerate(legal)
                 if value == its or isinstance(value, str) and value == text(its)), None)


def _listed(legal, text):
    """Values as they are given, with the words on the screen where those differ."""
    return ", ".join(repr(value) if text(value) == str(value) else f"{value!r} ({text(value)})" for value in legal)


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

    def is_fresh(self):
        """Whether the first tab is open and every explorer stands where it opened."""
        return self.tab == next(iter(self.explorers)) and all(its.is_fresh() for its in self.explorers.values())

    def now(self):
        """The picture of the tab as it stands now."""
        return self.explorers[self.tab].now()

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
