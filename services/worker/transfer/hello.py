"""Who is at the other end of a link, and whether it belongs to this cluster. Pure; `tcp_connect` carries it.

    dialler                                       listener
    LinkHello (id, incarnation, nonce, windows) ─►
                                                ◄─ LinkHello
                                                ◄─ LinkProof: HMAC(token, "listener", both hellos)
    LinkProof: HMAC(token, "dialler", both) ─────►
                                                ◄─ LinkWelcome
    Either may answer LinkRefused (reason) instead, and then the connection ends.

Each side proves that it knows the cluster's token without showing it, and what was said before is part of the proof, so
that nothing can be changed on the way or said again later. What follows is not encrypted: links are for networks in
which nobody else reads.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal, TypeVar

from pydantic import Field, TypeAdapter

from services.worker.transfer.link import (
    MAX_FRAME_BYTES,
    MESSAGE_OVERHEAD_BYTES,
    MIN_FRAME_BYTES,
    LinkParams,
    LinkRefusedError,
    Windows,
)
from shared.errors import WireError, WireVersionError
from shared.ids import NOBODY, Incarnation, WorkerId
from shared.messages.base import PROTOCOL_VERSION, ControlMessage
from shared.wire import decode_union, encode

MAX_HELLO_BYTES: Final = 4096
"""Longest message before a link is made."""
NONCE_BYTES: Final = 32
MIN_TOKEN_BYTES: Final = 16
"""A shorter token could be guessed."""
_Window = Annotated[int, Field(ge=2 * MESSAGE_OVERHEAD_BYTES, lt=2**32)]


class LinkHello(ControlMessage):
    """Who speaks, and what it grants."""

    kind: Literal["link_hello"] = "link_hello"
    worker_id: WorkerId
    incarnation: Incarnation
    nonce: Annotated[bytes, Field(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
    """Drawn for this connection."""
    max_frame_bytes: Annotated[int, Field(ge=MIN_FRAME_BYTES, le=MAX_FRAME_BYTES)]
    """Longest payload of a frame that it takes."""
    control_bytes: _Window
    """Its windows; see `Windows`."""
    activation_bytes: _Window
    kv_bytes: _Window
    parameters_bytes: _Window

    @property
    def windows(self) -> Windows:
        """What it grants."""
        return Windows(self.control_bytes, self.activation_bytes, self.kv_bytes, self.parameters_bytes)


class LinkProof(ControlMessage):
    """The speaker knows the token."""

    kind: Literal["link_proof"] = "link_proof"
    proof: Annotated[bytes, Field(min_length=32, max_length=32)]


class LinkWelcome(ControlMessage):
    """The link is made."""

    kind: Literal["link_welcome"] = "link_welcome"


class LinkRefused(ControlMessage):
    """The link is not made."""

    kind: Literal["link_refused"] = "link_refused"
    reason: Annotated[str, Field(max_length=256)]


G = TypeVar("G", LinkHello, LinkProof, LinkWelcome)

Greeting = LinkHello | LinkProof | LinkWelcome | LinkRefused
_GREETING: Final[TypeAdapter[Greeting]] = TypeAdapter(Annotated[Greeting, Field(discriminator="kind")])


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this worker is to its peers."""

    worker_id: WorkerId
    incarnation: Incarnation
    token: bytes
    """The cluster's secret, the same on all workers."""
    params: LinkParams = field(default_factory=LinkParams)

    def __post_init__(self) -> None:
        if len(self.token) < MIN_TOKEN_BYTES:
            raise ValueError(f"the token of links has {len(self.token)} bytes, at least {MIN_TOKEN_BYTES} are needed")

    def hello(self) -> LinkHello:
        """Return a hello for one connection."""
        windows = self.params.windows
        return LinkHello(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            nonce=secrets.token_bytes(NONCE_BYTES),
            max_frame_bytes=self.params.max_frame_bytes,
            control_bytes=windows.control,
            activation_bytes=windows.activation,
            kv_bytes=windows.kv,
            parameters_bytes=windows.parameters,
        )


@dataclass(frozen=True, slots=True)
class Expected:
    """Whom a dialler wants to speak to."""

    worker_id: WorkerId
    incarnation: Incarnation = NOBODY
    """Which process of that name; `NOBODY`: any."""


class Handshake:
    """One side's part of the greeting.

    Args:
        identity: of this worker.
        is_dialler: this side has made the connection.
        expected: whom it wants; None: anybody of the cluster.
    """

    def __init__(self, identity: Identity, *, is_dialler: bool, expected: Expected | None = None) -> None:
        self._identity = identity
        self._is_dialler = is_dialler
        self._expected = expected
        self._own = encode(identity.hello())
        self._other = b""

    @property
    def hello(self) -> bytes:
        """What this side says first."""
        return self._own

    def take_hello(self, data: bytes) -> LinkHello:
        """Return what the other side says of itself; it is not proved yet.

        Raises:
            LinkRefusedError: it is not whom this side wants, or speaks something else.
        """
        self._other = data
        hello = self._read(data, LinkHello)
        expected = self._expected
        if hello.worker_id == self._identity.worker_id:
            raise self._refusal(f"{hello.worker_id} is this worker's own name")
        if expected is not None and hello.worker_id != expected.worker_id:
            raise self._refusal(f"{expected.worker_id} was expected, and {hello.worker_id} answers")
        if expected is not None and expected.incarnation not in {NOBODY, hello.incarnation}:
            raise self._refusal(f"another process of {hello.worker_id} was expected")
        return hello

    def proof(self) -> bytes:
        """Return the message that proves that this side knows the token."""
        return encode(LinkProof(proof=self._mac(of_dialler=self._is_dialler)))

    def check_proof(self, data: bytes) -> None:
        """Return if the other side knows the token.

        Raises:
            LinkRefusedError: it does not.
        """
        proof = self._read(data, LinkProof).proof
        if not hmac.compare_digest(proof, self._mac(of_dialler=not self._is_dialler)):
            raise self._refusal("its token is not this cluster's")

    def check_welcome(self, data: bytes) -> None:
        """Return if the listener welcomes this side.

        Raises:
            LinkRefusedError: it does not.
        """
        self._read(data, LinkWelcome)

    def _mac(self, *, of_dialler: bool) -> bytes:
        first, second = (self._own, self._other) if self._is_dialler else (self._other, self._own)
        role = b"dialler" if of_dialler else b"listener"
        said = b"".join(len(part).to_bytes(4, "little") + part for part in (role, first, second))
        return hmac.new(self._identity.token, said, hashlib.sha256).digest()

    def _read(self, data: bytes, wanted: type[G]) -> G:
        try:
            message = decode_union(data, _GREETING)
        except WireVersionError as error:
            raise self._refusal(f"it speaks protocol {error.version}, this worker {PROTOCOL_VERSION}") from None
        except WireError as error:
            raise self._refusal(error.reason) from None
        if isinstance(message, LinkRefused):
            raise self._refusal(f"it refuses: {message.reason}")
        if not isinstance(message, wanted):
            raise self._refusal(f"a {message.kind} where a greeting's next part was due")
        return message

    def _refusal(self, reason: str) -> LinkRefusedError:
        peer_id = self._expected.worker_id if self._expected is not None else WorkerId("a stranger")
        return LinkRefusedError(peer_id, reason)


def refusal(reason: str) -> bytes:
    """Return the message that ends a greeting."""
    return encode(LinkRefused(reason=reason[:256]))


def welcome() -> bytes:
    """Return the message that ends a greeting well."""
    return encode(LinkWelcome())
