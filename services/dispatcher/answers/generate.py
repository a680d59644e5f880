"""From a checked request to its answer: tokenise, admit, stream or collect, and release whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from aiohttp import web

from services.dispatcher.answers.answer_text import AnswerText
from services.dispatcher.answers.answers import collect_answer, stream_answer
from services.dispatcher.answers.live import Live, Start
from services.dispatcher.endpoints.call import CheckedCall, Choice, Prompt
from services.dispatcher.endpoints.guide_check import ONE_OF_HEADER, check_grammar
from services.dispatcher.http import quota
from services.dispatcher.http.arrival import Arrival, Caller, note_arrival
from services.dispatcher.http.cors import page_headers
from services.dispatcher.http.doorway import address_of
from services.dispatcher.http.errors import ApiError, failure_error, invalid, unsupported
from services.dispatcher.http.front import Front
from services.dispatcher.http.guard import grant_of
from services.dispatcher.http.records import make_record, report_record
from services.dispatcher.http.sse import Open
from services.dispatcher.limits.tenants import Permit
from services.dispatcher.metrics import RequestRecord
from services.dispatcher.session.request import FailureCode, NewRequest, RequestFailedError
from services.dispatcher.text.grammar_trials import TrialsFullError
from services.dispatcher.text.pool import TextPoolFullError
from services.dispatcher.text.prompts import TooManyTokensError, UntokenizableError
from services.dispatcher.text.template import TemplateRefusalError
from services.dispatcher.text.thinking import ThinkStage
from services.dispatcher.text.tool_calls import ToolCallParser
from shared.ids import RequestId

SLACK: Final = 4
"""A prompt is refused untokenised if it has this many times more characters than the context could hold."""
MAX_COPIED_TOKENS: Final = 4_000_000
"""Tokens of all prompts times `n`: each choice's submission carries its prompt."""
MAX_KEPT_LOGPROBS: Final = 4_000_000
"""Log-probabilities of an answer that is not streamed: 9 bytes for an alternative, 20 for a token (`logprobs.py`)."""


async def respond(
    make_call: Callable[[Arrival, Caller, dict[str, Any]], CheckedCall],
    front: Front,
    request: web.BaseRequest,
    public_id: str,
) -> web.StreamResponse:
    """Answer a request that came over HTTP, once it is checked; raises as `generate`."""
    arrival = note_arrival(front)
    sender = Caller(request.headers, public_id, grant_of(request))
    call = await arrival.read(request, partial(make_call, arrival, sender))
    call = replace(call, address=address_of((request.remote,)))
    call.headers.update(page_headers(front.browsers, request))
    response = await generate(front, call, partial(front.streams.open, request))
    assert response is not None, "it goes over HTTP"
    return response


async def generate(front: Front, call: CheckedCall, open_stream: Open) -> web.StreamResponse | None:
    """Answer the request: return the whole answer, or the response as which it was streamed, if it was one.

    Args:
        front: the parts to work with.
        call: what is asked.
        open_stream: begins a stream.

    Raises:
        ApiError: it was refused, or it failed and nothing has been sent yet.
    """
    choices = _make_choices(front, call)
    try:
        live = front.live.enter(call, choices)
    except ApiError as error:
        if error.code == FailureCode.DRAINING:
            front.metrics.refused(error.code, call.params.service_tier)
        call.fate.finish = error.code or "error"
        report_record(front, make_record(front, call, choices))
        raise
    try:
        if live.permit is None:
            live.permit = quota.enter(front, call)
        await _admit(front, live, live.permit)
        call.headers.update(quota.rate_headers(front, call.grant.tenant))
        if call.params.stream:
            response = await stream_answer(front, call, choices, open_stream)
        else:
            response = await collect_answer(front, call, choices)
        call.fate.finish = _finish_of(choices)
    except ApiError as error:
        call.fate.finish = error.code or "error"
        raise
    except ConnectionError:
        raise  # the client is gone
    except Exception:  # a bug, whose answer is made at the edge: here it only gets its name in metrics and log
        call.fate.finish = FailureCode.INTERNAL.value
        raise
    finally:
        for choice in choices:
            if choice.session is not None:
                front.sessions.release(choice.session)
        front.live.leave(call)
        _settle(front, live, make_record(front, call, choices))
    return response


def _settle(front: Front, live: Live, record: RequestRecord) -> None:
    """Give back what the tenant was charged too much, and report the request."""
    if live.permit is not None:
        live.permit.close(live.num_used, front.now())
    report_record(front, record)


def _make_choices(front: Front, call: CheckedCall) -> list[Choice]:
    choices: list[Choice] = []
    for _ in range(call.num_prompts):
        parent: Choice | None = None
        for _ in range(call.params.num_choices):
            choices.append(Choice(len(choices), _answer_text(front, call, len(choices)), parent))
            parent = parent or choices[-1]
    return choices


