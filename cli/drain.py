"""`sluice drain`: workers give their running requests to others and end, one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

import click

from cli.cluster.broker import named_broker
from cli.cluster.settings import load_bus_settings
from cli.exit_codes import FAILED, UNREACHABLE, CommandError
from shared.ids import WorkerId
from shared.messages.drain import Drain
from shared.messages.report import WorkerPhase, WorkerReport
from shared.subjects import Subjects
from shared.transport.bus import Bus, BusError, Message
from shared.wire import WireError, decode_json, encode_json

LOOK_S: Final = 3.0
"""In which every worker has reported."""
ASK_LIMIT_S: Final = 5.0


Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DrainedWorker:
    """A worker that has ended."""

    worker_id: str
    num_moved: int
    """Sequences that left it with their KV."""
    is_back: bool
    """Its next process has been seen to be ready; for that of the last one nobody waits."""


async def run_drain(workers: Sequence[str], flags: Mapping[str, Any], limit_s: float, say: Say) -> list[DrainedWorker]:
    """Return when all have ended, and each but the last one is back.

    Args:
        workers: their ids.
        flags: where the broker is.
        limit_s: seconds that each may take to end, and to be back.
        say: takes a line for each that has ended, or is back.

    Raises:
        StartupError: there is no broker, or it lets nobody in.
        CommandError: a worker is not there, cannot be asked, or took too long; those after it are left as they are.
    """
    settings, drained = load_bus_settings(flags), list[DrainedWorker]()
    subjects = Subjects(settings.cluster)
    async with named_broker(settings).connect("drain") as bus:
        for number, name in enumerate(workers, start=1):
            is_last = number == len(workers)
            async with aclosing(_reports(bus, subjects, WorkerId(name))) as reports:
                first = await anext(reports)
                num_moved = await _drain(bus, subjects, first, reports, limit_s)
                say(f"{name} has ended; {num_moved} sequences left it with their KV")
                if not is_last:
                    await _until_back(first, reports, limit_s)
                    say(f"{name} is back")
            drained.append(DrainedWorker(name, num_moved, is_back=not is_last))
    return drained


async def _drain(
    bus: Bus, subjects: Subjects, first: WorkerReport, reports: AsyncIterator[WorkerReport], limit_s: float
) -> int:
    """Return how many sequences have left the worker with their KV, once it has ended."""
    name = first.worker_id
    try:
        asked = encode_json(Drain(incarnation=first.incarnation))
        await bus.request(subjects.drain(name), asked, timeout_s=ASK_LIMIT_S)
    except BusError as error:
        hint = f"It is {first.phase}; SIGTERM has the same effect"
        raise CommandError(f"worker '{name}' cannot be asked to drain: {error}", hint, FAILED) from error
    try:
        async with asyncio.timeout(limit_s):
            return await _until_ended(first, reports)
    except TimeoutError:
        hint = "It goes on with it: see `sluice status`, or allow more with --timeout"
        raise CommandError(f"worker '{name}' has not ended within {limit_s:g} s", hint, FAILED) from None


async def _until_back(first: WorkerReport, reports: AsyncIterator[WorkerReport], limit_s: float) -> None:
    try:
        async with asyncio.timeout(limit_s):
            async for report in reports:
                if report.incarnation != first.incarnation and report.phase is WorkerPhase.READY:
                    break
    except TimeoutError:
        hint = "Start it, and drain the others then"
        raise CommandError(f"worker '{first.worker_id}' was not back within {limit_s:g} s", hint, FAILED) from None


async def _until_ended(first: WorkerReport, reports: AsyncIterator[WorkerReport]) -> int:
    num_left, last, is_told = -1, first, False
    async for report in reports:
        if report.is_leaving and not is_told:
            is_told = True
            click.echo(
                f"{first.worker_id} is a stage of the group of {report.group}, which is restored first", err=True
            )
        if report.incarnation != first.incarnation or report.phase is WorkerPhase.STOPPED:
            last = report if report.incarnation == first.incarnation else last
            break
        if report.phase is WorkerPhase.DRAINING and report.num_running != num_left:
            num_left = report.num_running
            click.echo(f"{first.worker_id} drains: {num_left} sequences run there", err=True)
        last = report
    return last.migration.num_left_total - first.migration.num_left_total


async def _reports(bus: Bus, subjects: Subjects, worker_id: WorkerId) -> AsyncGenerator[WorkerReport, None]:
    """Yield what the worker says of itself, from now on.

    Raises:
        CommandError: it says nothing at first.
    """
    heard: asyncio.Queue[WorkerReport] = asyncio.Queue()

    def take(message: Message) -> None:
        try:
            heard.put_nowait(decode_json(message.data, WorkerReport))
        except WireError:  # of another version
            return

    listening = await bus.subscribe(subjects.report(worker_id), take)
    try:
        try:
            yield await asyncio.wait_for(heard.get(), LOOK_S)
        except TimeoutError:
            hint = "`sluice status` shows who is there; name another cluster with --cluster"
            message = f"no worker '{worker_id}' reports in cluster '{subjects.cluster}'"
            raise CommandError(message, hint, UNREACHABLE) from None
        while True:
            yield await heard.get()
    finally:
        await listening.close()
