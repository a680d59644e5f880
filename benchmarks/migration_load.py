"""Requests of one length that decode side by side, for benchmarks that move them (`benchmarks.migration`)."""

from __future__ import annotations

import asyncio

import numpy as np

from sim.cluster import SimCluster
from sim.requests import SimAnswer, SimRequest, serve_choices


class Load:
    """Requests under way, and the tokens that they have got; if they end, another one comes for each.

    Args:
        cluster: that is asked.
        num_tokens: of each prompt.
        num_output: fewest and most tokens of an answer.
        seed: draws both.
    """

    def __init__(self, cluster: SimCluster, num_tokens: int, num_output: tuple[int, int], seed: int) -> None:
        self.answers: dict[str, SimAnswer] = {}
        self._cluster = cluster
        self._num_tokens = num_tokens
        self._num_output = num_output
        self._random = np.random.default_rng(seed)
        self._tasks: list[asyncio.Task[None]] = []

    def ask(self, count: int) -> None:
        """Send so many more."""
        self._tasks += [asyncio.create_task(self._follow()) for _ in range(count)]

    async def _follow(self) -> None:
        while True:
            number = len(self.answers)
            prompt = self._random.integers(300, 31_000, self._num_tokens).astype(np.int32)
            fewest, most = self._num_output
            request = SimRequest(f"r{number}", prompt, int(self._random.integers(fewest, most + 1)), seed=number)
            answer = self.answers[request.request_id] = SimAnswer(request, asyncio.get_running_loop().time())
            await serve_choices(self._cluster.dispatcher, [answer])
            assert answer.failure is None, "none is refused"

    async def all_have(self, num_tokens: int) -> None:
        """Return once everybody asked so far has so many tokens."""
        await asyncio.sleep(0)
        first = list(self.answers.values())
        while any(len(answer.tokens) < num_tokens for answer in first):
            await asyncio.sleep(0.1)

    def token_s(self, name: str) -> np.ndarray:
        """Return when each token came, on the loop's clock."""
        answer = self.answers[name]
        return answer.arrival_s + np.array(answer.delivered_s)

    def gaps(self, names: set[str], until_s: tuple[float, float]) -> np.ndarray:
        """Return the times between the tokens that these got from then until then."""
        found = [np.zeros(0)]
        for name in sorted(names):
            token_s = self.token_s(name)
            found.append(np.diff(token_s[(token_s >= until_s[0]) & (token_s < until_s[1])]))
        return np.concatenate(found)

    async def end(self) -> None:
        """Let all readers leave."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
