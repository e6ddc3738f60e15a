"""A plain multi-layer perceptron: the smallest model that a technique can be shown on."""
import torch
import torch.nn.functional as F
from torch import nn

from dtlab.errors import ConfigError
from dtlab.models.init import init_by_name
from dtlab.validate import at_least


class MLP(nn.Module):
    """Linear layers with a ReLU between two of them: ``MLP([8, 32, 32, 4])`` has three.

    Shapes:
        x       [..., sizes[0]]
        y       [..., sizes[-1]]
        layers.i.weight [sizes[i + 1], sizes[i]]

    Raises:
        ConfigError: fewer than two sizes, or a size below 1.

    Example:
        >>> MLP([8, 32, 4])(torch.zeros(5, 8)).shape
        torch.Size([5, 4])
    """

    def __init__(self, sizes, *, seed: int = 0, dtype: torch.dtype = torch.float32, device="cpu"):
        super().__init__()
        sizes = [at_least(f"sizes[{i}]", size, 1) for i, size in enumerate(sizes)]
        if len(sizes) < 2:
            raise ConfigError(f"sizes ({sizes}) needs at least two numbers: in and out, for example [8, 32, 4]")
        self.layers = nn.ModuleList(
            nn.Linear(fan_in, fan_out, dtype=dtype, device=device) for fan_in, fan_out in zip(sizes, sizes[1:]))
        init_by_name(self, seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., sizes[0]] -> [..., sizes[-1]]."""
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)
