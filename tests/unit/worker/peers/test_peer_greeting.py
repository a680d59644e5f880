"""How two workers greet: with one secret they meet, in a group or not; without it, or changed on the way, never."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.peers import connect
from services.worker.peers import door as doors
from services.worker.peers.connect import Peers, say_greeting
from services.worker.peers.frames import FrameKind, PeerLostError, pack_head
from services.worker.peers.greeting import (
    NONCE_BYTES,
    PeerAnswer,
    PeerHello,
    PeerProof,
    PeerReady,
    PeerRefused,
    PeerRefusedError,
    PeerWelcome,
    Proofs,
    Purpose,
    cluster_secret,
    read_greeting,
)
from shared.checksum import SEAL_BYTES, seal
from shared.ids import WorkerId
from shared.messages.base import ControlMessage
from shared.wire import encode
from tests.support.peers import (
    PASSWORD,
    between,
    hear_raw,
    identity,
    listening,
    open_to,
    port_of,
    say_raw,
    until_greeted,
)

pytestmark = pytest.mark.timeout(30)  # who is let in without a proof waits for a welcome

WELCOME = PeerWelcome(num_blocks=7, block_size=16)
W1 = WorkerId("w1")
UNKNOWN_SECRET = "the (dialler|listener) does not know the secret of this cluster"
HELLO = identity(0).hello(Purpose.KV, 0, 0)

SAMPLES: dict[str, tuple[ControlMessage, str]] = {
    "hello": (
        identity(0).hello(Purpose.LEADER, 5, 2).model_copy(update={"nonce": bytes(range(32))}),
        (
            "89a776657273696f6e03a46b696e64aa706565725f68656c6c6fa9776f726b65725f6964a27730ab696e6361726e6174696f6e01a56e6f6e63"
            "65c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fa56d6f64656ca23066a7707572706f7365a66c6561"
            "646572a7706c616e5f696405a5696e64657802"
        ),
    ),
    "answer": (
        PeerAnswer(worker_id=W1, nonce=bytes(32)),
        (
            "84a776657273696f6e03a46b696e64ab706565725f616e73776572a9776f726b65725f6964a27731a56e6f6e6365c420"
            "0000000000000000000000000000000000000000000000000000000000000000"
        ),
    ),
    "proof": (
        PeerProof(proof=bytes(range(32))),
        (
            "83a776657273696f6e03a46b696e64aa706565725f70726f6f66a570726f6f66c420000102030405060708090a0b0c0d0e0f"
            "101112131415161718191a1b1c1d1e1f"
        ),
    ),
    "welcome": (
        WELCOME,
        (
            "85a776657273696f6e03a46b696e64ac706565725f77656c636f6d65aa6e756d5f626c6f636b7307"
            "af6e756d5f686f73745f626c6f636b7300aa626c6f636b5f73697a6510"
        ),
    ),
    "ready": (
        PeerReady(),
        "82a776657273696f6e03a46b696e64aa706565725f7265616479",
    ),
    "refused": (
        PeerRefused(reason="because"),
        "83a776657273696f6e03a46b696e64ac706565725f72656675736564a6726561736f6ea762656361757365",
    ),
}


@dataclass
class Listener:
    """A worker that takes connections, and what it took."""

    peers: Peers
    taken: asyncio.Queue[tuple[PeerHello, socket.socket]] = field(default_factory=asyncio.Queue)

    def take(self, said: PeerHello, sock: socket.socket) -> None:
        self.taken.put_nowait((said, sock))

    @asynccontextmanager
    async def meeting(
        self, dialling: Awaitable[tuple[socket.socket, PeerWelcome]]
    ) -> AsyncIterator[tuple[PeerHello, socket.socket, socket.socket]]:
        """Welcome who dials; yields what it has said, its end and this one, which are closed then."""
        task = asyncio.ensure_future(dialling)
        async with asyncio.timeout(10):
            said, here = await self.taken.get()
        await say_greeting(here, WELCOME)
        there, welcome = await task
        assert welcome == WELCOME
        with there, here:
            yield said, there, here


@asynccontextmanager
async def taking(plan_id: int = 0) -> AsyncIterator[Listener]:
    """Worker 1, who takes connections for KV."""
    async with listening(1, 0.05) as peers:
        listener = Listener(peers)
        peers.expect([Purpose.KV], plan_id, listener.take)
        yield listener


@asynccontextmanager
async def dialler(index: int = 0, secret: str = PASSWORD, model: str = "0f") -> AsyncIterator[Peers]:
    peers = await Peers.open(identity(index, secret, model))
    try:
        yield peers
    finally:
        await peers.close()


async def refusal_of(sock: socket.socket) -> str:
    """Return why the other side refuses, which it says next."""
    with pytest.raises(PeerRefusedError, match="it refuses: ") as caught:
        read_greeting(await hear_raw(sock), PeerWelcome)
    return str(caught.value).removeprefix("it refuses: ")


# Who belongs


@pytest.mark.parametrize("plan_id", [0, 5])
async def test_two_workers_of_a_cluster_greet_in_a_group_or_not(plan_id: int) -> None:
    async with taking(plan_id) as listener, dialler() as other:
        dialling = other.dial(W1, listener.peers.address, Purpose.KV, plan_id, 1)
        async with listener.meeting(dialling) as (said, there, here):
            assert (said.worker_id, said.incarnation, said.purpose) == ("w0", 1, "kv")
            assert (said.plan_id, said.index) == (plan_id, 1)
            there.sendall(b"x")
            assert await asyncio.get_running_loop().sock_recv(here, 9) == b"x"


@pytest.mark.parametrize(
    ("index", "secret", "who", "purpose", "plan_id", "reason"),
    [
        (0, "another cluster's secret", "w1", "kv", 0, "the listener does not know the secret of this cluster"),
        (0, PASSWORD, "w9", "kv", 0, "w9 was expected, and w1 answers"),
        (1, PASSWORD, "w1", "kv", 0, "it refuses: w1 is this worker's own name"),
        (0, PASSWORD, "w1", "migrate", 0, "it refuses: nobody here offers 'migrate'"),
        (0, PASSWORD, "w1", "parting", 0, "it refuses: no parting is due within 0.05 s"),
        (0, PASSWORD, "w1", "kv", 6, "it refuses: this worker has not joined plan 6 within 0.05 s"),
    ],
)
async def test_who_does_not_belong_is_refused_by_name(
    index: int, secret: str, who: str, purpose: str, plan_id: int, reason: str
) -> None:
    async with taking() as listener, dialler(index, secret) as other:
        with pytest.raises(PeerRefusedError) as caught:
            await other.dial(WorkerId(who), listener.peers.address, purpose, plan_id)
        assert str(caught.value) == reason
        await until_greeted(listener.peers, 0)
        assert listener.taken.empty()


@pytest.mark.parametrize("purpose", Purpose)
async def test_who_has_another_model_is_refused_whatever_the_connection_is_for(purpose: Purpose) -> None:
    async with listening(1) as peers, dialler(model="f0") as other:
        listener = Listener(peers)
        peers.expect(list(Purpose), 5, listener.take)
        with pytest.raises(PeerRefusedError, match="it refuses: w0 has another model"):
            await other.dial(W1, peers.address, purpose, 5)
        assert listener.taken.empty()


async def test_a_connection_that_comes_early_is_kept_and_nobody_is_taken_after_the_end() -> None:
    async with listening(1, 5.0) as peers, dialler() as other:
        listener = Listener(peers)
        dialling = asyncio.create_task(other.dial(W1, peers.address, Purpose.KV, 5))
        await until_greeted(peers, 1)
        peers.expect([Purpose.AHEAD, Purpose.KV], 5, listener.take)
        async with listener.meeting(dialling):
            pass
        peers.forget(listener.take)
        peers.forget(listener.take)
        peers._wait_s = 0.01
        for purpose in (Purpose.AHEAD, Purpose.KV):
            with pytest.raises(PeerRefusedError, match="has not joined plan 5"):
                await other.dial(W1, peers.address, purpose, 5)


# Who attacks


async def attack(listener: Listener, hello: bytes, prove: Callable[[bytes, bytes], bytes]) -> bytes:
    """Dial without the secret, which is noticed; return what was answered.

    Args:
        listener: that does not take the connection.
        hello: what is said first.
        prove: makes the proof, of the answer and the listener's proof, at which nobody looks.
    """
    with await open_to(listener.peers) as sock:
        await say_raw(sock, hello)
        answer = await hear_raw(sock)
        await say_raw(sock, prove(answer, await hear_raw(sock)))
        assert await refusal_of(sock) == "the dialler does not know the secret of this cluster"
    assert listener.taken.empty()
    return answer


def guess(answer: bytes, _proof: bytes) -> bytes:
    return encode(Proofs(b"a guess of the secret", encode(HELLO), answer).of("dialler"))


def send_back(_answer: bytes, proof: bytes) -> bytes:
    return proof


@pytest.mark.parametrize("prove", [guess, send_back])
async def test_a_dialler_without_the_secret_is_refused_whatever_it_thinks_of_the_listener(
    prove: Callable[[bytes, bytes], bytes],
) -> None:
    async with taking() as listener:
        await attack(listener, encode(HELLO), prove)


async def test_what_was_said_before_does_not_open_the_door_again() -> None:
    heard = dict[int, bytes]()

    def note(number: int, data: bytes) -> bytes:
        heard[number] = data
        return data

    async with taking() as listener, dialler() as other:
        async with (
            between(listener.peers, note) as address,
            listener.meeting(other.dial(W1, address, Purpose.KV)),
        ):
            pass
        assert await attack(listener, heard[0], lambda _answer, _proof: heard[3]) != heard[1]
    secret = PASSWORD.encode()
    assert not any(secret in data for data in heard.values()), "it is never shown"


async def test_a_dialler_does_not_prove_the_secret_to_itself() -> None:
    """Who has no secret listens, and asks the dialler's own door for the proof that it lacks."""
    loop = asyncio.get_running_loop()
    async with dialler() as victim:
        with socket.create_server(("127.0.0.1", 0)) as door:
            door.settimeout(0)
            dialling = asyncio.create_task(victim.dial(W1, f"127.0.0.1:{door.getsockname()[1]}", Purpose.KV))
            sock, _ = await loop.sock_accept(door)
            sock.settimeout(0)
            with sock, await open_to(victim) as back:
                await say_raw(back, await hear_raw(sock))
                assert await refusal_of(back) == "w0 is this worker's own name"
                await say_greeting(sock, PeerAnswer(worker_id=W1, nonce=bytes(NONCE_BYTES)))
                await say_greeting(sock, PeerProof(proof=bytes(32)))
                with pytest.raises(PeerRefusedError, match=UNKNOWN_SECRET):
                    await dialling


