"""Lab 03, ZeRO: its five exercises, each with its picture."""
from dataclasses import replace

from dtlab.checks import lab03_pictures as pictures
from dtlab.checks.lab03_layers import STAGE_THREE
from dtlab.checks.lab03_shards import CLIP, PIECES
from dtlab.checks.lab03_stages import STAGE_ONE, STAGE_TWO

_DRAWN = ((PIECES, pictures.cuts), (STAGE_ONE, pictures.stage_one), (STAGE_TWO, pictures.stage_two),
          (CLIP, pictures.clip), (STAGE_THREE, pictures.stage_three))  # fmt: skip
EXERCISES = tuple(replace(exercise, draw=draw) for exercise, draw in _DRAWN)
