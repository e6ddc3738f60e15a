"""Checks of user input: every message names the argument, the numbers and the nearest legal choice. Pure."""
import operator

from dtlab.errors import ConfigError


def at_least(name: str, value, minimum: int) -> int:
    """Return ``value`` as an int, or raise ConfigError if it is no whole number or below ``minimum``."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise ConfigError(f"{name} ({value!r}) must be a whole number, at least {minimum}")
    if number < minimum:
        raise ConfigError(f"{name} ({number}) must be at least {minimum}")
    return number


def amount(name: str, value, *, above_0: bool = False, minimum=0):
    """Return ``value``, a finite number or a numpy array of them, or raise ConfigError if one is too small."""
    try:
        value * 1.0  # 10**400 is no float
        legal = ((value > 0) if above_0 else (value >= minimum)) & (value < float("inf"))
    except (TypeError, OverflowError):  # text, None, a list; a whole number that is too large
        legal = False
    if isinstance(value, bool) or not (legal.all() if hasattr(legal, "all") else legal):
        least = "above 0" if above_0 else f"of at least {minimum}"
        raise ConfigError(f"{name} ({value!r}) must be a number {least}, and finite")
    return value


def index_below(name: str, value, size_name: str, size: int) -> int:
    """Return ``value`` as an int in 0 .. size - 1, or raise ConfigError."""
    number = at_least(name, value, 0)
    if number >= size:
        raise ConfigError(f"{name} ({number}) must be below {size_name} ({size}); the last one is {size - 1}")
    return number


def divisible(name: str, value: int, by_name: str, by: int) -> int:
    """Return ``value // by``, or raise ConfigError naming the nearest multiples and the divisors.

    Example:
        >>> divisible("hidden_size", 12, "num_heads", 4)
        3
        >>> divisible("hidden_size", 10, "num_heads", 4)
        Traceback (most recent call last):
        ...
        dtlab.errors.ConfigError: hidden_size (10) must be divisible by num_heads (4): \
use hidden_size 8 or 12, or num_heads 1, 2, 5 or 10
    """
    if value % by == 0:
        return value // by
    below = value // by * by
    multiples = [below, below + by] if below else [by]
    divisors = [n for n in range(1, value + 1) if value % n == 0]
    if len(divisors) > 8:  # the eight nearest to what was asked for
        divisors = sorted(sorted(divisors, key=lambda n: abs(n - by))[:8])
    raise ConfigError(f"{name} ({value}) must be divisible by {by_name} ({by}): "
                      f"use {name} {_or(multiples)}, or {by_name} {_or(divisors)}")


def one_of(name: str, value, choices) -> None:
    """Raise ConfigError if ``value`` is none of ``choices``."""
    if value not in list(choices):  # a list is in no dict
        raise ConfigError(f"{name} ({value!r}) must be {_or([repr(choice) for choice in choices])}")


def _or(items) -> str:
    """Join as English: 1, 2 or 4."""
    *head, last = map(str, items)
    return f"{', '.join(head)} or {last}" if head else last
