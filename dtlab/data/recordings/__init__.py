"""Recordings of programs that need packages which dtlab does not, for those who do not have them.

``deepspeed_zero3``: rank 0 of 4 in the third step of lesson 05's program, DeepSpeed's stage 3 with one gather a module.
"""
import pathlib

from dtlab.simulate import Recording
from dtlab.validate import one_of

_FOLDER = pathlib.Path(__file__).parent


def load(name: str) -> Recording:
    """The shipped recording of this name.

    Raises:
        ConfigError: there is none; the message has the names.
    """
    one_of("name", name, sorted(path.stem for path in _FOLDER.glob("*.jsonl")))
    return Recording.load(_FOLDER / f"{name}.jsonl")
