"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

# Examples come from the test's own text, so that a run repeats; a slow machine is not a failure.
settings.register_profile("sluice", deadline=None, derandomize=True)
settings.load_profile("sluice")
