"""`python -m services.worker`: load the model, join the cluster, serve until SIGTERM."""

from __future__ import annotations

import asyncio
import sys

from services.worker.build import build_worker, make_reporter
from services.worker.config import WorkerSettings
from services.worker.load import Loaded, check_start, load_executor
from services.worker.models.spec import ModelSpec
from services.worker.reporter import Reporter
from shared.bus import Bus
from shared.config import load
from shared.log import configure, get_logger
from shared.nats_bus import NatsBus
from shared.process import run_service
from shared.subjects import check_token
from shared.tasks import TaskOwner

_log = get_logger()


class Worker:
    """The process: its settings, its bus, and the failure that ends it."""

    def __init__(self, settings: WorkerSettings, stop: asyncio.Event) -> None:
        self._settings = settings
        self._stop = stop
        self._failure: BaseException | None = None

    def _fail(self, name: str, error: BaseException) -> None:
        del name  # the task's owner has logged it
        self._failure = self._failure or error
        self._stop.set()

    async def run(self) -> None:
        """Serve until told to stop, then drain."""
        spec = check_start(self._settings)
        bus = await NatsBus.connect(
            self._settings.nats_url,
            name=f"sluice-{self._settings.instance_id}",
            on_fatal=lambda error: self._fail("bus", error),
        )
        reporter = make_reporter(self._settings, bus)
        reporting = TaskOwner(self._fail)
        reporting.start(reporter.run(), name="reporter")
        try:
            loaded = await self._load(spec, reporter)
            if loaded is not None:
                await self._serve(bus, reporter, loaded)
        finally:
            await reporting.close()
            await bus.close()
        if self._failure is not None:
            raise self._failure

    async def _load(self, spec: ModelSpec, reporter: Reporter) -> Loaded | None:
        """Return what was loaded, or None if the process is told to stop first."""
        loading = asyncio.ensure_future(load_executor(self._settings, spec, reporter.progress))
        stopping = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait([loading, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if loading.done():
            return loading.result()
        loading.cancel()
        await reporter.leave()
        return None

    async def _serve(self, bus: Bus, reporter: Reporter, loaded: Loaded) -> None:
        worker = build_worker(self._settings, bus, loaded.executor, loaded.model, reporter, self._fail)
        await worker.start()
        _log.info("worker_ready", model=self._settings.model_name(), num_blocks=loaded.executor.capacity.num_blocks)
        await self._stop.wait()
        if self._failure is None:
            await worker.drain(self._settings.drain_limit_s)
        await worker.stop()


def main() -> None:
    """Read the settings and run."""

    async def serve(stop: asyncio.Event) -> None:
        settings = load(WorkerSettings, "worker", sys.argv[1:])
        check_token(settings.instance_id)
        configure("worker", settings.instance_id, settings.log_level, settings.log_format)
        await Worker(settings, stop).run()

    run_service("worker", serve)


if __name__ == "__main__":
    main()
