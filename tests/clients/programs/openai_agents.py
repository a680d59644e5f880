"""What people do with `openai-agents` over chat completions."""

from __future__ import annotations

from typing import Any

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    ReasoningItem,
    Runner,
    ToolCallItem,
    ToolCallOutputItem,
    function_tool,
)
from agents.exceptions import ModelTimeoutError
from openai import AsyncOpenAI
from openai.types.shared import Reasoning

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
    num_cancelled,
    tell,
)


def agent(settings: dict[str, Any] | None = None, base_url: str = BASE, max_retries: int = 0, **options: Any) -> Any:
    client = AsyncOpenAI(base_url=base_url, api_key=KEY, max_retries=max_retries)
    given = ModelSettings(**{"temperature": 0, "max_tokens": NUM_TOKENS, **(settings or {})})
    model = OpenAIChatCompletionsModel(MODEL, client)
    return Agent(name="teller", model=model, model_settings=given, **options)


async def run(**options: Any) -> Any:
    return await Runner.run(agent(**options), QUESTION)


async def said(**settings: Any) -> str:
    text: str = (await run(settings=settings)).final_output
    return text


async def chat() -> None:
    check(await said(), "no text")
    check((await run(instructions="Be brief.")).final_output, "no text after instructions")


async def stream() -> None:
    events = Runner.run_streamed(agent(), QUESTION).stream_events()
    raw = [event.data async for event in events if event.type == "raw_response_event"]
    pieces = [event.delta for event in raw if event.type == "response.output_text.delta"]
    check(len(pieces) > 2, "it comes in one piece")
    check("".join(pieces) == await said(), "another text")


async def usage() -> None:
    result = Runner.run_streamed(agent({"include_usage": True}), QUESTION)
    async for _ in result.stream_events():
        pass
    check(result.context_wrapper.usage.output_tokens == NUM_TOKENS, "another count")


async def logprobs() -> None:
    (item,) = (await run(settings={"top_logprobs": 2})).new_items
    check(len(item.raw_item.content[0].logprobs) == NUM_TOKENS, "another count")


async def stop() -> None:
    whole = await said()
    end = whole[len(whole) // 2 :][:3]
    check(await said(extra_args={"stop": [end]}) == whole[: whole.index(end)], "another text")


async def refusal() -> None:
    try:
        await said(temperature=HOT)
    except openai.BadRequestError as error:
        check(REFUSAL in error.message, "another sentence")
    else:
        check(False, "nothing was raised")


async def retry() -> None:
    check((await run(base_url=FLAKY, max_retries=1)).final_output, "no text")


async def timeout() -> None:
    try:
        await said(timeout=LIMIT_S, max_tokens=MANY_TOKENS, extra_body={"ignore_eos": True})
    except ModelTimeoutError:
        return
    check(False, "nothing was raised")


async def cancel() -> None:
    before = num_cancelled()
    long = {"max_tokens": MANY_TOKENS, "extra_body": {"ignore_eos": True}}
    result = Runner.run_streamed(agent(long), QUESTION)
    async for event in result.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            result.cancel()
    check_cancelled(before)


def thought_in(result: Any) -> str:
    items = [item.raw_item for item in result.new_items if isinstance(item, ReasoningItem)]
    return "".join(part.text for item in items for part in [*item.summary, *(item.content or [])])


THINKING: dict[str, Any] = {"max_tokens": 96, "extra_body": THINK}


async def thinking() -> None:
    check(thought_in(await run(settings=THINKING)), "no thought")


async def thinking_stream() -> None:
    result = Runner.run_streamed(agent(THINKING), QUESTION)
    raw = [event.data async for event in result.stream_events() if event.type == "raw_response_event"]
    kinds = ("response.reasoning_summary_text.delta", "response.reasoning_text.delta")
    found = ["".join(event.delta for event in raw if event.type == kind) for kind in kinds]
    check(any(found) and thought_in(await run(settings=THINKING)) in found, "another thought")


async def thinking_off() -> None:
    for off in ({"extra_body": SPEAK}, {"reasoning": Reasoning(effort="none")}):
        result = await run(settings=off)
        check(result.final_output and not thought_in(result), "it thinks")


async def history() -> None:
    before = (await run(settings=THINKING)).to_input_list()
    result = await Runner.run(agent(), [*before, {"role": "user", "content": QUESTION}])
    check(result.final_output, "no text")


def order(size: str, count: int) -> str:
    """Order tea."""
    return f"{count} {size}"


TOOL = function_tool(order)
TOOL.params_json_schema["properties"] = Order.model_json_schema()["properties"]


def with_tool(choice: str, **options: Any) -> dict[str, Any]:
    settings = {"tool_choice": choice, "max_tokens": 100, "parallel_tool_calls": False}
    return {"settings": settings, "tools": [TOOL], **options}


async def tools_auto() -> None:
    check((await run(**with_tool("auto"))).new_items, "nothing")


async def call_of(choice: str) -> None:
    result = await run(**with_tool(choice, tool_use_behavior="stop_on_first_tool"))
    (call,) = [item.raw_item for item in result.new_items if isinstance(item, ToolCallItem)]
    check_order(call.arguments)


async def tools_stream() -> None:
    result = Runner.run_streamed(agent(**with_tool("required", tool_use_behavior="stop_on_first_tool")), QUESTION)
    raw = [event.data async for event in result.stream_events() if event.type == "raw_response_event"]
    check_order("".join(event.delta for event in raw if event.type == "response.function_call_arguments.delta"))


async def tool_loop() -> None:
    result = await run(**with_tool("required"))
    check(any(isinstance(item, ToolCallOutputItem) for item in result.new_items), "no result")
    check(result.final_output is not None, "no answer")


async def filled() -> None:
    result = await run(settings={"max_tokens": 100}, output_type=Order)
    check(isinstance(result.final_output, Order), "nothing is filled in")


if __name__ == "__main__":
    tell(
        {
            "chat": chat,
            "stream": stream,
            "usage": usage,
            "logprobs": logprobs,
            "stop": stop,
            "refusal": refusal,
            "retry": retry,
            "timeout": timeout,
            "cancel": cancel,
            "thinking": thinking,
            "thinking_stream": thinking_stream,
            "thinking_off": thinking_off,
            "history": history,
            "tools_auto": tools_auto,
            "tools_required": lambda: call_of("required"),
            "tools_named": lambda: call_of("order"),
            "tools_stream": tools_stream,
            "tool_loop": tool_loop,
            "json_schema": filled,
            "parse": filled,
        }
    )
