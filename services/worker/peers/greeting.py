"""What two workers of a group say on a connection before their stages talk. Pure; `connect.py` carries it.

    who dials                                         the member that listens
    StageHello (plan, token, who, to whom) ────────►  waits until it is told of this plan itself
                                           ◄────────  StageWelcome (what memory it has)
                                           ◄────────  or StageRefused (reason), and the connection ends

A member welcomes the stage before it at once, and the leader when it has all its other connections: so a leader that is
welcome everywhere leads a whole group. Later, when the member can compute, it says `StageReady` there. Between any two
stages there is a connection for KV besides, for a while; the one before in the pipeline dials. While the group stands,
who loads parameters beside its own may dial any other stage for them. The token is shown as it is: these connections
are for networks in which nobody else reads.
"""

from __future__ import annotations

import hmac
from enum import StrEnum
from typing import Annotated, Final, Literal, Self, TypeVar

from pydantic import Field, TypeAdapter, model_validator

from services.worker.roles.device import GroupPlace
from shared.errors import WireError, WireVersionError
from shared.ids import WorkerId
from shared.messages.base import PROTOCOL_VERSION, ControlMessage
from shared.wire import decode_union

MAX_GREETING_BYTES: Final = 4096
"""Longest message before stages talk."""
_MAX_REASON: Final = 256


class StageRole(StrEnum):
    """What somebody who dials is to the member that listens."""

    LEADER = "leader"  # its batches come over this connection, tokens and ends of copies go back
    PREVIOUS = "previous"  # the stage before: its activations come
    KV = "kv"  # any stage before: KV goes both ways when the group forms
    AHEAD = "ahead"  # any stage before: KV goes both ways while the group serves, before it dissolves
    PARTING = "parting"  # any stage before: KV goes both ways when the group dissolves
    ATTENTION = "attention"  # any stage before: attention over KV that has not arrived, both ways
    PARAMETERS = "parameters"  # any other stage: parameters of the stage that listens go there


class StageHello(ControlMessage):
    """Who dials, and for which group."""

    kind: Literal["stage_hello"] = "stage_hello"
    plan_id: int
    token: Annotated[str, Field(max_length=128)]
    """Of the group."""
    role: StageRole
    sender: WorkerId
    target: WorkerId
    """Who is to listen here."""
    index: Annotated[int, Field(ge=0)]
    """The target's place in the pipeline. The leader, 0, is dialled for parameters alone."""

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        if not self.index and self.role is not StageRole.PARAMETERS:
            raise ValueError(f"the leader is not dialled by a {self.role}")
        return self


class StageWelcome(ControlMessage):
    """The connection belongs to the stages from now on."""

    kind: Literal["stage_welcome"] = "stage_welcome"
    num_blocks: Annotated[int, Field(ge=0)]
    """KV blocks that the listening stage will have for its layers."""
    block_size: Annotated[int, Field(ge=1)]


class StageReady(ControlMessage):
    """A member to its leader: batches can come now."""

    kind: Literal["stage_ready"] = "stage_ready"


class StageRefused(ControlMessage):
    """The connection ends."""

    kind: Literal["stage_refused"] = "stage_refused"
    reason: Annotated[str, Field(max_length=_MAX_REASON)]


class StageRefusedError(Exception):
    """One of the two does not want the other; the text says why."""


G = TypeVar("G", StageHello, StageWelcome, StageReady)
Greeting = StageHello | StageWelcome | StageReady | StageRefused
_GREETING: Final[TypeAdapter[Greeting]] = TypeAdapter(Annotated[Greeting, Field(discriminator="kind")])


def hello(place: GroupPlace, index: int, role: StageRole) -> StageHello:
    """Return what a stage of a group says first to the stage at an index."""
    return StageHello(
        plan_id=place.plan_id,
        token=place.token,
        role=role,
        sender=place.own.worker_id,
        target=place.stages[index].worker_id,
        index=index,
    )


def refused(reason: str) -> StageRefused:
    """Return the message that ends a greeting."""
    return StageRefused(reason=reason[:_MAX_REASON])


def read_greeting(data: bytes, wanted: type[G]) -> G:
    """Return the message that is due.

    Raises:
        StageRefusedError: the other side refuses, speaks another protocol, or something else.
    """
    try:
        message = decode_union(data, _GREETING)
    except WireVersionError as error:
        raise StageRefusedError(f"it speaks protocol {error.version}, this worker {PROTOCOL_VERSION}") from None
    except WireError as error:
        raise StageRefusedError(f"it does not greet: {error.reason}") from None
    if isinstance(message, StageRefused):
        raise StageRefusedError(f"it refuses: {message.reason}")
    if not isinstance(message, wanted):
        raise StageRefusedError(f"a {message.kind} where another part of a greeting was due")
    return message


def why_refused(said: StageHello, place: GroupPlace) -> str | None:
    """Return why the member at a place does not want a connection; None: it does.

    Args:
        said: for the plan of this place.
        place: of the member.
    """
    if not hmac.compare_digest(said.token.encode(), place.token.encode()):
        return f"the token is not that of plan {place.plan_id}"
    if (said.target, said.index) != (place.own.worker_id, place.index):
        return f"stage {said.index}, {said.target}, was dialled, and this is stage {place.index}, {place.own.worker_id}"
    if said.role is StageRole.PARAMETERS:
        others = [stage.worker_id for stage in place.stages if stage.worker_id != place.own.worker_id]
        return None if said.sender in others else f"{said.sender} is no other stage of the group"
    if said.role in (StageRole.KV, StageRole.AHEAD, StageRole.PARTING, StageRole.ATTENTION):
        before = [stage.worker_id for stage in place.stages[: place.index]]
        return None if said.sender in before else f"{said.sender} is not before stage {place.index}"
    expected = place.stages[0 if said.role is StageRole.LEADER else place.index - 1].worker_id
    if said.sender != expected:
        whose = "leads" if said.role is StageRole.LEADER else f"is before stage {place.index}"
        return f"{expected} {whose}, not {said.sender}"
    return None