def changed(**changes: Any) -> Callable[[bytes], bytes]:
    """Return what changes fields of a part of a greeting, and its checksum with them."""
    return lambda data: seal(msgpack.packb(msgpack.unpackb(data[:-SEAL_BYTES]) | changes, use_bin_type=True))


@pytest.mark.parametrize(
    ("part", "change"),
    [
        (0, changed(worker_id="w2")),
        (0, changed(incarnation=99)),
        (0, changed(nonce=bytes(NONCE_BYTES))),
        (0, changed(purpose="parting")),
        (0, changed(plan_id=6)),
        (0, changed(index=1)),
        (0, changed(note="a field that nobody knows")),
        (1, changed(note="a field that nobody knows")),
        (1, changed(nonce=bytes(NONCE_BYTES))),
        (2, lambda _: encode(PeerProof(proof=bytes(32)))),
        (3, lambda _: encode(PeerProof(proof=bytes(32)))),
    ],
)
async def test_what_is_changed_on_the_way_is_noticed(part: int, change: Callable[[bytes], bytes]) -> None:
    async with taking() as listener, dialler() as other:
        async with between(listener.peers, lambda number, data: change(data) if number == part else data) as address:
            with pytest.raises(PeerRefusedError, match=UNKNOWN_SECRET):
                await other.dial(W1, address, Purpose.KV)
        await until_greeted(listener.peers, 0)
        assert listener.taken.empty()


