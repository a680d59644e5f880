"""Packing systems in the simulator beside the replay of sizes alone: the same requests, about the same workers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.packing_runs import HEAD, Load, look, row_of


@pytest.mark.slow
@pytest.mark.parametrize("system", ["worst-fit", "pack"])
def test_the_simulator_needs_about_as_many_workers_as_the_replay_of_sizes(system: str) -> None:
    """A few are in use, so one more or less is much; steps, queues, blocks and links are what the replay leaves out."""
    seen = look(system, 0, Load("mell-13b", 40.0, 20.0, 25.0, None))
    assert seen.by_sizes == pytest.approx(seen.gpu_s, rel=0.2)
    assert seen.gpu_s > 1.0
    assert np.all(seen.plotted[1] >= np.floor(seen.plotted[2]))
    assert len(row_of(system, [seen, seen])) == len(HEAD)


def test_a_system_that_the_replay_does_not_know_has_nothing_beside_it() -> None:
    seen = look("fcfs-chunked", 0, Load("mell-13b", 2.0, 1.0, None, 2.0))
    assert math.isnan(seen.by_sizes)
    assert not row_of("fcfs-chunked", [seen])[HEAD.index("by sizes")]
