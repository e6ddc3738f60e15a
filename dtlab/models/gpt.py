"""A small GPT: pre-LN, learned positions, one file. The serial reference of every technique.

Letters in shape comments: B batch_size, S seq_length, h hidden_size, f ffn_hidden_size, a num_heads, k num_kv_heads,
d = h / a, V vocab_size.
Submodules have Megatron-core's names, so that a shard map reads the same in both.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from dtlab.errors import ConfigError
from dtlab.models.init import init_by_name
from dtlab.validate import at_least, divisible


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT; the defaults are the lessons' model (bytes as tokens, 1.8 million parameters).

    Attributes:
        vocab_size: Tokens (count); 256 for bytes.
        seq_length: Longest sequence, in tokens.
        hidden_size, num_layers, num_heads: As everywhere; ``hidden_size`` is a multiple of ``num_heads``.
        ffn_hidden_size: Inner width of the MLP; None gives 4 * hidden_size. (``dataclasses.replace`` keeps the resolved
            number: pass ``ffn_hidden_size=None`` with a new ``hidden_size``.)
        dropout: Probability after the embeddings, after attention and after the MLP, and on the attention weights.
        tie_embeddings: The output layer uses the token embedding's weight.
        flash_attention: False writes attention out, so that its S x S matrices stand in memory.
        num_kv_heads: Heads of keys and values, each shared by num_heads / num_kv_heads query heads (grouped-query
            attention); None gives num_heads. (``dataclasses.replace`` keeps the resolved number.)
        swiglu: The MLP is (silu(x G) * (x U)) B, with two matrices in the place of one, instead of GELU(x A) B.

    Raises:
        ConfigError: a size below 1, ``hidden_size`` not divisible by ``num_heads`` or that by ``num_kv_heads``, dropout
            not in [0, 1).
    """

    vocab_size: int = 256
    seq_length: int = 128
    hidden_size: int = 192
    num_layers: int = 4
    num_heads: int = 12
    ffn_hidden_size: int | None = None
    dropout: float = 0.0
    tie_embeddings: bool = True
    flash_attention: bool = True
    num_kv_heads: int | None = None
    swiglu: bool = False

    def __post_init__(self):
        if self.ffn_hidden_size is None:
            object.__setattr__(self, "ffn_hidden_size", 4 * at_least("hidden_size", self.hidden_size, 1))
        if self.num_kv_heads is None:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        for name in ("vocab_size", "seq_length", "hidden_size", "num_layers", "num_heads", "ffn_hidden_size",
                     "num_kv_heads"):
            at_least(name, getattr(self, name), 1)
        divisible("hidden_size", self.hidden_size, "num_heads", self.num_heads)
        divisible("num_heads", self.num_heads, "num_kv_heads", self.num_kv_heads)
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout ({self.dropout}) must be at least 0 and below 1")


def _has_values(tensor):
    """Whether it can be looked at: not in a dry recording, nor on the meta device."""
    return tensor.numel() and not (tensor.is_meta or hasattr(tensor, "fake_mode"))


class Attention(nn.Module):
    """Causal self-attention with all heads in two linears.

    Shapes:
        x, y              [B, S, h]
        linear_qkv.weight [(a + 2k) d, h]  rows ordered kv head by kv head: first the a/k query heads that share it,
                                   then k, then v (with k = a: q, k, v of head 0, then of head 1, ...), so that n equal
                                   runs of rows are n sets of whole heads
        linear_proj.weight [h, h]  columns in the order of the query heads
    """

    def __init__(self, config: GPTConfig, **factory):
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.dropout, self.flash = config.dropout, config.flash_attention
        head_size = config.hidden_size // config.num_heads
        num_rows = (config.num_heads + 2 * config.num_kv_heads) * head_size
        self.linear_qkv = nn.Linear(config.hidden_size, num_rows, **factory)
        self.linear_proj = nn.Linear(config.hidden_size, config.hidden_size, **factory)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, h] -> [B, S, h]."""
        shared = self.num_heads // self.num_kv_heads
        rows = self.linear_qkv(x).unflatten(-1, (self.num_kv_heads, shared + 2, -1))     # [B, S, k, a/k + 2, d]
        q, k, v = rows[..., :-2, :].flatten(2, 3), rows[..., -2, :], rows[..., -1, :]    # [B, S, a or k, d]
        y = self.attend(*(heads.transpose(1, 2) for heads in (q, k, v)))
        return self.linear_proj(y.transpose(1, 2).flatten(-2))                           # [B, S, h]

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention itself, without a parameter: [B, a, S, d] and twice [B, k, S, d] -> [B, a, S, d]."""
        if q.shape[1] > k.shape[1]:
            k, v = (heads.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for heads in (k, v))
        dropout = self.dropout if self.training else 0.0
        if self.flash:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return written_out_attention(q, k, v, dropout)


def written_out_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float = 0.0) -> torch.Tensor:
    """Causal attention with the [B, a, S, S] weights in memory: what flash attention avoids. [B, a, S, d] each."""
    scores = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).tril_()    # [B, a, S, S]; inf of the future is gone too
    future = torch.full(scores.shape[-2:], float("-inf"), dtype=scores.dtype, device=q.device).triu(1)
    weights = (scores + future).softmax(-1)                                # a sum keeps nothing; masked_fill, the mask
    return F.dropout(weights, dropout) @ v


