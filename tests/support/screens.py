"""A terminal's screen as a person sees it, made of what a program writes: as much of it as `sluice top` uses."""

from __future__ import annotations

import fcntl
import re
import struct
import termios
from typing import Final

_PART: Final = re.compile(r"\x1b\[(\??)([\d;]*)([A-Za-z])|([^\x1b])")


def set_size(fd: int, width: int, height: int) -> None:
    """Make a pseudo-terminal so large; who runs in it is told."""
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))


class ScreenImage:
    """What stands on a screen, and the modes that were set.

    Args:
        width: in cells; each character takes one.
        height: in lines.
    """

    def __init__(self, width: int = 80, height: int = 24) -> None:
        self.width, self.height = width, height
        self.modes: dict[str, bool] = {}
        """Of the terminal, by their numbers."""
        self.num_too_far = 0
        """Characters that were written beyond the last cell of a line, or below the last line."""
        self._rest = ""
        self._row = self._column = 0
        self._clear()

    def _clear(self) -> None:
        self._cells = [[" "] * self.width for _ in range(self.height)]

    def resize(self, width: int, height: int) -> None:
        """Have another size, and nothing on it."""
        self.width, self.height = width, height
        self._clear()

    def feed(self, text: str) -> None:
        """Take what was written; a sequence that has not come whole waits for its rest."""
        text = self._rest + text
        end = 0
        for part in _PART.finditer(text):
            if part.start() != end:
                break
            end = part.end()
            if part[4]:
                self._put(part[4])
            else:
                self._control(part[1], part[2], part[3])
        self._rest = text[end:]

    def _put(self, char: str) -> None:
        if char == "\r":
            self._column = 0
        elif char == "\n":
            self._row += 1
        elif self._row < self.height and self._column < self.width:
            self._cells[self._row][self._column] = char
            self._column += 1
        else:
            self.num_too_far += 1

    def _control(self, private: str, numbers: str, what: str) -> None:
        values = [int(number or 1) for number in numbers.split(";")]
        if private:
            self.modes[numbers] = what == "h"
        elif what == "H":
            self._row, self._column = values[0] - 1, values[-1] - 1 if len(values) > 1 else 0
        elif what == "K":
            self._cells[self._row][self._column :] = [" "] * (self.width - self._column)
        elif what == "J" and numbers == "2":
            self._clear()
        elif what == "J":
            for row in range(self._row, self.height):
                self._cells[row] = [" "] * self.width

    @property
    def lines(self) -> list[str]:
        """Each line without the blanks at its end."""
        return ["".join(row).rstrip() for row in self._cells]

    @property
    def text(self) -> str:
        """All lines."""
        return "\n".join(self.lines)
