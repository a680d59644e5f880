"""What moves when groups form and dissolve: nothing twice, nothing without room, nothing without all of its layers."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest

from services.worker.contract.kept_kv import NOTHING_KEPT, KeptKv
from services.worker.kv_moves import kv_messages
from services.worker.kv_moves.kv_messages import (
    MAX_KV_MESSAGE_BYTES,
    pack_offer,
    pack_table,
    unpack_offer,
    unpack_table,
)
from services.worker.kv_moves.kv_table import (
    MAX_EXCHANGED,
    KvLot,
    KvOffer,
    KvTable,
    check_table,
    mode_of,
    table_to_copy,
    table_to_form,
    table_to_part,
)
from services.worker.kv_moves.kv_wire import chunks_between
from services.worker.kv_moves.placed_kv import PlacedKv
from services.worker.kv_moves.places import GroupPlace, StagePlace
from shared.errors import WireError
from shared.ids import WorkerId
from shared.layers import LayerRange
from shared.wire import encode

L = 6
WHOLE = LayerRange(0, L)


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


def kept(rng: np.random.Generator, most: int, num_blocks: int = 64) -> KeptKv:
    """Return up to `most` blocks with names of which workers often have the same."""
    count = int(rng.integers(most + 1))
    names = [name(int(number)) for number in rng.choice(40, count, replace=False)]
    return KeptKv(tuple(names), rng.choice(num_blocks, count, replace=False).astype(np.int32))


def tiling(rng: np.random.Generator, num: int) -> list[LayerRange]:
    ends = [*sorted(int(end) for end in rng.choice(np.arange(1, L), num - 1, replace=False)), L]
    return [LayerRange(first, end) for first, end in zip([0, *ends], ends, strict=False)]


def offers_to_form(rng: np.random.Generator) -> list[KvOffer]:
    """Return offers of workers that were alone, of a group, and of a part of another of the same plan, shuffled."""
    offers = [KvOffer(WHOLE, int(rng.integers(20)), 0, kept=kept(rng, 12)) for _ in range(int(rng.integers(1, 3)))]
    for leader, left in (("a", 0), ("b", int(rng.integers(2)))):
        of = GroupPlace(7, (StagePlace(WorkerId(leader), "", WHOLE),), 0).name
        parts = tiling(rng, int(rng.integers(2, 4)))
        said = [kept(rng, 12), *[NOTHING_KEPT] * (len(parts) - 1)]
        group = [KvOffer(part, int(rng.integers(20)), 0, of, k) for part, k in zip(parts, said, strict=True)]
        offers += group[: len(group) - left]
    num_blocks = rng.integers(1, 40, len(offers))
    return [replace(offers[i], num_blocks=int(num_blocks[i])) for i in rng.permutation(len(offers))]


@pytest.mark.parametrize("seed", range(200))
def test_a_group_gets_every_block_once_of_whoever_has_all_of_its_layers(seed: int) -> None:
    offers = offers_to_form(np.random.default_rng(seed))
    table = table_to_form(offers, L)
    num_blocks = min(offer.num_blocks for offer in offers)
    result = table.kept_at(0)
    assert result.ids.tolist() == list(range(len(result)))
    assert len(result) <= num_blocks
    assert len(set(result.names)) == len(result)
    seen: list[bytes] = []
    for owner in offers:  # the same rules, block by block
        holders = [offer for offer in offers if offer.group == owner.group] if owner.group else [owner]
        is_whole = sorted(layer for holder in holders for layer in holder.layers) == list(WHOLE)
        room = min(holder.room for holder in holders) if is_whole else 0
        for each in owner.kept.names:
            if each not in seen and room and len(seen) < num_blocks:
                seen.append(each)
                room -= 1
    assert result.names == tuple(seen)
    for lot in table.lots:
        owner = next(offers[stage] for stage in lot.sources if offers[stage].kept.names)
        assert [owner.kept.names[owner.kept.ids.tolist().index(block)] for block in lot.ids] == list(lot.names)
        assert lot.targets == tuple(range(len(offers)))
    wanted = [WHOLE] * len(offers)
    for stage, offer in enumerate(offers):
        check_table(table, stage, offer, 64, wanted)


@pytest.mark.parametrize("seed", range(100))
def test_shares_are_cut_only_where_memory_ends_and_the_longest_first(seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts = tiling(rng, int(rng.integers(2, 5)))
    offers = [KvOffer(part, int(rng.integers(30)), int(rng.integers(1, 20))) for part in parts]
    shares = [kept(rng, 16) for _ in parts]
    table = table_to_part(offers, shares)
    room = min(offer.room for offer in offers)
    wanted = [min(len(share), offer.num_blocks) for share, offer in zip(shares, offers, strict=True)]
    sizes = [len(table.kept_at(stage)) for stage in range(len(parts))]
    assert sum(sizes) == min(sum(wanted), room)
    for share, size, most, stage in zip(shares, sizes, wanted, range(len(parts)), strict=True):
        assert table.kept_at(stage).names == share.names[:size]
        assert table.kept_at(stage).ids.tolist() == list(range(size))
        if size < most:
            assert size >= max(sizes) - 1, "who is cut is among the longest"
    for lot in table.lots:
        assert lot.sources == tuple(range(len(parts)))
        assert len(lot.targets) == 1
        assert lot.first == 0
        assert lot.ids.tolist() == shares[lot.targets[0]].ids[: len(lot.ids)].tolist()
    for stage, offer in enumerate(offers):
        check_table(table, stage, offer, 64, [WHOLE] * len(parts))


@pytest.mark.parametrize(
    ("are_live", "mode"),
    [([], ""), ([True], "live"), ([False], "coordinated"), ([True, True], "live"), ([False, True], "mixed")],
)
def test_how_an_exchange_moves_is_one_word(are_live: list[bool], mode: str) -> None:
    assert mode_of(are_live) == mode


def test_without_shares_nothing_moves_and_a_wrong_number_is_refused() -> None:
    offers = [KvOffer(LayerRange(0, 3), 9, 9), KvOffer(LayerRange(3, 6), 9, 9)]
    assert table_to_part(offers, ()).lots == ()
    with pytest.raises(ValueError, match="3 shares for 2 stages"):
        table_to_part(offers, [NOTHING_KEPT] * 3)


def test_an_exchange_names_no_more_blocks_than_a_message_holds() -> None:
    count = MAX_EXCHANGED + 5
    many = KeptKv(tuple(name(i) for i in range(count)), np.arange(count, dtype=np.int32))
    offers = [KvOffer(WHOLE, count, count, kept=many), KvOffer(WHOLE, count, count)]
    table = table_to_form(offers, L)
    assert len(table.kept_at(1)) == MAX_EXCHANGED
    assert len(unpack_offer(pack_offer(offers[0])).kept) == MAX_EXCHANGED
    assert unpack_table(pack_table(table)).kept_at(0).names == many.names[:MAX_EXCHANGED]


# Chunks


@pytest.mark.parametrize("seed", range(20))
def test_every_stage_gets_all_layers_that_it_wants_of_every_block_once(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.worker.kv_moves.kv_wire.CHUNK_BYTES", 300)
    rng = np.random.default_rng(seed)
    offers = offers_to_form(rng)
    if len(offers) > L:
        offers = offers[:L]
    table, wanted = table_to_form(offers, L), tiling(rng, len(offers))
    sent = 0
    for target, layers in enumerate(wanted):
        got: dict[tuple[int, int, int], int] = {}
        for source in range(len(offers)):
            for chunk in chunks_between(table, source, target, layers, 100):
                assert 0 < chunk.end - chunk.first <= 3
                for place in range(chunk.first, chunk.end):
                    key = (chunk.layer, chunk.side, table.lots[chunk.lot].first + place)
                    assert key not in got, "it comes from one stage only"
                    got[key] = source
                    assert chunk.layer in offers[source].layers
        sent += sum(source != target for source in got.values()) * 100
        blocks = range(len(table.kept_at(target)))
        assert set(got) == {(layer, side, block) for layer in layers for side in range(2) for block in blocks}
    assert sent == table.wire_bytes(wanted, 2 * 100), "operators are told of just these bytes"


@pytest.mark.parametrize("seed", range(100))
def test_what_was_copied_ahead_does_not_move_again_and_every_block_stays_in_its_place(seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts = tiling(rng, int(rng.integers(2, 4)))
    offers = [KvOffer(part, int(rng.integers(5, 40)), 64, ahead_blocks=24) for part in parts]
    shares = [kept(rng, 12) for _ in parts]
    there = [placed(rng, kept(rng, 6) if rng.random() < 0.3 else some_of(rng, share)) for share in shares]
    table = table_to_part(offers, shares, there)
    for stage, (share, copied) in enumerate(zip(shares, there, strict=True)):
        wanted = set(zip(share.names, share.ids.tolist(), strict=True))
        known = set(zip(copied.names, copied.ids.tolist(), strict=True))
        found = table.kept_at(stage)
        assert len(set(found.ids.tolist())) == len(found), "a place each"
        assert (wanted & known) == set(zip(table.there[stage].names, table.there[stage].ids.tolist(), strict=True))
        place_of = dict(zip(copied.names, copied.places.tolist(), strict=True))
        got = dict(zip(found.names, found.ids.tolist(), strict=True))
        assert set(got) <= set(share.names)
        assert all(got[name] == place_of[name] for name, _ in wanted & known), "where it was, under its name"
        moved = {name for lot in table.lots if stage in lot.targets for name in lot.names}
        assert not moved & {name for name, _ in wanted & known}
        assert len(got) == len(wanted & known) + len(moved)
        check_table(table, stage, offers[stage], 64, [WHOLE] * len(parts))
    sent = sum(len(lot.ids) for lot in table.lots)
    rest = sum(len(share) for share in shares) - sum(map(len, table.there))
    assert sent == min(rest, *(offer.room for offer in offers))
    for lot in table.lots:
        assert lot.sources == tuple(range(len(parts))), "its own layers come to the same place"
    assert plain(unpack_table(pack_table(table))) == plain(table)
    ahead = table_to_copy(offers, [placed(rng, share) for share in shares])
    for stage in range(len(parts)):
        check_table(ahead, stage, replace(offers[stage], room=64), 64, [WHOLE] * len(parts))
    for lot in ahead.lots:
        assert set(lot.sources) | set(lot.targets) == set(range(len(parts))), "from all others"
        assert not set(lot.sources) & set(lot.targets), "its own layers are there, elsewhere"
    assert plain(unpack_table(pack_table(ahead))) == plain(ahead)


def test_nothing_is_copied_ahead_to_who_has_no_memory_for_it() -> None:
    rng = np.random.default_rng(1)
    offers = [KvOffer(part, 20, 64, ahead_blocks=24 * (stage == 0)) for stage, part in enumerate(tiling(rng, 2))]
    shares = [placed(rng, KeptKv(tuple(bytes([i] * 16) for i in range(12)), np.arange(12, dtype=np.int32)))] * 2
    assert table_to_copy(offers, shares).lots == ()
    kept_ones = [KeptKv(share.names, share.ids) for share in shares]
    assert not table_to_part(offers, kept_ones, shares).there
    able = [replace(offer, ahead_blocks=24) for offer in offers]
    with pytest.raises(ValueError, match="there is memory for layers of others in 0 blocks only"):
        check_table(table_to_copy(able, shares), 1, offers[1], 64, [WHOLE] * 2)
    with pytest.raises(ValueError, match="blocks are said to be there that are not among 0"):
        check_table(table_to_part(able, kept_ones, shares), 1, offers[1], 64, [WHOLE] * 2)


def placed(rng: np.random.Generator, found: KeptKv) -> PlacedKv:
    """Return blocks with places among 24."""
    return PlacedKv(found.names, found.ids, rng.permutation(24)[: len(found)].astype(np.int32))


def some_of(rng: np.random.Generator, found: KeptKv) -> KeptKv:
    places = np.flatnonzero(rng.random(len(found)) < 0.5)
    return KeptKv(tuple(found.names[i] for i in places), found.ids[places])


# Messages


@pytest.mark.parametrize("seed", range(10))
def test_offers_and_tables_are_read_back_as_they_were(seed: int) -> None:
    offers = [replace(offer, card="card/9", door="/tmp/door") for offer in offers_to_form(np.random.default_rng(seed))]
    assert plain([unpack_offer(pack_offer(offer)) for offer in offers]) == plain(offers)
    table = table_to_form(offers, L)
    for each in (table, replace(table, by_pages=True)):
        assert plain(unpack_table(pack_table(each))) == plain(each)


def plain(found: Any) -> Any:
    """Return offers or a table as what can be compared: fields by name, and arrays as lists with their type."""
    if is_dataclass(found):
        return {each.name: plain(getattr(found, each.name)) for each in fields(found)}
    if isinstance(found, np.ndarray):
        return found.tolist(), found.dtype
    return [plain(each) for each in found] if isinstance(found, list | tuple) else found


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layers": (3, 3)}, "are no range"),
        ({"names": bytes(17)}, "do not go together"),
        ({"ids": bytes(8)}, "do not go together"),
        ({"room": -1}, "room"),
        ({"names": bytes(16 * (MAX_EXCHANGED + 1))}, "names"),
    ],
)
def test_offers_that_make_no_sense_are_refused(change: dict[str, object], reason: str) -> None:
    said = kv_messages.KvOffered(layers=(0, 3), room=4, num_blocks=5, group="", names=bytes(16), ids=bytes(4))
    assert unpack_offer(encode(said)).kept.names == (bytes(16),)
    with pytest.raises(WireError, match=reason):
        unpack_offer(encode(said.model_copy(update=change), MAX_KV_MESSAGE_BYTES))


@pytest.mark.parametrize(
    ("lot", "reason"),
    [
        ({"sources": (0, 2)}, "not well formed"),
        ({"targets": (5,)}, "not well formed"),
        ({"names": ()}, "not well formed"),
        ({"ids": np.array([3, 64], np.int32)}, "not among 64"),
        ({"ids": np.array([-1, 3], np.int32)}, "not among 64"),
        ({"first": 9}, "not among 10"),
        ({"ids": np.arange(5, dtype=np.int32), "names": tuple(map(name, range(5))), "first": 0}, "there is room for 4"),
        ({}, None),
    ],
)
def test_a_stage_refuses_a_table_that_it_cannot_serve(lot: dict[str, Any], reason: str | None) -> None:
    check_two_blocks(KvOffer(WHOLE, 4, 10), reason, **lot)


@pytest.mark.parametrize(
    ("card", "there", "lot", "reason"),
    [
        ("card", (), {}, None),
        ("", (), {}, "it hands over none"),
        ("card", (PlacedKv(), PlacedKv()), {}, "it hands over none"),
        ("card", (), {"ids": np.array([3, 64], np.int32)}, "not among 64"),
        ("card", (), {"places": np.array([4, 10], np.int32)}, "not among 10"),
    ],
)
def test_pages_may_hold_more_than_there_is_room_for_copies(
    card: str, there: tuple[PlacedKv, ...], lot: dict[str, Any], reason: str | None
) -> None:
    """But only who hands over some is asked for pages, and only blocks that there are."""
    places = {"places": np.array([3, 9], np.int32)} | lot
    check_two_blocks(KvOffer(WHOLE, 0, 10, card=card), reason, there, by_pages=True, **places)


def check_two_blocks(
    offer: KvOffer, reason: str | None, there: tuple[PlacedKv, ...] = (), *, by_pages: bool = False, **changes: Any
) -> None:
    """Have a stage check a table of two blocks for both stages; it refuses it for this reason, or does not."""
    lot = replace(KvLot((0,), (0, 1), np.array([3, 9], np.int32), 8, (name(1), name(2))), **changes)
    table = KvTable((WHOLE, WHOLE), (lot,), there, by_pages)
    with nullcontext() if reason is None else pytest.raises(ValueError, match=reason):
        check_table(table, 0, offer, 64, [LayerRange(0, 3), LayerRange(3, 6)])


def test_a_table_for_other_layers_is_refused() -> None:
    for held in ((LayerRange(0, 3), WHOLE), (WHOLE,)):
        with pytest.raises(ValueError, match="made for other stages"):
            check_table(KvTable(held), 0, KvOffer(WHOLE, 4, 10), 64, [WHOLE, WHOLE])
