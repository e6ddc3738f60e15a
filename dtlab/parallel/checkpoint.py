"""Checkpoints of sharded states: written by all ranks at once, whole or not at all, for any number of ranks.

    path/checkpoint.json   names the folder that counts and says what lies where; it is replaced in one instant
    path/dtlab_state_3/    what torch.distributed.checkpoint wrote: a file of each rank, and .metadata
"""
import contextlib
import json
import os
import re
import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from dtlab.errors import ConfigError
from dtlab.parallel.shared import ShardedState

_INDEX = "checkpoint.json"


def save_checkpoint(path: str | os.PathLike, state: ShardedState) -> None:
    """Write ``state`` into the folder ``path``, in place of what was saved there before; all of its ranks call this.

    A rank that dies at any moment leaves the old checkpoint whole, or the new one: the new one counts when all ranks
    have written. Until then both take space. All ranks must see the same folder.

    Args:
        state: What ``sharded_state()`` returned; saved is what it holds now.

    Raises:
        ConfigError: on every rank: no such state; ranks have different paths; the folder cannot be written.
    """
    import torch.distributed.checkpoint as dcp  # with DTensor half a second, which a notebook need not wait for

    path = _ready(path, state)
    is_first = dist.get_rank(state.group) == 0
    folder = _together(lambda: _new_folder(path) if is_first else None, path, state)
    with _said_plainly(f"written to {path}"):
        dcp.save(dict(state), checkpoint_id=path / folder, process_group=state.group)  # until all ranks have written
    _together(lambda: _make_it_count(path, folder, state.layout) if is_first else None, path, state)


def _ready(path, state):
    """The state as it is now; the whole path."""
    if not isinstance(state, ShardedState):
        raise ConfigError(f"state is of type {type(state).__name__}: give what sharded_state() of a ZeroOptimizer or "
                          "FullyShardedModule returned")
    state.refresh()
    return Path(path).absolute()


def _new_folder(path):
    """A name that no save before this one has used, also none that was broken off."""
    path.mkdir(parents=True, exist_ok=True)
    folder = f"dtlab_state_{max(_numbers(path), default=0) + 1}"
    (path / folder).mkdir()
    return folder


def _numbers(path):
    found = [re.fullmatch(r"dtlab_state_(\d+)", old.name) for old in path.iterdir() if old.is_dir()]
    return [int(match[1]) for match in found if match]


def _make_it_count(path, folder, layout):
    draft = path / folder / _INDEX
    draft.write_text(json.dumps({"folder": folder, "layout": layout}, indent=1), encoding="utf-8")
    os.replace(draft, path / _INDEX)  # one instant: before it the old checkpoint counts, after it the new one
    for number in _numbers(path):
        if f"dtlab_state_{number}" != folder:
            shutil.rmtree(path / f"dtlab_state_{number}")


@torch.no_grad()
def load_checkpoint(path: str | os.PathLike, state: ShardedState) -> None:
    """Read a checkpoint into the memory of ``state``, on any number of ranks; all of them call this.

    Args:
        state: What ``sharded_state()`` returned, of the same model, options and optimizer as when it was saved.

    Raises:
        ConfigError: on every rank: no such state; ranks have different paths; no checkpoint, one that does not fit or
            is damaged. Nothing has changed.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import DTensor

    path = _ready(path, state)
    folder = _together(lambda: _folder_that_fits(path, state), path, state)
    loaded = {key: torch.empty_like(tensor) for key, tensor in state.items()}  # apart: a read may fail half-way
    with _said_plainly(f"read from {path}"):
        dcp.load(loaded, checkpoint_id=path / folder, process_group=state.group)
    local = lambda tensor: tensor.to_local() if isinstance(tensor, DTensor) else tensor
    for key, tensor in state.items():
        local(tensor).copy_(local(loaded[key]))
    for finish in state.after_load:
        finish()


def _folder_that_fits(path, state):
    """The folder that counts, if it holds what ``state`` has: every key with the same dtype, sizes and names."""
    if not (path / _INDEX).exists():
        raise ConfigError(f"there is no checkpoint in {path}: no {_INDEX}, which stands there after a whole save")
    try:
        index = json.loads((path / _INDEX).read_text(encoding="utf-8"))
        folder, saved, here = index["folder"], dict(index["layout"]), state.layout
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path / _INDEX} is damaged: {error!r}") from error
    if wrong := [key for key in {**saved, **here} if saved.get(key) != here.get(key)]:
        texts = [f"{text[:300]} ..." if len(text) > 300 else text
                 for text in (layout.get(wrong[0], "nothing") for layout in (saved, here))]
        raise ConfigError(f"the checkpoint in {path} does not fit: {len(wrong)} of {len({**saved, **here})} entries "
                          f"differ. The first is {wrong[0]!r}: saved is {texts[0]}; here is {texts[1]}. Use the model, "
                          "the optimizer and the options (bucket_bytes, param_groups, master_dtype) that it was saved "
                          "with; only the number of ranks may differ")
    return folder


@contextlib.contextmanager
def _said_plainly(what):
    """Torch's error, which every rank gets, is no Exception and has a traceback of each rank."""
    from torch.distributed.checkpoint import CheckpointException

    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        raise ConfigError(f"the checkpoint cannot be {what}: rank {rank}: {type(cause).__name__} {cause}") from error


def _together(function, path, state):
    """Call ``function`` on every rank: what it returned on the first one, or, on all, the error of any rank."""
    value = problem = None
    try:
        value = function()
    except (OSError, ValueError) as error:  # ConfigError and broken JSON are ValueErrors
        problem = f"rank {dist.get_rank()}: {error}"
    answers = [None] * dist.get_world_size(state.group)
    dist.all_gather_object(answers, (value, problem, str(path)), group=state.group)
    values, problems, paths = zip(*answers)
    if len(set(paths)) > 1:
        raise ConfigError(f"ranks have different paths, of one checkpoint: {', '.join(paths)}")
    if any(problems):
        raise ConfigError(next(filter(None, problems)))
    return values[0]
