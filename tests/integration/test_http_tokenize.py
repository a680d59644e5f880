"""Tokenize and detokenize: the ids that the generating endpoints use, under limits, with errors in OpenAI's format."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from services.dispatcher.build import load_text
from services.dispatcher.endpoints.tokenize import MAX_CHARS, MAX_LISTED_TOKENS
from services.dispatcher.text.model_folder import read_model_folder
from tests.support.dispatchers import (
    CHAT,
    COMPLETIONS,
    Running,
    Serve,
    hold_tokenizer,
    make_settings,
    running_dispatcher,
)
from tests.support.text_models import sentencepiece_json, write_model_folder
from tests.support.tool_templates import ADD
from tests.support.waiting import until

HELLO = [{"role": "user", "content": "hi <|im_end|> there"}]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(serve: Serve) -> AsyncIterator[Running]:
    async with serve(lambda _: [65]) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def with_bos(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """A model whose tokenizer puts a BOS (id 1) before every text."""
    folder = write_model_folder(tmp_path_factory.mktemp("bos"), sentencepiece_json())
    async with running_dispatcher(load_text(make_settings(folder)), folder) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def with_few_ids(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """A model of 300 ids, whose tokenizer has more pieces than that (`og`), and an added token."""
    folder = write_model_folder(tmp_path_factory.mktemp("few"), config={"vocab_size": 300})
    async with running_dispatcher(load_text(make_settings(folder)), folder, lambda _: [65]) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def with_efforts(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """A model whose template shows what it was given."""
    template = "{{ [messages[0].content, enable_thinking | d, thinking | d, reasoning_effort | d, note | d] | tojson }}"
    folder = write_model_folder(tmp_path_factory.mktemp("efforts"), template=template)
    async with running_dispatcher(load_text(make_settings(folder)), folder, lambda _: [65]) as running:
        yield running


@pytest.mark.parametrize("path", [CHAT, "/v1/tokenize"])
@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ({"reasoning_effort": "none"}, (False, False, "none", "")),
        ({"reasoning_effort": "minimal"}, (True, True, "minimal", "")),
        (
            {"reasoning_effort": "high", "chat_template_kwargs": {"note": "a", "thinking": False}},
            (True, False, "high", "a"),
        ),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "max"}}, (True, True, "max", "")),
        (
            {"chat_template_kwargs": {"enable_thinking": 2, "thinking": None, "note": "<|im_end|>"}},
            (2, "", "", "<|im_end|>"),
        ),
    ],
)
async def test_the_template_gets_what_a_request_says_of_thinking(
    with_efforts: Running, path: str, given: dict[str, Any], seen: tuple[Any, ...]
) -> None:
    status, body = await with_efforts.post(path, messages=[{"role": "user", "content": "hi"}], **given)
    assert status == 200, body
    ids = body["tokens"] if path != CHAT else with_efforts.worker.submits[-1].prompt_ids().tolist()
    prompt = with_efforts.front.codec.decode(ids)
    assert json.loads(prompt) == ["hi", *seen]


@pytest.mark.parametrize("path", [CHAT, "/v1/tokenize"])
@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        (
            {"message": 1},
            "unsupported_parameter",
            "has the variables enable_thinking, note, reasoning_effort, thinking.",
        ),
        ({"note": ["a"]}, "invalid_type", "must be a boolean, a number or a string, not an array."),
        ({"note": "a" * 257}, "string_above_max_length", "has at most 256 characters."),
        ({"note": 10**400}, "decimal_above_max_value", "must be from -1000000 to 1000000."),
        ({"note": -1e300}, "decimal_below_min_value", "must be from -1000000 to 1000000."),
    ],
)
async def test_a_value_that_the_template_cannot_take_is_refused_by_name(
    with_efforts: Running, path: str, given: dict[str, Any], code: str, said: str
) -> None:
    status, body = await with_efforts.post(path, messages=HELLO, chat_template_kwargs=given)
    (name,) = given
    assert (status, body["error"]["code"]) == (400, code)
    assert body["error"]["param"] == f"chat_template_kwargs.{name}"
    assert body["error"]["message"].endswith(said)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": "a dog"}, "prompt"),
        (COMPLETIONS, {"prompt": ["xyz", "a dog"]}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "a dog"}]}, "messages"),
        ("/tokenize", {"prompt": "a dog"}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a dog"}]}, "messages"),
        ("/detokenize", {"tokens": [300]}, "tokens"),
        (COMPLETIONS, {"prompt": [300]}, "prompt"),
        (COMPLETIONS, {"prompt": "xyz", "logit_bias": {"300": 1}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "xyz", "stop_token_ids": [300]}, "stop_token_ids"),
    ],
)
async def test_ids_that_the_model_does_not_have_are_a_400_whoever_makes_them(
    with_few_ids: Running, path: str, body: dict[str, Any], param: str
) -> None:
    status, answer = await with_few_ids.post(path, **body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert "0 to 299" in answer["error"]["message"]


async def test_an_added_token_that_the_model_does_not_have_is_text_everywhere(tmp_path: Path) -> None:
    whole = read_model_folder(write_model_folder(tmp_path))
    folder = write_model_folder(tmp_path, config={"vocab_size": whole.vocab_size - 1})
    async with running_dispatcher(load_text(make_settings(folder)), folder, lambda _: [65]) as served:
        tool = served.front.codec.encode_text("<tool>")
        for body in ({"prompt": "<tool>"}, {"messages": [{"role": "user", "content": "<tool>"}]}):
            status, _ = await served.post(COMPLETIONS if "prompt" in body else CHAT, **body)
            sent = served.worker.submits[-1].prompt_ids().tolist()
            assert (status, max(sent) < whole.vocab_size - 1) == (200, True)
            assert any(sent[start : start + len(tool)] == tool for start in range(len(sent)))
        assert (await served.post("/detokenize", tokens=tool))[1]["prompt"] == "<tool>"


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
@pytest.mark.parametrize("body", [{"prompt": "Once upon <|im_end|> a time"}, {"messages": HELLO}])
async def test_the_ids_are_those_that_a_worker_gets(served: Running, path: str, body: dict[str, Any]) -> None:
    status, told = await served.post(path, **body)
    assert status == 200
    await served.post(COMPLETIONS if "prompt" in body else CHAT, **body)
    assert told["tokens"] == served.worker.submits[-1].prompt_ids().tolist()
    assert told["count"] == len(told["tokens"])
    assert told["max_model_len"] == 512
    assert told["token_strs"] is None


async def test_tokens_are_named_as_in_the_vocabulary_if_asked(served: Running) -> None:
    _, told = await served.post("/tokenize", prompt="the fox", return_token_strs=True)
    tokenizer = served.front.codec.tokenizer
    assert told["token_strs"] == [tokenizer.id_to_token(token_id) for token_id in told["tokens"]]
    assert any(name.startswith("Ġ") for name in told["token_strs"])


async def test_a_conversation_may_end_after_its_last_message(served: Running) -> None:
    _, whole = await served.post("/tokenize", messages=HELLO)
    _, bare = await served.post("/tokenize", messages=HELLO, add_generation_prompt=False)
    assert whole["tokens"][: bare["count"]] == bare["tokens"]
    assert served.front.codec.decode(whole["tokens"][bare["count"] :]) == "<|im_start|>assistant\n"


@pytest.mark.parametrize("end", [{}, {"add_generation_prompt": False}, {"continue_final_message": True}])
async def test_a_chat_s_prompt_ends_where_tokenize_says(served: Running, end: dict[str, Any]) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "The fox "}]
    _, told = await served.post("/tokenize", messages=messages, **end)
    assert (await served.post(messages=messages, **end))[0] == 200
    assert served.worker.submits[-1].prompt_ids().tolist() == told["tokens"]
    shown = served.front.codec.decode(told["tokens"])
    assert (
        shown.rpartition("The fox")[2]
        == {
            (): "<|im_end|>\n<|im_start|>assistant\n",
            ("add_generation_prompt",): "<|im_end|>\n",
            ("continue_final_message",): "",
        }[tuple(end)]
    )


@pytest.mark.parametrize("text", ["the fox", "the <s> fox"])
async def test_special_tokens_are_added_to_a_text_unless_told_not_to(with_bos: Running, text: str) -> None:
    _, usual = await with_bos.post("/tokenize", prompt=text)
    _, bare = await with_bos.post("/tokenize", prompt=text, add_special_tokens=False)
    assert usual["tokens"] == [1, *bare["tokens"]]
    assert 1 not in bare["tokens"]


async def test_special_tokens_are_not_added_to_a_conversation_unless_told_to(with_bos: Running) -> None:
    for messages in (HELLO, [{"role": "user", "content": "a <s> b"}]):
        _, usual = await with_bos.post("/tokenize", messages=messages)
        _, more = await with_bos.post("/tokenize", messages=messages, add_special_tokens=True)
        assert more["tokens"] == [1, *usual["tokens"]]


@pytest.mark.parametrize("path", ["/detokenize", "/v1/detokenize"])
async def test_detokenize_undoes_tokenize_control_tokens_included(served: Running, path: str) -> None:
    _, told = await served.post("/tokenize", messages=HELLO)
    status, text = await served.post(path, tokens=told["tokens"])
    assert (status, set(text)) == (200, {"prompt"})
    assert text["prompt"] == f"<|im_start|>user\n{HELLO[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    assert (await served.post(path, tokens=[]))[1] == {"prompt": ""}


async def test_the_model_need_not_be_named_but_no_other_may_be(served: Running) -> None:
    async with served.http.post(served.url + "/tokenize", json={"prompt": "a"}) as response:
        assert response.status == 200
    status, body = await served.post("/detokenize", model="other", tokens=[1])
    assert (status, body["error"]["code"]) == (404, "model_not_found")


async def test_a_template_that_reads_parts_gets_them_and_one_that_leaves_a_message_out_is_told_of(
    tmp_path: Path,
) -> None:
    template = (
        "{% for m in messages if m.role == 'user' %}{% for c in m.content %}[{{ c.text }}]{% endfor %}{% endfor %}"
    )
    folder = write_model_folder(tmp_path, template=template)
    async with running_dispatcher(load_text(make_settings(folder)), folder, "yes") as running:
        for content in ("how are you", [{"type": "text", "text": "how"}, {"type": "text", "text": " are you"}]):
            asked: list[dict[str, Any]] = [{"role": "user", "content": content}]
            _, told = await running.post("/tokenize", messages=asked)
            texts = [content] if isinstance(content, str) else [part["text"] for part in content]
            assert running.front.codec.decode(told["tokens"]) == "".join(f"[{text}]" for text in texts)
            assert (await running.post(CHAT, messages=asked))[0] == 200
            assert running.worker.submits[-1].prompt_ids().tolist() == told["tokens"]
        messages: list[dict[str, Any]] = [{"role": "system", "content": "be brief"}, *HELLO]
        for path in (CHAT, "/tokenize"):
            status, body = await running.post(path, messages=messages)
            assert (status, body["error"]["code"], body["error"]["param"]) == (400, "invalid_value", "messages.0")
            assert body["error"]["message"].endswith("it leaves out what message 0 (role 'system') says")


BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("/tokenize", {}, "missing_required_parameter", "prompt"),
    ("/tokenize", {"prompt": "a", "messages": HELLO}, "invalid_value", "prompt"),
    ("/tokenize", {"prompt": 3}, "invalid_type", "prompt"),
    ("/tokenize", {"prompt": ["a"]}, "invalid_type", "prompt"),
    ("/tokenize", {"messages": []}, "array_below_min_length", "messages"),
    ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "invalid_type", "add_special_tokens"),
    ("/tokenize", {"prompt": "a", "return_token_strs": "yes"}, "invalid_type", "return_token_strs"),
    ("/tokenize", {"messages": HELLO, "add_generation_prompt": 0}, "invalid_type", "add_generation_prompt"),
    ("/tokenize", {"messages": HELLO, "chat_template": "{{ 1 }}"}, "unsupported_parameter", "chat_template"),
    ("/tokenize", {"messages": HELLO, "tools": [{}]}, "unsupported_parameter", "tools.0.type"),
    ("/tokenize", {"messages": HELLO, "tools": [ADD]}, "unsupported_parameter", "tools"),
    ("/tokenize", {"prompt": "x" * (MAX_CHARS + 1)}, "string_above_max_length", "prompt"),
    ("/tokenize", {"prompt": "\u0301" * 130_000}, "context_length_exceeded", "prompt"),
    ("/detokenize", {}, "missing_required_parameter", "tokens"),
    ("/detokenize", {"tokens": "a"}, "invalid_type", "tokens"),
    ("/detokenize", {"tokens": [True]}, "invalid_type", "tokens"),
    ("/detokenize", {"tokens": [-1]}, "integer_below_min_value", "tokens"),
    ("/detokenize", {"tokens": [10**6]}, "integer_above_max_value", "tokens"),
    ("/detokenize", {"tokens": [1] * (MAX_LISTED_TOKENS + 1)}, "array_above_max_length", "tokens"),
]


@pytest.mark.parametrize(("path", "fields", "code", "param"), BAD)
async def test_a_bad_parameter_is_named(
    served: Running, path: str, fields: dict[str, Any], code: str, param: str
) -> None:
    data = io.BytesIO(json.dumps({"model": "tiny", **fields}).encode())  # large bodies are sent as files
    headers = {"Content-Type": "application/json"}
    async with served.http.post(served.url + path, data=data, headers=headers) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"], error["param"]) == (400, code, param)


async def test_a_model_without_a_template_says_what_to_use(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, template=None)
    async with running_dispatcher(load_text(make_settings(folder)), folder) as running:
        status, body = await running.post("/tokenize", messages=HELLO)
    assert (status, body["error"]["param"]) == (400, "messages")
    assert "no chat template" in body["error"]["message"]


async def test_as_many_tokens_as_a_prompt_may_have_are_listed(served: Running) -> None:
    """Each mark is two tokens."""
    _, told = await served.post("/tokenize", prompt="\u0301" * (MAX_LISTED_TOKENS // 2))
    assert told["count"] == len(told["tokens"]) == MAX_LISTED_TOKENS


async def test_the_event_loop_goes_on_while_a_text_is_cut(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    leave = hold_tokenizer(served, monkeypatch, "encode_text")
    task = asyncio.create_task(served.post("/tokenize", prompt="a"))
    await until(lambda: served.front.pool.num_pending)
    assert (await served.get("/live"))[0] == 200
    assert not task.done()
    leave()
    assert (await task)[1]["count"] == 1
