"""What every command that puts a load on a server does: its session, its progress, its end by Ctrl-C."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

from cli.bench.best_effort import ClosedLoop
from cli.bench.load import BenchLoad
from cli.console import Console
from cli.exit_codes import KILLED
from cli.signals import StopSignals
from shared.errors import StartupError
from shared.process.tasks import ends_before

PROGRESS_PERIOD_S = 0.25
CONNECT_LIMIT_S = 30


@asynccontextmanager
async def load_session(timeout_s: float, api_key: str) -> AsyncIterator[aiohttp.ClientSession]:
    """Give a session for any number of requests at a time, each of which may take `timeout_s`."""
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_LIMIT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, headers=headers, connector=connector) as session:
        yield session


async def run_shown(load: BenchLoad, console: Console, best_effort: ClosedLoop | None = None) -> None:
    """Return when every request of the load has ended; meanwhile a terminal shows how far it is.

    Args:
        load: not begun.
        console: where the person looks.
        best_effort: goes on beside the load until that has ended.
    """
    beside = [asyncio.create_task(_show(load, console, best_effort), name="progress")]
    if best_effort is not None:
        beside.append(asyncio.create_task(best_effort.run(), name="best-effort"))
    try:
        await load.run()
    finally:
        for task in beside:
            task.cancel()
        for task in beside:
            with suppress(asyncio.CancelledError):
                await task
        console.end_status()


async def until_stopped(work: Coroutine[Any, Any, None]) -> bool:
    """Return whether the work came to its end before Ctrl-C, which cancels it; a second Ctrl-C ends the process."""
    signals = StopSignals(lambda: os._exit(KILLED))
    try:
        return await ends_before(signals.stop, work)
    finally:
        signals.close()


def check_folder(json_file: str) -> None:
    """Refuse a file that cannot be written before the load, not after it.

    Raises:
        StartupError: its folder does not exist.
    """
    folder = Path(json_file).absolute().parent
    if json_file and not folder.is_dir():
        raise StartupError(f"there is no folder {folder}", "Name another file with --json")


async def _show(load: BenchLoad, console: Console, best_effort: ClosedLoop | None) -> None:
    while console.is_terminal:  # a pipe gets no progress, and the load no work beside it
        console.show_status("; ".join(each.describe() for each in (load, best_effort) if each is not None))
        await asyncio.sleep(PROGRESS_PERIOD_S)
