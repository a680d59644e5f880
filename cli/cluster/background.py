"""`sluice up -d`: the same in a process of its own, which the terminal does not end.

sluice up -d ── starts ──► sluice up --in-background        what it says comes here until the cluster is ready;
     │ ◄── a line of JSON, once it is ready ──┘             from then on to `up.log`, beside the other logs
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from cli.cluster.children import CODE_ROOT
from cli.cluster.settings import flags_to_argv
from cli.console import Console
from cli.logs import UP
from cli.signals import StopSignals
from shared.reading import parse_json

LAST_LINES_S: Final = 0.2
"""For what was said before it was ready; the guardian has its end of the pipe for good."""


async def run_in_background(flags: Mapping[str, Any], console: Console, *, as_json: bool) -> int:
    """Start it, and return the exit code once it is ready, or has refused; Ctrl-C until then ends it.

    Args:
        flags: of `sluice up`; a key goes by environment, where nobody else sees it.
        console: where the person looks.
        as_json: write its line of JSON to stdout, and nothing else there.
    """
    path = os.pathsep.join(filter(None, [str(CODE_ROOT), os.environ.get("PYTHONPATH")]))
    key = {"SLUICE_API_KEY": flags["api_key"]} if flags["api_key"] else {}
    argv = flags_to_argv({name: value for name, value in flags.items() if name != "api_key"})
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "cli.main", "up", "--in-background", *argv),
        env={**os.environ, **key, "PYTHONPATH": path},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    signals = StopSignals(lambda: os.killpg(process.pid, signal.SIGINT))
    stopping = asyncio.ensure_future(_end_on(signals.stop, process))
    try:
        relaying = asyncio.ensure_future(_relay(process.stderr, console))
        ready = await process.stdout.read()  # ends as soon as it writes to its log
        await asyncio.wait([relaying], timeout=LAST_LINES_S if ready else None)
        relaying.cancel()
        if not ready:
            return await process.wait()
    finally:
        stopping.cancel()
        signals.close()
    if as_json:
        sys.stdout.write(ready.decode())
    else:
        found = parse_json(ready)
        console.line(console.style("ready", "green"))
        console.line(f"{found['url']}/v1, in the background: `sluice chat`, `sluice status`, `sluice logs -f`")
        console.line("`sluice down` stops it")
    return 0


def leave(log_dir: Path) -> None:
    """From now on write to a log what this process says, so that whoever started it need not wait any longer."""
    log = os.open(log_dir / f"{UP}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)


async def _relay(stream: asyncio.StreamReader, console: Console) -> None:
    async for line in stream:
        console.line(line.decode(errors="replace").rstrip())


async def _end_on(stop: asyncio.Event, process: asyncio.subprocess.Process) -> None:
    await stop.wait()
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
