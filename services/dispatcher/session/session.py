"""One request in the dispatcher: what was asked, every token so far, and where it runs. No text here.

The log (prompt, sampling, tokens) is all that another worker needs to go on (`submission.py`). Attempts fence: only
tokens of the present one count, whoever sends them.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from math import isnan

import numpy as np

from services.dispatcher.policy.loads import Counted
from services.dispatcher.session.gaps import GapHistogram
from services.dispatcher.session.history import Attempt, History
from services.dispatcher.session.questions import Questions
from services.dispatcher.session.reading import ReaderProgress
from services.dispatcher.session.request import FailureCode, NewRequest, Reader
from shared.ids import NOBODY, Incarnation, StreamId, WorkerId
from shared.qoe import answer_qoe
from shared.stream_extras import TokenLogprob
from shared.types import FinishReason

MAX_HELD_PARTS = 1024
"""Parts that arrived early and wait for the ones before them; more are dropped and asked for again."""
Part = tuple[list[int], FinishReason, Sequence[TokenLogprob]]
"""Some of the output: token ids, how it ends, and log-probabilities: one per token, or none."""


class Session:
    """Owned by `Sessions`; only its methods, and those of its parts, change it."""

    __slots__ = (
        "__weakref__",
        "_gaps",
        "admitted_s",
        "attempt",
        "cached_tokens",
        "counted",
        "ended",
        "failure",
        "finish",
        "held",
        "history",
        "is_over",
        "is_placing",
        "logprobs",
        "num_delivered",
        "num_served",
        "parent",
        "progress_s",
        "questions",
        "reader",
        "reading",
        "request",
        "started_s",
        "stream",
        "token_s",
        "tokens",
        "was_stopped",
        "worker_id",
    )

    def __init__(self, request: NewRequest, stream: StreamId, gaps: GapHistogram) -> None:
        self.request = request
        self.stream = stream
        self.parent: Session | None = None
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
        self.token_s = array("d")
        """When each of those that came to this session did, on the event loop's clock."""
        self.reading = ReaderProgress(request)
        self.num_delivered = 0
        """How many of them the reader has taken."""
        self.num_served = len(self.tokens)
        """How many of them are counted as service to its tenant."""
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
        self.is_over = False
        """As `ended`, for who looks at it with every token."""
        self.admitted_s: float | None = None
        self.progress_s = request.arrival_s
        """When its last token came, or the attempt began."""
        self.questions = Questions(asked_s=request.arrival_s)
        if request.sampling.logprobs is not None:
            self.logprobs = [None] * len(self.tokens)
        self._gaps = gaps

    def belong_to(self, parent: Session | None) -> None:
        """Be another choice of the request whose first one is the parent; None: it is the first itself."""
        self.parent = parent

    @property
    def is_running(self) -> bool:
        """Whether it is at a worker, which has accepted it, its answer goes on, and nobody is asked to take it."""
        return None not in (self.worker_id, self.admitted_s) and not self.is_placing and not self.is_over

    @property
    def first_token_s(self) -> float | None:
        """When its first token came; None before."""
        return self.token_s[0] if self.token_s else None

    @property
    def last_token_s(self) -> float:
        """When its newest token came; its arrival before any."""
        return self.token_s[-1] if self.token_s else self.request.arrival_s

    @property
    def thinks(self) -> bool:
        """Whether it goes on with thinking, which nobody reads."""
        return self.reading.thinks(len(self.tokens))

    @property
    def num_thought(self) -> int:
        """How many of the tokens that came to this session are thinking: its first ones."""
        num_here, num_known = len(self.token_s), len(self.tokens)
        return num_here if self.thinks else max(0, self.reading.num_thought - num_known + num_here)

    @property
    def qoe(self) -> float | None:
        """The QoE of the answer if it ends with the tokens so far, in [0, 1]; None when no reader follows.

        Of an answer that is all thinking there is none.
        """
        target = self.request.qoe
        if target is None:
            return None
        delivered_s = np.asarray(self.token_s) - self.request.arrival_s
        qoe = answer_qoe(delivered_s, target.ttft_s, target.speed_tokens_per_s, self.num_thought)
        return None if isnan(qoe) else qoe

    def begin(self, worker_id: WorkerId, attempt: int, now_s: float) -> None:
        """From now on only this attempt at this worker counts."""
        self.worker_id, self.attempt = worker_id, attempt
        self.held.clear()
        self.history.begin(len(self.tokens))
        self.questions.begin(now_s)
        self.progress_s = now_s

    def offer(self, worker_id: WorkerId, attempt: int, counted: Counted, now_s: float) -> None:
        """A worker is asked whether it takes this attempt, which begins; `answer` when it has answered, or will not."""
        self.begin(worker_id, attempt, now_s)
        self.counted = counted
        self.is_placing = True

    def answer(self) -> None:
        """The worker that was asked has answered, or will not."""
        self.is_placing = False

    @property
    def present(self) -> Attempt:
        """The attempt that a worker runs."""
        assert self.worker_id is not None, "a running session has a worker"
        assert self.counted is not None, "it was counted there"
        return Attempt(self.worker_id, self.attempt, self.counted, self.history.incarnation)

    def stay(self, attempt: Attempt, now_s: float) -> None:
        """Go on with an attempt that another worker was to take over; what it sent meanwhile was ignored."""
        self.begin(attempt.worker_id, attempt.number, now_s)
        self.counted = attempt.counted
        self.history.accept(attempt.worker_id, attempt.incarnation)
        self.questions.suspect()

    def fence(self) -> None:
        """From now on nothing that any worker sends counts: the attempt is given up."""
        self.worker_id = None
        self.attempt = 0
        self.held.clear()
        self.history.progress()

    @property
    def has_progressed(self) -> bool:
        """Whether the present attempt has given a token."""
        return len(self.tokens) > self.history.num_at_start

    async def until_progress(self) -> None:
        """Return once the present attempt has given a token, is given up, or the session has ended."""
        attempt, progress = self.attempt, self.history.watch()
        try:
            while attempt and self.attempt == attempt and not self.has_progressed and not self.is_over:
                progress.clear()
                await progress.wait()
        finally:
            self.history.unwatch(has_progressed=self.has_progressed)

    def accept(self, worker_id: WorkerId, now_s: float, incarnation: Incarnation = NOBODY) -> None:
        """The worker runs it, in a process that it may not have named."""
        self.worker_id = worker_id
        self.history.accept(worker_id, incarnation)
        if self.admitted_s is None:
            self.admitted_s = now_s
        self.progress_s = now_s

    def start(self, now_s: float) -> None:
        """Its worker computes something for the present attempt; this may be heard before that it was accepted."""
        self.history.start()
        if self.admitted_s is None:
            self.admitted_s = now_s
        if self.started_s is None:
            self.started_s = now_s

    def attach(self, reader: Reader, now_s: float, most: int | None = None) -> bool:
        """Give the reader what has come so far, and everything from now on.

        Args:
            reader: takes it.
            now_s: the event loop's clock.
            most: tokens at a time; None: all of them.

        Returns:
            False if there is more than that: the reader has the first part, and is to be attached again.
        """
        assert self.reader is None, "a session has one reader"
        backlog = self.tokens[self.num_delivered :][:most]
        is_all = self.num_delivered + len(backlog) == len(self.tokens)
        finish = self.finish if self.is_over and is_all else FinishReason.NONE
        is_wanted = True
        if backlog or finish is not FinishReason.NONE:
            is_wanted = self._deliver(reader, backlog, finish, now_s)
        if is_all or not is_wanted:
            self.reader = reader
        return self.reader is not None

    def take_next(self, first_index: int, token_id: int, now_s: float) -> bool:
        """Take one token, as `receive` would, if it is the next one and nothing but it is to be seen to.

        Returns:
            False if that is not so: nothing has been taken.
        """
        tokens, token_s, history = self.tokens, self.token_s, self.history
        is_plain = first_index == len(tokens) and token_s and history.has_started and history.on_progress is None
        reading = self.reading
        if not is_plain or self.held or self.logprobs is not None or reading.thinking is not None:
            return False
        gap_s, gaps = now_s - token_s[-1], self._gaps
        if gap_s == gaps.same_s:
            gaps.num_same += 1
        else:
            gaps.add(gap_s)
        shown_s = reading.shown_s + reading.gap_s
        if now_s > shown_s:  # noqa: PLR1730  for every token: a call takes twice as long
            shown_s = now_s
        reading.shown_s = shown_s
        tokens.append(token_id)
        token_s.append(now_s)
        self.progress_s = now_s
        if self.reader is not None:
            self._deliver(self.reader, [token_id], FinishReason.NONE, now_s)
        return True

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
            self._deliver(self.reader, token_ids, finish, now_s)
        if finish and not self.is_over:
            self.finish = finish
            self._end()

    def note_cached(self, num_tokens: int) -> None:
        """Its worker had the KV of so many tokens of the prompt."""
        self.cached_tokens = num_tokens

    def take_served(self) -> int:
        """Return how many tokens have come since this was asked last."""
        num_new, self.num_served = len(self.tokens) - self.num_served, len(self.tokens)
        return num_new

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
        while self.held and not self.is_over:
            next_index = len(self.tokens)
            first_index = next_index if next_index in self.held else min(self.held)
            if first_index > next_index:
                return False
            token_ids, finish, logprobs = self.held.pop(first_index)
            self._take(first_index, token_ids, finish, now_s, logprobs)
        self.held.clear()
        return True

    def _append(self, token_ids: list[int], now_s: float) -> None:
        if self.token_s:
            self._gaps.add(now_s - self.token_s[-1])
        if len(token_ids) > 1:
            self._gaps.add(0.0, len(token_ids) - 1)
        self.reading.take(len(self.tokens), token_ids, now_s)
        self.progress_s = now_s
        self.tokens += token_ids
        self.token_s.extend([now_s] * len(token_ids))
        self.history.progress()

    def _deliver(self, reader: Reader, token_ids: list[int], finish: FinishReason, now_s: float) -> bool:
        """Hand tokens on; return whether the reader wants more."""
        self.num_delivered += len(token_ids)
        is_wanted = reader.on_tokens(token_ids, finish, now_s)
        if not is_wanted and not self.is_over:
            self.was_stopped = True
            self.finish = FinishReason.STOP
            self._end()
        return is_wanted

    def fail(self, code: FailureCode) -> None:
        """End it without (the rest of) an answer, unless it has ended."""
        if not self.is_over:
            self.failure = code
            self._end()

    def _end(self) -> None:
        self.is_over = True
        self.ended.set()
        self.history.progress()


def _how_much(part: Part) -> tuple[int, FinishReason, int]:
    token_ids, finish, logprobs = part
    return len(token_ids), finish, len(logprobs)
