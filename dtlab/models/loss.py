"""The loss, with the way tokens are joined said at every call."""
import torch
import torch.nn.functional as F

from dtlab.errors import ConfigError
from dtlab.validate import one_of


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, *, reduction: str) -> torch.Tensor:
    """Cross entropy per token in nats; ``reduction`` has no default because a wrong one is a silent mistake.

    With ranks (or micro-batches) that hold different numbers of tokens, the mean of their means is not the mean: add
    the sums, then divide by the number of tokens of all of them.

    Args:
        logits: [..., vocab_size]; 16-bit ones are widened to float32 first.
        targets: [...] token ids; -100 marks a token that does not count.
        reduction: "sum", "mean" (over the tokens that count) or "none".

    Returns:
        A scalar, or [...] for "none".

    Raises:
        ConfigError: unknown ``reduction``, or shapes that do not fit.

    Example:
        >>> logits, targets = torch.zeros(2, 3, 256), torch.zeros(2, 3, dtype=torch.long)
        >>> round(cross_entropy(logits, targets, reduction="mean").item(), 2)  # ln 256
        5.55
        >>> round(cross_entropy(logits, targets, reduction="sum").item(), 2)
        33.27
    """
    one_of("reduction", reduction, ("sum", "mean", "none"))
    if logits.shape[:-1] != targets.shape:
        raise ConfigError(f"logits {tuple(logits.shape)} need targets of shape {tuple(logits.shape[:-1])}, "
                          f"not {tuple(targets.shape)}")
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction=reduction)  # [N, V], [N]
    return loss.view(targets.shape) if reduction == "none" else loss
