"""`sluice chaos`: what is done to a process, and what the person is told about it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

from cli.chaos.targets import BROKER, Target, current_pid, find_broker, find_service
from cli.cluster.broker import named_broker
from cli.cluster.settings import UpSettings
from cli.console import Console
from cli.exit_codes import FAILED, REFUSED, CommandError
from cli.processes import is_running
from shared.transport.bus import Bus
from shared.transport.nats_server import accepts_connections

LOOK_S: Final = 0.1


async def kill(settings: UpSettings, name: str, console: Console) -> None:
    """End the process at once, with SIGKILL.

    Raises:
        CommandError: it cannot be found, or is not ours to kill.
    """
    async with _found(settings, name) as (target, _):
        _signal(target, signal.SIGKILL)
    console.line(f"killed {name} (process {target.pid}) with SIGKILL")
    console.line("to undo: `sluice up` starts it again by itself; otherwise start it as it was started before")


async def hang(settings: UpSettings, name: str, duration_s: float, console: Console) -> None:
    """Let the process stand still for a time, with SIGSTOP and SIGCONT; it goes on also if this is interrupted.

    Raises:
        CommandError: it cannot be found, or is not ours to stop.
    """
    async with _found(settings, name) as (target, _):
        pass  # while the bus closes, an interruption must still find it going
    try:
        _signal(target, signal.SIGSTOP)
        console.line(f"{name} (process {target.pid}) stands still for {duration_s:g} s (SIGSTOP)")
        console.line(f"to undo: kill -CONT {target.pid}; Ctrl-C here does it too")
        await asyncio.sleep(duration_s)
    finally:
        _signal(target, signal.SIGCONT)
    console.line(f"{name} goes on" if is_running(target.pid) else f"{name} has ended meanwhile")


async def restart(settings: UpSettings, name: str, limit_s: float, console: Console) -> None:
    """Ask the process to finish and end, with SIGTERM; return when another has taken its place.

    Args:
        settings: where the cluster is.
        name: of the process.
        limit_s: seconds that it may take to end, and its successor to be back.
        console: where the person looks.

    Raises:
        CommandError: it cannot be found, or does not end, or nobody starts it again.
    """
    async with _found(settings, name) as (target, bus):
        _signal(target, signal.SIGTERM)
        console.line(f"asked {name} (process {target.pid}) to finish what runs and end (SIGTERM)")
        if not await _until(lambda: _is_gone(target), limit_s):
            hint = f"Wait, or end it with `sluice chaos kill {name}`"
            raise CommandError(f"{name} has not ended within {limit_s:g} s", hint, FAILED)
        console.line(f"{name} has ended; waiting for its successor")
        if not await _until(lambda: _is_back(settings, target, bus), limit_s):
            hint = "Only `sluice up` and container engines do that: start it as it was started before"
            raise CommandError(f"nobody has started {name} again within {limit_s:g} s", hint, FAILED)
    console.line(f"{name} is back")


@asynccontextmanager
async def _found(settings: UpSettings, name: str) -> AsyncIterator[tuple[Target, Bus | None]]:
    """Give the process, and the bus on which it was found (the broker is found without)."""
    if name == BROKER:
        yield await asyncio.to_thread(find_broker, settings.nats_url), None
        return
    async with named_broker(settings).connect("chaos") as bus:
        yield await find_service(bus, settings.cluster, name), bus


def _signal(target: Target, number: signal.Signals) -> None:
    try:
        os.kill(target.pid, number)
    except ProcessLookupError:
        if number != signal.SIGCONT:  # it may have been killed while it stood still
            raise CommandError(f"{target.name} (process {target.pid}) has just ended", "", FAILED) from None
    except PermissionError:
        hint = "Run this as that user"
        raise CommandError(f"process {target.pid} belongs to another user", hint, REFUSED) from None


async def _is_gone(target: Target) -> bool:
    return not is_running(target.pid)


async def _is_back(settings: UpSettings, target: Target, bus: Bus | None) -> bool:
    if bus is None:
        return await asyncio.to_thread(accepts_connections, settings.nats_url)
    return await current_pid(bus, settings.cluster, target.name) not in (None, target.pid)


async def _until(condition: Callable[[], Awaitable[bool]], limit_s: float) -> bool:
    """Return whether the condition came true within the limit."""
    try:
        async with asyncio.timeout(limit_s):
            while not await condition():
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        return False
    return True
