"""`sluice ps` and `sluice down`: the clusters that run here, and their end."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime

from cli.cluster.broker import BrokerAccess
from cli.cluster.drain_count import DrainCount
from cli.console import Console, table
from cli.exit_codes import FAILED, CommandError
from cli.http import ask
from cli.run_file import Run, find_run, find_runs
from shared.errors import SluiceError
from shared.process.log import only_from

_HEAD = ("ID", "CLUSTER", "URL", "MODEL", "WORKERS", "STATE", "SINCE", "PID")
ANSWER_LIMIT_S = 2.0
LOOK_S = 0.1


async def run_ps(*, as_json: bool) -> str:
    """Return what to print: a row for each cluster, or one line of JSON."""
    runs = await asyncio.to_thread(find_runs)
    states = await asyncio.gather(*map(_state, runs))
    if as_json:
        return json.dumps([asdict(run) | {"state": state} for run, state in zip(runs, states, strict=True)])
    if not runs:
        return "no cluster runs here; start one with `sluice up`"
    rows = [_HEAD, *(_row(run, state) for run, state in zip(runs, states, strict=True))]
    return table(rows)


async def run_down(name: str | None, console: Console, *, is_all: bool, limit_s: float) -> int:
    """Have clusters finish what runs and end; return how many have.

    Args:
        name: of one; None: the only one.
        console: where the person looks.
        is_all: all there are.
        limit_s: seconds that each may take.

    Raises:
        CommandError: there is none that is meant, or several, or one takes longer.
    """
    if is_all:
        runs: Sequence[Run] = find_runs()
    else:
        run = find_run(name)
        runs = () if run is None else (run,)
    if not runs:
        console.line("no cluster runs here")
    for run in runs:
        await _end(run, console, limit_s)
    return len(runs)


async def _end(run: Run, console: Console, limit_s: float) -> None:
    process = run.signal(signal.SIGTERM)
    at_once = f"`kill -INT {run.pid}` ends it at once"
    counting = asyncio.ensure_future(_count(run, DrainCount(console, run.drain_limit_s, at_once)))
    try:
        console.line(f"asked {run.id} ({run.url}) to finish running answers and end")
        began_s = asyncio.get_running_loop().time()
        while not select.select([process], [], [], 0)[0]:
            if asyncio.get_running_loop().time() - began_s > limit_s:
                hint = f"Wait, or end it at once with `kill -INT {run.pid}`"
                raise CommandError(f"{run.id} has not ended within {limit_s:g} s", hint, FAILED)
            await asyncio.sleep(LOOK_S)
        console.end_status()
        console.line(f"{run.id} has ended")
    finally:
        counting.cancel()
        await asyncio.gather(counting, return_exceptions=True)
        console.end_status()
        os.close(process)


async def _count(run: Run, count: DrainCount) -> None:
    """Tell how many answers are waited for, until cancelled."""
    with suppress(SluiceError, OSError), only_from("error"):  # its broker ends
        async with BrokerAccess(run.nats_url).connect("down") as bus:
            await count.follow(bus, run.cluster)


async def _state(run: Run) -> str:
    try:
        answer = await ask(f"{run.url}/ready", limit_s=ANSWER_LIMIT_S)
    except CommandError:
        return "no answer"
    return "ready" if answer.status == 200 else "not ready"


def _row(run: Run, state: str) -> tuple[str, ...]:
    since = datetime.fromtimestamp(run.since_s).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    return run.id, run.cluster, run.url, run.model, str(run.workers), state, since, str(run.pid)
