"""Workers differ in where their cost model comes from, and in nothing else: all who price anything see one object."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy as np
import pytest

from services.worker.build import ServedModel, build_worker, make_reporter
from services.worker.config import ExecutorKind, WorkerSettings
from services.worker.cost.estimate import CostEstimate
from services.worker.cost.fitting import FIRST_STEPS, CostFitting
from services.worker.engine.engine import Engine
from services.worker.load import check_start, load_executor
from services.worker.modelled.executor import ModelledExecutor
from services.worker.modelled.shadow_kv import ShadowKv, TokenDraw
from services.worker.pipeline.pipeline import PipelineExecutor
from services.worker.scheduling.making_room import KeptRunning
from services.worker.serving.reporter import Reporter
from shared.cost import CostModel, Profile, profile_toml
from shared.ids import Incarnation
from shared.layers import even_split
from shared.systems import find_system
from shared.transport.memory_bus import MemoryBroker
from sim.devices.modelled_pipeline import PipelineParams, modelled_stages
from sim.worker import SimWorker, SimWorkerParams
from tests.support.checkpoints import CheckpointShape, stored_checkpoint
from tests.support.engine_views import host_view
from tests.support.fake_dispatcher import FakeDispatcher, Stream
from tests.support.group_room import elastic_facts
from tests.support.peers import PASSWORD

COST = CostModel(g0_s=0.003, b0_s=1e-5, g1_s=0.002, b1_s=3e-5, d_s=4e-7, a_s=5e-9, era_s=0.0007)
"""Seven numbers of which none is another."""


@dataclass(frozen=True, slots=True)
class Built:
    """A worker that serves."""

    root: object
    """From which everything of it can be reached."""
    cost: CostModel
    engine: Engine
    reporter: Reporter


@asynccontextmanager
async def simulated(system: str, _folder: Path) -> AsyncIterator[Built]:
    params = SimWorkerParams("w0", COST, 64, system=system, elastic=elastic_facts() if system == "kunserve" else None)
    worker = SimWorker(params, MemoryBroker().connect("w0"))
    await worker.start()
    yield Built(worker, COST, worker.service.engine, worker.reporter)
    await worker.stop()


def settings_of(system: str, folder: Path, kind: ExecutorKind) -> WorkerSettings:
    profile = folder / "seven.toml"
    profile.write_text(profile_toml(Profile("seven", "m", "g", 1, COST, "a test", 0.0)), encoding="utf-8")
    return WorkerSettings(
        instance_id="w0",
        nats_user="worker",
        nats_password=PASSWORD,
        model=stored_checkpoint(CheckpointShape())[0],
        system=system,
        executor=kind,
        profile=str(profile),
        memory=2**25,
        host_memory=2**18 if find_system(system).keeps_on_host else None,
        page_bytes=2**16,
        stage_port=0,
    )


@asynccontextmanager
async def live(system: str, folder: Path, kind: ExecutorKind) -> AsyncIterator[Built]:
    settings = settings_of(system, folder, kind)
    loaded = await load_executor(settings, check_start(settings), lambda _done, _what: None)
    if kind is ExecutorKind.TORCH:
        loaded.model.cost.now = COST  # as if its own steps had said so
    bus, failures = MemoryBroker().connect("w0"), list[BaseException]()
    reporter = make_reporter(settings, bus, Incarnation(0))
    worker = build_worker(
        settings,
        bus,
        loaded.executor,
        loaded.model,
        reporter,
        lambda _, error: failures.append(error),
        device=loaded.device,
        network=loaded.network,
    )
    await worker.start()
    cost = loaded.model.cost.now
    assert cost is not None
    yield Built((worker, loaded), cost, worker.engine, reporter)
    await worker.stop()
    assert not failures


WORKERS = {
    "simulated": simulated,
    "modelled": lambda system, folder: live(system, folder, ExecutorKind.MODELLED),
    "torch": lambda system, folder: live(system, folder, ExecutorKind.TORCH),
}


def reached(root: object) -> Iterator[object]:
    """Yield everything of ours that can be reached from an object: by attributes, containers, closures and methods."""
    seen, left = set[int](), [root]
    while left:
        found = left.pop()
        if id(found) in seen or isinstance(found, type):
            continue
        seen.add(id(found))
        yield found
        left += _parts(found)


def _parts(found: Any) -> list[object]:
    if isinstance(found, dict):
        return [*found.keys(), *found.values()]
    if isinstance(found, (list, tuple, set, frozenset)) or type(found).__name__ == "deque":
        return list(found)
    if isinstance(found, MethodType):
        return [found.__self__, found.__func__]
    if isinstance(found, FunctionType):
        return list(found.__closure__ or ())
    if isinstance(found, CellType):
        return [found.cell_contents]
    if not type(found).__module__.startswith(("services.", "sim.", "shared.")):
        return [*getattr(found, "args", ()), found.func] if type(found).__name__ == "partial" else []
    slots = [name for kind in type(found).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*vars(found).values()] if hasattr(found, "__dict__") else [getattr(found, name, None) for name in slots]


@pytest.mark.parametrize("worker", WORKERS)
@pytest.mark.parametrize("system", ["kunserve", "swap", "fcfs-chunked"])
async def test_all_who_price_anything_see_one_model(worker: str, system: str, tmp_path: Path) -> None:
    """Scheduler and swap price by the view, the exchange by its device, the report by the reporter."""
    async with WORKERS[worker](system, tmp_path) as built:
        assert astuple(built.cost) == pytest.approx(astuple(COST), rel=1e-12)
        models = [found for found in reached(built.root) if isinstance(found, CostModel)]
        estimates = [found for found in reached(built.root) if isinstance(found, CostEstimate)]
        assert [id(model) for model in models] == [id(built.cost)], "nobody has another one"
        assert len(estimates) == 1
        assert estimates[0].now is built.cost
        view = built.engine._viewing.view(0.0, built.engine.limits)
        assert view.cost is built.cost
        assert vars(KeptRunning(replace(view, host=host_view()), view.running))["_leaving"]._cost is built.cost
        report = built.reporter.make_report(asyncio.get_running_loop().time())
        assert report.token_s == built.cost.token_s


@pytest.mark.parametrize("worker", WORKERS)
async def test_a_model_that_is_fitted_anew_is_everybodys(worker: str, tmp_path: Path) -> None:
    async with WORKERS[worker]("kunserve", tmp_path) as built:
        (estimate,) = (found for found in reached(built.root) if isinstance(found, CostEstimate))
        estimate.now = newer = replace(COST, b1_s=7e-5)
        assert built.engine._viewing.view(0.0, built.engine.limits).cost is newer
        assert built.reporter.make_report(asyncio.get_running_loop().time()).token_s == newer.token_s
        estimate.now = None
        assert built.engine._viewing.view(0.0, built.engine.limits).cost is None
        assert built.reporter.make_report(asyncio.get_running_loop().time()).token_s == 0


@pytest.mark.parametrize("num_stages", [1, 2])
async def test_a_worker_learns_from_its_own_steps_but_not_from_a_groups(num_stages: int, tmp_path: Path) -> None:
    """A group's steps say what its devices take together, with what goes between them."""
    fast = CostModel(*(value / 10 for value in astuple(COST)))
    settings = settings_of("kunserve", tmp_path, ExecutorKind.MODELLED)
    kv, draw = 64, TokenDraw.of_vocabulary(384, (2,))
    stages = modelled_stages(PipelineParams(fast, 4, even_split(4, num_stages), kv, 16, draw))
    whole = ModelledExecutor(fast, ShadowKv(kv, 16, draw))
    executor = whole if num_stages == 1 else PipelineExecutor(stages, asyncio.get_running_loop().time)
    fitting = CostFitting([])
    model = ServedModel(384, (2,), 512, cost=fitting.estimate, fitting=fitting)
    broker, failures = MemoryBroker(), list[BaseException]()
    bus = broker.connect("w0")
    reporter = make_reporter(settings, bus, Incarnation(0))
    worker = build_worker(settings, bus, executor, model, reporter, lambda _, error: failures.append(error))
    dispatcher = FakeDispatcher(broker.connect("d0"))
    await dispatcher.start()
    await worker.start()
    random = np.random.default_rng(1)
    for _ in range(12):
        prompts = random.integers(1, 60, random.integers(1, 6))
        streams = [await dispatcher.submit("w0", dispatcher.make([9] * int(n), 16, seed=int(n))) for n in prompts]
        async with asyncio.timeout(60):
            await asyncio.gather(*(stream.ended.wait() for stream in streams if isinstance(stream, Stream)))
    async with asyncio.timeout(60):
        while num_stages == 1 and fitting.estimate.now is None:
            await asyncio.sleep(0.01)
    assert worker.engine.totals.num_steps >= FIRST_STEPS
    await worker.stop()
    assert not failures
    if num_stages > 1:
        assert fitting.estimate.now is None
        return
    assert fitting.estimate.now is not None
    for shape in ((2, 60, 0), (5, 200, 0), (30, 0, 465)):
        assert fitting.estimate.now.step_s(*shape) == pytest.approx(fast.step_s(*shape), rel=0.05)
