"""Settings of all tests."""

from __future__ import annotations

import os
from collections.abc import Generator
from functools import wraps
from inspect import iscoroutinefunction
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import settings

from shared.process.log import flush_log
from sim.virtual_time import run
from tests.support.reaper import mark_this_process

# Examples come from the test's own text, so that a run repeats; a slow machine is not a failure.
settings.register_profile("sluice", deadline=None, derandomize=True)
settings.load_profile("sluice")

mark_this_process()

COSTS_KEPT = TemporaryDirectory(prefix="tests-costs-")
os.environ["SLUICE_COSTS_KEPT"] = COSTS_KEPT.name  # a test starts no cluster with what the user's workers know
RUN_FILES = TemporaryDirectory(prefix="tests-runs-")
os.environ["XDG_RUNTIME_DIR"] = RUN_FILES.name  # nor is one found here that others have started


def pytest_unconfigure() -> None:
    """Leave no folder behind."""
    COSTS_KEPT.cleanup()
    RUN_FILES.cleanup()


def _flushed() -> Generator[None, None, None]:
    """Have what was logged written while the output is still captured: the log's own thread may be late."""
    try:
        return (yield)
    finally:
        flush_log(30.0)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_setup() -> Generator[None, None, None]:
    return (yield from _flushed())


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    return (yield from _flushed())


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_teardown() -> Generator[None, None, None]:
    return (yield from _flushed())


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    """Run asynchronous tests that are marked so on a virtual clock, each on its own."""
    found = yield
    for item in found if isinstance(found, list) else ():
        if item.get_closest_marker("virtual_time") and iscoroutinefunction(item.obj):
            item.obj = _in_virtual_time(item.obj)
    return found


def _in_virtual_time(test: Any) -> Any:
    @wraps(test)
    def run_test(*args: Any, **kwargs: Any) -> None:
        run(test(*args, **kwargs))

    return run_test