def _answer_text(front: Front, call: CheckedCall, index: int) -> AnswerText:
    sampling = call.params.sampling.common
    text = AnswerText(
        front.codec.table.start(first=call.is_chat),
        call.params.stops,
        sampling.stop_token_ids,
        min_tokens=sampling.min_tokens,
        with_tokens=sampling.logprobs is not None,
    )
    if call.tool_use is not None and front.model_calls is not None:
        form, answer = front.model_calls.form, f"{call.request_id} {index}"
        parser = ToolCallParser(form, partial(form.call_id, answer), is_parallel=call.tool_use.is_parallel)
        text.tell_calls(parser, front.model_calls.special_tags)
    return text


def _finish_of(choices: Sequence[Choice]) -> str:
    """Return how the first choice ended that did not fail; why the first one failed if all did."""
    for choice in choices:
        if choice.failure is None:
            return choice.opened.finish.name.lower()
    return (choices[0].failure or FailureCode.INTERNAL).value


async def _admit(front: Front, live: Live, permit: Permit) -> None:
    """Give every choice a session, and the first one a worker."""
    call, choices = live.call, live.choices
    try:
        async with call.stopper.waiting():
            if not live.has_replaced:
                _check_connection(front, call)
                front.sessions.check_admission(len(choices), call.params.tier, call.grant.tenant.name)
            grammar = await _hold(front, call)
            prompts = live.prompts = live.prompts or await _encode(front, call)
            _check_prompts(front, call, prompts)
            requests = _new_requests(front, live, prompts, grammar)
            _check_logprobs(call, requests)
            quota.charge(front, call, permit, _most_tokens(prompts, requests))
            sessions = front.sessions.open(requests)
            for choice, session in zip(choices, sessions, strict=True):
                choice.begin(session, prompts[choice.index // call.params.num_choices], front.think_tags)
            await front.sessions.place(sessions[0])
            choices[0].placed.set()
    except (TextPoolFullError, TrialsFullError):
        is_flex = call.params.tier.is_best_effort
        code = FailureCode.RESOURCE_UNAVAILABLE if is_flex else FailureCode.QUEUE_FULL
    except RequestFailedError as error:
        code = error.code
    else:
        return
    front.metrics.refused(code.value, call.params.service_tier)
    if code is FailureCode.TOO_LONG:
        raise invalid(code.value, call.prompt_param, failure_error(code).message)
    refusal = failure_error(code)
    refusal.headers |= quota.rate_headers(front, call.grant.tenant)
    raise refusal


async def _hold(front: Front, call: CheckedCall) -> bytes:
    """Return the grammar that the answers are held to; empty: they are free."""
    guide = call.params.guide
    if guide is None:
        return b""
    held = await check_grammar(front, guide, call.grant.tenant.name)
    if held.is_coerced:
        call.headers[ONE_OF_HEADER] = "any-of"
    return held.grammar


def _check_connection(front: Front, call: CheckedCall) -> None:
    """Raise the 429 of best effort whose connection is needed for others."""
    if call.address is None or not call.params.tier.is_best_effort or not front.doorway.is_crowded(call.address):
        return
    front.metrics.refused(FailureCode.RESOURCE_UNAVAILABLE.value, call.params.service_tier)
    text = (
        "Resource Unavailable: the connections that are left are for other requests. Try again later, or with another"
    )
    code = FailureCode.RESOURCE_UNAVAILABLE.value
    raise ApiError(429, code, f"{text} 'service_tier'.", retry_after_s=10.0, close=True)


def _check_logprobs(call: CheckedCall, requests: Sequence[NewRequest]) -> None:
    """Raise the 400 for an answer whose log-probabilities are too many to be kept until it is whole."""
    num_top = call.params.sampling.common.logprobs
    if num_top is None or call.params.stream:
        return
    num_per_token = 1 + num_top
    if sum(request.sampling.max_tokens for request in requests) * num_per_token > MAX_KEPT_LOGPROBS:
        most = MAX_KEPT_LOGPROBS // (len(requests) * num_per_token)
        message = f"An answer that is not streamed has at most {MAX_KEPT_LOGPROBS} log-probabilities: with"
        message += f" {len(requests)} choices and {num_top} alternatives per token 'max_tokens' is at most {most}."
        raise invalid("integer_above_max_value", "max_tokens", message)


def _most_tokens(prompts: Sequence[Prompt], requests: Sequence[NewRequest]) -> int:
    """Return what the request costs if every answer becomes as long as it may; each prompt counts once."""
    answers = sum(request.sampling.max_tokens - len(request.generated) for request in requests)
    return sum(prompt.num_tokens for prompt in prompts) + answers


async def _encode(front: Front, call: CheckedCall) -> list[Prompt]:
    limit = front.max_request_tokens
    if call.num_chars > SLACK * limit * front.codec.max_token_bytes:
        raise _too_long(call, limit, "far more")
    try:
        if call.params.tier.is_best_effort:
            return await front.pool.run_flex(call.encode, call.num_chars * call.num_prompts)
        return await front.pool.run(call.encode)
    except TemplateRefusalError as error:
        raise refused_by_template(error, call.prompt_param) from None
    except TooManyTokensError as error:
        raise _too_long(call, limit, str(error.num_tokens)) from None
    except UntokenizableError as error:
        raise untokenizable(error, call.prompt_param) from None


def _check_prompts(front: Front, call: CheckedCall, prompts: Sequence[Prompt]) -> None:
    limit, guide, tags = front.max_request_tokens, call.params.guide, front.think_tags
    for prompt in prompts:
        if (
            guide is not None
            and tags is not None
            and tags.closing_id is None
            and prompt.stage is not ThinkStage.SPEAKING
        ):
            message = "This model's thinking has no token at its end, so nothing says where the form would begin."
            raise unsupported(guide.param, message)
        if not prompt.num_tokens:
            raise invalid("invalid_value", call.prompt_param, "The prompt has no tokens.")
        if prompt.num_tokens >= limit:
            raise _too_long(call, limit, str(prompt.num_tokens))
    num_tokens = sum(prompt.num_tokens for prompt in prompts)
    if num_tokens * call.params.num_choices > MAX_COPIED_TOKENS:
        most = MAX_COPIED_TOKENS // num_tokens
        raise invalid("integer_above_max_value", "n", f"With {num_tokens} tokens of prompts, 'n' is at most {most}.")


def refused_by_template(error: TemplateRefusalError, param: str) -> ApiError:
    """Return the 400 for messages that the model's chat template does not take."""
    reason = f": {error.reason}" if error.reason else "."
    param = param if error.index is None else f"{param}.{error.index}"
    return invalid("invalid_value", param, f"The model's chat template refuses these messages{reason}")


def untokenizable(error: UntokenizableError, param: str) -> ApiError:
    """Return the 400 for a text of which the tokenizer makes no ids that the model has."""
    return invalid("invalid_value", param, f"'{param}' cannot be tokenised: {error.reason}.")


def _too_long(call: CheckedCall, limit: int, found: str) -> ApiError:
    message = f"The context holds {limit} tokens, prompt and answer together; the prompt has {found}."
    return invalid(FailureCode.TOO_LONG.value, call.prompt_param, message)


def _new_requests(front: Front, live: Live, prompts: Sequence[Prompt], grammar: bytes) -> list[NewRequest]:
    """Return each choice's request in tokens, prompt by prompt."""
    found: list[NewRequest] = []
    for prompt in prompts:
        found += _of_prompt(front, live.call, prompt, len(found), grammar)
    return [_go_on(live, request, start) for request, start in zip(found, live.starts, strict=True)]


def _go_on(live: Live, request: NewRequest, start: Start) -> NewRequest:
    """Return the request as one that goes on after what an earlier connection got."""
    # what lies beyond the limit now is no part of the answer: the context of the workers may have become smaller
    tokens = tuple(start.tokens[: request.sampling.max_tokens])
    return replace(request, generated=tokens, num_attempts=start.num_attempts, replaces=live.has_replaced)


def _of_prompt(front: Front, call: CheckedCall, prompt: Prompt, first_index: int, grammar: bytes) -> list[NewRequest]:
    """Return the requests of one prompt; `max_tokens` is cut to what the context still holds."""
    params = call.params
    room = front.max_request_tokens - prompt.num_tokens
    wanted = params.max_tokens or call.default_max_tokens or room
    seed = front.draw_seed() if call.retry is None else call.retry.seed
    tags = front.think_tags
    thinking = None if tags is None else tags.thinking(prompt.stage, params.sampling.thinking_budget)
    return [
        NewRequest(
            request_id=RequestId(f"{call.request_id}-{index}") if index else call.request_id,
            prompt=prompt.packed,
            sampling=sampling,
            arrival_s=call.arrival_s,
            limit_s=front.settings.request_limit_s,
            tier=params.tier,
            tenant=call.grant.tenant.name,
            max_tenant_queued=call.grant.tenant.limits.max_queued,
            qoe=params.qoe,
            slo=params.slo,
            cache_salt=call.cache_salt,
            resumable=call.retry is not None,
        )
        for index, sampling in enumerate(
            params.sampling.choices(params.num_choices, min(wanted, room), seed, thinking, grammar), start=first_index
        )
    ]
