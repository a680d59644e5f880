"""The other end of a worker: submits requests over any bus and puts the token batches together again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from shared.ids import DispatcherId, RequestId, StreamId, WorkerId
from shared.messages.lease import Renew, Renewed
from shared.messages.request import (
    Accepted,
    Cancel,
    Cancelled,
    Refused,
    Replay,
    ReplayUnknown,
    Submit,
    pack_token_ids,
)
from shared.stream_extras import StreamExtra
from shared.subjects import Subjects
from shared.token_batch import TokenBatch
from shared.transport.bus import Bus, Message
from shared.types import FinishReason, ReaderTarget, SamplingParams
from shared.wire import WireError, decode, encode


@dataclass
class Stream:
    """What came back of one request."""

    submit: Submit
    worker_id: WorkerId
    tokens: list[int] = field(default_factory=list)
    extras: list[StreamExtra] = field(default_factory=list)
    finish: FinishReason = FinishReason.NONE
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class FakeDispatcher:
    """Keeps every stream, and fails on a gap, a repetition or a token after the end."""

    def __init__(self, bus: Bus, dispatcher_id: str = "d0", cluster: str = "default") -> None:
        self.bus = bus
        self.subjects = Subjects(cluster)
        self.dispatcher_id = DispatcherId(dispatcher_id)
        self.streams: list[Stream] = []
        self.counters: dict[str, int] = {}
        self.faults: list[str] = []

    async def start(self) -> None:
        await self.bus.subscribe(self.subjects.tokens(self.dispatcher_id), self._on_tokens)

    async def renew(self, worker_id: str, *, drop: tuple[tuple[RequestId, int], ...] = ()) -> Renewed:
        """Say that this dispatcher is there."""
        message = Renew(dispatcher_id=self.dispatcher_id, drop=drop)
        data = await self.bus.request(self.subjects.renew(WorkerId(worker_id)), encode(message), timeout_s=5)
        return decode(data, Renewed)

    async def renew_forever(self, worker_id: str) -> None:
        while True:
            await asyncio.sleep(0.5)
            await self.renew(worker_id)

    def make(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        seed: int = 0,
        request_id: str = "",
        qoe: ReaderTarget | None = None,
        temperature: float = 0.0,
        remaining_s: float = 600.0,
    ) -> Submit:
        number = len(self.streams)
        return Submit(
            request_id=RequestId(request_id or f"{self.dispatcher_id}-{number}"),
            stream=StreamId(number),
            attempt=1,
            dispatcher_id=self.dispatcher_id,
            prompt=pack_token_ids(prompt),
            sampling=SamplingParams(max_tokens=max_tokens, seed=seed, temperature=temperature, ignore_eos=True),
            qoe=qoe,
            remaining_s=remaining_s,
        )

    async def submit(self, worker_id: str, submit: Submit) -> Stream | Refused:
        """Send the request; its stream, or the refusal."""
        stream = Stream(submit, WorkerId(worker_id))
        self.streams.append(stream)
        data = await self.bus.request(self.subjects.submit(WorkerId(worker_id)), encode(submit), timeout_s=5)
        try:
            decode(data, Accepted)
        except WireError:
            self.streams[-1].ended.set()
            return decode(data, Refused)
        return stream

    async def cancel(self, stream: Stream) -> bool:
        message = Cancel(request_id=stream.submit.request_id, attempt=stream.submit.attempt)
        data = await self.bus.request(self.subjects.cancel(stream.worker_id), encode(message), timeout_s=5)
        return decode(data, Cancelled).found

    async def replay(self, stream: Stream, first_index: int) -> TokenBatch | None:
        """Return the tokens from an index on, or None if the worker has forgotten them."""
        message = Replay(request_id=stream.submit.request_id, attempt=stream.submit.attempt, first_index=first_index)
        data = await self.bus.request(self.subjects.replay(stream.worker_id), encode(message), timeout_s=5)
        try:
            return TokenBatch.unpack(data)
        except WireError:
            decode(data, ReplayUnknown)
            return None

    def _on_tokens(self, message: Message) -> None:
        batch = TokenBatch.unpack(message.data)
        expected = self.counters.get(batch.worker_id, 0)
        if batch.counter != expected:
            self.faults.append(f"message {batch.counter} of {batch.worker_id} instead of {expected}")
        self.counters[batch.worker_id] = batch.counter + 1
        offsets = batch.offsets().tolist()
        for extra in batch.stream_extras():
            self.streams[int(batch.stream[extra.row])].extras.append(extra)
        for i in range(len(batch)):
            stream = self.streams[int(batch.stream[i])]
            if int(batch.first_index[i]) != len(stream.tokens) or stream.finish:
                self.faults.append(f"{stream.submit.request_id}: index {batch.first_index[i]} at {len(stream.tokens)}")
            stream.tokens += batch.tokens[offsets[i] : offsets[i + 1]].tolist()
            stream.finish = FinishReason(int(batch.finish[i]))
            if stream.finish:
                stream.ended.set()
