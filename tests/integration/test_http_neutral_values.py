"""A value that asks for nothing is accepted, of every parameter, and the worker gets what it gets without it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

import pytest
import pytest_asyncio

from services.dispatcher.endpoints import chat, completions, tokenize
from services.dispatcher.endpoints.unsupported import CHAT as CHAT_TABLE
from services.dispatcher.endpoints.unsupported import COMPLETIONS as COMPLETIONS_TABLE
from services.dispatcher.endpoints.unsupported import TOKENIZE as TOKENIZE_TABLE
from tests.support.dispatchers import CHAT, COMPLETIONS, HELLO, Running, Serve

TOKENIZE: Final = "/v1/tokenize"

SAMPLING: Final[dict[str, list[Any]]] = {
    "temperature": [1, 1.0],
    "top_p": [1, 1.0],
    "top_k": [0, -1],
    "min_p": [0, 0.0],
    "presence_penalty": [0, 0.0],
    "frequency_penalty": [0, 0.0],
    "repetition_penalty": [1, 1.0],
    "logit_bias": [{}],
    "min_tokens": [0],
    "seed": [],
    "stop": [[]],
    "stop_token_ids": [[]],
    "ignore_eos": [False],
}
BOTH: Final[dict[str, list[Any]]] = {
    **SAMPLING,
    "max_tokens": [],
    "max_completion_tokens": [],
    "n": [1],
    "best_of": [1],
    "stream": [False],
    "stream_options": [{}, {"include_usage": False}, {"include_usage": None}, {"include_obfuscation": False}],
    "service_tier": ["auto", "default", ""],
    "qoe": [{}, {"ttft_s": None}],
    "slo": [{}, {"tpot_s": None}],
    "cache_salt": [],
    "user": ["", "somebody"],
    "metadata": [{}],
    "response_format": [{"type": "text"}, {}, {"type": None}],
    "modalities": [["text"], []],
    "length_penalty": [1, 1.0],
    "use_beam_search": [False],
    "guided_json": [""],
    "guided_regex": [""],
    "guided_choice": [[]],
    "guided_grammar": [""],
    "structured_outputs": [{}, {"json": None}],
    "prompt_logprobs": [False],
    "logits_processors": [[]],
    "include_stop_str_in_output": [False],
    "truncate_prompt_tokens": [],
    "allowed_token_ids": [[]],
    "bad_words": [[], [""]],
    "echo": [False],
    "extra_name_of_next_month": [0, False, [], {}],
}
TEMPLATE: Final[dict[str, list[Any]]] = {
    "documents": [[]],
    "chat_template": [""],
    "chat_template_kwargs": [{}, {"enable_thinking": None}],
    "reasoning_effort": [],
    "thinking_token_budget": [],
    "continue_final_message": [False],
    "add_generation_prompt": [True],
    "add_special_tokens": [False],
}
NEUTRAL: Final[dict[str, dict[str, list[Any]]]] = {
    CHAT: {
        **BOTH,
        **TEMPLATE,
        "logprobs": [False],
        "top_logprobs": [0],
        "tools": [[]],
        "tool_choice": ["none", "auto", ""],
        "functions": [[]],
        "function_call": ["none", "auto", ""],
        "audio": [{}],
        "prediction": [{}],
        "web_search_options": [],
        "store": [False],
        "parallel_tool_calls": [True, False],
        "prompt_cache_key": [""],
        "safety_identifier": [""],
    },
    COMPLETIONS: {**BOTH, "logprobs": [False], "suffix": [""], "prompt_embeds": [""], "thinking_token_budget": []},
    TOKENIZE: {**TEMPLATE, "tools": [[]], "prompt": [], "tokens": [], "return_token_strs": [False]},
}
"""By path and parameter: what asks for nothing, besides null, which does so everywhere."""
KNOWN: Final = {CHAT: chat._KNOWN, COMPLETIONS: completions._KNOWN, TOKENIZE: tokenize._KNOWN}
NEEDED: Final = {CHAT: {"model", "messages"}, COMPLETIONS: {"model", "prompt"}, TOKENIZE: {"model", "messages"}}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(serve: Serve) -> AsyncIterator[Running]:
    async with serve("The end.") as running:
        yield running


@pytest.mark.parametrize("path", NEUTRAL)
async def test_every_parameter_that_an_endpoint_knows_stands_in_the_table(path: str) -> None:
    assert KNOWN[path] - NEEDED[path] <= set(NEUTRAL[path])


async def outcome(served: Running, path: str, fields: dict[str, Any]) -> tuple[object, ...]:
    """Return the whole answer but its names and times, and all that the worker was told about how to make it."""
    needed = {"messages": HELLO} if path == TOKENIZE else {}
    status, body = await served.post(path, **{**needed, **fields})
    assert status == 200, body
    if path == TOKENIZE:
        return (body,)
    submit = served.worker.submits[-1]
    sampling = submit.sampling.model_copy(update={"seed": 0})  # one is drawn for each request
    answer = {name: value for name, value in body.items() if name not in {"id", "created"}}
    return answer, submit.prompt, sampling, submit.tier, submit.qoe, submit.cache_salt


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, table in NEUTRAL.items() for name in table])
async def test_a_value_that_asks_for_nothing_changes_nothing(served: Running, path: str, name: str) -> None:
    usual = await outcome(served, path, {})
    for value in (None, *NEUTRAL[path][name]):
        assert await outcome(served, path, {name: value}) == usual, value


@pytest.mark.parametrize("path", NEUTRAL)
async def test_they_may_all_come_together(served: Running, path: str) -> None:
    """As of a client that sends each parameter with its default."""
    together = {name: values[0] if values else None for name, values in NEUTRAL[path].items()}
    assert await outcome(served, path, together) == await outcome(served, path, {})


@pytest.mark.parametrize(
    ("path", "name"),
    [(path, name) for path, table in ((CHAT, CHAT_TABLE), (COMPLETIONS, COMPLETIONS_TABLE)) for name in table]
    + [(TOKENIZE, name) for name in TOKENIZE_TABLE],
)
async def test_a_value_that_asks_for_what_is_not_there_is_refused(served: Running, path: str, name: str) -> None:
    needed = {"messages": HELLO} if path == TOKENIZE else {}
    status, body = await served.post(path, **{**needed, name: True})
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "unsupported_parameter", name)
