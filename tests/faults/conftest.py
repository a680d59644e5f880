"""Faults of real processes, by `make test-faults`; each test names its row of the fault table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.fault_checks import StagedCluster, staged
from tests.support.fault_cluster import Shape
from tests.support.stage_tap import StageTap

SMALL_STEPS: Final = {"SLUICE_WORKER_MAX_BATCH_TOKENS": "48"}
"""So that a prompt takes many steps, and a fault can come in between."""
PATIENT: Final = {"SLUICE_DISPATCHER_QUEUE_LIMIT_S": "120"}
"""Instead of 30 s: on a slow machine workers that were killed are not back sooner."""
LEASE_S: Final = 3.0
ORPHAN_S: Final = 5.0
"""Shortened from 60 s: how long a worker keeps what nobody asks about."""
FORGOTTEN_S: Final = LEASE_S + ORPHAN_S + 10
"""Within which workers forget the requests of a dispatcher that was killed."""
TWO_DISPATCHERS: Final = Shape(num_dispatchers=2, env={**SMALL_STEPS, "SLUICE_WORKER_ORPHAN_S": str(ORPHAN_S)})
_HERE: Final = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything in this folder, so that `make test` leaves it out."""
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.faults)


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StagedCluster]:
    """Two workers and a dispatcher, or the module's `SHAPE`, shared by its tests; each leaves them as it found them."""
    shape = getattr(request.module, "SHAPE", Shape(env={**SMALL_STEPS, **PATIENT}))
    with staged(tmp_path_factory.mktemp("cluster"), shape) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def tap() -> Iterator[StageTap]:
    """By way of it the workers reach each other."""
    with StageTap(2) as tap:
        yield tap
