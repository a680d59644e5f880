"""Says how many answers an end waits for: on a terminal in the live line, else a line when the number changes."""

from __future__ import annotations

import asyncio
from typing import Final

from cli.cluster.dump import ask_dispatcher
from cli.console import Console
from shared.transport.bus import Bus

LOOK_S: Final = 0.2
LINE_S: Final = 1.0
"""Between two lines where there is no live one."""


def describe_left(num_left: int | None, limit_s: float, how_at_once: str) -> str:
    """Return what is waited for.

    Args:
        num_left: answers under way; None: not known.
        limit_s: seconds that they still get at the most.
        how_at_once: what ends it without waiting, in words.
    """
    if num_left == 0:
        return f"stopping: no answer is under way; {how_at_once}"
    answers = "running answers" if num_left is None else "1 answer" if num_left == 1 else f"{num_left} answers"
    return f"stopping: waiting for {answers}, at most {max(limit_s, 0):.0f} s; {how_at_once}"


class DrainCount:
    """Tells of one end, from its beginning on.

    Args:
        console: where the person looks.
        limit_s: seconds that answers get.
        how_at_once: see `describe_left`.
    """

    def __init__(self, console: Console, limit_s: float, how_at_once: str) -> None:
        self._console = console
        self._limit_s = limit_s
        self._how_at_once = how_at_once
        self._began_s = asyncio.get_running_loop().time()
        self._said_s = float("-inf")
        self._has_said = False
        self._num_said: int | None = None
        self.num_left: int | None = None
        """By the last answer of the dispatcher."""

    @property
    def left_s(self) -> float:
        """Seconds that answers still get."""
        return self._limit_s - (asyncio.get_running_loop().time() - self._began_s)

    async def follow(self, bus: Bus, cluster: str) -> None:
        """Ask the dispatcher and tell, until cancelled."""
        while True:
            dump = await ask_dispatcher(bus, cluster)
            if dump is not None:
                self.num_left = dump.num_requests
                self.show()
            await asyncio.sleep(LOOK_S)

    def show(self) -> None:
        """Tell what is known now, unless it has been told."""
        text = describe_left(self.num_left, self.left_s, self._how_at_once)
        now_s = asyncio.get_running_loop().time()
        if self._console.is_terminal:
            self._console.show_status(text)
        elif not self._has_said or (self.num_left != self._num_said and now_s - self._said_s >= LINE_S):
            self._has_said, self._num_said, self._said_s = True, self.num_left, now_s
            self._console.line(text)
