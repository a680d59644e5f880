"""Writes finished log lines to a stream from a thread of its own, so that logging never blocks and never raises."""

from __future__ import annotations

import atexit
import sys
import threading
from collections import deque
from typing import Final, TextIO

MAX_PENDING_LINES: Final = 10_000
"""Lines that wait for a slow reader; beyond it new ones are dropped and counted."""


class LogSink:
    """A bounded queue of lines in front of a stream; None stands for what `sys.stderr` is when a line is written.

    The thread starts with the first line and ends with the process. Lines of a process that is killed may be lost; one
    that exits flushes.
    """

    def __init__(self, stream: TextIO | None, *, max_pending: int = MAX_PENDING_LINES) -> None:
        self._stream = stream
        self._max_pending = max_pending
        self._lines: deque[str] = deque()
        self._changed = threading.Condition()
        self._writing = False
        self._thread: threading.Thread | None = None
        self.num_dropped = 0
        """Lines that found no room since the last report of this number."""

    def write(self, line: str) -> None:
        """Queue the line, without its line end; drop it if the queue is full."""
        with self._changed:
            if len(self._lines) >= self._max_pending:
                self.num_dropped += 1
                return
            self._lines.append(line)
            if self._thread is None:
                self._start()
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything queued has been handed to the stream, at most this long; return whether it was."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._lines and not self._writing, timeout_s)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()
        atexit.register(self.flush, 1.0)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._lines))
                lines = list(self._lines)
                self._lines.clear()
                if self.num_dropped:
                    lines.append(f'{{"level": "warning", "event": "log lines dropped", "count": {self.num_dropped}}}')
                    self.num_dropped = 0
                self._writing = True
            self._write_out("\n".join(lines) + "\n")
            with self._changed:
                self._writing = False
                self._changed.notify_all()

    def _write_out(self, text: str) -> None:
        stream = sys.stderr if self._stream is None else self._stream
        if stream is None:  # a process may have no stderr at all
            return
        try:
            stream.write(text)
            stream.flush()
        except (OSError, ValueError):  # closed, or a pipe without a reader: there is nobody left to tell
            return
