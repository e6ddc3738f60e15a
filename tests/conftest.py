"""Tests marked ``long`` are what ``make test-all`` adds: elsewhere they are skipped."""
import os
import signal

import pytest


def pytest_configure():
    """A shell that runs pytest in the background has it ignore interrupts; tests send some."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    if not os.environ.get("DTLAB_TEST_ALL"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="takes long: make test-all"))