# Who says something else


def framed(data: bytes) -> bytes:
    return pack_head(FrameKind.GREETING, len(data)) + data


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (
            b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n",
            "it does not greet: the header of a frame: the checksum is wrong",
        ),
        (pack_head(FrameKind.GREETING, 4097), "it does not greet: GREETING of 4097 bytes is over the limit of 4096"),
        (pack_head(FrameKind.BATCH, 0), "it does not greet: BATCH came instead of GREETING"),
        (framed(b"x" * 9), "it does not greet: "),
        (framed(encode(WELCOME)), "a peer_welcome where another part of a greeting was due"),
        (framed(encode(HELLO.model_copy(update={"version": 9}))), "it speaks protocol 9"),
        (framed(encode(HELLO.model_copy(update={"nonce": b"short"}))), "it does not greet: "),
    ],
)
async def test_who_does_not_greet_is_refused(data: bytes, reason: str) -> None:
    async with listening(1) as peers:
        with await open_to(peers) as sock:
            await asyncio.get_running_loop().sock_sendall(sock, data)
            assert (await refusal_of(sock)).startswith(reason)


async def test_who_says_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "GREETING_S", 0.05)
    async with listening(1) as peers:
        for data in (b"", b"\x10\x00", framed(encode(HELLO))[:-1]):
            with await open_to(peers) as sock:
                await asyncio.get_running_loop().sock_sendall(sock, data)
                assert await refusal_of(sock) == "no greeting in time"
        with await open_to(peers) as sock:
            await say_raw(sock, encode(HELLO))
            await hear_raw(sock)
            await hear_raw(sock)
            assert await refusal_of(sock) == "no greeting in time", "a hello alone keeps nobody"


