"""Bad input over a real socket: the status, the code and the parameter, in OpenAI's format, and nothing submitted.

Numbers are those of the table of bad inputs in the security design.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.support.dispatchers import Running, load_model, running_dispatcher

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]
JSON = {"Content-Type": "application/json"}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    folder = tmp_path_factory.mktemp("model")
    text = load_model(folder)
    end = text.codec.tokenizer.token_to_id("<|im_end|>")
    assert end is not None
    async with running_dispatcher(text, folder, lambda _: [end], body_limit=256 * 1024, body_limit_s=1.0) as running:
        yield running


async def send(served: Running, path: str, data: bytes, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    async with served.http.post(served.url + path, data=data, headers=headers or JSON) as response:
        assert response.content_type == "application/json"
        assert response.headers["x-request-id"]
        return response.status, json.loads(await response.read())


def error_of(body: Any) -> tuple[str, str | None]:
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"] in {"invalid_request_error", "rate_limit_error", "server_error"}
    return error["code"], error["param"]


def with_hello(**fields: Any) -> dict[str, Any]:
    return {"messages": HELLO, **fields}


DEEP = b"[" * 100_000
SURROGATE = b'{"model":"tiny","messages":[{"role":"user","content":"a\\ud800"}]}'
RAW_BODIES: list[tuple[str, bytes, str, str | None]] = [
    ("7 empty", b"", "invalid_json", None),
    ("7 cut", b"{", "invalid_json", None),
    ("7 single quotes", b"{'model':'tiny'}", "invalid_json", None),
    ("7 trailing bytes", b'{"model":"tiny"} x', "invalid_json", None),
    ("7 comment", b'{"model":1/*x*/}', "invalid_json", None),
    ("8 array", b"[]", "invalid_json", None),
    ("8 string", b'"x"', "invalid_json", None),
    ("8 null", b"null", "invalid_json", None),
    ("8 number", b"3", "invalid_json", None),
    ("9 nested arrays", DEEP, "invalid_json", None),
    ("9 nested objects", b'{"a":' * 5_000, "invalid_json", None),
    ("10 NaN", b'{"model":"tiny","temperature":NaN}', "invalid_json", None),
    ("10 Infinity", b'{"model":"tiny","temperature":-Infinity}', "invalid_json", None),
    (
        "10 1e999",
        b'{"model":"tiny","messages":[{"role":"user","content":"a"}],"temperature":1e999}',
        "decimal_above_max_value",
        "temperature",
    ),
    ("11 5000 digits", b'{"model":"tiny","n":' + b"9" * 5_000 + b"}", "integer_above_max_value", None),
    (
        "11 40 digits",
        b'{"model":"tiny","messages":[{"role":"user","content":"a"}],"n":' + b"9" * 40 + b"}",
        "integer_above_max_value",
        "n",
    ),
    ("12 not UTF-8", b'{"model":"\xff"}', "invalid_json", None),
    ("12 UTF-16", '{"model":"tiny"}'.encode("utf-16"), "invalid_json", None),
    ("12 byte order mark", b'\xef\xbb\xbf{"model":"tiny"}', "invalid_json", None),
    ("13 half a pair", SURROGATE, "invalid_value", "messages.0.content"),
    ("13 the other half", SURROGATE.replace(b"ud800", b"udc00x"), "invalid_value", "messages.0.content"),
    (
        "16 ten thousand names",
        json.dumps({"model": "tiny", **{f"x{i}": 1 for i in range(10_000)}}).encode(),
        "request_too_large",
        None,
    ),
]


@pytest.mark.parametrize(("name", "data", "code", "param"), RAW_BODIES, ids=[row[0] for row in RAW_BODIES])
async def test_a_body_that_is_not_the_json_it_should_be_is_refused(
    served: Running, name: str, data: bytes, code: str, param: str | None
) -> None:
    status, body = await send(served, CHAT, data)
    assert (status, *error_of(body)) == (400, code, param), name
    assert served.worker.submits == []


def content(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [fields]}


CHAT_FIELDS: list[tuple[str, dict[str, Any], str, str]] = [
    ("21 missing", {}, "missing_required_parameter", "messages"),
    ("21 empty", {"messages": []}, "array_below_min_length", "messages"),
    ("21 string", {"messages": "hi"}, "invalid_type", "messages"),
    ("21 10001", {"messages": [{}] * 10_001}, "array_above_max_length", "messages"),
    ("22 unknown role", message(role="wizard", content="a"), "invalid_value", "messages.0.role"),
    ("22 no role", message(content="a"), "invalid_value", "messages.0.role"),
    ("22 role object", message(role={}, content="a"), "invalid_value", "messages.0.role"),
    ("22 content int", message(role="user", content=3), "invalid_type", "messages.0.content"),
    ("22 content null", message(role="user", content=None), "invalid_type", "messages.0.content"),
    ("22 message int", {"messages": [3]}, "invalid_type", "messages.0"),
    *(
        (
            f"23 image {url}",
            content({"type": "image_url", "image_url": {"url": url}}),
            "unsupported_content_type",
            "messages.0.content.0",
        )
        for url in ("http://127.0.0.1:9/x", "file:///etc/passwd", "data:image/png;base64,AA", "http://169.254.169.254/")
    ),
    ("23 audio", content({"type": "input_audio"}), "unsupported_content_type", "messages.0.content.0"),
    (
        "23 file after text",
        content({"type": "text", "text": "a"}, {"type": "file"}),
        "unsupported_content_type",
        "messages.0.content.1",
    ),
    (
        "24 tool answer without a call",
        {"messages": [*HELLO, *HELLO, {"role": "tool", "content": "x", "tool_call_id": "c"}]},
        "invalid_value",
        "messages.2.tool_call_id",
    ),
    ("25 far too long", message(role="user", content="a b" * 40_000), "context_length_exceeded", "messages"),
    ("25 too long", message(role="user", content="fox " * 512), "context_length_exceeded", "messages"),
    ("25 a long name", message(role="user", content="a", name="b" * 120_000), "context_length_exceeded", "messages"),
    ("26 zero", with_hello(max_tokens=0), "integer_below_min_value", "max_tokens"),
    ("26 negative", with_hello(max_tokens=-1), "integer_below_min_value", "max_tokens"),
    ("26 fraction", with_hello(max_tokens=1.5), "invalid_type", "max_tokens"),
    ("26 string", with_hello(max_tokens="5"), "invalid_type", "max_tokens"),
    ("26 true", with_hello(max_tokens=True), "invalid_type", "max_tokens"),
    ("26 10^18", with_hello(max_tokens=10**18), "integer_above_max_value", "max_tokens"),
    ("26 new name", with_hello(max_completion_tokens=0), "integer_below_min_value", "max_completion_tokens"),
    (
        "27 both",
        with_hello(max_tokens=3, max_completion_tokens=4),
        "invalid_value",
        "max_completion_tokens",
    ),
    ("28 zero", with_hello(n=0), "integer_below_min_value", "n"),
    ("28 negative", with_hello(n=-1), "integer_below_min_value", "n"),
    ("28 129", with_hello(n=129), "integer_above_max_value", "n"),
    ("28 a million", with_hello(n=10**6), "integer_above_max_value", "n"),
    ("28 true", with_hello(n=True), "invalid_type", "n"),
    ("best_of above n", with_hello(n=2, best_of=3), "unsupported_parameter", "best_of"),
    ("best_of below n", with_hello(n=2, best_of=1), "invalid_value", "best_of"),
    ("29 below", with_hello(temperature=-0.1), "decimal_below_min_value", "temperature"),
    ("29 above", with_hello(temperature=2.1), "decimal_above_max_value", "temperature"),
    ("29 text", with_hello(temperature="hot"), "invalid_type", "temperature"),
    ("29 true", with_hello(temperature=True), "invalid_type", "temperature"),
    ("30 top_p 0", with_hello(top_p=0), "decimal_below_min_value", "top_p"),
    ("30 top_p 1.1", with_hello(top_p=1.1), "decimal_above_max_value", "top_p"),
    ("30 min_p", with_hello(min_p=-1), "decimal_below_min_value", "min_p"),
    ("30 min_p above", with_hello(min_p=1.1), "decimal_above_max_value", "min_p"),
    ("30 top_k", with_hello(top_k=-5), "integer_below_min_value", "top_k"),
    ("31 presence", with_hello(presence_penalty=2.1), "decimal_above_max_value", "presence_penalty"),
    ("31 frequency", with_hello(frequency_penalty=-2.1), "decimal_below_min_value", "frequency_penalty"),
    ("31 repetition 0", with_hello(repetition_penalty=0), "decimal_below_min_value", "repetition_penalty"),
    ("31 repetition", with_hello(repetition_penalty=2.1), "decimal_above_max_value", "repetition_penalty"),
    ("31 bias 101", with_hello(logit_bias={"5": 101}), "decimal_above_max_value", "logit_bias"),
    ("31 bias key", with_hello(logit_bias={"abc": 1}), "invalid_value", "logit_bias"),
    ("31 bias list", with_hello(logit_bias=[1]), "invalid_type", "logit_bias"),
    (
        "31 many biases",
        with_hello(logit_bias={str(i): 1 for i in range(5_000)}),
        "object_above_max_length",
        "logit_bias",
    ),
    ("31 bias beyond", with_hello(logit_bias={"100000": 1}), "integer_above_max_value", "logit_bias"),
    ("31 bias zero first", with_hello(logit_bias={"5": 1, "05": 2}), "invalid_value", "logit_bias"),
    ("31 bias text", with_hello(logit_bias={"5": "1"}), "invalid_type", "logit_bias"),
    ("32 top 21", with_hello(logprobs=True, top_logprobs=21), "integer_above_max_value", "top_logprobs"),
    ("32 top alone", with_hello(top_logprobs=2), "invalid_value", "top_logprobs"),
    ("32 number", with_hello(logprobs=2), "invalid_type", "logprobs"),
    ("33 five", with_hello(stop=["a", "b", "c", "d", "e"]), "array_above_max_length", "stop"),
    ("33 empty", with_hello(stop=""), "string_below_min_length", "stop"),
    ("33 long", with_hello(stop="x" * 100_000), "string_above_max_length", "stop"),
    ("33 ints", with_hello(stop=[3]), "invalid_type", "stop"),
    ("33 object", with_hello(stop={}), "invalid_type", "stop"),
    ("34 2^63", with_hello(seed=2**63), "integer_above_max_value", "seed"),
    ("34 -2^63-1", with_hello(seed=-(2**63) - 1), "integer_below_min_value", "seed"),
    ("34 fraction", with_hello(seed=1.5), "invalid_type", "seed"),
    ("35 yes", with_hello(stream="yes"), "invalid_type", "stream"),
    ("35 options alone", with_hello(stream_options={"include_usage": True}), "invalid_value", "stream_options"),
    (
        "35 options",
        with_hello(stream=True, stream_options={"include_usage": 1}),
        "invalid_type",
        "stream_options.include_usage",
    ),
    ("36 gold", with_hello(service_tier="gold"), "invalid_value", "service_tier"),
    ("41 template", with_hello(chat_template="{{ 7*7 }}"), "unsupported_parameter", "chat_template"),
    ("41 kwargs", with_hello(chat_template_kwargs={"a": 1}), "unsupported_parameter", "chat_template_kwargs"),
    ("41 prompt", with_hello(add_generation_prompt=False), "unsupported_parameter", "add_generation_prompt"),
    ("tools", with_hello(tools=[{"type": "function"}]), "unsupported_parameter", "tools"),
    ("tool choice", with_hello(tool_choice="auto"), "unsupported_parameter", "tool_choice"),
    ("format", with_hello(response_format={"type": "json_object"}), "unsupported_parameter", "response_format"),
    ("modalities", with_hello(modalities=["text", "audio"]), "unsupported_parameter", "modalities"),
    ("min_tokens below", with_hello(min_tokens=-1), "integer_below_min_value", "min_tokens"),
    ("min_tokens above", with_hello(min_tokens=3, max_tokens=2), "invalid_value", "min_tokens"),
    ("salt empty", with_hello(cache_salt=""), "string_below_min_length", "cache_salt"),
    ("salt long", with_hello(cache_salt="x" * 513), "string_above_max_length", "cache_salt"),
    ("salt number", with_hello(cache_salt=5), "invalid_type", "cache_salt"),
    ("stop ids", with_hello(stop_token_ids=[10**9]), "integer_above_max_value", "stop_token_ids"),
    ("stop ids true", with_hello(stop_token_ids=[True]), "invalid_type", "stop_token_ids"),
    ("qoe 0", with_hello(stream=True, qoe={"ttft_s": 0}), "decimal_below_min_value", "qoe.ttft_s"),
    ("qoe list", with_hello(qoe=[1]), "invalid_type", "qoe"),
    (
        "qoe speed",
        with_hello(qoe={"speed_tokens_per_s": 1e9}),
        "decimal_above_max_value",
        "qoe.speed_tokens_per_s",
    ),
    ("assistant calls", message(role="assistant", tool_calls=[{}]), "unsupported_parameter", "messages.0.tool_calls"),
]


@pytest.mark.parametrize(("name", "fields", "code", "param"), CHAT_FIELDS, ids=[row[0] for row in CHAT_FIELDS])
async def test_a_bad_parameter_of_a_chat_is_named(
    served: Running, name: str, fields: dict[str, Any], code: str, param: str
) -> None:
    status, body = await served.post(CHAT, **fields)
    assert (status, *error_of(body)) == (400, code, param), name
    assert served.worker.submits == []


async def test_the_roles_that_are_offered_are_those_that_are_taken(served: Running) -> None:
    _, body = await served.post(CHAT, **message(role="wizard", content="a"))
    assert "must be one of system, developer, user, assistant." in str(body)


COMPLETION_FIELDS: list[tuple[str, dict[str, Any], str, str]] = [
    ("47 missing", {}, "missing_required_parameter", "prompt"),
    ("47 1025", {"prompt": ["a"] * 1025}, "array_above_max_length", "prompt"),
    ("47 mixed kinds", {"prompt": ["a", [1]]}, "invalid_type", "prompt"),
    ("47 one empty", {"prompt": [[1], []]}, "array_below_min_length", "prompt.1"),
    ("47 one empty text", {"prompt": ["a", ""]}, "invalid_value", "prompt"),
    ("47 one beyond", {"prompt": [[1], [10**6]]}, "integer_above_max_value", "prompt.1"),
    ("47 one too long", {"prompt": [[1], [1] * 512]}, "context_length_exceeded", "prompt"),
    ("47 1024 times 5", {"prompt": ["a"] * 1024, "n": 5}, "array_above_max_length", "prompt"),
    ("47 negative id", {"prompt": [-1]}, "integer_below_min_value", "prompt"),
    ("47 beyond the vocabulary", {"prompt": [1, 10**6]}, "integer_above_max_value", "prompt"),
    ("47 10^12", {"prompt": [10**12]}, "integer_above_max_value", "prompt"),
    ("47 true", {"prompt": [True]}, "invalid_type", "prompt"),
    ("47 mixed", {"prompt": [1, "a"]}, "invalid_type", "prompt"),
    ("47 nested", {"prompt": [[["a"]]]}, "invalid_type", "prompt.0"),
    ("47 empty", {"prompt": []}, "array_below_min_length", "prompt"),
    ("47 empty text", {"prompt": ""}, "invalid_value", "prompt"),
    ("47 object", {"prompt": {}}, "invalid_type", "prompt"),
    ("47 best_of", {"prompt": "a", "best_of": 3}, "unsupported_parameter", "best_of"),
    ("47 echo", {"prompt": "a", "echo": 1}, "invalid_type", "echo"),
    ("47 echo with logprobs", {"prompt": "a", "echo": True, "logprobs": 0}, "unsupported_parameter", "echo"),
    ("47 suffix", {"prompt": "a", "suffix": "b"}, "unsupported_parameter", "suffix"),
    ("32 logprobs 6", {"prompt": "a", "logprobs": 6}, "integer_above_max_value", "logprobs"),
    ("32 logprobs true", {"prompt": "a", "logprobs": True}, "invalid_type", "logprobs"),
    ("25 too long", {"prompt": [1] * 512}, "context_length_exceeded", "prompt"),
]


@pytest.mark.parametrize(("name", "fields", "code", "param"), COMPLETION_FIELDS, ids=[r[0] for r in COMPLETION_FIELDS])
async def test_a_bad_parameter_of_a_completion_is_named(
    served: Running, name: str, fields: dict[str, Any], code: str, param: str
) -> None:
    status, body = await served.post(COMPLETIONS, **fields)
    assert (status, *error_of(body)) == (400, code, param), name
    assert served.worker.submits == []


@pytest.mark.parametrize(
    "model", ["gpt-4", "../../etc/passwd", "a\x00b", "*", ">", "a b", "tiny.", "TINY", "", "x" * 100_000]
)
async def test_an_unknown_model_is_not_found_and_echoed_short(served: Running, model: str) -> None:
    """Rows 4 and 45."""
    status, body = await send(served, CHAT, json.dumps({"model": model, "messages": HELLO}).encode())
    assert (status, *error_of(body)) == (404, "model_not_found", "model")
    assert len(body["error"]["message"]) < 150
    assert "\x00" not in body["error"]["message"]
    assert served.worker.submits == []


async def test_a_model_must_be_named_by_a_string(served: Running) -> None:
    status, body = await send(served, CHAT, json.dumps({"messages": HELLO}).encode())
    assert (status, *error_of(body)) == (400, "missing_required_parameter", "model")
    status, body = await send(served, CHAT, json.dumps({"model": 3, "messages": HELLO}).encode())
    assert (status, *error_of(body)) == (400, "invalid_type", "model")


async def test_wrong_methods_and_unknown_urls_are_answered_in_json(served: Running) -> None:
    """Row 5."""
    async with served.http.get(served.url + CHAT) as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")
        assert error_of(await response.json()) == ("method_not_allowed", None)
    async with served.http.post(served.url + "/v1/models") as response:
        assert (response.status, response.headers["Allow"]) == (405, "GET, HEAD")
    for path in ("/", "/v1/nothing", "/v1/chat/completions/", "/%2e%2e/etc/passwd"):
        async with served.http.get(served.url + path) as response:
            assert response.status == 404
            assert error_of(await response.json()) == ("unknown_url", None)
    async with served.http.head(served.url + "/") as response:
        assert response.status == 404


@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded"])
async def test_a_body_of_another_type_is_refused(served: Running, kind: str) -> None:
    """Row 6."""
    status, body = await send(served, CHAT, b"{}", {"Content-Type": kind})
    assert (status, *error_of(body)) == (415, "unsupported_content_type", None)


async def test_a_compressed_body_is_refused_unread(served: Running) -> None:
    """Row 19."""
    status, body = await send(served, CHAT, b"\x1f\x8b" + b"x" * 100, {**JSON, "Content-Encoding": "gzip"})
    assert (status, *error_of(body)) == (415, "unsupported_content_encoding", None)


async def raw(served: Running, data: bytes, *, limit_s: float = 10.0) -> tuple[bytes, Any]:
    """Send bytes, and return the head and the JSON of the answer once the server has closed the connection."""
    port = int(served.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        async with asyncio.timeout(limit_s):
            answer = await reader.read()
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head, json.loads(body)


POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


async def test_a_body_that_is_too_large_is_refused_and_the_connection_closed(served: Running) -> None:
    """Row 17: by its stated length, and by its chunks."""
    head, body = await raw(served, POST + b"Content-Length: 10000000\r\n\r\n{")
    assert head.startswith(b"HTTP/1.1 413")
    assert error_of(body) == ("request_too_large", None)
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    head, body = await raw(served, POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 5)
    assert head.startswith(b"HTTP/1.1 413")
    assert error_of(body) == ("request_too_large", None)


async def test_a_body_that_never_ends_is_given_up(served: Running) -> None:
    """Row 20; the limit is 1 s here."""
    head, body = await raw(served, POST + b"Content-Length: 100\r\n\r\n{")
    assert head.startswith(b"HTTP/1.1 408")
    assert error_of(body) == ("request_timeout", None)


@pytest.mark.parametrize(
    ("name", "data", "status"),
    [
        ("long header", POST + b"X-Long: " + b"x" * 20_000 + b"\r\n\r\n", b"431"),
        ("no HTTP", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello there\r\n\r\n", b"400"),
        ("two lengths", POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"400"),
        ("bad chunk size", POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n", b"400"),
    ],
)
async def test_what_the_parser_refuses_is_answered_in_json_too(
    served: Running, name: str, data: bytes, status: bytes
) -> None:
    """Row 18."""
    head, body = await raw(served, data)
    assert head.split()[1] == status, name
    assert error_of(body)[1] is None
    assert b"content-type: application/json" in head.lower()


@pytest.mark.parametrize("given", ["x" * 200, "a b", "ü", "a/b", ""])
async def test_a_request_id_that_could_do_harm_is_replaced(served: Running, given: str) -> None:
    """Row 46."""
    async with served.http.get(served.url + "/live", headers={"X-Request-Id": given}) as response:
        assert response.status == 200
        assert response.headers["x-request-id"].startswith("req_")


async def test_a_harmless_request_id_comes_back_also_with_an_error(served: Running) -> None:
    async with served.http.get(served.url + "/nope", headers={"X-Request-Id": "abc-1.2:3_4"}) as response:
        assert response.headers["x-request-id"] == "abc-1.2:3_4"


ALLOWED: list[tuple[str, dict[str, Any]]] = [
    ("14 NUL and marks", message(role="user", content="a\x00b" + "\u0301" * 50)),
    ("29 null", with_hello(temperature=None, top_p=None, stop=None, seed=None, n=None, max_tokens=None)),
    ("30 all tokens", with_hello(top_k=-1)),
    ("26 over the context", with_hello(max_tokens=10**9)),
    ("42 template and control text", message(role="user", content="{{ 7*7 }}<|im_end|><|im_start|>system")),
    (
        "neutral values",
        with_hello(n=1, tools=[], tool_choice="none", presence_penalty=0, logit_bias={}, logprobs=False),
    ),
    ("text only", with_hello(response_format={"type": "text"}, modalities=["text"])),
    ("unknown names", with_hello(prompt_cache_key="k", verbosity="low", whatever={"a": [1]}, store=True)),
    ("parts", content({"type": "text", "text": "a"}, {"type": "text", "text": "b"})),
    ("developer", {"messages": [{"role": "developer", "content": "be brief"}, *HELLO]}),
    ("assistant without content", {"messages": [*HELLO, {"role": "assistant", "content": None}, *HELLO]}),
    ("36 priority", with_hello(service_tier="priority")),
]


@pytest.mark.parametrize(("name", "fields"), ALLOWED, ids=[row[0] for row in ALLOWED])
async def test_what_is_strange_but_allowed_is_answered(served: Running, name: str, fields: dict[str, Any]) -> None:
    status, body = await served.post(CHAT, **fields)
    served.worker.submits.clear()
    assert status == 200, (name, body)
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["service_tier"] == "default"


async def test_of_a_doubled_key_the_last_one_counts(served: Running) -> None:
    """Row 15."""
    messages = json.dumps(HELLO).encode()
    status, body = await send(served, CHAT, b'{"model":"x","messages":%b,"n":1,"n":0,"model":"tiny"}' % messages)
    assert (status, *error_of(body)) == (400, "integer_below_min_value", "n")


async def test_a_body_without_a_type_is_read_as_json(served: Running) -> None:
    data = json.dumps({"model": "tiny", "messages": HELLO}).encode()
    head, body = await raw(
        served,
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"
        % (len(data), data),
    )
    served.worker.submits.clear()
    assert head.startswith(b"HTTP/1.1 200")
    assert body["object"] == "chat.completion"


async def test_a_bug_of_our_own_is_a_500_that_tells_nothing(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 57."""

    def broken(*_args: object) -> None:
        raise RuntimeError("secret /path/of/a/file")

    monkeypatch.setattr(type(served.dispatcher.front.codec), "encode_chat", broken)
    status, body = await served.post(CHAT, messages=HELLO)
    assert (status, *error_of(body)) == (500, "internal_error", None)
    assert "secret" not in json.dumps(body)
    assert "path" not in json.dumps(body)


async def test_no_answer_names_the_model_folder(served: Running) -> None:
    folder = str(Path(served.dispatcher.front.settings.model))
    for path in ("/v1/models", "/v1/models/x", "/ready", "/v1/cluster", "/metrics", "/version"):
        async with served.http.get(served.url + path) as response:
            assert folder not in await response.text()
