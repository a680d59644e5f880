"""What every bus promises about key-value buckets."""

from __future__ import annotations

import asyncio
import random

import pytest

from shared.transport.bus import KeyValue, KvEntry, MessageTooLargeError, WrongRevisionError
from tests.support.broker import Net, Seen, contract

HISTORY = 64
"""Where a test wants to see every change: a watch that falls behind skips values that are no longer kept."""


async def bucket_of(net: Net) -> KeyValue:
    return await (await net.connect()).key_value(net.unique("bucket"), history=HISTORY)


async def value_of(bucket: KeyValue, key: str) -> bytes | None:
    entry = await bucket.get(key)
    return None if entry is None else entry.value


async def keys_of(bucket: KeyValue) -> list[str]:
    """Return the keys that have a value, sorted: a watch has shown them when it begins."""
    seen: dict[str, KvEntry] = {}

    def note(entry: KvEntry) -> None:
        seen[entry.key] = entry

    watch = await bucket.watch(">", note)
    await watch.close()
    return sorted(key for key, entry in seen.items() if entry.value is not None)


@contract
async def test_a_value_is_read_back_with_its_revision(net: Net) -> None:
    bucket = await bucket_of(net)
    assert await bucket.get("plan") is None
    revision = await bucket.put("plan", b"\x00one")
    assert await bucket.get("plan") == KvEntry("plan", b"\x00one", revision)
    later = await bucket.put("plan", b"")
    assert later > revision
    assert await bucket.get("plan") == KvEntry("plan", b"", later)


@contract
async def test_create_needs_a_key_without_a_value(net: Net) -> None:
    bucket = await bucket_of(net)
    first = await bucket.create("lease", b"w0")
    with pytest.raises(WrongRevisionError) as caught:
        await bucket.create("lease", b"w1")
    assert (caught.value.key, caught.value.expected) == ("lease", 0)
    assert await bucket.get("lease") == KvEntry("lease", b"w0", first)
    await bucket.delete("lease")
    second = await bucket.create("lease", b"w1")
    assert await bucket.get("lease") == KvEntry("lease", b"w1", second)
    assert second > first


@contract
async def test_update_needs_the_present_revision(net: Net) -> None:
    bucket = await bucket_of(net)
    first = await bucket.put("plan", b"1")
    second = await bucket.update("plan", b"2", first)
    for stale in (first, 0, second + 7):
        with pytest.raises(WrongRevisionError) as caught:
            await bucket.update("plan", b"3", stale)
        assert caught.value.expected == stale
    with pytest.raises(WrongRevisionError):
        await bucket.update("never-written", b"1", second)
    assert await bucket.get("plan") == KvEntry("plan", b"2", second)
    await bucket.delete("plan")
    with pytest.raises(WrongRevisionError):
        await bucket.update("plan", b"3", second)


@contract
async def test_of_writers_that_compare_and_set_none_loses_an_increment(net: Net) -> None:
    """Four writers, ten increments each: 40 in the end, each revision given to one of them."""
    name, gained = net.unique("count"), list[int]()
    await (await (await net.connect()).key_value(name)).put("n", b"0")

    async def write(bucket: KeyValue) -> None:
        for _ in range(10):
            while True:
                entry = await bucket.get("n")
                assert entry is not None
                assert entry.value is not None
                try:
                    gained.append(await bucket.update("n", b"%d" % (int(entry.value) + 1), entry.revision))
                    break
                except WrongRevisionError:
                    continue

    buckets = [await (await net.connect()).key_value(name) for _ in range(4)]
    await asyncio.gather(*(write(bucket) for bucket in buckets))
    assert await value_of(buckets[0], "n") == b"40"
    assert len(set(gained)) == 40


@contract
async def test_deleting_removes_the_value_and_a_missing_one_is_no_error(net: Net) -> None:
    bucket = await bucket_of(net)
    await bucket.delete("nothing")
    await bucket.put("a", b"1")
    await bucket.delete("a")
    await bucket.delete("a")
    assert await bucket.get("a") is None
    assert await keys_of(bucket) == []


@contract
async def test_a_second_connection_opens_the_same_bucket(net: Net) -> None:
    one, two, name = await net.connect("one"), await net.connect("two"), net.unique("shared")
    first = await one.key_value(name, history=3)
    await first.put("k", b"v")
    second = await two.key_value(name, history=5)
    assert await value_of(second, "k") == b"v"
    await one.close()
    assert await keys_of(second) == ["k"]


