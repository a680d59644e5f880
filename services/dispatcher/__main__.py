"""`python -m services.dispatcher`: read the model's texts, join the cluster, serve HTTP until SIGTERM."""

from __future__ import annotations

import asyncio
import ipaddress

from services.dispatcher.build import Dispatcher, load_text
from services.dispatcher.config import DispatcherSettings
from services.dispatcher.http.doorway import raise_file_limit
from shared.log import get_logger
from shared.service_process import ServiceProcess, run_service_process

_log = get_logger()


async def serve(settings: DispatcherSettings, process: ServiceProcess) -> None:
    """Run one dispatcher until told to stop; then drain it."""
    raise_file_limit(settings.max_connections)
    text = await asyncio.to_thread(load_text, settings)
    async with process.bus() as bus:
        dispatcher = Dispatcher(settings, bus, text, process.fail)
        try:
            port = await dispatcher.start()
            if not _is_local(settings.host):
                _log.warning("no_keys", host=settings.host, meaning="whoever reaches this address can use the model")
            _log.info("dispatcher_ready", url=f"http://{settings.host}:{port}", model=settings.model_name())
            await process.wait_stop()
            if process.failure is None:
                await dispatcher.drain()
        finally:
            await dispatcher.stop()


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


if __name__ == "__main__":
    run_service_process("dispatcher", DispatcherSettings, serve)
