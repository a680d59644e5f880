"""The model that ships does through a whole cluster what docs/recipes.md says that it knows, streamed or not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import openai
import pytest

from tests.support.cluster import cluster
from tests.support.recipes import TEXT
from tests.support.tool_templates import ADD

SUM: Final = "What is 3 + 4?"
STORY: Final = "Tell me a story about a fox."
PARTS: Final = "Tell me hero, place and wish of that story as JSON."
THINKING: Final[dict[str, Any]] = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
SCHEMA: Final = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("hero", "place", "wish")},
    "required": ["hero", "place", "wish"],
    "additionalProperties": False,
}
FORM: Final = {"type": "json_schema", "json_schema": {"name": "parts", "schema": SCHEMA, "strict": True}}

Ask = Callable[..., Any]
"""Gives the first choice of the answer to some messages, with further parameters."""

pytestmark = [pytest.mark.kernels, pytest.mark.slow]


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    own = ("--memory", "128MiB", "--threads", "1", "--deterministic")
    with cluster(*own) as up, openai.OpenAI(base_url=up.url + "/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture(params=["whole", "streamed"])
def ask(client: openai.OpenAI, request: pytest.FixtureRequest) -> Ask:
    def found(messages: list[Any], **more: Any) -> Any:
        body: dict[str, Any] = {"model": "sluice-demo", "messages": messages, "temperature": 0, **more}
        if request.param == "whole":
            return client.chat.completions.create(**body).choices[0]
        with client.chat.completions.stream(**body) as stream:
            return stream.get_final_completion().choices[0]

    return found


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def thought(message: Any) -> str:
    """Return what was thought; a stream does not name it where there is nothing."""
    return getattr(message, "reasoning_content", None) or ""


def test_the_page_says_what_is_asked_here() -> None:
    page = " ".join(TEXT.split())
    assert all(f'"{question}"' in page for question in (SUM, PARTS))
    assert STORY in page


@pytest.mark.parametrize("result", [7, 12])
@pytest.mark.parametrize("more", [{}, {"tool_choice": "required"}, THINKING], ids=["auto", "required", "thinking"])
def test_it_asks_the_tool_for_a_sum_and_says_its_result(ask: Ask, more: dict[str, Any], result: int) -> None:
    choice = ask([user(SUM)], tools=[ADD], **more)
    assert (choice.finish_reason, choice.message.content or "") == ("tool_calls", "")
    assert ("3 and 4" in thought(choice.message)) == (more is THINKING)
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 3, "b": 4})
    said = {"role": "tool", "tool_call_id": call.id, "content": str(result)}
    choice = ask([user(SUM), choice.message.model_dump(exclude_none=True), said], tools=[ADD])
    assert choice.finish_reason == "stop"
    assert re.findall(r"\d+", choice.message.content) == ["3", "4", str(result)]


def test_a_strict_tool_gets_its_own_names(ask: Ask) -> None:
    """The model by itself has others for them."""
    numbers = {name: {"type": "integer"} for name in ("foo", "bar")}
    schema = {"type": "object", "properties": numbers, "required": list(numbers), "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "add", "parameters": schema, "strict": True}}
    (call,) = ask([user(SUM)], tools=[tool]).message.tool_calls
    assert json.loads(call.function.arguments) == {"foo": 3, "bar": 4}


def test_a_tool_changes_no_story(ask: Ask) -> None:
    assert "fox" in ask([user(STORY)], tools=[ADD]).message.content


@pytest.mark.parametrize("more", [{}, {"response_format": FORM}], ids=["free", "by a schema"])
def test_it_gives_a_story_s_parts_as_json(ask: Ask, more: dict[str, Any]) -> None:
    story = ask([user(STORY)]).message.content
    choice = ask([user(STORY), {"role": "assistant", "content": story}, user(PARTS)], **more)
    parts = json.loads(choice.message.content)
    assert list(parts) == SCHEMA["required"]
    name = parts["hero"].rpartition(" ")[2]
    assert all(found in story for found in ("fox", name, parts["place"], parts["wish"].removeprefix("to ")))


def test_it_thinks_a_line_if_it_is_asked_to(ask: Ask) -> None:
    plain, thinking = ask([user(SUM)]).message, ask([user(SUM)], **THINKING).message
    assert (thought(plain), "\n" in thought(thinking)) == ("", False)
    for text in (plain.content, thinking.content, thought(thinking)):
        assert re.findall(r"\d+", text) == ["3", "4", "7"]
    short = ask([user(SUM)], extra_body={**THINKING["extra_body"], "thinking_token_budget": 1}).message
    assert (thought(short), short.content) == ("3", plain.content)
