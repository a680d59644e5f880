"""Looks at a whole simulated cluster: whatever happens, every layer is where it could be restored from, twice.

    places of a layer = hosts whose memory has the checkpoint + live workers that hold the layer

A host outlives the processes on it. What a fault takes is not the doing of a plan: a worker whose process is down
counts as one place, until it is back and holds everything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shared.layers import LayerRange
from sim.cluster import SimCluster
from sim.faults.cluster import FaultCluster
from sim.worker import SimWorkerParams

NUM_PLACES = 2


class LayerWatch:
    """See `run_scenario`; `look` is for clusters in which nothing fails. Every worker has a host of its own."""

    def __init__(self) -> None:
        self.num_places: Counter[int] = Counter()
        """How often, with nobody down, the layer that had the fewest places had how many."""

    def __call__(self, cluster: FaultCluster) -> None:
        """Check every layer at this instant."""
        held = [
            node.worker.groups.layers
            for node in cluster.workers
            if node.process is not None and node.is_serving and node.worker is not None and node.worker.groups
        ]
        self._check([node.params for node in cluster.workers], held)

    def look(self, cluster: SimCluster) -> None:
        """Check every layer at this instant."""
        held = [worker.groups.layers for worker in cluster.workers if worker.groups is not None]
        self._check(cluster.params.workers, held)

    def _check(self, workers: Sequence[SimWorkerParams], held: Sequence[LayerRange]) -> None:
        facts = [worker.elastic for worker in workers if worker.elastic is not None]
        num_hosts, num_down = sum(each.has_host_copy for each in facts), len(workers) - len(held)
        fewest = min(sum(layer in layers for layers in held) for layer in range(len(facts[0].layer_bytes)))
        assert num_hosts + fewest + num_down >= NUM_PLACES, f"a layer has {num_hosts + fewest} places: {held}"
        if not num_down:
            self.num_places[num_hosts + fewest] += 1
