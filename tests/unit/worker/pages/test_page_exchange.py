"""All stages hand over pages or none does, whoever fails and whenever; who cannot know it does not go on."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from services.worker.kv_moves.kv_table import KvTable
from services.worker.memory.change import MemoryLostError
from services.worker.memory.page_swap import PagesKeptError, PageSwap
from services.worker.memory.posix import PosixMemory
from services.worker.memory.ranges import PageHandle
from services.worker.memory.spans import Spans
from services.worker.pages import exchange as page_exchange
from services.worker.pages import wire as page_wire
from services.worker.pages.exchange import PageExchange
from services.worker.pages.flows import PageFlow
from services.worker.pages.wire import BATCH_PAGES, PageDoor, PageSocket, dial_doors
from services.worker.peers.frames import FrameKind, PeerLostError, pack_head
from shared.errors import WireError
from tests.support.elastic_cases import snapshot
from tests.support.leaks import whats_open
from tests.support.page_cards import Card, card_by_pages, pages_of_all

COMMITTED, KEPT, LOST, DIED = "committed", "kept", "lost", "died"


class DeadError(BaseException):
    """A process has ended."""


@dataclass
class Cut:
    """Where a stage's process ends: before so many packets more."""

    stage: int
    left: int
    is_over: bool = False


class DyingSocket(PageSocket):
    """A socket of a process that ends when its packets are counted, and all of its sockets with it."""

    def __init__(self, sock: socket.socket, stage: int, cut: Cut | None, own: list[PageSocket]) -> None:
        super().__init__(sock)
        self.stage, self.cut, self.own = stage, cut, own
        own.append(self)

    def _wait_for_time(self) -> None:
        super()._wait_for_time()
        if self.cut is None or self.cut.stage != self.stage:
            return
        self.cut.left -= 1
        if self.cut.left < 0 or self.cut.is_over:
            self.cut.is_over = True
            for sock in self.own:
                sock.close()
            raise DeadError


@dataclass
class Run:
    """What became of each stage."""

    card: Card
    table: KvTable
    flows: tuple[PageFlow, ...]
    taken: list[Spans]
    ends: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)


def card_of_size(seed: int, num: int) -> Run:
    """Return a card of so many workers whose KV goes by pages, and who have dropped what the others compute."""
    card, table = card_by_pages(num, seed)
    return Run(card, table, *card.leave(table))


def connected(num: int, cut: Cut | None = None) -> list[dict[int, PageSocket]]:
    """Return the connections of each stage."""
    socks: list[dict[int, PageSocket]] = [{} for _ in range(num)]
    own: list[list[PageSocket]] = [[] for _ in range(num)]
    for stage in range(1, num):
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        socks[0][stage] = DyingSocket(ends[0], 0, cut, own[0])
        socks[stage][0] = DyingSocket(ends[1], stage, cut, own[stage])
    return socks


