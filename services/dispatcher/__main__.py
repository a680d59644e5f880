"""`python -m services.dispatcher`: read the model's texts, join the cluster, serve HTTP until SIGTERM."""

from __future__ import annotations

import asyncio
import ipaddress
import sys

from services.dispatcher.build import Dispatcher, load_text
from services.dispatcher.config import DispatcherSettings
from shared.config import load
from shared.log import configure, get_logger
from shared.nats_bus import NatsBus
from shared.process import run_service

_log = get_logger()


class Process:
    """The process: its settings, and the failure that ends it."""

    def __init__(self, settings: DispatcherSettings, stop: asyncio.Event) -> None:
        self._settings = settings
        self._stop = stop
        self._failure: BaseException | None = None

    def _fail(self, name: str, error: BaseException) -> None:
        _log.error("task_died", task=name, error=repr(error))
        self._failure = self._failure or error
        self._stop.set()

    async def run(self) -> None:
        """Serve until told to stop, then drain."""
        settings = self._settings
        text = await asyncio.to_thread(load_text, settings)
        bus = await NatsBus.connect(
            settings.nats_url,
            name=f"sluice-{settings.instance_id}",
            on_fatal=lambda error: self._fail("bus", error),
        )
        try:
            dispatcher = Dispatcher(settings, bus, text, self._fail)
            try:
                port = await dispatcher.start()
                if not _is_local(settings.host):
                    _log.warning(
                        "no_keys", host=settings.host, meaning="whoever reaches this address can use the model"
                    )
                _log.info("dispatcher_ready", url=f"http://{settings.host}:{port}", model=settings.model_name())
                await self._stop.wait()
                if self._failure is None:
                    await dispatcher.drain()
            finally:
                await dispatcher.stop()
        finally:
            await bus.close()
        if self._failure is not None:
            raise self._failure


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def main() -> None:
    """Read the settings and run."""

    async def serve(stop: asyncio.Event) -> None:
        settings = load(DispatcherSettings, "dispatcher", sys.argv[1:])
        configure("dispatcher", settings.instance_id, settings.log_level, settings.log_format)
        await Process(settings, stop).run()

    run_service("dispatcher", serve)


if __name__ == "__main__":
    main()
