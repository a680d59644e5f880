"""The gate at step boundaries: while somebody holds it, no step is in flight and no copy to host memory or back."""

from __future__ import annotations

from asyncio import Event, Future, get_running_loop
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class GateClosedError(Exception):
    """The step loop has ended; the gate will not be handed over any more."""


class _Turn:
    """One wish for the gate: granted by the step loop, released by its owner."""

    def __init__(self) -> None:
        self.granted: Future[bool] = get_running_loop().create_future()
        """False: it never will be."""
        self.released = Event()


class StepGate:
    """Lets others act between steps. `exclusive` is for them; the rest is for the step loop."""

    def __init__(self) -> None:
        self._turns: deque[_Turn] = deque()
        self._on_wanted: Callable[[], None] | None = None
        self._closed = False

    @property
    def wanted(self) -> bool:
        """Somebody waits for the gate: submit nothing more."""
        return bool(self._turns)

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Wait until nothing is in flight, and keep it so inside the block. First come, first served.

        Raises:
            GateClosedError: the step loop has ended.
        """
        if self._closed:
            raise GateClosedError("the step loop has ended")
        turn = _Turn()
        self._turns.append(turn)
        if self._on_wanted is not None:
            self._on_wanted()
        try:
            if not await turn.granted:
                raise GateClosedError("the step loop has ended")
            yield
        finally:
            if turn in self._turns:  # cancelled before its turn
                self._turns.remove(turn)
            turn.released.set()

    def attach(self, on_wanted: Callable[[], None]) -> None:
        """Name the step loop's wake, called when somebody wants the gate."""
        self._on_wanted = on_wanted

    async def hand_over(self) -> None:
        """Let the next one in and wait until it is out. The caller has nothing in flight."""
        turn = self._turns.popleft()
        if turn.granted.done():  # cancelled in this very moment; its owner will not enter
            return
        turn.granted.set_result(True)
        await turn.released.wait()

    def close(self) -> None:
        """Turn away everybody who waits, and all who come later."""
        self._closed = True
        while self._turns:
            turn = self._turns.popleft()
            if not turn.granted.done():
                turn.granted.set_result(False)
