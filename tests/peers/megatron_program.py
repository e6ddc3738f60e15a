"""The program of lesson 06 that calls Megatron-core, taken from the lesson's source. To write its recording again:

    python tests/peers/megatron_program.py
"""
import pathlib

from lesson_program import names_of, small

import dtlab
from dtlab.data import recordings

NAMES = {"WORLD_SIZE", "config", "new_mlp", "x", "first_step", "alone", "close", "all_reduced", "CopyToRegion",
         "ReduceFromRegion", "copy_to_tp_region", "part", "ColumnParallelLinear", "RowParallelLinear", "parallel_mlp",
         "record", "by_megatron"}
NUM_RANKS = 4


def record(ranks):
    """What the lesson records of Megatron-core where it is installed, on these ranks."""
    lesson = names_of("06_tensor_parallel", NAMES, ranks=ranks)
    return lesson["record"](lesson["by_megatron"])


if __name__ == "__main__":
    with dtlab.launch(NUM_RANKS) as ranks:
        small(record(ranks)).save(pathlib.Path(recordings.__file__).with_name("megatron_mlp.jsonl"))
