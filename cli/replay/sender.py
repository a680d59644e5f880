"""Makes a workload ready for a server. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import numpy as np

from cli.bench.best_effort import tier_fields
from cli.bench.load import HttpLoad
from cli.bench.prompts import PromptMaker
from cli.bench.server import BenchServer
from cli.bench.workload import Planned
from shared.api_keys import Tier
from sim.workload.workload import Workload

FIRST_TOKEN_ID = 3
"""Smaller ids are control tokens in most vocabularies."""
VOCAB_SIZE = 100
"""Prompts are of ids below this unless told otherwise: every vocabulary has them."""
Prompts = Callable[[int], str | list[int]]
"""Returns the prompt of the request of this index."""


def token_prompts(workload: Workload, vocab_size: int = VOCAB_SIZE) -> Prompts:
    """Return prompts of exactly as many tokens as the workload says: the ids that a simulation draws."""
    return lambda index: workload.prompt(index, FIRST_TOKEN_ID, vocab_size).tolist()


def replay_load(session: aiohttp.ClientSession, server: BenchServer, workload: Workload, prompts: Prompts) -> HttpLoad:
    """Return the load of a replay, all of it made ready."""
    requests = planned(workload)
    bodies = [
        _body(server, prompts(index), request.num_output, _own_fields(workload, index) if server.is_own else {})
        for index, request in enumerate(requests)
    ]
    return HttpLoad(requests, bodies, session, server)


def best_effort_bodies(server: BenchServer, requests: Sequence[Planned], maker: PromptMaker) -> Callable[[int], bytes]:
    """Return what makes the best-effort request of a number; the requests begin again when all were asked."""

    def body(number: int) -> bytes:
        request = requests[number % len(requests)]
        more = tier_fields(server) | ({"ignore_eos": False} if request.text else {})
        return _body(server, request.text or maker.make(request.num_input), request.num_output, more)

    return body


def _body(server: BenchServer, prompt: str | list[int], num_output: int, more: dict[str, Any]) -> bytes:
    fields: dict[str, Any] = server.body(prompt, num_output)
    fields |= {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0.0, "ignore_eos": True}
    return json.dumps(fields | more).encode()


def _own_fields(workload: Workload, index: int) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if not np.isnan(workload.qoe_speed[index]):
        target = (float(workload.qoe_ttft_s[index]), float(workload.qoe_speed[index]))
        fields["qoe"] = dict(zip(("ttft_s", "speed_tokens_per_s"), target, strict=True))
    tier = Tier(int(workload.tier[index]))
    if tier is not Tier.DEFAULT:
        fields["service_tier"] = tier.label
    return fields


def planned(workload: Workload) -> list[Planned]:
    """Return the requests as a load has them."""
    columns = (workload.arrival_s, workload.num_prompt, workload.num_output)
    return [Planned(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
