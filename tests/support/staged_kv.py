"""The modelled memory of one worker, or of a pipeline whose stages run ahead of each other as they are told."""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from services.worker.contract.arrays import I32
from services.worker.contract.batch import Batch
from services.worker.contract.executor import HostCopy, HostMemory
from services.worker.contract.table_entries import slots_of
from services.worker.modelled.shadow_kv import ShadowKv, TokenDraw, layer_weight
from services.worker.pipeline.stage import StageInbox, outcome, run_step
from services.worker.pipeline.stage_messages import Activation, StepDone, StepFailed
from shared.cost import CostModel, StageCost
from shared.layers import even_split
from sim.devices.modelled_stage import ModelledStage

NUM_LAYERS = 7
NO_COST = CostModel(g0_s=0, b0_s=0, g1_s=0, b1_s=0, d_s=0, a_s=0)


class StagedKv:
    """The stages' own code without their clock. Each stage runs its steps in order, as far as those before it have."""

    def __init__(
        self, num_stages: int, num_blocks: int, block_size: int, draw: TokenDraw, num_host_blocks: int
    ) -> None:
        ranges = even_split(NUM_LAYERS, num_stages)
        weights = [layer_weight(layers, NUM_LAYERS) for layers in ranges]
        kv = partial(ShadowKv, num_blocks, block_size, draw, num_host_blocks=num_host_blocks, verify_ratio=1.0)
        self.parts = [kv(weight=weight) for weight in weights]
        costs = [StageCost(NO_COST, layers, NUM_LAYERS) for layers in ranges]
        host = HostMemory(num_host_blocks, 1024, 0.0) if num_host_blocks else None
        stage = partial(ModelledStage, host=host, failure=lambda batch: self._failing.get(batch.step_id))
        self._stages = [stage(cost, part) for cost, part in zip(costs, self.parts, strict=True)]
        self._inboxes = [StageInbox(is_first=i == 0) for i in range(num_stages)]
        self._failing: dict[int, str] = {}
        self._said: list[StepDone | StepFailed] = []

    @property
    def num_blocks(self) -> int:
        return self.parts[0].num_blocks

    def submit(self, batch: Batch) -> None:
        for inbox in self._inboxes:
            inbox.put(batch)

    def advance(self, stage: int) -> bool:
        """Run one step on a stage if it has one that it can run."""
        work = self._inboxes[stage].pop()
        if work is None:
            return False
        said = outcome(work, run_step(self._stages[stage], work), 0.0)
        if stage + 1 < len(self._stages):
            assert isinstance(said, Activation | StepFailed)
            self._inboxes[stage + 1].put(said)
        else:
            assert isinstance(said, StepDone | StepFailed)
            self._said.append(said)
        return True

    def finish(self, batch: Batch, cause: str | None) -> StepDone | StepFailed:
        """Run the oldest step to its end; with a cause it fails on the first stage that has not run it yet."""
        if cause is not None:
            self._failing[batch.step_id] = cause
        for stage in range(len(self._stages)):
            while not self._said and self.advance(stage):
                pass
        said = self._said.pop(0)
        assert isinstance(said, StepFailed) == (cause is not None)
        assert not self._said
        return said

    def grow(self, num_blocks: int) -> None:
        for part in self.parts:
            part.grow(num_blocks)

    def poison(self, ids: I32, *, on_host: bool = False) -> None:
        for part in self.parts:
            part.poison(ids, on_host=on_host)

    def begin_copy(self, copy: HostCopy) -> None:
        for part in self.parts:
            part.begin_copy(copy)

    def end_copy(self, copy: HostCopy) -> None:
        for part in self.parts:
            part.end_copy(copy)

    def take_from(self, other: StagedKv, source: I32, target: I32) -> None:
        """Let each stage have its layers of another memory's blocks, named as in `KeptKv`."""
        for part, its in zip(self.parts, other.parts, strict=True):
            part.take_from(its, source, target)

    def slots(self, ids: I32) -> NDArray[np.uint64]:
        return np.stack([part._slots[ids] for part in self.parts])

    def read(self, row: int, length: int) -> NDArray[np.uint64]:
        """Return [num_stages, length] what a row reads at its first positions, from the end that each entry says."""
        positions, size = np.arange(length, dtype=np.int32), self.parts[0].block_size
        slots = [slots_of(part._table[row, positions // size], positions, size) for part in self.parts]
        return np.stack([part._slots.reshape(-1)[its] for part, its in zip(self.parts, slots, strict=True)])