@contract
async def test_buckets_opened_at_once_by_many_are_one(net: Net) -> None:
    buses, name = [await net.connect() for _ in range(4)], net.unique("race")
    buckets = await asyncio.gather(*(bus.key_value(name, history=1 + n) for n, bus in enumerate(buses)))
    for number, bucket in enumerate(buckets):
        await bucket.put(f"k{number}", b"")
    assert await keys_of(buckets[0]) == ["k0", "k1", "k2", "k3"]


@contract
async def test_a_watch_shows_present_values_then_every_change_in_order(net: Net) -> None:
    name = net.unique("watch")
    writer = await (await net.connect()).key_value(name, history=HISTORY)
    reader = await (await net.connect()).key_value(name)
    for key, value in (("b", b"1"), ("a", b"1"), ("b", b"2"), ("gone", b"1")):
        await writer.put(key, value)
    await writer.delete("gone")
    seen, only_a = Seen[KvEntry](), Seen[KvEntry]()
    await reader.watch(">", seen)
    await reader.watch("a", only_a)
    assert [(e.key, e.value) for e in seen.items] == [("a", b"1"), ("b", b"2")], "present when watch returned"
    expected = [(e.key, e.value, e.revision) for e in seen.items]
    for key, value in (("a", b"2"), ("c.d", b"1"), ("a", b"3")):
        expected.append((key, value, await writer.put(key, value)))
    await writer.delete("a")
    await writer.put("a", b"4")
    await seen.wait(7)
    assert [(e.key, e.value, e.revision) for e in seen.items[:5]] == expected
    assert [(e.key, e.value) for e in seen.items[5:]] == [("a", None), ("a", b"4")]
    revisions = [e.revision for e in seen.items]
    assert revisions == sorted(set(revisions))
    assert [e.value for e in await only_a.wait(5)] == [b"1", b"2", b"3", None, b"4"]


@contract
async def test_a_watch_always_shows_the_newest_value_however_short_the_history(net: Net) -> None:
    name, seen = net.unique("watch"), Seen[KvEntry]()
    writer = await (await net.connect()).key_value(name, history=1)
    await (await (await net.connect()).key_value(name)).watch("k", seen)
    for number in range(100):
        await writer.put("k", b"%d" % number)
    while seen.items[-1:] != [KvEntry("k", b"99", 100)]:
        await seen.wait(len(seen.items) + 1)
    revisions = [entry.revision for entry in seen.items]
    assert revisions == sorted(set(revisions))


@contract
async def test_a_watch_of_an_empty_bucket_starts_at_once_and_sees_the_first_write(net: Net) -> None:
    bucket, seen = await bucket_of(net), Seen[KvEntry]()
    await bucket.watch("k", seen)
    assert seen.items == []
    revision = await bucket.put("k", b"v")
    await bucket.put("other", b"v")
    assert await seen.wait(1) == [KvEntry("k", b"v", revision)]


@contract
async def test_a_refused_write_is_never_seen_by_a_watch(net: Net) -> None:
    """Also not by one that looks after each: the hint of a refused write is heard as that of any other."""
    name, seen = net.unique("watch"), Seen[KvEntry]()
    writer = await (await net.connect()).key_value(name, history=HISTORY)
    await (await (await net.connect()).key_value(name)).watch(">", seen)
    first = await writer.put("k", b"0")
    for number in range(20):
        with pytest.raises(WrongRevisionError):
            await writer.update("k", b"refused %d" % number, first + 7)
        with pytest.raises(WrongRevisionError):
            await writer.create("k", b"refused %d" % number)
    last = await writer.put("k", b"1")
    assert await seen.wait(2) == [KvEntry("k", b"0", first), KvEntry("k", b"1", last)]
    await asyncio.sleep(0.2)
    assert len(seen.items) == 2


@contract
async def test_a_lost_hint_is_made_good(net: Net) -> None:
    name, seen, one = net.unique("watch"), Seen[KvEntry](), Seen[KvEntry]()
    writer = await (await net.connect()).key_value(name, history=HISTORY)
    reader = await (await net.connect()).key_value(name)
    with net.deaf_watches():
        await reader.watch(">", seen)
        await reader.watch("k", one)
        await writer.put("k", b"0")
        await writer.put("other", b"0")
        await seen.wait(2)
        await writer.delete("k")
        await seen.wait(3)
        await one.wait(2)
    assert [(entry.key, entry.value, entry.revision) for entry in seen.items] == [
        ("k", b"0", 1),
        ("other", b"0", 2),
        ("k", None, 3),
    ]
    assert [(entry.value, entry.revision) for entry in one.items] == [(b"0", 1), (None, 3)]


