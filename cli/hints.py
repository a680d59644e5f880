"""What a person pastes next: URLs, a curl line, a Python snippet, and where to look."""

from __future__ import annotations

import json
import shlex

from cli.console import Console

EXAMPLE_PROMPT = "Tell me a story about a fox."


def describe(console: Console, url: str, nats_url: str, model: str, prompt: str = EXAMPLE_PROMPT) -> str:
    """Return the text that says how to use the cluster at this URL."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": prompt}], "stream": True})
    rows = [
        ("API", f"{url}/v1"),
        ("models", f"{url}/v1/models"),
        ("metrics", f"{url}/metrics"),
        ("state", f"sluice status --url {url}"),
        ("chat", f"sluice chat --url {url}"),
        ("events", f"nats --server {nats_url} sub 'sluice.*.event.>'"),
    ]
    table = "\n".join(f"  {console.style(f'{name:<9}', 'bold')}{value}" for name, value in rows)
    curl = f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}"
    return f"{table}\n\n{curl}\n\n{_python(url, model, prompt)}\n"


def _python(url: str, model: str, prompt: str) -> str:
    return f"""\
from openai import OpenAI

client = OpenAI(base_url="{url}/v1", api_key="unused")
messages = [{{"role": "user", "content": {json.dumps(prompt)}}}]
for chunk in client.chat.completions.create(model="{model}", messages=messages, stream=True):
    print(chunk.choices[0].delta.content or "" if chunk.choices else "", end="", flush=True)"""
