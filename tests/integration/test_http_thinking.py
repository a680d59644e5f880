"""Thinking told apart over a real socket: whole and streamed, resumed, over a WebSocket, moved, and in SDKs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import openai
import pytest
import pytest_asyncio

from services.dispatcher.build import load_text
from shared.messages.report import WorkerPhase
from shared.messages.request import Submit
from shared.types import FinishReason, Thinking
from sluice_client import AsyncSluiceClient
from tests.support.dispatchers import COMPLETIONS, HELLO, Running, index_of, make_settings, running_dispatcher
from tests.support.fake_worker import FakeWorker, make_status
from tests.support.socket_talks import talk
from tests.support.text_models import OPENER, THINKER, byte_level_json, thinking_json, write_model_folder
from tests.support.waiting import until

THOUGHT: Final = 'Hm, "<thin": 你好 🦊?\n\n- so'
SAID: Final = "Hello 🦊 world.\n\n<think>no</think>"
ANSWER: Final = f"<think>\n{THOUGHT}\n</think>\n\n{SAID}"
NAMES: Final = ("reasoning", "reasoning_content")

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module", params=["tokens", "text"])
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A model whose tags are tokens, and one that spells them."""
    tokenizer = thinking_json() if request.param == "tokens" else byte_level_json()
    return write_model_folder(tmp_path_factory.mktemp("thinker"), tokenizer, template=THINKER)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(folder: Path) -> AsyncIterator[Running]:
    """A worker that thinks before each answer; choice i says i letters more."""

    def script(submit: Submit) -> Sequence[int]:
        return [*running.encode(ANSWER + "x" * index_of(submit)), running.end_id]

    async with running_dispatcher(load_text(make_settings(folder)), folder, script) as running:
        yield running


def thinking_ids(running: Running) -> list[int]:
    return running.encode(ANSWER[: ANSWER.index("</think>") + len("</think>")])


def parts_of(events: Iterable[Any], count: int = 1) -> list[tuple[str, str]]:
    """Return what each choice thinks and says; both names hold the same."""
    thoughts, said = [""] * count, [""] * count
    for event in events:
        for choice in event.get("choices", ()):
            delta = choice["delta"]
            assert delta.get(NAMES[0]) == delta.get(NAMES[1])
            assert delta.get(NAMES[0], "-") != ""
            thoughts[choice["index"]] += delta.get(NAMES[0], "")
            said[choice["index"]] += delta.get("content", "")
    return list(zip(thoughts, said, strict=True))


def message_of(body: Any, index: int = 0) -> tuple[Any, Any]:
    message = body["choices"][index]["message"]
    assert message[NAMES[0]] == message[NAMES[1]]
    return message[NAMES[0]], message["content"]


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        ({}, (THOUGHT, SAID)),
        ({"n": 3}, (THOUGHT, SAID)),
        ({"logprobs": True, "top_logprobs": 2}, (THOUGHT, SAID)),
        ({"stop": "nowhere, but begins like no"}, (THOUGHT, SAID)),
        ({"stop": "world"}, (THOUGHT, "Hello 🦊 ")),
        ({"stop": "\n\n- so"}, ('Hm, "<thin": 你好 🦊?', "")),
        ({"stop": "</think>"}, (THOUGHT, "")),
        ({"stop": "nk>\n\nHello"}, (THOUGHT + "\n</thi", "")),
        ({"chat_template_kwargs": {"enable_thinking": True}}, (THOUGHT, SAID)),
        ({"chat_template_kwargs": {"enable_thinking": False}}, ("", ANSWER)),
        ({"reasoning_effort": "none"}, ("", ANSWER)),
        ({"reasoning_effort": "none", "logprobs": True}, ("", ANSWER)),
    ],
)
async def test_whole_and_streamed_answers_have_the_same_parts(
    served: Running, body: dict[str, Any], parts: tuple[str, str]
) -> None:
    count = body.get("n", 1)
    status, whole = await served.post(**body)
    assert status == 200, whole
    expected = [(parts[0], parts[1] + "x" * index) for index in range(count)]
    found = [message_of(whole, index) for index in range(count)]
    assert found == [(thought or None, said or (None if thought else "")) for thought, said in expected]
    events = await served.stream(**body, stream_options={"include_usage": True})
    assert parts_of(events, count) == expected
    assert events[-1]["usage"] == whole["usage"]
    details = whole["usage"]["completion_tokens_details"]
    if parts == (THOUGHT, SAID):
        assert details == {"reasoning_tokens": count * len(thinking_ids(served))}
    elif parts[0] == "":
        assert details == {"reasoning_tokens": 0}


