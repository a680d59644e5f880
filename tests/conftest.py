"""Settings of all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from shared.log import flush_log

# Examples come from the test's own text, so that a run repeats; a slow machine is not a failure.
settings.register_profile("sluice", deadline=None, derandomize=True)
settings.load_profile("sluice")


@pytest.fixture(autouse=True)
def _log_within_the_test() -> Iterator[None]:
    """Have what a test logs written while its output is captured: the log's own thread may be late."""
    yield
    flush_log()
