"""The keys of a dispatcher: read at the start, read again when their file changes, and looked up for each request.

    the file is      while the dispatcher runs    when it starts
    good             its keys hold                its keys hold; a copy of it is kept, if there is a place for one
    wrong, or gone   those before hold on         those of the copy; no copy: it refuses to start; no place for one:
                                                  nobody is let in until the file is good

Where a file is named it never serves without keys.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from services.dispatcher.access.grants import Grant, grant_without_keys
from services.dispatcher.access.key_ring import KeyRing
from services.dispatcher.access.keys_file import read_keys, single_key
from services.dispatcher.access.throttle import WrongKeyThrottle
from shared.errors import ConfigError
from shared.process.log import get_logger

_log = get_logger()

RELOAD_PERIOD_S: Final = 2.0
"""How often the file is looked at."""
_NOBODY: Final = "nobody is let in until the file is good"


class Denial(StrEnum):
    """Why a request may not even be looked at."""

    NO_KEY = "no_key"
    WRONG_KEY = "wrong_key"
    TOO_MANY_WRONG_KEYS = "too_many_wrong_keys"
    KEYS_UNKNOWN = "keys_unknown"


@dataclass(frozen=True, slots=True)
class Denied:
    """A request that brings no key that is known, or comes while none is known."""

    reason: Denial
    wait_s: float = 0.0
    """Seconds for which its sender should not try again; 0 unless there were too many."""


class Access:
    """Knows who may come in; the only writer of the keys.

    Args:
        api_key: one key; "" for none.
        keys_file: see `keys_file`; None for none. Without both, everybody may come in.
        now: the event loop's clock.
        kept: where a copy of the last good file is kept; None: nowhere.

    Raises:
        ConfigError: the file cannot be used, and there is a place for a copy but none in it: this is the first start.
    """

    def __init__(
        self, api_key: str, keys_file: Path | None, now: Callable[[], float], kept: Path | None = None
    ) -> None:
        self._single = single_key(api_key)
        self._path = keys_file
        self._kept = kept
        self._now = now
        self._throttle = WrongKeyThrottle()
        self._stamp: tuple[int, int, int] | None = None
        self._problem = ""
        self._ring = KeyRing(self._single) if keys_file is None else self._first_ring(keys_file)
        self.asks_for_keys = bool(api_key) or keys_file is not None
        """Whether a request needs a key."""

    @property
    def knows_keys(self) -> bool:
        """Whether it is known whom to let in; if not, nobody is."""
        return self._ring is not None

    def authenticate(self, authorization: str, address: str) -> Grant | Denied:
        """Return what the sender of a request may do.

        Args:
            authorization: the header; "" if there is none.
            address: of the other end of the connection.
        """
        if not self.asks_for_keys:
            return grant_without_keys(authorization)
        if self._ring is None:
            return Denied(Denial.KEYS_UNKNOWN, RELOAD_PERIOD_S)
        scheme, _, key = authorization.partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            return Denied(Denial.NO_KEY)
        found = self._ring.find(key)
        if found is not None:
            return found
        wait_s = self._throttle.note(address, self._now())
        return Denied(Denial.TOO_MANY_WRONG_KEYS, wait_s) if wait_s else Denied(Denial.WRONG_KEY)

    async def reload_forever(self) -> None:
        """Follow the file until cancelled; without one there is nothing to follow."""
        while self._path is not None:
            await asyncio.sleep(RELOAD_PERIOD_S)
            await self.reload()

    async def reload(self) -> bool:
        """Read the file again if it has changed, or was wrong, and return whether its keys hold now.

        One that is wrong changes nothing. What runs with a key that is gone runs on; the next request with it is
        refused.
        """
        assert self._path is not None, "there is a file"
        stamp = await asyncio.to_thread(_stamp, self._path)
        if stamp is not None and stamp == self._stamp:
            return False
        try:
            grants = await asyncio.to_thread(read_keys, self._path, self._kept)
        except ConfigError as error:
            self._note_problem(error, "the keys before hold on" if self._ring is not None else _NOBODY)
            return False
        self._stamp, self._problem = stamp, ""
        self._ring = KeyRing(self._single | grants)
        _log.info("keys_reloaded", num_keys=len(self._ring))
        return True

    def _first_ring(self, path: Path) -> KeyRing | None:
        """Return the keys to begin with, None if they are not known.

        Raises:
            ConfigError: as the class.
        """
        stamp = _stamp(path)
        try:
            ring = KeyRing(self._single | read_keys(path, self._kept))
        except ConfigError as error:
            if self._kept is None:
                self._note_problem(error, _NOBODY)
                return None
            try:
                kept = read_keys(self._kept)
            except ConfigError:
                raise error from None
            self._note_problem(error, "the keys before the restart hold on")
            return KeyRing(self._single | kept)
        self._stamp = stamp
        return ring

    def _note_problem(self, error: ConfigError, meaning: str) -> None:
        """Tell of it once; the file is read again until it is good, also if only its rights were wrong."""
        self._stamp = None
        if error.message != self._problem:
            _log.error("keys_not_read", problem=error.message, meaning=meaning)
        self._problem = error.message


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when the file does; None if it is not there."""
    try:
        status = os.stat(path)  # noqa: PTH116  follows links: secrets are mounted as such
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
