"""An engine and a step loop over a given executor, and what its requests get to read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from services.worker.contract.batch import OWN_SAMPLE, Batch, BatchOutput
from services.worker.contract.executor import Executor
from services.worker.engine.engine import Engine
from services.worker.engine.gate import StepGate
from services.worker.engine.invariants import check_engine
from services.worker.engine.loop import StepLoop
from services.worker.executor.launched import Launched
from services.worker.executor.model_runner import ModelRunner
from services.worker.executor.thread import ThreadExecutor
from services.worker.sequences.config import NewSequence
from services.worker.sequences.events import StepEvents
from shared.types import FinishReason, Thinking
from tests.support.checkpoints import CheckpointShape
from tests.support.engine_builders import make_engine, new_sequence
from tests.support.runner_driver import Driver
from tests.support.runners import open_runner

SHAPE = CheckpointShape(seed=5)
KINDS = ("greedy", "drawn", "filtered", "bias", "counted", "logprobs", "stops", "guided", "budget")
"""What requests may ask for."""
_THINKING = Thinking(opening_id=300, closing_id=301, is_open=True, budget=4)
Answers = dict[int, tuple[list[int], FinishReason, list[float]]]
"""By stream: tokens, why they ended, and the log-probabilities that were asked for."""


def sampling_of(kind: str, seed: int) -> dict[str, Any]:
    choices: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "drawn": {"temperature": 0.9, "seed": seed},
        "filtered": {"temperature": 0.9, "seed": seed, "top_p": 0.8},
        "bias": {"temperature": 0.9, "seed": seed, "logit_bias": ((7, 2.0),)},
        "counted": {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        "logprobs": {"temperature": 0.0, "logprobs": 1},
        "stops": {"temperature": 0.9, "seed": seed, "stop_token_ids": tuple(range(3, 60))},
        "guided": {"temperature": 0.9, "seed": seed, "grammar": b"start: /[a-z]{40,60}/"},
        "budget": {
            "temperature": 0.9,
            "seed": seed,
            "top_p": 0.8,
            "thinking": _THINKING,
            "grammar": b"start: /[0-9]{20,}/",
        },
    }
    return choices[kind]


def requests(kinds: tuple[str, ...], num_each: int) -> list[NewSequence]:
    news = []
    for name, kind in enumerate(kinds * num_each):
        new = new_sequence(name, num_prompt=3 + 5 * name % 23, max_tokens=9 + name % 7, ignore_eos=True)
        news.append(replace(new, sampling=new.sampling.model_copy(update=sampling_of(kind, name))))
    return news


def engine_for(runner: ModelRunner, *, overlaps: bool) -> Engine:
    return make_engine(
        num_blocks=runner.capacity.num_blocks,
        max_sequences=24,
        max_batch_tokens=96,
        max_model_len=runner.info.max_model_len,
        vocab_size=SHAPE.vocab_size,
        block_size=16,
        overlaps=overlaps,
    )


async def answers(waves: Sequence[Sequence[NewSequence]], *, overlap: bool, **changes: Any) -> tuple[Answers, int]:
    """Serve the requests by a model; return also how many decodes went ahead.

    Args:
        waves: see `answers_of`.
        overlap: steps are launched before those before them have ended.
        changes: of the runner's settings.
    """
    runner = open_runner(SHAPE, deterministic=True, overlap=overlap, max_rows=24, **changes)
    executor = ThreadExecutor(runner, asyncio.get_running_loop())
    assert (executor.depth, executor.num_lanes) == (1 + overlap, 1)
    num_ahead = 0

    def count(batch: Batch) -> None:
        nonlocal num_ahead
        num_ahead += int((batch.tokens == OWN_SAMPLE).sum())

    said = await answers_of(engine_for(runner, overlaps=overlap), executor, waves, count)
    await executor.close()
    return said, num_ahead


async def answers_of(
    engine: Engine, executor: Executor, news: Sequence[Sequence[NewSequence]], on_step: Callable[[Batch], None]
) -> Answers:
    """Serve requests that come in waves, each in the midst of the one before, or behind it; the executor stays open."""
    answers: Answers = {new.stream: ([], FinishReason.NONE, []) for wave in news for new in wave}
    waves = list(news)
    num_said = 0

    def add() -> None:
        for new in waves.pop(0):
            assert isinstance(engine.registry.add(new), int)
        loop.wake()

    def say(events: StepEvents) -> None:
        nonlocal num_said
        for i, (stream, token, finish) in enumerate(
            zip(events.stream.tolist(), events.tokens.tolist(), events.finish.tolist(), strict=True)
        ):
            tokens, _, logprobs = answers[stream]
            tokens += [token] if token >= 0 else []
            logprobs += [said.logprob for each in events.extras if each.index == i for said in each.logprobs]
            answers[stream] = (tokens, FinishReason(finish), logprobs)
            num_said += token >= 0
        if waves and num_said >= 12:
            num_said = 0
            add()

    def check(batch: Batch, _output: BatchOutput) -> None:
        check_engine(engine)
        on_step(batch)

    loop = StepLoop(engine, executor, say, asyncio.get_running_loop().time, StepGate(), on_step=check)
    add()
    task = asyncio.create_task(loop.run())
    while waves or engine.table.num_sequences:
        assert not task.done(), task.exception()
        if waves and not engine.table.num_sequences:
            add()
        await asyncio.sleep(0.002)
    loop.close()
    await task
    return answers


def driven_texts(
    driver: Driver, num_steps: int, seed: int, *, is_ahead: bool, look: Callable[[Launched], None] = lambda _: None
) -> list[list[int]]:
    """Let all sequences of a driver decode together, in another order with every step; return what each says.

    Args:
        driver: each of its sequences has one token to compute.
        num_steps: of them.
        seed: of the orders.
        is_ahead: every step is launched before the first one has ended.
        look: at what was launched.
    """
    random, count = np.random.default_rng(seed), len(driver.sequences)
    texts: list[list[int]] = [[] for _ in driver.sequences]
    under_way: list[tuple[list[int], Launched]] = []
    for number in range(num_steps):
        order = random.permutation(count).tolist()
        work = [(driver.sequences[place], 1) for place in order]
        batch = driver.batch(work)
        if is_ahead and number:
            own = np.full(count, OWN_SAMPLE, dtype=np.int32)
            batch = replace(batch, tokens=own, sample=np.ones(count, dtype=np.bool_))
        launched = driver.runner.launch(batch)
        look(launched)
        tokens = [0] * count if is_ahead else launched.end().tokens.tolist()
        for (sequence, _), token in zip(work, tokens, strict=True):
            sequence.num_computed += 1
            sequence.tokens.append(token)
        under_way += [(order, launched)] if is_ahead else []
        for place, token in zip(order, [] if is_ahead else tokens, strict=not is_ahead):
            texts[place].append(token)
    for order, launched in under_way:
        for place, token in zip(order, launched.end().tokens.tolist(), strict=True):
            texts[place].append(token)
    return texts
