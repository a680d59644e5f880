"""What stages say about KV that moves between them: an offer to the leader, its table to all. Pure; sockets carry it.

Names and ids are packed, 16 and 4 bytes each, little-endian.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import numpy as np
from pydantic import Field

from services.worker.contract.arrays import I32
from services.worker.contract.kept_kv import KeptKv
from services.worker.kv_moves.kv_table import MAX_EXCHANGED, KvLot, KvOffer, KvTable
from services.worker.kv_moves.placed_kv import PlacedKv
from shared.errors import WireError
from shared.layers import LayerRange
from shared.messages.base import ControlMessage, MessagePart
from shared.wire import decode, encode

NAME_BYTES: Final = 16
MAX_KV_MESSAGE_BYTES: Final = 2**24
"""Of an offer and of a table: `MAX_EXCHANGED` blocks of at most 28 bytes, and the rest."""
_ID: Final = np.dtype("<i4")
_OF_OFFER: Final = (
    *("room", "num_blocks", "group", "link_bytes_per_s", "step_s", "ahead_blocks"),
    *("num_host_blocks", "card", "door"),
)
_OF_LOT: Final = ("sources", "targets", "first", "is_live")
"""Said as they are."""

Count = Annotated[int, Field(ge=0, lt=2**31)]
Layers = tuple[Count, Count]
Names = Annotated[bytes, Field(max_length=NAME_BYTES * MAX_EXCHANGED)]
Ids = Annotated[bytes, Field(max_length=4 * MAX_EXCHANGED)]
Stages = Annotated[tuple[Count, ...], Field(max_length=1024)]


class KvOffered(ControlMessage):
    """A stage to the leader: a `KvOffer`."""

    kind: Literal["kv_offered"] = "kv_offered"
    layers: Layers
    room: Count
    num_blocks: Count
    group: Annotated[str, Field(max_length=256)]
    names: Names
    ids: Ids
    tails: Ids = b""
    ends: Ids = b""
    link_bytes_per_s: Annotated[float, Field(ge=0)] = 0.0
    step_s: Annotated[float, Field(ge=0)] = 0.0
    ahead_blocks: Count = 0
    num_host_blocks: Count = 0
    card: Annotated[str, Field(max_length=256)] = ""
    door: Annotated[str, Field(max_length=108)] = ""


class KvLotPart(MessagePart):
    """A `KvLot`."""

    sources: Stages
    targets: Stages
    ids: Ids
    first: Count
    names: Names
    is_live: bool = False
    places: Ids | None = None


class KvBlocksPart(MessagePart):
    """A `PlacedKv`."""

    names: Names
    ids: Ids
    places: Ids


class KvDecided(ControlMessage):
    """The leader to every stage: a `KvTable`."""

    kind: Literal["kv_decided"] = "kv_decided"
    held: Annotated[tuple[Layers, ...], Field(max_length=1024)]
    lots: Annotated[tuple[KvLotPart, ...], Field(max_length=1024)]
    there: Annotated[tuple[KvBlocksPart, ...], Field(max_length=1024)] = ()
    by_pages: bool = False


def pack_offer(offer: KvOffer) -> bytes:
    """Return an offer as bytes; of what it keeps, the first `MAX_EXCHANGED` blocks."""
    names, ids = offer.kept.names[:MAX_EXCHANGED], offer.kept.ids[:MAX_EXCHANGED]
    tails, ends = (marked[marked < len(names)] for marked in (offer.kept.tails, offer.kept.ends))
    message = KvOffered(
        layers=(offer.layers.first, offer.layers.end),
        names=b"".join(names),
        ids=_pack(ids),
        tails=_pack(tails),
        ends=_pack(ends),
        **_same(offer, _OF_OFFER),
    )
    return encode(message, MAX_KV_MESSAGE_BYTES)


def unpack_offer(data: bytes) -> KvOffer:
    """Return the offer that the bytes hold.

    Raises:
        WireError: they hold anything else.
    """
    said = decode(data, KvOffered, MAX_KV_MESSAGE_BYTES)
    names, ids = _unpack_blocks(said.names, said.ids)
    kept = KeptKv(names, ids, _unpack_places(said.tails, len(names)), _unpack_places(said.ends, len(names)))
    return KvOffer(_layers(said.layers), kept=kept, **_same(said, _OF_OFFER))


def pack_table(table: KvTable) -> bytes:
    """Return a table as bytes."""
    lots = tuple(
        KvLotPart(
            ids=_pack(lot.ids),
            names=b"".join(lot.names),
            places=None if lot.places is None else _pack(lot.places),
            **_same(lot, _OF_LOT),
        )
        for lot in table.lots
    )
    there = tuple(
        KvBlocksPart(names=b"".join(found.names), ids=_pack(found.ids), places=_pack(found.places))
        for found in table.there
    )
    held = tuple((layers.first, layers.end) for layers in table.held)
    return encode(KvDecided(held=held, lots=lots, there=there, by_pages=table.by_pages), MAX_KV_MESSAGE_BYTES)


def unpack_table(data: bytes) -> KvTable:
    """Return the table that the bytes hold.

    Raises:
        WireError: they hold anything else.
    """
    said = decode(data, KvDecided, MAX_KV_MESSAGE_BYTES)
    lots = []
    for lot in said.lots:
        names, ids = _unpack_blocks(lot.names, lot.ids)
        places = None if lot.places is None else _unpack_blocks(lot.names, lot.places)[1]
        lots.append(KvLot(ids=ids, names=names, places=places, **_same(lot, _OF_LOT)))
    there = tuple(
        PlacedKv(*_unpack_blocks(found.names, found.ids), _unpack_blocks(found.names, found.places)[1])
        for found in said.there
    )
    return KvTable(tuple(_layers(layers) for layers in said.held), tuple(lots), there, said.by_pages)


def _same(found: KvOffer | KvOffered | KvLot | KvLotPart, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(found, name) for name in names}


def _pack(ids: I32) -> bytes:
    return ids.astype(_ID).tobytes()


def _layers(said: tuple[int, int]) -> LayerRange:
    try:
        return LayerRange(*said)
    except ValueError as error:
        raise WireError(str(error)) from None


def _unpack_places(packed: bytes, num_blocks: int) -> I32:
    if len(packed) % _ID.itemsize:
        raise WireError(f"{len(packed)} bytes are no whole number of places")
    places = np.frombuffer(packed, dtype=_ID).astype(np.int32)
    if places.size and not (int(places[0]) >= 0 and int(places[-1]) < num_blocks and (np.diff(places) > 0).all()):
        raise WireError(f"places do not ascend among {num_blocks} blocks")
    return places


def _unpack_blocks(names: bytes, ids: bytes) -> tuple[tuple[bytes, ...], I32]:
    count, rest = divmod(len(names), NAME_BYTES)
    if rest or len(ids) != 4 * count:
        raise WireError(f"{len(names)} bytes of names and {len(ids)} of ids do not go together")
    packed = tuple(names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES))
    return packed, np.frombuffer(ids, dtype=_ID).astype(np.int32)
