"""Agents over modelled links: single cases, each with its times and messages by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from services.worker.transfer.agent import MOVES_STREAM, MoveAgent, MoveRequest
from services.worker.transfer.link import Arrival, LinkParams, TrafficClass, Windows
from services.worker.transfer.modelled_link import LinkEnd, ModelledWire, WireModel
from services.worker.transfer.move_messages import (
    MoveAbort,
    MoveAck,
    MoveClosed,
    MoveCommitted,
    MoveFinal,
    MoveMessage,
    MoveOffer,
    MoveRefused,
    MoveReserved,
    SessionId,
    decode_move,
    encode_move,
)
from services.worker.transfer.session import MoveParams, Outcome
from shared.ids import Incarnation, RequestId, WorkerId
from shared.layers import LayerRange
from sim.virtual_time import run
from tests.support.fake_memory import FakeMemory
from tests.support.link_child import body_of
from tests.support.move_cluster import PARAMS, MoveCluster

A, B = WorkerId("a"), WorkerId("b")
MODEL = WireModel(rate_bytes_per_s=10_000, latency_s=0.001)
LAYERS = LayerRange(0, 4)


def on_virtual_clock(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def call() -> None:
        run(test())

    call.__name__ = test.__name__
    return call


class Two:
    """Agents A and B, and a wire."""

    def __init__(self, *, num_blocks: int = 20, max_active: int = 4, params: LinkParams | None = None) -> None:
        self.params = params or LinkParams(rate_bytes_per_s=MODEL.rate_bytes_per_s, frame_s=0.5)
        self.memories = [FakeMemory(np.random.default_rng(i), num_blocks=num_blocks) for i in range(2)]
        self.agents = [
            MoveAgent(name, Incarnation(1), memory, memory, replace(PARAMS, max_active=max_active))
            for name, memory in zip((A, B), self.memories, strict=True)
        ]
        self.others: list[Arrival] = []
        self.wire = self.connect()

    def connect(self, incarnation: int = 1) -> ModelledWire:
        wire = ModelledWire(LinkEnd(A, Incarnation(1)), LinkEnd(B, Incarnation(incarnation)), MODEL, self.params)
        self.agents[0].attach(wire.ends[0], self.others.append)
        self.agents[1].attach(wire.ends[1])
        return wire

    def request(self, count: int = 4, **changes: Any) -> MoveRequest:
        name = RequestId(str(len(self.memories[0].owner)))
        blocks = self.memories[0].fill(name, count)
        return replace(MoveRequest(name, B, LAYERS, blocks, epoch=1, chunk_blocks=2), **changes)

    async def close(self) -> None:
        for agent in self.agents:
            await agent.close()
        for end in self.wire.ends:
            await end.close()
        for memory in self.memories:
            memory.check()
            assert not memory.pins
            assert not memory.held


@on_virtual_clock
async def test_a_move_takes_the_time_of_its_bytes_and_a_few_ways() -> None:
    """4 blocks of 4 layers, K and V, 24 bytes: 768 bytes at 10 kB/s are 77 ms; messages of ~200 bytes take 20 ms."""
    two = Two()
    request = two.request()
    contents = two.memories[0].contents(request.blocks, LAYERS)
    assert await two.agents[0].move(request).done == Outcome(True, "", 4)
    assert 0.077 < asyncio.get_running_loop().time() < 0.077 + 6 * 0.03
    (_, blocks), *_ = two.memories[1].committed.values()
    assert two.memories[1].contents(blocks, LAYERS) == contents
    assert len(two.memories[0].free_blocks) == 20
    await asyncio.sleep(0.1)
    assert [agent.num_moves for agent in two.agents] == [0, 0], "both have forgotten it"
    await two.close()


def _note(order: list[float], slack_s: float, _: object) -> None:
    order.append(slack_s)


@on_virtual_clock
async def test_the_thinnest_slack_goes_first_and_only_a_few_at_a_time() -> None:
    two = Two(max_active=1)
    order: list[float] = []
    moves = []
    for slack_s in (5.0, 3.0, -1.0, 4.0):
        move = two.agents[0].move(two.request(slack_s=slack_s))
        move.done.add_done_callback(partial(_note, order, slack_s))
        moves.append(move)
    moves[3].cancel("not needed")
    await asyncio.gather(*(move.done for move in moves))
    assert order == [4.0, 5.0, -1.0, 3.0], "the first had begun, the last was cancelled while it waited"
    await two.close()


@on_virtual_clock
async def test_a_growing_request_moves_while_it_runs() -> None:
    """Pre-copy: full blocks first, more as they come, the last one when the request has stopped."""
    two = Two()
    request = two.request(3, is_whole=False)
    move = two.agents[0].move(request)
    await asyncio.sleep(1.0)
    more = two.memories[0].fill(request.request_id, 2)
    move.add(more)
    await asyncio.sleep(1.0)
    last = two.memories[0].fill(request.request_id, 1)
    contents = two.memories[0].contents((*request.blocks, *more, *last), LAYERS)
    move.add(last, is_whole=True)
    assert (await move.done).is_committed
    (_, blocks), *_ = two.memories[1].committed.values()
    assert two.memories[1].contents(blocks, LAYERS) == contents
    await two.close()


@on_virtual_clock
async def test_a_move_goes_on_over_a_new_link_where_it_was() -> None:
    """24 blocks take 0.46 s; the link is replaced at 0.3 s; from the start again it would take longer than 0.76 s."""
    two = Two(num_blocks=30)
    move = two.agents[0].move(two.request(24))
    await asyncio.sleep(0.3)
    sent = move._run.end.num_acked
    assert sent > 2
    two.wire = two.connect()
    assert (await move.done).is_committed
    assert asyncio.get_running_loop().time() < 0.3 + 0.46
    await two.close()


@on_virtual_clock
async def test_another_process_under_the_same_name_ends_the_move() -> None:
    two = Two(num_blocks=30)
    move = two.agents[0].move(two.request(24))
    await asyncio.sleep(0.3)
    two.wire = two.connect(incarnation=2)
    outcome = await move.done
    assert outcome == Outcome(False, "the target died", 0)
    await asyncio.sleep(1.0)
    await two.close()


@on_virtual_clock
async def test_closing_ends_every_move_at_both_ends() -> None:
    two = Two(num_blocks=30)
    moves = [two.agents[0].move(two.request(8)) for _ in range(3)]
    await asyncio.sleep(0.2)
    await two.agents[0].close()
    assert all(move.done.done() for move in moves)
    await asyncio.sleep(0.2)
    assert two.agents[1].num_moves == 0
    with pytest.raises(ValueError, match="closing"):
        two.agents[0].move(two.request(1))
    await two.close()


@on_virtual_clock
async def test_a_chunk_over_the_links_window_ends_the_move() -> None:
    windows = Windows(kv=1_000)
    two = Two(params=LinkParams(rate_bytes_per_s=10_000, windows=windows))
    outcome = await two.agents[0].move(two.request(8, chunk_blocks=8)).done
    assert not outcome.is_committed
    assert "1536 bytes of KV are over the window of 1000" in outcome.reason
    await two.close()


@on_virtual_clock
async def test_what_makes_no_sense_is_refused_at_once() -> None:
    two = Two()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"blocks": ()}, "a move of nothing"),
        ({"target_id": A}, "two workers"),
        ({"chunk_blocks": 0}, "a block or more"),
    ]
    for changes, reason in cases:
        with pytest.raises(ValueError, match=reason):
            two.agents[0].move(two.request(1, **changes))
    await two.close()


@on_virtual_clock
async def test_a_worker_that_is_nowhere_is_given_up() -> None:
    two = Two()
    outcome = await two.agents[0].move(two.request(target_id=WorkerId("c"))).done
    assert outcome == Outcome(False, "the target was silent for 5 s", 0)
    assert asyncio.get_running_loop().time() == pytest.approx(5.0)
    await two.close()


@on_virtual_clock
async def test_what_is_no_move_goes_to_the_owner_of_the_link() -> None:
    two = Two()
    link = two.agents[1].link_to(A)
    assert link is not None
    link.send(TrafficClass.ACTIVATION, 3, 1, [b"hidden"])
    await asyncio.sleep(1.0)
    (arrival,) = two.others
    assert (arrival.traffic, arrival.stream, body_of(arrival)) == (TrafficClass.ACTIVATION, 3, b"hidden")
    await two.close()


class Stranger:
    """A peer that says what a test wants."""

    def __init__(self, agent: MoveAgent) -> None:
        wire = ModelledWire(LinkEnd(A), LinkEnd(B), MODEL)
        self.said: list[MoveMessage] = []
        self.link = wire.ends[0]
        self.link.start(self._take, lambda _: None)
        agent.attach(wire.ends[1])

    def _take(self, arrival: Arrival) -> None:
        assert arrival.body is not None
        self.said.append(decode_move(arrival.body))
        self.link.release(arrival)

    async def say(self, *messages: MoveMessage) -> list[MoveMessage]:
        """Say something and return the answers."""
        self.said.clear()
        for message in messages:
            self.link.send(TrafficClass.CONTROL, MOVES_STREAM, 0, [encode_move(message)])
            await asyncio.sleep(0.2)
        return list(self.said)


def offer(name: str, **changes: Any) -> MoveOffer:
    return MoveOffer.model_validate(
        {
            "session_id": name,
            "source_id": A,
            "request_id": "r",
            "epoch": 1,
            "stream": 1,
            "first_layer": 0,
            "end_layer": 1,
            "chunk_blocks": 1,
            "num_blocks": 1,
            "is_whole": True,
            "by_chunk": False,
            "slack_s": 0.0,
        }
        | changes
    )


@on_virtual_clock
async def test_a_target_answers_everything_that_it_does_not_know() -> None:
    memory = FakeMemory(np.random.default_rng(0), num_blocks=4)
    agent = MoveAgent(B, Incarnation(1), memory, memory, PARAMS)
    stranger = Stranger(agent)
    name = SessionId("x")
    unknown = MoveAbort(session_id=name, by_source=False, reason="it is not known here")
    over = MoveAbort(session_id=name, by_source=True, reason="it is over")
    cases: list[tuple[MoveMessage, list[MoveMessage]]] = [
        (MoveFinal(session_id=name, num_blocks=1), [unknown]),
        (MoveAbort(session_id=name, by_source=True, reason=""), [unknown]),
        (MoveAbort(session_id=name, by_source=False, reason=""), []),
        (MoveReserved(session_id=name, num_blocks=1, is_whole=True), [over]),
        (MoveAck(session_id=name, chunk=0, checksum=0), [over]),
        (MoveRefused(session_id=name, reason=""), []),
        (MoveCommitted(session_id=name), [MoveClosed(session_id=name)]),
        (MoveClosed(session_id=name), []),
    ]
    for said, answer in cases:
        assert await stranger.say(said) == answer
    assert agent.num_moves == 0
    await agent.close()


@on_virtual_clock
async def test_a_target_refuses_by_name() -> None:
    memory = FakeMemory(np.random.default_rng(0), num_blocks=4)
    agent = MoveAgent(B, Incarnation(1), memory, memory, PARAMS)
    stranger = Stranger(agent)
    agent.raise_epoch(3)
    agent.raise_epoch(2)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"epoch": 2}, "epoch 2 is over, it is 3"),
        ({"source_id": "c"}, "it is not this peer's to offer"),
        ({"num_acked": 1}, "it is over"),
        ({"first_layer": 5, "end_layer": 5}, "no range"),
        ({"num_blocks": 5}, "no room"),
    ]
    for changes, reason in cases:
        (answer,) = await stranger.say(offer("x", **{"epoch": 3} | changes))
        assert isinstance(answer, MoveRefused)
        assert reason in answer.reason
    assert len(memory.free_blocks) == 4
    await agent.close()


@on_virtual_clock
async def test_a_move_that_is_over_does_not_begin_again_by_a_late_offer() -> None:
    memory = FakeMemory(np.random.default_rng(0), num_blocks=4)
    agent = MoveAgent(B, Incarnation(1), memory, memory, PARAMS)
    stranger = Stranger(agent)
    said = offer("x")
    assert await stranger.say(said) == [MoveReserved(session_id=SessionId("x"), num_blocks=1, is_whole=True)]
    other = offer("y")
    assert isinstance((await stranger.say(other))[0], MoveRefused), "the stream is taken"
    await stranger.say(MoveAbort(session_id=SessionId("x"), by_source=True, reason=""))
    assert await stranger.say(said) == [MoveRefused(session_id=SessionId("x"), reason="it is over")]
    assert len(memory.free_blocks) == 4
    await agent.close()


@on_virtual_clock
async def test_what_is_no_message_or_somebody_elses_move_is_counted() -> None:
    two = Two(num_blocks=30)
    move = two.agents[0].move(two.request(24))
    await asyncio.sleep(0.1)
    session_id = move.spec.session_id
    two.agents[0].hear(B, b"nonsense")
    two.agents[0].hear(WorkerId("c"), encode_move(MoveAbort(session_id=session_id, by_source=False, reason="")))
    assert two.agents[0].num_bad_messages == 2
    assert (await move.done).is_committed
    await two.close()


@on_virtual_clock
async def test_waiting_moves_get_room_as_it_comes_the_thinnest_slack_first() -> None:
    """The target has 1 block, less than a chunk of 2; then 7, of which 6 are the one's that cannot wait; then 20."""
    two = Two(num_blocks=20)
    two.memories[1].fill("one", 6)
    two.memories[1].fill("other", 13)
    late = two.agents[0].move(two.request(4, slack_s=2.0, by_chunk=True))
    soon = two.agents[0].move(two.request(6, slack_s=1.0, by_chunk=True))
    await asyncio.sleep(1.0)
    assert not late.done.done()
    assert not soon.done.done()
    two.memories[1].release("one")
    two.agents[1].room_changed()
    assert (await soon.done).is_committed
    await asyncio.sleep(1.0)
    assert not late.done.done()
    two.memories[1].release("other")
    two.agents[1].room_changed()
    assert (await late.done).is_committed
    await two.close()


