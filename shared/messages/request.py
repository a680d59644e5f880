"""The conversation between a dispatcher and a worker about one request: submit, cancel, replay.

The answer to a submission is `Accepted` or `Refused`; a refusal is a normal answer. Tokens travel apart, as
`shared.token_batch`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from shared.api_keys import Tier
from shared.ids import DispatcherId, Incarnation, RequestId, StreamId, WorkerId
from shared.messages.base import ControlMessage, MessagePart
from shared.types import MAX_PREEMPTIONS, LatencyLimits, ReaderTarget, SamplingParams

MAX_PROMPT_TOKENS = 1_000_000
"""Longest prompt that a worker is sent."""
MAX_INLINE_BYTES = 900_000
"""Token ids that a submission carries itself; if there are more, all of them are uploaded before."""


def pack_token_ids(token_ids: NDArray[np.integer] | list[int]) -> bytes:
    """Return the ids as little-endian u32, as `Submit` carries them."""
    return np.asarray(token_ids, dtype="<u4").tobytes()


NotNegative = Annotated[float, Field(ge=0)]


class PrefixSource(MessagePart):
    """A worker that holds more of a prompt than who is asked to take the request, as far as its dispatcher knows."""

    worker_id: WorkerId
    address: Annotated[str, Field(max_length=256)]
    """`ProcessFacts.stage_address`."""
    num_tokens: Annotated[int, Field(ge=1, le=MAX_PROMPT_TOKENS)]
    """Of the prompt, from its beginning."""


class Submit(ControlMessage):
    """Start a request, or go on with one that another worker began."""

    kind: Literal["submit"] = "submit"
    request_id: RequestId
    stream: Annotated[StreamId, Field(ge=0, le=2**32 - 1)]
    """The dispatcher's handle; token batches carry it."""
    attempt: Annotated[int, Field(ge=1, le=65_535)]
    """1 for the first worker that gets the request; the dispatcher ignores tokens of older attempts. A worker that runs
    an older attempt of the request hands it over to this one, tokens and KV included."""
    dispatcher_id: DispatcherId
    """Where the tokens go."""
    incarnation: Incarnation = Incarnation(0)
    """Of the dispatcher's process, which holds the lease on the sequence (`shared.messages.lease`)."""
    prompt: Annotated[bytes, Field(max_length=4 * MAX_PROMPT_TOKENS)]
    """Token ids of the prompt, little-endian u32; empty if it was uploaded."""
    generated: Annotated[bytes, Field(max_length=4 * MAX_PROMPT_TOKENS)] = b""
    """Token ids that earlier attempts produced and the dispatcher has; generation goes on after them."""
    sampling: SamplingParams
    tier: Tier = Tier.DEFAULT
    """The one that is really used."""
    slo: LatencyLimits | None = None
    """What the request is to keep; None: nobody has said."""
    qoe: ReaderTarget | None = None
    """The reader's schedule; None when no reader follows the stream: it is not streamed, or best effort."""
    displayed: Annotated[tuple[NotNegative, NotNegative] | None, Field()] = None
    """What the reader has seen of `generated`: when the newest token is displayed, seconds after arrival, and the sum
    of all delays so far; None without any, or without a reader. Of an answer that thinks still, as if its thinking were
    read at the speed at which it is wanted; when it has ended, of the text behind it."""
    thought_s: NotNegative | None = None
    """When the tag that ends the thinking came, seconds after arrival; None: it did not, or it is not known."""
    num_preemptions: Annotated[int, Field(ge=0, le=MAX_PREEMPTIONS)] = 0
    """How often it has been preempted so far, at whatever worker."""
    token_age_s: Annotated[float | None, Field(ge=0)] = None
    """Seconds since the newest token of `generated` reached the dispatcher; None: not known, or there is none."""
    age_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds since the request arrived at the dispatcher; the worker's clock for QoE and for order starts there."""
    remaining_s: Annotated[float, Field(gt=0)] = 600.0
    """The worker may drop the request after this many seconds."""
    fork_of: RequestId | None = None
    """The first choice of the same request (n > 1), with the same prompt and salt. If it is at the same worker this one
    shares its prompt's KV, and waits for it unless it goes on after `generated` and finds it; if not, this one runs by
    itself. Planners move all choices that are at a worker together."""
    cache_salt: Annotated[str, Field(max_length=64)] = ""
    """Requests share cached KV only under the same salt; the dispatcher derives it from the caller's key."""

    reopens: bool = False
    """Nobody else has room for it: a worker that is closing takes it, and is closing no more."""
    needs_room: bool = False
    """It comes because it fits: who has no memory for the tokens known so far refuses it, instead of having it wait."""
    prefix: PrefixSource | None = None
    """Where KV of its prompt is that may be missing here; None: nobody is known to have more."""
    uploaded: Annotated[tuple[int, int] | None, Field()] = None
    """Bytes of prompt and of generated ids, in this order, that came before as `Upload`s; None: they are in here."""

    def prompt_ids(self) -> NDArray[np.uint32]:
        """Return the prompt as an array [num_prompt_tokens]."""
        return np.frombuffer(self.prompt, dtype="<u4")

    def generated_ids(self) -> NDArray[np.uint32]:
        """Return the tokens generated so far as an array [num_generated]."""
        return np.frombuffer(self.generated, dtype="<u4")


