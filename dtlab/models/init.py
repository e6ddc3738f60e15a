"""Initialisation by name: a parameter's first values depend on (seed, qualified name, full shape) and on nothing else.

Not on the order in which modules are made, on the number of ranks, on the process or on Python's hash seed. So a rank
that holds a shard draws the full tensor and keeps its slice, and equals one process at every degree of parallelism.
"""
import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from dtlab.errors import ConfigError
from dtlab.validate import at_least

EMBEDDING_STD = 0.02  # embeddings and the output layer: small logits, so a fresh model's loss is close to ln vocab_size


@dataclass(frozen=True)
class ParameterShard:
    """How a parameter of which a rank holds a part is cut out of the whole one.

    A module says it by the parameter's name: ``module.parameter_shards = {"weight": ParameterShard((8, 4), take)}``.
    (Not at the parameter: ``to_empty`` and ``deepcopy`` make new ones, without what was put on the old.)

    Attributes:
        full_shape: Shape in the serial model.
        take: Function from the whole tensor to this rank's part: a view of it, or a new one where there is padding.
    """

    full_shape: tuple
    take: Callable[[torch.Tensor], torch.Tensor]


def full_parameter(name: str, shape, seed: int, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The whole tensor that the parameter ``name`` starts with, on the CPU.

    Args:
        name: Qualified name in the serial model, for example ``layers.0.mlp.linear_fc1.weight``.
        shape: Full (serial) shape, never a shard's.
        seed: The model's seed (>= 0).
        dtype: Drawn in float64, then rounded to this: all dtypes start from the same model.

    Returns:
        Biases 0, one-dimensional weights (norms) 1, everything else normal with mean 0. Its standard deviation is 0.02
        for embeddings and the output layer, otherwise 1 / sqrt(shape[-1]), the fan-in.

    Raises:
        ConfigError: ``seed`` is negative or no whole number.

    Example: rank 1 of 2 starts with the lower half of the rows
        >>> serial = full_parameter("linear_fc1.weight", (4, 2), seed=0)
        >>> shard = full_parameter("linear_fc1.weight", (4, 2), seed=0)[2:]
        >>> torch.equal(shard, serial.chunk(2)[1])
        True
    """
    seed, shape = at_least("seed", seed, 0), tuple(shape)
    leaf = name.rpartition(".")[2]
    if leaf == "bias":
        return torch.zeros(shape, dtype=dtype)
    if leaf == "weight" and len(shape) == 1:
        return torch.ones(shape, dtype=dtype)
    is_embedding = "embedding" in name or "output_layer" in name
    std = EMBEDDING_STD if is_embedding or not shape else shape[-1] ** -0.5
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()  # hash() differs in every process
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    return torch.randn(shape, generator=generator, dtype=torch.float64).mul_(std).to(dtype)


@torch.no_grad()
def init_by_name(module: nn.Module, seed: int, *, rename=None) -> nn.Module:
    """Fill every parameter of ``module`` in place from (seed, qualified name); returns the module.

    A tied parameter is filled once, under its first name. Parameters on the meta device are left alone. Of one that its
    module has as a ``ParameterShard`` the whole is drawn and the part kept; all others must have their full shapes.

    Args:
        module: Any module.
        seed: The model's seed (>= 0).
        rename: Local name -> name in the serial model, for a module that is a part of it. A pipeline stage that holds
            layers 2 and 3 as ``0`` and ``1`` passes ``lambda name: f"layers.{int(name[0]) + 2}{name[1:]}"``.

    Raises:
        ConfigError: ``seed`` is negative, or ``rename`` gives two parameters the same name.
    """
    names = {}
    for local, parameter in module.named_parameters():
        name = rename(local) if rename else local
        if name in names:
            raise ConfigError(f"rename gives {names[name]!r} and {local!r} the same name {name!r}, so they would "
                              "start equal: give each the name it has in the serial model")
        names[name] = local
        if not parameter.is_meta:
            path, _, leaf = local.rpartition(".")
            shards = getattr(module.get_submodule(path), "parameter_shards", {})
            shard = shards.get(leaf, ParameterShard(parameter.shape, lambda whole: whole))
            parameter.copy_(shard.take(full_parameter(name, shard.full_shape, seed, dtype=parameter.dtype)))
    return module


def num_params(module: nn.Module) -> int:
    """Parameters of a module (count); a tied one counts once."""
    return sum(parameter.numel() for parameter in module.parameters())