def test_a_seed_gives_one_trace() -> None:
    async def main() -> list[tuple[str, bool, float]]:
        cluster = MoveCluster(5)
        trace: list[tuple[str, bool, float]] = []
        loop = asyncio.get_running_loop()
        cluster.shake_ratio = 0.3
        await cluster.connect()
        for number in range(10):
            move = await cluster.begin(number % 2, 1 - number % 2, 3 + number % 4, by_chunk=number % 3 == 0)
            if move is not None:
                name = move.spec.session_id
                note = partial(lambda name, done: trace.append((name, done.result().is_committed, loop.time())), name)
                move.done.add_done_callback(note)
            await asyncio.sleep(0.3)
        await cluster.settle()
        return trace

    traces = {tuple(run(main())) for _ in range(4)}
    assert len(traces) == 1
    assert len(next(iter(traces))) > 3


def test_limits_of_a_move_hold() -> None:
    """A target that answers and never has room: the source gives up after its limit."""

    async def main() -> Outcome:
        two = Two(num_blocks=20)
        two.agents[0]._params = MoveParams(retry_s=0.5, silent_s=5.0, limit_s=20.0)
        two.memories[1].fill("own", 20)
        outcome = await two.agents[0].move(two.request(4, by_chunk=True)).done
        assert asyncio.get_running_loop().time() == pytest.approx(20.0)
        await two.close()
        return outcome

    assert run(main()) == Outcome(False, "not done within 20 s", 0)
