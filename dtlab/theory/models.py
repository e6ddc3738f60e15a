"""Shapes of GPT-like models and how many parameters they have."""
from dataclasses import dataclass

from dtlab.validate import at_least, divisible


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a GPT, as in ``dtlab.models.GPTConfig``.

    Attributes:
        num_layers, hidden_size, num_heads, seq_length, vocab_size: counts, as everywhere.
        ffn_hidden_size: inner width of the MLP; None gives 4 * hidden_size.
        head_size: width of a head; None gives hidden_size / num_heads.
        tie_embeddings: the output layer uses the token embedding's weight.

    Raises:
        ConfigError: a size below 1; no head_size, and hidden_size not divisible by num_heads.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    seq_length: int
    vocab_size: int
    ffn_hidden_size: int | None = None
    head_size: int | None = None
    tie_embeddings: bool = True

    def __post_init__(self):
        for name in ("num_layers", "hidden_size", "num_heads", "seq_length", "vocab_size"):
            at_least(name, getattr(self, name), 1)
        if self.ffn_hidden_size is None:
            object.__setattr__(self, "ffn_hidden_size", 4 * self.hidden_size)
        if self.head_size is None:
            head_size = divisible("hidden_size", self.hidden_size, "num_heads", self.num_heads)
            object.__setattr__(self, "head_size", head_size)
        for name in ("ffn_hidden_size", "head_size"):
            at_least(name, getattr(self, name), 1)


GPT_7_5B = ModelShape(num_layers=36, hidden_size=4096, num_heads=32, seq_length=2048, vocab_size=51200)


def transformer_params(shape: ModelShape) -> int:
    """Parameters of ``dtlab.models.GPT`` with these sizes (count): biases, norms, embeddings, positions, all of them.

    Example:
        >>> round(transformer_params(GPT_7_5B) / 1e9, 2)
        7.47

    Source: Narayanan et al. 2021, arXiv:2104.04473, equation 2, plus the final norm's 2h, which it leaves out.
    """
    h, f, width = shape.hidden_size, shape.ffn_hidden_size, shape.num_heads * shape.head_size
    attention = 3 * (h * width + width) + width * h + h
    mlp = h * f + f + f * h + h
    embeddings = shape.vocab_size * h * (1 if shape.tie_embeddings else 2) + shape.seq_length * h
    return shape.num_layers * (attention + mlp + 4 * h) + 2 * h + embeddings
