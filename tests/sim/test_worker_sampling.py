"""Log-probabilities and minimal lengths through the whole worker, on the virtual clock and over the bus in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from services.worker.serving.emitter import Emitter
from shared.process.tasks import TaskOwner
from shared.stream_extras import TokenLogprob
from shared.token_batch import TokenBatch
from shared.types import FinishReason, SamplingParams
from tests.support.fake_dispatcher import Stream
from tests.support.lone_worker import LoneWorker, lone_worker

pytestmark = pytest.mark.virtual_time


@asynccontextmanager
async def one_worker() -> AsyncIterator[LoneWorker]:
    """A worker whose dispatcher speaks now and then."""
    async with lone_worker(max_model_len=8192, max_batch_tokens=64) as lone, TaskOwner() as tasks:
        tasks.start(lone.dispatcher.renew_forever("w0"), name="renew")
        yield lone


async def submitted(lone: LoneWorker, **values: Any) -> Stream:
    submit = lone.dispatcher.make([5, 6, 7], 1).model_copy(update={"sampling": SamplingParams(**values)})
    return await lone.accepted(submit)


async def until_end(lone: LoneWorker, **values: Any) -> Stream:
    stream = await submitted(lone, **values)
    await stream.ended.wait()
    return stream


def expected(lone: LoneWorker, stream: Stream, count: int) -> list[TokenLogprob]:
    return [lone.worker.draw.logprob(token, count) for token in stream.tokens]


def said(batch_or_stream: TokenBatch | Stream) -> list[TokenLogprob]:
    extras = batch_or_stream.extras if isinstance(batch_or_stream, Stream) else batch_or_stream.stream_extras()
    return [token for extra in extras for token in extra.logprobs]


async def test_log_probabilities_reach_the_dispatcher_with_their_tokens_and_again_in_a_replay() -> None:
    async with one_worker() as lone:
        plain = await submitted(lone, max_tokens=300)
        stream = await until_end(lone, max_tokens=300, logprobs=2, seed=3)
        assert said(stream) == expected(lone, stream, 2)
        assert len(stream.tokens) == 300
        await plain.ended.wait()
        assert not said(plain)
        batch = await lone.dispatcher.replay(stream, 20)
        assert batch is not None
        assert batch.tokens.tolist() == stream.tokens[20:]
        assert said(batch) == expected(lone, stream, 2)[20:]


async def test_a_replay_that_fits_no_message_is_cut_and_can_be_asked_for_from_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """400 tokens with 20 alternatives each take 400 · 172 bytes, and a message holds 50 000."""
    monkeypatch.setattr(Emitter, "max_payload_bytes", 50_000)
    async with one_worker() as lone:
        stream = await until_end(lone, max_tokens=400, logprobs=20)
        tokens: list[int] = []
        logprobs: list[TokenLogprob] = []
        finishes: list[int] = []
        for _ in range(2):
            batch = await lone.dispatcher.replay(stream, len(tokens))
            assert batch is not None
            assert batch.packed_bytes <= 50_000
            tokens += batch.tokens.tolist()
            logprobs += said(batch)
            finishes += batch.finish.tolist()
        assert tokens == stream.tokens
        assert logprobs == said(stream)
        assert finishes == [0] * (len(finishes) - 1) + [FinishReason.LENGTH]


async def test_a_stop_id_ends_a_modelled_sequence_only_after_its_minimal_length() -> None:
    async with one_worker() as lone:
        free = await until_end(lone, max_tokens=40)
        stops = tuple(free.tokens[:10])
        at_once = await until_end(lone, max_tokens=40, stop_token_ids=stops)
        later = await until_end(lone, max_tokens=40, stop_token_ids=stops, min_tokens=9)
        assert (len(at_once.tokens), at_once.finish) == (1, FinishReason.STOP)
        assert (len(later.tokens), later.finish) == (10, FinishReason.STOP)


async def test_the_modelled_worker_takes_every_parameter() -> None:
    async with one_worker() as lone:
        plain = await until_end(lone, max_tokens=20, seed=4)
        everything = await until_end(
            lone,
            max_tokens=20,
            seed=4,
            temperature=0.5,
            top_p=0.5,
            top_k=5,
            min_p=0.1,
            presence_penalty=1,
            frequency_penalty=-1,
            repetition_penalty=1.5,
            logit_bias=((3, 5.0),),
            min_tokens=5,
            logprobs=0,
        )
        assert everything.tokens == plain.tokens
        assert said(everything) == expected(lone, everything, 0)