def carry_out(
    run: Run, cut: Cut | None = None, limit_s: float = 10.0, leader: Callable[..., None] | None = None
) -> None:
    """Let all stages do their part, each in a thread of its own; a stage that dies undoes nothing."""
    card = run.card
    socks = connected(card.num, cut)

    def work(stage: int) -> None:
        exchange = PageExchange(stage, card.num, socks[stage], limit_s)
        act = exchange.carry_out if stage or leader is None else leader
        try:
            card.memories[stage].swap(run.taken[stage], lambda swap: act(run.flows, swap))
            run.ends[stage] = COMMITTED
        except PagesKeptError as error:
            run.ends[stage], run.reasons[stage] = KEPT, str(error)
        except MemoryLostError as error:
            run.ends[stage], run.reasons[stage] = LOST, str(error)
        except DeadError:
            run.ends[stage] = DIED
        finally:
            for sock in socks[stage].values():
                sock.close()

    threads = [threading.Thread(target=work, args=(stage,)) for stage in range(card.num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(run.ends) == card.num, "somebody waits for ever"


def wait_for_end(run: Run, stage: int) -> None:
    """Wait until a stage has ended, or for ten seconds: what became of it says whether it did."""
    until_s = time.monotonic() + 10
    while stage not in run.ends and time.monotonic() < until_s:
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def _nothing_stays_open(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(page_wire, "BATCH_PAGES", 5)
    monkeypatch.setattr(page_exchange, "BATCH_PAGES", 5)
    before = whats_open()
    yield
    assert whats_open() == before


@pytest.mark.parametrize("num", [2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_every_block_is_where_it_belongs(seed: int, num: int) -> None:
    run = card_of_size(seed, num)
    before = pages_of_all(run.card.memories)
    carry_out(run)
    assert run.ends == dict.fromkeys(range(num), COMMITTED)
    run.card.check_contents(run.table)
    for memory in run.card.memories:
        memory.check_invariants()
    assert pages_of_all(run.card.memories) == before
    run.card.close()


@pytest.mark.parametrize("num", [2, 3])
@pytest.mark.parametrize("seed", range(12))
def test_a_fault_anywhere_costs_the_kv_of_all_and_no_page(seed: int, num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one call of any stage: a page that cannot be exported, taken in, mapped or unmapped."""
    run, rng = card_of_size(seed % 4, num), np.random.default_rng(seed)
    card = run.card
    states, before = [snapshot(memory) for memory in card.memories], pages_of_all(card.memories)
    stage = int(rng.integers(num))
    kind = ("export", "adopt", "map")[seed % 3]
    if kind == "map":
        card.faulty[stage].fail_after(int(rng.integers(0, 2)))
    else:
        fail_once(monkeypatch, PosixMemory, kind, int(rng.integers(0, 4)))
    opened = whats_open()
    carry_out(run)
    assert run.ends == dict.fromkeys(range(num), KEPT)
    assert whats_open() == opened, "nothing of the others is kept"
    assert any("MadeUpError" in why or "no more" in why for why in run.reasons.values())
    assert [snapshot(memory) for memory in card.memories] == states
    assert pages_of_all(card.memories) == before
    monkeypatch.undo()
    carry_out(run)
    assert set(run.ends.values()) == {COMMITTED}
    card.check_contents(run.table)
    card.close()


@pytest.mark.parametrize("stage", [0, 1])
def test_memory_that_cannot_be_put_back_is_lost_and_nobody_elses(stage: int) -> None:
    run = card_of_size(2, 2)
    faulty, state = run.card.faulty[stage], snapshot(run.card.memories[1 - stage])
    faulty.fail_after(1, 2)
    carry_out(run)
    assert run.ends == {stage: LOST, 1 - stage: KEPT}
    assert snapshot(run.card.memories[1 - stage]) == state
    run.card.memories[1 - stage].check_invariants()
    lost = run.card.memories[stage]
    for use in (lost.fill, lambda: lost.swap(run.taken[stage], lambda _swap: None)):
        with pytest.raises(AssertionError, match="must start anew"):
            use()
    run.card.close()


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, after: int) -> None:
    """Let a method fail once, after so many calls that go well."""
    method, lock, calls = getattr(owner, name), threading.Lock(), [0]

    def failing(self: object, *args: object) -> object:
        with lock:
            calls[0] += 1
            number = calls[0]
        if number == after + 1:
            raise OSError("there are no more")
        return method(self, *args)

    monkeypatch.setattr(owner, name, failing)


@pytest.mark.slow
@pytest.mark.parametrize("num", [2, 3])
def test_whoever_dies_and_whenever_the_others_agree(num: int) -> None:
    """A process ends before each of its packets: the others have all handed over, or none; or do not go on.

    In a group of two nobody is ever in doubt.
    """
    seen: set[tuple[str, ...]] = set()
    for stage in range(num):
        for left in range(200):
            run, cut = card_of_size(1, num), Cut(stage, left)
            states = [snapshot(memory) for memory in run.card.memories]
            carry_out(run, cut)
            if not cut.is_over:
                assert set(run.ends.values()) == {COMMITTED}
                run.card.close()
                break
            others = {run.ends[each] for each in range(num) if each != stage}
            assert run.ends[stage] == DIED
            assert DIED not in others
            assert len(others - {LOST}) <= 1, f"{run.ends} with stage {stage} dead before packet {left}"
            assert num > 2 or LOST not in others
            for each in range(num):
                if run.ends[each] == KEPT:
                    assert snapshot(run.card.memories[each]) == states[each]
                if run.ends[each] in (KEPT, COMMITTED):
                    run.card.memories[each].check_invariants()
            seen.add(tuple(sorted(others)))
            run.card.close()
        else:
            raise AssertionError("it never ends")
    assert (KEPT,) in seen
    assert num == 2 or (COMMITTED,) in seen
    assert num == 2 or any(LOST in others for others in seen), seen


def test_a_leader_that_says_nothing_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_exchange, "DECISION_S", 0.1)
    run = card_of_size(2, 2)

    def silent(_flows: Sequence[PageFlow], swap: PageSwap) -> None:
        wait_for_end(run, 1)
        swap.undo()
        raise PagesKeptError("it has slept")

    carry_out(run, limit_s=0.3, leader=silent)
    assert run.ends == {0: KEPT, 1: KEPT}
    assert "takes too long" in run.reasons[1] or "TimeoutError" in run.reasons[1]
    run.card.close()


def test_an_end_is_told_though_there_was_no_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of three is too slow: the other one would not know whether the leader has gone."""
    run = card_of_size(2, 3)
    apply, memory = PageSwap.apply, run.card.memories[2]._memory

    def slow_apply(self: PageSwap) -> None:
        apply(self)
        if self._memory is memory:
            time.sleep(0.8)

    monkeypatch.setattr(PageSwap, "apply", slow_apply)
    carry_out(run, limit_s=0.4)
    assert run.ends == dict.fromkeys(range(3), KEPT)
    run.card.close()


def test_a_decision_has_time_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time for all is over, at both ends, when the last one has mapped what came."""
    expect, say = PageSocket.expect, PageSocket.say

    def late_expect(self: PageSocket, *words: FrameKind) -> FrameKind:
        word = expect(self, *words)
        if word is FrameKind.PAGES_MAPPED:
            self.deadline_s = 0.0
        return word

    def late_say(self: PageSocket, word: FrameKind) -> None:
        say(self, word)
        if word is FrameKind.PAGES_MAPPED:
            self.deadline_s = 0.0

    monkeypatch.setattr(PageSocket, "expect", late_expect)
    monkeypatch.setattr(PageSocket, "say", late_say)
    run = card_of_size(2, 2)
    carry_out(run)
    assert run.ends == {0: COMMITTED, 1: COMMITTED}
    run.card.check_contents(run.table)
    run.card.close()


@pytest.mark.parametrize(
    ("num", "failing", "ends"),
    [(2, 0, [KEPT, KEPT]), (3, 0, [KEPT, LOST, KEPT]), (3, 1, [COMMITTED, COMMITTED, LOST])],
)
def test_who_cannot_be_told_of_the_decision(
    num: int, failing: int, ends: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If that is the first one, nobody keeps anything; else those who were told do, and so does the leader."""
    say, told = PageSocket.say, [0]

    def failing_say(self: PageSocket, word: FrameKind) -> None:
        if word is FrameKind.PAGES_COMMIT:
            told[0] += 1
            if told[0] == failing + 1:
                raise PeerLostError("made up")
        say(self, word)

    monkeypatch.setattr(PageSocket, "say", failing_say)
    run = card_of_size(2, num)
    carry_out(run)
    assert [run.ends[stage] for stage in range(num)] == ends
    run.card.close()


def test_a_decision_that_does_not_come_counts_as_lost_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the leader's process is there still cannot be known."""
    monkeypatch.setattr(page_exchange, "DECISION_S", 0.1)
    run = card_of_size(2, 2)
    monkeypatch.setattr(PageExchange, "_commit", lambda _self: wait_for_end(run, 1))
    carry_out(run, limit_s=2.0)
    assert run.ends == {0: COMMITTED, 1: LOST}
    assert "does not say" in run.reasons[1]
    run.card.close()


# The wire


@contextmanager
def two() -> Iterator[tuple[PageSocket, PageSocket]]:
    ends = [PageSocket(sock) for sock in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)]
    for sock in ends:
        sock.deadline_s = time.monotonic() + 60
    try:
        yield ends[0], ends[1]
    finally:
        for sock in ends:
            sock.close()


def packet(num_pages: int, num_bytes: int = 16) -> bytes:
    return pack_head(FrameKind.PAGES, num_bytes, (num_pages, 0)) + bytes(num_bytes)


@pytest.mark.parametrize(
    ("data", "num_descriptors", "why"),
    [
        (b"", 0, PeerLostError),
        (packet(2)[:9], 0, WireError),
        (pack_head(FrameKind.PAGES_COMMIT, 0), 0, WireError),
        (packet(2), 1, WireError),
        (packet(2), 3, WireError),
        (packet(3, 16), 2, WireError),
        (packet(2, 8), 2, WireError),
        (packet(2, 24), 2, WireError),
        (packet(2), 9, WireError),
    ],
    ids=["gone", "short", "another word", "too few", "too many", "another number", "cut", "longer", "far too many"],
)
def test_what_is_no_packet_with_pages_is_refused_and_nothing_stays_open(
    data: bytes, num_descriptors: int, why: type[Exception]
) -> None:
    with two() as (sock, other), open(os.devnull) as file:  # noqa: PTH123  a descriptor is what counts
        if data:
            socket.send_fds(other._sock, [data], [file.fileno()] * num_descriptors)
        else:
            other.close()
        with pytest.raises(why), sock.taking(2):
            raise AssertionError("it was taken")


def test_pages_are_answered_when_they_were_taken_and_not_before() -> None:
    with two() as (sock, peer), open(os.devnull) as file:  # noqa: PTH123  a descriptor is what counts
        handles = [PageHandle(file.fileno(), 4096 * i) for i in range(3)]
        giving = threading.Thread(target=sock.give, args=(handles,))
        giving.start()
        with peer.taking(3) as found:
            assert [handle.offset for handle in found] == [0, 4096, 8192]
            assert all(os.fstat(handle.descriptor).st_ino == os.fstat(file.fileno()).st_ino for handle in found)
            giving.join(0.05)
            assert giving.is_alive()
        giving.join(5)
        assert not giving.is_alive()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(found[0].descriptor)
        peer.say(FrameKind.PAGES_UNDO)
        with pytest.raises(WireError, match="instead of PAGES_COMMIT or PAGES_MAPPED"):
            sock.expect(FrameKind.PAGES_COMMIT, FrameKind.PAGES_MAPPED)
        sock.deadline_s = 0.0
        with pytest.raises(TimeoutError):
            sock.expect(FrameKind.PAGES_COMMIT)


def test_the_last_word_is_heard_of_who_leaves_something_unread() -> None:
    """The system tells of the latter first."""
    with two() as (sock, peer):
        sock.say(FrameKind.PAGES_MAPPED)
        peer.say(FrameKind.PAGES_UNDO)
        peer.close()
        assert sock.expect(FrameKind.PAGES_COMMIT, FrameKind.PAGES_UNDO) is FrameKind.PAGES_UNDO
        with pytest.raises(PeerLostError):
            sock.expect(FrameKind.PAGES_COMMIT)


def test_a_door_opens_for_this_user_only(monkeypatch: pytest.MonkeyPatch) -> None:
    door, other = PageDoor(), PageDoor()
    found = dial_doors([door.path, other.path], 1.0)
    met = door.accept(1.0)
    met.close()
    for sock in found:
        sock.close()
    with pytest.raises(TimeoutError):
        door.accept(0.05)
    with pytest.raises(OSError, match="No such file"):
        dial_doors([door.path, door.path + "x"], 1.0)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(PermissionError, match="its process is of user"):
        dial_doors([door.path], 1.0)
    with pytest.raises(PermissionError, match="its process is of user"):
        other.accept(1.0)
    monkeypatch.undo()
    assert os.stat(os.path.dirname(door.path)).st_mode & 0o077 == 0  # noqa: PTH116, PTH120
    for each in (door, other):
        each.close()
        each.close()
        assert not os.path.exists(os.path.dirname(each.path))  # noqa: PTH110, PTH120


def test_a_batch_fits_what_the_system_lets_go_at_a_time() -> None:
    """Linux sends no more descriptors with a message than this."""
    assert BATCH_PAGES <= 253
