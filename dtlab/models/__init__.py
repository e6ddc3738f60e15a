"""The serial reference that every technique is held against: small models, initialisation by name, the loss."""
from dtlab.models.gpt import GPT, Attention, FeedForward, GPTConfig, TransformerLayer
from dtlab.models.init import ParameterShard, full_parameter, init_by_name, num_params
from dtlab.models.loss import cross_entropy
from dtlab.models.mlp import MLP
from dtlab.models.timed import TimedLayer

__all__ = ["GPT", "GPTConfig", "TransformerLayer", "Attention", "FeedForward", "MLP", "ParameterShard",
           "TimedLayer", "cross_entropy", "full_parameter", "init_by_name", "num_params"]
