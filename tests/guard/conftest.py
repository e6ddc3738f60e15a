"""Ranks that all tests of one world size share: each mistake must leave them usable."""

import pytest

import dtlab


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request):
    with dtlab.launch(request.param) as live:
        yield live
