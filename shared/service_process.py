"""What every `__main__` shares: settings, log, the connection to the broker, and the failure that ends a process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import NoReturn, TypeVar

from shared.config import ServiceSettings, load
from shared.log import configure, get_logger
from shared.nats_bus import NatsBus
from shared.process import run_service

S = TypeVar("S", bound=ServiceSettings)


class ServiceProcess:
    """One running process: it ends when it is told to, or when something in it has failed.

    Args:
        settings: of the service.
        stop: set when the process is to end.
    """

    def __init__(self, settings: ServiceSettings, stop: asyncio.Event) -> None:
        self._settings = settings
        self._stop = stop
        self.failure: BaseException | None = None
        """The first thing that failed; None while all is well."""

    async def wait_stop(self) -> None:
        """Return when the process is to end."""
        await self._stop.wait()

    def fail(self, name: str, error: BaseException) -> None:
        """End the process because of this error (the `on_failure` of everything in it)."""
        get_logger().error("failed", part=name, error=repr(error))
        self.failure = self.failure or error
        self._stop.set()

    @asynccontextmanager
    async def bus(self) -> AsyncIterator[NatsBus]:
        """Connect to the broker, and disconnect at the end.

        Raises:
            StartupError: the broker cannot be reached.
            BaseException: what `fail` was told, once all is closed.
        """
        bus = await NatsBus.connect(
            self._settings.nats_url,
            name=f"sluice-{self._settings.instance_id}",
            on_fatal=lambda error: self.fail("bus", error),
        )
        try:
            yield bus
        finally:
            await bus.close()
        if self.failure is not None:
            raise self.failure


def run_service_process(
    name: str,
    model: type[S],
    main: Callable[[S, ServiceProcess], Awaitable[None]],
    argv: Sequence[str] | None = None,
) -> NoReturn:
    """Read the settings of section `name`, run `main` until SIGTERM or a failure, and exit (`shared.process`)."""

    async def serve(stop: asyncio.Event) -> None:
        settings = load(model, name, argv)
        configure(name, settings.instance_id, settings.log_level, settings.log_format)
        await main(settings, ServiceProcess(settings, stop))

    run_service(name, serve)
