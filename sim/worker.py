"""A worker for the virtual clock: the live worker's own code on a modelled executor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.worker.build import EngineMaker, ServedModel, build_worker, make_reporter
from services.worker.config import ExecutorKind, WorkerSettings
from services.worker.contract.executor import Executor, HostMemory
from services.worker.cost.estimate import CostEstimate
from services.worker.engine.engine import Engine
from services.worker.modelled.executor import FailureInjector, ModelledExecutor
from services.worker.modelled.shadow_kv import ShadowKv, TokenDraw
from services.worker.pipeline.pipeline import PipelineExecutor
from services.worker.scheduling.registry import make_scheduler
from services.worker.scheduling.view import Scheduler
from services.worker.sequences.config import EngineConfig
from services.worker.serving.service import WorkerService
from shared.cost import CostModel
from shared.ids import Incarnation, WorkerId
from shared.layers import LayerRange
from shared.messages.report import ElasticFacts
from shared.process.tasks import TaskOwner
from shared.systems import DEFAULT_SYSTEM, Memory, find_system
from shared.transport.bus import Bus
from sim.devices.channel import ModelledLink
from sim.devices.modelled_device import ModelledDeviceParams, ModelledGroupDevice
from sim.devices.modelled_migration import ModelledKvNetwork
from sim.devices.modelled_network import ModelledNetwork
from sim.devices.modelled_pipeline import PipelineParams, modelled_stages
from sim.oracle import UnlimitedEngine

SWAP_MEMORY_BYTES = 64 * 2**30
"""Host memory of a worker whose system swaps, unless told otherwise."""
NO_FOLDER = Path("modelled")
MODEL_NAME = "modelled"
"""Name under which simulated workers serve."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Devices that hold one copy of the model together."""

    num_layers: int
    """Of the model."""
    ranges: tuple[LayerRange, ...]
    """Layers of each stage, in order."""
    link: ModelledLink
    """From each stage to the next."""


