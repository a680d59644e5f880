"""Open WebUI's calls: those of docs/recipes.md as they stand, and what else its server sends. By `make test-recipes`.

What it sends is taken from its source, versions 0.6 to 0.11.
"""

from __future__ import annotations

import http.client
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.recipes import API, MIN_PIECES, STORY, pieces_of, post, recipes, text_of

pytestmark = pytest.mark.recipes

STARTED, CALLS = recipes()["Open WebUI"]
USER = {
    "X-OpenWebUI-User-Name": "Ada%20L",
    "X-OpenWebUI-User-Id": "6c1f0d1e-43d4-4d3b-9a53-9b4a4c3a6f10",
    "X-OpenWebUI-User-Email": "ada@example.org",
    "X-OpenWebUI-User-Role": "admin",
    "X-OpenWebUI-Chat-Id": "0e3d5a7c-3c2f-4ce5-8a39-5b1f8ce6a3d2",
}
"""With ENABLE_FORWARD_USER_INFO_HEADERS."""
TALKED = [
    {"role": "system", "content": "You tell stories to children."},
    *STORY["messages"],
    {"role": "assistant", "content": "There was once a little fox who could not swim."},
    {"role": "user", "content": [{"type": "text", "text": "And then?"}]},
]
SET = {
    "temperature": 0.8,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.05,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "repeat_penalty": 1.1,
    "max_tokens": 40,
    "seed": 42,
    "stop": ["The end"],
    "logit_bias": {"7": -100},
}
"""What a user can set for a chat."""
CLOCK = {
    "name": "get_current_timestamp",
    "description": "The time.",
    "parameters": {"type": "object", "properties": {}},
}
TASK = """### Task:
Find {what} for the conversation below, in its own language. Be short and plain: no emoji, no quotation marks, nothing
before or after the object.
### Output:
JSON format: {{ "{name}": {form} }}
### Chat History:
<chat_history>
USER: Tell me a story about a fox.
ASSISTANT: {story}
</chat_history>"""


def open_webui_env() -> dict[str, str]:
    """Return the environment in which Open WebUI is started."""
    *exports, start = STARTED.splitlines()
    assert start == "open-webui serve"
    words = [shlex.split(line) for line in exports]
    assert {first for first, *_ in words} == {"export"}
    return dict(word.split("=", 1) for _, *rest in words for word in rest)


def headers() -> dict[str, str]:
    return {"Authorization": f"Bearer {open_webui_env()['OPENAI_API_KEY']}", **USER}


def test_its_calls_as_they_stand_are_answered(cluster: str, story: str, tmp_path: Path) -> None:
    """The models, a stream and a title, one after the other."""
    env = open_webui_env()
    assert set(re.findall(r"http://\S+/v1", CALLS)) == {env["OPENAI_API_BASE_URL"]}
    assert set(re.findall(r"Bearer (\w+)", CALLS)) == {env["OPENAI_API_KEY"]}
    script = CALLS.replace(API, cluster)
    done = subprocess.run(["bash", "-ec", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    said = re.fullmatch(r"(\{.*?\})(data: .*\[DONE\])\s*(\{.*\})", done.stdout, re.DOTALL)
    assert said is not None, done.stdout
    assert [model["id"] for model in json.loads(said[1])["data"]] == ["sluice-demo"]
    pieces, usage = pieces_of(said[2])
    assert "".join(pieces) == story
    assert len(pieces) >= MIN_PIECES
    assert usage is not None
    assert usage["completion_tokens"] >= len(pieces)
    assert text_of(said[3])


def test_it_finds_the_models(cluster: str) -> None:
    connection = http.client.HTTPConnection(cluster)
    connection.request("GET", "/v1/models", headers=headers())
    models = json.loads(connection.getresponse().read())["data"]
    connection.close()
    assert [(model["id"], model["object"]) for model in models] == [("sluice-demo", "model")]


@pytest.mark.parametrize(
    "more",
    [{}, {"stream_options": {"include_usage": True}}, {"tools": []}, {"messages": TALKED}, {"messages": TALKED, **SET}],
    ids=["plain", "usage", "no tools", "talked", "set"],
)
def test_a_chat_comes_as_a_stream_whose_text_is_content(cluster: str, more: dict[str, Any]) -> None:
    body = {"stream": True, "model": "sluice-demo", "messages": STORY["messages"], **more}
    status, kind, stream = post(cluster, body, headers())
    assert (status, kind) == (200, "text/event-stream"), stream
    pieces, usage = pieces_of(stream)
    assert len(pieces) >= MIN_PIECES
    assert (usage is not None) == ("stream_options" in more)


@pytest.mark.parametrize(
    ("what", "name", "form", "more"),
    [
        ("a title", "title", '"a title"', {"max_tokens": 1000}),
        ("one to three tags", "tags", '["one", "two"]', {}),
        ("three further questions", "follow_ups", '["one?", "two?"]', {}),
    ],
)
def test_a_task_is_answered_as_a_whole(
    cluster: str, story: str, what: str, name: str, form: str, more: dict[str, Any]
) -> None:
    """That its answer is such an object is the model's business."""
    content = TASK.format(what=what, name=name, form=form, story=story)
    body = {"model": "sluice-demo", "messages": [{"role": "user", "content": content}], "stream": False, **more}
    status, kind, answer = post(cluster, body, headers())
    assert (status, kind) == (200, "application/json"), answer
    assert text_of(answer)


def test_its_own_tools_change_no_story(cluster: str) -> None:
    """It offers them unless function calling is legacy, as the page's line has it."""
    assert json.loads(open_webui_env()["DEFAULT_MODEL_PARAMS"]) == {"function_calling": "legacy"}
    body = {"stream": True, **STORY, "tools": [{"type": "function", "function": CLOCK}]}
    status, kind, stream = post(cluster, body, headers())
    assert (status, kind) == (200, "text/event-stream"), stream
    assert len(pieces_of(stream)[0]) >= MIN_PIECES
