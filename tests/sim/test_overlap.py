"""Workers whose steps overlap, while all fails that can: processes, links and messages, and groups that come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from services.worker.contract.batch import OWN_SAMPLE, Batch, BatchOutput
from sim.faults.campaign import run_scenario
from sim.faults.cluster import FaultCluster
from sim.faults.scenario import FaultScenario, draw_group_scenario, draw_scenario
from sim.worker import SimWorker, StickyExecutor

NUM_SEEDS = 8


class Devices:
    """The devices of a run, and what went ahead on each.

    Attributes:
        num_ahead: decodes that went ahead, by device in the order of their first one.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_ahead: dict[StickyExecutor, int] = {}
        submit = StickyExecutor.submit

        def watched(device: StickyExecutor, batch: Batch) -> asyncio.Future[BatchOutput]:
            found = int((batch.tokens == OWN_SAMPLE).sum())
            if found:
                self.num_ahead[device] = self.num_ahead.get(device, 0) + found
            return submit(device, batch)

        monkeypatch.setattr(StickyExecutor, "submit", watched)


def overlapping(scenario: FaultScenario) -> FaultScenario:
    return replace(scenario, workers=tuple(replace(worker, overlaps=True) for worker in scenario.workers))


@pytest.mark.slow
@pytest.mark.parametrize("draw", [draw_scenario, draw_group_scenario])
def test_the_invariants_hold_whatever_fails(
    draw: Callable[[int], FaultScenario], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts among them: they are those of each request alone."""
    devices = Devices(monkeypatch)
    for seed in range(NUM_SEEDS):
        assert run_scenario(overlapping(draw(seed))).violations == (), seed
    assert len(devices.num_ahead) > NUM_SEEDS
    assert sum(devices.num_ahead.values()) > 20 * NUM_SEEDS


@pytest.mark.slow
def test_a_worker_overlaps_again_when_it_leaves_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time it is whole again it has another device; the engine is the same one."""
    devices = Devices(monkeypatch)
    first: dict[SimWorker, StickyExecutor] = {}
    again = set[StickyExecutor]()

    def watch(cluster: FaultCluster) -> None:
        for worker in (node.worker for node in cluster.workers):
            device = None if worker is None else worker.device
            if worker is not None and device is not None and first.setdefault(worker, device) is not device:
                again.add(device)

    for seed in range(NUM_SEEDS):
        run_scenario(overlapping(draw_group_scenario(seed)), watch=watch)
    assert len(again & devices.num_ahead.keys()) > 5


def test_without_it_nothing_goes_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices(monkeypatch)
    run_scenario(draw_scenario(0))
    assert not devices.num_ahead
