"""`python -m services.planner`: take the next epoch, and decide by period until SIGTERM."""

from __future__ import annotations

import asyncio
import sys

from services.planner.config import PlannerSettings
from services.planner.service import build_planner
from shared.config import load
from shared.log import configure, get_logger
from shared.nats_bus import NatsBus
from shared.process import run_service
from shared.subjects import check_token

_log = get_logger()


async def serve(stop: asyncio.Event) -> None:
    """Run one planner until told to stop.

    Raises:
        StartupError: a setting is wrong, or the broker cannot be reached.
    """
    settings = load(PlannerSettings, "planner", sys.argv[1:])
    check_token(settings.instance_id)
    configure("planner", settings.instance_id, settings.log_level, settings.log_format)
    failures: list[BaseException] = []

    def fail(name: str, error: BaseException) -> None:
        _log.error("loop_ended", task=name)
        failures.append(error)
        stop.set()

    bus = await NatsBus.connect(
        settings.nats_url, name=f"sluice-{settings.instance_id}", on_fatal=lambda error: fail("bus", error)
    )
    try:
        planner = build_planner(settings, bus, on_failure=fail)
        await planner.start()
        _log.info("planner_ready", cluster=settings.cluster)
        await stop.wait()
        await planner.stop()
    finally:
        await bus.close()
    if failures:
        raise failures[0]


if __name__ == "__main__":
    run_service("planner", serve)
