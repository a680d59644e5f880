"""`sluice up -d`: the same in a process of its own, which the terminal does not end.

    sluice up -d ── starts ──► sluice up --in-background
         │ ◄── a line of JSON, once it is ready ──┘

What it says comes to the terminal until the cluster is ready; from then on to `up.log`, beside the other logs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from threading import Thread
from typing import IO, Any, Final

from cli.cluster.children import CODE_ROOT
from cli.cluster.settings import flags_to_argv
from cli.console import Console
from cli.exit_codes import DONE
from cli.logs import UP
from shared.reading import parse_json

LAST_LINES_S: Final = 0.2
"""For what was said before it was ready; the guardian has its end of the pipe for good."""


def run_in_background(flags: Mapping[str, Any], console: Console, *, as_json: bool) -> int:
    """Start it, say where it is, and return the exit code once it is ready, or has refused.

    Args:
        flags: of `sluice up`.
        console: where the person looks.
        as_json: write its line of JSON to stdout, and nothing else there.
    """
    code, started = start_in_background(flags, console)
    if started is None:
        return code
    if as_json:
        sys.stdout.write(json.dumps(started) + "\n")
    else:
        console.line(f"{started['url']}/v1, in the background: `sluice chat`, `sluice status`, `sluice logs -f`")
        console.line("`sluice down` stops it")
    return code


def start_in_background(flags: Mapping[str, Any], console: Console) -> tuple[int, dict[str, Any] | None]:
    """Start it; return the exit code, and what it says once it is ready, or None. Ctrl-C until then ends it.

    Args:
        flags: of `sluice up`; a key goes by environment, where nobody else sees it.
        console: where the person looks.
    """
    path = os.pathsep.join(filter(None, [str(CODE_ROOT), os.environ.get("PYTHONPATH")]))
    key = {"SLUICE_API_KEY": flags["api_key"]} if flags["api_key"] else {}
    argv = flags_to_argv({name: value for name, value in flags.items() if name != "api_key"})
    process = subprocess.Popen(  # noqa: S603  this interpreter and our own code
        [sys.executable, "-P", "-m", "cli.main", "up", "--in-background", *argv],
        env={**os.environ, **key, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    relay = Thread(target=_relay, args=(process.stderr, console), daemon=True)
    relay.start()
    try:
        ready = process.stdout.read()  # ends as soon as it writes to its log
    except KeyboardInterrupt:
        process.terminate()
        return _wait(process), None
    relay.join(LAST_LINES_S if ready else None)
    if not ready:
        return process.wait(), None
    console.line(console.style("ready", "green"))
    return DONE, parse_json(ready)


def leave(log_dir: Path) -> None:
    """From now on write to a log what this process says, so that whoever started it need not wait any longer."""
    log = os.open(log_dir / f"{UP}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Return its exit code at its orderly end; another Ctrl-C ends it at once."""
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        return process.wait()


def _relay(stream: IO[bytes], console: Console) -> None:
    for line in stream:
        console.line(line.decode(errors="replace").rstrip())
