"""`python -m services.planner`: take the next epoch, and decide by period until SIGTERM."""

from __future__ import annotations

from contextlib import AsyncExitStack

from services.planner.config import PlannerSettings
from services.planner.service import Planner
from shared.process.log import get_logger
from shared.process.metrics_server import serve_metrics
from shared.process.service_process import ServiceProcess, run_service_process


async def serve(settings: PlannerSettings, process: ServiceProcess) -> None:
    """Run one planner until told to stop."""
    async with process.bus() as bus, AsyncExitStack() as running:
        planner = Planner(settings, bus, on_failure=process.fail)
        if settings.metrics_port:
            await running.enter_async_context(
                serve_metrics(
                    settings.metrics_host,
                    settings.metrics_port,
                    planner.render_metrics,
                    names=settings.metrics_allow_host,
                )
            )
        if await process.begin(planner.start()):
            get_logger().info("planner_ready", cluster=settings.cluster)
            await process.wait_stop()
        await planner.stop()


if __name__ == "__main__":
    run_service_process("planner", PlannerSettings, serve)
