"""`sluice pull` and `ls`: a model from the Hugging Face hub onto this machine, and those that are here."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path

from cli.cluster.progress import bar
from cli.console import Console, table
from cli.hub import HubUnreachableError, Progress, fetch, find_cached, list_cached, parse_source
from cli.model import SHIPPED_NAME, shipped_folder
from shared.errors import StartupError
from shared.sizes import describe_bytes

LINE_PERIOD_S = 10.0
"""Without a terminal, a line is written this often at most."""


def show_progress(console: Console, what: str, now: Callable[[], float] = time.monotonic) -> Progress:
    """Return what shows how much of something is done: a live line on a terminal, else a line now and then."""
    began_s = now()
    said_s = began_s - LINE_PERIOD_S

    def show(num_bytes: int, total: int) -> None:
        nonlocal said_s
        if not total:
            return
        elapsed_s = max(now() - began_s, 1e-3)
        rate = num_bytes / elapsed_s
        left = f", {(total - num_bytes) / rate:.0f} s left" if rate and num_bytes < total else ""
        share = f"{num_bytes / total:4.0%} of {total / 1e6:.1f} MB at {rate / 1e6:.1f} MB/s{left}"
        if console.is_terminal:
            console.show_status(f"{what} {bar(num_bytes / total)} {share}")
        elif now() - said_s >= LINE_PERIOD_S or num_bytes == total:
            said_s = now()
            console.line(f"{what} {share}")

    return show


def run_ls(*, as_json: bool) -> str:
    """Return what to print: the model that ships, and those in the hub's cache."""
    cached = list_cached()
    if as_json:
        shipped = {"name": SHIPPED_NAME, "commit": "", "num_bytes": _shipped_bytes(), "used_s": None}
        return json.dumps([shipped, *map(asdict, cached)])
    rows = [("MODEL", "COMMIT", "SIZE", "USED"), (SHIPPED_NAME, "ships with it", describe_bytes(_shipped_bytes()), "")]
    for each in cached:
        used = datetime.fromtimestamp(each.used_s).astimezone().strftime("%Y-%m-%d")
        rows.append((each.name, each.commit[:8], describe_bytes(each.num_bytes), used))
    return table(rows)


def _shipped_bytes() -> int:
    return sum(path.stat().st_size for path in shipped_folder().iterdir() if path.is_file())


def run_pull(model_id: str, revision: str | None, to: str, console: Console) -> Path:
    """Fetch a model and return its folder.

    Raises:
        StartupError: it cannot be had; one line says why.
    """
    source = parse_source(model_id, revision)
    folder = Path(to).expanduser() if to else None
    if folder is not None and folder.exists() and not folder.is_dir():
        raise StartupError(f"{folder} is not a folder", "Name another with --to")
    try:
        return fetch(source, folder, partial(show_progress, console))
    except HubUnreachableError:
        cached = find_cached(source) if folder is None else None
        if cached is None:
            raise
        console.line(f"the hub does not answer; {source} is in its cache on this machine already")
        return cached
    finally:
        console.end_status()
