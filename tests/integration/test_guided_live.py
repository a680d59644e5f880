"""Answers of a form of a real cluster: whatever is drawn, they end by themselves, and are what their schemas want.

Real processes and the demo model, which sees no schema: what holds its answers are the workers' masks alone.
`pytest tests/integration/test_guided_live.py -m slow`
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from itertools import product
from typing import Any, Final

import aiohttp
import jsonschema
import pytest

from tests.support.bounded_schemas import BOUNDED
from tests.support.cluster import Cluster, cluster

MODEL: Final = "sluice-demo"
MAX_TOKENS: Final = 512
MIN_SHARE: Final = 0.95
"""Of answers to bounded schemas that end by themselves."""
SAMPLINGS: Final[tuple[dict[str, Any], ...]] = (
    {"temperature": 0},
    {"temperature": 1},
    {"temperature": 2},
    {"temperature": 2, "top_k": 1000, "repetition_penalty": 0.5},
    {"temperature": 1, "top_p": 0.1, "presence_penalty": 2, "frequency_penalty": 2},
    {"temperature": 1.5, "min_p": 0.3, "logit_bias": {"5": 100}, "min_tokens": 100, "ignore_eos": True},
)

pytestmark = [pytest.mark.kernels, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def served() -> Iterator[Cluster]:
    with cluster("--workers", "2", "--threads", "1", "--memory", "512MiB", "--deterministic") as running:
        yield running
        running.wait_until_idle()


async def answers(http: aiohttp.ClientSession, served: Cluster, **body: Any) -> list[tuple[str, str]]:
    """Return text and finish reason of each choice."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Tell me."}], "max_tokens": MAX_TOKENS, **body}
    async with http.post(served.url + "/v1/chat/completions", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
    return [(choice["message"]["content"], choice["finish_reason"]) for choice in answer["choices"]]


def form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}


async def test_answers_to_bounded_schemas_end_and_are_valid(served: Cluster) -> None:
    async with aiohttp.ClientSession() as http:
        asked = list(product(BOUNDED, SAMPLINGS))
        found = await asyncio.gather(
            *(
                answers(http, served, response_format=form(BOUNDED[name]), n=2, seed=index, **sampling)
                for index, (name, sampling) in enumerate(asked)
            )
        )
    ended = 0
    for (name, sampling), choices in zip(asked, found, strict=True):
        for text, reason in choices:
            assert reason in ("stop", "length")
            if reason == "stop":
                ended += 1
                jsonschema.validate(json.loads(text), BOUNDED[name])
            else:
                print(f"not ended: {name} with {sampling}: {text}")
    assert ended / (2 * len(asked)) >= MIN_SHARE


@pytest.mark.parametrize(
    ("guide", "pattern"),
    [
        ({"guided_regex": "[a-f]{3}-[0-9]{2}"}, r"[a-f]{3}-[0-9]{2}"),
        ({"guided_choice": ["yes", "no", "per haps 🦊"]}, "yes|no|per haps 🦊"),
        ({"guided_grammar": 'root ::= "(" [0-9]{1,3} ")"'}, r"\([0-9]{1,3}\)"),
        ({"structured_outputs": {"grammar": 'start: A A\nA: "x" | "yz"'}}, "(x|yz)(x|yz)"),
    ],
)
async def test_other_forms_hold(served: Cluster, guide: dict[str, Any], pattern: str) -> None:
    async with aiohttp.ClientSession() as http:
        for seed, sampling in enumerate(SAMPLINGS):
            for text, reason in await answers(http, served, n=3, seed=seed, **guide, **sampling):
                assert (reason, bool(re.fullmatch(pattern, text))) == ("stop", True), (text, sampling)


async def test_streams_say_what_whole_answers_say(served: Cluster) -> None:
    body = {"model": MODEL, "prompt": "Once", "max_tokens": MAX_TOKENS, "seed": 3, "stream": True}
    async with aiohttp.ClientSession() as http:
        for name in ("story", "many", "day"):
            asked = {**body, "guided_json": BOUNDED[name]}
            async with http.post(served.url + "/v1/completions", json=asked) as response:
                events = [line[6:] async for line in response.content if line.startswith(b"data: {")]
            streamed = "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])
            async with http.post(served.url + "/v1/completions", json={**asked, "stream": False}) as response:
                whole = (await response.json())["choices"][0]
            assert (streamed, "stop") == (whole["text"], whole["finish_reason"])
            jsonschema.validate(json.loads(streamed), BOUNDED[name])
