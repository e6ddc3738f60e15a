"""The program of lesson 05 that trains with DeepSpeed, taken from the lesson's source. To write its recording again:

    python tests/peers/deepspeed_program.py
"""
import ast
import dataclasses
import pathlib

import dtlab
from dtlab.data import recordings
from dtlab.simulate import Recording

LESSON = pathlib.Path(__file__).resolve().parents[2] / "notebooks" / "src" / "05_fsdp.py"
NAMES = {"config", "data", "BATCH_SIZE", "adamw", "my_rows", "train", "two_steps", "record", "by_deepspeed"}
NUM_RANKS = 4


def record(ranks):
    """What the lesson records of DeepSpeed where it is installed, on these ranks."""
    def is_needed(node):
        if isinstance(node, ast.Assign):
            return bool(NAMES & {name.id for name in ast.walk(node.targets[0]) if isinstance(name, ast.Name)})
        return isinstance(node, (ast.Import, ast.ImportFrom)) or getattr(node, "name", "") in NAMES

    tree = ast.parse(LESSON.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if is_needed(node)]
    lesson = {"__name__": "lesson", "ranks": ranks}
    exec(compile(tree, str(LESSON), "exec"), lesson)
    return lesson["record"](lesson["by_deepspeed"])


def small(recording):
    """What is shipped: rank 0, which stands for all, with times in microseconds; and the results of all ranks."""
    events = [dataclasses.replace(e, **{name: round(getattr(e, name), 6) for name in ("start_s", "end_s", "cpu_s")})
              for e in recording.events[0]]
    meta = {**recording.meta, "results": recording.results}
    return Recording({0: events}, world_size=recording.world_size, meta=meta)


if __name__ == "__main__":
    with dtlab.launch(NUM_RANKS) as ranks:
        small(record(ranks)).save(pathlib.Path(recordings.__file__).with_name("deepspeed_zero3.jsonl"))
