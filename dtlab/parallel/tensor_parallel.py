"""Tensor parallel: every matrix of a layer is cut over the ranks of a group, first by columns, then by rows.

    x -f-> x A_r -> attention or GELU -> . B_r -g-> y        f: nothing forward, all_reduce backward
           columns  heads, or columns    rows                g: all_reduce forward, nothing backward

With sequence parallelism LayerNorms, dropouts and residuals work on S/t tokens: f gathers them (backward:
reduce_scatter), g is a reduce_scatter (backward: all_gather). What a rank holds, of t, with r its place:

    token_embedding, output_layer   ceil(V/t) rows      linear_qkv  a/t heads with their k and v, by kv head
    position_embedding, LayerNorms  all                 linear_fc1  f/t rows; SwiGLU: of gate and of up
    row-parallel biases             all                 linear_proj, linear_fc2  h/t, f/t columns

Letters: t ranks of the group, B batch, S sequence, h hidden, f ffn, a heads, k kv heads, d head size, V vocabulary.
"""
import functools

import torch
from torch import nn

from dtlab.errors import ConfigError
from dtlab.models.gpt import GPT, Attention, FeedForward, GPTConfig
from dtlab.models.init import init_by_name
from dtlab.parallel.mappings import (
    copy_to_tp_region,
    gather_from_sequence_region,
    gather_from_tp_region,
    reduce_from_tp_region,
    reduce_scatter_to_sequence_region,
    scatter_to_sequence_region,
    scatter_to_tp_region,
    split_region_rng,
)
from dtlab.parallel.shared import (
    KeepsGroup,
    broadcast_tensors,
    is_dry,
    place_in,
    refuse_different_models,
    refuse_what_is_no_model,
)
from dtlab.parallel.tensor_parallel_grads import PartialGradient, clip_grad_norm_, sum_gradients
from dtlab.parallel.tensor_parallel_linear import ColumnParallelLinear, RowParallelLinear
from dtlab.parallel.tensor_parallel_vocab import VocabParallelEmbedding, vocab_parallel_cross_entropy, vocab_shard
from dtlab.theory.tensor_parallel import legal_tp_sizes, why_not_tp

__all__ = ["ColumnParallelLinear", "ParallelAttention", "ParallelFeedForward", "RowParallelLinear",
           "VocabParallelEmbedding", "apply_tensor_parallel", "clip_grad_norm_", "copy_to_tp_region",
           "gather_from_sequence_region", "gather_from_tp_region", "reduce_from_tp_region",
           "reduce_scatter_to_sequence_region", "scatter_to_sequence_region", "scatter_to_tp_region",
           "split_region_rng", "vocab_parallel_cross_entropy", "vocab_shard"]


