"""A whole pipeline without hardware on one event loop: modelled stages, and the modelled links between them.

leader ─┬─────────────┬──────────────┐ batches, at once to every stage
        ▼             ▼              ▼
     stage 0 ──────► stage 1 ──────► stage 2 ──► tokens, to the leader
             activations
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field, replace

from services.worker.contract.batch import Batch
from services.worker.contract.executor import HostCopy, HostMemory, KvCapacity
from services.worker.modelled.executor import FailureInjector
from services.worker.modelled.shadow_kv import ShadowKv, TokenDraw, layer_weight
from services.worker.peers.frames import PeerLostError
from services.worker.pipeline.stage_messages import KvOver, StageClose, StageMessage
from shared.cost import CostModel, StageCost
from shared.layers import LayerRange, check_tiling
from sim.devices.channel import MemoryChannel, ModelledLink
from sim.devices.modelled_stage import ModelledStage, ModelledStageServer


@dataclass(frozen=True, slots=True)
class StageOwner:
    """Whose stage it is."""

    on_end: Callable[[str | None], None] = lambda _: None
    """See `ModelledStageServer`."""
    context: Context | None = None
    """In which what reaches the stage is run; None: that of whoever sends."""


class ModelledStages:
    """A `StageGroup` whose stages live on this event loop, joined by modelled links.

    Args:
        stages: in order of their layers, all of the model's.
        link: from each stage to the next. Messages to and from the leader take its latency; the leader hands its own
            stage a batch at once.
        owners: of the stages; none: the leader's process is everybody's.
    """

    def __init__(self, stages: Sequence[ModelledStage], link: ModelledLink, owners: Sequence[StageOwner] = ()) -> None:
        owners = owners or [StageOwner()] * len(stages)
        check_tiling([stage.layers for stage in stages], stages[-1].layers.end)
        self.devices = tuple(stages)
        self.from_leader: list[MemoryChannel] = []
        """By stage; to cut one is to let the stage lose its leader."""
        self.activations: list[MemoryChannel] = []
        """From each stage to the next."""
        self.servers: list[ModelledStageServer] = []
        self._contexts = [owner.context for owner in owners]
        self._on_message: Callable[[StageMessage], None] = lambda _: None
        self._on_lost: Callable[[str], None] = lambda _: None
        following: MemoryChannel | None = None
        for i in reversed(range(len(stages))):
            way = ModelledLink(link.latency_s if i else 0.0)
            to_leader = MemoryChannel(way, lambda m: self._on_message(m), lambda r: self._on_lost(r), owners[0].context)
            server = ModelledStageServer(stages[i], following, to_leader, owners[i].on_end)
            self.servers.insert(0, server)
            self.from_leader.insert(0, MemoryChannel(way, server.receive, server.die, owners[i].context))
            if i:
                following = MemoryChannel(link, server.receive, server.die, owners[i].context)
                self.activations.insert(0, following)

    @property
    def num_stages(self) -> int:
        """How many there are."""
        return len(self.servers)

    @property
    def capacity(self) -> KvCapacity:
        """The least of all stages."""
        first = self.devices[0].capacity
        return replace(first, num_blocks=min(device.capacity.num_blocks for device in self.devices))

    def attach(self, on_message: Callable[[StageMessage], None], on_lost: Callable[[str], None]) -> None:
        """Name who hears the stages; see `StageGroup`."""
        self._on_message, self._on_lost = on_message, on_lost

    def post(self, message: Batch | HostCopy | KvOver) -> None:
        """Send to every stage."""
        for channel in self.from_leader:
            try:
                channel.send(message)
            except PeerLostError as error:
                asyncio.get_running_loop().call_soon(self._on_lost, str(error))

    async def close(self) -> None:
        """End all stages, each in the context of its owner: what its owner does then must outlive the leader."""
        for server, channel, context in zip(self.servers, self.from_leader, self._contexts, strict=True):
            channel.close()
            (context or copy_context()).run(server.receive, StageClose())


@dataclass(frozen=True, slots=True)
class PipelineParams:
    """A modelled pipeline of equal workers."""

    cost: CostModel
    """Of the whole model on one worker."""
    num_layers: int
    ranges: tuple[LayerRange, ...]
    """In order of the stages."""
    num_blocks: int
    """Blocks that every stage has for its layers."""
    block_size: int
    draw: TokenDraw
    link: ModelledLink = field(default_factory=ModelledLink)
    head_layers: float = 0.0
    """See `StageCost`."""
    host: HostMemory | None = None
    verify_ratio: float = 0.01
    """See `ShadowKv`."""


def modelled_stages(params: PipelineParams, failures: Sequence[FailureInjector | None] = ()) -> ModelledStages:
    """Return the stages of a modelled pipeline.

    Args:
        params: what it is like.
        failures: by stage, what makes steps fail there; none where it is shorter.

    Raises:
        ValueError: the ranges are not all layers of the model, each once.
    """
    check_tiling(params.ranges, params.num_layers)
    num_host_blocks = 0 if params.host is None else params.host.num_blocks
    stages = [
        ModelledStage(
            StageCost(params.cost, layers, params.num_layers, params.head_layers),
            ShadowKv(
                params.num_blocks,
                params.block_size,
                params.draw,
                num_host_blocks=num_host_blocks,
                verify_ratio=params.verify_ratio,
                seed=i,
                weight=layer_weight(layers, params.num_layers),
            ),
            failure=failures[i] if i < len(failures) else None,
            host=params.host,
        )
        for i, layers in enumerate(params.ranges)
    ]
    return ModelledStages(stages, params.link)
