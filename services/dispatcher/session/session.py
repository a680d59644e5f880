"""One request in the dispatcher: what was asked, every token so far, and where it runs. No text here.

The log (prompt, sampling, tokens) is all that another worker needs to go on: `next_submit` builds a submission from it,
for the first attempt and for any later one. Attempts fence: only tokens of the present one count, whoever sends them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from services.dispatcher.session.gaps import GapHistogram
from services.dispatcher.session.request import FailureCode, NewRequest, Reader
from services.dispatcher.state import Counted
from shared.ids import NOBODY, DispatcherId, Incarnation, RequestId, StreamId, WorkerId
from shared.messages.request import Submit, pack_token_ids
from shared.stream_extras import TokenLogprob
from shared.types import FinishReason
from sluice_client.qoe import QoeState
from sluice_client.qoe import QoeTarget as ReaderTarget

MAX_HELD_PARTS = 1024
"""Parts that arrived early and wait for the ones before them; more are dropped and asked for again."""
MAX_BLAMES = 2
"""Workers that one request may take with it."""
Part = tuple[list[int], FinishReason, Sequence[TokenLogprob]]
"""Some of the output: token ids, how it ends, and log-probabilities: one per token, or none."""


@dataclass(slots=True)
class History:
    """What became of the attempts so far."""

    num_attempts: int = 0
    """The highest number that was ever given to one: none is used twice."""
    worker_id: WorkerId | None = None
    """The last one that accepted it."""
    num_at_start: int = 0
    """Output tokens when the present attempt began."""
    has_started: bool = False
    """Its worker has said that it computes something for the present attempt."""
    is_released: bool = False
    """Its worker has given the present attempt up, before its answer to the submission came."""
    incarnation: Incarnation = NOBODY
    """Process of the worker that accepted the present attempt."""
    num_blames: int = 0
    """Workers in a row that died while they worked on it and before it had a token of them: it may be what kills."""
    on_probation: bool = False
    """It lost its worker before it had a token, so it is placed by itself: if it kills, it is seen."""
    num_recoveries: int = 0
    """How often it went on elsewhere."""
    on_progress: asyncio.Event | None = None
    """Set when the present attempt has given a token, or the session has ended."""


class Session:
    """Owned by `Sessions`; only its methods change it."""

    __slots__ = (
        "_gaps",
        "admitted_s",
        "asked_s",
        "attempt",
        "cached_tokens",
        "counted",
        "ended",
        "failure",
        "finish",
        "first_token_s",
        "held",
        "history",
        "is_placing",
        "is_suspect",
        "last_token_s",
        "logprobs",
        "num_delivered",
        "num_lost_replies",
        "progress_s",
        "qoe",
        "reader",
        "replaying",
        "request",
        "silence_s",
        "started_s",
        "stream",
        "tokens",
        "was_stopped",
        "worker_id",
    )

    def __init__(self, request: NewRequest, stream: StreamId, gaps: GapHistogram) -> None:
        self.request = request
        self.stream = stream
        self.attempt = 0
        """The present one; tokens of any other attempt are ignored."""
        self.history = History(num_attempts=request.num_attempts)
        self.is_placing = False
        """A worker has been asked whether it takes the present attempt, and has not answered."""
        self.worker_id: WorkerId | None = None
        """Where the present attempt runs; None while it runs nowhere."""
        self.started_s: float | None = None
        """When a worker first computed something for it."""
        self.tokens: list[int] = list(request.generated)
        """Every output token, in order, from all attempts."""
        self.num_delivered = 0
        """How many of them the reader has taken."""
        self.logprobs: list[TokenLogprob | None] | None = None
        """One per token, if the request asks for them; None for a token that came without (a replay), or was taken."""
        self.cached_tokens: int | None = None
        """Tokens of the prompt whose KV the worker had already; None until it says so."""
        self.counted: Counted | None = None
        """The last attempt, as it was counted at its worker."""
        self.held: dict[int, Part] = {}
        """Parts that came early, by first index."""
        self.reader: Reader | None = None
        self.finish = FinishReason.NONE
        self.failure: FailureCode | None = None
        self.was_stopped = False
        """The reader wanted no more (a stop string)."""
        self.ended = asyncio.Event()
        self.admitted_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s = request.arrival_s
        self.progress_s = request.arrival_s
        """When its last token came, or the attempt began."""
        self.asked_s = request.arrival_s
        """When its worker was last asked about it."""
        self.silence_s = 0.0
        """Seconds of silence before the next question; doubles with each."""
        self.is_suspect = False
        """A message of its worker was lost; one of its tokens may have been in it."""
        self.num_lost_replies = 0
        self.replaying = False
        self.qoe: QoeState | None = None
        if request.qoe is not None:
            self.qoe = QoeState(ReaderTarget(request.qoe.ttft_s, request.qoe.speed_tokens_per_s))
        if request.sampling.logprobs is not None:
            self.logprobs = [None] * len(self.tokens)
        self._gaps = gaps

    @property
    def is_running(self) -> bool:
        """Whether a worker has accepted it, its answer goes on, and nobody is being asked to take it."""
        return self.admitted_s is not None and not self.is_placing and not self.ended.is_set()

    def next_submit(
        self, dispatcher_id: DispatcherId, incarnation: Incarnation, now_s: float, fork_of: RequestId | None = None
    ) -> Submit:
        """Return the submission of the next attempt, which goes on after the tokens so far; `begin` makes it count.

        Args:
            dispatcher_id: where the tokens go.
            incarnation: of this process.
            now_s: the event loop's clock.
            fork_of: see `Submit.fork_of`.
        """
        self.history.num_attempts += 1
        age_s = max(0.0, now_s - self.request.arrival_s)
        return Submit(
            request_id=self.request.request_id,
            stream=self.stream,
            attempt=self.history.num_attempts,
            dispatcher_id=dispatcher_id,
            incarnation=incarnation,
            prompt=self.request.prompt,
            generated=pack_token_ids(self.tokens),
            sampling=self.request.sampling,
            request_class=self.request.request_class,
            qoe=self.request.qoe,
            age_s=age_s,
            remaining_s=max(0.001, self.request.limit_s - age_s),
            fork_of=fork_of,
            cache_salt=self.request.cache_salt,
        )

    def begin(self, worker_id: WorkerId, attempt: int, now_s: float) -> None:
        """From now on only this attempt at this worker counts."""
        self.worker_id, self.attempt = worker_id, attempt
        self.held.clear()
        self.history.num_at_start = len(self.tokens)
        self.history.has_started = self.history.is_released = False
        self.history.incarnation = NOBODY
        self.num_lost_replies = 0
        self.is_suspect = False
        self.progress_s = self.asked_s = now_s

    def fence(self) -> None:
        """From now on nothing that any worker sends counts: the attempt is given up."""
        self.worker_id = None
        self.attempt = 0
        self.held.clear()
        if self.history.on_progress is not None:
            self.history.on_progress.set()

    @property
    def has_progressed(self) -> bool:
        """Whether the present attempt has given a token."""
        return len(self.tokens) > self.history.num_at_start

    def accept(self, worker_id: WorkerId, now_s: float) -> None:
        """The worker runs it."""
        self.worker_id = self.history.worker_id = worker_id
        if self.admitted_s is None:
            self.admitted_s = now_s
        self.progress_s = now_s

    def start(self, now_s: float) -> None:
        """Its worker computes something for the present attempt; this may be heard before that it was accepted."""
        self.history.has_started = True
        if self.admitted_s is None:
            self.admitted_s = now_s
        if self.started_s is None:
            self.started_s = now_s

    def attach(self, reader: Reader, now_s: float) -> None:
        """Give the reader what has come so far, and everything from now on."""
        assert self.reader is None, "a session has one reader"
        self.reader = reader
        backlog = self.tokens[self.num_delivered :]
        finish = self.finish if self.ended.is_set() else FinishReason.NONE
        if backlog or finish is not FinishReason.NONE:
            self._deliver(backlog, finish, now_s)

    def receive(
        self,
        first_index: int,
        token_ids: list[int],
        finish: FinishReason,
        now_s: float,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> bool:
        """Take a part of the output; what is known already is ignored.

        Args:
            first_index: of its first token in the output.
            token_ids: may be none, if the output ends with this part.
            finish: NONE while the output goes on.
            now_s: the event loop's clock.
            logprobs: one per token, or none.

        Returns:
            False if tokens before this part are missing; it is kept until they come.
        """
        if first_index > len(self.tokens):
            self._hold(first_index, (token_ids, finish, logprobs))
            return False
        self._take(first_index, token_ids, finish, now_s, logprobs)
        return True if not self.held else self._take_held(now_s)

    def _take(
        self,
        first_index: int,
        token_ids: list[int],
        finish: FinishReason,
        now_s: float,
        logprobs: Sequence[TokenLogprob],
    ) -> None:
        """Take a part that begins where the output ends, or before."""
        num_known = len(self.tokens)
        if first_index < num_known:
            if first_index + len(token_ids) < num_known:
                return
            token_ids = token_ids[num_known - first_index :]
        if token_ids:
            self._append(token_ids, now_s)
            if self.logprobs is not None:
                self.logprobs += logprobs[-len(token_ids) :] or [None] * len(token_ids)
        if self.reader is not None and (token_ids or finish):
            self._deliver(token_ids, finish, now_s)
        if finish and not self.ended.is_set():
            self.finish = finish
            self._end()

    def take_logprob(self, index: int) -> TokenLogprob | None:
        """Return what is known of a token's probability, and forget it: nobody asks twice, and it takes memory."""
        assert self.logprobs is not None, "the request did not ask for log-probabilities"
        found, self.logprobs[index] = self.logprobs[index], None
        return found

    def _hold(self, first_index: int, part: Part) -> None:
        """Keep a part that came early; of two with the same beginning, the one that says more."""
        other = self.held.get(first_index)
        if other is None and len(self.held) >= MAX_HELD_PARTS:
            return
        if other is None or _how_much(other) < _how_much(part):
            self.held[first_index] = part

    def _take_held(self, now_s: float) -> bool:
        """Take the parts that have become next; return whether none is left that waits for others."""
        while self.held and not self.ended.is_set():
            next_index = len(self.tokens)
            first_index = next_index if next_index in self.held else min(self.held)
            if first_index > next_index:
                return False
            token_ids, finish, logprobs = self.held.pop(first_index)
            self._take(first_index, token_ids, finish, now_s, logprobs)
        self.held.clear()
        return True

    def _append(self, token_ids: list[int], now_s: float) -> None:
        if self.first_token_s is None:
            self.first_token_s = now_s
        else:
            self._gaps.add(now_s - self.last_token_s)
        if len(token_ids) > 1:
            self._gaps.add(0.0, len(token_ids) - 1)
        self.last_token_s = self.progress_s = now_s
        self.tokens += token_ids
        if self.history.on_progress is not None:
            self.history.on_progress.set()
        if self.qoe is not None:
            self.qoe.deliver(now_s - self.request.arrival_s, len(token_ids))

    def _deliver(self, token_ids: list[int], finish: FinishReason, now_s: float) -> None:
        assert self.reader is not None
        self.num_delivered = len(self.tokens)
        if not self.reader.on_tokens(token_ids, finish, now_s) and not self.ended.is_set():
            self.was_stopped = True
            self.finish = FinishReason.STOP
            self._end()

    def fail(self, code: FailureCode) -> None:
        """End it without (the rest of) an answer, unless it has ended."""
        if not self.ended.is_set():
            self.failure = code
            self._end()

    def _end(self) -> None:
        self.ended.set()
        if self.history.on_progress is not None:
            self.history.on_progress.set()


def _how_much(part: Part) -> tuple[int, FinishReason, int]:
    token_ids, finish, logprobs = part
    return len(token_ids), finish, len(logprobs)
