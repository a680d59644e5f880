"""The server under load: what it serves, how its requests look, and how it counts tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import aiohttp
import numpy as np

from cli.bench.answers import count_of, parse_answer
from cli.bench.prompts import PromptMaker, TokenScale, scale_of
from cli.exit_codes import FAILED, UNREACHABLE, CommandError
from cli.http import check_url, read_body, refusal_hint, topic_of
from sluice_client.transport import describe

CHECK_LIMIT = aiohttp.ClientTimeout(total=10)
MAX_OWNER = 40
OWN = "sluice"
"""What our server calls itself."""
PROBE_IDS = range(3, 19)
"""Ids that every vocabulary has, and that are no control tokens in most."""
NO_SUCH_PATH = (404, 405, 501)
LONG_WORDS = 120
"""The longer of the two prompts by which the server's counting is measured; a sixth of it is the shorter one. A small
context shortens both."""


@dataclass(frozen=True, slots=True)
class BenchServer:
    """An OpenAI-compatible server."""

    base_url: str
    model: str
    endpoint: Literal["chat", "completions"]
    max_model_len: int = 0
    """Most tokens of prompt and answer; 0 if the server does not say."""
    owner: str = ""
    """Who the server says owns the model, in practice the name of the engine: `sluice`, `vllm`, `sglang`."""

    @property
    def is_own(self) -> bool:
        """Whether it is Sluice, which alone is told of readers and classes: others may refuse such fields."""
        return self.owner == OWN

    @property
    def endpoint_url(self) -> str:
        """Where requests go."""
        return f"{self.base_url}/v1/{'chat/completions' if self.endpoint == 'chat' else 'completions'}"

    @classmethod
    async def find(
        cls, session: aiohttp.ClientSession, url: str, model: str, endpoint: Literal["chat", "completions"]
    ) -> Self:
        """Return the server at this URL, with the model asked for or the first that it lists.

        Raises:
            CommandError: it is no URL, nothing answers there, or it serves no such model.
        """
        base_url = check_url(url)
        models = await _models(session, base_url)
        if models and model and model not in models:
            raise CommandError(f"{base_url} does not serve '{model}'", f"It serves: {', '.join(models)}", FAILED)
        if not models and not model:
            raise CommandError(f"{base_url} lists no model", "Name one with --model", FAILED)
        name = model or next(iter(models))
        entry = models.get(name, {})
        owner = str(entry.get("owned_by") or "")[:MAX_OWNER]
        return cls(base_url, name, endpoint, count_of(entry.get("max_model_len")) or 0, owner)

    def body(self, prompt: str | list[int], max_tokens: int) -> dict[str, Any]:
        """Return the fields of a request."""
        if self.endpoint == "completions":
            return {"model": self.model, "prompt": prompt, "max_tokens": max_tokens}
        return {"model": self.model, "messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens}


async def _models(session: aiohttp.ClientSession, base_url: str) -> dict[str, dict[str, Any]]:
    """Return what the server says of each model, by its name; empty if it has no such list."""
    url = f"{base_url}/v1/models"
    try:
        async with session.get(url, timeout=CHECK_LIMIT) as response:
            status, body = response.status, await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        hint = "Start a cluster with `sluice up`, or name another with --url"
        said = f"nothing answers at {base_url} ({describe(error)})"
        raise CommandError(said, hint, UNREACHABLE, "nothing_answers") from error
    if status in (401, 403):
        said = body.decode(errors="replace")[:200]
        hint = refusal_hint(said, "Give a key with --api-key, or set SLUICE_API_KEY")
        raise CommandError(f"{url} answers {status}: {said}", hint, FAILED, topic_of(body.decode(errors="replace")))
    listed = parse_answer(body) if status == 200 else None
    entries = listed.get("data") if isinstance(listed, dict) else None
    found = entries if isinstance(entries, list) else []
    return {str(entry["id"]): entry for entry in found if isinstance(entry, dict) and "id" in entry}


async def probe_completions(server: BenchServer, session: aiohttp.ClientSession) -> Literal["ids", "text", "none"]:
    """Return what `/v1/completions` takes: `ids` if a prompt may be token ids, which count as so many tokens.

    `none` means that there is no such path.

    Raises:
        CommandError: no answer.
    """
    status, body = await _post(server, session, list(PROBE_IDS))
    if status in NO_SUCH_PATH:
        return "none"
    return "ids" if status == 200 and _prompt_tokens(body) == len(PROBE_IDS) else "text"


async def measure_scale(
    server: BenchServer, session: aiohttp.ClientSession, rng: np.random.Generator, texts: Sequence[str]
) -> TokenScale:
    """Return how the server counts words, from two prompts: of the data set's texts, or made up if there are none.

    Raises:
        CommandError: it refuses even a short request, so that a load makes no sense.
    """
    longest = min(LONG_WORDS, server.max_model_len // 8) if server.max_model_len else LONG_WORDS
    drawn = str(PromptMaker(rng, TokenScale(tokens_per_word=1.0)).make(LONG_WORDS)).split()
    words = [word for text in texts for word in text.split()]
    words = (words if len(words) > 1 else drawn)[: max(longest, 2)]
    short, long = " ".join(words[: max(len(words) // 6, 1)]), " ".join(words)
    counts = [await _count(server, session, text) for text in (short, long)]
    if counts[0] is None or counts[1] is None:
        return TokenScale()
    return scale_of((len(short.split()), counts[0]), (len(long.split()), counts[1]))


async def _count(server: BenchServer, session: aiohttp.ClientSession, text: str) -> int | None:
    """Return the tokens of a prompt as the server counts them, or None if it does not say."""
    status, body = await _post(server, session, text)
    if status != 200:
        said = body.decode(errors="replace")[:200]
        raise CommandError(f"{server.endpoint_url} answers {status}: {said}", "See --endpoint", FAILED, topic_of(said))
    return _prompt_tokens(body)


async def _post(server: BenchServer, session: aiohttp.ClientSession, prompt: str | list[int]) -> tuple[int, bytes]:
    """Return status and body of the answer to a request for one token."""
    try:
        async with session.post(server.endpoint_url, json=server.body(prompt, 1)) as response:
            return response.status, await read_body(response)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        hint = "See whether it is well, or allow more with --timeout-s"
        raise CommandError(f"no answer from {server.endpoint_url} ({type(error).__name__})", hint, FAILED) from error


def _prompt_tokens(body: bytes) -> int | None:
    answer = parse_answer(body)
    usage = answer.get("usage") if isinstance(answer, dict) else None
    return count_of(usage.get("prompt_tokens")) if isinstance(usage, dict) else None
