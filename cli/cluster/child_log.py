"""One child's output: everything to its file, trouble to the person, the last lines kept for the moment it fails."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from shared.reading import parse_json

MAX_LINE_BYTES = 64 * 1024
MAX_FILE_BYTES = 16 * 1024**2
"""A file that is full is kept once as `<name>.log.old`."""
MAX_TAIL_LINES = 40
_TROUBLE: Final[tuple[str, ...]] = ("warning", "error", "critical")
_FAILURES: Final[tuple[str, ...]] = ("error", "critical")
_HEAD = ("ts", "level", "service", "instance", "event", "exception")


class ChildLog:
    """Takes the bytes of one child.

    Args:
        name: of the child.
        path: of its file.
        show: takes one line for the person.
    """

    def __init__(self, name: str, path: Path, show: Callable[[str], None]) -> None:
        self._name = name
        self._path = path
        self._show = show
        self._file = path.open("ab", buffering=0)
        self._rest = b""
        self._shown = _TROUBLE
        self.tail: deque[str] = deque(maxlen=MAX_TAIL_LINES)

    def show_failures_only(self) -> None:
        """From now on warnings are for the file."""
        self._shown = _FAILURES

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        self._write(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[-MAX_LINE_BYTES:]
        for line in lines:
            self._take(line)

    def close(self) -> None:
        """Take the last line if it has no end, and close the file."""
        if self._rest:
            self._take(self._rest)
            self._rest = b""
        self._file.close()

    def refusal(self) -> str:
        """Return the line with which the child refused to start."""
        for line in reversed(self.tail):
            if line.startswith("sluice: "):
                return line
        return f"sluice: {self._name} refused to start{self._last_words()}"

    def last_words(self) -> str:
        """Return the last thing it said, as one short line; empty if it said nothing."""
        for line in reversed(self.tail):
            record = _parse(line)
            if record is None:
                return _short(line)
            if record.get("level") in _TROUBLE:
                exception = str(record.get("exception") or "").strip().splitlines()
                return _short(exception[-1] if exception else str(record.get("event", "")))
        return ""

    def _last_words(self) -> str:
        words = self.last_words()
        return f": {words}" if words else ""

    def _write(self, data: bytes) -> None:
        try:
            if self._file.tell() + len(data) > MAX_FILE_BYTES:
                self._file.close()
                self._path.replace(self._path.with_name(self._path.name + ".old"))
                self._file = self._path.open("ab", buffering=0)
            self._file.write(data)
        except OSError:  # a full disk must not stop the cluster; the person still sees warnings
            return

    def _take(self, line: bytes) -> None:
        text = line[:MAX_LINE_BYTES].decode(errors="replace").rstrip()
        if not text:
            return
        self.tail.append(text)
        record = _parse(text)
        if record is not None and record.get("level") in self._shown:
            self._show(f"{self._name}: {record['level']}: {_describe(record)}")


def _parse(text: str) -> dict[str, Any] | None:
    if not text.startswith("{"):
        return None
    try:
        record = parse_json(text, allow_inf_nan=True)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _describe(record: dict[str, Any]) -> str:
    fields = [f"{key}={value}" for key, value in record.items() if key not in _HEAD]
    exception = str(record.get("exception") or "").strip().splitlines()
    return _short(" ".join([str(record.get("event", "")), *fields, *exception[-1:]]))


def _short(text: str, max_chars: int = 300) -> str:
    text = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"
