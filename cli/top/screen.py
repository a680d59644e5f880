"""The terminal while `sluice top` has it: its other screen, single keys, and lines that are written if they change."""

from __future__ import annotations

import os
import re
import signal
import termios
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self

from cli.top.text import Line, width_of

_ENTER: Final = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
"""The other screen, no cursor, no wrapping, blank."""
_LEAVE: Final = "\x1b[?7h\x1b[?25h\x1b[?1049l"
_ESCAPES: Final = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|O.|.)?")
"""What keys send that are no letters."""
_MAX_KEYS: Final = 1024
FALLBACK: Final = (80, 24)


class Screen:
    """Has the terminal from `with` to its end; then the terminal is as it was.

    Args:
        out_fd: a terminal.
        in_fd: a terminal whose keys are read; None: nobody presses any.
        style: makes a text bold, red and so on.
    """

    def __init__(self, out_fd: int, in_fd: int | None, style: Callable[[str, str], str]) -> None:
        self._out_fd = out_fd
        self._in_fd = in_fd
        self._style = style
        self._before: list[Any] | None = None
        self._shown: list[str] = []
        self._size = (0, 0)

    def __enter__(self) -> Self:
        if self._in_fd is not None:
            self._before = termios.tcgetattr(self._in_fd)
            modes = termios.tcgetattr(self._in_fd)
            modes[0] &= ~termios.IXON  # Ctrl-S would hold up every frame
            modes[3] &= ~(termios.ICANON | termios.ECHO)
            termios.tcsetattr(self._in_fd, termios.TCSADRAIN, modes)
        self._write(_ENTER)
        self._shown = []
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # the terminal may be gone
            self._write(_LEAVE)
        if self._in_fd is not None and self._before is not None:
            with suppress(termios.error):
                termios.tcsetattr(self._in_fd, termios.TCSADRAIN, self._before)

    def suspend(self) -> None:
        """Give the terminal back and stop, as Ctrl-Z does; have it again once this process goes on."""
        self.__exit__(None, None, None)
        os.kill(os.getpid(), signal.SIGSTOP)
        self.__enter__()

    @property
    def has_keys(self) -> bool:
        """Whether somebody can press some."""
        return self._in_fd is not None

    @property
    def size(self) -> tuple[int, int]:
        """Cells and lines that it has now."""
        with suppress(OSError):
            width, height = os.get_terminal_size(self._out_fd)
            if width and height:
                return width, height
        return FALLBACK

    def draw(self, lines: Sequence[Line]) -> None:
        """Show these lines from the top, and nothing below; only those are written that have changed.

        Raises:
            OSError: the terminal is gone.
        """
        size, texts = self.size, [self._painted(line) for line in lines]
        parts = [] if size == self._size else ["\x1b[2J"]
        shown = self._shown if size == self._size else []
        for row, text in enumerate(texts):
            if row >= len(shown) or shown[row] != text:
                parts.append(f"\x1b[{row + 1};1H{text}{self._rest(lines[row], size[0])}")
        if len(texts) < len(shown):
            parts.append(f"\x1b[{len(texts) + 1};1H\x1b[J")
        if parts:
            self._write("".join(parts))
        self._shown, self._size = texts, size

    def _painted(self, line: Line) -> str:
        return "".join(self._style(span.text, span.style) if span.style else span.text for span in line)

    @staticmethod
    def _rest(line: Line, width: int) -> str:
        """Return what clears the rest of a line; behind its last cell it would clear that one."""
        return "\x1b[K" if sum(width_of(span.text) for span in line) < width else ""

    def keys(self) -> str | None:
        """Return the letters that were pressed; None: the terminal is gone."""
        assert self._in_fd is not None, "there are no keys"
        try:
            data = os.read(self._in_fd, _MAX_KEYS)
        except OSError:
            return None
        return _ESCAPES.sub("", data.decode(errors="replace")) if data else None

    def _write(self, text: str) -> None:
        data = text.encode(errors="replace")
        while data:
            data = data[os.write(self._out_fd, data) :]
