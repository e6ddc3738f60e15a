"""Checks of the labs: they run a learner's functions on live ranks, judge here, and know the usual mistakes.

``dtlab.check("lab01.2")`` in a cell, ``dtlab check lab01`` in a shell. What the learner wrote runs in rank processes
only, with limits of time and memory; the verdict is made in the process that started them, from what they sent back
and what the recorder saw. A hang, a crash, an endless loop or a flood of output cost that exercise and nothing else.
This is no prison: code that attacks the grader on purpose (its own pickles, other processes) is not held off.
"""
from dtlab.checks.evidence import Answer, Case, Evidence
from dtlab.checks.exercise import Exercise, Mistake, Verdict, check, picture, reference

__all__ = ["Answer", "Case", "Evidence", "Exercise", "Mistake", "Verdict", "check", "picture",
           "reference"]