@contract
async def test_a_raising_watch_handler_is_counted_and_sees_the_next_change(net: Net) -> None:
    bus = await net.connect()
    bucket, seen = await bus.key_value(net.unique("bucket"), history=HISTORY), Seen[KvEntry]()

    def handler(entry: KvEntry) -> None:
        seen(entry)
        if entry.value == b"bad":
            raise ValueError("not good")

    await bucket.watch(">", handler)
    await bucket.put("k", b"bad")
    await bucket.put("k", b"good")
    assert [e.value for e in await seen.wait(2)] == [b"bad", b"good"]
    assert bus.stats.handler_errors == 1


@contract
async def test_a_closed_watch_sees_nothing_more(net: Net) -> None:
    bucket, seen, other = await bucket_of(net), Seen[KvEntry](), Seen[KvEntry]()
    watch = await bucket.watch(">", seen)
    await bucket.watch(">", other)
    await bucket.put("k", b"1")
    await seen.wait(1)
    await watch.close()
    await watch.close()
    await bucket.put("k", b"2")
    await other.wait(2)
    assert len(seen.items) == 1


@contract
async def test_bad_keys_and_buckets_and_large_values_are_refused(net: Net) -> None:
    bus = await net.connect()
    bucket = await bus.key_value(net.unique("bucket"))
    for key in ("", "a b", "a*", ">", ".a", "a.", "a..b", "ä", "a\n"):
        with pytest.raises(ValueError, match="key"):
            await bucket.put(key, b"")
        with pytest.raises(ValueError, match="key"):
            await bucket.get(key)
    for name in ("", "a.b", "a b", "a>"):
        with pytest.raises(ValueError, match="bucket"):
            await bus.key_value(name)
    with pytest.raises(MessageTooLargeError):
        await bucket.put("k", bytes(bus.max_payload_bytes + 1))
    assert bus.stats.too_large == 1
    assert await keys_of(bucket) == []


@contract
async def test_a_random_history_leaves_what_a_dictionary_would(net: Net) -> None:
    """120 seeded operations; the model is a dict of values and one of last revisions."""
    chance, bucket, watched = random.Random(7), await bucket_of(net), Seen[KvEntry]()
    values: dict[str, bytes] = {}
    last: dict[str, int] = {}
    await bucket.watch(">", watched)
    for number in range(120):
        key, value = chance.choice("abcd"), b"%d" % number
        operation = chance.choice(("put", "create", "update", "stale", "delete"))
        try:
            if operation == "put":
                last[key] = await bucket.put(key, value)
            elif operation == "create":
                last[key] = await bucket.create(key, value)
                assert key not in values
            elif operation == "update":
                last[key] = await bucket.update(key, value, last.get(key, 0))
            elif operation == "stale":
                await bucket.update(key, value, last.get(key, 0) + 1)
                pytest.fail("a stale revision was accepted")
            else:
                await bucket.delete(key)
                last[key] = max(last.values(), default=0) + 1  # a deletion takes a revision too
                values.pop(key, None)
                continue
            values[key] = value
        except WrongRevisionError:
            assert operation == "stale" or (operation == "create" and key in values)
    assert await keys_of(bucket) == sorted(values)
    assert {key: (await bucket.get(key)) for key in values} == {
        key: KvEntry(key, value, last[key]) for key, value in values.items()
    }
    await watched.wait(max(last.values()))
    newest = {entry.key: entry for entry in watched.items}
    assert {key: entry.value for key, entry in newest.items() if entry.value is not None} == values
    assert [entry.revision for entry in watched.items] == list(range(1, max(last.values()) + 1))


@contract
async def test_values_of_a_bucket_with_an_age_limit_go_by_themselves(net: Net) -> None:
    bucket = await (await net.connect()).key_value(net.unique("bucket"), max_age_s=1.0)
    now = asyncio.get_running_loop().time
    put_s = now()
    await bucket.put("r-1", b"w0")
    found = (await keys_of(bucket), await bucket.get("r-1") is None)
    assert found == (["r-1"], False) or now() >= put_s + 1.0
    async with asyncio.timeout(10):
        while await bucket.get("r-1") is not None:
            await asyncio.sleep(0.2)
    assert await keys_of(bucket) == []
    await bucket.create("r-1", b"w1")
