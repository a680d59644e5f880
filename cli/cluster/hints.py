"""What a person pastes next: URLs, a curl line, a Python snippet, and where to look."""

from __future__ import annotations

import json
import shlex

from cli.cluster.children import ClusterPlan
from cli.console import Console
from shared.subjects import Subjects

EXAMPLE_PROMPT = "Tell me a story about a fox."


def next_steps(console: Console, plan: ClusterPlan, *, is_found: bool) -> str:
    """Return where the API is, and what most people do next.

    Args:
        console: where the person looks.
        plan: of the cluster.
        is_found: whether commands find it without being told where.
    """
    where = "" if is_found else f" --url {shlex.quote(plan.url)}"
    rows = [
        ("API", f"{plan.url}/v1"),
        ("chat", f"sluice chat{where}"),
        ("watch", f"sluice top{where}"),
        ("logs", f"sluice logs -f{'' if is_found else f' --cluster {plan.port}'}"),
    ]
    hint = "\n\nset SLUICE_API_KEY to a key first" if plan.settings.has_keys else ""
    return f"{_table(console, rows)}{hint}\n"


def describe(console: Console, plan: ClusterPlan, prompt: str = EXAMPLE_PROMPT) -> str:
    """Return the text that says how to use the cluster; a key stands in it as a variable, never itself."""
    url, model, has_keys = plan.url, plan.model_name, plan.settings.has_keys
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": prompt}], "stream": True})
    rows = [
        ("API", f"{url}/v1"),
        ("models", f"{url}/v1/models"),
        ("metrics", f"{url}/metrics"),
        ("state", f"sluice status --url {shlex.quote(url)}"),
        ("chat", f"sluice chat --url {shlex.quote(url)}"),
        ("events", f"nats --server {plan.nats_url} sub '{Subjects(plan.settings.cluster).all_events()}'"),
    ]
    key = ' -H "Authorization: Bearer $SLUICE_API_KEY"' if has_keys else ""
    endpoint = shlex.quote(f"{url}/v1/chat/completions")
    curl = f"curl -N {endpoint}{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
    hint = "set SLUICE_API_KEY to a key first\n\n" if has_keys else ""
    return f"{_table(console, rows)}\n\n{hint}{curl}\n\n{_python(url, model, prompt, has_keys=has_keys)}\n"


def _table(console: Console, rows: list[tuple[str, str]]) -> str:
    return "\n".join(f"  {console.style(f'{name:<9}', 'bold')}{value}" for name, value in rows)


def _python(url: str, model: str, prompt: str, *, has_keys: bool) -> str:
    imports, key = ("import os\n\n", 'os.environ["SLUICE_API_KEY"]') if has_keys else ("", '"unused"')
    return f"""\
{imports}from openai import OpenAI

client = OpenAI(base_url="{url}/v1", api_key={key})
messages = [{{"role": "user", "content": {json.dumps(prompt)}}}]
for chunk in client.chat.completions.create(model="{model}", messages=messages, stream=True):
    print(chunk.choices[0].delta.content or "" if chunk.choices else "", end="", flush=True)"""
