"""Requests of a simulated workload, and how a dispatcher serves them below HTTP and text."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from services.dispatcher.service import DispatcherService
from services.dispatcher.session.request import FailureCode, NewRequest, RequestFailedError
from services.dispatcher.session.session import Session
from services.worker.modelled.shadow_kv import TokenDraw, expected_outputs
from shared.api_keys import Tier
from shared.ids import RequestId
from shared.messages.request import pack_token_ids
from shared.stream_extras import TokenLogprob
from shared.types import FinishReason, ReaderTarget, SamplingParams, Thinking

DAY_S = 24 * 3600.0
OPENING_ID, CLOSING_ID = 3, 4
"""Tags of thinking: no modelled worker draws them."""


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request of a workload."""

    request_id: str
    prompt: NDArray[np.integer]
    """[num_prompt] token ids."""
    num_output: int
    """Tokens of the answer; a simulated answer always ends by its length, or by its reader."""
    seed: int = 0
    qoe: ReaderTarget | None = None
    stop_after: int | None = None
    """Tokens after which the reader wants no more, as when a stop string is found."""
    logprobs: int | None = None
    """See `SamplingParams.logprobs`."""
    is_resumable: bool = False
    """See `NewRequest.resumable`."""
    tier: Tier = Tier.DEFAULT
    tenant: str = ""
    max_tenant_queued: int | None = None
    """See `NewRequest`."""
    num_thinking: int = 0
    """First tokens of the answer that are thinking; the last of them is the closing tag."""
    limit_s: float = DAY_S
    """Seconds after which the dispatcher ends it with an error."""


@dataclass(slots=True)
class SimAnswer:
    """What came back, and when (seconds after the request's arrival)."""

    request: SimRequest
    arrival_s: float
    tokens: list[int] = field(default_factory=list)
    delivered_s: list[float] = field(default_factory=list)
    """One per token."""
    finish: FinishReason = FinishReason.NONE
    failure: FailureCode | None = None
    """Why there is no whole answer."""
    qoe: float | None = None
    """The dispatcher's own estimate, final; None when no reader follows."""
    logprobs: list[TokenLogprob | None] | None = None
    """One per token, if they were asked for."""
    num_before_reader: int = 0
    """Tokens that had come before anybody read; the dispatcher's QoE counts them as they came."""
    num_counted: int | None = None
    """Output tokens by the dispatcher's own count; None until the answer has ended."""

    def on_tokens(self, token_ids: Sequence[int], finish: FinishReason, now_s: float) -> bool:
        """Take the next tokens (the dispatcher's `Reader`)."""
        self.tokens += token_ids
        self.delivered_s += [now_s - self.arrival_s] * len(token_ids)
        self.finish = finish
        return self.request.stop_after is None or len(self.tokens) < self.request.stop_after


def new_answers(request: SimRequest, count: int, now_s: float) -> list[SimAnswer]:
    """Return an empty answer for each choice of a request; their seeds count up."""
    return [SimAnswer(replace(request, seed=request.seed + index), now_s) for index in range(count)]


async def serve_choices(dispatcher: DispatcherService, answers: Sequence[SimAnswer]) -> None:
    """Fill the answers of one request's choices; return when all have ended.

    A choice after the first that no worker takes fails alone: its answer says why. If the caller is cancelled, the
    request is cancelled at its worker, as when a client disconnects.

    Raises:
        RequestFailedError: the first was not admitted; none is left.
    """
    sessions = dispatcher.sessions.open([_new_request(answer, i) for i, answer in enumerate(answers)])
    try:
        await dispatcher.sessions.place(sessions[0])
        async with asyncio.TaskGroup() as group:
            for answer, session in zip(answers, sessions, strict=True):
                parent = None if session is sessions[0] else sessions[0]
                group.create_task(_follow(dispatcher, answer, session, parent))
    finally:
        for session in sessions:
            dispatcher.sessions.release(session)


async def _follow(dispatcher: DispatcherService, answer: SimAnswer, session: Session, parent: Session | None) -> None:
    try:
        if parent is not None:
            await dispatcher.sessions.place(session, parent)
        session.attach(answer, asyncio.get_running_loop().time())
        answer.num_before_reader = len(answer.tokens)
        await session.ended.wait()
    except RequestFailedError as error:
        answer.failure = error.code
    else:
        answer.failure = dispatcher.sessions.outcome(session)
        answer.qoe = session.qoe
        answer.finish = session.finish
        answer.logprobs = None if session.logprobs is None else list(session.logprobs)
        answer.num_counted = len(session.tokens)
    dispatcher.sessions.release(session)


def _new_request(answer: SimAnswer, index: int) -> NewRequest:
    request = answer.request
    return NewRequest(
        request_id=RequestId(f"{request.request_id}-{index}" if index else request.request_id),
        prompt=pack_token_ids(request.prompt),
        sampling=SamplingParams(
            max_tokens=request.num_output,
            seed=request.seed,
            ignore_eos=True,
            logprobs=request.logprobs,
            thinking=thinking_of(request.num_thinking),
        ),
        arrival_s=answer.arrival_s,
        limit_s=request.limit_s,
        tier=request.tier,
        tenant=request.tenant,
        max_tenant_queued=request.max_tenant_queued,
        qoe=request.qoe,
        resumable=request.is_resumable,
    )


def thinking_of(num_tokens: int) -> Thinking | None:
    """Return the thinking of an answer whose first tokens are so many of it; the prompt has opened it."""
    if not num_tokens:
        return None
    return Thinking(opening_id=OPENING_ID, closing_id=CLOSING_ID, is_open=True, budget=num_tokens - 1)


def undisturbed_text(request: SimRequest, draw: TokenDraw) -> list[int]:
    """Return what the request's answer is when nothing ever happens to its KV."""
    prompt, nothing = request.prompt.astype(np.int32), np.zeros(0, dtype=np.int32)
    thinking = thinking_of(request.num_thinking)
    tokens: list[int] = expected_outputs(prompt, nothing, request.num_output, request.seed, draw, thinking).tolist()
    return tokens if request.stop_after is None else tokens[: request.stop_after]
