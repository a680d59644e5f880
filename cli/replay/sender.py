"""Sends a workload to a server, each request when it is due, and keeps what came of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import numpy as np

from cli.bench.load import Load
from cli.bench.server import Server
from cli.bench.stream import Outcome, stream_answer
from cli.bench.workload import Planned
from sim.scenarios.load import BEST_EFFORT
from sim.workload.workload import Workload

FIRST_TOKEN_ID = 3
"""Smaller ids are control tokens in most vocabularies."""
VOCAB_SIZE = 100
"""Prompts are of ids below this unless told otherwise: every vocabulary has them."""
OWN = "sluice"
"""What our server calls itself: it alone is told of readers and classes, which others may refuse."""
Prompts = Callable[[int], str | list[int]]
"""Returns the prompt of the request of this index."""


def token_prompts(workload: Workload, vocab_size: int = VOCAB_SIZE) -> Prompts:
    """Return prompts of exactly as many tokens as the workload says: the ids that a simulation draws."""
    return lambda index: workload.prompt(index, FIRST_TOKEN_ID, vocab_size).tolist()


class Sender:
    """One replay.

    Args:
        session: with the time limit and the headers.
        server: whom to ask.
        workload: what is sent; all of it is made ready here, before the first request.
        prompts: of its requests.
    """

    def __init__(self, session: aiohttp.ClientSession, server: Server, workload: Workload, prompts: Prompts) -> None:
        self._session = session
        self._server = server
        self._bodies = [self._body(workload, i, prompts(i)) for i in range(len(workload))]
        self.load = Load(_planned(workload), self._send)

    @property
    def outcomes(self) -> Sequence[Outcome]:
        """Of every request that was sent so far, in order."""
        return self.load.outcomes

    def _body(self, workload: Workload, index: int, prompt: str | list[int]) -> bytes:
        fields: dict[str, Any] = self._server.body(prompt, int(workload.num_output[index]))
        fields |= {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0.0, "ignore_eos": True}
        if self._server.owner == OWN:
            fields |= _own_fields(workload, index)
        return json.dumps(fields).encode()

    async def _send(self, index: int, outcome: Outcome) -> None:
        url = self._server.endpoint_url
        await stream_answer(self._session, url, self._bodies[index], self.load.clock, outcome)


def _own_fields(workload: Workload, index: int) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if not np.isnan(workload.qoe_speed[index]):
        target = (float(workload.qoe_ttft_s[index]), float(workload.qoe_speed[index]))
        fields["qoe"] = dict(zip(("ttft_s", "speed_tokens_per_s"), target, strict=True))
    if workload.request_class[index] == BEST_EFFORT:
        fields["service_tier"] = "flex"
    return fields


def _planned(workload: Workload) -> list[Planned]:
    columns = (workload.arrival_s, workload.num_prompt, workload.num_output)
    return [Planned(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
