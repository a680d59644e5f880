"""From a checked request to its answer: tokenise, admit, stream or collect, and release whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from services.dispatcher.http.answer_text import AnswerText, json_text
from services.dispatcher.http.errors import ApiError, error_body, failure_error, invalid
from services.dispatcher.http.front import Front
from services.dispatcher.http.params import Params
from services.dispatcher.http.records import make_record, report_record
from services.dispatcher.http.shapes import Shape, Usage
from services.dispatcher.http.sse import EventStream
from services.dispatcher.session.session import FailureCode, NewRequest, RequestFailedError, Session
from services.dispatcher.text.pool import TextPoolFullError
from services.dispatcher.text.template import TemplateRefusalError
from shared.ids import RequestId
from shared.messages.request import pack_token_ids
from shared.types import FinishReason

SLACK = 4
"""A prompt is refused untokenised if it has this many times more characters than the context could hold."""


@dataclass(frozen=True, slots=True)
class Call:
    """One checked request."""

    request_id: RequestId
    public_id: str
    """What `x-request-id` says."""
    is_chat: bool
    params: Params
    encode: Callable[[], list[int]]
    """Makes the prompt's token ids; runs off the event loop."""
    num_chars: int
    """Characters of the prompt."""
    prompt_param: str
    """`messages` or `prompt`: what an error about the prompt names."""
    default_max_tokens: int | None
    """None: as many as the context holds."""
    arrival_s: float
    created_unix_s: int

    @property
    def endpoint(self) -> str:
        """For metrics and logs."""
        return "chat" if self.is_chat else "completions"


async def generate(front: Front, call: Call, request: web.BaseRequest) -> web.StreamResponse:
    """Answer the request.

    Raises:
        ApiError: it was refused, or it failed and nothing has been sent yet.
    """
    answer = AnswerText(front.codec.table.start(first=call.is_chat), call.params.stops, call.params.stop_token_ids)
    finish = "cancelled"  # unless something better happens: the client may leave at any await
    session: Session | None = None
    try:
        session = await _admit(front, call)
        if call.params.stream:
            response = await _stream(front, call, session, answer, request)
        else:
            response = await _collect(front, call, session, answer)
        finish = front.sessions.outcome(session) or session.finish.name.lower()
    except ApiError as error:
        finish = error.code or "error"
        raise
    finally:
        if session is not None:
            front.sessions.release(session)
        report_record(front, make_record(front, call, session, answer.num_tokens, finish))
    return response


async def _admit(front: Front, call: Call) -> Session:
    try:
        front.sessions.check_admission()
        prompt = await _encode(front, call)
        return await front.sessions.admit(_new_request(front, call, prompt))
    except TextPoolFullError:
        code = FailureCode.QUEUE_FULL
    except RequestFailedError as error:
        code = error.code
    front.metrics.refused(code.value, call.params.service_tier)
    if code is FailureCode.TOO_LONG:
        raise invalid(code.value, call.prompt_param, failure_error(code).message)
    raise failure_error(code)


async def _encode(front: Front, call: Call) -> list[int]:
    limit = front.max_request_tokens
    if call.num_chars > SLACK * limit * front.codec.max_token_bytes:
        raise _too_long(call, limit, "far more")
    try:
        prompt = await front.pool.run(call.encode)
    except TemplateRefusalError as error:
        reason = f": {error.reason}" if error.reason else "."
        raise invalid(
            "invalid_value", call.prompt_param, f"The model's chat template refuses these messages{reason}"
        ) from None
    if not prompt:
        raise invalid("invalid_value", call.prompt_param, "The prompt has no tokens.")
    if len(prompt) >= limit:
        raise _too_long(call, limit, str(len(prompt)))
    return prompt


def _too_long(call: Call, limit: int, found: str) -> ApiError:
    message = f"The context holds {limit} tokens, prompt and answer together; the prompt has {found}."
    return invalid(FailureCode.TOO_LONG.value, call.prompt_param, message)


