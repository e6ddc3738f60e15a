"""Dry recording, in the notebook: a process plays one rank of a large world, then the next."""
import sys

from dtlab.errors import ConfigError, RankError


def record_dry(fn, *args, world_size=1024, ranks=(0,), tokens=None, model_flops=None, **kwargs):
    """Record ``fn`` at real size without its memory, time or ranks: fake tensors and torch's ``fake`` process group.

    A process plays each of ``ranks`` in turn and calls ``fn(*args, **kwargs)`` with ``rank``, ``world_size``,
    ``device``, ``dist`` and ``torch`` predefined, as ``ranks.run`` does. Tensors, arguments too, have shapes but no
    values; calls of ``torch.distributed`` return at once. Times of the events are 0: ``replay`` gives them times.

    Args:
        world_size: ranks of the world (count).
        ranks: those to play: one of each kind that differ.
        tokens, model_flops: as in ``ranks.record``.

    Returns:
        Recording: ``results`` is None.

    Raises:
        ConfigError: a rank outside the world; or the function cannot be recorded dry: it reads a value (``.item()``,
            a branch on a tensor, object collectives), captured a model, or uses a module that does not take fake
            tensors (DistributedDataParallel). The message says where.
        RankError: the function failed.

    Example:
        >>> record_dry(lambda: dist.all_reduce(torch.ones(10**9)), ranks=[0, 8])        # doctest: +SKIP
        Recording (dry): 2 of 1024 ranks, 10 events
    """
    from dtlab.ranks import settings
    from dtlab.record.results import join

    if settings.is_in_rank():
        raise ConfigError("record_dry was called on a rank; call it in the notebook")
    if world_size < 1:
        raise ConfigError(f"world_size={world_size}: a world has at least 1 rank")
    ranks = sorted({ranks} if isinstance(ranks, int) else set(ranks))
    wrong = [r for r in ranks if not 0 <= r < world_size]
    if wrong or not ranks:
        raise ConfigError(f"ranks={ranks}: a world of {world_size} has ranks 0 to {world_size - 1}")
    answers = [_play(fn, args, kwargs, rank, world_size) for rank in ranks]
    recording = join(answers, ranks, world_size, dry=True, tokens=tokens, model_flops=model_flops)
    recording.results = None
    return recording


def _play(fn, args, kwargs, rank, world_size):
    from dtlab.ranks.pool import Ranks

    try:
        with Ranks(1, device="cpu", timeout=None, share_gpu=False, guard=False) as player:
            context = {**player._context(record=True), "dry": (rank, world_size)}
            ((said, *answer),) = player._call(fn, args, kwargs, None, None, context)
    except RankError as error:
        if "cannot be recorded dry" in str(error):
            raise ConfigError(str(error).partition("ConfigError: ")[2]) from None
        text = str(error).replace("rank 0 of 1", f"rank {rank} of {world_size}, played dry,")
        raise RankError(text, rank=rank, cause=error.cause) from None
    for line in said.splitlines():
        print(f"rank {rank}: {line}")
    sys.stdout.flush()
    return answer
