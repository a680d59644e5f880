"""What tests of the worker's packages share."""

from __future__ import annotations

import pytest

from services.worker.scheduling.registry import SCHEDULERS


@pytest.fixture(params=SCHEDULERS)
def scheduler(request: pytest.FixtureRequest) -> str:
    """Each of them by name."""
    return str(request.param)
