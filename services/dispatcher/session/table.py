"""Running requests by stream handle, and the way of a token batch to them. No waiting here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat

from services.dispatcher.session.gaps import GapHistogram
from services.dispatcher.session.request import FailureCode, NewRequest
from services.dispatcher.session.session import Session
from shared.api_keys import Tier
from shared.errors import WireError
from shared.ids import StreamId, WorkerId
from shared.process.log import get_logger
from shared.stream_extras import StreamExtra
from shared.token_batch import TokenBatch
from shared.types import FinishReason

_log = get_logger()

SLACK_S = 1.0
"""Clocks of two processes may differ by this much at the end of a request's time."""
MAX_STREAM = 2**32 - 1
MAX_CHANNELS = 4096
"""Workers whose message numbers are remembered."""
FINISH_REASONS = tuple(FinishReason)
"""By number: cheaper than calling the enum for every token."""


@dataclass(slots=True)
class TableCounters:
    """What the token path has seen since the start."""

    num_batches: int = 0
    num_tokens: int = 0
    num_ignored: int = 0
    """Rows of requests that are gone, of older attempts, or from a worker that does not run the request."""
    num_lost_messages: int = 0
    """Numbers missing in a worker's channel."""


class SessionTable:
    """Owns the sessions.

    Args:
        on_gap: called with a session that misses tokens.
        on_disowned: called with a session that its worker has ended though its time is not over.
        on_released: called with a session that its worker has given up, and with the worker that gets its KV, if any.
        first_stream: the first handle. Different in each process of a dispatcher: workers may still send tokens for
            requests of the process before, and these must not meet a handle of this one.
    """

    def __init__(
        self,
        on_gap: Callable[[Session], None],
        on_disowned: Callable[[Session], None] = lambda _: None,
        on_released: Callable[[Session, str], None] = lambda *_: None,
        on_began: Callable[[Session], None] = lambda _: None,
        *,
        first_stream: int = 0,
    ) -> None:
        self.counters = TableCounters()
        self.gaps = GapHistogram()
        self._on_gap = on_gap
        self._on_disowned = on_disowned
        self._on_released = on_released
        self._on_began = on_began
        self._sessions: dict[int, Session] = {}
        self.num_real_time = 0
        """Of the sessions, those that are not best effort."""
        self._next_stream = first_stream % (MAX_STREAM + 1)
        self._channels: dict[WorkerId, int] = {}
        self._heard_s: dict[WorkerId, float] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def open(self, request: NewRequest) -> Session:
        """Return a new session with a handle that no other one has."""
        while self._next_stream in self._sessions:
            self._next_stream = (self._next_stream + 1) % (MAX_STREAM + 1)
        stream = StreamId(self._next_stream)
        self._next_stream = (self._next_stream + 1) % (MAX_STREAM + 1)
        session = self._sessions[stream] = Session(request, stream, self.gaps)
        self.num_real_time += not request.tier.is_best_effort
        return session

    def close(self, session: Session) -> bool:
        """Forget it: later tokens are ignored. Return whether it was there."""
        was_here = self._sessions.pop(session.stream, None) is not None
        self.num_real_time -= was_here and not session.request.tier.is_best_effort
        return was_here

    def all_but_waiting_flex(self) -> list[Session]:
        """Return the sessions but for best effort that waits for its first worker: tens of thousands may."""
        flex = Tier.FLEX
        return [
            each for each in self._sessions.values() if each.admitted_s is not None or each.request.tier is not flex
        ]

    def on_worker(self, worker_id: WorkerId) -> list[Session]:
        """Return the running sessions of this worker, by handle."""
        here = (session for session in self.all_but_waiting_flex() if session.worker_id == worker_id)
        return [session for session in here if session.is_running]

    def apply(self, batch: TokenBatch, now_s: float) -> None:
        """Hand every row to its session. One session's fault is not another's."""
        self.counters.num_batches += 1
        self.counters.num_tokens += len(batch.tokens)
        self._check_channel(batch)
        self._heard_s[batch.worker_id] = now_s
        sessions, worker_id = self._sessions, batch.worker_id
        tokens = batch.tokens.tolist()
        start = 0
        for stream, attempt, first_index, count, finish, extra in zip(
            batch.stream.tolist(),
            batch.attempt.tolist(),
            batch.first_index.tolist(),
            batch.count.tolist(),
            batch.finish.tolist(),
            extras_of(batch),
            strict=True,
        ):
            stop = start + count
            session = sessions.get(stream)
            if session is None or session.attempt != attempt or session.worker_id != worker_id or session.is_over:
                self.counters.num_ignored += 1
            else:
                try:
                    is_plain = count == 1 and not finish and extra is None
                    is_taken = is_plain and session.take_next(first_index, tokens[start], now_s)
                except Exception:
                    self._fail(session)
                    is_taken = True
                if not is_taken:
                    if not session.history.has_started:
                        session.start(now_s)
                        self._on_began(session)
                    self.receive(session, first_index, tokens[start:stop], FINISH_REASONS[finish], now_s, extra)
            start = stop

    def receive(
        self,
        session: Session,
        first_index: int,
        token_ids: list[int],
        finish: FinishReason,
        now_s: float,
        extra: StreamExtra | None = None,
    ) -> None:
        """Hand a part of its output to a session, and say so if parts before it are missing."""
        if finish is FinishReason.CANCELLED and now_s - session.request.arrival_s < session.request.limit_s - SLACK_S:
            self._on_disowned(session)  # as an orphan: this process was away for too long
            return
        is_released = finish is FinishReason.RELEASED
        if is_released:
            finish = FinishReason.NONE  # not of the answer
        try:
            if extra is None:
                complete = session.receive(first_index, token_ids, finish, now_s)
            else:
                if extra.cached_tokens is not None:
                    session.note_cached(extra.cached_tokens)
                session.history.learn_preemptions(extra.num_preemptions)
                complete = session.receive(first_index, token_ids, finish, now_s, extra.logprobs)
        except Exception:
            self._fail(session)
            return
        if is_released and not session.ended.is_set():
            self._on_released(session, "" if extra is None else extra.moved_to)
        elif not complete:
            self._on_gap(session)

    def _fail(self, session: Session) -> None:
        """End a session whose reader has raised: it is the boundary between that one and everybody else's tokens."""
        _log.exception("reader_failed", rid=session.request.request_id)
        session.fail(FailureCode.INTERNAL)

    def on_counter(self, worker_id: WorkerId, counter: int) -> None:
        """Take a worker's word that all messages below this number have been sent: it is late if some are missing."""
        expected = self._channels.get(worker_id, 0)
        if counter > expected:
            self.counters.num_lost_messages += counter - expected
            self._channels[worker_id] = counter
            self._suspect(worker_id)

    def heard_s(self, worker_id: WorkerId) -> float:
        """Return when a worker's last message came; 0 if none has."""
        return self._heard_s.get(worker_id, 0.0)

    def new_process(self, worker_id: WorkerId) -> None:
        """A worker has been started anew: its messages are numbered from 0."""
        self._channels.pop(worker_id, None)

    def _suspect(self, worker_id: WorkerId) -> None:
        for session in self.on_worker(worker_id):
            session.questions.suspect()

    def _check_channel(self, batch: TokenBatch) -> None:
        """A number that is missing may have been the last token of any request of that worker."""
        expected = self._channels.get(batch.worker_id)
        if expected is None and len(self._channels) >= MAX_CHANNELS:
            self._channels.clear()  # ids of workers that are long gone
            self._heard_s.clear()
        self._channels[batch.worker_id] = batch.counter + 1
        if expected is None or batch.counter == expected:
            return
        if batch.counter > expected:
            self.counters.num_lost_messages += batch.counter - expected
        self._suspect(batch.worker_id)


def extras_of(batch: TokenBatch) -> Iterable[StreamExtra | None]:
    """Return what goes with each row: None for all of them in almost every batch.

    Extras that cannot be read are left out: the tokens are sound without them.
    """
    if not batch.extras:
        return repeat(None, len(batch))
    found: list[StreamExtra | None] = [None] * len(batch)
    try:
        for extra in batch.stream_extras():
            found[extra.row] = extra
    except WireError as error:
        _log.warning("malformed_extras", worker=batch.worker_id, reason=error.reason)
    return found