def _new_request(front: Front, call: Call, prompt: list[int]) -> NewRequest:
    """Return the request in tokens; `max_tokens` is cut to what the context still holds."""
    room = front.max_request_tokens - len(prompt)
    wanted = call.params.max_tokens or call.default_max_tokens or room
    return NewRequest(
        request_id=call.request_id,
        prompt=pack_token_ids(prompt),
        sampling=call.params.sampling(min(wanted, room), front.draw_seed),
        arrival_s=call.arrival_s,
        limit_s=front.settings.request_limit_s,
        request_class=call.params.request_class,
        qoe=call.params.qoe,
    )


def _shape(front: Front, call: Call) -> Shape:
    return Shape(
        is_chat=call.is_chat,
        answer_id=f"{'chatcmpl' if call.is_chat else 'cmpl'}-{call.request_id}",
        created_unix_s=call.created_unix_s,
        model=front.model,
        service_tier=call.params.service_tier,
        include_usage=call.params.include_usage,
    )


class _Collector:
    """Takes the tokens of an answer that is sent whole."""

    def __init__(self, answer: AnswerText) -> None:
        self._answer = answer
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def on_tokens(self, token_ids: Sequence[int], finish: FinishReason, now_s: float) -> bool:
        self._texts.append(self._answer.push(token_ids, finish))
        return not self._answer.was_cut


async def _collect(front: Front, call: Call, session: Session, answer: AnswerText) -> web.Response:
    collector = _Collector(answer)
    session.attach(collector, front.now())
    await session.ended.wait()
    failure = front.sessions.outcome(session)
    if failure is not None:
        raise failure_error(failure)
    usage = Usage(session.request.num_prompt_tokens, answer.num_tokens)
    body = _shape(front, call).whole(collector.text, session.finish, usage)
    return web.Response(body=body, content_type="application/json")


class _Streamer:
    """Takes the tokens of a streamed answer and writes them at once."""

    __slots__ = ("_answer", "_num_pending", "_shape", "_stream")

    def __init__(self, answer: AnswerText, shape: Shape, stream: EventStream) -> None:
        self._answer = answer
        self._shape = shape
        self._stream = stream
        self._num_pending = 0  # tokens since the last chunk: their text was not decided yet

    def on_tokens(self, token_ids: Sequence[int], finish: FinishReason, now_s: float) -> bool:
        answer = self._answer
        num_before = answer.num_tokens
        text = answer.push(token_ids, finish)
        self._num_pending += answer.num_tokens - num_before
        if text:
            self._stream.write(self._shape.chunk(json_text(text), self._num_pending), now_s)
            self._num_pending = 0
        return not answer.was_cut


async def _stream(
    front: Front, call: Call, session: Session, answer: AnswerText, request: web.BaseRequest
) -> web.StreamResponse:
    shape = _shape(front, call)
    stream = await front.streams.open(request, {"x-request-id": call.public_id, "Server": "sluice"})
    try:
        if call.is_chat:
            stream.write(shape.role_chunk(), front.now())
        session.attach(_Streamer(answer, shape, stream), front.now())
        await session.ended.wait()
        stream.write(_ending(front, session, shape, answer), front.now())
        front.sessions.release(session)  # before the last bytes are taken: the client may be slow
        await stream.end()
    finally:
        front.streams.close(stream)
    return stream.response


def _ending(front: Front, session: Session, shape: Shape, answer: AnswerText) -> bytes:
    failure = front.sessions.outcome(session)
    if failure is not None:
        return b"data: " + error_body(failure_error(failure)) + b"\n\ndata: [DONE]\n\n"
    usage = Usage(session.request.num_prompt_tokens, answer.num_tokens)
    return shape.last_chunks(session.finish, usage, _estimate(session, answer.num_tokens))


def _estimate(session: Session, num_tokens: int) -> dict[str, Any]:
    """Return the server's own account of the stream, from the times of sending."""
    first_s = session.first_token_s
    return {
        "qoe": None if session.qoe is None else round(session.qoe.final(), 4),
        "ttft_s": None if first_s is None else round(first_s - session.request.arrival_s, 4),
        "tokens": num_tokens,
    }
