"""Which dispatchers still want their sequences: one lease per dispatcher process, which it renews, also by submitting.

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
from dataclasses import dataclass, field

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


@dataclass(eq=False)
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

    engine: Engine
    emitter: Emitter
    now: Callable[[], float]
    wake: Callable[[], None]
    step_age_s: Callable[[], float] = field(kw_only=True)
    incarnation: Incarnation = field(kw_only=True)
    lease_s: float = field(kw_only=True)
    orphan_s: float = field(kw_only=True)
    _leases: dict[int, _Lease] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        assert 0 < self.lease_s < self.orphan_s, "sequences are paused before they end"

    def __len__(self) -> int:
        return len(self._leases)

    def hear(self, dispatcher_id: DispatcherId, incarnation: Incarnation) -> int:
        """A dispatcher submits something: return its channel, whose lease begins anew."""
        channel = self.emitter.channel(dispatcher_id, incarnation)
        self._renew(channel, dispatcher_id)
        return channel

    async def renew(self, message: Message) -> bytes:
        """Answer a `Renew` with `Renewed`: end what is no longer wanted, let the rest go on."""
        renew = decode(message.data, Renew)
        for request_id, attempt in renew.drop:
            self.engine.registry.cancel(request_id, attempt)
        channel = self.emitter.find_channel(renew.dispatcher_id, renew.incarnation)
        if channel is not None:
            self._renew(channel, renew.dispatcher_id)
        self.wake()
        return encode(
            Renewed(
                incarnation=self.incarnation,
                counter=0 if channel is None else self.emitter.counter(channel),
                num_sequences=0 if channel is None else len(self.engine.registry.rows_of(channel)),
                step_age_s=max(0.0, self.step_age_s()),
            )
        )

    def _renew(self, channel: int, dispatcher_id: DispatcherId) -> None:
        lease = self._leases.get(channel)
        if lease is None:
            self._leases[channel] = _Lease(dispatcher_id, self.now())
            return
        lease.heard_s = self.now()
        if lease.is_paused:
            lease.is_paused = False
            self.engine.resume(channel)
            _log.info("lease_renewed", dispatcher=dispatcher_id, sequences=len(self.engine.registry.rows_of(channel)))

    async def run(self) -> None:
        """Look at the clocks until cancelled."""
        while True:
            await asyncio.sleep(self.lease_s / LOOKS_PER_LEASE)
            self.review()

    def review(self) -> None:
        """Pause whose lease has run out, end what nobody has wanted for long, forget who has nothing here."""
        now_s = self.now()
        for channel, lease in list(self._leases.items()):
            silent_s = now_s - lease.heard_s
            if silent_s < self.lease_s:
                continue
            rows = self.engine.registry.rows_of(channel)
            if rows and silent_s < self.orphan_s:
                self._pause(channel, lease, len(rows))
            elif rows:
                self._end(channel, lease, rows)
            elif silent_s >= self.orphan_s:
                del self._leases[channel]
                self.emitter.close_channel(channel)

    def _pause(self, channel: int, lease: _Lease, num_rows: int) -> None:
        if not lease.is_paused:
            lease.is_paused = True
            _log.warning("lease_ran_out", dispatcher=lease.dispatcher_id, paused=num_rows, after_s=self.lease_s)
        self.engine.pause(channel)  # again and again: rows in flight come back in between
        self.wake()

    def _end(self, channel: int, lease: _Lease, rows: list[int]) -> None:
        _log.warning("orphans_ended", dispatcher=lease.dispatcher_id, ended=len(rows), after_s=self.orphan_s)
        for row in rows:
            self.engine.registry.cancel(*self.engine.table.sequence(row).key)
        self.engine.pause(channel)  # what is in flight does not go on
        self.wake()

    def describe(self) -> list[dict[str, object]]:
        """Return each lease for operators."""
        now_s = self.now()
        return [
            {
                "dispatcher": lease.dispatcher_id,
                "heard_s_ago": round(now_s - lease.heard_s, 3),
                "paused": lease.is_paused,
                "sequences": len(self.engine.registry.rows_of(channel)),
            }
            for channel, lease in sorted(self._leases.items())
        ]
