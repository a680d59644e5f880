"""POST /v1/chat/completions."""

from __future__ import annotations

from aiohttp import web

from services.dispatcher.http.arrival import check_model, note_arrival
from services.dispatcher.http.call import Call, Prompt
from services.dispatcher.http.fields import Fields
from services.dispatcher.http.front import Front
from services.dispatcher.http.generate import generate
from services.dispatcher.http.guard import grant_of
from services.dispatcher.http.messages import count_chars, parse_messages
from services.dispatcher.http.params import parse_params
from services.dispatcher.http.salt import cache_salt
from services.dispatcher.http.sampling import chat_logprobs
from services.dispatcher.http.unsupported import CHAT, refuse_unsupported

_KNOWN = frozenset(
    {
        *CHAT,
        *("model", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens", "temperature"),
        *("top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "service_tier", "qoe", "n"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "min_tokens", "best_of"),
        *("logprobs", "top_logprobs", "response_format", "cache_salt"),
        *("modalities", "user", "metadata", "store", "parallel_tool_calls", "prompt_cache_key", "safety_identifier"),
    }
)


async def chat_completions(front: Front, request: web.BaseRequest, public_id: str) -> web.StreamResponse:
    """Answer a conversation."""
    arrival, grant = note_arrival(front), grant_of(request)
    body = await arrival.body(request)
    fields = Fields(body)
    check_model(front, fields)
    refuse_unsupported(body, CHAT)
    messages = parse_messages(body.get("messages"))
    params = parse_params(fields, front.rules_for(grant), chat_logprobs(fields))
    front.unknown_names.note(body, _KNOWN)
    call = Call(
        request_id=arrival.request_id,
        public_id=public_id,
        is_chat=True,
        params=params,
        encode=lambda: [Prompt(front.codec.encode_chat(messages))],
        num_prompts=1,
        num_chars=count_chars(messages),
        prompt_param="messages",
        default_max_tokens=None,
        cache_salt=cache_salt(grant.identity, params.salt),
        grant=grant,
        arrival_s=arrival.arrival_s,
        created_unix_s=arrival.created_unix_s,
    )
    return await generate(front, call, request)
