"""A seeded language whose entropy is known exactly: the loss that a perfect model reaches, on every machine.

Integers only from the seed to the sample, so that the tokens are the same bits on every platform.
"""
from bisect import bisect_right
from functools import cached_property

import numpy as np
import torch

from dtlab.errors import ConfigError
from dtlab.validate import at_least

_UNIT = 1 << 32  # probabilities are whole multiples of 1 / 2^32


class SyntheticLanguage:
    """An order-1 Markov chain: the next token depends on the one before it and on nothing else.

    A model that sees one token of context can reach ``entropy_nats`` per token and no model can be better; one that
    only counts how frequent tokens are reaches ``unigram_entropy_nats``; a fresh one starts near ln vocab_size.

    Args:
        vocab_size: Tokens (count, 2 .. 1024).
        seed: Of the language (>= 0): another seed is another language.

    Attributes:
        probabilities: [V, V] float64; row i is the distribution of the token after i, exact.

    Raises:
        ConfigError: ``vocab_size`` or ``seed`` out of range.

    Example:
        >>> language = SyntheticLanguage(vocab_size=64, seed=0)
        >>> round(language.entropy_nats, 2), round(language.unigram_entropy_nats, 2)  # ln 64 is 4.16
        (2.51, 3.45)
        >>> language.sample(8, seed=3).tolist()
        [37, 10, 36, 11, 48, 35, 8, 0]
    """

    def __init__(self, vocab_size: int = 64, seed: int = 0):
        self.vocab_size, self.seed = at_least("vocab_size", vocab_size, 2), at_least("seed", seed, 0)
        if vocab_size > 1024:
            raise ConfigError(f"vocab_size ({vocab_size}) must be at most 1024: there are vocab_size^2 transitions")
        # Frequent and rare tokens as in text (Zipf), a few likely successors each; the 1 keeps every token reachable
        popularity = np.uint64(1024) // np.arange(1, vocab_size + 1, dtype=np.uint64)
        draws = _generator(seed, 0).integers(0, 1 << 10, (vocab_size, vocab_size), dtype=np.uint64)
        weights = 1 + (draws ** np.uint64(5) * popularity >> np.uint64(40))     # 1 .. 2^20
        cumulative = np.cumsum(weights, axis=1, dtype=np.uint64)                # <= 2^30
        self._thresholds = cumulative * np.uint64(_UNIT) // cumulative[:, -1:]  # <= 2^32: the last column is 2^32
        self.probabilities = np.diff(self._thresholds, axis=1, prepend=np.uint64(0)) / _UNIT

    def sample(self, num_tokens: int, seed: int) -> torch.Tensor:
        """Tokens [num_tokens], int64. A longer sample of the same seed starts with the shorter one."""
        generator = _generator(at_least("seed", seed, 0), 1)
        token = int(generator.integers(0, self.vocab_size))
        rows, tokens = self._thresholds.tolist(), []
        for draw in generator.integers(0, _UNIT, at_least("num_tokens", num_tokens, 1), dtype=np.uint64).tolist():
            token = bisect_right(rows[token], draw)
            tokens.append(token)
        return torch.tensor(tokens)

    @cached_property
    def stationary(self) -> np.ndarray:
        """[V] how frequent each token is in a long sample: the distribution that one step leaves as it is."""
        equations = self.probabilities.T - np.eye(self.vocab_size)
        equations[-1] = 1.0  # one equation follows from the others; in its place: the sum is 1
        return np.linalg.solve(equations, np.eye(self.vocab_size)[-1])

    @cached_property
    def entropy_nats(self) -> float:
        """Entropy rate, nats a token: the entropy of each row, weighted by how often the chain is there."""
        return float(self.stationary @ [_entropy(row) for row in self.probabilities])

    @cached_property
    def unigram_entropy_nats(self) -> float:
        """Entropy of the stationary distribution, nats a token: the best loss without any context."""
        return _entropy(self.stationary)

    def __repr__(self):
        return f"SyntheticLanguage(vocab_size={self.vocab_size}, seed={self.seed})"


def _generator(seed: int, stream: int) -> np.random.Generator:
    """Counter-based and specified bit by bit; ``stream`` keeps the language and its samples apart."""
    return np.random.Generator(np.random.Philox([seed, stream]))


def _entropy(probabilities: np.ndarray) -> float:
    """- sum p ln p in nats; 0 ln 0 is 0."""
    positive = probabilities[probabilities > 0]
    return float(-(positive * np.log(positive)).sum())
