"""Log-probabilities and minimal lengths through the whole worker, on the virtual clock and over the bus in memory."""

from __future__ import annotations

from typing import Any

import pytest

from services.worker.serving.emitter import Emitter
from shared.cost import CostModel
from shared.process.tasks import TaskOwner
from shared.stream_extras import TokenLogprob
from shared.token_batch import TokenBatch
from shared.transport.memory_bus import MemoryBroker
from shared.types import FinishReason, SamplingParams
from sim.virtual_time import run
from sim.worker import SimWorker, SimWorkerParams
from tests.support.fake_dispatcher import FakeDispatcher, Stream

COST = CostModel(g0_s=0.01, b0_s=0.0, g1_s=0.0, b1_s=0.0, d_s=0.0, a_s=0.0)


class Cluster:
    """One modelled worker and one dispatcher."""

    def __init__(self) -> None:
        broker = MemoryBroker()
        params = SimWorkerParams("w0", COST, 1000, system="fcfs-chunked", max_model_len=8192, max_batch_tokens=64)
        self.worker = SimWorker(params, broker.connect("w0"))
        self.dispatcher = FakeDispatcher(broker.connect("d0"))
        self.tasks = TaskOwner()

    async def __aenter__(self) -> Cluster:
        await self.dispatcher.start()
        await self.worker.start()
        self.tasks.start(self.dispatcher.renew_forever("w0"), name="renew")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.tasks.close()
        await self.worker.stop()
        assert not self.worker.failures
        assert not self.dispatcher.faults

    async def submitted(self, **values: Any) -> Stream:
        submit = self.dispatcher.make([5, 6, 7], 1).model_copy(update={"sampling": SamplingParams(**values)})
        stream = await self.dispatcher.submit("w0", submit)
        assert isinstance(stream, Stream)
        return stream

    async def ended(self, **values: Any) -> Stream:
        stream = await self.submitted(**values)
        await stream.ended.wait()
        return stream

    def expected(self, stream: Stream, count: int) -> list[TokenLogprob]:
        return [self.worker.draw.logprob(token, count) for token in stream.tokens]


def said(batch_or_stream: TokenBatch | Stream) -> list[TokenLogprob]:
    extras = batch_or_stream.extras if isinstance(batch_or_stream, Stream) else batch_or_stream.stream_extras()
    return [token for extra in extras for token in extra.logprobs]


def test_log_probabilities_reach_the_dispatcher_with_their_tokens_and_again_in_a_replay() -> None:
    async def test() -> None:
        async with Cluster() as cluster:
            plain = await cluster.submitted(max_tokens=300)
            stream = await cluster.ended(max_tokens=300, logprobs=2, seed=3)
            assert said(stream) == cluster.expected(stream, 2)
            assert len(stream.tokens) == 300
            await plain.ended.wait()
            assert not said(plain)
            batch = await cluster.dispatcher.replay(stream, 20)
            assert batch is not None
            assert batch.tokens.tolist() == stream.tokens[20:]
            assert said(batch) == cluster.expected(stream, 2)[20:]

    run(test())


def test_a_replay_that_fits_no_message_is_cut_and_can_be_asked_for_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """400 tokens with 20 alternatives each take 400 · 172 bytes, and a message holds 50 000."""
    monkeypatch.setattr(Emitter, "max_payload_bytes", 50_000)

    async def test() -> None:
        async with Cluster() as cluster:
            stream = await cluster.ended(max_tokens=400, logprobs=20)
            tokens: list[int] = []
            logprobs: list[TokenLogprob] = []
            finishes: list[int] = []
            for _ in range(2):
                batch = await cluster.dispatcher.replay(stream, len(tokens))
                assert batch is not None
                assert batch.packed_bytes <= 50_000
                tokens += batch.tokens.tolist()
                logprobs += said(batch)
                finishes += batch.finish.tolist()
            assert tokens == stream.tokens
            assert logprobs == said(stream)
            assert finishes == [0] * (len(finishes) - 1) + [FinishReason.LENGTH]

    run(test())


def test_a_stop_id_ends_a_modelled_sequence_only_after_its_minimal_length() -> None:
    async def test() -> None:
        async with Cluster() as cluster:
            free = await cluster.ended(max_tokens=40)
            stops = tuple(free.tokens[:10])
            at_once = await cluster.ended(max_tokens=40, stop_token_ids=stops)
            later = await cluster.ended(max_tokens=40, stop_token_ids=stops, min_tokens=9)
            assert (len(at_once.tokens), at_once.finish) == (1, FinishReason.STOP)
            assert (len(later.tokens), later.finish) == (10, FinishReason.STOP)

    run(test())


def test_the_modelled_worker_takes_every_parameter() -> None:
    async def test() -> None:
        async with Cluster() as cluster:
            plain = await cluster.ended(max_tokens=20, seed=4)
            everything = await cluster.ended(
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
            assert said(everything) == cluster.expected(everything, 0)

    run(test())
