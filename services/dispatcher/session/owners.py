"""Which worker runs a resumable request, for the dispatcher that is asked for it next if this one dies.

A record is a hint: the worker decides by attempts. So nothing here is waited for on the way of a token, and a record
that could not be written, or is too old, costs a second computation of the same text and nothing else.
"""

from __future__ import annotations

import asyncio

from shared.errors import WireError
from shared.ids import RequestId
from shared.messages.owner import Owner
from shared.process.log import get_logger
from shared.subjects import OWNER_KEEP_S, Subjects
from shared.transport.bus import Bus, BusError, KeyValue
from shared.wire import decode_json, encode_json

_log = get_logger()


class Owners:
    """Reads and writes the records. Bus errors end here.

    Args:
        bus: connected.
        subjects: of the cluster.
    """

    def __init__(self, bus: Bus, subjects: Subjects) -> None:
        self._bus = bus
        self._bucket = subjects.owners_bucket()
        self._opened: KeyValue | None = None

    async def find(self, request_id: RequestId, limit_s: float) -> Owner | None:
        """Return where the request runs, or None if nobody knows, or says so in this time."""
        try:
            async with asyncio.timeout(limit_s):
                entry = await (await self._records()).get(request_id)
            return None if entry is None or entry.value is None else decode_json(entry.value, Owner)
        except (BusError, WireError, TimeoutError) as error:
            _log.warning("owner_not_read", rid=request_id, error=str(error) or f"no answer within {limit_s:.2g} s")
            return None

    async def note(self, request_id: RequestId, owner: Owner) -> None:
        """Say where the request runs."""
        try:
            await (await self._records()).put(request_id, encode_json(owner))
        except BusError as error:
            _log.warning("owner_not_written", rid=request_id, error=str(error))

    async def forget(self, request_id: RequestId) -> None:
        """Say that the request has ended."""
        try:
            await (await self._records()).delete(request_id)
        except BusError as error:
            _log.warning("owner_not_deleted", rid=request_id, error=str(error))

    async def _records(self) -> KeyValue:
        if self._opened is None:
            self._opened = await self._bus.key_value(self._bucket, max_age_s=OWNER_KEEP_S)
        return self._opened
