"""A worker that speaks the messages over a bus and streams scripted tokens: no engine, no model, no device."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from shared.cluster_views import ViewWriter
from shared.ids import Incarnation, StreamId, WorkerId
from shared.messages.fetch import Fetch, Fetched, FetchOutcome
from shared.messages.lease import Renew, Renewed
from shared.messages.report import ClusterView, Liveness, WorkerPhase, WorkerReport, WorkerStatus
from shared.messages.request import (
    Accepted,
    Cancel,
    Cancelled,
    RefusalReason,
    Refused,
    Replay,
    ReplayUnknown,
    Submit,
)
from shared.process.tasks import TaskOwner
from shared.stream_extras import StreamExtra, TokenLogprob, pack_extras
from shared.subjects import Subjects
from shared.token_batch import TokenBatch, stream_batch
from shared.transport.bus import Bus, Endpoint, Message, ServiceInfo, Subscription
from shared.types import FinishReason
from shared.wire import decode, encode

Script = Callable[[Submit], Sequence[int]]


def played_logprob(index: int, token: int, num_top: int) -> TokenLogprob:
    """Return the log-probabilities that a token gets: exact in float32, another number for each index."""
    own = -(index + 1) / 4
    return TokenLogprob(own, tuple((token + rank, own - rank) for rank in range(num_top)))


@dataclass(slots=True)
class Running:
    """One request that the worker has accepted."""

    submit: Submit
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason = FinishReason.NONE


class FakeWorker:
    """Accepts what `refuse` does not forbid, and streams `script(submit)`, one message per token.

    Args:
        bus: connected.
        worker_id: its name.
        script: the tokens of an answer; None: the test calls `emit` itself.
        step_s: pause between two tokens.
        finish: reason sent with the last token, cut to `length` at `max_tokens`.
        cluster: of the subjects.
    """

    def __init__(
        self,
        bus: Bus,
        worker_id: str = "w0",
        script: Script | None = None,
        *,
        step_s: float = 0.0,
        finish: FinishReason = FinishReason.STOP,
        cluster: str = "default",
    ) -> None:
        self.bus = bus
        self.worker_id = WorkerId(worker_id)
        self.script = script
        self.step_s = step_s
        self.finish = finish
        self.refuse: RefusalReason | None = None
        self.judge: Callable[[Submit], RefusalReason | None] | None = None
        """Asked about each submission, if `refuse` forbids none."""
        self.open_worker: WorkerId | None = None
        """That it names with each refusal."""
        self.num_free_blocks = 0
        """That it says with each refusal."""
        self.cached_tokens: int | None = None
        """Said with the first token of each answer."""
        self.has_logprobs = True
        """False: they are lost, as in a replay of old tokens."""
        self.answers = True
        """False: submissions and renewals get no answer in time."""
        self.deadly: set[str] = set()
        """Requests of which it dies before it has answered."""
        self.death: asyncio.Task[None] | None = None
        self.incarnation = Incarnation(0)
        self.renewals: list[Renew] = []
        self.lose: set[int] = set()
        """Numbers of token messages that are lost on the way."""
        self.submits: list[Submit] = []
        self.cancels: list[Cancel] = []
        self.replays: list[Replay] = []
        self.running: dict[tuple[str, int], Running] = {}
        self.forgotten = False
        """True: replays are answered as by a worker that was restarted."""
        self.num_preemptions = 0
        """That it says of each request which it accepts."""
        self.fetch_outcome = FetchOutcome.REFUSED
        """Of whatever it is to fetch."""
        self.fetches: list[Fetch] = []
        self._subjects = Subjects(cluster)
        self._counter = 0
        self._tasks = TaskOwner()
        self._served: Subscription | None = None
        self._cancelled = asyncio.Event()
        self._stopping = asyncio.Event()

    async def start(self) -> None:
        """Answer from now on."""
        info = ServiceInfo("sluice-worker", "0.1.0", "A worker for tests", {"fake": "yes"}, str(self.worker_id))
        self._served = await self.bus.serve(
            info,
            [
                Endpoint("submit", self._subjects.submit(self.worker_id), self._submit),
                Endpoint("cancel", self._subjects.cancel(self.worker_id), self._cancel),
                Endpoint("replay", self._subjects.replay(self.worker_id), self._replay),
                Endpoint("renew", self._subjects.renew(self.worker_id), self._renew),
                Endpoint("fetch", self._subjects.fetch(self.worker_id), self._fetch),
            ],
        )

    async def stop(self) -> None:
        """Vanish, as a killed process does."""
        self._stopping.set()
        if self._served is not None:
            await self._served.close()
        await self._tasks.close()

    async def _submit(self, message: Message) -> bytes:
        submit = decode(message.data, Submit)
        self.submits.append(submit)
        if submit.request_id in self.deadly:
            self.death = asyncio.ensure_future(self.stop())
            await asyncio.Event().wait()
        if not self.answers:
            await self._stopping.wait()
        refusal = self.refuse or (self.judge(submit) if self.judge is not None else None)
        if refusal is not None:
            refused = Refused(request_id=submit.request_id, reason=refusal, open_worker=self.open_worker)
            return encode(refused.model_copy(update={"num_free_blocks": self.num_free_blocks}))
        running = self.running[submit.request_id, submit.attempt] = Running(submit, submit.generated_ids().tolist())
        if self.script is not None:
            self._tasks.start(self._stream(running), name=f"stream-{submit.request_id}")
        accepted = Accepted(
            request_id=submit.request_id,
            attempt=submit.attempt,
            incarnation=self.incarnation,
            num_preemptions=self.num_preemptions,
        )
        return encode(accepted)

    async def _renew(self, message: Message) -> bytes:
        renew = decode(message.data, Renew)
        self.renewals.append(renew)
        if not self.answers:
            await self._stopping.wait()
        for name in renew.drop:
            self.running.pop(name, None)
        return encode(Renewed(incarnation=self.incarnation, counter=self._counter, num_sequences=len(self.running)))

    async def _fetch(self, message: Message) -> bytes:
        self.fetches.append(decode(message.data, Fetch))
        return encode(Fetched(outcome=self.fetch_outcome))

    async def _stream(self, running: Running) -> None:
        assert self.script is not None
        tokens = list(self.script(running.submit))[: running.submit.sampling.max_tokens]
        last = FinishReason.LENGTH if len(tokens) == running.submit.sampling.max_tokens else self.finish
        tokens = tokens[len(running.tokens) :]
        for index, token in enumerate(tokens):
            await asyncio.sleep(self.step_s)
            if (running.submit.request_id, running.submit.attempt) not in self.running:
                return
            await self.emit(running, [token], last if index == len(tokens) - 1 else FinishReason.NONE)
        if not tokens:
            await self.emit(running, [], last)

    async def emit(
        self,
        running: Running,
        tokens: Sequence[int],
        finish: FinishReason = FinishReason.NONE,
        *,
        first: int | None = None,
        num_preemptions: int = 0,
    ) -> None:
        """Send tokens as one message, as the next ones or from a stated index on."""
        index = len(running.tokens) if first is None else first
        if first is None:
            running.tokens += tokens
            running.finish = finish
        batch = stream_batch(
            self.worker_id,
            counter=self._counter,
            stream=running.submit.stream,
            attempt=running.submit.attempt,
            first_index=index,
            tokens=np.asarray(tokens, dtype=np.uint32),
            finish=finish,
        )
        extras = self._extras(running, index, tokens)
        if num_preemptions:
            extras = pack_extras([StreamExtra(0, num_preemptions=num_preemptions)])
        await self.publish(replace(batch, extras=extras), running.submit.dispatcher_id)

    def _extras(self, running: Running, index: int, tokens: Sequence[int]) -> bytes:
        """Return what goes with the only row of a message."""
        num_top = running.submit.sampling.logprobs
        logprobs: tuple[TokenLogprob, ...] = ()
        if num_top is not None and self.has_logprobs:
            logprobs = tuple(played_logprob(index + i, token, num_top) for i, token in enumerate(tokens))
        cached = self.cached_tokens if index == 0 else None
        return pack_extras([StreamExtra(0, cached, logprobs)]) if logprobs or cached is not None else b""

    async def publish(self, batch: TokenBatch, dispatcher_id: str) -> None:
        """Send a message of the channel, unless it is to be lost."""
        number, self._counter = self._counter, self._counter + 1
        if number not in self.lose:
            await self.bus.publish(f"sluice.{self._subjects.cluster}.dispatcher.{dispatcher_id}.tokens", batch.pack())

    async def _cancel(self, message: Message) -> bytes:
        cancel = decode(message.data, Cancel)
        self.cancels.append(cancel)
        self._cancelled.set()
        found = self.running.pop((cancel.request_id, cancel.attempt), None) is not None
        return encode(Cancelled(request_id=cancel.request_id, found=found))

    async def wait_cancelled(self, limit_s: float = 5.0) -> None:
        """Return when a cancellation has come."""
        async with asyncio.timeout(limit_s):
            await self._cancelled.wait()

    async def _replay(self, message: Message) -> bytes:
        replay = decode(message.data, Replay)
        self.replays.append(replay)
        running = self.running.get((replay.request_id, replay.attempt))
        if running is None or self.forgotten:
            return encode(ReplayUnknown(request_id=replay.request_id, incarnation=self.incarnation))
        return stream_batch(
            self.worker_id,
            counter=0,
            stream=StreamId(0),
            attempt=replay.attempt,
            first_index=replay.first_index,
            tokens=np.asarray(running.tokens[replay.first_index :], dtype=np.uint32),
            finish=running.finish,
        ).pack()


def make_status(
    worker_id: str = "w0", *, liveness: Liveness = Liveness.ALIVE, age_s: float = 0.0, **fields: object
) -> WorkerStatus:
    """Return a ready worker of the view; `fields` replace those of its report."""
    report: dict[str, object] = {
        "worker_id": worker_id,
        "sequence_number": 1,
        "phase": WorkerPhase.READY,
        "model": "tiny",
        "max_model_len": 512,
        "block_size": 16,
        "num_blocks": 1000,
        "max_sequences": 64,
        **fields,
    }
    return WorkerStatus(liveness=liveness, age_s=age_s, report=WorkerReport.model_validate(report))


async def publish_view(bus: Bus, *statuses: WorkerStatus, cluster: str = "default", number: int = 1) -> None:
    """Write a view as the monitor does."""
    subjects = Subjects(cluster)
    writer = ViewWriter(bus, subjects, await bus.key_value(subjects.view_bucket()))
    await writer.publish(ClusterView(sequence_number=number, workers=statuses))
    await writer.store()
