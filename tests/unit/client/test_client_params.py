"""What the SDK knows of parameters is what the server knows; mypy and, at run time, the SDK refuse the rest.

Each `type: ignore` here is a claim: mypy reports those that suppress nothing.
"""

from __future__ import annotations

import collections
from types import MappingProxyType
from typing import Any, get_args, get_type_hints

import pytest

from services.dispatcher.endpoints import chat, completions, messages, params, template_kwargs, unsupported
from sluice_client import (
    AsyncSluiceClient,
    ChatMessage,
    ChatParams,
    CompletionParams,
    ReasoningEffort,
    ServiceTier,
    StreamOptions,
)
from tests.support.openai_server import Server, running, say

OWN = {"model", "messages", "prompt", "stream", "qoe"}
"""What the methods set by arguments of their own."""
OLDER = {"guided_json", "guided_regex", "guided_choice", "guided_grammar"}
"""Names that the server takes besides `structured_outputs`."""
REPLY = say({"id": "c-1", "choices": [{"index": 0, "finish_reason": "stop", "text": "yes"}]})


@pytest.mark.parametrize(
    ("typed", "known", "refused"),
    [
        (ChatParams, chat._KNOWN, unsupported.CHAT),
        (CompletionParams, completions._KNOWN, unsupported.COMPLETIONS),
    ],
)
def test_the_names_are_those_that_the_server_takes(typed: Any, known: set[str], refused: dict[str, Any]) -> None:
    assert set(get_type_hints(typed)) - {"extra_body"} == known - refused.keys() - OWN - OLDER


def test_tiers_efforts_and_roles_are_those_that_the_server_takes() -> None:
    assert set(get_args(ServiceTier)) == set(params.SERVICE_TIERS)
    assert get_args(ReasoningEffort) == template_kwargs.EFFORTS
    roles = [role for kind in get_args(ChatMessage) for role in get_args(get_type_hints(kind)["role"])]
    assert sorted(roles) == sorted(messages._ROLES)


async def test_a_misspelled_name_is_refused_with_the_one_that_was_meant() -> None:
    client = AsyncSluiceClient("http://there")
    with pytest.raises(TypeError, match="unknown parameter 'max_token'; did you mean 'max_tokens'"):
        client.chat("hi", max_token=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="did you mean 'temperature'"):
        client.complete("hi", temprature=0.5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="did you mean 'idempotency_key'"):
        client.chat("hi", idempotence_key="x")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="did you mean 'logprobs'"):
        client.complete("hi", top_logprobs=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'documents'; what another server knows goes into extra_body"):
        await client.chat_once("hi", documents=[])  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'stream': chat and complete always stream"):
        await client.complete_once("hi", stream=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="extra_body must be a mapping, not list"):
        client.chat("hi", extra_body=["tools"])  # type: ignore[arg-type]


def test_a_value_of_a_wrong_type_is_refused_by_mypy() -> None:
    client = AsyncSluiceClient("http://there")
    client.chat("hi", temperature="hot")  # type: ignore[arg-type]
    client.chat("hi", service_tier="urgent")  # type: ignore[arg-type]
    client.chat("hi", slo={"ttft": 1.0})  # type: ignore[arg-type]
    client.chat("hi", stop=[1])  # type: ignore[list-item]
    client.chat("hi", logit_bias={5: "much"})  # type: ignore[arg-type]
    client.chat("hi", logprobs=3)  # type: ignore[arg-type]
    client.chat("hi", tools=[{"type": "function"}])  # type: ignore[typeddict-item]
    client.chat("hi", tool_choice="any")  # type: ignore[arg-type]
    client.chat([{"role": "robot", "content": "hi"}])  # type: ignore[list-item, misc]
    client.complete("hi", metadata={"run": 1})  # type: ignore[dict-item]


def test_values_of_each_right_type_are_taken_by_mypy() -> None:
    client = AsyncSluiceClient("http://there")
    options: StreamOptions = {"include_usage": False}
    sampling: ChatParams = {"temperature": 0, "top_p": 0.5, "top_k": 3, "logit_bias": {5: -100}}
    client.chat(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "Ada"},
            {"role": "assistant", "refusal": "no"},
        ],
        stream_options=options,
        slo={"ttft_s": 1},
        service_tier="flex",
        logprobs=True,
    )
    client.chat("hi", **sampling)
    client.complete([1, 2], stop=("a", "b"), stop_token_ids=range(3), seed=None, echo=True, metadata={"run": "1"})


async def test_what_is_not_given_is_not_sent_and_extra_fields_are_sent_as_they_are() -> None:
    server = Server(REPLY)
    async with running(server) as url, AsyncSluiceClient(url, model="m") as client:
        await client.complete_once("hi", seed=None, top_k=4, extra_body={"top_k": 5, "guided_regex": "a+", "x": None})
        await client.complete_once(["a", "b"], extra_body=None)
    assert server.posts == [
        {"model": "m", "prompt": "hi", "top_k": 5, "guided_regex": "a+", "x": None, "stream": False},
        {"model": "m", "prompt": ["a", "b"], "stream": False},
    ]


async def test_mappings_and_sequences_of_any_kind_are_sent() -> None:
    server = Server(REPLY)
    said: Any = collections.deque([MappingProxyType({"role": "user", "content": "hi"})])
    async with running(server) as url, AsyncSluiceClient(url, model="m") as client:
        await client.chat_once(said, logit_bias=MappingProxyType({5: 1.0}), stop_token_ids=range(2))
        with pytest.raises(TypeError, match="cannot have a bytes"):
            await client.chat_once("hi", user=b"me")  # type: ignore[arg-type]
    assert server.posts[0]["messages"] == [{"role": "user", "content": "hi"}]
    assert (server.posts[0]["logit_bias"], server.posts[0]["stop_token_ids"]) == ({"5": 1.0}, [0, 1])
