"""What the person sees: lines on stderr, and on a terminal one live line at the bottom. Answers go to stdout."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

_CLEAR = "\r\x1b[K"
_STYLES = {
    "bold": "1",
    "dim": "2",
    "reverse": "7",
    "marked": "1;7",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "cyan": "36",
}


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as lines, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows)
    return "\n".join("  ".join(each).rstrip() for each in cells)


class Console:
    """Writes for people; knows whether somebody watches.

    Args:
        stream: stderr, unless a test says otherwise.
        env: where `NO_COLOR` and `TERM` are looked up.
    """

    def __init__(self, stream: TextIO | None = None, env: Mapping[str, str] | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        env = os.environ if env is None else env
        self.is_terminal = self._stream.isatty() and env.get("TERM") != "dumb"
        self._has_color = self.is_terminal and not env.get("NO_COLOR")
        self._live = ""

    def style(self, text: str, style: str) -> str:
        """Return the text in bold, dim, reverse or a colour, where colours are wanted."""
        return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if self._has_color else text

    def line(self, text: str = "") -> None:
        """Write one line above the live one."""
        self._write(f"{_CLEAR if self._live else ''}{text}\n{self._live}")

    def show_status(self, text: str) -> None:
        """Show this as the live line, cut to the terminal's width; nothing happens without a terminal."""
        if not self.is_terminal:
            return
        width = shutil.get_terminal_size().columns - 1
        text = text[:width]
        if text != self._live:
            self._live = text
            self._write(f"{_CLEAR}{text}")

    def end_status(self) -> None:
        """Take the live line away."""
        if self._live:
            self._live = ""
            self._write(_CLEAR)

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # nobody listens any more; the cluster goes on
            self._live = ""
