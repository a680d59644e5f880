"""Answers of a form over a real socket: what each parameter becomes for the worker, what is refused, what is said."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from services.dispatcher.build import load_text
from shared.grammars import GrammarCompiler
from shared.types import SamplingParams, Thinking
from tests.support.dispatchers import CHAT, COMPLETIONS, TEXT, Running, Serve, make_settings, running_dispatcher
from tests.support.raw_http import check_error
from tests.support.socket_talks import talk
from tests.support.text_models import SILENT_OPENER, THINKER, byte_level_json, thinking_json, write_model_folder

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
OVERLAPPING = {"oneOf": [{"type": "object"}, {"type": "object", "properties": {"a": {"type": "null"}}}]}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(serve: Serve) -> AsyncIterator[Running]:
    async with serve(TEXT) as running:
        yield running


def form(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, **fields}}


async def told(served: Running, path: str = CHAT, **body: Any) -> SamplingParams:
    """Return what the worker is told of how to make the answer, which is whole."""
    served.worker.running.clear()
    status, answer = await served.post(path, **body)
    assert status == 200, answer
    (item,) = served.worker.running.values()
    sampling: SamplingParams = item.submit.sampling
    return sampling


def allows(served: Running, grammar: bytes, *texts: str) -> list[bool]:
    """Return of each text whether the grammar allows it as a whole answer, over the model's own vocabulary."""
    tokenizer = served.front.codec.tokenizer
    compiler = GrammarCompiler(tokenizer.to_str(), served.front.codec.vocab_size, [served.end_id])
    found = []
    for text in texts:
        matcher, ids = compiler.compile(grammar), served.encode(text)
        found.append(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())
    return found


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("body", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, '{"b": [1, {}]}', "[]"),
        ({"response_format": form(SCHEMA)}, '{"a": 1}', '{"a": "x"}'),
        ({"response_format": form(SCHEMA, strict=True, description="an a")}, '{"a":1}', '{"a":1,"b":2}'),
        ({"response_format": form(OVERLAPPING, strict=False)}, '{"a":null}', "[]"),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, '{"a":1}', "{}"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, '{"a":1}', "{}"),
        ({"structured_outputs": {"json_object": True}}, "{}", "[]"),
        ({"structured_outputs": {"regex": "[0-9]{2}"}}, "12", "123"),
        ({"structured_outputs": {"choice": ["yes", 'n"o', "ü\n"]}}, "ü\n", "no"),
        ({"structured_outputs": {"grammar": 'root ::= "a" [0-9]+'}}, "a12", "a"),
        ({"structured_outputs": {"grammar": 'start: "a" /[0-9]+/'}}, "a12", "a"),
        ({"guided_json": {}}, "[1]", "]"),
        ({"guided_json": SCHEMA}, '{"a":1}', "{}"),
        ({"guided_regex": "^a+$"}, "aa", "b"),
        ({"guided_choice": ["yes", "no"]}, "no", "yesno"),
        ({"guided_choice": ["yes", "yesterday"]}, "yes", "yest"),
        ({"guided_choice": ["yes", "yesterday"]}, "yesterday", "ye"),
        ({"guided_choice": [f"c{i}" for i in range(9000)]}, "c8999", "c9000"),
        ({"guided_grammar": 'root ::= "a"'}, "a", "b"),
    ],
)
async def test_a_form_becomes_a_grammar_that_workers_take(
    served: Running, path: str, body: dict[str, Any], good: str, bad: str
) -> None:
    sampling = await told(served, path, **body)
    assert allows(served, sampling.grammar, good, bad) == [True, False]


async def test_the_grammar_alone_says_where_the_answer_ends(served: Running) -> None:
    other: dict[str, Any] = {
        "min_tokens": 3,
        "ignore_eos": True,
        "stop_token_ids": [5],
        "temperature": 0.5,
        "logprobs": True,
    }
    free = await told(served, max_tokens=50, **other)
    assert (free.min_tokens, free.ignore_eos, free.stop_token_ids, free.grammar) == (3, True, (5,), b"")
    held = await told(served, max_tokens=50, guided_regex="a+", **other)
    assert (held.min_tokens, held.ignore_eos, held.stop_token_ids) == (0, False, ())
    assert held.grammar
    changed = {"min_tokens": 3, "ignore_eos": True, "stop_token_ids": (5,), "grammar": b"", "seed": free.seed}
    assert held.model_copy(update=changed) == free
    assert (await told(served, max_tokens=2, min_tokens=3, guided_regex="a+")).min_tokens == 0


async def test_each_choice_is_held(served: Running) -> None:
    served.worker.running.clear()
    await served.post(COMPLETIONS, prompt=["a", "b"], n=2, guided_regex="a+", max_tokens=60)
    assert len({item.submit.sampling.grammar for item in served.worker.running.values()}) == 1
    assert len(served.worker.running) == 4


