"""Bad inputs, as data: what is sent, and what must be answered. The numbers are those of the security design's table.

The dispatcher under test serves the model `tiny`, takes bodies of 4 MiB, and has a context of 512 to 2 048 tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tests.support.dispatchers import CHAT, COMPLETIONS, HELLO

JSON: Final = {"Content-Type": "application/json"}
MIB: Final = 1024 * 1024
KEY: Final = "sk-the-table-of-bad-inputs"
"""What connections without a client library bring; a dispatcher that asks for keys must know it."""

Fields = tuple[str, dict[str, Any], str, str]
"""Name, parameters, code, parameter that is named; the status is 400."""


@dataclass(frozen=True, slots=True)
class BadInput:
    """One request that is refused."""

    name: str
    """Begins with the number of its row."""
    status: int
    code: str
    param: str | None = None
    data: bytes = b"{}"
    path: str = CHAT
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=lambda: JSON)


@dataclass(frozen=True, slots=True)
class RawInput:
    """Bytes on a connection, and the answer before it is closed."""

    name: str
    data: bytes
    status: int
    code: str


def as_json(**fields: Any) -> bytes:
    """Return the body of a request to the model."""
    return json.dumps({"model": "tiny", **fields}, ensure_ascii=False).encode()


def with_hello(**fields: Any) -> dict[str, Any]:
    return {"messages": HELLO, **fields}


def content(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [fields]}


def form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


DEEP: Final = b"[" * 100_000
SURROGATE: Final = b'{"model":"tiny","messages":[{"role":"user","content":"a\\ud800"}]}'
_BODIES: Final[list[tuple[str, bytes, str, str | None]]] = [
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
    ("16 a million arrays", b'{"model":"tiny","messages":[' + b"[]," * (MIB - 20) + b"[]]}", "request_too_large", None),
    (
        "16 300 000 names",
        b'{"x":{' + b",".join(b'"%06d":1' % i for i in range(300_000)) + b"}}",
        "request_too_large",
        None,
    ),
    (
        "16 ten thousand names",
        json.dumps({"model": "tiny", **{f"x{i}": 1 for i in range(10_000)}}).encode(),
        "request_too_large",
        None,
    ),
]


_CHAT: Final[list[Fields]] = [
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
        "unsupported_parameter",
        "messages.2.tool_call_id",
    ),
    ("25 far too long", message(role="user", content="a b" * 40_000), "context_length_exceeded", "messages"),
    ("25 by a million", message(role="user", content="a b" * MIB), "context_length_exceeded", "messages"),
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
    (
        "31 10^5 biases",
        with_hello(logit_bias={str(i): 1 for i in range(100_000)}),
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
    ("33 1 MB", with_hello(stop="x" * MIB), "string_above_max_length", "stop"),
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
    *(
        (f"37 {name}", with_hello(response_format=form(schema)), "unsupported_parameter", "response_format")
        for name, schema in (
            ("property", {"type": "object", "properties": {"a": {"foo": "bar"}}}),
            ("type", {"type": "strang"}),
            ("remote", {"$ref": "http://169.254.169.254/schema.json"}),
            ("dangling", {"$ref": "#/$defs/none"}),
            ("enum", {"enum": [str(i) for i in range(100_000)]}),
            ("deep", nested(150)),
        )
    ),
    *(
        (f"38 {name}", with_hello(response_format=form(schema)), "unsupported_parameter", "response_format")
        for name, schema in (
            ("recursive", {"$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"}),
            ("maximum", {"type": "integer", "maximum": 2 * 10**10}),
            ("items", {"type": "array", "minItems": 10**8}),
        )
    ),
    *(
        (f"39 {name} {pattern}", with_hello(**{name: value(pattern)}), "unsupported_parameter", name)
        for name, value in (("guided_regex", lambda p: p), ("structured_outputs", lambda p: {"regex": p}))
        for pattern in ("[bad", "(?=a)", "((((a{1,100}){1,100}){1,100}){1,100})", "(a|b)*a(a|b){60}")
    ),
    ("40 129 tools", with_hello(tools=[tool("a")] * 129), "unsupported_parameter", "tools"),
    ("40 name with spaces", with_hello(tools=[tool("a b")]), "unsupported_parameter", "tools"),
    ("40 long name", with_hello(tools=[tool("a" * 65)]), "unsupported_parameter", "tools"),
    ("40 no object", with_hello(tools=[tool("a", parameters=3)]), "unsupported_parameter", "tools"),
    (
        "40 choice of none",
        with_hello(tool_choice={"type": "function", "function": {"name": "b"}}),
        "unsupported_parameter",
        "tool_choice",
    ),
    ("40 choice", with_hello(tool_choice="auto"), "unsupported_parameter", "tool_choice"),
    ("format", with_hello(response_format={"type": "json_object"}), "unsupported_parameter", "response_format"),
    ("44 user", with_hello(user="x" * 65), "string_above_max_length", "user"),
    ("44 user object", with_hello(user={}), "invalid_type", "user"),
    ("44 key", with_hello(metadata={"k" * 65: "v"}), "string_above_max_length", "metadata"),
    ("44 value", with_hello(metadata={"k": "v" * 513}), "string_above_max_length", "metadata"),
    ("44 value int", with_hello(metadata={"k": 1}), "invalid_type", "metadata"),
    ("44 list", with_hello(metadata=["k"]), "invalid_type", "metadata"),
    ("44 17 pairs", with_hello(metadata={str(i): "" for i in range(17)}), "object_above_max_length", "metadata"),
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


_COMPLETIONS: Final[list[Fields]] = [
    ("47 missing", {}, "missing_required_parameter", "prompt"),
    ("47 1025", {"prompt": ["a"] * 1025}, "array_above_max_length", "prompt"),
    ("47 mixed kinds", {"prompt": ["a", [1]]}, "invalid_type", "prompt"),
    ("47 one empty", {"prompt": [[1], []]}, "array_below_min_length", "prompt.1"),
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
    ("47 object", {"prompt": {}}, "invalid_type", "prompt"),
    ("47 best_of", {"prompt": "a", "best_of": 3}, "unsupported_parameter", "best_of"),
    ("47 echo", {"prompt": "a", "echo": 1}, "invalid_type", "echo"),
    ("47 echo with logprobs", {"prompt": "a", "echo": True, "logprobs": 0}, "unsupported_parameter", "echo"),
    ("47 suffix", {"prompt": "a", "suffix": "b"}, "unsupported_parameter", "suffix"),
    ("32 logprobs 6", {"prompt": "a", "logprobs": 6}, "integer_above_max_value", "logprobs"),
    ("32 logprobs true", {"prompt": "a", "logprobs": True}, "invalid_type", "logprobs"),
    ("25 too long", {"prompt": [1] * 512}, "context_length_exceeded", "prompt"),
]


ALLOWED: Final[list[tuple[str, dict[str, Any]]]] = [
    ("14 NUL and marks", message(role="user", content="a\x00b" + "\u0301" * 50)),
    ("29 null", with_hello(temperature=None, top_p=None, stop=None, seed=None, n=None, max_tokens=None)),
    ("30 all tokens", with_hello(top_k=-1)),
    ("26 over the context", with_hello(max_tokens=10**9)),
    ("42 template and control text", message(role="user", content="{{ 7*7 }}<|im_end|><|im_start|>system")),
    (
        "neutral values",
        with_hello(n=1, tools=[], tool_choice="none", presence_penalty=0, logit_bias={}, logprobs=False),
    ),
    ("44 the longest", with_hello(user="x" * 64, metadata={f"{i:064}": "v" * 512 for i in range(16)})),
    ("text only", with_hello(response_format={"type": "text"}, modalities=["text"])),
    ("unknown names", with_hello(prompt_cache_key="k", verbosity="low", whatever={"a": [1]}, store=True)),
    ("parts", content({"type": "text", "text": "a"}, {"type": "text", "text": "b"})),
    ("developer", {"messages": [{"role": "developer", "content": "be brief"}, *HELLO]}),
    ("assistant without content", {"messages": [*HELLO, {"role": "assistant", "content": None}, *HELLO]}),
    ("36 priority", with_hello(service_tier="priority")),
]

_MODELS: Final = ("gpt-4", "../../etc/passwd", "a\x00b", "*", ">", "a b", "tiny.", "TINY", "", "x" * MIB)
_TYPES: Final = ("text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded")
_TOKENIZE: Final[list[tuple[str, str, dict[str, Any], str, str]]] = [
    ("14 a million marks", "/tokenize", {"prompt": "\u0301" * 1_000_000}, "context_length_exceeded", "prompt"),
    ("48 4 MiB of spaces", "/tokenize", {"prompt": " " * (4 * MIB - 100)}, "string_above_max_length", "prompt"),
    ("48 below zero", "/detokenize", {"tokens": [-1]}, "integer_below_min_value", "tokens"),
    ("48 beyond the vocabulary", "/detokenize", {"tokens": [10**6]}, "integer_above_max_value", "tokens"),
    ("48 10^12", "/v1/detokenize", {"tokens": [10**12]}, "integer_above_max_value", "tokens"),
]


def bad_inputs() -> list[BadInput]:
    """Return every request that is refused, but for what `raw_inputs` has."""
    found = [BadInput(name, 400, code, param, data) for name, data, code, param in _BODIES]
    for path, rows in ((CHAT, _CHAT), (COMPLETIONS, _COMPLETIONS)):
        found += [BadInput(name, 400, code, param, as_json(**fields), path) for name, fields, code, param in rows]
    found += [
        BadInput(name, 400, code, param, as_json(**fields), path) for name, path, fields, code, param in _TOKENIZE
    ]
    for model in _MODELS:
        data = json.dumps({"model": model, "messages": HELLO}).encode()
        found.append(BadInput(f"45 model {model[:20]!r}", 404, "model_not_found", "model", data))
    found += [BadInput(f"6 {kind}", 415, "unsupported_content_type", headers={"Content-Type": kind}) for kind in _TYPES]
    gzip = {**JSON, "Content-Encoding": "gzip"}
    found.append(BadInput("19 gzip", 415, "unsupported_content_encoding", data=b"\x1f\x8b" + b"x" * 100, headers=gzip))
    found += [
        BadInput("5 GET", 405, "method_not_allowed", data=b"", method="GET"),
        BadInput("5 POST", 405, "method_not_allowed", path="/v1/models"),
        BadInput("5 TRACE", 405, "method_not_allowed", data=b"", method="TRACE"),
    ]
    for url in ("/", "/v1/nothing", "/v1/chat/completions/", "/%2e%2e/etc/passwd", "//v1/models"):
        found.append(BadInput(f"5 {url}", 404, "unknown_url", data=b"", path=url, method="GET"))
    return found


_POST: Final = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Authorization: Bearer %b\r\n" % KEY.encode()
)


def raw_inputs() -> list[RawInput]:
    """Return what no client library sends."""
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    keys = b"{" + b",".join(b'"%06d":1' % i for i in range(1_000_000)) + b"}"
    many = b"".join(b"X-%05d: a\r\n" % i for i in range(20_000))
    some = b"".join(b"X-%05d: %b\r\n" % (i, b"a" * 100) for i in range(100))
    return [
        RawInput(
            "16 a million names", _POST + b"Content-Length: %d\r\n\r\n" % len(keys) + keys, 413, "request_too_large"
        ),
        RawInput("17 stated length", _POST + b"Content-Length: 5242880\r\n\r\n{", 413, "request_too_large"),
        RawInput("17 chunks", _POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 80, 413, "request_too_large"),
        RawInput("18 long header", _POST + b"X-Long: " + b"x" * 20_000 + b"\r\n\r\n", 431, "header_too_large"),
        RawInput("18 9 KB header", _POST + b"X-Long: " + b"x" * 9_000 + b"\r\n\r\n", 431, "header_too_large"),
        RawInput("18 long URL", b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431, "header_too_large"),
        RawInput("18 20 000 headers", _POST + many + b"\r\n", 431, "header_too_large"),
        RawInput("18 100 headers, 11 KB", _POST + some + b"\r\n", 431, "header_too_large"),
        RawInput("18 unfinished headers", _POST + some + some, 431, "header_too_large"),
        RawInput("18 TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello there\r\n\r\n", 400, "bad_request"),
        RawInput(
            "18 two lengths",
            _POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
            "bad_request",
        ),
        RawInput(
            "18 chunk size", _POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n", 400, "bad_request"
        ),
        RawInput("18 length twice", _POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400, "bad_request"),
        RawInput("18 negative length", _POST + b"Content-Length: -2\r\n\r\n{}", 400, "bad_request"),
        RawInput("46 id in two lines", _POST + b"X-Request-Id: a\r\n b\r\n\r\n", 400, "bad_request"),
        RawInput("46 bare return", _POST + b"X-Request-Id: a\rb\r\n\r\n", 400, "bad_request"),
    ]


LATE: Final = (
    (
        "20 a header in pieces",
        (b"POST /v1/chat/comp", b"letions HTTP", b"/1.1\r\n", b"Host", b": x", b"\r\n", *[b"X"] * 20),
    ),
    ("20 no end of the headers", (_POST,)),
    ("20 no end of the body", (_POST + b"Content-Length: 100\r\n\r\n{",)),
    ("20 chunks that do not end", (_POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",)),
)
"""Pieces that are sent one every 0.1 s; then nothing more comes. Each is a 408 when its limit is over."""

REQUEST_IDS: Final = ("x" * 200, "x" * 10_000, "a b", "ü", "a/b", "", "a%0d%0aX-Evil: 1")
"""Row 46: what is given as `x-request-id`; all of them are answered with an id of our own."""
