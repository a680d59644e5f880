"""The keys of a dispatcher: read at the start, read again when their file changes, and looked up for each request."""

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


class Denial(StrEnum):
    """Why a request may not even be looked at."""

    NO_KEY = "no_key"
    WRONG_KEY = "wrong_key"
    TOO_MANY_WRONG_KEYS = "too_many_wrong_keys"


@dataclass(frozen=True, slots=True)
class Denied:
    """A request that brings no key that is known."""

    reason: Denial
    wait_s: float = 0.0
    """Seconds for which its sender should not try again; 0 unless there were too many."""


class Access:
    """Knows who may come in; the only writer of the keys.

    Args:
        api_key: one key; "" for none.
        keys_file: see `keys_file`; None for none. Without both, everybody may come in.
        now: the event loop's clock.

    Raises:
        ConfigError: the file cannot be used.
    """

    def __init__(self, api_key: str, keys_file: Path | None, now: Callable[[], float]) -> None:
        self._single = single_key(api_key)
        self._path = keys_file
        self._now = now
        self._throttle = WrongKeyThrottle()
        self._stamp = None if keys_file is None else _stamp(keys_file)
        self._ring = KeyRing(self._single | (read_keys(keys_file) if keys_file is not None else {}))
        self.asks_for_keys = bool(api_key) or keys_file is not None
        """Whether a request needs a key."""

    def authenticate(self, authorization: str, address: str) -> Grant | Denied:
        """Return what the sender of a request may do.

        Args:
            authorization: the header; "" if there is none.
            address: of the other end of the connection.
        """
        if not self.asks_for_keys:
            return grant_without_keys(authorization)
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
        """Read the file again if it has changed and return whether it did; one that is wrong changes nothing.

        What runs with a key that is gone runs on; the next request with it is refused.
        """
        assert self._path is not None, "there is a file"
        stamp = await asyncio.to_thread(_stamp, self._path)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            grants = await asyncio.to_thread(read_keys, self._path)
        except ConfigError as error:
            _log.error("keys_not_reloaded", problem=error.message, meaning="the keys before hold on")
            return False
        self._ring = KeyRing(self._single | grants)
        _log.info("keys_reloaded", num_keys=len(self._ring))
        return True


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when the file does; None if it is not there."""
    try:
        status = os.stat(path)  # noqa: PTH116  follows links: secrets are mounted as such
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