async def test_log_probabilities_are_those_of_the_whole_text_tags_included(served: Running) -> None:
    _, whole = await served.post(logprobs=True)
    events = await served.stream(logprobs=True)
    streamed = [
        entry
        for event in events
        for choice in event["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == whole["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in streamed for byte in entry["bytes"]).decode() == ANSWER


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answer_that_ends_while_it_thinks_says_nothing(served: Running, streamed: bool) -> None:
    for max_tokens in range(1, len(thinking_ids(served)) + 1):
        if streamed:
            events = await served.stream(max_tokens=max_tokens, stream_options={"include_usage": True})
            (parts,) = parts_of(events)
            reason, usage = events[-2]["choices"][0]["finish_reason"], events[-1]["usage"]
            assert all("content" not in event["choices"][0]["delta"] for event in events[1:-1] if parts[0])
        else:
            _, body = await served.post(max_tokens=max_tokens)
            parts = message_of(body)
            reason, usage = body["choices"][0]["finish_reason"], body["usage"]
        assert reason == "length"
        thought, said = parts
        if not thought:  # nothing is clear yet: half a tag is text, a whole one is not
            assert "<think>".startswith((said or "").strip())
            continue
        assert said in ("", None)
        assert usage["completion_tokens_details"]["reasoning_tokens"] == max_tokens
        assert (THOUGHT + "\n</think>").startswith(thought.rstrip("\ufffd"))
    assert thought == THOUGHT


@pytest.mark.parametrize("budget", [0, 1, 512, None])
async def test_workers_are_told_of_the_tags_and_the_budget(served: Running, budget: int | None) -> None:
    asked: dict[str, Any] = {} if budget is None else {"thinking_token_budget": budget}
    status, body = await served.post(n=2, **asked)
    tags = served.front.think_tags
    assert tags is not None
    if tags.opening_id is None or tags.closing_id is None:
        assert (status == 200) == (budget is None)
        assert budget is None or body["error"]["param"] == "thinking_token_budget"
        assert served.worker.submits[-1].sampling.thinking is None
        return
    assert status == 200
    assert [submit.sampling.thinking for submit in served.worker.submits[-2:]] == [
        Thinking(opening_id=tags.opening_id, closing_id=tags.closing_id, is_open=False, budget=budget)
    ] * 2
    status, body = await served.post(chat_template_kwargs={"enable_thinking": False}, **asked)
    assert status == 200
    assert served.worker.submits[-1].sampling.thinking is None, "the prompt has closed the thinking"
    status, body = await served.post(COMPLETIONS, **asked)
    assert (status, body.get("error", {}).get("param")) == (
        (200, None) if budget is None else (400, "thinking_token_budget")
    )


@pytest.mark.parametrize("budget", [-1, 1.5, "8", True])
async def test_a_budget_is_a_number_of_tokens(served: Running, budget: Any) -> None:
    status, body = await served.post(thinking_token_budget=budget)
    assert status == 400
    assert body["error"]["param"] == "thinking_token_budget"


async def test_completions_are_not_looked_at(served: Running) -> None:
    _, body = await served.post(COMPLETIONS, max_tokens=100)
    assert body["choices"][0]["text"] == ANSWER
    assert "message" not in body["choices"][0]
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    events = await served.stream(COMPLETIONS, max_tokens=100)
    assert "".join(event["choices"][0]["text"] for event in events) == ANSWER


@pytest.mark.parametrize("body", [{}, {"n": 2, "logprobs": True}, {"stop": "world"}, {"max_tokens": 9}])
async def test_a_stream_cut_after_any_event_goes_on_with_the_part_that_it_was_in(
    served: Running, body: dict[str, Any]
) -> None:
    count = body.get("n", 1)

    async def events_of(key: str, seen: str = "") -> list[tuple[str, Any]]:
        headers = {"Idempotency-Key": key, **({"Last-Event-ID": seen} if seen else {})}
        async with served.ask(headers=headers, stream=True, **body) as response:
            blocks = (await response.text()).strip().split("\n\n")
        assert blocks.pop() == "data: [DONE]"
        pairs = [block.removeprefix("id: ").split("\ndata: ") for block in blocks]
        return [(name, json.loads(data)) for name, data in pairs]

    key = f"key {served.front.settings.model} {body}"
    first = await events_of(key)
    whole = parts_of((event for _, event in first), count)
    for k in range(1, len(first) + 1, 2 * count - 1):
        if k % 4 > 1:  # as by way of another dispatcher
            served.front.live._kept.clear()
            served.front.live._num_kept_tokens = 0
        rest = await events_of(key, first[k - 1][0])
        assert parts_of((event for _, event in [*first[:k], *rest]), count) == whole


async def say(running: Running) -> None:
    """Answer the next request token by token."""
    (item,) = await running.begun()
    await until(lambda: all(session.reader for session in running.table))
    for token in running.encode(ANSWER):
        await running.worker.emit(item, [token])
    await running.worker.emit(item, [running.end_id], FinishReason.STOP)
    running.worker.running.clear()


async def test_a_websocket_has_the_events_of_http(folder: Path) -> None:
    async with running_dispatcher(load_text(make_settings(folder)), folder) as running:
        async with talk(running) as client:
            messages, _ = await asyncio.gather(client.answer("a"), say(running))
        events, _ = await asyncio.gather(running.stream(), say(running))
    heard = [message["data"]["choices"] for message in messages if message["type"] == "event"]
    assert heard == [event["choices"] for event in events]
    assert parts_of(events) == [(THOUGHT, SAID)]


async def test_an_answer_that_lost_its_worker_at_any_token_goes_on_in_its_part(folder: Path) -> None:
    model = load_text(make_settings(folder))
    words = model.codec.tokenizer.encode(ANSWER, add_special_tokens=False).ids
    for num_tokens in range(1, len(words), 5):
        async with running_dispatcher(model, folder) as running:
            other = FakeWorker(running.bus, "w1", lambda _: [*words, running.end_id])
            await other.start()
            asked = asyncio.create_task(running.stream())
            (item,) = await running.begun()
            await running.worker.emit(item, words[:num_tokens])
            running.worker.forgotten = True
            await running.view(make_status(phase=WorkerPhase.STOPPED), make_status("w1"))
            assert parts_of(await asked) == [(THOUGHT, SAID)]
            assert other.submits[0].generated_ids().tolist() == words[:num_tokens]
            await other.stop()


@pytest.mark.parametrize(
    ("fields", "kwargs", "answer", "parts"),
    [
        ({}, {"thinking": True}, "\nab\n</think>\n\ncd", ("ab", "cd")),
        ({}, {"thinking": True}, "<think>\nab</think>cd", ("ab", "cd")),
        ({}, {}, "ab</think>cd", ("", "ab</think>cd")),
        ({"reasoning_parser": "deepseek_r1"}, {"thinking": True}, "ab</think>cd", ("ab", "cd")),
        ({"reasoning_parser": "deepseek_r1"}, {"thinking": False}, "ab", ("", "ab")),
        ({"reasoning_parser": "none"}, {"thinking": True}, "ab</think>cd", None),
    ],
)
async def test_the_prompt_and_the_setting_say_where_an_answer_begins(
    tmp_path: Path, fields: dict[str, Any], kwargs: dict[str, Any], answer: str, parts: tuple[str, str] | None
) -> None:
    folder = write_model_folder(tmp_path, thinking_json(), template=OPENER)
    settings = make_settings(folder, **fields)
    async with running_dispatcher(load_text(settings), folder, answer, **fields) as running:
        _, body = await running.post(chat_template_kwargs=kwargs)
    message = body["choices"][0]["message"]
    if parts is None:
        assert message == {"role": "assistant", "content": answer, "refusal": None}
    else:
        assert message_of(body) == (parts[0] or None, parts[1])


@pytest.mark.parametrize(
    ("said", "answer", "parts"),
    [
        ("<think>\nHm", ", so\n</think>\n\nHello", (", so", "Hello")),
        ("<think>\nHm\n</think>", "\n\nHello", ("", "Hello")),
        ("Hello", " <think>world</think>", ("", " <think>world</think>")),
        ("", "<think>a</think>b", ("a", "b")),
    ],
)
@pytest.mark.parametrize("parser", ["qwen3", "deepseek_r1"])
async def test_an_answer_that_continues_a_message_goes_on_in_its_part(
    folder: Path, said: str, answer: str, parts: tuple[str, str], parser: str
) -> None:
    settings = make_settings(folder, reasoning_parser=parser)
    messages = [*HELLO, {"role": "assistant", "content": said}]
    async with running_dispatcher(load_text(settings), folder, answer, reasoning_parser=parser) as running:
        _, whole = await running.post(messages=messages, continue_final_message=True)
        assert message_of(whole) == (parts[0] or None, parts[1])
        events = await running.stream(messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert parts_of(events) == [parts]


async def test_the_openai_package_and_our_own_client_read_both_parts(served: Running) -> None:
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        ask: dict[str, Any] = {"model": "tiny", "messages": HELLO, "reasoning_effort": "high"}
        message = (await client.chat.completions.create(**ask)).choices[0].message
        assert message.content == SAID
        assert [(message.model_extra or {})[name] for name in NAMES] == [THOUGHT, THOUGHT]
        thought = ""
        async for chunk in await client.chat.completions.create(**ask, stream=True):
            thought += (chunk.choices[0].delta.model_extra or {}).get("reasoning_content", "")
        assert thought == THOUGHT
    async with AsyncSluiceClient([served.url], model="tiny") as own:
        answer = own.chat("hi")
        assert "".join([text async for text in answer]) == SAID
        assert (answer.reasoning, answer.text) == (THOUGHT, SAID)
