"""What people do with `openai`, version 2 or 3; also by way of a proxy."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import openai
from openai import OpenAI

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
    Ability,
    Order,
    check,
    check_cancelled,
    check_order,
    ends_soon,
    num_cancelled,
    raised,
    tell,
)

NAMED: dict[str, Any] = {"type": "function", "function": {"name": "order"}}


def client(base_url: str = BASE, **options: Any) -> Any:
    return OpenAI(base_url=base_url, api_key=KEY, **{"max_retries": 0, **options})


def ask(**fields: Any) -> Any:
    given = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": NUM_TOKENS, **fields}
    return client().chat.completions.create(**given)


def said(**fields: Any) -> str:
    text: str = ask(**fields).choices[0].message.content
    return text


def deltas(chunks: Iterable[Any]) -> list[Any]:
    return [chunk.choices[0].delta for chunk in chunks if chunk.choices]


def models() -> None:
    check(MODEL in [model.id for model in client().models.list()], "the model is not listed")


def chat() -> None:
    check(said(), "no text")
    parts = [{"type": "text", "text": "Be brief."}]
    check(said(messages=[{"role": "developer", "content": parts}, *MESSAGES]), "no text after a developer's message")


def stream() -> None:
    pieces = [delta.content for delta in deltas(ask(stream=True)) if delta.content]
    check(len(pieces) > 2, "it comes in one piece")
    check("".join(pieces) == said(), "another text")


def usage() -> None:
    *_, last = ask(stream=True, stream_options={"include_usage": True})
    check(last.usage.completion_tokens == NUM_TOKENS, "another count")


def choices() -> None:
    check([choice.index for choice in ask(n=2).choices] == [0, 1], "not two choices")


def logprobs() -> None:
    entries = ask(logprobs=True, top_logprobs=2).choices[0].logprobs.content
    check(len(entries) == NUM_TOKENS and len(entries[0].top_logprobs) == 2, "another count")


def stop() -> None:
    whole = said()
    end = whole[len(whole) // 2 :][:3]
    answer = ask(stop=[end]).choices[0]
    check(answer.finish_reason == "stop" and answer.message.content == whole[: whole.index(end)], "another text")


def refusal() -> None:
    error = raised(openai.BadRequestError, lambda: ask(temperature=HOT))
    check(REFUSAL in error.message, "another sentence")


def unserved() -> None:
    """An embedding in vain, after which chat goes on."""
    error = raised(openai.BadRequestError, lambda: client().embeddings.create(model=MODEL, input="fox"))
    check(UNSERVED in error.message, "another sentence")
    check(said(), "no text")


def retry() -> None:
    flaky = client(FLAKY, max_retries=1).chat.completions
    check(flaky.create(model=MODEL, messages=MESSAGES, max_tokens=2).choices, "no answer")


def timeout() -> None:
    slow = client(timeout=LIMIT_S).chat.completions
    fields = {"model": MODEL, "messages": MESSAGES, "max_tokens": MANY_TOKENS, "extra_body": {"ignore_eos": True}}
    raised(openai.APITimeoutError, lambda: slow.create(**fields))


def cancel() -> None:
    before = num_cancelled()
    chunks = ask(stream=True, max_tokens=MANY_TOKENS, extra_body={"ignore_eos": True})
    next(chunks)
    chunks.close()
    check_cancelled(before)


def thinking() -> None:
    message = ask(extra_body=THINK, max_tokens=96).choices[0].message
    check(message.reasoning_content, "no thought")
    check("</think>" not in (message.content or "") + message.reasoning_content, "a tag is in the text")


def thinking_stream() -> None:
    found = deltas(ask(extra_body=THINK, max_tokens=96, stream=True))
    thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in found)
    check(thought == ask(extra_body=THINK, max_tokens=96).choices[0].message.reasoning_content, "another thought")


def thinking_off() -> None:
    message = ask(extra_body=SPEAK).choices[0].message
    check(message.content and not getattr(message, "reasoning_content", None), "it thinks")
    message = ask(reasoning_effort="none").choices[0].message
    check(message.content and not getattr(message, "reasoning_content", None), "it thinks")


def history() -> None:
    answer = ask(extra_body=THINK, max_tokens=96).choices[0].message
    for before in (answer, answer.model_dump()):
        check(said(messages=[*MESSAGES, before, *MESSAGES], extra_body=SPEAK), "no text")


def tools_auto() -> None:
    message = ask(tools=[TOOL], tool_choice="auto").choices[0].message
    check(message.content or message.tool_calls, "nothing")


def call_of(**fields: Any) -> Any:
    answer = ask(tools=[TOOL], max_tokens=100, **fields).choices[0]
    (call,) = answer.message.tool_calls
    check(call.function.name == "order" and answer.finish_reason in ("tool_calls", "stop"), "another end")
    check_order(call.function.arguments)
    return call


def tools_stream() -> None:
    chunks = ask(tools=[TOOL], tool_choice="required", max_tokens=100, stream=True, parallel_tool_calls=False)
    calls = [call for delta in deltas(chunks) for call in delta.tool_calls or []]
    check(calls[0].function.name == "order" and calls[0].id, "no name")
    check_order("".join(call.function.arguments or "" for call in calls))


def tool_loop() -> None:
    call = call_of(tool_choice="required")
    asked = {"role": "assistant", "tool_calls": [call.model_dump(exclude_none=True)]}
    result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    check(ask(messages=[*MESSAGES, asked, result], tools=[TOOL]).choices[0].message, "no answer")


def json_schema() -> None:
    check_order(said(response_format=FORMAT, max_tokens=100))


def json_object() -> None:
    text = said(response_format={"type": "json_object"}, extra_body=ends_soon())
    check(isinstance(json.loads(text), dict), "no object")


def parse() -> None:
    completions = client().chat.completions
    answer = completions.parse(model=MODEL, messages=MESSAGES, response_format=Order, max_tokens=100)
    check(isinstance(answer.choices[0].message.parsed, Order), "nothing is parsed")
    called = completions.parse(
        model=MODEL, messages=MESSAGES, tools=[openai.pydantic_function_tool(Order)], tool_choice="required"
    )
    check(isinstance(called.choices[0].message.tool_calls[0].function.parsed_arguments, Order), "no call is parsed")


def stream_helper() -> None:
    whole = said()
    given: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "stop": [whole[-3:]]}
    with client().chat.completions.stream(**given) as events:
        kinds = [event.type for event in events]
        text = events.get_final_completion().choices[0].message.content
    check(kinds.count("content.delta") > 2 and "content.done" in kinds, "other events")
    check(text == whole[: whole.index(whole[-3:])], "another text")


ABILITIES: dict[str, Ability] = {
    "models": models,
    "chat": chat,
    "stream": stream,
    "usage": usage,
    "choices": choices,
    "logprobs": logprobs,
    "stop": stop,
    "refusal": refusal,
    "unserved": unserved,
    "retry": retry,
    "timeout": timeout,
    "cancel": cancel,
    "thinking": thinking,
    "thinking_stream": thinking_stream,
    "thinking_off": thinking_off,
    "history": history,
    "tools_auto": tools_auto,
    "tools_required": lambda: call_of(tool_choice="required"),
    "tools_named": lambda: call_of(tool_choice=NAMED),
    "tools_stream": tools_stream,
    "tool_loop": tool_loop,
    "json_schema": json_schema,
    "json_object": json_object,
    "parse": parse,
    "stream_helper": stream_helper,
}

if __name__ == "__main__":
    tell({name: ability for name, ability in ABILITIES.items() if (name, FLAKY) != ("retry", "-")})
