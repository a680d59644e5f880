"""`python -m services.planner`: take the next epoch, and decide by period until SIGTERM."""

from __future__ import annotations

from services.planner.config import PlannerSettings
from services.planner.service import build_planner
from shared.log import get_logger
from shared.service_process import ServiceProcess, run_service_process


async def serve(settings: PlannerSettings, process: ServiceProcess) -> None:
    """Run one planner until told to stop."""
    async with process.bus() as bus:
        planner = build_planner(settings, bus, on_failure=process.fail)
        await planner.start()
        get_logger().info("planner_ready", cluster=settings.cluster)
        await process.wait_stop()
        await planner.stop()


if __name__ == "__main__":
    run_service_process("planner", PlannerSettings, serve)
