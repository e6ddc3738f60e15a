"""The worked examples in the docstrings of models, data and validate are true."""
import doctest
import importlib

import pytest

MODULES = ["validate", "models.gpt", "models.init", "models.loss", "models.mlp", "data.text", "data.batches",
           "data.synthetic"]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    result = doctest.testmod(importlib.import_module(f"dtlab.{name}"))
    assert result.attempted > 0 and result.failed == 0
