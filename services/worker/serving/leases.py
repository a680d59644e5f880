"""Which dispatchers still want their sequences: one lease per dispatcher process, renewed by whatever it sends.

    heard ──lease_s──► paused: nothing of it is generated, sequences and tokens are kept ──orphan_s──► ended
      ▲                  │
      └──── renewed ◄────┘   minus what the renewal says goes on elsewhere

So a worker that is cut off stops by itself before anybody may have given its sequences to another one for long, and a
dispatcher that died holds no KV for ever. What still counts is decided by attempts, not by clocks: a token of an older
attempt is ignored wherever it arrives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from services.worker.engine.engine import Engine
from services.worker.serving.emitter import Emitter
from shared.ids import DispatcherId, Incarnation
from shared.messages.lease import Renew, Renewed
from shared.process.log import get_logger
from shared.transport.bus import Message
from shared.wire import decode, encode

_log = get_logger()

LOOKS_PER_LEASE = 8
"""How often the clocks are looked at."""


@dataclass(slots=True)
class _Lease:
    dispatcher_id: DispatcherId
    heard_s: float
    is_paused: bool = False


class Leases:
    """Owns the clocks, and who is paused.

    Args:
        engine: whose sequences are paused and ended.
        emitter: knows the channels.
        now: the worker's clock, seconds.
        wake: makes the step loop look at the engine again.
        step_age_s: seconds since the running step began.
        incarnation: of this process.
        lease_s: silence after which a dispatcher's sequences are paused.
        orphan_s: silence after which they end; larger than `lease_s`.
    """

    def __init__(  # noqa: PLR0913  one argument per part that is joined here
        self,
        engine: Engine,
        emitter: Emitter,
        now: Callable[[], float],
        wake: Callable[[], None],
        *,
        step_age_s: Callable[[], float],
        incarnation: Incarnation,
        lease_s: float,
        orphan_s: float,
    ) -> None:
        assert 0 < lease_s < orphan_s, "sequences are paused before they end"
        self.incarnation = incarnation
        self._engine = engine
        self._emitter = emitter
        self._now = now
        self._wake = wake
        self._step_age_s = step_age_s
        self._lease_s = lease_s
        self._orphan_s = orphan_s
        self._leases: dict[int, _Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def hear(self, dispatcher_id: DispatcherId, incarnation: Incarnation) -> int:
        """A dispatcher submits something: return its channel, whose lease begins anew."""
        channel = self._emitter.channel(dispatcher_id, incarnation)
        self._renew(channel, dispatcher_id)
        return channel

    async def renew(self, message: Message) -> bytes:
        """Answer a `Renew` with `Renewed`: end what is no longer wanted, let the rest go on."""
        renew = decode(message.data, Renew)
        for request_id, attempt in renew.drop:
            self._engine.residents.cancel(request_id, attempt)
        channel = self._emitter.find_channel(renew.dispatcher_id, renew.incarnation)
        if channel is not None:
            self._renew(channel, renew.dispatcher_id)
        self._wake()
        return encode(
            Renewed(
                incarnation=self.incarnation,
                counter=0 if channel is None else self._emitter.counter(channel),
                num_sequences=0 if channel is None else len(self._engine.residents.rows_of(channel)),
                step_age_s=max(0.0, self._step_age_s()),
            )
        )

    def _renew(self, channel: int, dispatcher_id: DispatcherId) -> None:
        lease = self._leases.get(channel)
        if lease is None:
            self._leases[channel] = _Lease(dispatcher_id, self._now())
            return
        lease.heard_s = self._now()
        if lease.is_paused:
            lease.is_paused = False
            self._engine.resume(channel)
            _log.info("lease_renewed", dispatcher=dispatcher_id, sequences=len(self._engine.residents.rows_of(channel)))

    async def run(self) -> None:
        """Look at the clocks until cancelled."""
        while True:
            await asyncio.sleep(self._lease_s / LOOKS_PER_LEASE)
            self.review()

    def review(self) -> None:
        """Pause whose lease has run out, end what nobody has wanted for long, forget who has nothing here."""
        now_s = self._now()
        for channel, lease in list(self._leases.items()):
            silent_s = now_s - lease.heard_s
            if silent_s < self._lease_s:
                continue
            rows = self._engine.residents.rows_of(channel)
            if rows and silent_s < self._orphan_s:
                self._pause(channel, lease, len(rows))
            elif rows:
                self._end(channel, lease, rows)
            elif silent_s >= self._orphan_s:
                del self._leases[channel]
                self._emitter.close_channel(channel)

    def _pause(self, channel: int, lease: _Lease, num_rows: int) -> None:
        if not lease.is_paused:
            lease.is_paused = True
            _log.warning("lease_ran_out", dispatcher=lease.dispatcher_id, paused=num_rows, after_s=self._lease_s)
        self._engine.pause(channel)  # again and again: rows in flight come back in between
        self._wake()

    def _end(self, channel: int, lease: _Lease, rows: list[int]) -> None:
        _log.warning("orphans_ended", dispatcher=lease.dispatcher_id, ended=len(rows), after_s=self._orphan_s)
        for row in rows:
            self._engine.residents.cancel(*self._engine.table.sequence(row).key)
        self._engine.pause(channel)  # what is in flight does not go on
        self._wake()

    def describe(self) -> list[dict[str, object]]:
        """Return each lease for operators."""
        now_s = self._now()
        return [
            {
                "dispatcher": lease.dispatcher_id,
                "heard_s_ago": round(now_s - lease.heard_s, 3),
                "paused": lease.is_paused,
                "sequences": len(self._engine.residents.rows_of(channel)),
            }
            for channel, lease in sorted(self._leases.items())
        ]
