"""What people do with pydantic-ai's agents, and by its model directly."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI
from pydantic_ai import Agent, ModelHTTPError, NativeOutput
from pydantic_ai.direct import model_request, model_request_stream
from pydantic_ai.exceptions import ModelAPIError
from pydantic_ai.messages import ModelRequest, ThinkingPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.tools import ToolDefinition

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
    SCHEMA,
    SPEAK,
    THINK,
    Order,
    check,
    check_cancelled,
    check_order,
    num_cancelled,
    tell,
)

TOOL = ToolDefinition(name="order", description="Order tea.", parameters_json_schema=SCHEMA, strict=True)
TOOLS = ModelRequestParameters(function_tools=[TOOL])


def model(base_url: str = BASE, **options: Any) -> Any:
    client = AsyncOpenAI(base_url=base_url, api_key=KEY, **{"max_retries": 0, **options})
    return OpenAIChatModel(MODEL, provider=OpenAIProvider(openai_client=client))


def settings(**fields: Any) -> Any:
    return {"temperature": 0, "max_tokens": NUM_TOKENS, **fields}


def agent(**options: Any) -> Any:
    return Agent(model(), **{"model_settings": settings(), **options})


async def said(**fields: Any) -> str:
    text: str = (await agent(model_settings=settings(**fields)).run(QUESTION)).output
    return text


async def chat() -> None:
    check(await said(), "no text")
    check((await agent(instructions="Be brief.").run(QUESTION)).output, "no text after instructions")


async def stream() -> None:
    async with agent().run_stream(QUESTION) as result:
        pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
    check(len(pieces) > 2, "it comes in one piece")
    check("".join(pieces) == await said(), "another text")


async def usage() -> None:
    async with agent().run_stream(QUESTION) as result:
        await result.get_output()
        used = result.usage() if callable(result.usage) else result.usage
    check(used.output_tokens == NUM_TOKENS, "another count")


async def logprobs() -> None:
    answer = await agent(model_settings=settings(openai_logprobs=True, openai_top_logprobs=2)).run(QUESTION)
    details = answer.all_messages()[-1].provider_details
    check(len(details["logprobs"]) == NUM_TOKENS, "another count")


async def stop() -> None:
    whole = await said()
    end = whole[len(whole) // 2 :][:3]
    check(await said(stop_sequences=[end]) == whole[: whole.index(end)], "another text")


async def refusal() -> None:
    try:
        await said(temperature=HOT)
    except ModelHTTPError as error:
        check(error.status_code == 400 and REFUSAL in str(error.body), "another sentence")
    else:
        check(False, "nothing was raised")


async def retry() -> None:
    check((await Agent(model(FLAKY, max_retries=1), model_settings=settings()).run(QUESTION)).output, "no text")


async def timeout() -> None:
    try:
        await said(timeout=LIMIT_S, max_tokens=MANY_TOKENS, extra_body={"ignore_eos": True})
    except ModelAPIError as error:
        check("timed out" in str(error).lower(), str(error))
    else:
        check(False, "nothing was raised")


async def cancel() -> None:
    before = num_cancelled()
    long = settings(max_tokens=MANY_TOKENS, extra_body={"ignore_eos": True})
    async with agent(model_settings=long).run_stream(QUESTION) as result:
        async for _ in result.stream_text(delta=True):
            break
    check_cancelled(before)


async def thoughts(**fields: Any) -> str:
    answer = await model_request(
        model(), [ModelRequest.user_text_prompt(QUESTION)], model_settings=settings(max_tokens=96, **fields)
    )
    return "".join(part.content for part in answer.parts if isinstance(part, ThinkingPart))


async def thinking() -> None:
    check(await thoughts(extra_body=THINK), "no thought")


async def thinking_stream() -> None:
    asked = [ModelRequest.user_text_prompt(QUESTION)]
    fields = settings(max_tokens=96, extra_body=THINK)
    async with model_request_stream(model(), asked, model_settings=fields) as events:
        async for _ in events:
            pass
        parts = events.get().parts
    thought = "".join(part.content for part in parts if isinstance(part, ThinkingPart))
    check(thought and thought == await thoughts(extra_body=THINK), "another thought")


async def thinking_off() -> None:
    check(not await thoughts(extra_body=SPEAK), "it thinks")
    check(not await thoughts(openai_reasoning_effort="none"), "it thinks")


async def history() -> None:
    asked = ModelRequest.user_text_prompt(QUESTION)
    thoughtful = settings(max_tokens=96, extra_body=THINK)
    answer = await model_request(model(), [asked], model_settings=thoughtful)
    check((await agent().run(QUESTION, message_history=[asked, answer])).output, "no text")


async def requested(messages: list[Any], **fields: Any) -> Any:
    return await model_request(
        model(), messages, model_settings=settings(max_tokens=100, **fields), model_request_parameters=TOOLS
    )


def call_in(answer: Any) -> ToolCallPart:
    (call,) = [part for part in answer.parts if isinstance(part, ToolCallPart)]
    check_order(call.args)
    return call


async def tools_auto() -> None:
    check((await requested([ModelRequest.user_text_prompt(QUESTION)])).parts, "nothing")


async def call_of(choice: Any) -> None:
    call_in(await requested([ModelRequest.user_text_prompt(QUESTION)], tool_choice=choice))


async def tools_stream() -> None:
    asked = [ModelRequest.user_text_prompt(QUESTION)]
    fields = settings(max_tokens=100, tool_choice="required")
    async with model_request_stream(model(), asked, model_settings=fields, model_request_parameters=TOOLS) as events:
        async for _ in events:
            pass
        call_in(events.get())


async def tool_loop() -> None:
    asked = ModelRequest.user_text_prompt(QUESTION)
    answer = await requested([asked], tool_choice="required")
    call = call_in(answer)
    result = ModelRequest(parts=[ToolReturnPart("order", "done", tool_call_id=call.tool_call_id)])
    check((await requested([asked, answer, result])).parts, "no answer")


async def filled(output_type: Any) -> None:
    found = await agent(output_type=output_type, model_settings=settings(max_tokens=100)).run(QUESTION)
    check(isinstance(found.output, Order), "nothing is filled in")


async def stream_helper() -> None:
    async with agent().run_stream_events(QUESTION) as events:
        kinds = [event.event_kind async for event in events]
    check(kinds.count("part_delta") > 2 and kinds[-1] == "agent_run_result", "other events")


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
            "tools_named": lambda: call_of(["order"]),
            "tools_stream": tools_stream,
            "tool_loop": tool_loop,
            "json_schema": lambda: filled(NativeOutput(Order)),
            "parse": lambda: filled(Order),
            "stream_helper": stream_helper,
        }
    )
