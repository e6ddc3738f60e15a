"""Lab 04, tensor parallelism: its five exercises, each with its picture."""
from dataclasses import replace

from dtlab.checks import lab04_pictures as pictures
from dtlab.checks.lab04_layers import ATTENTION, MLP
from dtlab.checks.lab04_loss import LOSS
from dtlab.checks.lab04_regions import REGIONS, SHARD

_DRAWN = ((SHARD, pictures.cuts), (REGIONS, pictures.regions), (MLP, pictures.mlp), (ATTENTION, pictures.attention),
          (LOSS, pictures.loss))  # fmt: skip
EXERCISES = tuple(replace(exercise, draw=draw) for exercise, draw in _DRAWN)
