"""The three questions that a dispatcher asks a worker about a request: submit, cancel, replay. Bus errors end here."""

from __future__ import annotations

from enum import Enum, auto

from pydantic import TypeAdapter

from shared.bus import Bus, BusError, BusTimeoutError, MessageTooLargeError, NoRespondersError
from shared.ids import RequestId, WorkerId
from shared.log import get_logger
from shared.messages.request import (
    Accepted,
    Cancel,
    RefusalReason,
    Refused,
    Replay,
    RequestMessage,
    Submit,
)
from shared.subjects import Subjects
from shared.token_batch import MAGIC, TokenBatch
from shared.wire import WireError, WireSizeError, decode_union, encode

_log = get_logger()
_ANSWERS: TypeAdapter[RequestMessage] = TypeAdapter(RequestMessage)

CANCEL_LIMIT_S = 2.0
"""Seconds to wait for the answer to a cancellation before it is sent again."""
CANCEL_TRIES = 3


class SubmitOutcome(Enum):
    """What came of a submission."""

    ACCEPTED = auto()
    ELSEWHERE = auto()  # this worker cannot take it now; another one may
    UNKNOWN = auto()  # no answer: it may have taken it, so it must be cancelled there
    TOO_LONG = auto()
    FAILED = auto()  # our own fault; trying again changes nothing


class ReplayOutcome(Enum):
    """What came of the question for lost tokens, if not a batch."""

    UNKNOWN = auto()  # the worker knows nothing of the request
    NO_ANSWER = auto()


_REFUSALS = {
    RefusalReason.FULL: SubmitOutcome.ELSEWHERE,
    RefusalReason.DRAINING: SubmitOutcome.ELSEWHERE,
    RefusalReason.TOO_LONG: SubmitOutcome.TOO_LONG,
    RefusalReason.INVALID: SubmitOutcome.FAILED,
    # a request that was sent again under the same id, by way of another dispatcher: the next attempt has another number
    RefusalReason.DUPLICATE: SubmitOutcome.UNKNOWN,
    RefusalReason.CANCELLED: SubmitOutcome.ELSEWHERE,
}


class WorkerCalls:
    """Request-reply with workers."""

    def __init__(self, bus: Bus, subjects: Subjects, submit_limit_s: float) -> None:
        self._bus = bus
        self._subjects = subjects
        self._submit_limit_s = submit_limit_s

    @property
    def connected(self) -> bool:
        """Whether workers can be reached at all."""
        return self._bus.connected

    async def submit(self, worker_id: WorkerId, submit: Submit) -> SubmitOutcome:
        """Offer the request to the worker."""
        try:
            data = await self._bus.request(
                self._subjects.submit(worker_id), encode(submit), timeout_s=self._submit_limit_s
            )
            answer = decode_union(data, _ANSWERS)
        except (MessageTooLargeError, WireSizeError):
            return SubmitOutcome.TOO_LONG
        except NoRespondersError:
            return SubmitOutcome.ELSEWHERE
        except (BusError, WireError) as error:
            _log.warning("submit_without_answer", rid=submit.request_id, worker=worker_id, error=str(error))
            return SubmitOutcome.UNKNOWN
        if isinstance(answer, Accepted) and answer.attempt == submit.attempt:
            return SubmitOutcome.ACCEPTED
        if not isinstance(answer, Refused):
            return SubmitOutcome.UNKNOWN
        outcome = _REFUSALS[answer.reason]
        report = _log.warning if outcome is SubmitOutcome.FAILED else _log.debug
        report("refused", rid=submit.request_id, worker=worker_id, reason=answer.reason.value, detail=answer.detail)
        return outcome

    async def cancel(self, worker_id: WorkerId, request_id: RequestId, attempt: int) -> None:
        """Stop the request at the worker. What gets no answer has a time limit there as well."""
        data = encode(Cancel(request_id=request_id, attempt=attempt))
        for _ in range(CANCEL_TRIES):
            try:
                await self._bus.request(self._subjects.cancel(worker_id), data, timeout_s=CANCEL_LIMIT_S)
            except BusTimeoutError:
                continue
            except BusError:
                return  # nobody there: nothing runs
            return
        _log.warning("cancel_without_answer", rid=request_id, worker=worker_id)

    async def replay(self, worker_id: WorkerId, replay: Replay) -> TokenBatch | ReplayOutcome:
        """Ask for tokens from an index on."""
        try:
            data = await self._bus.request(
                self._subjects.replay(worker_id), encode(replay), timeout_s=self._submit_limit_s
            )
            if data.startswith(MAGIC):
                return TokenBatch.unpack(data)
            decode_union(data, _ANSWERS)
        except (BusError, WireError) as error:
            _log.debug("replay_without_answer", rid=replay.request_id, worker=worker_id, error=str(error))
            return ReplayOutcome.NO_ANSWER
        return ReplayOutcome.UNKNOWN
