"""`python -m services.monitor`: hear the workers and write the cluster view until SIGTERM."""

from __future__ import annotations

import asyncio
import sys

from services.monitor.config import MonitorSettings
from services.monitor.service import build_monitor
from shared.config import load
from shared.log import configure, get_logger
from shared.nats_bus import NatsBus
from shared.process import run_service
from shared.subjects import check_token

_log = get_logger()


async def serve(stop: asyncio.Event) -> None:
    """Run one monitor until told to stop.

    Raises:
        StartupError: a setting is wrong, or the broker cannot be reached.
    """
    settings = load(MonitorSettings, "monitor", sys.argv[1:])
    check_token(settings.instance_id)
    configure("monitor", settings.instance_id, settings.log_level, settings.log_format)
    failures: list[BaseException] = []

    def fail(name: str, error: BaseException) -> None:
        _log.error("loop_ended", task=name)
        failures.append(error)
        stop.set()

    bus = await NatsBus.connect(
        settings.nats_url, name=f"sluice-{settings.instance_id}", on_fatal=lambda error: fail("bus", error)
    )
    try:
        monitor = build_monitor(settings, bus, fail)
        await monitor.start()
        _log.info("monitor_ready", cluster=settings.cluster)
        await stop.wait()
        await monitor.stop()
    finally:
        await bus.close()
    if failures:
        raise failures[0]


if __name__ == "__main__":
    run_service("monitor", serve)
