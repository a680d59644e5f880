"""What a dispatcher asks a worker: submit, cancel, replay, renew. Bus errors end here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from pydantic import TypeAdapter

from shared.ids import NOBODY, Incarnation, RequestId, WorkerId
from shared.messages.fetch import FETCH_LIMIT_S, Fetch, Fetched, FetchOutcome
from shared.messages.lease import Renew, Renewed
from shared.messages.request import (
    MAX_INLINE_BYTES,
    Accepted,
    Cancel,
    RefusalReason,
    Refused,
    Replay,
    ReplayUnknown,
    RequestMessage,
    Submit,
    Upload,
    Uploaded,
)
from shared.process.log import get_logger
from shared.subjects import Subjects
from shared.token_batch import MAGIC, TokenBatch
from shared.transport.bus import Bus, BusError, BusTimeoutError, MessageTooLargeError, NoRespondersError
from shared.wire import WireError, WireSizeError, decode, decode_union, encode

_log = get_logger()
_ANSWERS: TypeAdapter[RequestMessage] = TypeAdapter(RequestMessage)

CANCEL_LIMIT_S = 2.0
"""Seconds to wait for the answer to a cancellation."""
RENEW_LIMIT_S = 1.0
"""Seconds to wait for the answer to a renewal."""


class SubmitOutcome(Enum):
    """What came of a submission."""

    ACCEPTED = auto()
    ELSEWHERE = auto()  # this worker cannot take it now; another one may
    NO_ROOM = auto()  # so, for want of memory; it takes one that does not need room at once
    CLOSING = auto()  # so, because its requests are to leave; it takes one that finds no room elsewhere
    UNKNOWN = auto()  # no answer: it may have taken it, so it must be cancelled there
    OLD = auto()  # the worker has had this attempt or a later one; a later one yet may be taken
    TOO_LONG = auto()
    FAILED = auto()  # our own fault; trying again changes nothing


@dataclass(frozen=True, slots=True)
class SubmitAnswer:
    """A worker's answer, or the lack of one."""

    outcome: SubmitOutcome
    incarnation: Incarnation = NOBODY
    """Of the worker's process, if it accepted."""
    num_output: int = 0
    """Output tokens that it has already."""
    num_preemptions: int = 0
    """How often the request has been preempted, as far as the worker knows."""
    newest_attempt: int = 0
    """The last attempt that it has had, if this one is too old."""
    open_worker: WorkerId | None = None
    """One that takes requests, if it is closing."""
    num_free_blocks: int = 0
    """What it has, if it has no room."""


class Silence(Enum):
    """Why a question has no answer."""

    NOBODY = auto()  # no such worker is connected
    NO_ANSWER = auto()


