"""The recipes of docs/recipes.md; programs whose writes are told apart, and answers without any library."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
LIBRARIES: Final = ROOT / ".venv-recipes"
TEXT: Final = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
API: Final = "127.0.0.1:8000"
SITE: Final = "127.0.0.1:3000"
"""Where the page has a page of one's own, as it has Sluice at `API`."""
STORY: Final[dict[str, Any]] = {
    "model": "sluice-demo",
    "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
    "temperature": 0,
}
"""What every recipe asks."""
MIN_PIECES: Final = 5
"""Of a stream of it, which has some 200 tokens."""
LIMIT_S: Final = 120.0


def recipes() -> dict[str, list[str]]:
    """Return the blocks of each recipe, by its heading."""
    _, *parts = re.split(r"^## (.+)\n", TEXT, flags=re.MULTILINE)
    blocks = (re.findall(r"^```\w+\n(.*?)^```$", body, re.DOTALL | re.MULTILINE) for body in parts[1::2])
    return dict(zip(parts[::2], blocks, strict=True))


def run(argv: Sequence[str | Path], folder: Path) -> tuple[list[bytes], str]:
    """Run a program to its end, as somebody would who has set nothing.

    Returns:
        Each of its writes to the standard output by itself, and all that it wrote to the other one.
    """
    ours = ("PYTHON", "SLUICE_", "NATS_", "OPENAI_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    env["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    read_end, write_end = os.pipe2(os.O_DIRECT | os.O_CLOEXEC)  # so a write is a packet, and no read gives two
    errors = folder / "errors"
    with errors.open("w") as stderr, os.fdopen(read_end, "rb", buffering=0) as written:
        process = subprocess.Popen(argv, cwd=folder, env=env, stdout=write_end, stderr=stderr)
        os.close(write_end)
        try:
            pieces = list(iter(lambda: written.read(65536), b""))
        finally:
            process.kill()
            process.wait()
    return pieces, errors.read_text()


def post(host: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Return status, content type and body of an answer in chat."""
    connection = http.client.HTTPConnection(host, timeout=LIMIT_S)
    try:
        said = {"Content-Type": "application/json", **(headers or {})}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), said)
        answer = connection.getresponse()
        return answer.status, answer.headers.get_content_type(), answer.read().decode()
    finally:
        connection.close()


def text_of(answer: str) -> str:
    """Return the text of an answer that is no stream."""
    text: str = json.loads(answer)["choices"][0]["message"]["content"]
    return text


def pieces_of(stream: str) -> tuple[list[str], dict[str, Any] | None]:
    """Return the pieces of text in a stream of events, and the usage in its last one."""
    *events, done = re.findall(r"^data: (.*)$", stream, re.MULTILINE)
    assert done == "[DONE]"
    chunks = [json.loads(event) for event in events]
    pieces = [choice["delta"].get("content") for chunk in chunks for choice in chunk["choices"]]
    return [piece for piece in pieces if piece], chunks[-1].get("usage")
