"""The last exercise of a lab: programs seen from outside only; the learner names what ails each."""
import hashlib
from dataclasses import dataclass

from dtlab.checks.exercise import Exercise, Mistake

LETTERS = "ABCDEF"
_NOT = "another mistake than "


@dataclass(frozen=True)
class Programs:
    """The programs A to F of one lab.

    Attributes:
        exercise: its key, ``"lab01.5"``.
        signs: each choice -> what such a program looks like from outside.
        key: letter -> the first letters of a hash of the right choice: nobody reads it by accident.
    """

    exercise: str
    signs: dict
    key: dict

    @property
    def choices(self):
        """The names to choose from."""
        return tuple(self.signs)

    def is_right(self, letter, choice):
        """Whether this is what ails a program."""
        found = hashlib.sha256(f"{self.exercise} {letter} {choice}".encode()).hexdigest()[:8]
        return self.key.get(letter) == found

    def ailing(self, letter):
        """What ails a program; another letter is the right one's."""
        return next((choice for choice in self.signs if self.is_right(letter, choice)), "nothing wrong")

    def diagnose(self, case, diagnosis):
        """On the rank: what is wrong about each letter's name, nothing if it is right."""
        its = {letter: _plain(diagnosis.get(letter)) if isinstance(diagnosis, dict) else "" for letter in LETTERS}
        if {"", "?"} & set(its.values()):
            number = self.exercise.removeprefix("lab0")
            raise NotImplementedError(f"Exercise {number}: give each letter one of the choices")
        return {f"program {letter}": "" if self.is_right(letter, choice) else f"{_NOT}{choice!r}"
                for letter, choice in its.items()}  # fmt: skip

    def misnamed(self, evidence, _expected):
        """What a program would look like if it were what the learner calls it."""
        program, found = next((its, found) for its, found in evidence.results[0].items() if found)
        sign = self.signs.get(found.removeprefix(_NOT).strip("'"))
        if sign is None:
            return f"what you call {program} is none of the choices. They are: {', '.join(self.choices)}."
        return f"{program} is something else. {sign} Look at its picture again."

    def as_exercise(self, case, draw):
        """The exercise; ``case`` is what ``draw`` gets."""
        right = dict.fromkeys([f"program {letter}" for letter in LETTERS], "")
        mistake = Mistake("another mistake", "{}", lambda evidence, _: bool(evidence.results)
                          and self.misnamed(evidence, _))  # fmt: skip
        return Exercise(self.exercise, "six programs, seen from outside", ("diagnosis",), lambda rng: [case],
                        self.diagnose, lambda _: [right], minutes=10, draw=draw, mistakes=(mistake,))  # fmt: skip


def _plain(text):
    """A choice as it is compared: without blanks around it, in small letters; "" for None."""
    return " ".join(str("" if text is None else text).lower().split())
