"""What people do with LangChain's `ChatOpenAI`. What a model thinks it does not read."""

from __future__ import annotations

from typing import Any

import openai
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

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


def model(**options: Any) -> Any:
    given = {"base_url": BASE, "temperature": 0, "max_tokens": NUM_TOKENS, "max_retries": 0, **options}
    return ChatOpenAI(api_key=KEY, model=MODEL, **given)


def said(**options: Any) -> str:
    text: str = model(**options).invoke(QUESTION).text
    return text


def chat() -> None:
    check(said(), "no text")
    messages = [SystemMessage("Be brief.", additional_kwargs={"__openai_role__": "developer"}), HumanMessage(QUESTION)]
    check(model().invoke(messages).text, "no text after a developer's message")


def stream() -> None:
    pieces = [chunk.text for chunk in model().stream(QUESTION) if chunk.text]
    check(len(pieces) > 2, "it comes in one piece")
    check("".join(pieces) == said(), "another text")


def usage() -> None:
    counts = [chunk.usage_metadata for chunk in model(stream_usage=True).stream(QUESTION) if chunk.usage_metadata]
    check(counts[-1]["output_tokens"] == NUM_TOKENS, "another count")


def choices() -> None:
    check(len(model(n=2).generate([[HumanMessage(QUESTION)]]).generations[0]) == 2, "not two choices")


def logprobs() -> None:
    message = model(logprobs=True, top_logprobs=2).invoke(QUESTION)
    check(len(message.response_metadata["logprobs"]["content"]) == NUM_TOKENS, "another count")


def stop() -> None:
    whole = said()
    end = whole[len(whole) // 2 :][:3]
    check(model().invoke(QUESTION, stop=[end]).text == whole[: whole.index(end)], "another text")


def refusal() -> None:
    check(REFUSAL in str(raised(openai.BadRequestError, lambda: said(temperature=HOT))), "another sentence")


def unserved() -> None:
    embeddings = OpenAIEmbeddings(
        base_url=BASE, api_key=KEY, model=MODEL, check_embedding_ctx_length=False, max_retries=0
    )
    error = raised(openai.BadRequestError, lambda: embeddings.embed_query("fox"))
    check(UNSERVED in str(error) and said(), "another sentence")


def timeout() -> None:
    slow = model(timeout=LIMIT_S, max_tokens=MANY_TOKENS, extra_body={"ignore_eos": True})
    raised(openai.APITimeoutError, lambda: slow.invoke(QUESTION))


def cancel() -> None:
    before = num_cancelled()
    chunks = model(max_tokens=MANY_TOKENS, extra_body={"ignore_eos": True}).stream(QUESTION)
    next(chunks)
    chunks.close()
    check_cancelled(before)


def thinking_off() -> None:
    check(said(extra_body=SPEAK) and said(reasoning_effort="none"), "no text")


def history() -> None:
    answer = model(max_tokens=96, extra_body=THINK).invoke(QUESTION)
    check(model().invoke([HumanMessage(QUESTION), answer, HumanMessage(QUESTION)]).text, "no text")


def call_of(choice: str) -> tuple[Any, Any]:
    message = model(max_tokens=100).bind_tools([TOOL], tool_choice=choice, strict=True).invoke(QUESTION)
    (call,) = message.tool_calls
    check_order(call["args"])
    return message, call


def tools_auto() -> None:
    message = model().bind_tools([TOOL], parallel_tool_calls=False).invoke(QUESTION)
    check(message.text or message.tool_calls, "nothing")


def tools_stream() -> None:
    bound = model(max_tokens=100).bind_tools([TOOL], tool_choice="any")
    first, *rest = bound.stream(QUESTION)
    check_order(sum(rest, first).tool_calls[0]["args"])


def tool_loop() -> None:
    message, call = call_of("any")
    result = ToolMessage("done", tool_call_id=call["id"])
    check(model().bind_tools([TOOL]).invoke([HumanMessage(QUESTION), message, result]), "no answer")


def structured(method: str) -> object:
    return model(max_tokens=100).with_structured_output(Order, method=method).invoke(QUESTION)


def json_object() -> None:
    text = model(extra_body=ends_soon()).bind(response_format={"type": "json_object"}).invoke(QUESTION).text
    check(text.startswith("{"), "no object")


def parse() -> None:
    for method in ("json_schema", "function_calling"):
        check(isinstance(structured(method), Order), f"nothing is parsed by {method}")


if __name__ == "__main__":
    tell(
        {
            "chat": chat,
            "stream": stream,
            "usage": usage,
            "choices": choices,
            "logprobs": logprobs,
            "stop": stop,
            "refusal": refusal,
            "unserved": unserved,
            "retry": lambda: said(base_url=FLAKY, max_retries=1),
            "timeout": timeout,
            "cancel": cancel,
            "thinking_off": thinking_off,
            "history": history,
            "tools_auto": tools_auto,
            "tools_required": lambda: call_of("any"),
            "tools_named": lambda: call_of("order"),
            "tools_stream": tools_stream,
            "tool_loop": tool_loop,
            "json_schema": lambda: check_order(structured("json_schema")),
            "json_object": json_object,
            "parse": parse,
        }
    )
