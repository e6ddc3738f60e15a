"""Live ranks and a stand-in for a notebook."""
import types

import pytest
import torch

import dtlab


@pytest.fixture(scope="session")
def _last():
    yield
    if dtlab.current_ranks():
        dtlab.current_ranks().shutdown()


@pytest.fixture
def ranks(_last):
    """Three live ranks without variables of earlier tests."""
    live = dtlab.current_ranks()
    if live is None or live.size != 3 or any(live.names.values()):
        live = dtlab.launch(3)
    return live


@pytest.fixture
def notebook():
    """``notebook(code)`` runs code as a cell does, in a ``__main__`` of its own, and returns its variables."""
    module = types.ModuleType("__main__")
    module.__dict__.update(torch=torch)

    def cell(code):
        exec(compile(code, "<cell>", "exec"), module.__dict__)
        return types.SimpleNamespace(**module.__dict__)

    return cell