async def test_what_is_taken_of_a_schema_is_said(served: Running) -> None:
    async def header(**body: Any) -> str | None:
        async with served.ask(**body) as response:
            assert response.status == 200, await response.text()
            value: str | None = response.headers.get("x-sluice-one-of")
            return value

    loose = form(OVERLAPPING, strict=False)
    assert await header(response_format=loose) == "any-of"
    assert await header(response_format=loose, stream=True) == "any-of"
    assert await header(response_format=form(SCHEMA, strict=False)) is None
    assert await header() is None
    async with talk(served) as client:
        assert (await client.answer("a", body={"response_format": loose}))[0]["one_of"] == "any-of"
        assert "one_of" not in (await client.answer("b", body={"response_format": form(SCHEMA)}))[0]


@pytest.mark.parametrize("more", [{}, {"strict": True}, {"strict": None}])
async def test_a_one_of_that_may_overlap_is_refused_with_what_helps(served: Running, more: dict[str, Any]) -> None:
    status, body = await served.post(response_format=form(OVERLAPPING, **more))
    assert (status, body["error"]["code"]) == (400, "invalid_json_schema")
    assert "oneOf" in body["error"]["message"]
    assert "'strict': false" in body["error"]["message"]


async def test_outcomes_are_counted(served: Running) -> None:
    async def counts() -> dict[str, float]:
        return {
            sample.labels["result"]: sample.value
            for sample in await served.samples()
            if sample.name == "sluice:guided_requests_total"
        }

    before = await counts()
    bodies: tuple[dict[str, Any], ...] = (
        {"guided_regex": "a+"},
        {"guided_regex": "a+"},
        {"guided_regex": "(?=a)"},
        {"guided_json": {"not": {}}},
        {"guided_json": {"$ref": "#/none"}},
        {"guided_choice": [1]},
        {"response_format": form(OVERLAPPING, strict=False)},
        {},
    )
    for body in bodies:
        await served.post(**body)
    after = await counts()
    assert {name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name, 0)} == {
        "accepted": 2,
        "coerced": 1,
        "invalid_regex": 1,
        "invalid_json_schema": 2,
        "invalid_type": 1,
    }


async def test_a_form_comes_behind_the_thinking_where_a_token_ends_it(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "tokens", thinking_json(), template=THINKER)
    async with running_dispatcher(load_text(make_settings(folder)), folder, TEXT) as running:
        sampling = await told(running, guided_regex="a+", thinking_token_budget=7)
        assert isinstance(sampling.thinking, Thinking)
        assert (sampling.thinking.budget, bool(sampling.grammar)) == (7, True)
        sampling = await told(running, COMPLETIONS, guided_regex="a+", max_tokens=60)
        assert (sampling.thinking, bool(sampling.grammar)) == (None, True)


@pytest.mark.parametrize("tokenizer", [thinking_json, byte_level_json])
async def test_a_form_comes_at_once_where_the_template_opens_no_thinking(
    tmp_path: Path, tokenizer: Callable[[], str]
) -> None:
    folder = write_model_folder(tmp_path, tokenizer(), template=SILENT_OPENER)
    async with running_dispatcher(load_text(make_settings(folder)), folder, TEXT) as running:
        assert ((await told(running)).thinking is not None) == (tokenizer is thinking_json)
        sampling = await told(running, guided_regex="a+")
        assert (sampling.thinking, bool(sampling.grammar)) == (None, True)
        thinking: dict[str, Any] = {"chat_template_kwargs": {"thinking": True}}
        if tokenizer is thinking_json:
            sampling = await told(running, guided_regex="a+", **thinking)
            assert (sampling.thinking and sampling.thinking.is_open, bool(sampling.grammar)) == (True, True)
        else:
            status, answer = await running.post(guided_regex="a+", **thinking)
            assert check_error(status, answer) == (400, "unsupported_parameter", "guided_regex")


async def test_a_form_is_refused_where_text_ends_the_thinking(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "text", byte_level_json(), template=THINKER)
    async with running_dispatcher(load_text(make_settings(folder)), folder, TEXT) as running:
        for body in ({"response_format": form(SCHEMA)}, {"guided_regex": "a+"}):
            status, answer = await running.post(**body)
            param = next(iter(body)) + (".json_schema.schema" if "response_format" in body else "")
            assert check_error(status, answer) == (400, "unsupported_parameter", param)
            assert "thinking" in answer["error"]["message"]
        assert (await told(running, guided_regex="a+", chat_template_kwargs={"enable_thinking": False})).grammar
        assert (await told(running, COMPLETIONS, guided_regex="a+", max_tokens=60)).grammar


async def test_a_costly_form_is_refused_by_name(served: Running) -> None:
    patterns = [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(5, 60)]
    status, body = await served.post(guided_json={"allOf": patterns})
    assert check_error(status, body) == (400, "grammar_too_costly", "guided_json")
