"""How two workers greet before anything else goes over a connection. Pure; `connect.py` carries it.

    dialler                                                listener
    PeerHello (who, nonce, what for) ──────────────►
                                     ◄──────────────  PeerAnswer (who, nonce)
                                     ◄──────────────  PeerProof: HMAC(secret, "listener", hello, answer)
    PeerProof: HMAC(secret, "dialler", hello, answer) ──────────────►
                                     ◄──────────────  PeerWelcome (its memory), by whom the connection is for
    The listener may say PeerRefused (reason) instead, and then the connection ends.

Each side proves that it knows the cluster's secret and never shows it. What was said before is part of the proof, with
both nonces, so nothing can be changed on the way, said again later, or sent back to whoever said it. The secret lets
in, if both have one model: layers and KV are known by names, which say nothing of whose parameters computed them. A
plan's id only selects whose the connection is. What follows is neither encrypted nor sealed against an attacker:
these connections are for networks in which nobody else reads or writes.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Final, Literal, TypeVar

from pydantic import Field, TypeAdapter

from shared.errors import WireError, WireVersionError
from shared.ids import Incarnation, WorkerId
from shared.messages.base import PROTOCOL_VERSION, ControlMessage
from shared.wire import decode_union

MAX_GREETING_BYTES: Final = 4096
"""Longest part of a greeting."""
NONCE_BYTES: Final = 32
MIN_PASSWORD_BYTES: Final = 16
"""A shorter password could be guessed by whoever is shown a proof."""
MAX_REASON: Final = 256
_Nonce = Annotated[bytes, Field(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


class Purpose(StrEnum):
    """What a connection is for."""

    LEADER = "leader"  # a leader's batches come over it, tokens and ends of copies go back
    PREVIOUS = "previous"  # from the stage before: its activations come
    KV = "kv"  # from any stage before: KV goes both ways when the group forms
    AHEAD = "ahead"  # from any stage before: KV goes both ways while the group serves, before it dissolves
    PARTING = "parting"  # from any stage before: KV goes both ways when the group dissolves
    ATTENTION = "attention"  # from any stage before: attention over KV that has not arrived, both ways
    FETCH = "fetch"  # from any other worker: it fetches a request that the listener runs
    PARAMETERS = "parameters"  # from any other stage: parameters of the stage that listens go there


class PeerHello(ControlMessage):
    """Who dials, and what for."""

    kind: Literal["peer_hello"] = "peer_hello"
    worker_id: WorkerId
    incarnation: Incarnation
    """Which process of that name, for logs."""
    nonce: _Nonce
    """Drawn for this connection."""
    model: Annotated[str, Field(max_length=64)] = ""
    """`ProcessFacts.model_digest`: the listener's is the same."""
    purpose: Annotated[str, Field(max_length=32)]
    """A `Purpose`, of this version or another."""
    plan_id: int = 0
    """Of the group for which it is; 0: of none."""
    index: Annotated[int, Field(ge=0)] = 0
    """The listener's place in the group's pipeline."""


class PeerAnswer(ControlMessage):
    """Who listens."""

    kind: Literal["peer_answer"] = "peer_answer"
    worker_id: WorkerId
    nonce: _Nonce


class PeerProof(ControlMessage):
    """The speaker knows the secret."""

    kind: Literal["peer_proof"] = "peer_proof"
    proof: Annotated[bytes, Field(min_length=32, max_length=32)]


class PeerWelcome(ControlMessage):
    """The connection belongs to both from now on."""

    kind: Literal["peer_welcome"] = "peer_welcome"
    num_blocks: Annotated[int, Field(ge=0)]
    """KV blocks that the listener will have for its layers."""
    num_host_blocks: Annotated[int, Field(ge=0)] = 0
    """And of its host memory."""
    block_size: Annotated[int, Field(ge=1)]


class PeerReady(ControlMessage):
    """A member of a group to its leader, later: batches can come now."""

    kind: Literal["peer_ready"] = "peer_ready"


class PeerRefused(ControlMessage):
    """The connection ends."""

    kind: Literal["peer_refused"] = "peer_refused"
    reason: Annotated[str, Field(max_length=MAX_REASON)]


class PeerRefusedError(Exception):
    """One of the two does not want the other; the text says why."""


Greeting = PeerHello | PeerAnswer | PeerProof | PeerWelcome | PeerReady | PeerRefused
G = TypeVar("G", PeerHello, PeerAnswer, PeerProof, PeerWelcome, PeerReady)
_GREETING: Final[TypeAdapter[Greeting]] = TypeAdapter(Annotated[Greeting, Field(discriminator="kind")])


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """Who this worker is to others."""

    worker_id: WorkerId
    incarnation: Incarnation
    secret: bytes = field(repr=False)
    """The cluster's, the same at all of its workers."""
    model: str = ""
    """See `PeerHello`."""

    def hello(self, purpose: str, plan_id: int, index: int) -> PeerHello:
        """Return what it says when it dials, for one connection."""
        return PeerHello(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            nonce=secrets.token_bytes(NONCE_BYTES),
            model=self.model,
            purpose=purpose,
            plan_id=plan_id,
            index=index,
        )

    def answer(self) -> PeerAnswer:
        """Return what it says when it is dialled, for one connection."""
        return PeerAnswer(worker_id=self.worker_id, nonce=secrets.token_bytes(NONCE_BYTES))


@dataclass(frozen=True, slots=True)
class Proofs:
    """What proves at both ends of one connection that they know the secret."""

    secret: bytes = field(repr=False)
    hello: bytes
    """As it was said."""
    answer: bytes

    def of(self, role: Literal["dialler", "listener"]) -> PeerProof:
        """Return the proof of one of them."""
        said = b"".join(len(part).to_bytes(4, "little") + part for part in (role.encode(), self.hello, self.answer))
        return PeerProof(proof=hmac.digest(self.secret, said, hashlib.sha256))

    def check(self, role: Literal["dialler", "listener"], shown: PeerProof) -> None:
        """Return if that is the proof of one of them.

        Raises:
            PeerRefusedError: it is not.
        """
        if not hmac.compare_digest(shown.proof, self.of(role).proof):
            raise PeerRefusedError(f"the {role} does not know the secret of this cluster")


def cluster_secret(password: str, cluster: str) -> bytes:
    """Return the secret of a cluster, made of the password with which its workers sign in at the broker.

    It takes some 50 ms, so that nobody tries many passwords on a proof.
    """
    return hashlib.scrypt(password.encode(), salt=f"sluice peers {cluster}".encode(), n=2**14, r=8, p=1, dklen=32)


def read_greeting(data: bytes, wanted: type[G]) -> G:
    """Return the message that is due.

    Raises:
        PeerRefusedError: the other side refuses, speaks another protocol, or something else.
    """
    try:
        message = decode_union(data, _GREETING)
    except WireVersionError as error:
        raise PeerRefusedError(f"it speaks protocol {error.version}, this worker {PROTOCOL_VERSION}") from None
    except WireError as error:
        raise PeerRefusedError(f"it does not greet: {error.reason}") from None
    if isinstance(message, PeerRefused):
        raise PeerRefusedError(f"it refuses: {message.reason}")
    if not isinstance(message, wanted):
        raise PeerRefusedError(f"a {message.kind} where another part of a greeting was due")
    return message
