"""dtlab: learn distributed training on real processes, on whatever machine you have.

The public names are loaded when first used, so ``import dtlab`` is quick and imports no torch.
"""
import importlib

__version__ = "0.1.0"

_WHERE = {  # public name -> module that defines it
    "launch": "dtlab.ranks",
    "current_ranks": "dtlab.ranks",
    "same_call": "dtlab.ranks.guard_order",
    "progress": "dtlab.ranks.progress",
    "record_dry": "dtlab.record",
    "phase": "dtlab.record",
    "tag": "dtlab.record",
    "predict": "dtlab.widgets.predict",
    "reveal": "dtlab.widgets.predict",
    "present": "dtlab.widgets.present",
    "check": "dtlab.checks",
    "picture": "dtlab.checks",
    "ledger": "dtlab.ledger_table",
    "doctor": "dtlab.examine",
    "ConfigError": "dtlab.errors",
    "RankError": "dtlab.errors",
    "GuardError": "dtlab.errors",
    "HangError": "dtlab.errors",
}
_MODULES = {name: f"dtlab.{name}" for name in ("models", "data", "plots", "theory")}
_MODULES["explore"] = "dtlab.widgets.explore"

__all__ = [*_WHERE, *_MODULES]


def __getattr__(name):
    if name in _WHERE:
        value = getattr(importlib.import_module(_WHERE[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(_MODULES[name])
    else:
        raise AttributeError(f"module 'dtlab' has no attribute {name!r}; it has {', '.join(sorted(__all__))}")
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})


def _in_a_notebook():
    """Load the cell magic and start the zygote in the background when a Jupyter kernel imports dtlab."""
    import sys

    if "IPython" not in sys.modules or "dtlab.ranks.worker" in sys.modules:
        return
    shell = sys.modules["IPython"].get_ipython()
    if shell is not None:
        from dtlab.ranks import notebook

        notebook.setup(shell)


_in_a_notebook()