class Upload(ControlMessage):
    """A part of what does not fit a submission: its prompt and generated ids. Sent in order, each after its answer."""

    kind: Literal["upload"] = "upload"
    request_id: RequestId
    attempt: Annotated[int, Field(ge=1, le=65_535)]
    offset: Annotated[int, Field(ge=0, le=8 * MAX_PROMPT_TOKENS)]
    """Bytes before this part."""
    data: Annotated[bytes, Field(min_length=1, max_length=MAX_INLINE_BYTES)]


class Uploaded(ControlMessage):
    """Answer to `Upload`."""

    kind: Literal["uploaded"] = "uploaded"
    request_id: RequestId
    num_bytes: Annotated[int, Field(ge=0)]
    """Bytes of the upload that are there."""


class RefusalReason(StrEnum):
    """Why a worker does not take a request; what the dispatcher may do about it."""

    FULL = "full"  # no row or no queue place now; try another worker, or later
    DRAINING = "draining"  # shutting down; try another worker
    NO_ROOM = "no_room"  # less memory is free than the dispatcher thought (`needs_room`); place it by what this says
    CLOSING = "closing"  # its requests are to leave; try the worker that it names, or any other, or say `reopens`
    STAGE = "stage"  # it computes for another worker's group; try another one
    TOO_LONG = "too_long"  # prompt + max_tokens can never fit this worker's KV memory or context
    INVALID = "invalid"  # malformed (ids outside the vocabulary, a bad length); do not retry
    DUPLICATE = "duplicate"  # this attempt of the request, or a later one, has been here already
    CANCELLED = "cancelled"  # its cancellation overtook it


class Accepted(ControlMessage):
    """The worker will run the request: tokens follow, and at the end a finish reason."""

    kind: Literal["accepted"] = "accepted"
    request_id: RequestId
    attempt: int
    incarnation: Incarnation = Incarnation(0)
    """Of the worker's process."""
    num_output: Annotated[int, Field(ge=0)] = 0
    """Output tokens that the worker has already: more than the submission's if it ran an older attempt."""
    num_preemptions: Annotated[int, Field(ge=0)] = 0
    """How often the request has been preempted, as far as the worker knows."""


class Refused(ControlMessage):
    """The worker does not take the request; nothing is left of it there."""

    kind: Literal["refused"] = "refused"
    request_id: RequestId
    reason: RefusalReason
    detail: str = ""
    """One sentence for logs; never shown to a client."""
    open_worker: WorkerId | None = None
    """With CLOSING: one that takes requests."""
    num_free_blocks: Annotated[int, Field(ge=0)] = 0
    """With NO_ROOM: KV blocks that nobody holds or asks for."""
    newest_attempt: Annotated[int, Field(ge=0)] = 0
    """With DUPLICATE: the last attempt of the request that this worker has taken."""


class Cancel(ControlMessage):
    """Stop the request; its KV is free within one step. Idempotent."""

    kind: Literal["cancel"] = "cancel"
    request_id: RequestId
    attempt: int


class Cancelled(ControlMessage):
    """Answer to `Cancel`."""

    kind: Literal["cancelled"] = "cancelled"
    request_id: RequestId
    found: bool
    """False if nothing of that (request, attempt) was left."""


class Replay(ControlMessage):
    """Send the tokens of a stream from an index on once more; the answer is one token batch."""

    kind: Literal["replay"] = "replay"
    request_id: RequestId
    attempt: int
    first_index: Annotated[int, Field(ge=0)]
    """Index of the first output token that is missing (0 = the first token this attempt produced + generated)."""


class ReplayUnknown(ControlMessage):
    """Answer to `Replay` when the worker no longer has the stream's tokens."""

    kind: Literal["replay_unknown"] = "replay_unknown"
    request_id: RequestId
    incarnation: Incarnation = Incarnation(0)
    """Of the worker's process: another one than accepted the request never had it."""


RequestMessage = Annotated[
    Submit | Upload | Uploaded | Accepted | Refused | Cancel | Cancelled | Replay | ReplayUnknown,
    Field(discriminator="kind"),
]
