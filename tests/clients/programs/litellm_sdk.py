"""What people do with LiteLLM's own functions."""

from __future__ import annotations

import json
from typing import Any

import litellm

from tests.clients.programs.trying import (
    BASE,
    FLAKY,
    FORMAT,
    HOT,
    KEY,
    LIMIT_S,
    MANY_TOKENS,
    MESSAGES,
    MODEL,
    NUM_TOKENS,
    REFUSAL,
    SPEAK,
    THINK,
    TOOL,
    UNSERVED,
    Order,
    check,
    check_cancelled,
    check_order,
    ends_soon,
    num_cancelled,
    raised,
    tell,
)

NAME = f"openai/{MODEL}"
litellm.suppress_debug_info = True


def ask(**fields: Any) -> Any:
    given: dict[str, Any] = {"base_url": BASE, "messages": MESSAGES, "temperature": 0, "max_tokens": NUM_TOKENS}
    return litellm.completion(NAME, api_key=KEY, **{"num_retries": 0, **given, **fields})


def said(**fields: Any) -> str:
    text: str = ask(**fields).choices[0].message.content
    return text


def chat() -> None:
    check(said(), "no text")
    first = {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}
    check(said(messages=[first, *MESSAGES]), "no text after a developer's message")


def stream() -> None:
    pieces = [chunk.choices[0].delta.content for chunk in ask(stream=True)]
    check(len(pieces) > 2, "it comes in one piece")
    check("".join(piece or "" for piece in pieces) == said(), "another text")


def usage() -> None:
    *_, last = ask(stream=True, stream_options={"include_usage": True})
    check(last.usage.completion_tokens == NUM_TOKENS, "another count")


def logprobs() -> None:
    found = ask(logprobs=True, top_logprobs=2).choices[0].logprobs
    content = found["content"] if isinstance(found, dict) else found.content
    check(len(content) == NUM_TOKENS, "another count")


def stop() -> None:
    whole = said()
    end = whole[len(whole) // 2 :][:3]
    check(said(stop=[end]) == whole[: whole.index(end)], "another text")


def refusal() -> None:
    error = raised(litellm.BadRequestError, lambda: ask(temperature=HOT))
    check(REFUSAL in str(error), "another sentence")


def unserved() -> None:
    """An embedding in vain, after which chat goes on."""

    def embed() -> object:
        return litellm.embedding(NAME, input=["fox"], api_base=BASE, api_key=KEY, num_retries=0)

    check(UNSERVED in str(raised(litellm.BadRequestError, embed)) and said(), "another sentence")


def timeout() -> None:
    fields: dict[str, Any] = {"timeout": LIMIT_S, "max_tokens": MANY_TOKENS, "extra_body": {"ignore_eos": True}}
    raised(litellm.Timeout, lambda: ask(**fields))


def cancel() -> None:
    before = num_cancelled()
    chunks = ask(stream=True, max_tokens=MANY_TOKENS, extra_body={"ignore_eos": True})
    next(chunks)
    chunks.completion_stream.close()
    check_cancelled(before)


def thinking() -> None:
    check(ask(extra_body=THINK, max_tokens=96).choices[0].message.reasoning_content, "no thought")


def thinking_stream() -> None:
    chunks = ask(extra_body=THINK, max_tokens=96, stream=True)
    thought = "".join(getattr(chunk.choices[0].delta, "reasoning_content", None) or "" for chunk in chunks)
    check(thought == ask(extra_body=THINK, max_tokens=96).choices[0].message.reasoning_content, "another thought")


def thinking_off() -> None:
    check(said(extra_body=SPEAK), "no text")
    check(said(reasoning_effort="none", allowed_openai_params=["reasoning_effort"]), "no text")


def history() -> None:
    answer = ask(extra_body=THINK, max_tokens=96).choices[0].message
    for before in (answer, answer.model_dump()):
        check(said(messages=[*MESSAGES, before, *MESSAGES]), "no text")


def call_of(**fields: Any) -> Any:
    (call,) = ask(tools=[TOOL], max_tokens=100, **fields).choices[0].message.tool_calls
    check_order(call.function.arguments)
    return call


def tools_auto() -> None:
    message = ask(tools=[TOOL], tool_choice="auto").choices[0].message
    check(message.content or message.tool_calls, "nothing")


def tools_stream() -> None:
    chunks = ask(tools=[TOOL], tool_choice="required", max_tokens=100, stream=True)
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    check_order("".join(call.function.arguments or "" for call in calls))


def tool_loop() -> None:
    call = call_of(tool_choice="required")
    asked = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}
    result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    check(ask(messages=[*MESSAGES, asked, result], tools=[TOOL]).choices[0].message, "no answer")


def json_object() -> None:
    text = said(response_format={"type": "json_object"}, extra_body=ends_soon())
    check(isinstance(json.loads(text), dict), "no object")


if __name__ == "__main__":
    tell(
        {
            "chat": chat,
            "stream": stream,
            "usage": usage,
            "choices": lambda: check(len(ask(n=2).choices) == 2, "not two choices"),
            "logprobs": logprobs,
            "stop": stop,
            "refusal": refusal,
            "unserved": unserved,
            "retry": lambda: said(base_url=FLAKY, num_retries=1),
            "timeout": timeout,
            "cancel": cancel,
            "thinking": thinking,
            "thinking_stream": thinking_stream,
            "thinking_off": thinking_off,
            "history": history,
            "tools_auto": tools_auto,
            "tools_required": lambda: call_of(tool_choice="required"),
            "tools_named": lambda: call_of(tool_choice={"type": "function", "function": {"name": "order"}}),
            "tools_stream": tools_stream,
            "tool_loop": tool_loop,
            "json_schema": lambda: check_order(said(response_format=FORMAT, max_tokens=100)),
            "json_object": json_object,
            "parse": lambda: Order.model_validate_json(said(response_format=Order, max_tokens=100)),
        }
    )
