"""`sluice top`: looks at a cluster again and again, and shows each look until somebody has seen enough.

look ─ interval ─ look ─ …      each at most two questions to the dispatcher
└──────► wake ◄────── key, resize, tick ──► frame (pure) ──► screen
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys

import aiohttp

from cli.console import Console
from cli.exit_codes import DONE, KILLED, CommandError
from cli.http import check_url
from cli.signals import StopSignals
from cli.top.controls import Controls
from cli.top.frame import Seen, render
from cli.top.look import Look, look
from cli.top.screen import FALLBACK, Screen
from cli.top.text import plain

TICK_S = 1.0
"""After so long an old frame is drawn anew: it says how old it is."""
_WHOLE_HEIGHT = 100_000
"""Lines of a frame that goes into a file."""


async def run_top(url: str, api_key: str, interval_s: float) -> int:
    """Show the cluster until somebody quits; where no terminal is, one frame. Return the exit code.

    Raises:
        CommandError: nothing answers there at the beginning, or it is no dispatcher.
    """
    url, console = check_url(url), Console(sys.stdout)
    async with aiohttp.ClientSession() as session:
        first = await look(session, url, api_key)
        if not console.is_terminal:
            width, _ = shutil.get_terminal_size(FALLBACK)
            lines = render(Seen(url, first), Controls(), width, _WHOLE_HEIGHT, has_keys=False)
            sys.stdout.write("".join(f"{plain(line)}\n" for line in lines))
            return DONE
        in_fd = sys.stdin.fileno() if sys.stdin.isatty() else None
        with Screen(sys.stdout.fileno(), in_fd, console.style) as screen:
            top = _Top(session, screen, first, url=url, api_key=api_key, interval_s=interval_s)
            await top.run(in_fd)
    return DONE


class _Top:
    """The loop around the frame.

    Args:
        session: to ask with.
        screen: to draw on.
        first: look.
        url: of the dispatcher.
        api_key: "": none.
        interval_s: from one look to the next.
    """

    def __init__(
        self, session: aiohttp.ClientSession, screen: Screen, first: Look, *, url: str, api_key: str, interval_s: float
    ) -> None:
        self._session = session
        self._screen = screen
        self._url = url
        self._api_key = api_key
        self._interval_s = interval_s
        self._loop = asyncio.get_running_loop()
        self._last, self._looked_s, self._trouble = first, self._loop.time(), ""
        self._controls = Controls()
        self._wake = asyncio.Event()

    async def run(self, in_fd: int | None) -> None:
        """Show frames until `q`, a signal to stop, or the end of the terminal."""
        signals = StopSignals(lambda: sys.exit(KILLED))
        self._loop.add_signal_handler(signal.SIGWINCH, self._wake.set)
        self._loop.add_signal_handler(signal.SIGTSTP, self._suspend)
        if in_fd is not None:
            self._loop.add_reader(in_fd, self._on_keys, signals.stop)
        try:
            async with asyncio.TaskGroup() as tasks:
                others = [tasks.create_task(each) for each in (self._look_forever(), self._draw_forever(signals.stop))]
                await signals.stop.wait()
                for task in others:
                    task.cancel()
        finally:
            if in_fd is not None:
                self._loop.remove_reader(in_fd)
            for number in (signal.SIGWINCH, signal.SIGTSTP):
                self._loop.remove_signal_handler(number)
            signals.close()

    async def _look_forever(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                self._last = await look(self._session, self._url, self._api_key)
                self._looked_s, self._trouble = self._loop.time(), ""
            except CommandError as error:
                self._trouble = error.message
            self._wake.set()

    async def _draw_forever(self, stop: asyncio.Event) -> None:
        while True:
            self._wake.clear()
            age_s = self._loop.time() - self._looked_s
            seen = Seen(self._url, self._last, age_s, self._trouble, self._interval_s)
            try:
                width, height = self._screen.size
                self._screen.draw(render(seen, self._controls, width, height, has_keys=self._screen.has_keys))
            except OSError:  # the terminal is gone
                stop.set()
                return
            try:
                async with asyncio.timeout(TICK_S + self._interval_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def _on_keys(self, stop: asyncio.Event) -> None:
        keys = self._screen.keys()
        if keys is None or "q" in keys.lower():
            stop.set()
            return
        for key in keys:
            self._controls = self._controls.press(key)
        self._wake.set()

    def _suspend(self) -> None:
        self._screen.suspend()
        self._wake.set()
