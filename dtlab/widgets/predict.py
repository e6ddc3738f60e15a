"""Questions that a lesson asks before it measures: commit before you see.

``predict`` shows radio buttons, ``reveal`` holds the choice against what a cell measured. Each wrong choice is
a known misconception with its own one-line answer. Headless runs print the same text every time.
"""
import html
import textwrap

from dtlab import notes, shell
from dtlab.errors import ConfigError

_questions = {}  # key -> _Question


class _Question:
    """One question: its text, its choices with their replies, and what the reader chose so far."""

    def __init__(self, key, text, choices):
        self.key, self.text = key, " ".join(text.split())
        self.choices = {str(choice): reply for choice, reply in choices.items()}
        kept = notes.read("predictions").get(key)
        self.choice = kept if kept in self.choices else None
        self.buttons = None

    def static(self):
        """The question as plain text: for headless runs and for readers without a kernel."""
        lines = textwrap.wrap(f"Question {self.key}: {self.text}", 100)
        return "\n".join([*lines, *(f"  ( ) {choice}" for choice in self.choices)])

    def show(self):
        """Display the radio buttons; Tab goes from one to the next, space chooses."""
        import ipywidgets
        from IPython.display import display

        full = ipywidgets.Layout(width="100%", height="auto")
        title = ipywidgets.HTML(f"<b>Question {self.key}.</b> {html.escape(self.text)}", layout=full)
        self.buttons = ipywidgets.RadioButtons(
            options=list(self.choices), value=self.choice, layout=full, tooltip=f"Question {self.key}: {self.text}"
        )
        self.buttons.observe(self._chosen, names="value")
        view = ipywidgets.VBox([title, self.buttons])._repr_mimebundle_()
        display({**view, "text/plain": self.static()}, raw=True)

    def _chosen(self, change):
        self.choice = change["new"]
        notes.write("predictions", self.key, self.choice)


def predict(key, question, choices):
    """Ask a question before its answer is measured.

    Args:
        key: lesson and number, for example ``"00.1"``.
        question: one or two sentences.
        choices: text of a choice -> the one-line reply that ``reveal`` gives to who chose it.

    Raises:
        ConfigError: fewer than two choices.
    """
    if len(choices) < 2:
        raise ConfigError(f"predict({key!r}) got {len(choices)} choices; a question needs at least 2")
    asked = _questions[key] = _Question(key, question, choices)
    if not shell.in_notebook():
        print(asked.static())
    else:
        asked.show()


def reveal(key, measured, right=None):
    """Print what the reader said beside what was measured, and the reply to that choice.

    Args:
        key: the key given to ``predict``.
        measured: what a cell measured; shown as ``str(measured)``.
        right: the choice that the measurement makes the right one; ``str(measured)`` if that is a choice.

    Raises:
        ConfigError: the question was not asked in this kernel, or ``right`` is none of its choices.
    """
    if key not in _questions:
        asked = ", ".join(_questions) or "none"
        raise ConfigError(f"no question {key!r} was asked in this kernel (asked: {asked}); run its predict cell first")
    question = _questions[key]
    if right is not None and str(right) not in question.choices:
        raise ConfigError(f"right={right!r} is no choice of question {key}; those are {', '.join(question.choices)}")
    right = str(measured if right is None else right)
    if not shell.in_notebook():
        print(f"Question {key}, measured: {measured}")
        for choice, reply in question.choices.items():
            print(f"  {_mark(choice, right)}{choice}: {reply}")
    elif question.choice is None:
        print(f"Question {key} has no answer yet: choose one above, then run this cell again.")
    else:
        if question.buttons is not None:
            question.buttons.disabled = True
        verdict = ", and that is right" if question.choice == right else ""
        print(f"You said: {question.choice}. Measured: {measured}{verdict}.\n{question.choices[question.choice]}")


def _mark(choice, right):
    return "(x) " if choice == right else "( ) "
