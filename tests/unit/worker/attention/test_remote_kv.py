"""Which blocks on their way a row may share: whole splits of one worker's, and nothing that nobody could attend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.blocks.prefix_index import PrefixIndex
from services.worker.blocks.remote_kv import RemoteKv, RemoteSpan, tail_begin
from services.worker.contract.kept_kv import KeptKv
from services.worker.contract.remote import SPLIT_KEYS
from services.worker.kv_moves.kv_messages import KvOffered, pack_offer, pack_table, unpack_offer, unpack_table
from services.worker.kv_moves.kv_table import KvOffer, KvTable, MovingKv, table_to_form
from shared.errors import WireError
from shared.layers import LayerRange
from shared.wire import encode

BLOCK = 64
SPLIT = SPLIT_KEYS // BLOCK


def name_of(block: int) -> bytes:
    return block.to_bytes(16, "little")


def may_go_on(blocks: list[int], missing: set[int], spans: list[RemoteSpan]) -> bool:
    """The rule, written out split by split."""
    lacking = [i for i, block in enumerate(blocks) if block in missing]
    if not lacking:
        return True
    splits = range(lacking[0] // SPLIT, lacking[-1] // SPLIT + 1)
    needed = [i for split in splits for i in range(split * SPLIT, (split + 1) * SPLIT)]
    if needed[-1] >= len(blocks):
        return False
    return any(all(span.first <= blocks[i] < span.end for i in needed) for span in spans)


@settings(max_examples=300)
@given(
    sizes=st.lists(st.integers(1, 14), min_size=1, max_size=3),
    is_live=st.lists(st.booleans(), min_size=3, max_size=3),
    data=st.data(),
)
def test_a_row_shares_what_the_rule_allows_and_else_what_is_here(
    sizes: list[int], is_live: list[bool], data: st.DataObject
) -> None:
    ends = np.cumsum(sizes).tolist()
    lots = [RemoteSpan(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    spans = [lot for lot, live in zip(lots, is_live, strict=False) if live]
    coming = KeptKv(tuple(name_of(i) for i in range(ends[-1])), np.arange(ends[-1], dtype=np.int32))
    remote, index = RemoteKv(coming, spans, BLOCK), PrefixIndex(40)
    arrived = data.draw(st.sets(st.integers(0, ends[-1] - 1)))
    remote.arrived([name_of(i) for i in arrived])
    for block in arrived:
        index.add(name_of(block), block)
    first = data.draw(st.integers(0, ends[-1] - 1))
    row = [(first + i) % ends[-1] for i in range(data.draw(st.integers(1, ends[-1])))]
    names = [name_of(block) for block in row]
    here = index.find(names)
    found = remote.extend(names, here, index)
    missing = set(range(ends[-1])) - arrived
    known = {block for span in spans for block in range(span.first, span.end)} | arrived
    longest = next((i for i, block in enumerate(row) if block not in known), len(row))
    assert found in (here, row[:longest])
    assert (found == row[:longest]) == (here == row[:longest] or may_go_on(row[:longest], missing, spans))
    num_full = data.draw(st.integers(0, len(row)))
    usable = remote.num_usable(row[: num_full + 1], num_full)
    live_missing = {block for block in missing if block in known}
    assert may_go_on(row[: min(usable, num_full)], live_missing, spans)
    assert usable <= num_full or row[num_full] not in live_missing, "what is copied is here"


def test_without_whole_splits_of_blocks_no_block_is_a_tail() -> None:
    assert tail_begin(2 * SPLIT + 3, BLOCK) == 2 * SPLIT
    assert tail_begin(2 * SPLIT, BLOCK) == 2 * SPLIT
    assert tail_begin(5, 48) == 5
    assert tail_begin(5, 2 * SPLIT_KEYS) == 5


def test_tails_travel_first_where_kv_is_attended_elsewhere() -> None:
    rng = np.random.default_rng(0)
    names = tuple(name_of(i) for i in range(10))
    tails, ends = np.array([3, 8, 9], np.int32), np.array([3, 6, 9], np.int32)
    kept = KeptKv(names, rng.permutation(20)[:10].astype(np.int32), tails, ends)
    whole = LayerRange(0, 4)
    offers = [KvOffer(whole, 9, 50, kept=kept, link_bytes_per_s=2.5, step_s=0.25), KvOffer(whole, 99, 50)]
    assert all(_same(unpack_offer(pack_offer(offer)), offer) for offer in offers)
    order = [0, 1, 2, 3, 4, 5, 6, 7, 8]
    for live, expected in ((False, order), (True, [3, 8, 0, 1, 2, 4, 5, 6, 7])):
        asked: list[tuple[Any, ...]] = []

        def are_live(lots: Sequence[MovingKv], live: bool = live, asked: list[Any] = asked) -> list[bool]:
            asked += [(lot.sources, len(lot.kept), lot.kept.tails.tolist(), lot.kept.ends.tolist()) for lot in lots]
            return [live]

        table = table_to_form(offers, 4, are_live)
        assert asked == [((0,), 9, [3, 8], [3, 6])], "a sequence that is cut has no end here"
        (lot,) = table.lots
        assert lot.is_live is live
        assert lot.names == tuple(names[i] for i in expected), "cut at the end, then the tails first"
        assert lot.ids.tolist() == kept.ids[expected].tolist()
        assert lot.span == RemoteSpan(0, 9)
        assert _same_table(unpack_table(pack_table(table)), table)


def test_each_lot_travels_in_the_order_of_its_own_mode() -> None:
    whole, wanted = LayerRange(0, 4), [False, True]
    kept = [
        KeptKv(tuple(name_of(10 * i + j) for j in range(4)), np.arange(4, dtype=np.int32), np.array([1, 3], np.int32))
        for i in range(2)
    ]
    table = table_to_form([KvOffer(whole, 9, 50, kept=each) for each in kept], 4, lambda _: wanted)
    assert [lot.is_live for lot in table.lots] == wanted
    assert [lot.first for lot in table.lots] == [0, 4]
    assert [lot.ids.tolist() for lot in table.lots] == [[0, 1, 2, 3], [1, 3, 0, 2]]
    assert table.lots[1].names == tuple(kept[1].names[i] for i in (1, 3, 0, 2))


@pytest.mark.parametrize("field", ["tails", "ends"])
@pytest.mark.parametrize("places", [[0, 2], [1, 0], [0, 0], [-1]])
def test_places_that_are_not_among_the_blocks_are_refused(field: str, places: list[int]) -> None:
    packed = np.array(places, dtype="<i4").tobytes()
    said = KvOffered(layers=(0, 3), room=4, num_blocks=5, group="", names=bytes(32), ids=bytes(8))
    with pytest.raises(WireError):
        unpack_offer(encode(said.model_copy(update={field: packed})))


def _same(one: KvOffer, other: KvOffer) -> bool:
    arrays = [(getattr(one.kept, name), getattr(other.kept, name)) for name in ("ids", "tails", "ends")]
    plain = [
        (o.layers, o.room, o.num_blocks, o.group, o.kept.names, o.link_bytes_per_s, o.step_s) for o in (one, other)
    ]
    return plain[0] == plain[1] and all(np.array_equal(*pair) for pair in arrays)


def _same_table(one: KvTable, other: KvTable) -> bool:
    return one.held == other.held and [lot.is_live for lot in one.lots] == [lot.is_live for lot in other.lots]
