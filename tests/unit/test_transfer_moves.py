"""The move of one request's KV, both ends, with everything that can go wrong, in any order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.transfer.move_messages import (
    MoveAbort,
    MoveAck,
    MoveCommitted,
    MoveFinal,
    MoveOffer,
    MoveRefused,
    MoveReserved,
    SessionId,
    ToSource,
    decode_move,
    encode_move,
)
from services.worker.transfer.move_source import MoveSource
from services.worker.transfer.move_target import MoveTarget
from services.worker.transfer.session import (
    End,
    Free,
    MoveParams,
    MoveSpec,
    MoveState,
    Outcome,
    Pin,
    Post,
    Reserve,
    Revoke,
    Send,
    SendChunk,
    Unpin,
    Write,
)
from shared.errors import WireError
from shared.ids import RequestId, WorkerId
from shared.layers import LayerRange
from tests.support.move_world import PARAMS, World, make_spec

A_MINUTE_S = 60.0
SESSION = SessionId("a.1.1")


def run_chaos(seed: int) -> World:
    """Let up to 120 things happen, in any order, and then let the move end."""
    random = np.random.default_rng(seed)
    world = World(
        seed,
        by_chunk=bool(random.random() < 0.5),
        is_whole=bool(random.random() < 0.7),
        num_blocks=int(random.integers(1, 16)),
    )
    world.refuses = bool(random.random() < 0.1)
    abort_ratio, cut_ratio = random.choice([0.0, 0.005, 0.03]), random.choice([0.0, 0.05])
    things: list[tuple[float, Callable[[], None]]] = [
        (abort_ratio, world.abort),
        (cut_ratio, world.cut),
        (0.3, lambda: world.deliver(chaos=True)),
        (0.15, world.end_read),
        (0.15, world.carry_chunk),
        (0.15, lambda: world.end_write(may_fail=abort_ratio > 0)),
        (0.05, world.grant),
        (0.05, world.add),
        (0.04, world.mend),
        (0.04, lambda: world.tick(0.1)),
        (0.04, lambda: world.tick(0.6)),
    ]
    weights = np.array([weight for weight, _ in things])
    for index in random.choice(len(things), size=int(random.integers(1, 120)), p=weights / weights.sum()).tolist():
        things[index][1]()
    if random.random() < 0.1:
        world.die(source_hears=bool(random.random() < 0.5))
    world.calm_down()
    return world


def judge(world: World) -> None:
    """Nothing is pinned or reserved that should not be, both ends agree, and what was committed is what was sent."""
    ledger = world.ledger
    assert not ledger.pinned
    assert not ledger.reading
    assert not ledger.writing
    assert not ledger.zones
    assert not ledger.reserved
    assert len(ledger.source_outcomes) == 1
    assert len(ledger.target_outcomes) == (world.target is not None)
    outcome = ledger.source_outcomes[0]
    assert outcome.num_freed_blocks == len(ledger.freed) == len(set(ledger.freed))
    assert sorted([*(ledger.committed or ()), *ledger.given_back]) == sorted(ledger.ever_reserved)
    if not world.died:
        assert outcome.is_committed == (ledger.committed is not None), "the ends disagree"
    if outcome.is_committed:
        assert sorted(ledger.freed) == list(world.all_blocks)
    elif not world.spec.by_chunk:
        assert not ledger.freed, "only a committed move frees the source's copy"
    if ledger.committed is not None:
        assert [ledger.contents[block] for block in ledger.committed] == list(world.all_blocks)


@pytest.mark.parametrize("part", range(8))
def test_whatever_happens_both_ends_agree_and_every_block_is_let_go_once(part: int) -> None:
    ends = set()
    for seed in range(part * 250, (part + 1) * 250):
        try:
            world = run_chaos(seed)
            judge(world)
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
        ends.add((world.ledger.source_outcomes[0].is_committed, world.spec.by_chunk))
    assert len(ends) == 4, "the seeds reach commits and aborts of both kinds"


@pytest.mark.parametrize("by_chunk", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_in_peace_every_move_commits_with_as_few_messages_as_there_are_chunks(seed: int, *, by_chunk: bool) -> None:
    world = World(seed, by_chunk=by_chunk)
    world.calm_down()
    judge(world)
    assert world.ledger.source_outcomes == [Outcome(True, "", 10)]
    assert world.now_s < 2 * PARAMS.retry_s


def test_the_source_frees_nothing_until_it_knows_of_the_commit() -> None:
    """In FINAL only the target knows: silence for a minute changes nothing, an answer does."""
    answers: list[tuple[ToSource, bool]] = [
        (MoveCommitted(session_id=SESSION), True),
        (MoveAbort(session_id=SESSION, by_source=False, reason="no"), False),
    ]
    for answer, commits in answers:
        source = source_in_final()
        for second in range(1, 200):
            effects = source.tick(float(second))
            assert effects == [Send(MoveFinal(session_id=SESSION, num_blocks=2))]
        assert source.abort("cancelled") == [
            Send(MoveAbort(session_id=SESSION, by_source=True, reason="cancelled")),
        ]
        assert source.state is MoveState.FINAL
        effects = source.on_message(answer, A_MINUTE_S)
        assert (Free((7, 8)) in effects) == commits
        assert Unpin((7, 8)) in effects


def source_in_final() -> MoveSource:
    source = MoveSource(make_spec(), PARAMS)
    assert source.start((7, 8)) == [Pin((7, 8))]
    source.open(0.0)
    effects = source.on_message(MoveReserved(session_id=SESSION, num_blocks=2, is_whole=True), 0.0)
    assert effects == [SendChunk(0, (7, 8))]
    assert source.chunk_sent(0, 99, 0.0) == []
    effects = source.on_message(MoveAck(session_id=SESSION, chunk=0, checksum=99), 0.0)
    assert effects == [Send(MoveFinal(session_id=SESSION, num_blocks=2))]
    return source


def test_a_chunk_that_arrives_as_something_else_ends_the_move() -> None:
    source = MoveSource(make_spec(), PARAMS)
    source.start((7, 8))
    source.open(0.0)
    source.on_message(MoveReserved(session_id=SESSION, num_blocks=2, is_whole=True), 0.0)
    source.on_message(MoveAck(session_id=SESSION, chunk=0, checksum=98), 0.0)  # it may overtake `chunk_sent`
    effects = source.chunk_sent(0, 99, 0.0)
    assert source.state is MoveState.ABORTED
    assert Unpin((7, 8)) in effects
    assert isinstance(effects[-1], End)
    assert "chunk 0 arrived as 00000062" in effects[-1].outcome.reason


def test_a_cancel_while_a_chunk_is_read_unpins_when_it_has_been_read() -> None:
    source = MoveSource(make_spec(), PARAMS)
    source.start((7, 8))
    source.open(0.0)
    source.on_message(MoveReserved(session_id=SESSION, num_blocks=2, is_whole=True), 0.0)
    effects = source.abort("cancelled")
    assert effects == [Send(MoveAbort(session_id=SESSION, by_source=True, reason="cancelled")), Revoke(0)]
    effects = source.chunk_sent(0, 99, 0.0)
    assert effects == [Unpin((7, 8)), End(Outcome(False, "cancelled", 0))]


def test_a_move_that_is_cancelled_before_its_turn_says_nothing() -> None:
    source = MoveSource(make_spec(), PARAMS)
    source.start((7, 8))
    assert source.next_tick_s is None
    assert source.abort("cancelled") == [Unpin((7, 8)), End(Outcome(False, "cancelled", 0))]


def test_the_last_chunk_goes_only_when_nothing_can_be_added_to_it() -> None:
    source = MoveSource(make_spec(chunk_blocks=3), MoveParams(window_chunks=9))
    source.start((1, 2, 3, 4), is_whole=False)
    source.open(0.0)
    effects = source.on_message(MoveReserved(session_id=SESSION, num_blocks=4, is_whole=False), 0.0)
    assert effects == [SendChunk(0, (1, 2, 3))]
    effects = source.add((5,), 0.0, is_whole=True)
    assert [type(effect) for effect in effects] == [Pin, Send]
    effects = source.on_message(MoveReserved(session_id=SESSION, num_blocks=5, is_whole=True), 0.0)
    assert effects == [SendChunk(1, (4, 5))]


def test_over_a_new_link_chunks_wait_for_the_targets_zones() -> None:
    source = MoveSource(make_spec(chunk_blocks=1), MoveParams(window_chunks=1))
    source.start((1, 2))
    source.open(0.0)
    reserved = MoveReserved(session_id=SESSION, num_blocks=2, is_whole=True)
    assert source.on_message(reserved, 0.0) == [SendChunk(0, (1,))]
    source.chunk_sent(0, 9, 0.0)
    source.link_down()
    assert [type(effect) for effect in source.link_up(1.0)] == [Send]
    assert source.on_message(reserved, 1.0) == [SendChunk(0, (1,))]
    target = MoveTarget(make_spec(chunk_blocks=1), PARAMS, 0.0)
    target.on_message(offer(num_blocks=2), 0.0)
    target.reserved((10, 11))
    target.chunk_arrived(0, 9, landed=True, now_s=0.0)
    target.chunk_written(0)
    assert target.link_up(1.0) == [Post(1, (11,))]


def offer(**changes: object) -> MoveOffer:
    spec = make_spec(by_chunk=bool(changes.get("by_chunk", False)))
    fields: dict[str, object] = {
        "session_id": SESSION,
        "source_id": spec.source_id,
        "request_id": spec.request_id,
        "epoch": 1,
        "stream": 1,
        "first_layer": 2,
        "end_layer": 4,
        "chunk_blocks": 3,
        "num_blocks": 5,
        "is_whole": True,
        "by_chunk": False,
        "slack_s": 0.0,
    }
    return MoveOffer.model_validate({**fields, **changes})


def test_zones_are_there_before_the_source_hears_of_room() -> None:
    target = MoveTarget(MoveSpec.of_offer(offer(), WorkerId("b")), PARAMS, 0.0)
    assert target.on_message(offer(), 0.0) == [Reserve(5)]
    assert target.reserved((10, 11, 12, 13, 14)) == [
        Post(0, (10, 11, 12)),
        Post(1, (13, 14)),
        Send(MoveReserved(session_id=SESSION, num_blocks=5, is_whole=True)),
    ]
    assert target.chunk_arrived(0, 7, landed=True, now_s=0.0) == [Write(0, (10, 11, 12))]
    assert target.chunk_arrived(0, 7, landed=True, now_s=0.0) == []
    ack = Send(MoveAck(session_id=SESSION, chunk=0, checksum=7))
    assert target.chunk_written(0) == [ack]
    assert target.chunk_arrived(0, 7, landed=False, now_s=0.0) == [ack], "its acknowledgement was lost"


def test_a_refusal_is_an_answer() -> None:
    target = MoveTarget(MoveSpec.of_offer(offer(), WorkerId("b")), PARAMS, 0.0)
    target.on_message(offer(), 0.0)
    effects = target.refused("no room")
    assert effects[0] == Send(MoveRefused(session_id=SESSION, reason="no room"))
    assert target.is_forgettable


def test_a_target_that_has_committed_says_so_until_the_source_knows() -> None:
    target = MoveTarget(MoveSpec.of_offer(offer(), WorkerId("b")), PARAMS, 0.0)
    target.on_message(offer(num_blocks=2), 0.0)
    target.reserved((10, 11))
    target.chunk_arrived(0, 7, landed=True, now_s=0.0)
    target.chunk_written(0)
    committed = Send(MoveCommitted(session_id=SESSION))
    assert committed in target.on_message(MoveFinal(session_id=SESSION, num_blocks=2), 0.0)
    assert target.on_message(MoveAbort(session_id=SESSION, by_source=True, reason="late"), 0.0) == [committed]
    assert target.tick(PARAMS.silent_s) == [committed]
    assert not target.is_forgettable
    assert target.peer_died() == []


@given(st.binary(max_size=80))
def test_other_bytes_are_no_message(data: bytes) -> None:
    with pytest.raises(WireError):
        decode_move(data)


def test_messages_come_back_as_they_were() -> None:
    for message in (
        offer(),
        offer(by_chunk=True, slack_s=-1.5),
        MoveAck(session_id=SESSION, chunk=3, checksum=2**32 - 1),
    ):
        assert decode_move(encode_move(message)) == message


@pytest.mark.parametrize("changes", [{"first_layer": 4}, {"source_id": "b"}])
def test_offers_that_make_no_sense_are_no_spec(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"no range|two workers"):
        MoveSpec.of_offer(offer(**changes), WorkerId("b"))


def test_limits_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="limits"):
        MoveParams(retry_s=2.0, silent_s=1.0)
    with pytest.raises(ValueError, match="a block or more"):
        MoveSpec(SESSION, RequestId("r"), WorkerId("a"), WorkerId("b"), LayerRange(0, 1), 0, 0, 0)