class ParallelAttention(KeepsGroup, Attention):
    """``Attention`` with a/t heads on each rank, whole ones, with their own keys and values.

    With fewer kv heads than ranks t/k ranks have each of them, a copy each; its gradient is summed.

    Args:
        config: Sizes of the serial one.
        group: The ranks that have a part each; None for all.
        sequence_parallel: x and y are S/t tokens.
        async_grad_all_reduce: As for ``ColumnParallelLinear``.
        seed, dtype, device: As for ``GPT``: its parts together are ``init_by_name(Attention(config), seed)``.

    Shapes on one rank:
        x, y               [B, S, h], the same on every rank; with ``sequence_parallel`` [B, S/t, h]
        linear_qkv.weight  [(a/t + 2k/t) d, h]; with k below t [(a/t + 2) d, h]
        linear_proj.weight [h, h/t]

    Dropout of the attention weights draws other masks on each rank, in ``split_region_rng``.

    Raises:
        ConfigError: sizes that t does not divide, with the degrees that do; this rank is not in the group.

    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """

    def __init__(self, config: GPTConfig, *, group=None, sequence_parallel: bool = False,
                 async_grad_all_reduce: bool = True, seed: int = 0, dtype: torch.dtype = torch.float32, device="cpu"):
        super().__init__(config, device="meta")
        rank, size = _legal_place(config, group)
        num_rows, rows = self.linear_qkv.out_features, functools.partial(_qkv_rows, config, rank, size)
        self.group, self.num_heads = group, config.num_heads // size
        self.num_kv_heads = max(config.num_kv_heads // size, 1)
        self.linear_qkv, self.linear_proj = _ends(
            config.hidden_size, num_rows, rows, config.hidden_size, sequence_parallel, async_grad_all_reduce,
            group=group, dtype=dtype, device=device)
        if config.num_kv_heads < size:
            own = self.num_heads * config.hidden_size // config.num_heads  # rows of queries; those below are shared
            shared = PartialGradient(group=group, rows=slice(own, None), num_sets=config.num_kv_heads)
            sum_gradients(self.linear_qkv, shared, "weight", "bias")
        init_by_name(self, seed)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """[B, a/t, S, d] and twice this rank's k and v -> [B, a/t, S, d]."""
        if not (self.training and self.dropout):
            return super().attend(q, k, v)
        with split_region_rng(self.group):
            return super().attend(q, k, v)


class ParallelFeedForward(FeedForward):
    """``FeedForward`` with f/t inner columns on each rank; with SwiGLU the same ones of gate and up.

    Args: As for ``ParallelAttention``.

    Shapes on one rank:
        x, y              [B, S, h], the same on every rank; with ``sequence_parallel`` [B, S/t, h]
        linear_fc1.weight [f/t, h]; SwiGLU [2f/t, h]: gate rows first
        linear_fc2.weight [h, f/t]

    Raises:
        ConfigError: as ``ParallelAttention``.

    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """

    def __init__(self, config: GPTConfig, *, group=None, sequence_parallel: bool = False,
                 async_grad_all_reduce: bool = True, seed: int = 0, dtype: torch.dtype = torch.float32, device="cpu"):
        super().__init__(config, device="meta")
        rank, size = _legal_place(config, group)
        num_rows, rows = self.linear_fc1.out_features, functools.partial(_fc1_rows, config, rank, size)
        self.linear_fc1, self.linear_fc2 = _ends(
            config.hidden_size, num_rows, rows, config.ffn_hidden_size, sequence_parallel, async_grad_all_reduce,
            group=group, dtype=dtype, device=device)
        init_by_name(self, seed)


def _ends(hidden_size, num_rows, rows, width, sequence_parallel, async_grad_all_reduce, **options):
    """What a split region begins and ends with: h -> this rank's ``rows`` of ``num_rows``; ``width`` -> h."""
    options["sequence_parallel"] = sequence_parallel
    first = ColumnParallelLinear(hidden_size, num_rows, shard=rows, async_grad_all_reduce=async_grad_all_reduce,
                                 **options)  # fmt: skip
    last = RowParallelLinear(width, hidden_size, **options)
    if sequence_parallel:
        sum_gradients(last, PartialGradient(group=options["group"]), "bias")
    return first, last


def _qkv_rows(config, rank, size, whole):
    """This rank's rows of [(a + 2k) d, ..], which come kv head by kv head: query heads that share it, then k, v."""
    heads = whole.unflatten(0, (config.num_kv_heads, config.num_heads // config.num_kv_heads + 2, -1))
    if config.num_kv_heads % size == 0:
        return heads.chunk(size)[rank].flatten(0, 2)
    kv_head, place = divmod(rank, size // config.num_kv_heads)
    queries = heads[kv_head, :-2].chunk(size // config.num_kv_heads)[place]
    return torch.cat([queries, heads[kv_head, -2:]]).flatten(0, 1)


def _fc1_rows(config, rank, size, whole):
    """This rank's rows of [f, ..]; with SwiGLU of both halves of [2f, ..]."""
    return whole.unflatten(0, (1 + config.swiglu, size, -1))[:, rank].flatten(0, 1)


def _legal_place(config, group):
    rank, size = place_in(group)
    if reason := why_not_tp(config, size):
        raise ConfigError(reason)
    return rank, size


def apply_tensor_parallel(model: GPT, *, group=None, sequence_parallel: bool = False,
                          async_grad_all_reduce: bool = True) -> GPT:
    """Make a GPT this rank's part of it, in place; returns it. It computes what the whole one does.

    Names of parameters stay, so that ``state_dict`` has the serial keys, with this rank's parts. All ranks of the group
    give it the same tokens. ``model(tokens)`` gives [B, S, ceil(V/t)]: this rank's columns of the logits, for
    ``vocab_parallel_cross_entropy(logits, targets, vocab_size=config.vocab_size, ...)``. (Whole ones are
    ``gather_from_tp_region(logits)[..., :vocab_size]``: what follows is padding.)

    Communication of a layer, B S h elements each: two all_reduces forward and two backward; with ``sequence_parallel``
    two all_gathers and two reduce_scatters forward, the same backward, and two more all_gathers there. Beside them the
    embedding, the output layer and the loss; and once in a backward pass, one for each dtype, an all_reduce of the
    gradients of which each rank has a part: of LayerNorms and row-parallel biases with ``sequence_parallel``, of shared
    kv heads.

    Args:
        model: The same on every rank; it starts with the values of the group's first rank. It may be on the meta
            device, which no rank has to hold whole: then ``model.to_empty(device=...)`` and ``init_by_name(model,
            seed)`` give the parts of what a serial model starts with. ``copy.deepcopy`` of the result has its group.
        group: The ranks that have a part each; None for all.
        sequence_parallel: LayerNorms, dropouts and residuals work on S/t tokens.
        async_grad_all_reduce: As for ``ColumnParallelLinear``.

    Raises:
        ConfigError: no GPT, a wrapped or changed one, or parallel already; ranks have different models or options;
            sizes that t does not divide, with the degrees that do; fewer tokens than ranks; this rank is not in the
            group. In forward, with ``sequence_parallel``: a sequence that t does not divide. In backward: the pass
            before failed, and ``zero_grad()`` was not called; a gradient left ``.grad`` before it was summed.

    Make the optimizer afterwards, and seed the default generators of all ranks alike: dropout outside of split regions
    must draw the same masks. Gradient clipping: ``clip_grad_norm_`` of this module, as torch's does not know which
    parameters are parts. Over this, dtlab's DistributedDataParallel or torch's may average over other ranks (their
    ``group=`` or ``process_group=``).

    Not here: hooks on what is replaced (attention, MLP, embedding, output layer): register them afterwards. Parameters
    of your own, put in afterwards: with ``sequence_parallel`` each rank has a part of their gradient
    (``sum_gradients``). A comparison of tokens: only the loss compares, its targets. A reduce_scatter after the
    embedding, as in Megatron-core: it is an all_reduce with ``sequence_parallel`` too, of twice the bytes.

    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3; Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.
    """
    refuse_what_is_no_model(model)
    _refuse_what_is_no_gpt(model)
    _, size = place_in(group)
    refuse_different_models(model, group, config=model.config, sequence_parallel=sequence_parallel,
                            async_grad_all_reduce=async_grad_all_reduce)  # fmt: skip
    _legal_place(model.config, group)
    shard = vocab_shard(model.config.vocab_size, group)  # refuses a vocabulary that is too small
    if not is_dry(group):
        broadcast_tensors([p for p in model.parameters() if not p.is_meta], group=group)
    make = {"group": group, "sequence_parallel": sequence_parallel, "async_grad_all_reduce": async_grad_all_reduce,
            "device": "meta"}  # fmt: skip
    _cut_vocabulary(model, shard, make)
    for layer in model.layers:
        _replace(layer, "self_attention", ParallelAttention(model.config, **make))
        _replace(layer, "mlp", ParallelFeedForward(model.config, **make))
    if sequence_parallel:
        _cut_sequence(model, group, size)
    return model


def _refuse_what_is_no_gpt(model):
    if not isinstance(model, GPT):
        raise ConfigError(f"model is of type {type(model).__name__}: give a dtlab.models.GPT, or build another model "
                          "of ColumnParallelLinear, RowParallelLinear and VocabParallelEmbedding")
    found, plain = _parts(model), _parts(GPT(model.config, device="meta"))
    for name in [*plain, *found]:
        if found.get(name) != plain.get(name):
            raise ConfigError(f"{name} is {found.get(name, 'missing')}, not {plain.get(name, 'there')} as in a plain "
                              "GPT(config): the model is parallel already, or was changed. apply_context_parallel, and "
                              "what else is to be changed, comes afterwards")


def _parts(model):
    """Name -> what it is, of all modules, parameters and buffers; of a tied one where else it is."""
    parts, first = {}, {}
    for name, module in list(model.named_modules(remove_duplicate=False))[1:]:
        kind = type(module)
        is_known = kind.__module__.startswith(("torch.nn.modules.", "dtlab."))
        parts[name] = f"a {'' if is_known else kind.__module__ + '.'}{kind.__name__}"
        if "attend" in vars(module):
            parts[name] += " of apply_context_parallel"
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        parts[name] = f"{list(tensor.shape)}"
        if name != "output_layer.weight" and first.setdefault(id(tensor), name) != name:
            parts[name] += f" and {first[id(tensor)]} too"
    return parts


def _cut_vocabulary(model, rows, make):
    config, is_tied = model.config, model.output_layer.weight is model.token_embedding.weight
    embedding = VocabParallelEmbedding(config.vocab_size, config.hidden_size, group=make["group"], device="meta")
    _replace(model, "token_embedding", embedding)
    head = ColumnParallelLinear(config.hidden_size, config.vocab_size, bias=False, shard=rows, **make)
    _replace(model, "output_layer", head)
    if is_tied:
        head.weight = embedding.weight


def _replace(parent, name, new):
    """Put ``new``, on the meta device, in the place of a part of the model, with this rank's part of its values."""
    old = getattr(parent, name)
    for path, parameter in old.named_parameters():
        module, _, leaf = path.rpartition(".")
        owner = new.get_submodule(module)
        if shard := owner.parameter_shards.get(leaf):
            mine = shard.take(parameter.detach()).clone()  # the rest goes with the old part
            parameter = nn.Parameter(mine, requires_grad=parameter.requires_grad)
        owner.register_parameter(leaf, parameter)
    setattr(parent, name, new.train(old.training))


def _cut_sequence(model, group, size):
    """From the embeddings' dropout on each rank has S/t tokens, and of what norms learn from them a part."""
    partial = PartialGradient(group=group)
    model.token_embedding.register_forward_pre_hook(functools.partial(_refuse_length, model.config, size))
    model.dropout = _SplitDropout(model.dropout.p, group=group, scatters=True).train(model.training)
    norms = [model.final_layernorm]
    for layer in model.layers:
        layer.dropout = _SplitDropout(layer.dropout.p, group=group).train(layer.training)
        norms += [layer.input_layernorm, layer.pre_mlp_layernorm]
    for norm in norms:
        sum_gradients(norm, partial, "weight", "bias")


def _refuse_length(config, size, _embedding, inputs):
    if inputs[0].dim() != 2:
        raise ConfigError(f"tokens {list(inputs[0].shape)} must be [batch, sequence]: sequence_parallel cuts dim 1")
    length = inputs[0].shape[1]
    if length % size:
        near = [str(n) for n in (length // size * size, length // size * size + size) if 0 < n <= config.seq_length]
        cures = [f"sequences of {' or '.join(near)} tokens"] if near else []
        cures.append("tp_size " + ", ".join(str(t) for t in legal_tp_sizes(config) if length % t == 0))
        raise ConfigError(f"a sequence of {length} tokens does not divide by tp_size ({size}), as sequence_parallel "
                          f"needs: use {', or '.join(cures)}")


class _SplitDropout(KeepsGroup, nn.Dropout):
    """Dropout of this rank's tokens, with masks of its own; ``scatters``: of [B, S, h] that all ranks have."""

    def __init__(self, p: float, *, group=None, scatters: bool = False):
        super().__init__(p)
        self.group, self.scatters = group, scatters

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S/t, h], or all [B, S, h] -> [B, S/t, h]."""
        if self.scatters:
            x = scatter_to_sequence_region(x, self.group)
        if not (self.training and self.p):
            return x
        with split_region_rng(self.group):
            return super().forward(x)
