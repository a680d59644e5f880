"""The way between one connection and the broker in memory: it can be cut in either direction; both ends notice late.

    up ──cut, or the client stands still──► sick: what should pass is lost ──NOTICE_S──► down: the broker has forgotten
    ▲                                        │                                            the connection, the client
    │◄───────────────healed──────────────────┘                                            knows that it is broken
    └────────────────────────────RECONNECT_S after it was healed───────────────────────────┘

A client that stands still loses nothing before it is forgotten: what arrives waits for it, as in a socket's buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

NOTICE_S = 3.0
"""Silence after which client and broker give a connection up: pings every second, two may be open."""
RECONNECT_S = 0.2
"""Pause before a client tries again."""


class Link:
    """State of one connection's way; read by the bus, changed by whoever plans faults.

    Args:
        after: calls an action after a delay in seconds, as the router does.
    """

    def __init__(self, after: Callable[[float, Callable[[], None]], None]) -> None:
        self.carries_out = True
        """What the client sends arrives at the broker."""
        self.carries_in = True
        """What the broker sends arrives at the client."""
        self.is_up = True
        """Both ends hold the connection; while False the broker knows no subscription of it."""
        self._after = after
        self._is_still = False
        self._change = 0
        self._on_mend: dict[Callable[[], None], None] = {}

    @property
    def receives(self) -> bool:
        """Whether a message from the broker arrives now."""
        return self.is_up and self.carries_in

    def cut(self, *, out: bool = True, into: bool = True) -> None:
        """Lose everything in these directions from now on."""
        self.carries_out = self.carries_out and not out
        self.carries_in = self.carries_in and not into
        self._review()

    def heal(self) -> None:
        """Carry everything again. What was lost stays lost, but watches see the newest values."""
        self.carries_out = self.carries_in = True
        self._review()

    def stand_still(self, *, still: bool) -> None:
        """The client's process is stopped, or goes on."""
        self._is_still = still
        self._review()

    def drop(self) -> None:
        """The connection broke and both ends know it; it is made again after `RECONNECT_S` if nothing prevents it."""
        self.is_up = False
        self._review()

    def on_mend(self, action: Callable[[], None]) -> None:
        """Call the action each time that the link carries everything again."""
        self._on_mend[action] = None

    def forget(self, action: Callable[[], None]) -> None:
        """Call it no more. Idempotent."""
        self._on_mend.pop(action, None)

    def _review(self) -> None:
        self._change += 1
        if not (self.carries_out and self.carries_in and not self._is_still):
            if self.is_up:
                self._after(NOTICE_S, partial(self._give_up, self._change))
        elif self.is_up:
            self._mended()
        else:
            self._after(RECONNECT_S, partial(self._reconnect, self._change))

    def _give_up(self, change: int) -> None:
        if change == self._change:
            self.is_up = False

    def _reconnect(self, change: int) -> None:
        if change == self._change:
            self.is_up = True
            self._mended()

    def _mended(self) -> None:
        for action in list(self._on_mend):
            action()
