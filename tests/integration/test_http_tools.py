"""Calls of tools over a real socket: whole and streamed, resumed, over a WebSocket, moved, and in SDKs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, cast

import openai
import pytest
import pytest_asyncio

from services.dispatcher.build import load_text
from services.dispatcher.text.tool_forms import FORMS
from shared.messages.report import WorkerPhase
from shared.messages.request import Submit
from shared.types import FinishReason
from sluice_client import AsyncSluiceClient, FunctionTool
from tests.support.dispatchers import HELLO, Running, index_of, make_settings, running_dispatcher
from tests.support.fake_worker import FakeWorker, Script, make_status
from tests.support.socket_talks import talk
from tests.support.text_models import CHATML, write_model_folder
from tests.support.tool_templates import ADD, TAGS, TEMPLATES, tool_json
from tests.support.waiting import until

FIRST: Final = '{"a": 1.10, "b":"}]</tool_call> \\u00e9\\"{🦊"}'
SECOND: Final = "{}"
SAID: Final = "Let me see 🦊.\n"
TOLD: Final = [("add", FIRST), ("né", SECOND)]
"""The second tool is one that the request does not have."""
ANSWERS: Final = {
    "hermes": (
        f'{SAID}<tool_call>\n{{"name": "add", "arguments": {FIRST}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "n\\u00e9", "arguments": {SECOND}}}\n</tool_call>'
    ),
    "llama3": f'<|python_tag|>{{"name": "add", "parameters": {FIRST}}}; {{"name": "né", "parameters": {SECOND}}}',
    "mistral": (
        f'{SAID}[TOOL_CALLS][{{"name": "add", "arguments": {FIRST}}}, {{"name": "né", "arguments": {SECOND}}}]'
    ),
    "phi": (
        f'{SAID}<|tool_call|>[{{"name": "add", "arguments": {FIRST}}}, {{"name": "né", "arguments": {SECOND}}}]'
        "<|/tool_call|>"
    ),
}
LONG: Final[dict[str, Any]] = {"max_model_len": 4096}
SAYS: Final = {name: "" if name == "llama3" else SAID for name in ANSWERS}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(
    scope="module", params=["hermes-plain", "hermes-text", "llama3-special", "mistral-special", "phi-plain"]
)
def family(request: pytest.FixtureRequest) -> tuple[str, str]:
    """How calls are written, and what their tags are: tokens with a text, without one, or no tokens."""
    name, _, kind = request.param.partition("-")
    return name, kind


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, family: tuple[str, str]) -> Path:
    name, kind = family
    tokenizer = tool_json(**{} if kind == "text" else {kind: FORMS[name].tags})
    template = TEMPLATES[name] + ("{# <|python_tag|> #}" if name == "llama3" else "")
    config = {"max_position_embeddings": 4096}
    return write_model_folder(tmp_path_factory.mktemp("caller"), tokenizer, template=template, config=config)


@asynccontextmanager
async def running_caller(folder: Path, script: Script | str | None = None, **fields: Any) -> AsyncIterator[Running]:
    """Serve with a worker of a long context."""
    model = load_text(make_settings(folder, **fields))
    async with running_dispatcher(model, folder, script, ready=False, **fields) as running:
        await running.view(make_status(**LONG))
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(folder: Path, family: tuple[str, str]) -> AsyncIterator[Running]:
    """A worker that calls two tools; choice i says i letters more."""

    def script(submit: Submit) -> Sequence[int]:
        return [*running.encode(ANSWERS[family[0]] + "x" * index_of(submit)), running.end_id]

    async with running_caller(folder, script) as running:
        yield running


Parts = tuple[str, list[tuple[str, str]], list[str]]


def parts_of(events: Iterable[Any], count: int = 1) -> list[Parts]:
    """Return of each choice what it says, its calls, and their ids; joined as clients do."""
    said, calls, ids = (
        [""] * count,
        [list[tuple[str, str]]() for _ in range(count)],
        [list[str]() for _ in range(count)],
    )
    for event in events:
        for choice in event.get("choices", ()):
            index, delta = choice["index"], choice["delta"]
            said[index] += delta.get("content", "")
            assert delta.get("tool_calls") != []
            for piece in delta.get("tool_calls", ()):
                function = piece["function"]
                if "id" in piece:
                    assert piece["type"] == "function"
                    assert piece["index"] == len(calls[index])
                    calls[index].append((function["name"], ""))
                    ids[index].append(piece["id"])
                name, arguments = calls[index][piece["index"]]
                calls[index][piece["index"]] = name, arguments + function["arguments"]
    return list(zip(said, calls, ids, strict=True))


def message_of(body: Any, index: int = 0) -> Parts:
    message = body["choices"][index]["message"]
    calls = message.get("tool_calls", [])
    assert all(call["type"] == "function" for call in calls)
    assert message["content"] is not None or calls
    told = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return message["content"] or "", told, [call["id"] for call in calls]


def reasons_of(events: Iterable[Any]) -> dict[int, str]:
    found = [choice for event in events for choice in event.get("choices", ()) if choice["finish_reason"]]
    return {choice["index"]: choice["finish_reason"] for choice in found}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"n": 3},
        {"logprobs": True, "top_logprobs": 2},
        {"stop": "nowhere, but begins like n"},
        {"tool_choice": "auto", "parallel_tool_calls": True},
    ],
)
async def test_whole_and_streamed_answers_have_the_same_calls(
    served: Running, family: tuple[str, str], body: dict[str, Any]
) -> None:
    count = body.get("n", 1)
    status, whole = await served.post(tools=[ADD], **body)
    assert status == 200, whole
    said = SAYS[family[0]]
    found = [message_of(whole, index) for index in range(count)]
    assert [(text, calls) for text, calls, _ in found] == [(said + "x" * index, TOLD) for index in range(count)]
    ids = [call_id for _, _, own in found for call_id in own]
    assert len(set(ids)) == 2 * count
    assert all(len(each) == (9 if family[0] == "mistral" else 29) for each in ids)
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["tool_calls"] * count
    events = await served.stream(tools=[ADD], **body, stream_options={"include_usage": True})
    assert [parts[:2] for parts in parts_of(events, count)] == [parts[:2] for parts in found]
    assert reasons_of(events) == dict.fromkeys(range(count), "tool_calls")
    assert events[-1]["usage"] == whole["usage"]
    answer = served.encode(ANSWERS[family[0]])
    assert whole["usage"]["completion_tokens"] == sum(
        len(served.encode(ANSWERS[family[0]] + "x" * index)) + 1 for index in range(count)
    )
    assert len(answer) > 20


async def test_without_tools_a_call_is_text(served: Running, family: tuple[str, str]) -> None:
    text = ANSWERS[family[0]]
    if family[1] == "special":
        for tag in FORMS[family[0]].tags:
            text = text.replace(tag, "")
    bodies: list[dict[str, Any]] = [{}, {"tools": []}, {"tools": [ADD], "tool_choice": "none"}]
    for body in bodies:
        _, whole = await served.post(**body)
        assert whole["choices"][0]["message"] == {"role": "assistant", "content": text, "refusal": None}
        assert whole["choices"][0]["finish_reason"] == "stop"
    assert parts_of(await served.stream()) == [(text, [], [])]


async def test_log_probabilities_are_those_of_the_whole_text_tags_included(
    served: Running, family: tuple[str, str]
) -> None:
    _, whole = await served.post(logprobs=True, tools=[ADD])
    events = await served.stream(logprobs=True, tools=[ADD])
    streamed = [
        entry
        for event in events
        for choice in event["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == whole["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in streamed for byte in entry["bytes"]).decode() == ANSWERS[family[0]]


async def test_an_answer_that_a_limit_cuts_has_the_same_half_of_a_call(
    served: Running, family: tuple[str, str]
) -> None:
    num_tokens = len(served.encode(ANSWERS[family[0]]))
    last = ""
    for max_tokens in range(num_tokens % 7 or 7, num_tokens + 1, 7):
        _, whole = await served.post(tools=[ADD], max_tokens=max_tokens)
        events = await served.stream(tools=[ADD], max_tokens=max_tokens)
        said, calls, _ = message_of(whole)
        assert [parts[:2] for parts in parts_of(events)] == [(said, calls)]
        assert whole["choices"][0]["finish_reason"] == "length"
        assert reasons_of(events) == {0: "length"}
        arguments = calls[0][1].rstrip("\ufffd") if calls else ""
        assert FIRST.startswith(arguments)
        assert len(arguments) >= len(last.rstrip("\ufffd"))
        last = arguments
    assert last == FIRST


async def test_an_answer_that_may_have_one_call_ends_with_it(served: Running, family: tuple[str, str]) -> None:
    body: dict[str, Any] = {"tools": [ADD], "parallel_tool_calls": False}
    _, whole = await served.post(**body)
    assert message_of(whole)[:2] == (SAYS[family[0]], TOLD[:1])
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    events = await served.stream(**body, stream_options={"include_usage": True})
    assert [parts[:2] for parts in parts_of(events)] == [(SAYS[family[0]], TOLD[:1])]
    assert events[-1]["usage"]["completion_tokens"] < len(served.encode(ANSWERS[family[0]])) - 5
    await served.until_nothing_is_left()


@pytest.mark.parametrize("body", [{}, {"n": 2, "logprobs": True}, {"max_tokens": 40}])
async def test_a_stream_cut_after_any_event_goes_on_in_the_middle_of_a_call(
    served: Running, body: dict[str, Any]
) -> None:
    count = body.get("n", 1)

    async def events_of(key: str, seen: str = "") -> list[tuple[str, Any]]:
        headers = {"Idempotency-Key": key, **({"Last-Event-ID": seen} if seen else {})}
        async with served.ask(headers=headers, stream=True, tools=[ADD], **body) as response:
            blocks = (await response.text()).strip().split("\n\n")
        assert blocks.pop() == "data: [DONE]"
        pairs = [block.removeprefix("id: ").split("\ndata: ") for block in blocks]
        return [(name, json.loads(data)) for name, data in pairs]

    key = f"key {served.front.settings.model} {body}"
    first = await events_of(key)
    whole = parts_of((event for _, event in first), count)
    for k in range(1, len(first) + 1, 12 * count - 1):
        if k % 4 > 1:  # as by way of another dispatcher
            served.front.live._kept.clear()
            served.front.live._num_kept_tokens = 0
        rest = await events_of(key, first[k - 1][0])
        assert parts_of((event for _, event in [*first[:k], *rest]), count) == whole


async def say(running: Running, answer: str) -> None:
    """Answer the next request token by token."""
    (item,) = await running.begun()
    await until(lambda: all(session.reader for session in running.table))
    for token in running.encode(answer):
        await running.worker.emit(item, [token])
    await running.worker.emit(item, [running.end_id], FinishReason.STOP)
    running.worker.running.clear()


def without_ids(choices: Any) -> Any:
    """Return the choices of an event; ids of calls are those of the request."""
    for choice in choices:
        for piece in choice["delta"].get("tool_calls", ()):
            piece.pop("id", None)
    return choices


async def test_a_websocket_has_the_events_of_http(folder: Path, family: tuple[str, str]) -> None:
    answer = ANSWERS[family[0]]
    async with running_caller(folder) as running:
        async with talk(running) as client:
            messages, _ = await asyncio.gather(client.answer("a", body={"tools": [ADD]}), say(running, answer))
        events, _ = await asyncio.gather(running.stream(tools=[ADD]), say(running, answer))
    assert [parts[:2] for parts in parts_of(events)] == [(SAYS[family[0]], TOLD)]
    heard = [without_ids(message["data"]["choices"]) for message in messages if message["type"] == "event"]
    assert heard == [without_ids(event["choices"]) for event in events]


async def test_an_answer_that_lost_its_worker_at_any_token_goes_on_in_its_call(
    folder: Path, family: tuple[str, str]
) -> None:
    words = load_text(make_settings(folder)).codec.tokenizer.encode(ANSWERS[family[0]], add_special_tokens=False).ids
    for num_tokens in range(1, len(words), 17):
        async with running_caller(folder) as running:
            other = FakeWorker(running.bus, "w1", lambda _: [*words, 2])
            await other.start()
            asked = asyncio.create_task(running.stream(tools=[ADD]))
            (item,) = await running.begun()
            await running.worker.emit(item, words[:num_tokens])
            running.worker.forgotten = True
            await running.view(make_status(phase=WorkerPhase.STOPPED), make_status("w1", **LONG))
            ((said, calls, _),) = parts_of(await asked)
            assert (said, calls) == (SAYS[family[0]], TOLD)
            assert other.submits[0].generated_ids().tolist() == words[:num_tokens]
            await other.stop()


async def test_a_loop_of_calls_and_results_is_understood(served: Running, family: tuple[str, str]) -> None:
    if family[0] == "llama3":  # its template takes one call in a message
        return
    _, body = await served.post(tools=[ADD])
    message = body["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in message["tool_calls"]]
    status, again = await served.post(tools=[ADD], messages=[*HELLO, message, *results])
    assert status == 200, again
    status, listed = await served.post("/tokenize", tools=[ADD], messages=[*HELLO, message, *results])
    assert (status, listed["count"]) == (200, again["usage"]["prompt_tokens"])
    status, bare = await served.post("/tokenize", messages=HELLO)
    assert bare["count"] < listed["count"]


async def test_thinking_comes_before_calls(tmp_path: Path) -> None:
    template = TEMPLATES["hermes"] + "{# <think></think> #}"
    folder = write_model_folder(tmp_path, tool_json(plain=TAGS), template=template)
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    answer = f"<think>I {call}</think>\n\n{call}"
    async with running_caller(folder, answer) as running:
        _, body = await running.post(tools=[ADD])
        message = body["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == (f"I {call}", None)
        assert message_of(body)[1] == [("add", "{}")]
        assert list(message) == ["role", "content", "refusal", "reasoning", "reasoning_content", "tool_calls"]


@pytest.mark.parametrize(
    ("template", "fields", "reason"),
    [
        (CHATML, {}, "This model's chat template reads no tools."),
        (TEMPLATES["hermes"], {"tool_parser": "none"}, "does not know how its model calls tools"),
        (CHATML + "{{ tools }}", {}, "does not know how its model calls tools"),
        (CHATML + "{{ tools }}", {"tool_parser": "hermes"}, None),
    ],
)
async def test_tools_that_nobody_understands_are_refused(
    tmp_path: Path, template: str, fields: dict[str, Any], reason: str | None
) -> None:
    folder = write_model_folder(tmp_path, template=template)
    async with running_caller(folder, "hi", **fields) as running:
        status, body = await running.post(tools=[ADD])
        assert status == (400 if reason else 200)
        if reason is not None:
            assert (body["error"]["code"], body["error"]["param"]) == ("unsupported_parameter", "tools")
            assert reason in body["error"]["message"]


async def test_the_openai_package_and_our_own_client_read_calls(served: Running, family: tuple[str, str]) -> None:
    said, tools = SAYS[family[0]], cast("list[FunctionTool]", [ADD])
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        ask: dict[str, Any] = {"model": "tiny", "messages": HELLO, "tools": [ADD]}
        message = (await client.chat.completions.create(**ask)).choices[0].message
        assert message.content == (said or None)
        assert [(call.function.name, call.function.arguments) for call in message.tool_calls or ()] == TOLD
        async with client.chat.completions.stream(**ask) as stream:
            async for _ in stream:
                pass
            final = (await stream.get_final_completion()).choices[0]
        assert final.finish_reason == "tool_calls"
        assert [(call.function.name, call.function.arguments) for call in final.message.tool_calls or ()] == TOLD
    async with AsyncSluiceClient([served.url], model="tiny") as own:
        answer = own.chat("hi", tools=tools)
        assert "".join([text async for text in answer]) == said
        assert [(call["function"]["name"], call["function"]["arguments"]) for call in answer.tool_calls] == TOLD
        assert answer.finish_reason == "tool_calls"
        reply = await own.chat_once("hi", tools=tools, tool_choice="auto")
        assert [call["function"]["arguments"] for call in reply.tool_calls] == [FIRST, SECOND]


STRICT: Final[dict[str, Any]] = {**ADD, "function": {**ADD["function"], "strict": True}}


@pytest.mark.parametrize(
    ("body", "is_held"),
    [
        ({"tools": [ADD]}, False),
        ({"tools": [STRICT], "tool_choice": "none"}, False),
        ({"tools": [STRICT]}, True),
        ({"tools": [ADD], "tool_choice": "required"}, True),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "add"}}}, True),
    ],
)
async def test_an_answer_that_has_to_call_is_held_to_it(served: Running, body: dict[str, Any], is_held: bool) -> None:
    status, whole = await served.post(**body, min_tokens=3, ignore_eos=True)
    assert status == 200, whole
    sampling = served.worker.submits[-1].sampling
    assert bool(sampling.grammar) == is_held
    assert (sampling.min_tokens, sampling.ignore_eos) == ((0, False) if is_held else (3, True))
    status, error = await served.post(**body, stop="a")
    assert status == (400 if is_held else 200)
    assert not is_held or (error["error"]["code"], error["error"]["param"]) == ("invalid_value", "stop")
    status, _ = await served.post(**body, stop_token_ids=[65])
    assert status == 200
    assert served.worker.submits[-1].sampling.stop_token_ids == (() if is_held else (65,))


async def test_a_form_beside_tools_leaves_the_choice(served: Running, family: tuple[str, str]) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": {"type": "object"}}}
    status, body = await served.post(tools=[ADD], response_format=form)
    if family[0] == "llama3":
        assert (status, body["error"]["param"]) == (400, "response_format.json_schema.schema")
    else:
        assert status == 200, body
        assert served.worker.submits[-1].sampling.grammar.startswith(b"%llguidance")
    status, body = await served.post(tools=[ADD], tool_choice="required", response_format=form)
    assert status == 200, body
    status, body = await served.post(tools=[ADD], guided_regex="[a-z]+")
    assert (status, body["error"]["param"]) == (400, "guided_regex")
    status, body = await served.post(tools=[ADD], tool_choice="none", guided_regex="[a-z]+")
    assert status == 200, body


async def test_the_schema_of_a_strict_tool_is_held_or_refused(served: Running) -> None:
    odd = {"type": "object", "properties": {"a": {"const": 2**60}}}
    for is_strict in (False, True):
        tool = {"type": "function", "function": {"name": "odd", "parameters": odd, "strict": is_strict}}
        status, body = await served.post(tools=[ADD, tool], tool_choice="required")
        assert status == (400 if is_strict else 200), body
    assert (body["error"]["code"], body["error"]["param"]) == ("invalid_json_schema", "tools.1.function.parameters")


async def test_every_family_is_tried(family: tuple[str, str]) -> None:
    assert set(ANSWERS) == set(FORMS)
    assert family[0] in FORMS
