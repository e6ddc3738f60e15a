"""Tests marked ``long`` are what ``make test-all`` adds: elsewhere they are skipped."""
import os

import pytest


def pytest_collection_modifyitems(items):
    if not os.environ.get("DTLAB_TEST_ALL"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="takes long: make test-all"))
