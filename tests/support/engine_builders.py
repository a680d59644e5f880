"""Builders with defaults for tests of the engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from services.worker.contract.executor import HostMemory
from services.worker.cost.estimate import CostEstimate
from services.worker.engine.engine import Engine
from services.worker.scheduling.registry import SCHEDULERS, make_scheduler
from services.worker.scheduling.view import Scheduler
from services.worker.sequences.config import EngineConfig, NewSequence
from shared.api_keys import Tier
from shared.cost import CostModel
from shared.ids import RequestId, StreamId
from shared.types import ReaderTarget, SamplingParams

FOREVER = 1e12
FIRST_COME = sorted(
    set(SCHEDULERS) - {"andes", "lqsf", "sluice", "tokenflow", "bros", "bros-whole", "class-round-robin"}
)
"""Schedulers that serve who comes first, and whose steps take all that their limits allow."""


def per_token(token_s: float, *, pair_s: float = 0.0, read_s: float = 0.0) -> CostModel:
    """Steps that cost nothing but for each token, each pair of prefill, and each token of KV that a decode reads."""
    return CostModel(g0_s=0, b0_s=0, g1_s=0, b1_s=token_s, d_s=read_s, a_s=pair_s)


SLOW = per_token(1.0)
"""A token takes a second, so moving KV costs next to nothing."""


_LIMITS = EngineConfig(
    max_sequences=16,
    max_batch_tokens=32,
    max_batch_rows=8,
    max_model_len=256,
    vocab_size=100,
    eos_token_ids=(),
    block_size=4,
    finished_kept=32,
)


def engine_config(**changes: Any) -> EngineConfig:
    """Small limits: 32 tokens and 8 rows a step, a context of 256, blocks of 4, a vocabulary of 100 without EOS."""
    return replace(_LIMITS, **changes)


def make_engine(
    scheduler: str | Scheduler = "chunked",
    *,
    num_blocks: int = 64,
    config: EngineConfig | None = None,
    num_host_blocks: int = 0,
    block_copy_s: float = 1e-6,
    host: HostMemory | None = None,
    cost: CostModel = SLOW,
    **limits: Any,
) -> Engine:
    """With host blocks KV is swapped, as long as they last: moving costs next to nothing unless told otherwise.

    `limits` are those of `engine_config` that are others, if there is no `config`.
    """
    chosen = make_scheduler(scheduler) if isinstance(scheduler, str) else scheduler
    if num_host_blocks:
        host = HostMemory(num_host_blocks, 1024, block_copy_s)
    return Engine(config or engine_config(**limits), chosen, num_blocks, host, CostEstimate(cost))


def new_sequence(
    name: int = 0,
    *,
    num_prompt: int = 5,
    prompt: list[int] | None = None,
    generated: list[int] | None = None,
    max_tokens: int = 4,
    stop_token_ids: tuple[int, ...] = (),
    ignore_eos: bool = False,
    seed: int = 0,
    attempt: int = 1,
    channel: int = 0,
    arrival_s: float | None = None,
    expires_s: float = FOREVER,
    qoe: ReaderTarget | None = None,
    tier: Tier = Tier.DEFAULT,
    fork_of: int | str | None = None,
    salt: str = "",
) -> NewSequence:
    """Request `r<name>` on stream 1000 + name, arriving at `name` seconds unless told otherwise."""
    ids = prompt if prompt is not None else [(7 * name + 3 * i) % 97 + 2 for i in range(num_prompt)]
    return NewSequence(
        request_id=RequestId(f"r{name}"),
        stream=StreamId(1000 + name),
        attempt=attempt,
        channel=channel,
        prompt=np.array(ids, dtype=np.uint32),
        generated=np.array(generated or [], dtype=np.uint32),
        sampling=SamplingParams(
            max_tokens=max_tokens, stop_token_ids=stop_token_ids, ignore_eos=ignore_eos, seed=seed, temperature=0
        ),
        arrival_s=float(name) if arrival_s is None else arrival_s,
        expires_s=expires_s,
        tier=tier,
        qoe=qoe,
        fork_of=None if fork_of is None else RequestId(f"r{fork_of}"),
        cache_salt=salt,
    )
