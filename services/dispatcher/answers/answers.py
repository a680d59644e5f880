"""The answer to an admitted request, streamed or whole: its choices side by side, each to its own end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from aiohttp import web

from services.dispatcher.answers import idempotency
from services.dispatcher.answers.event_ids import EventIds
from services.dispatcher.answers.logprobs import LogprobWriter
from services.dispatcher.answers.readers import ChoiceReader, Collector, Streamer
from services.dispatcher.answers.resume import ResumableStreamer
from services.dispatcher.answers.shapes import DONE, AnswerShape, ChoiceShape, usage_of
from services.dispatcher.endpoints.call import CheckedCall, Choice
from services.dispatcher.http.errors import ApiError, error_body, error_content, failure_error
from services.dispatcher.http.front import Front
from services.dispatcher.http.sse import EventWriter, Open, WholeAnswer
from services.dispatcher.session.request import RequestFailedError
from shared.process.log import get_logger

_log = get_logger()

MAX_TOKENS_AT_ONCE: Final = 1024
"""Of an answer that goes on after what an earlier connection got, whose tokens are all there at once."""


async def collect_answer(front: Front, call: CheckedCall, choices: Sequence[Choice]) -> web.StreamResponse:
    """Return the whole answer. A choice that failed stands beside those that did not.

    Raises:
        ApiError: every choice failed.
    """
    logprobs = _logprob_writer(front, call)
    collectors = [Collector(choice, logprobs) for choice in choices]
    await _follow_all(front, call, choices, collectors)
    errors = [_error_of(choice, len(choices)) for choice in choices]
    if None not in errors:
        raise errors[0] or AssertionError
    shape = _shape(front, call)
    content = [
        collector.parts(shape, error_content(error) if error is not None else None)
        for collector, error in zip(collectors, errors, strict=True)
    ]
    return WholeAnswer(front.streams, shape.whole(content, usage_of(choices)), call.headers)


async def stream_answer(
    front: Front, call: CheckedCall, choices: Sequence[Choice], open_stream: Open
) -> web.StreamResponse | None:
    """Stream the answer, and return its response; an error of a choice comes when all others have ended."""
    shape = _shape(front, call)
    headers = {"x-request-id": call.public_id, "Server": "sluice", **call.headers}
    if call.is_resumable and call.retry is not None:
        headers[idempotency.HEADER] = call.retry.key
    stream = await open_stream(headers, has_ids=call.is_resumable)
    try:
        streamers = _streamers(front, call, choices, shape, stream)
        for streamer in streamers:
            streamer.begin(front.now())
            await streamer.pause()
        await _follow_all(front, call, choices, streamers)
        stream.write(_ending(shape, choices), front.now())
        await stream.end()
    finally:
        stream.close()
        if stream.was_cut:
            call.fate.finish = "slow_reader"
    return stream.response


def _streamers(
    front: Front, call: CheckedCall, choices: Sequence[Choice], shape: AnswerShape, stream: EventWriter
) -> list[Streamer]:
    logprobs = _logprob_writer(front, call)
    shapes = [ChoiceShape(shape, choice.index) for choice in choices]
    if not call.is_resumable:
        return [Streamer(choice, own, stream, logprobs) for choice, own in zip(choices, shapes, strict=True)]
    ids = EventIds(call.seen)
    return [
        ResumableStreamer(choice, own, stream, logprobs, ids, seen)
        for choice, own, seen in zip(choices, shapes, call.seen, strict=True)
    ]


async def _follow_all(
    front: Front, call: CheckedCall, choices: Sequence[Choice], readers: Sequence[ChoiceReader]
) -> None:
    """Return when every choice has ended; the first is placed already."""
    if len(choices) == 1:
        await _follow(front, choices[0], readers[0])
        return
    turn = asyncio.Lock()  # of several prompts one at a time asks for room: the others take no place in the queue
    async with asyncio.TaskGroup() as group:
        for choice, reader in zip(choices, readers, strict=True):
            group.create_task(_place_and_follow(front, call, choice, reader, turn))
    for choice in choices:
        if choice.failure is not None:
            rid = choice.opened.request.request_id
            _log.info("choice_failed", rid=rid, index=choice.index, code=choice.failure.value)


async def _place_and_follow(
    front: Front, call: CheckedCall, choice: Choice, reader: ChoiceReader, turn: asyncio.Lock
) -> None:
    try:
        async with call.stopper.waiting():
            await _place(front, choice, turn)
    except RequestFailedError as error:
        choice.failure = error.code
        return
    finally:
        choice.placed.set()
    await _follow(front, choice, reader)


async def _place(front: Front, choice: Choice, turn: asyncio.Lock) -> None:
    """Give the choice a worker, unless it has one."""
    if choice.parent is not None:
        await choice.parent.placed.wait()
        await front.sessions.place(choice.opened, choice.parent.opened)
    elif not choice.placed.is_set():
        async with turn:
            await front.sessions.place(choice.opened)


async def _follow(front: Front, choice: Choice, reader: ChoiceReader) -> None:
    """Return when the choice has ended, with its failure noted and nothing of it left at a worker."""
    session = choice.opened
    while not session.attach(reader, front.now(), MAX_TOKENS_AT_ONCE):
        await reader.pause()
    await session.ended.wait()
    choice.failure = choice.objection or front.sessions.outcome(session)
    if choice.failure is None:
        reader.end(_estimate([choice]), front.now())
    front.sessions.release(session)  # before the last bytes are taken: the client may be slow


def _ending(shape: AnswerShape, choices: Sequence[Choice]) -> bytes:
    """Return what follows the last finish reason: usage if asked for and deserved, an error if there is one."""
    errors = [error for choice in choices if (error := _error_of(choice, len(choices))) is not None]
    ending = b"" if len(errors) == len(choices) else shape.usage_chunk(usage_of(choices), _estimate(choices))
    if errors:
        ending += b"data: " + error_body(errors[0]) + b"\n\n"
    return ending + DONE


def _error_of(choice: Choice, num_choices: int) -> ApiError | None:
    if choice.failure is None:
        return None
    return failure_error(choice.failure, f"Choice {choice.index}: " if num_choices > 1 else "")


def _estimate(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return the server's own account of a stream, from the times of sending: the mean QoE, the earliest token."""
    sessions = [choice.opened for choice in choices]
    qoe = [qoe for session in sessions if (qoe := session.qoe) is not None]
    first_s = [session.first_token_s for session in sessions if session.first_token_s is not None]
    return {
        "qoe": round(sum(qoe) / len(qoe), 4) if qoe else None,
        "ttft_s": round(min(first_s) - sessions[0].request.arrival_s, 4) if first_s else None,
        "tokens": sum(choice.text.num_tokens for choice in choices),
    }


def _shape(front: Front, call: CheckedCall) -> AnswerShape:
    return AnswerShape(
        is_chat=call.is_chat,
        answer_id=call.answer_id,
        created_unix_s=call.created_unix_s,
        model=front.model,
        service_tier=call.params.service_tier,
        include_usage=call.params.include_usage,
    )


def _logprob_writer(front: Front, call: CheckedCall) -> LogprobWriter | None:
    num_top = call.params.sampling.common.logprobs
    return None if num_top is None else LogprobWriter(call.is_chat, num_top, front.codec.names)
