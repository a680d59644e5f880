"""Ctrl-C and SIGTERM: the first asks for an orderly end, a second Ctrl-C ends at once."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from cli.exit_codes import KILLED

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Handles the signals of the running loop until closed.

    Args:
        on_second: called at a second Ctrl-C; must end the process.
    """

    def __init__(self, on_second: Callable[[], None]) -> None:
        self.stop = asyncio.Event()
        self._on_second = on_second
        self._loop = asyncio.get_running_loop()
        # under nohup the cluster outlives its terminal, as asked
        self._handled = [n for n in STOP_SIGNALS if n is not signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
        for number in self._handled:
            self._loop.add_signal_handler(number, self._on_signal, number)

    def close(self) -> None:
        """Leave the signals as they were."""
        for number in self._handled:
            self._loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self.stop.is_set() and number is signal.SIGINT:
            self._on_second()
        self.stop.set()


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Have Ctrl-C end this process and its children wherever it is: what is broken off in the middle would complain."""
    before = signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(*_: object) -> NoReturn:
    for child in multiprocessing.active_children():
        child.kill()
    os.write(2, b"\n")  # below the live line
    os._exit(KILLED)
