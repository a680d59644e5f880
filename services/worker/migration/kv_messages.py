"""What a worker that fetches a request says to the one that runs it. Names of blocks are packed, 16 bytes each."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from shared.errors import WireError
from shared.ids import RequestId
from shared.messages.base import ControlMessage
from shared.prefix_names import RunName

NAME_BYTES: Final = 16
MAX_LISTED: Final = 2**18
"""Blocks of one request: four million tokens in blocks of 16."""
MAX_LIST_BYTES: Final = NAME_BYTES * MAX_LISTED + 4096
"""Of any of these messages."""
_Names = Annotated[bytes, Field(max_length=NAME_BYTES * MAX_LISTED)]


class ListKv(ControlMessage):
    """Which full blocks does it have? From the first time on they are kept for who asks."""

    kind: Literal["list_kv"] = "list_kv"
    request_id: RequestId
    attempt: int


class FindKv(ControlMessage):
    """Which of these first blocks of a prompt does it have? As with `ListKv` they are kept for who asks."""

    kind: Literal["find_kv"] = "find_kv"
    names: _Names


class KvListed(ControlMessage):
    """Those of the request's blocks that are full and computed, in order; or the first of those that were named."""

    kind: Literal["kv_listed"] = "kv_listed"
    names: _Names
    is_prefilling: bool = False
    """The next step computes more than a block of it: it should not leave before that is over."""


class GetKv(ControlMessage):
    """Send what these hold, which were listed."""

    kind: Literal["get_kv"] = "get_kv"
    names: _Names


class LetGo(ControlMessage):
    """Release it toward who asks."""

    kind: Literal["let_go"] = "let_go"


class HasLeft(ControlMessage):
    """It is released."""

    kind: Literal["has_left"] = "has_left"
    num_computed: Annotated[int, Field(ge=0)]
    """Tokens whose KV it had."""


class NotHere(ControlMessage):
    """It has ended, or was never here, or goes on here."""

    kind: Literal["not_here"] = "not_here"
    detail: Annotated[str, Field(max_length=256)] = ""
    is_refused: bool = False
    """It is here, and does not leave now."""


def pack_names(names: tuple[RunName, ...]) -> bytes:
    """Return names as one string of bytes."""
    return b"".join(names)


def unpack_names(packed: bytes) -> tuple[RunName, ...]:
    """Return the names that were packed.

    Raises:
        WireError: they are no whole number of names.
    """
    if len(packed) % NAME_BYTES:
        raise WireError(f"{len(packed)} bytes are no names of {NAME_BYTES} bytes")
    return tuple(packed[at : at + NAME_BYTES] for at in range(0, len(packed), NAME_BYTES))