class FeedForward(nn.Module):
    """y = GELU(x A) B: the MLP of a transformer layer; with ``swiglu`` y = (silu(x G) * (x U)) B.

    Shapes:
        x, y              [B, S, h]
        linear_fc1.weight [f, h]  A^T: torch stores the matrix transposed; swiglu [2f, h]: G^T (gate), below it U^T (up)
        linear_fc2.weight [h, f]  B^T
    """

    def __init__(self, config: GPTConfig, **factory):
        super().__init__()
        self.swiglu = config.swiglu
        self.linear_fc1 = nn.Linear(config.hidden_size, (1 + config.swiglu) * config.ffn_hidden_size, **factory)
        self.linear_fc2 = nn.Linear(config.ffn_hidden_size, config.hidden_size, **factory)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, h] -> [B, S, h]."""
        x = self.linear_fc1(x)
        if self.swiglu:
            gate, up = x.chunk(2, dim=-1)
            return self.linear_fc2(F.silu(gate) * up)
        return self.linear_fc2(F.gelu(x))


class TransformerLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): pre-LN. [B, S, h] -> [B, S, h]."""

    def __init__(self, config: GPTConfig, **factory):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(config.hidden_size, **factory)
        self.self_attention = Attention(config, **factory)
        self.pre_mlp_layernorm = nn.LayerNorm(config.hidden_size, **factory)
        self.mlp = FeedForward(config, **factory)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, h] -> [B, S, h]."""
        x = x + self.dropout(self.self_attention(self.input_layernorm(x)))
        return x + self.dropout(self.mlp(self.pre_mlp_layernorm(x)))


class GPT(nn.Module):
    """Token ids [B, S] -> logits [B, S, V].

    ``embed``, ``layers`` and ``head`` can be called one by one: a pipeline cuts between them.

    Args:
        config: Sizes.
        seed: Initialisation by name from this seed (``init_by_name``): the same model in every process.
        dtype, device: Of all parameters; torch's global defaults are not used.

    Raises:
        ConfigError: a sequence longer than ``config.seq_length``; positions of another number than tokens, or beyond
            it.

    Example:
        >>> model = GPT(GPTConfig(hidden_size=16, num_heads=2, num_layers=1, seq_length=8))
        >>> model(torch.zeros(2, 8, dtype=torch.long)).shape
        torch.Size([2, 8, 256])

    Not here: GPT-2's 1 / sqrt(2 num_layers) scale on the residual outputs, which matters for deep models only.
    """

    def __init__(self, config: GPTConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32, device="cpu"):
        super().__init__()
        factory = {"dtype": dtype, "device": device}
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.hidden_size, **factory)
        self.position_embedding = nn.Embedding(config.seq_length, config.hidden_size, **factory)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(TransformerLayer(config, **factory) for _ in range(config.num_layers))
        self.final_layernorm = nn.LayerNorm(config.hidden_size, **factory)
        self.output_layer = nn.Linear(config.hidden_size, config.vocab_size, bias=False, **factory)
        if config.tie_embeddings:
            self.output_layer.weight = self.token_embedding.weight
        init_by_name(self, seed)

    def _apply(self, fn, recurse=True):
        """What ``to`` and ``to_empty`` call. Subtle: from the meta device each place of a tied weight gets its own."""
        is_tied = getattr(self.output_layer, "weight", None) is self.token_embedding.weight  # a head may be Identity
        super()._apply(fn, recurse)
        if is_tied:
            self.output_layer.weight = self.token_embedding.weight
        return self

    def embed(self, tokens: torch.Tensor, first_position: int = 0, positions=None) -> torch.Tensor:
        """[B, S] -> [B, S, h]; ``first_position`` is where a piece of a longer sequence starts.

        ``positions`` [S], if given, says of each token where it stands: of a piece that is not in one run.
        """
        length = self.config.seq_length
        if positions is None:
            end = first_position + tokens.shape[-1]
            if end > length:
                raise ConfigError(f"the sequence is {end} tokens long, but the model has seq_length ({length}): cut "
                                  f"it, or make the model with seq_length={end}")
            positions = torch.arange(first_position, end, device=tokens.device)
        elif positions.shape != tokens.shape[-1:]:
            raise ConfigError(f"positions {list(positions.shape)} must have one number for each of the "
                              f"{tokens.shape[-1]} tokens of a sequence: shape [{tokens.shape[-1]}]")
        elif first_position:
            raise ConfigError(f"first_position ({first_position}) and positions both say where tokens stand: give one")
        elif _has_values(positions) and (last := int(positions.max())) >= length:
            raise ConfigError(f"a token stands at position {last}, but the model has seq_length ({length}), so 0 to "
                              f"{length - 1}: cut the sequence, or make the model with seq_length={last + 1}")
        return self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, h] -> logits [B, S, V]."""
        return self.output_layer(self.final_layernorm(x))

    def forward(self, tokens: torch.Tensor, positions=None) -> torch.Tensor:
        """[B, S] -> [B, S, V]; ``positions`` as in ``embed``."""
        x = self.embed(tokens, positions=positions)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
