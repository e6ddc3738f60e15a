"""The program of lesson 05 that trains with DeepSpeed, taken from the lesson's source. To write its recording again:

    python tests/peers/deepspeed_program.py
"""
import pathlib

from lesson_program import names_of, small

import dtlab
from dtlab.data import recordings

NAMES = {"config", "data", "BATCH_SIZE", "adamw", "my_rows", "train", "two_steps", "record", "by_deepspeed"}
NUM_RANKS = 4


def record(ranks):
    """What the lesson records of DeepSpeed where it is installed, on these ranks."""
    lesson = names_of("05_fsdp", NAMES, ranks=ranks)
    return lesson["record"](lesson["by_deepspeed"])


if __name__ == "__main__":
    with dtlab.launch(NUM_RANKS) as ranks:
        small(record(ranks)).save(pathlib.Path(recordings.__file__).with_name("deepspeed_zero3.jsonl"))
