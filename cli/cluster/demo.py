"""`sluice demo`: a cluster, one answer through it, and what part of the time was pacing."""

from __future__ import annotations

import asyncio
import sys

from cli.answer import describe_answer, describe_pacing, show_answer, start_answer
from cli.cluster.cluster import Cluster, run_cluster
from cli.cluster.hints import describe
from cli.cluster.settings import UpSettings
from cli.console import Console
from cli.conversation import Pacing
from shared.errors import StartupError
from shared.process.tasks import ends_before
from sluice_client.async_client import AsyncSluiceClient

DEFAULTS = {"workers": 2, "port": 0}
"""Where `sluice demo` differs from `sluice up`."""
MAX_TOKENS = 400


async def run_demo(settings: UpSettings, console: Console, prompt: str, pacing: Pacing, *, is_interactive: bool) -> int:
    """Return the exit code.

    Args:
        settings: of the cluster.
        console: where the person looks.
        prompt: the question.
        pacing: of what is shown.
        is_interactive: whether to stay up after the answer until Ctrl-C.

    Raises:
        StartupError: a key is asked for, and the demo has none.
    """
    if settings.has_keys and not settings.api_key:
        raise StartupError("the demo asks its own question, and has no key for it", "Give one with --api-key")

    async def show(cluster: Cluster, stop: asyncio.Event) -> int:
        if not await _answer(cluster, console, prompt, pacing, stop):
            return 0
        plan = cluster.plan
        sys.stdout.write(f"\n{describe(console, plan, prompt)}\n")
        sys.stdout.flush()
        if is_interactive:
            console.line("the cluster stays up; talk to it with the chat command above from another terminal")
            console.line("Ctrl-C stops it")
            await stop.wait()
        else:
            console.line("the cluster ends now, since no terminal is here to stop it from; `sluice up -d` keeps one")
        return 0

    return await run_cluster(settings, console, show)


async def _answer(cluster: Cluster, console: Console, prompt: str, pacing: Pacing, stop: asyncio.Event) -> bool:
    """Stream the answer; return whether it came to its end before the person stopped it."""
    plan = cluster.plan
    sys.stdout.write(f"\n{console.style('you', 'bold')}: {prompt}\n\n{console.style(plan.model_name, 'bold')}: ")
    sys.stdout.flush()
    api_key = plan.settings.api_key or None
    async with AsyncSluiceClient(plan.url, model=plan.model_name, api_key=api_key) as client:
        answer = start_answer(client, [{"role": "user", "content": prompt}], pacing=pacing, max_tokens=MAX_TOKENS)
        if not await ends_before(stop, show_answer(answer, sys.stdout, len(plan.model_name) + 2)):
            return False
    sys.stdout.write(f"\n{console.style(describe_answer(answer), 'cyan')}\n")
    sys.stdout.write(f"{console.style(describe_pacing(answer, pacing), 'cyan')}\n")
    return True
