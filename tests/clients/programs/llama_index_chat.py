"""What people do with LlamaIndex's `OpenAILike`."""

from __future__ import annotations

import gc
import json
from typing import Any

import openai
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

from tests.clients.programs.trying import (
    BASE,
    FLAKY,
    HOT,
    KEY,
    LIMIT_S,
    MANY_TOKENS,
    MODEL,
    NUM_TOKENS,
    QUESTION,
    REFUSAL,
    SPEAK,
    THINK,
    Order,
    check,
    check_cancelled,
    check_order,
    ends_soon,
    num_cancelled,
    raised,
    tell,
)

TALK = [ChatMessage(role="user", content=QUESTION)]


def order(size: str, count: int) -> str:
    """Order tea."""
    return f"{count} {size}"


TOOL = FunctionTool.from_defaults(order, fn_schema=Order)


def model(**options: Any) -> Any:
    given = {"api_base": BASE, "temperature": 0, "max_tokens": NUM_TOKENS, "max_retries": 0, **options}
    return OpenAILike(api_key=KEY, model=MODEL, is_chat_model=True, is_function_calling_model=True, **given)


def said(body: dict[str, Any] | None = None, **options: Any) -> str:
    text: str = model(additional_kwargs={"extra_body": body or {}}, **options).complete(QUESTION).text
    return text


def chat() -> None:
    check(said(), "no text")
    first = ChatMessage(role="developer", content="Be brief.")
    check(model().chat([first, *TALK]).message.content, "no text after a developer's message")


def stream() -> None:
    pieces = [chunk.delta for chunk in model().stream_complete(QUESTION) if chunk.delta]
    check(len(pieces) > 2, "it comes in one piece")
    check("".join(pieces) == said(), "another text")


def usage() -> None:
    kwargs = {"stream_options": {"include_usage": True}}
    *_, last = model(additional_kwargs=kwargs).stream_chat(TALK)
    check(last.raw.usage.completion_tokens == NUM_TOKENS, "another count")


def logprobs() -> None:
    found = model(logprobs=True, top_logprobs=2).chat(TALK).logprobs
    check(len(found) == NUM_TOKENS and len(found[0]) == 2, "another count")


def stop() -> None:
    whole = said()
    end = whole[len(whole) // 2 :][:3]
    check(model().complete(QUESTION, stop=[end]).text == whole[: whole.index(end)], "another text")


def refusal() -> None:
    check(REFUSAL in str(raised(openai.BadRequestError, lambda: model().chat(TALK, temperature=HOT))), "another text")


def timeout() -> None:
    fields: dict[str, Any] = {"timeout": LIMIT_S, "max_tokens": MANY_TOKENS}
    raised(openai.APITimeoutError, lambda: said({"ignore_eos": True}, **fields))


def cancel() -> None:
    before = num_cancelled()
    body = {"extra_body": {"ignore_eos": True}}
    chunks = model(max_tokens=MANY_TOKENS, additional_kwargs=body).stream_complete(QUESTION)
    next(chunks)
    chunks.close()
    del chunks
    gc.collect()  # its own generators hold one another, and the connection, until then
    check_cancelled(before)


def thought_of(message: Any) -> str:
    return "".join(block.content or "" for block in message.blocks if block.block_type == "thinking")


def thinking() -> None:
    answer = model(max_tokens=96, additional_kwargs={"extra_body": THINK}).chat(TALK)
    check(thought_of(answer.message), "no thought")


def thinking_stream() -> None:
    chunks = list(model(max_tokens=96, additional_kwargs={"extra_body": THINK}).stream_chat(TALK))
    pieces = [chunk.additional_kwargs.get("thinking_delta") or "" for chunk in chunks]
    check("".join(pieces) and "".join(pieces) == thought_of(chunks[-1].message), "another thought")


def history() -> None:
    answer = model(max_tokens=96, additional_kwargs={"extra_body": THINK}).chat(TALK).message
    check(model().chat([*TALK, answer, *TALK]).message.content, "no text")


def call_of(**fields: Any) -> Any:
    answer = model(max_tokens=100).chat_with_tools([TOOL], user_msg=QUESTION, **fields)
    (call,) = model().get_tool_calls_from_response(answer)
    check_order(call.tool_kwargs)
    return answer.message, call


def tools_auto() -> None:
    answer = model().chat_with_tools([TOOL], user_msg=QUESTION)
    check(answer.message.content or model().get_tool_calls_from_response(answer), "nothing")


def tools_stream() -> None:
    *_, last = model(max_tokens=100).stream_chat_with_tools([TOOL], user_msg=QUESTION, tool_required=True)
    check_order(model().get_tool_calls_from_response(last)[0].tool_kwargs)


def tool_loop() -> None:
    message, call = call_of(tool_required=True)
    result = ChatMessage(role="tool", content="done", additional_kwargs={"tool_call_id": call.tool_id})
    check(model().chat_with_tools([TOOL], chat_history=[*TALK, message, result]).message, "no answer")


def json_object() -> None:
    bound = model(additional_kwargs={"extra_body": ends_soon()})
    answer = bound.complete(QUESTION, response_format={"type": "json_object"})
    check(isinstance(json.loads(answer.text), dict), "no object")


def parse() -> None:
    answer = model(max_tokens=100).as_structured_llm(Order).complete(QUESTION)
    check(isinstance(answer.raw, Order), "nothing is parsed")


if __name__ == "__main__":
    tell(
        {
            "chat": chat,
            "stream": stream,
            "usage": usage,
            "logprobs": logprobs,
            "stop": stop,
            "refusal": refusal,
            "retry": lambda: said(api_base=FLAKY, max_retries=1),
            "timeout": timeout,
            "cancel": cancel,
            "thinking": thinking,
            "thinking_stream": thinking_stream,
            "thinking_off": lambda: check(said(SPEAK), "no text"),
            "history": history,
            "tools_auto": tools_auto,
            "tools_required": lambda: call_of(tool_required=True),
            "tools_named": lambda: call_of(tool_choice="order"),
            "tools_stream": tools_stream,
            "tool_loop": tool_loop,
            "json_object": json_object,
            "parse": parse,
        }
    )
