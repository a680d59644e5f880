"""`sluice logs`: what the processes of a cluster here have logged."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from operator import itemgetter
from pathlib import Path
from typing import Final, Self

from cli.exit_codes import REFUSED, UNREACHABLE, CommandError
from cli.run_file import find_run, find_runs
from shared.reading import parse_json

LOOK_S: Final = 0.2
"""Between two looks for more."""
UP: Final = "up"
"""The log of `sluice up -d` itself."""


def run_logs(
    names: Sequence[str], cluster: str | None, *, tail: int, follows: bool, as_json: bool = False
) -> Iterator[str]:
    """Yield lines of these processes' logs, of all without a name; where they are several, each says whose it is.

    Args:
        names: of processes, as `worker-0`.
        cluster: its id, name, URL or port; None: the only one.
        tail: so many of the last lines of each.
        follows: go on with what is logged, until the cluster has ended.
        as_json: as objects, with whose it is under `process`; what is no object is its `text`.

    Raises:
        CommandError: there is no such cluster, or no such process.
    """
    run = find_run(cluster)
    if run is None:
        raise CommandError("no cluster runs here", "Start one with `sluice up`", UNREACHABLE)
    there = {path.stem: path for path in sorted(Path(run.log_dir).glob("*.log"))}
    for name in names:
        if name not in there:
            raise CommandError(f"'{name}' has no log", f"There are {', '.join(there)}", REFUSED)
    with ExitStack() as files:
        logs = [files.enter_context(_Log(name, there[name])) for name in names or there]
        width = max((len(log.name) for log in logs), default=0) if len(logs) > 1 else 0
        lines = [each for log in logs for each in log.last(tail)]
        while True:
            is_over = not follows or run.id not in {each.id for each in find_runs()}
            lines += [each for log in logs for each in log.more()] if follows else ()
            for _, name, line in sorted(lines, key=itemgetter(0)):
                yield _as_object(name, line) if as_json else f"{name:<{width}} | {line}" if width else line
            if is_over:
                return
            lines = []
            time.sleep(LOOK_S)


def _as_object(name: str, line: str) -> str:
    try:
        record = parse_json(line)
    except ValueError:
        record = None
    return json.dumps({"process": name, **(record if isinstance(record, dict) else {"text": line})})


_Line = tuple[str, str, str]
"""When, whose, and what it says."""


class _Log:
    """One file, which begins anew when it is full."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self._path = path
        self._file = path.open("rb")
        self._rest = b""
        self._at = ""
        """Of the last line that says when."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._file.close()

    def last(self, count: int) -> list[_Line]:
        """Return the last of those that are there."""
        return list(deque(self.more(), maxlen=count))

    def more(self) -> list[_Line]:
        """Return the whole lines that have come."""
        data = self._rest + self._file.read()
        with suppress(OSError):  # its folder is gone, with the cluster
            if self._path.stat().st_ino != os.fstat(self._file.fileno()).st_ino:
                data += self._file.read()
                self._file.close()
                self._file = self._path.open("rb")
                data += self._file.read()
        *lines, self._rest = data.split(b"\n")
        return [self._line(line.decode(errors="replace")) for line in lines]

    def _line(self, text: str) -> _Line:
        with suppress(ValueError, TypeError, KeyError):
            self._at = str(parse_json(text, allow_inf_nan=True)["ts"])
        return self._at, self.name, text