async def test_more_callers_than_are_greeted_are_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "MAX_GREETINGS", 2)
    async with listening(1) as peers:
        waiting = [socket.create_connection(("127.0.0.1", port_of(peers))) for _ in range(2)]
        await until_greeted(peers, 2)
        with await open_to(peers) as sock, pytest.raises(PeerLostError):
            await hear_raw(sock)
        for each in waiting:
            each.close()
        await until_greeted(peers, 0)


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(sorted(SAMPLES)), st.data())
def test_changed_bytes_give_a_message_or_a_refusal_and_nothing_else(name: str, data: st.DataObject) -> None:
    said = bytearray(encode(SAMPLES[name][0]))
    for _ in range(data.draw(st.integers(1, 4))):
        said[data.draw(st.integers(0, len(said) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(said)))
    for kind in (PeerHello, PeerAnswer, PeerProof, PeerWelcome, PeerReady):
        with contextlib.suppress(PeerRefusedError):
            read_greeting(bytes(said[:cut]), kind)  # type: ignore[type-var]


# The door


async def test_a_listener_that_closes_drops_who_waits() -> None:
    async with listening(1) as peers, dialler() as other:
        dialling = asyncio.create_task(other.dial(W1, peers.address, Purpose.KV))
        await until_greeted(peers, 1)
        await peers.close()
        with pytest.raises(PeerLostError):
            await dialling


async def test_a_listener_that_closes_drops_who_came_this_moment() -> None:
    """Before the task that greets has done anything."""
    async with listening(1) as peers:
        with socket.create_connection(("127.0.0.1", port_of(peers))) as caller:
            await until_greeted(peers, 1)
            await peers.close()
            assert not peers._door._greeted
            assert caller.recv(1) == b""


async def test_a_listener_whose_close_is_cancelled_is_closed() -> None:
    async with listening(1) as peers:
        with socket.create_connection(("127.0.0.1", port_of(peers))) as caller:
            await until_greeted(peers, 1)
            closing = asyncio.create_task(peers.close())
            await asyncio.sleep(0)
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
            assert caller.recv(1) == b""
            assert peers._door._sock.fileno() < 0


@pytest.mark.parametrize("gets_free", [True, False])
async def test_a_listener_without_descriptors_tries_again_and_can_be_closed(
    monkeypatch: pytest.MonkeyPatch, gets_free: bool
) -> None:
    monkeypatch.setattr(doors, "_ACCEPT_RETRY_S", 0.01)
    tried = list[int]()

    class Full(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            tried.append(1)
            if len(tried) < 4 or not gets_free:
                raise OSError(24, "Too many open files")
            return super().accept()

    async with listening(1) as peers:
        peers._door._sock = Full(fileno=peers._door._sock.detach())
        with socket.create_connection(("127.0.0.1", port_of(peers))):
            while len(tried) < 4:
                await asyncio.sleep(0.001)
            assert len(peers._door._greeted) == gets_free
            await peers.close()
            await asyncio.sleep(0.03)
            assert len(tried) == 4


@pytest.mark.parametrize(
    ("address", "reason"),
    [("", "no host:port"), ("127.0.0.1", "no host:port"), ("127.0.0.1:x", "no host:port"), ("[::1]:1", ".")],
)
async def test_addresses_that_lead_nowhere_are_named(address: str, reason: str) -> None:
    async with dialler() as peers:
        with pytest.raises(PeerLostError, match=reason):
            await peers.dial(W1, address, Purpose.KV)


async def test_a_listener_tells_others_the_name_that_it_was_given() -> None:
    for host, advertise, shown in (("127.0.0.1", "", "127.0.0.1"), ("0.0.0.0", "w0.local", "w0.local")):
        peers = await Peers.open(identity(1), host, advertise=advertise)
        assert peers.address.startswith(f"{shown}:")
        assert port_of(peers) > 0
        await peers.close()
    with contextlib.suppress(OSError):  # a machine without IPv6 has nothing to show
        peers = await Peers.open(identity(1), "::1")
        assert peers.address.startswith("[::1]:")
        listener = Listener(peers)
        peers.expect([Purpose.KV], 0, listener.take)
        async with dialler() as other, listener.meeting(other.dial(W1, peers.address, Purpose.KV)):
            pass
        await peers.close()


# Bytes


@pytest.mark.parametrize("name", SAMPLES)
def test_the_parts_of_a_greeting_have_these_bytes(name: str) -> None:
    message, expected = SAMPLES[name]
    assert encode(message)[:-SEAL_BYTES].hex() == expected
    if isinstance(message, PeerRefused):
        with pytest.raises(PeerRefusedError, match="it refuses: because"):
            read_greeting(encode(message), PeerWelcome)
    else:
        assert read_greeting(encode(message), type(message)) == message  # type: ignore[type-var]


def test_the_secret_and_its_proofs_are_these() -> None:
    secret = cluster_secret(PASSWORD, "default")
    proofs = Proofs(secret, b"hello", b"answer")
    assert [secret.hex(), proofs.of("listener").proof.hex(), proofs.of("dialler").proof.hex()] == [
        "30b7fa7d6f9b4dc5d9c4ed0fd40d725237a347cadfaa134f4e53e1170c4e6726",
        "7e15458969823b399e5e070cd51a5f59c1a7a5f86a90b7776151f552d10cc358",
        "e9ae27fdd52fa61281ee1bbc0b5242169f0e9f37be1c4595680c7e1bc6db11cc",
    ]
    for other in (cluster_secret(PASSWORD, "another"), cluster_secret(PASSWORD + "!", "default")):
        assert other != secret
    moved = Proofs(secret, b"hell", b"oanswer")
    assert moved.of("listener") != proofs.of("listener"), "lengths are part of it"
    assert PASSWORD not in repr(identity(0))
    assert str(secret) not in repr(proofs)
