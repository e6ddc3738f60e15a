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


@dataclass(frozen=True, kw_only=True)
class LlamaShape(ModelShape):
    """Sizes of a Llama: grouped queries, a SwiGLU of three matrices, RMSNorm, rotary positions, no biases.

    Attributes:
        num_kv_heads: heads of keys and values (count), which groups of query heads share; None gives num_heads.

    Raises:
        ConfigError: as ``ModelShape``; num_heads not divisible by num_kv_heads.
    """

    tie_embeddings: bool = False
    num_kv_heads: int | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.num_kv_heads is None:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        divisible("num_heads", self.num_heads, "num_kv_heads", at_least("num_kv_heads", self.num_kv_heads, 1))


GPT_7_5B = ModelShape(num_layers=36, hidden_size=4096, num_heads=32, seq_length=2048, vocab_size=51200)


def layer_matrices(shape: ModelShape) -> int:
    """Elements of the weight matrices of one layer (count); each costs two FLOPs a token in forward."""
    h, f, width = shape.hidden_size, shape.ffn_hidden_size, shape.num_heads * shape.head_size
    if isinstance(shape, LlamaShape):
        return 2 * h * width + 2 * h * shape.num_kv_heads * shape.head_size + 3 * h * f
    return 4 * h * width + 2 * h * f


def layer_params(shape: ModelShape) -> int:
    """Parameters of one layer (count): the matrices, and a GPT's biases and norms or a Llama's norms.

    Example:
        >>> round(layer_params(GPT_7_5B) / 1e6, 1)
        201.4
    """
    h, width = shape.hidden_size, shape.num_heads * shape.head_size
    if isinstance(shape, LlamaShape):
        return layer_matrices(shape) + 2 * h
    return layer_matrices(shape) + 3 * width + h + shape.ffn_hidden_size + h + 4 * h


def transformer_params(shape: ModelShape) -> int:
    """Parameters of a model with these sizes (count): biases, norms, embeddings, positions, all of them.

    Those of ``dtlab.models.GPT``; of a ``LlamaShape``, those of a Llama.

    Example:
        >>> round(transformer_params(GPT_7_5B) / 1e9, 2)
        7.47
        >>> transformer_params(LlamaShape(num_layers=80, hidden_size=8192, ffn_hidden_size=28672, num_heads=64,
        ...                               num_kv_heads=8, seq_length=4096, vocab_size=32000))
        68976648192

    Source: Narayanan et al. 2021, arXiv:2104.04473, equation 2, plus the final norm's 2h, which it leaves out.
    """
    h, vocab = shape.hidden_size, shape.vocab_size * (1 if shape.tie_embeddings else 2)
    rest = h if isinstance(shape, LlamaShape) else 2 * h + shape.seq_length * h  # the final norm, a table of positions
    return shape.num_layers * layer_params(shape) + vocab * h + rest
