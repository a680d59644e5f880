"""`python -m services.dispatcher`: read the model's texts, join the cluster, serve HTTP until SIGTERM."""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Final

from services.dispatcher.access.access import Access
from services.dispatcher.build import Dispatcher, ModelText, load_text
from services.dispatcher.config import DispatcherSettings
from shared.addresses import BY_FLAGS, check_reachable, host_and_port, is_own_address
from shared.browsers import check_everybody
from shared.process.log import get_logger
from shared.process.service_process import ServiceProcess, run_service_process

_BY_VARIABLES: Final = (
    "Give it keys with SLUICE_API_KEYS_FILE, publish it at 127.0.0.1 with SLUICE_ADDRESS, or accept it with "
    "SLUICE_ALLOW_NO_KEY=true"
)
"""What to do where compose publishes the API: the variables of docker-compose.yml."""
_log = get_logger()


def check(settings: DispatcherSettings) -> None:
    """Find what is wrong before anything starts.

    Raises:
        StartupError: as `prepare`, or the file of keys cannot be used, nor a copy of it.
    """
    Access(settings.api_key, settings.api_keys_file, time.monotonic, settings.api_keys_kept)
    prepare(settings)


def prepare(settings: DispatcherSettings) -> ModelText:
    """Return the model's texts, which takes seconds.

    Raises:
        StartupError: the settings contradict each other, or tokenizer or template cannot be used.
    """
    check_reachable(
        settings.reached_at,
        has_keys=settings.has_keys,
        allow_no_key=settings.allow_no_key,
        next_step=BY_FLAGS if settings.published_host is None else _BY_VARIABLES,
    )
    check_everybody(settings.allow_origin, has_keys=settings.has_keys)
    return load_text(settings)


async def serve(settings: DispatcherSettings, process: ServiceProcess) -> None:
    """Run one dispatcher until told to stop; then drain it."""
    text = await asyncio.to_thread(prepare, settings)
    async with process.bus() as bus:
        dispatcher = Dispatcher(settings, bus, text, process.fail)
        gc.collect()
        gc.freeze()  # what stays is not looked through again and again, while every thread stands still
        try:
            if await process.begin(_start(dispatcher, settings)):
                await process.wait_stop()
                if process.failure is None:
                    await dispatcher.drain()
        finally:
            await dispatcher.stop()


async def _start(dispatcher: Dispatcher, settings: DispatcherSettings) -> None:
    port = await dispatcher.start()
    if not settings.has_keys:
        _say_no_keys(settings.reached_at)
    _log.info("dispatcher_ready", url=f"http://{host_and_port(settings.host, port)}", model=settings.model_name())


def _say_no_keys(host: str) -> None:
    if is_own_address(host):
        _log.info("no_keys", host=host, meaning="everybody on this machine can use the model, nobody else")
    else:
        _log.warning("no_keys", host=host, meaning="whoever reaches this address can use the model")


if __name__ == "__main__":
    run_service_process("dispatcher", DispatcherSettings, serve, check)
