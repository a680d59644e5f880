"""What every `__main__` shares: settings, log, the connection to the broker, and the failure that ends a process.

The process signs in as its role's user if it is given one (`SLUICE_NATS_USER`, `_PASSWORD`, `_PASSWORD_FILE`), and
listens for answers where only its role may (`shared.transport.nats_roles`).
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

from shared.process.config import ServiceSettings, load
from shared.process.health import write_health
from shared.process.log import configure, get_logger
from shared.process.run import run_service
from shared.process.tasks import TaskOwner, ends_before
from shared.transport.bus import BusError
from shared.transport.bus_rules import is_power_of_two
from shared.transport.nats_bus import NatsBus
from shared.transport.nats_roles import BrokerRole, inbox_prefix

S = TypeVar("S", bound=ServiceSettings)

CHECK_ONLY: Final = "--check-only"
"""Flag of every service: say what is wrong that is known before it starts, and end. No setting: of one call alone."""
HEALTH_PERIOD_S = 1.0
"""Pause between two writings of the health file."""


class ServiceProcess:
    """One running process: it ends when it is told to, or when something in it has failed.

    Args:
        role: of the process.
        settings: of the service.
        stop: set when the process is to end.
    """

    def __init__(self, role: BrokerRole, settings: ServiceSettings, stop: asyncio.Event) -> None:
        self._role = role
        self._settings = settings
        self._stop = stop
        self.failure: BaseException | None = None
        """The first thing that failed; None while all is well."""
        self.is_ready = False
        """Whether the service does what it is there for: what the health file says."""

    async def wait_stop(self) -> None:
        """Return when the process is to end."""
        await self._stop.wait()

    async def begin(self, start: Coroutine[Any, Any, object]) -> bool:
        """Start the service, which may have to wait for others; return False if it is told to end before that."""
        self.is_ready = await ends_before(self._stop, start)
        return self.is_ready

    def end(self) -> None:
        """Have the process end in good order, as SIGTERM does."""
        self._stop.set()

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
        settings = self._settings
        bus = await NatsBus.connect(
            settings.nats_url,
            name=f"sluice-{settings.instance_id}",
            inbox_prefix=inbox_prefix(self._role, settings.instance_id),
            credentials=settings.nats_credentials(),
            on_fatal=lambda error: self.fail("bus", error),
        )
        bus.kv_replicas = settings.nats_replicas
        try:
            async with TaskOwner(self.fail) as tasks:
                if settings.health_file is not None:
                    tasks.start(self._show_health(settings.health_file, bus), name="health")
                yield bus
        except BusError as error:
            if self.failure is None:
                raise
            raise self.failure from error  # what the broker refused is why nobody answered
        finally:
            await bus.close()
        if self.failure is not None:
            raise self.failure

    async def _show_health(self, path: Path, bus: NatsBus) -> None:
        num_failures = 0
        while True:
            try:
                write_health(path, connected=bus.connected, ready=self.is_ready)
            except OSError as error:  # a full disk: who looks at the file sees that it ages
                num_failures += 1
                if is_power_of_two(num_failures):
                    get_logger().warning("health_not_written", path=str(path), error=str(error))
            await asyncio.sleep(HEALTH_PERIOD_S)


def run_service_process(
    name: str,
    model: type[S],
    main: Callable[[S, ServiceProcess], Awaitable[None]],
    check: Callable[[S], object] = lambda _settings: None,
) -> NoReturn:
    """Read the settings of section `name`, run `main` until SIGTERM or a failure, and exit (`process.run`).

    Args:
        name: of the service.
        model: of its settings.
        main: runs the service.
        check: raises `StartupError` for what `main` would refuse as soon as it has started; run instead of it with the
            flag `--check-only`, by which `sluice up` asks before it starts anything.
    """

    async def serve(stop: asyncio.Event) -> None:
        settings = load(model, name, [flag for flag in sys.argv[1:] if flag != CHECK_ONLY])
        configure(name, settings.instance_id, settings.log_level, settings.log_format)
        if CHECK_ONLY in sys.argv[1:]:
            for number in (signal.SIGINT, signal.SIGTERM):  # nothing to end in order; the loop stands until it is done
                asyncio.get_running_loop().remove_signal_handler(number)
                signal.signal(number, signal.SIG_DFL)
            check(settings)
        else:
            await main(settings, ServiceProcess(BrokerRole(name), settings, stop))

    run_service(name, serve)
