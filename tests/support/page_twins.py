"""For each simulated worker a real memory that lives the same life: what the simulator believes is what pages allow.

    simulated worker    [0, 4) 12 blocks ──► [2, 4) 30 blocks ──► [3, 4) 66 blocks ──► [0, 4) 12 blocks
    its twin, in pages         drop(0, 1), grow          drop(2), grow          restore, shrink, grow

The twin is the memory of a live worker over a sealed file: it refuses what the budget does not allow, and its ledger
counts parameters + KV + free = budget at every call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from services.worker.memory.elastic import ElasticMemory, KvShape
from services.worker.memory.layout import Kind, MemoryFacts
from services.worker.memory.posix import PosixMemory
from services.worker.roles.role import Changing, Leading, group_of
from shared.layers import check_tiling
from sim.devices.modelled_device import ModelledGroupDevice
from sim.faults.cluster import FaultCluster
from sim.faults.nodes import WorkerNode
from sim.worker import SimWorker

_FLOATS = 4


def open_twin(facts: MemoryFacts) -> ElasticMemory:
    """Return a memory of these sizes that holds the whole model, with as many blocks as fit.

    Its blocks are of one token; for pages only their size counts.
    """
    kv = KvShape(1, 1, facts.block_bytes // _FLOATS, torch.float32)
    memory = ElasticMemory(facts, kv, PosixMemory(facts.page_bytes, facts.num_pages))
    memory.open_kv(0, 0)
    memory.grow()
    return memory


class PageTwin:
    """One worker's."""

    def __init__(self, device: ModelledGroupDevice) -> None:
        self.device = device
        self.layers = self.resident = device.layers
        self._whole = device.layers
        self.memory = open_twin(device._layout.facts)
        self._num_whole_blocks = self.memory.num_blocks
        self.check_blocks()

    def follow(self) -> str:
        """Hold what the worker holds now; return how it came to that, empty if nothing has changed."""
        layers = self.device.layers
        if layers == self.layers:
            return self._follow_beside()
        if layers == self._whole:
            self._restore()
        else:
            assert self.layers.covers(layers), f"{self.layers} became {layers}: layers from nowhere"
            self.memory.reside([], 0)
            self.memory.drop([layer for layer in self.layers if layer not in layers])
        how = "restored" if layers == self._whole else "dropped" if self.layers == self._whole else "dropped more"
        self.layers = self.resident = layers
        self.check_pages()
        assert self.device.resident == layers, "a worker that changes its layers has none beside"
        return how

    def _follow_beside(self) -> str:
        resident = self.device.resident
        if resident == self.resident:
            return ""
        self.memory.reside([layer for layer in resident if layer not in self.layers], 0)
        self.memory.grow()
        how = "loads beside" if len(resident) > len(self.resident) else "gave up"
        self.resident = resident
        self.check_pages()
        return how

    def _restore(self) -> None:
        self.memory.restore([layer for layer in self._whole if layer not in self.layers], 0)
        if self.memory.num_blocks > self._num_whole_blocks:
            self.memory.shrink(self._num_whole_blocks)
        self.memory.grow(self._num_whole_blocks - self.memory.num_blocks)

    def check_pages(self) -> None:
        """Check the pages: each at one place, in the ledger as in the mappings, and none beside the budget."""
        memory = self.memory
        memory.check_invariants()
        pool = memory._pool
        num_parameters, num_kv = pool.count(Kind.OUTER, Kind.PARAMETERS), pool.count(Kind.KEYS, Kind.VALUES)
        assert num_parameters + num_kv + memory._pool.num_free == self.device.facts.num_pages
        assert memory.holding.layers == tuple(self.layers)

    def check_blocks(self) -> None:
        """Check that the worker believes in the blocks that are there."""
        device = self.device
        believed = min(device._kv.num_blocks, device.blocks_beside(device.resident))
        assert believed == self.memory.num_blocks, f"{self.layers}: {believed} blocks are believed in"


class PageWatch:
    """Looks at a whole simulated cluster; see `run_scenario`."""

    def __init__(self) -> None:
        self.done: Counter[str] = Counter()
        """What workers' memories went through."""
        self.num_looks = 0
        self._seen: dict[str, PageTwin] = {}

    def __call__(self, cluster: FaultCluster) -> None:
        """Check every law at this instant."""
        self.num_looks += 1
        for node in cluster.workers:
            if node.process is not None and node.worker is not None and node.is_serving:
                self._look(node)
        self._look_at_groups(cluster)

    def _look_at_groups(self, cluster: FaultCluster) -> None:
        """Check that a pipeline's stages have every layer once, and its leader the room of the least of them."""
        facts = cluster.scenario.workers[0].elastic
        assert facts is not None
        leaders = {node.name: node for node in cluster.workers if node.is_running}
        for (plan_id, _), (workers, stages) in cluster.network._pipelines.items():
            parts = [server.stage for server in stages.servers]
            check_tiling([stage.layers for stage in parts], len(facts.layer_bytes))
            self.done[f"groups of {len(workers)}"] += 1
            node = leaders.get(workers[0])
            if node is None or node.worker is None or node.worker.service.agent is None:
                continue
            agent = node.worker.service.agent
            state = agent.keeper.state
            group = None if isinstance(state, Changing) else group_of(state)
            if isinstance(group, Leading) and group.place.plan_id == plan_id:
                self._look_at_leader(node.worker, [stage.kv.num_blocks for stage in parts])

    def _look_at_leader(self, leader: SimWorker, rooms: Sequence[int]) -> None:
        """Check that a leader has the room of the least of its stages, and uses no block that one of them lacks."""
        engine, agent, device = leader.service.engine, leader.service.agent, leader.groups
        assert agent is not None
        assert device is not None
        keeper, place = agent.keeper, device._place
        stages = [] if place is None else [self._seen[stage.worker_id].device for stage in place.stages]
        backed = min((stage.blocks_beside(stage.resident) for stage in stages if stage._place), default=min(rooms))
        blocks = engine.blocks
        beyond = (blocks.refcount[backed:] > 0) | (blocks.pins[backed:] > 0)
        assert not beyond.any(), f"{leader.params.worker_id} uses blocks without memory"
        assert engine.capacity_blocks <= backed <= min(rooms), f"{leader.params.worker_id} believes in more room"
        is_changing = agent._in_hand is not None or keeper.arriving.is_under_way or keeper.limit._kept is not None
        assert engine.capacity_blocks == backed or is_changing, f"{leader.params.worker_id} has other room"
        self.done["serves with less"] += backed < min(rooms)
        self.done["led"] += 1

    def _look(self, node: WorkerNode) -> None:
        assert node.worker is not None
        device, service = node.worker.groups, node.worker.service
        assert device is not None
        seen = self._seen.get(node.name)
        if seen is None or seen.device is not device:  # another process of this name, which begins whole
            self.done["processes"] += 1
            if seen is not None:
                seen.memory.close()
            seen = self._seen[node.name] = PageTwin(device)
        self.done[seen.follow()] += 1
        seen.check_blocks()
        blocks = service.engine.blocks
        assert blocks.num_used + blocks.num_free == blocks.num_usable, f"{node.name} has lost blocks"
        agent = service.agent
        assert agent is not None
        if agent.role.num_stages == 1 and agent._in_hand is None and device._place is None:
            assert service.engine.capacity_blocks == seen.memory.num_blocks, f"{node.name} serves with other room"

    def close(self) -> None:
        """Give the twins' memory back."""
        for seen in self._seen.values():
            seen.memory.close()
