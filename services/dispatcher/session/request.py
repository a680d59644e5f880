"""What a client asks of the dispatcher, in tokens; why it may get no (whole) answer; and who takes its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from shared.api_keys import Tier
from shared.ids import DispatcherId, Incarnation, RequestId
from shared.types import FinishReason, LatencyLimits, ReaderTarget, SamplingParams


@dataclass(frozen=True, slots=True)
class Sender:
    """Who submits: a dispatcher, and which process of it."""

    dispatcher_id: DispatcherId
    """Where tokens go."""
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class NewRequest:
    """What a client asked for, in tokens."""

    request_id: RequestId
    prompt: bytes
    """Token ids, little-endian u32 (`shared.messages.request.pack_token_ids`)."""
    sampling: SamplingParams
    arrival_s: float
    """When it came, on the event loop's clock."""
    limit_s: float
    """Seconds from then after which it ends with an error."""
    qoe: ReaderTarget | None = None
    slo: LatencyLimits | None = None
    """What it is to keep; None: nobody has said."""
    cache_salt: str = ""
    """See `Submit.cache_salt`."""
    tier: Tier = Tier.DEFAULT
    """More urgent ones go first; FLEX is best effort."""
    tenant: str = ""
    """Whose it is."""
    max_tenant_queued: int | None = None
    """Requests of this tenant that may wait for room, this one included, best effort and others each; None: as many as
    of all."""
    resumable: bool = False
    """Its name comes from the client: if this dispatcher dies, another one may be asked for the same request."""
    generated: tuple[int, ...] = ()
    """Output tokens that an earlier connection got already; generation goes on after them."""
    num_attempts: int = 0
    """Submissions that were made under the same id before, as far as this dispatcher knows."""
    replaces: bool = False
    """It goes on in place of one of this dispatcher's that has just ended for it, and is admitted as that one was."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt) // 4

    @property
    def num_tokens(self) -> int:
        """Most tokens of prompt and output together."""
        return self.num_prompt_tokens + self.sampling.max_tokens


class FailureCode(StrEnum):
    """Why a request has no (whole) answer; also the `code` that the client sees."""

    DRAINING = "draining"
    MODEL_LOADING = "model_loading"
    NO_CAPACITY = "no_capacity"
    QUEUE_FULL = "queue_full"
    RESOURCE_UNAVAILABLE = "resource_unavailable"
    TOO_LONG = "context_length_exceeded"
    SUPERSEDED = "request_superseded"
    REQUEST_FAILED = "request_failed"
    TIMED_OUT = "request_timeout"
    CANCELLED = "request_cancelled"
    RESUME_MISMATCH = "resume_mismatch"
    INTERNAL = "internal_error"


class RequestFailedError(Exception):
    """The request was not admitted; nothing of it is left anywhere."""

    def __init__(self, code: FailureCode) -> None:
        super().__init__(code.value)
        self.code = code


class Reader(Protocol):
    """Who takes the tokens of one request. Called on the event loop, must not block and should not raise."""

    def on_tokens(self, token_ids: Sequence[int], finish: FinishReason, now_s: float) -> bool:
        """Take the next tokens in order.

        Args:
            token_ids: at least one, unless the request finishes without one.
            finish: NONE while the answer goes on.
            now_s: the event loop's clock.

        Returns:
            False if no more are wanted: the answer is complete by the reader's own judgement (a stop string).
        """
