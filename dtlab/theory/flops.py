"""FLOPs of training, and what share of the hardware's they are. A multiply and an add are two FLOPs."""
import warnings

from dtlab.theory.models import ModelShape, layer_matrices, transformer_params
from dtlab.validate import amount, at_least, one_of

RECOMPUTE = (None, "selective", "full")


def train_flops(num_params: float, num_tokens: float) -> float:
    """6 N D: two FLOPs per parameter and token forward, four backward; attention's scores are not in it.

    Example:
        >>> days = training_days(train_flops(7.47e9, 150e9), num_devices=64, flops_per_s=156e12)
        >>> round(days, 1)
        7.8

    Source: Kaplan et al. 2020, arXiv:2001.08361, section 2.1.
    """
    return 6 * amount("num_params", num_params) * amount("num_tokens", num_tokens)


def model_flops_per_token(shape: ModelShape, *, num_params: float | None = None, causal: bool = False) -> float:
    """6 N + 12 L a Q s: FLOPs of forward and backward per token that the model needs, recomputation not counted.

    Args:
        shape: L layers, a heads of size Q, s tokens of sequence.
        num_params: N; None counts all of the shape's, embeddings too. PaLM does; Kaplan leaves embeddings out.
        causal: count the half of the scores that the mask keeps, 6 L a Q s. PaLM, Megatron and most reports count all.

    Example:
        >>> shape = ModelShape(num_layers=32, hidden_size=4096, num_heads=32, seq_length=16384, vocab_size=50304)
        >>> [round(model_flops_per_token(shape, num_params=6.7e9, causal=c) / 1e9, 1) for c in (False, True)]
        [66.0, 53.1]

    Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B.
    """
    num_params = transformer_params(shape) if num_params is None else amount("num_params", num_params)
    width = shape.num_heads * shape.head_size
    return 6 * num_params + (6 if causal else 12) * shape.num_layers * width * shape.seq_length


def batch_flops(shape: ModelShape, *, batch_size: int, recompute: str | None = None) -> float:
    """FLOPs of one step on ``batch_size`` sequences: the matrix products of the layers and of the logits.

    72 B s l h^2 (1 + s/6h + V/12lh) for 4h wide MLPs and heads that fill h. MFU takes it without recomputation;
    with it, it is what the hardware does, and HFU's.

    Args:
        recompute: None; "selective", the scores and their use a second time: + 4 B s^2 h a layer, 1 + 2s/9h in the
            place of 1 + s/6h; "full", each layer's forward a second time: 96 (1 + s/6h + V/16lh).

    Example:
        >>> shape = ModelShape(num_layers=128, hidden_size=25600, num_heads=160, seq_length=2048, vocab_size=51200)
        >>> [f"{batch_flops(shape, batch_size=3072, recompute=r):.3e}" for r in (None, "selective", "full")]
        ['3.856e+19', '3.872e+19', '5.139e+19']

    Source: Narayanan et al. 2021, arXiv:2104.04473, equation 3 and its appendix. For "selective", Korthikanti et al.
    2022, arXiv:2205.05198, appendix A, prints 1 + s/3h: as if the scores' forward were done three times more.
    """
    one_of("recompute", recompute, RECOMPUTE)
    s, width = shape.seq_length, shape.num_heads * shape.head_size
    tokens = at_least("batch_size", batch_size, 1) * s
    matrices, scores = 2 * tokens * layer_matrices(shape), 4 * tokens * s * width
    again = {"full": matrices + scores, "selective": scores}.get(recompute, 0)
    logits = 6 * tokens * shape.hidden_size * shape.vocab_size
    return shape.num_layers * (3 * (matrices + scores) + again) + logits


def recompute_flops_factor(shape: ModelShape, recompute: str | None) -> float:
    """FLOPs of a step with recomputation / without: HFU / MFU; ``recompute`` as in ``batch_flops``.

    Example:
        >>> from dtlab.theory import GPT_7_5B
        >>> [round(recompute_flops_factor(GPT_7_5B, r), 3) for r in (None, "selective", "full")]
        [1.0, 1.025, 1.325]
    """
    return batch_flops(shape, batch_size=1, recompute=recompute) / batch_flops(shape, batch_size=1)


def mfu(model_flops: float, *, time_s: float, num_devices: int, peak_flops: float) -> float:
    """Model FLOPs utilisation: FLOPs the model needs / what ``num_devices`` could do in ``time_s``.

    Args:
        model_flops: of one step (``batch_flops``) and ``time_s`` of that step, or of a second's tokens and 1.
        peak_flops: FLOP/s of one device in the number format of the run, dense.

    Warns:
        UserWarning: above 1.

    Example:
        >>> round(mfu(238.3e3 * 3.28e12, time_s=1, num_devices=6144, peak_flops=275e12), 3)
        0.463
    """
    able = amount("time_s", time_s, above_0=True) * amount("num_devices", num_devices, above_0=True)
    share = amount("model_flops", model_flops) / (able * amount("peak_flops", peak_flops, above_0=True))
    if share > 1:
        warnings.warn(f"MFU {share:.2f} is above 1: {model_flops:.3g} FLOPs in {time_s:.3g} s on {num_devices} devices "
                      f"of {peak_flops:.3g} FLOP/s cannot be; look for tokens counted twice, a peak of another number "
                      f"format, or a clock that stopped before the devices did", stacklevel=2)
    return share


def training_days(flops: float, *, num_devices: int, flops_per_s: float) -> float:
    """Days for ``flops`` on ``num_devices`` that reach ``flops_per_s`` each."""
    able = amount("num_devices", num_devices, above_0=True) * amount("flops_per_s", flops_per_s, above_0=True)
    return amount("flops", flops) / able / 86400
