"""Faults of real processes, by `make test-faults`; each test names its row of the fault table."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.fault_checks import Footprint, footprint
from tests.support.fault_cluster import Cluster, Shape, run_apart, running
from tests.support.fault_streams import Ask, long_prompts, mixed_load, undisturbed

SMALL_STEPS: Final = {"SLUICE_WORKER_MAX_BATCH_TOKENS": "48"}
"""So that a prompt takes many steps, and a fault can come in between."""
_HERE: Final = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything in this folder, so that `make test` leaves it out."""
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.faults)


@dataclass(frozen=True)
class Stage:
    """A cluster, and what it answers and holds without faults."""

    cluster: Cluster
    expected: dict[str, dict[str, Any]]
    """By name of the request, of `mixed_load` and `long_prompts`."""
    before: Footprint


def set_up(cluster: Cluster) -> Stage:
    """Return the stage of a cluster that is ready and idle."""
    return set_up_with(cluster, [*mixed_load(), *long_prompts()])


def set_up_with(cluster: Cluster, asks: Sequence[Ask]) -> Stage:
    """As `set_up`, for these requests."""

    async def prepare() -> tuple[dict[str, dict[str, Any]], Footprint]:
        expected = await undisturbed(cluster, asks)
        await asyncio.sleep(1.0)  # what a first request leaves open in a process, such as its threads, is there now
        return expected, await footprint(cluster)

    expected, before = run_apart(prepare())
    return Stage(cluster, expected, before)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Two workers and a dispatcher, shared by the tests of a module; each leaves them as it found them."""
    with running(tmp_path_factory.mktemp("cluster"), Shape(env=SMALL_STEPS)) as cluster:
        yield set_up(cluster)
