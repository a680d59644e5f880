"""`python -m services.worker`: load the model, join the cluster, serve until SIGTERM."""

from __future__ import annotations

import asyncio

from services.worker.build import build_worker, make_reporter
from services.worker.config import WorkerSettings, shorten_waits
from services.worker.load import Loaded, check_model, check_start, load_executor
from services.worker.memory.sizes import with_sizes
from services.worker.models.spec import ModelSpec
from services.worker.serving.reporter import Reporter
from shared.ids import new_incarnation
from shared.process.log import get_logger
from shared.process.service_process import ServiceProcess, run_service_process
from shared.process.tasks import TaskOwner
from shared.transport.bus import Bus


async def serve(settings: WorkerSettings, process: ServiceProcess) -> None:
    """Run one worker until told to stop; then drain it."""
    spec = check_start(settings)
    settings = with_sizes(settings)
    async with process.bus() as bus, TaskOwner(process.fail) as tasks:
        reporter = make_reporter(settings, bus, new_incarnation())
        tasks.start(reporter.run(), name="reporter")
        loaded = await _load(settings, process, spec, reporter)
        if loaded is not None:
            await _serve(settings, process, bus, reporter, loaded)


async def _load(
    settings: WorkerSettings, process: ServiceProcess, spec: ModelSpec, reporter: Reporter
) -> Loaded | None:
    """Return what was loaded, or None if the process is told to stop first."""
    loading = asyncio.ensure_future(load_executor(settings, spec, reporter.progress, reporter.incarnation))
    stopping = asyncio.ensure_future(process.wait_stop())
    await asyncio.wait([loading, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if loading.done():
        return loading.result()
    loading.cancel()
    await reporter.leave()
    return None


async def _serve(
    settings: WorkerSettings, process: ServiceProcess, bus: Bus, reporter: Reporter, loaded: Loaded
) -> None:
    worker = build_worker(
        settings,
        bus,
        loaded.executor,
        loaded.model,
        reporter,
        process.fail,
        device=loaded.device,
        network=loaded.network,
        end=process.end,
    )
    await worker.start()
    process.is_ready = True
    get_logger().info("worker_ready", model=settings.model_name(), num_blocks=loaded.executor.capacity.num_blocks)
    await process.wait_stop()
    if process.failure is None:
        await worker.drain(settings.drain_limit_s)
    await worker.stop()


def check(settings: WorkerSettings) -> None:
    """Find what is wrong before any memory is taken.

    Raises:
        StartupError: as `check_start`, `with_sizes` and `check_model`.
    """
    spec = check_start(settings)
    check_model(with_sizes(settings), spec)


def main() -> None:
    """Run a worker as the environment and the command line say."""
    shorten_waits()  # before the settings are checked, which may import torch
    run_service_process("worker", WorkerSettings, serve, check)


if __name__ == "__main__":
    main()