@dataclass(frozen=True, slots=True)
class SimWorkerParams:
    """What a simulated worker is like."""

    worker_id: str
    cost: CostModel
    num_blocks: int
    """KV memory, in blocks."""
    block_size: int = 16
    """Token slots of one block."""
    system: str = DEFAULT_SYSTEM
    scheduler: str | None = None
    """Which sequences run in the next step; None: the system's policy."""
    policy: Mapping[str, Any] = field(default_factory=dict)
    """Settings of that policy."""
    max_model_len: int = 4096
    """Most tokens of prompt and output together."""
    prefix_caching: bool = True
    pull_prefixes: bool = True
    """See `WorkerSettings.pull_prefixes`."""
    max_sequences: int = 1024
    max_batch_rows: int = 256
    max_batch_tokens: int = 2048
    vocab_size: int = 32_000
    eos_token_ids: tuple[int, ...] = (2,)
    """Never drawn: a simulated output ends by its length."""
    first_token_id: int = 256
    """Smallest id that is drawn."""
    kv_bytes_per_token: int = 196_608
    """Keys and values of one token in all layers, for the host link; Qwen2.5-14B in 16 bits unless told otherwise."""
    host_memory_bytes: int | None = None
    """Host memory for KV of preempted sequences; None: 64 GiB where the system swaps, none elsewhere."""
    host_link_bytes_per_s: float = 25e9
    """Between device and host, each way: PCIe 4.0 x16 unless told otherwise."""
    host: str | None = None
    """What it shares with others; None: nobody is on the same one."""
    cluster: str = "default"
    failure: FailureInjector | None = None
    """Makes steps fail."""
    overlaps: bool = False
    """A device that holds the whole model is given steps before those before them have ended."""
    incarnation: int = 0
    """Of the process: another number after each restart."""
    orphan_s: float = 60.0
    """See `WorkerSettings.orphan_s`."""
    pipeline: Pipeline | None = None
    """None: the whole model on one device. Else this worker leads a group, and `num_blocks` are those of each stage."""
    elastic: ElasticFacts | None = None
    """Memory of which layers can be dropped; then it says how many blocks there are, and `num_blocks` counts for
    nothing."""
    remap_s: float = 0.005
    """See `ModelledDeviceParams`."""

    def host_memory(self) -> HostMemory | None:
        """Return the host memory for KV of preempted sequences, None if there is none."""
        num_bytes, block_kv_bytes = self.host_memory_bytes, self.kv_bytes_per_token * self.block_size
        if num_bytes is None:
            num_bytes = SWAP_MEMORY_BYTES if find_system(self.system).swaps else 0
        if num_bytes < block_kv_bytes:
            return None
        return HostMemory(num_bytes // block_kv_bytes, block_kv_bytes, block_kv_bytes / self.host_link_bytes_per_s)


class StickyExecutor(ModelledExecutor):
    """A modelled device that can get stuck: the step that runs then ends late."""

    stuck_until_s = 0.0
    """No step ends before; seconds of the event loop's clock."""

    def _finish(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() < self.stuck_until_s:
            loop.call_at(self.stuck_until_s, self._finish)
        else:
            super()._finish()


class SimWorker:
    """One worker in the run, with the task that reports for it.

    Args:
        params: what it is like.
        bus: connected.
        on_failure: called with a task's name and error when a task of it dies, which `failures` notes as well.
        network: where its groups meet, if its layers can be dropped.
    """

    def __init__(
        self,
        params: SimWorkerParams,
        bus: Bus,
        on_failure: Callable[[str, BaseException], None] | None = None,
        network: ModelledNetwork | None = None,
    ) -> None:
        self.params = params
        self.failures: list[tuple[str, BaseException]] = []
        self._on_failure = on_failure
        self._tasks = TaskOwner(self._fail)
        self._settings = WorkerSettings(
            cluster=params.cluster,
            instance_id=params.worker_id,
            model=NO_FOLDER,
            served_model_name=(MODEL_NAME,),
            executor=ExecutorKind.MODELLED,
            system=params.system,
            max_sequences=params.max_sequences,
            max_batch_rows=params.max_batch_rows,
            max_batch_tokens=params.max_batch_tokens,
            block_size=params.block_size,
            prefix_caching=params.prefix_caching,
            pull_prefixes=params.pull_prefixes,
            orphan_s=params.orphan_s,
        )
        draw = TokenDraw.of_vocabulary(params.vocab_size, params.eos_token_ids, params.first_token_id)
        self.draw = draw
        self.device: StickyExecutor | None = None
        """The device, if it holds the whole model."""
        self.kv: ShadowKv | None = None
        """Its memory."""
        self.pipeline: PipelineExecutor | None = None
        """The group's stages, if this worker leads one."""
        self.groups: ModelledGroupDevice | None = None
        """Memory and model, if layers can be dropped."""
        executor = self._open_executor(network or ModelledNetwork())
        self.reporter = make_reporter(self._settings, bus, Incarnation(params.incarnation))
        self.reporter.pid, self.reporter.host = 1, params.worker_id  # as in a container, before and after a restart
        self.service: WorkerService = build_worker(
            self._settings,
            bus,
            executor,
            ServedModel(
                params.vocab_size,
                params.eos_token_ids,
                params.max_model_len,
                cost=CostEstimate(params.cost),
                digest=MODEL_NAME,
                kv_bytes=params.num_blocks * params.kv_bytes_per_token * params.block_size,
            ),
            self.reporter,
            self._fail,
            make_engine=self._engine_maker(),
            device=self.groups,
            network=self._kv_network(network),
        )

    def _kv_network(self, network: ModelledNetwork | None) -> ModelledKvNetwork | None:
        """Return the way to other workers' KV; None: it serves as a pipeline for good, or there are no others."""
        if network is None or self.params.pipeline is not None:
            return None
        block_kv_bytes = self.params.kv_bytes_per_token * self.params.block_size
        worker_id, host = WorkerId(self.params.worker_id), self.params.host
        return ModelledKvNetwork(worker_id, network.migration, self._memory, block_kv_bytes, host)

    def _memory(self) -> ShadowKv:
        assert self.kv is not None, "a pipeline's memory is its stages'"
        return self.kv

    def _open_executor(self, network: ModelledNetwork) -> Executor:
        params = self.params
        if params.pipeline is not None:
            return self._open_pipeline(params.pipeline)
        if params.elastic is None:
            return self._open_device()
        self.groups = ModelledGroupDevice(
            ModelledDeviceParams(
                params.elastic,
                params.cost,
                params.block_size,
                self.draw,
                params.failure,
                params.remap_s,
                params.host_memory(),
                params.host_link_bytes_per_s,
            ),
            network,
            self._take_device,
        )
        return self.groups.executor

    def _take_device(self, kv: ShadowKv) -> ModelledExecutor:
        """Compute with the whole model over this memory."""
        self.kv = kv
        params = self.params
        self.device = StickyExecutor(
            params.cost, kv, host=params.host_memory(), failure=params.failure, overlaps=params.overlaps
        )
        return self.device

    def _open_device(self) -> Executor:
        params, host = self.params, self.params.host_memory()
        num_host_blocks = 0 if host is None else host.num_blocks
        self.kv = ShadowKv(params.num_blocks, params.block_size, self.draw, num_host_blocks=num_host_blocks)
        self.device = StickyExecutor(params.cost, self.kv, host=host, failure=params.failure, overlaps=params.overlaps)
        return self.device

    def _open_pipeline(self, pipeline: Pipeline) -> Executor:
        params = self.params
        stages = modelled_stages(
            PipelineParams(
                cost=params.cost,
                num_layers=pipeline.num_layers,
                ranges=pipeline.ranges,
                num_blocks=params.num_blocks,
                block_size=params.block_size,
                draw=self.draw,
                link=pipeline.link,
                host=params.host_memory(),
            ),
            [params.failure],
        )
        self.pipeline = PipelineExecutor(stages, asyncio.get_running_loop().time)
        return self.pipeline

    @property
    def pipelines(self) -> list[PipelineExecutor]:
        """The pipelines that this worker leads or has led."""
        led = [] if self.groups is None else self.groups.pipelines
        return led if self.pipeline is None else [self.pipeline]

    def _engine_maker(self) -> EngineMaker:
        """Return what makes the live engine or another one, or either with another scheduler."""
        params = self.params
        make: EngineMaker = self._unlimited if find_system(params.system).memory is Memory.UNLIMITED else Engine
        if params.scheduler is None and not params.policy:
            return make
        other = make_scheduler(params.scheduler or find_system(params.system).scheduler, **params.policy)
        return lambda config, _, num_blocks, host, cost: make(config, other, num_blocks, host, cost)

    def _unlimited(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        num_blocks: int,
        _host: HostMemory | None,
        cost: CostEstimate,
    ) -> Engine:
        assert self.kv is not None, "a pipeline's memory is bounded"
        return UnlimitedEngine(config, scheduler, num_blocks, cost, on_grow=self.kv.grow)

    def _fail(self, name: str, error: BaseException) -> None:
        self.failures.append((name, error))
        if self._on_failure is not None:
            self._on_failure(name, error)

    async def start(self) -> None:
        """Join the cluster."""
        self._tasks.start(self.reporter.run(), name=f"{self.params.worker_id}-reporter")
        await self.service.start()

    async def stop(self, *, drain_limit_s: float = 0.0) -> None:
        """Drain for at most this long, then leave."""
        if drain_limit_s:
            async with asyncio.timeout(drain_limit_s + 1):
                await self.service.drain(drain_limit_s)
        await self.service.stop()
        await self._tasks.close()
