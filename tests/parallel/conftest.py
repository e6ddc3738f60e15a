"""What the tests of techniques share; their ranks are in ``live_ranks.py``."""
import inspect
import re
from pathlib import Path

import pytest
import torch

import dtlab

HERE = Path(__file__).parent


@pytest.fixture(scope="module", autouse=True)
def _one_thread_and_no_ranks_that_stay():
    """Tensors are small: a second thread only waits, where ranks and tests share two cores."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
    if dtlab.current_ranks():
        dtlab.current_ranks().shutdown()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Tests of a file that want as many ranks come one after the other: to start others takes a second each time."""
    paths = list(dict.fromkeys(item.path for item in items))
    items.sort(key=lambda item: (paths.index(item.path), num_ranks(item) if item.path.parent == HERE else 0))


def num_ranks(item):
    """What a test calls ``pool`` with, as far as it says so: a parameter, or a number in its text."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    told = [params[name] for name in ("num_ranks", "tp_size", "ranks") if isinstance(params.get(name), int)]
    return (told or [int(n) for n in re.findall(r"\bpool\((\d)\)", inspect.getsource(item.function))] or [0])[0]
