"""Batches indexed by step: what a step trains on depends on (seed, step) alone, so every rank can name its rows.

Letters in shape comments: B batch_size of all ranks together, S seq_length.
"""
from functools import lru_cache

import numpy as np
import torch

from dtlab.errors import ConfigError
from dtlab.validate import at_least, index_below


@lru_cache(maxsize=8)
def epoch_order(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """The order in which epoch ``epoch`` visits samples 0 .. num_samples - 1, each exactly once. Read-only.

    Another epoch has another order; the same (seed, epoch) has the same one, in every process and after a restart.

    Example:
        >>> sorted(epoch_order(5, seed=0, epoch=3).tolist())
        [0, 1, 2, 3, 4]
        >>> epoch_order(5, seed=0, epoch=3).tolist() == epoch_order(5, seed=0, epoch=4).tolist()
        False
    """
    for name, value in (("seed", seed), ("epoch", epoch)):
        at_least(name, value, 0)
    order = np.random.Generator(np.random.Philox([seed, epoch])).permutation(at_least("num_samples", num_samples, 1))
    order.flags.writeable = False
    return order


def batches(data, seq_length: int, batch_size: int, seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of one step, for all ranks together; a rank takes its rows with ``shard_batch``.

    The text is cut into samples of seq_length tokens. An epoch visits each once, in ``epoch_order``; a step takes the
    next ``batch_size`` of them, running over into the next epoch's order where one ends.

    Args:
        data: bytes, or a one-dimensional tensor, array or list of token ids.
        seq_length: Tokens a sample.
        batch_size: Samples a step, over all ranks.
        seed: Of the order (>= 0).
        step: 0, 1, 2, ...

    Returns:
        inputs [B, S] and targets [B, S], int64; a target is the token after its input.

    Raises:
        ConfigError: less data than one sample, or ``batch_size`` above the samples of an epoch (one would stand in a
            batch twice).

    Example:
        >>> inputs, targets = batches(b"abcdefghi", seq_length=4, batch_size=2, seed=0, step=0)
        >>> sorted(bytes(row.tolist()) for row in inputs), sorted(bytes(row.tolist()) for row in targets)
        ([b'abcd', b'efgh'], [b'bcde', b'fghi'])
    """
    tokens = _as_array(data)
    seq_length, batch_size = at_least("seq_length", seq_length, 1), at_least("batch_size", batch_size, 1)
    num_samples = (len(tokens) - 1) // seq_length  # the last input needs a target behind it
    if num_samples < 1:
        raise ConfigError(f"data has {len(tokens)} tokens, but one sample of seq_length ({seq_length}) needs "
                          f"{seq_length + 1}: the inputs and the token after the last")
    if batch_size > num_samples:
        raise ConfigError(f"batch_size ({batch_size}) is above the {num_samples} samples that {len(tokens)} tokens "
                          f"make at seq_length ({seq_length}); use at most {num_samples}")
    first = at_least("step", step, 0) * batch_size  # position in the endless row of epochs
    samples = np.array([epoch_order(num_samples, seed, position // num_samples)[position % num_samples]
                        for position in range(first, first + batch_size)])
    rows = tokens[samples[:, None] * seq_length + np.arange(seq_length + 1)].astype(np.int64)  # [B, S + 1]
    rows = torch.from_numpy(rows)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def shard_batch(batch, rank: int, world_size: int):
    """The rows of ``batch`` that ``rank`` trains on: consecutive, none twice, none lost, never padded.

    B rows over n ranks: the first B % n ranks get one row more. So ranks can hold *different numbers* of rows (10 over
    4: 3, 3, 2, 2), and with more ranks than rows the last ones none. Then the mean of the ranks' mean losses is not the
    mean of the batch: add the sums, and divide by the number of tokens of the whole batch.

    Args:
        batch: A tensor [B, ...], or a tuple or list of such tensors.
        rank, world_size: Position and number of the data-parallel ranks.

    Returns:
        Views of the rows, in the container that came in.

    Raises:
        ConfigError: ``rank`` is not in 0 .. world_size - 1, or the tensors have different numbers of rows.

    Example:
        >>> [shard_batch(torch.arange(10), rank, 4).tolist() for rank in range(4)]
        [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    """
    index_below("rank", rank, "world_size", at_least("world_size", world_size, 1))
    if not isinstance(batch, torch.Tensor):
        sizes = [len(part) for part in batch]
        if len(set(sizes)) > 1:
            raise ConfigError(f"the parts of a batch must have the same number of rows, not {sizes}")
        return type(batch)(shard_batch(part, rank, world_size) for part in batch)
    rows, extra = divmod(len(batch), world_size)
    first = rank * rows + min(rank, extra)
    return batch[first:first + rows + (rank < extra)]


def _as_array(data) -> np.ndarray:
    """Token ids as a one-dimensional integer array; bytes and CPU tensors are not copied."""
    if isinstance(data, (bytes, bytearray, memoryview)):
        return np.frombuffer(data, dtype=np.uint8)
    array = np.asarray(data)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ConfigError(f"data must be bytes or one-dimensional whole numbers, not {array.dtype} of shape "
                          f"{array.shape}")
    return array
