"""A loop of calls and results by the openai package, with a cluster whose model always calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.cluster import Cluster, cluster
from tests.support.reciting import save_caller
from tests.support.tool_templates import ADD

pytestmark = [pytest.mark.kernels, pytest.mark.slow]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = save_caller(tmp_path_factory.mktemp("caller"))
    own = ("--model", str(folder), "--served-model-name", "caller", "--memory", "128MiB", "--threads", "1")
    with cluster(*own) as found:
        yield found


def finish(client: openai.OpenAI, *, streamed: bool) -> tuple[list[Any], str | None]:
    """Run the loop as its users write it; return the results that it computed, and the last answer."""
    messages: list[Any] = [{"role": "user", "content": "What is 1 + 2?"}]
    results: list[Any] = []
    for _ in range(3):
        ask: dict[str, Any] = {"model": "caller", "messages": messages, "tools": [ADD], "temperature": 0}
        if streamed:
            with client.chat.completions.stream(**ask) as stream:
                kinds = {event.type for event in stream}
                choice: Any = stream.get_final_completion().choices[0]
            assert ("tool_calls.function.arguments.done" in kinds) == (choice.finish_reason == "tool_calls")
        else:
            choice = client.chat.completions.create(**ask).choices[0]
        if choice.finish_reason != "tool_calls":
            return results, choice.message.content
        assert not choice.message.content
        messages.append(choice.message.model_dump(exclude_none=True))
        for call in choice.message.tool_calls:
            assert call.function.name == "add"
            results.append(sum(json.loads(call.function.arguments).values()))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(results[-1])})
    return results, None


@pytest.mark.parametrize("streamed", [False, True])
def test_the_openai_package_runs_its_loop_to_the_end(up: Cluster, streamed: bool) -> None:
    with openai.OpenAI(base_url=up.url + "/v1", api_key="none", max_retries=0) as client:
        assert finish(client, streamed=streamed) == ([3], "It is three.")
