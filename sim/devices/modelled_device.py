"""A `GroupDevice` without hardware: its pages are arithmetic, its stages meet in a modelled network, all on one loop.

Used on the virtual clock. What takes time there: mapping pages anew, loading parameters from the host, the network's
latency.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np

from services.worker.contract.executor import HostMemory
from services.worker.contract.kept_kv import NOTHING_KEPT, KeptKv
from services.worker.executor.parameter_load import ParameterLoad
from services.worker.kv_moves.kv_table import KvOffer
from services.worker.kv_moves.places import GroupFailedError, GroupPlace, NextShares
from services.worker.memory import holdings
from services.worker.memory.layout import MemoryFacts, MemoryLayout
from services.worker.modelled.executor import FailureInjector, ModelledExecutor
from services.worker.modelled.shadow_kv import ShadowKv, TokenDraw, layer_weight
from services.worker.pipeline.pipeline import PipelineExecutor
from services.worker.roles.device import Led, Parting
from shared.cost import CostModel, StageCost
from shared.layers import LayerRange
from shared.messages.report import ElasticFacts
from sim.devices.modelled_exchange import Estate, Share
from sim.devices.modelled_network import Begun, ModelledNetwork
from sim.devices.modelled_stage import ModelledStage

HOST = "the host"
"""Where parameters come from."""


@dataclass(frozen=True, slots=True)
class ModelledDeviceParams:
    """What a modelled device is like."""

    facts: ElasticFacts
    cost: CostModel
    """Of the whole model."""
    block_size: int
    draw: TokenDraw
    failure: FailureInjector | None = None
    """Makes steps fail."""
    remap_s: float = 0.005
    """Time of a change of page tables (5 ms: KunServe v2, section 4.1)."""
    host: HostMemory | None = None
    """For KV that leaves the device; None: there is none."""
    load_bytes_per_s: float = 25e9
    """At which parameters come from the host: PCIe 4.0 x16 unless told otherwise."""


@dataclass(frozen=True, slots=True)
class _Loading:
    """Parameters that come while the group serves."""

    began_s: float
    num_bytes: int
    bytes_per_s: float

    def left_bytes(self, now_s: float) -> float:
        """Return what has not come yet."""
        return max(self.num_bytes - (now_s - self.began_s) * self.bytes_per_s, 0.0)


class ModelledGroupDevice:
    """See `GroupDevice`.

    Args:
        params: what it is like.
        network: where its groups meet.
        make_executor: makes the executor of the whole model over its memory.
    """

    def __init__(
        self,
        params: ModelledDeviceParams,
        network: ModelledNetwork,
        make_executor: Callable[[ShadowKv], ModelledExecutor],
    ) -> None:
        facts = params.facts
        self.layers = self.resident = LayerRange(0, len(facts.layer_bytes))
        self._all_layers = self.layers
        self._loading: _Loading | None = None
        self._params = params
        self._network = network
        self._make_executor = make_executor
        self._layout = MemoryLayout(
            MemoryFacts(**facts.model_dump(include={each.name for each in fields(MemoryFacts)}))
        )
        self._kv = self._shadow_kv(self.num_blocks(self._all_layers), 1)
        self._ahead: ShadowKv | None = None
        """Beside a stage: memory for KV of all layers of its share."""
        self._num_ahead = 0
        """Blocks of that which there is memory for."""
        self._place: GroupPlace | None = None
        """In the pipeline that it is a stage of."""
        self.executor = make_executor(self._kv)
        """Of the whole model; of no use while the device is a stage."""
        self.pipelines: list[PipelineExecutor] = []
        """Those that it has led, for their stats."""

    @property
    def facts(self) -> ElasticFacts:
        """Sizes of its memory."""
        return self._params.facts

    @property
    def address(self) -> str:
        """Nowhere: all are in one process."""
        return ""

    def num_blocks(self, layers: LayerRange) -> int:
        """Return the KV blocks of some layers that there is memory for beside the parameters of just these."""
        return holdings.room(self._layout, layers)

    def refusal(self, layers: LayerRange) -> str | None:
        """Return why this device cannot come to hold these layers."""
        if not self._all_layers.covers(layers):
            return f"the model has layers {self._all_layers}, not {layers}"
        return None if self.num_blocks(layers) else f"layers {layers} leave no memory for KV"

    @property
    def loaded_ratio(self) -> float:
        """Share of the resident parameters that is loaded; see `GroupDevice`."""
        loading = self._loading
        if loading is None:
            return 1.0
        return 1 - loading.left_bytes(_now_s()) / sum(self.facts.layer_bytes[layer] for layer in self.resident)

    @property
    def load_now(self) -> ParameterLoad | None:
        """How far parameters are that `reside` loads; see `GroupDevice`."""
        loading = self._loading
        if loading is None:
            return None
        num_loaded = loading.num_bytes - int(loading.left_bytes(_now_s()))
        return ParameterLoad(loading.num_bytes, num_loaded, ((HOST, num_loaded),), num_loaded == loading.num_bytes)

    def blocks_beside(self, layers: LayerRange) -> int:
        """Return the KV blocks of the own layers beside the parameters of some more; see `GroupDevice`."""
        return holdings.room(self._layout, self.layers, layers)

    async def reside(self, layers: LayerRange, num_blocks: int, *, is_ahead: bool = False) -> int:
        """Have other parameters beside those of the own layers; see `GroupDevice`."""
        found = self.blocks_beside(layers)
        if not layers.covers(self.layers) or found < num_blocks:
            raise GroupFailedError(f"layers {layers} leave memory for {found} KV blocks of {num_blocks}")
        self.end_copying()
        await asyncio.sleep(self._params.remap_s)
        self._ahead = self._shadow_kv(self.whole_blocks, 1) if is_ahead else None
        self._num_ahead = self.blocks_ahead(self.layers, num_blocks) if is_ahead else 0
        found = num_blocks if is_ahead else found
        if layers == self.resident:
            if self.load_now is not None and self.load_now.is_over:
                self._loading = None
            return found
        self._kv.poison(np.arange(min(found, self._kv.num_blocks), self._kv.num_blocks, dtype=np.int32))
        more = sum(self.facts.layer_bytes[layer] for layer in layers if layer not in self.layers)
        self._loading = _Loading(_now_s(), more, self._params.load_bytes_per_s) if more else None
        self.resident = layers
        return found

    async def lead(self, place: GroupPlace, on_end: Callable[[str | None], None], kept: KeptKv) -> Led:
        """Be the first stage; see `GroupDevice`."""
        begun = await self._meet(place, on_end, kept)
        executor = PipelineExecutor(begun.stages, asyncio.get_running_loop().time, on_end)
        self.pipelines.append(executor)
        return Led(executor, arrivals=begun.arrivals)

    async def join(self, place: GroupPlace, on_end: Callable[[str | None], None], kept: KeptKv) -> int:
        """Be another stage; see `GroupDevice`."""
        await self._meet(place, on_end, kept)
        return self.num_blocks(self.layers)

    async def _meet(self, place: GroupPlace, on_end: Callable[[str | None], None], kept: KeptKv) -> Begun:
        network, held, step_s = self._network, self.layers, self._recent_step_s
        group = "" if self._place is None else self._place.name
        self._leave()
        self._ahead = None
        await asyncio.sleep(self._params.remap_s)
        layers, num_layers = place.own.layers, len(self._all_layers)
        num_blocks = self.num_blocks(layers)
        if not num_blocks:
            raise GroupFailedError(f"layers {layers} leave no memory for KV")
        offer = KvOffer(
            *(held, network.kept_aside, num_blocks, group, kept, network.link_bytes_per_s, step_s),
            num_host_blocks=self._num_host_blocks,
        )
        before = Estate(offer, self._kv, 2 * self._params.facts.block_bytes, self._params.cost)
        self.layers = self.resident = layers
        self._loading = None
        self._kv = self._shadow_kv(num_blocks, layer_weight(layers, num_layers))
        stage = ModelledStage(
            StageCost(self._params.cost, layers, num_layers),
            self._kv,
            failure=self._params.failure if place.index == 0 else None,
            host=self._params.host,
        )
        met = await network.meet(place, stage, before, on_end)
        self._place = place
        return met

    @property
    def most_copied(self) -> int:
        """Blocks of one round of `copy_ahead`; see `GroupDevice`."""
        return min(self._kv.num_blocks, self._network.kept_aside)

    async def copy_ahead(self, next_shares: NextShares | None = None) -> bool:
        """Copy KV to where it will be, while the group serves; see `GroupDevice`."""
        if self._place is None or self._ahead is None:
            return False
        return await self._network.copy_ahead(self._place, self._share(self._ahead, Parting()), next_shares)

    def end_copying(self) -> None:
        """Let copies end soon; see `GroupDevice`."""
        if self._place is not None:
            self._network.end_copying(self._place.key)

    def _share(self, ahead: ShadowKv | None, parting: Parting) -> Share:
        whole = self._shadow_kv(self.whole_blocks, 1) if ahead is None else ahead
        ahead_blocks = 0 if ahead is None else self._num_ahead
        offer = KvOffer(
            *(self.layers, self._network.kept_aside, whole.num_blocks),
            ahead_blocks=ahead_blocks,
            num_host_blocks=self._num_host_blocks,
        )
        return Share(offer, self._kv, whole, 2 * self._params.facts.block_bytes, parting)

    def blocks_ahead(self, layers: LayerRange, num_blocks: int) -> int:
        """Return of how many blocks a stage can have all layers; see `GroupDevice`."""
        return holdings.room_ahead(self._layout, layers, num_blocks)

    @property
    def whole_blocks(self) -> int:
        """KV blocks beside the whole model."""
        return self.num_blocks(self._all_layers)

    async def alone(self, parting: Parting | None = None) -> Led:
        """Hold the whole model; see `GroupDevice`."""
        place, kept, num_bytes = self._place, NOTHING_KEPT, 0
        self.end_copying()
        ahead, self._ahead = self._ahead, None
        share = self._share(ahead, parting or Parting())
        if parting is not None and place is not None:
            kept, num_bytes = await self._network.part(place, share)
        self._leave()
        if self.layers != self._all_layers:
            await asyncio.sleep(self._params.remap_s + self._missing_bytes / self._params.load_bytes_per_s)
        self.layers = self.resident = self._all_layers
        self._loading = None
        self._kv = share.whole
        self.executor = self._make_executor(self._kv)
        return Led(self.executor, kept, num_moved_bytes=num_bytes)

    async def close(self) -> None:
        """Leave any group. Idempotent."""
        self._leave()

    @property
    def _num_host_blocks(self) -> int:
        return 0 if self._params.host is None else self._params.host.num_blocks

    @property
    def _recent_step_s(self) -> float:
        leads = self._place is not None and not self._place.index
        return self.pipelines[-1].recent_step_s if leads else self.executor.recent_step_s

    @property
    def _missing_bytes(self) -> float:
        """Parameters of the whole model that are not loaded."""
        if self._loading is not None:
            return self._loading.left_bytes(_now_s())
        layer_bytes = self.facts.layer_bytes
        return sum(layer_bytes[layer] for layer in self._all_layers if layer not in self.resident)

    def _leave(self) -> None:
        if self._place is not None:
            place, self._place = self._place, None
            self._network.leave(place.key, place.index)
            if place.index == 0:
                self._network.close(place.key)

    def _shadow_kv(self, num_blocks: int, weight: int) -> ShadowKv:
        num_host_blocks = self._num_host_blocks
        return ShadowKv(
            *(num_blocks, self._params.block_size, self._params.draw), weight=weight, num_host_blocks=num_host_blocks
        )


def _now_s() -> float:
    return asyncio.get_running_loop().time()
