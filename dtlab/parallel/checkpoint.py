"""Checkpoints of sharded states: written by all ranks at once, whole or not at all, for any number of ranks."""
import os


def save_checkpoint(path: str | os.PathLike, state: dict, *, group=None) -> None:
    """Write ``state`` of all ranks of ``group`` under the folder ``path``; what was saved there before is replaced.

    A rank that dies at any moment leaves the old checkpoint whole, or the new one. All ranks must see the same folder.

    Args:
        state: What ``sharded_state()`` returned.

    Raises:
        ConfigError: on every rank: the folder cannot be written, or holds something else.
    """
    raise NotImplementedError


def load_checkpoint(path: str | os.PathLike, state: dict, *, group=None) -> None:
    """Read a checkpoint into the memory of ``state``, on any number of ranks.

    Args:
        state: What ``sharded_state()`` returned, of the same model, options and optimizer class as when it was saved.

    Raises:
        ConfigError: on every rank: no checkpoint, or one that does not fit. Nothing has changed.
    """
    raise NotImplementedError
