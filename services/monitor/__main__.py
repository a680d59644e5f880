"""`python -m services.monitor`: hear the workers and write the cluster view until SIGTERM."""

from __future__ import annotations

from services.monitor.config import MonitorSettings
from services.monitor.service import Monitor
from shared.process.log import get_logger
from shared.process.service_process import ServiceProcess, run_service_process


async def serve(settings: MonitorSettings, process: ServiceProcess) -> None:
    """Run one monitor until told to stop."""
    async with process.bus() as bus:
        monitor = Monitor(settings, bus, process.fail)
        if await process.begin(monitor.start()):
            get_logger().info("monitor_ready", cluster=settings.cluster)
            await process.wait_stop()
        await monitor.stop()


if __name__ == "__main__":
    run_service_process("monitor", MonitorSettings, serve)