_REFUSALS = {
    RefusalReason.FULL: SubmitOutcome.ELSEWHERE,
    RefusalReason.DRAINING: SubmitOutcome.ELSEWHERE,
    RefusalReason.NO_ROOM: SubmitOutcome.NO_ROOM,
    RefusalReason.CLOSING: SubmitOutcome.CLOSING,
    RefusalReason.STAGE: SubmitOutcome.ELSEWHERE,
    RefusalReason.TOO_LONG: SubmitOutcome.TOO_LONG,
    RefusalReason.INVALID: SubmitOutcome.FAILED,
    RefusalReason.DUPLICATE: SubmitOutcome.OLD,
    RefusalReason.CANCELLED: SubmitOutcome.OLD,
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

    async def broker_answers(self) -> bool:
        """Return whether the broker answers now: if it does not, silence says nothing about a worker."""
        try:
            await self._bus.flush()
        except BusError:
            return False
        return True

    async def submit(self, worker_id: WorkerId, submit: Submit) -> SubmitAnswer:
        """Offer the request to the worker, for no longer than it may take."""
        limit_s = min(self._submit_limit_s, submit.remaining_s)
        try:
            if len(submit.prompt) + len(submit.generated) + len(submit.sampling.grammar) > MAX_INLINE_BYTES:
                submit = await self._upload(worker_id, submit)
            data = await self._bus.request(self._subjects.submit(worker_id), encode(submit), timeout_s=limit_s)
            answer = decode_union(data, _ANSWERS)
        except (MessageTooLargeError, WireSizeError):
            return SubmitAnswer(SubmitOutcome.TOO_LONG)
        except NoRespondersError:
            return SubmitAnswer(SubmitOutcome.ELSEWHERE)
        except (BusError, WireError) as error:
            _log.warning("submit_without_answer", rid=submit.request_id, worker=worker_id, error=str(error))
            return SubmitAnswer(SubmitOutcome.UNKNOWN)
        if isinstance(answer, Accepted) and answer.attempt == submit.attempt:
            numbers = (answer.num_output, answer.num_preemptions)
            return SubmitAnswer(SubmitOutcome.ACCEPTED, answer.incarnation, *numbers)
        if not isinstance(answer, Refused):
            return SubmitAnswer(SubmitOutcome.UNKNOWN)
        outcome = _REFUSALS[answer.reason]
        report = _log.warning if outcome is SubmitOutcome.FAILED else _log.debug
        report("refused", rid=submit.request_id, worker=worker_id, reason=answer.reason.value, detail=answer.detail)
        return SubmitAnswer(
            outcome,
            newest_attempt=answer.newest_attempt,
            open_worker=answer.open_worker,
            num_free_blocks=answer.num_free_blocks,
        )

    async def _upload(self, worker_id: WorkerId, submit: Submit) -> Submit:
        """Send the ids of a long submission ahead, and return it without them.

        Raises:
            BusError, WireError: no answer, or none that fits.
        """
        data, offset = submit.prompt + submit.generated, 0
        while offset < len(data):
            part = Upload(
                request_id=submit.request_id,
                attempt=submit.attempt,
                offset=offset,
                data=data[offset : offset + MAX_INLINE_BYTES],
            )
            subject = self._subjects.submit(worker_id)
            answer = decode(await self._bus.request(subject, encode(part), timeout_s=self._submit_limit_s), Uploaded)
            if answer.num_bytes <= offset:
                break  # it takes no more: the submission will be refused
            offset = answer.num_bytes
        uploaded = (len(submit.prompt), len(submit.generated))
        return submit.model_copy(update={"prompt": b"", "generated": b"", "uploaded": uploaded})

    async def fetch(self, target: WorkerId, fetch: Fetch, limit_s: float = FETCH_LIMIT_S) -> FetchOutcome:
        """Have a worker fetch a request that another one runs; return what came of it, once that is so."""
        try:
            data = await self._bus.request(self._subjects.fetch(target), encode(fetch), timeout_s=limit_s)
            fetched = decode(data, Fetched)
        except NoRespondersError:
            return FetchOutcome.REFUSED  # it is gone, or others cannot reach it
        except (BusError, WireError) as error:
            _log.warning("fetch_without_answer", rid=fetch.request_id, worker=target, error=str(error))
            return FetchOutcome.LOST
        return fetched.outcome

    async def cancel(self, worker_id: WorkerId, request_id: RequestId, attempt: int) -> bool:
        """Stop the request at the worker; return whether it has heard it."""
        data = encode(Cancel(request_id=request_id, attempt=attempt))
        try:
            await self._bus.request(self._subjects.cancel(worker_id), data, timeout_s=CANCEL_LIMIT_S)
        except BusError:
            return False
        return True

    async def renew(self, worker_id: WorkerId, renew: Renew) -> Renewed | Silence:
        """Renew the lease on what runs there."""
        try:
            data = await self._bus.request(self._subjects.renew(worker_id), encode(renew), timeout_s=RENEW_LIMIT_S)
            return decode(data, Renewed)
        except NoRespondersError:
            return Silence.NOBODY
        except (BusError, WireError) as error:
            level = _log.debug if isinstance(error, BusTimeoutError) else _log.warning
            level("renewal_without_answer", worker=worker_id, error=str(error))
            return Silence.NO_ANSWER

    async def replay(self, worker_id: WorkerId, replay: Replay) -> TokenBatch | ReplayUnknown | Silence:
        """Ask for tokens from an index on."""
        try:
            data = await self._bus.request(
                self._subjects.replay(worker_id), encode(replay), timeout_s=self._submit_limit_s
            )
            if data.startswith(MAGIC):
                return TokenBatch.unpack(data)
            return decode(data, ReplayUnknown)
        except (BusError, WireError) as error:
            _log.debug("replay_without_answer", rid=replay.request_id, worker=worker_id, error=str(error))
            return Silence.NO_ANSWER
