"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.dispatcher.endpoints.call import CheckedCall, Prompt
from services.dispatcher.endpoints.fields import Fields
from services.dispatcher.endpoints.guide_check import read_guide
from services.dispatcher.endpoints.guided import tool_guide
from services.dispatcher.endpoints.messages import count_chars, parse_messages, text_of
from services.dispatcher.endpoints.params import parse_params
from services.dispatcher.endpoints.salt import cache_salt
from services.dispatcher.endpoints.sampling import chat_logprobs
from services.dispatcher.endpoints.template_kwargs import NAMES, PromptEnd, parse_prompt_end, parse_template_kwargs
from services.dispatcher.endpoints.tools import NAMES as TOOL_NAMES
from services.dispatcher.endpoints.tools import count_tool_chars, known_calls, parse_tool_use
from services.dispatcher.endpoints.unsupported import CHAT, SHARED_NAMES, refuse_unsupported
from services.dispatcher.http.arrival import Arrival, Caller, check_model
from services.dispatcher.http.errors import unsupported
from services.dispatcher.http.front import Front
from services.dispatcher.text.template import TemplateKwargs, ToolDefinitions
from shared.messages.request import pack_token_ids

_KNOWN = frozenset(
    {
        *(*CHAT, *SHARED_NAMES, "messages", "top_logprobs", "store", "prompt_cache_key"),
        *("safety_identifier", "thinking_token_budget", *NAMES, *TOOL_NAMES),
    }
)


def chat_call(arrival: Arrival, sender: Caller, body: dict[str, Any]) -> CheckedCall:
    """Return the checked request.

    Raises:
        ApiError: the first parameter that is not allowed.
    """
    front, fields = arrival.front, Fields(body)
    check_model(front, fields)
    refuse_unsupported(body, CHAT)
    messages = parse_messages(body.get("messages"))
    tools, tool_use, guide = None, parse_tool_use(fields), read_guide(front, fields)
    if tool_use is not None:
        guide = tool_guide(known_calls(front.codec.tool_template, front.model_calls), tool_use, guide)
        tools = tool_use.definitions()
    kwargs = parse_template_kwargs(fields, front.codec.template_for(messages, tools))
    end = parse_prompt_end(fields, messages)
    params = parse_params(fields, front.rules_for(sender.grant), chat_logprobs(fields), guide)
    if params.sampling.thinking_budget is not None and (
        front.think_tags is None or front.think_tags.closing_id is None
    ):
        raise unsupported("thinking_token_budget", "This model has no token that ends its thinking.")
    front.unknown_names.note(body, _KNOWN)
    retry = sender.retry("chat", body)
    return CheckedCall(
        request_id=arrival.request_id if retry is None else retry.request_id,
        public_id=sender.public_id,
        is_chat=True,
        params=params,
        encode=lambda: [_encode(front, messages, kwargs, end, tools, has_form=guide is not None)],
        num_prompts=1,
        num_chars=count_chars(messages) + count_tool_chars(tool_use),
        prompt_param="messages",
        default_max_tokens=None,
        cache_salt=cache_salt(sender.caller, params.salt),
        grant=sender.grant,
        arrival_s=arrival.arrival_s,
        created_unix_s=arrival.created_unix_s,
        tool_use=tool_use,
        retry=retry,
        seen=sender.seen(params, 1, retry),
    )


def _encode(
    front: Front,
    messages: Sequence[Mapping[str, Any]],
    kwargs: TemplateKwargs,
    end: PromptEnd,
    tools: ToolDefinitions,
    *,
    has_form: bool,
) -> Prompt:
    ids = front.codec.encode_chat(
        messages, add_generation_prompt=end.begins_answer, continues_last=end.continues_last, kwargs=kwargs, tools=tools
    )
    tags = front.think_tags
    if tags is None:
        return Prompt(pack_token_ids(ids))
    stage = tags.stage_within(text_of(messages[-1]), ids) if end.continues_last else tags.stage_after(ids)
    return Prompt(pack_token_ids(ids), stage=tags.stage_of_form(stage) if has_form else stage)
