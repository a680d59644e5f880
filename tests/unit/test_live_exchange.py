"""KV goes along when live groups form and dissolve: to the bit, where it belongs, within its memory, or not at all."""

from __future__ import annotations

import asyncio
import threading
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import pytest
import torch

from services.worker.engine.engine import Engine
from services.worker.engine.prefix import following_names, root_name
from services.worker.engine.types import NOTHING_KEPT, Executor, KeptKv
from services.worker.executor.elastic_model import ElasticModel
from services.worker.groups import kv_wire, live_exchange
from services.worker.groups.device import Parting
from services.worker.groups.kv_wire import KvSocket
from services.worker.groups.live_exchange import LiveExchange
from services.worker.groups.torch_device import TorchGroupDevice
from services.worker.memory.block_copies import BlockCopies, copy_blocks, write_block_bytes
from services.worker.memory.kv_cache import KVCache
from shared.checksum import seal
from shared.layers import LayerRange
from tests.support.engine_builders import new_sequence
from tests.support.live_groups import (
    SHAPES,
    Group,
    Texts,
    all_that_comes,
    calm_texts,
    check,
    form,
    live_devices,
    new_engine,
    open_elastic_model,
    places,
    ranges_of,
    spoil,
    tokens_of,
)
from tests.support.runners import KERNELS

pytestmark = pytest.mark.kernels

HALVES = ranges_of(2, 4)
BLOCK = 16


@pytest.fixture(autouse=True)
def _spoiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """After every change, all KV is no number until it is written: what was not moved cannot be read by luck."""
    for name in ("keep", "restore"):
        change = getattr(ElasticModel, name)

        def spoiling(self: ElasticModel, *args: object, change: object = change) -> None:
            change(self, *args)  # type: ignore[operator]
            spoil(self)

        monkeypatch.setattr(ElasticModel, name, spoiling)


# Text


@dataclass
class Server:
    """An engine that is stepped by hand, and what it has said.

    Args:
        executor: of the first steps.
        names: of the requests of `texts_of` that it serves.
    """

    executor: Executor
    names: Sequence[int]
    num_computed: int = 0
    """Tokens in all batches."""
    texts: Texts = field(default_factory=dict)
    starts: dict[int, int] = field(default_factory=dict)
    """Where the first batch of each began since the executor changed."""

    def __post_init__(self) -> None:
        self.engine = new_engine(1, self.executor.capacity.num_blocks)
        self.add(self.names)

    def add(self, names: Sequence[int]) -> None:
        """Take requests on, from their prompts."""
        for name in names:
            new = new_sequence(name, prompt=prompt_of(name), max_tokens=8, seed=name)
            if name % 2:
                update = {"temperature": 0.8, "top_p": 0.9}
                object.__setattr__(new, "sampling", new.sampling.model_copy(update=update))
            assert isinstance(self.engine.add(new), int)

    async def serve(self, num_steps: int = 10**9) -> None:
        """Make some steps, or all."""
        while num_steps and (batch := self.engine.next_batch(0.0)) is not None:
            self.num_computed += int(batch.num_tokens.sum())
            for row, start in zip(batch.rows.tolist(), batch.start.tolist(), strict=True):
                self.starts.setdefault(int(self.engine.table.stream[row]) - 1000, start)
            events = self.engine.absorb(batch, await self.executor.submit(batch), 0.0)
            for stream, token in zip(events.stream.tolist(), events.tokens.tolist(), strict=True):
                if token >= 0:
                    self.texts.setdefault(stream - 1000, []).append(token)
            num_steps -= 1
            self.engine.check_invariants()

    def enter(self, executor: Executor, kept: KeptKv, coming: KeptKv = NOTHING_KEPT) -> None:
        """Go on elsewhere."""
        self.starts.clear()
        self.executor = executor
        self.engine.enter_executor(executor.capacity.num_blocks, executor.depth, kept, coming)

    def num_cached(self, kept: KeptKv, name: int) -> int:
        """Return how many tokens of a request, as far as it has come, lie in blocks that were kept."""
        tokens = np.array([*prompt_of(name), *self.texts.get(name, [])], np.int32)
        chain = following_names(root_name(""), tokens[:-1], BLOCK)
        return BLOCK * next((i for i, each in enumerate(chain) if each not in kept.names), len(chain))

    def left_to_compute(self, kept: KeptKv, names: Sequence[int]) -> int:
        """Return the tokens that have to be computed for some requests if what is kept is used, and nothing twice."""
        return sum(len(prompt_of(name)) + 8 - 1 - self.num_cached(kept, name) for name in names)


async def calm(name: str = "llama", dtype: str = "float32", kernels: str = KERNELS) -> Texts:
    """Return what an undisturbed worker says to each request."""
    return {stream - 1000: text for stream, text in (await calm_texts(name, dtype, kernels)).items()}


def prompt_of(name: int) -> list[int]:
    return tokens_of(min(name, 4), 20 + 9 * name)


def rows_of(engine: Engine, names: Sequence[int]) -> list[int]:
    table = engine.table
    return [row for row in engine.row_of.values() if int(table.stream[row]) - 1000 in names]


CASES = sorted({("llama", "float32", KERNELS), ("llama", "float32", "torch"), ("tied", "bfloat16", KERNELS)})


@pytest.mark.parametrize(("name", "dtype", "kernels"), CASES)
@pytest.mark.parametrize("ranges", [HALVES, ranges_of(1, 3, 4)], ids=str)
async def test_sequences_go_on_in_a_group_and_apart_again_without_computing_anything_twice(
    ranges: Sequence[LayerRange], name: str, dtype: str, kernels: str
) -> None:
    """Three begin at the first; in the group three more, whose prompts the second knows; then they part by halves."""
    expected = await calm(name, dtype, kernels)
    async with live_devices(len(ranges), name, dtype=dtype, kernels=kernels) as devices:
        first = Server((await devices[0].alone()).executor, [0, 1, 2])
        second = Server((await devices[1].alone()).executor, [3, 4, 5])
        await first.serve(4)
        await second.serve(5)
        assert first.texts
        assert any(len(text) < 8 for text in first.texts.values())
        kept = [first.engine.leave_executor(0.0), second.engine.leave_executor(0.0), NOTHING_KEPT][: len(ranges)]
        assert all(len(each) for each in kept[:2])

        group = await form(devices, ranges, kept)
        assert set(group.kept.names) == set(kept[0].names) | set(kept[1].names)
        first.enter(group.executor, group.kept)
        cached = {each: first.num_cached(group.kept, each) for each in range(6)}
        assert min(cached.values()) >= BLOCK
        await first.serve(2)
        first.add([3, 4, 5])  # of the second, from their prompts
        await first.serve(3)
        assert set(first.starts) == set(range(6))
        assert all(start >= cached[each] for each, start in first.starts.items())
        kept_now = first.engine.leave_executor(0.0)

        shares = [first.engine.sharing.kept(rows_of(first.engine, each)) for each in ([0, 3, 5], [1, 2, 4], [])]
        assert set(shares[0].names) | set(shares[1].names) == set(kept_now.names)
        await group.executor.close()
        partings = [Parting(tuple(shares[: len(ranges)])), *[Parting()] * (len(ranges) - 1)]
        alone = await asyncio.gather(*(device.alone(part) for device, part in zip(devices, partings, strict=True)))
        for led, share in zip(alone, shares, strict=False):
            assert led.kept.names == share.names
            assert led.kept.ids.tolist() == list(range(len(share)))
        first.engine.release(rows_of(first.engine, [1, 2, 4]), "w1")
        first.engine.take_events()
        first.enter(alone[0].executor, alone[0].kept)
        left, before = first.left_to_compute(alone[0].kept, [0, 3, 5]), first.num_computed
        await first.serve()
        assert first.num_computed - before <= left
        assert {each: first.texts[each] for each in (0, 3, 5)} == {each: expected[each] for each in (0, 3, 5)}

        third = Server(alone[1].executor, [])
        third.engine.leave_executor(0.0)
        third.enter(alone[1].executor, alone[1].kept)
        third.add([1, 2, 4])
        left = third.left_to_compute(alone[1].kept, [1, 2, 4])
        await third.serve()
        assert third.texts == {each: expected[each] for each in (1, 2, 4)}
        assert third.num_computed <= left < sum(len(prompt_of(each)) + 7 for each in (1, 2, 4))
        check(devices)


async def test_a_group_serves_others_while_kv_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody computes what comes; who needs nothing of it is served to the end before the first byte moves."""
    expected, over, send = await calm(), threading.Event(), LiveExchange._send

    def late(self: LiveExchange, *args: object) -> None:
        over.wait(30)
        send(self, *args)  # type: ignore[arg-type]

    async with live_devices(2) as devices:
        first = Server((await devices[0].alone()).executor, [0, 1, 2])
        second = Server((await devices[1].alone()).executor, [4])
        await first.serve(4)
        await second.serve(5)
        kept = [first.engine.leave_executor(0.0), second.engine.leave_executor(0.0)]
        own = places(devices, HALVES)
        with monkeypatch.context() as patch:
            patch.setattr(LiveExchange, "_send", late)
            leading = asyncio.ensure_future(devices[0].lead(own[0], lambda _: None, kept[0]))
            await devices[1].join(own[1], lambda _: None, kept[1])
            led = await leading
            arrivals = led.arrivals
            assert arrivals is not None
            assert set(arrivals.coming.names) == set(kept[0].names) | set(kept[1].names)
            first.enter(led.executor, NOTHING_KEPT, arrivals.coming)
            engine, num_free = first.engine, first.engine.blocks.num_free
            assert num_free == arrivals.num_blocks - len(arrivals.coming)
            first.add([3, 4, 5])
            told = dict(first.texts)
            await first.serve()
            assert set(first.starts) == {3}, "the others wait"
            assert first.texts == told | {3: expected[3]}
            assert engine.blocks.num_free == num_free
            over.set()
            left, before = first.left_to_compute(arrivals.coming, [0, 1, 2, 4, 5]), first.num_computed
            async for arrived in arrivals.news:
                engine.arrived(arrived.blocks)
                await first.serve(1)
        engine.expect_no_more()
        assert engine.stats.num_coming_blocks == 0
        await first.serve()
        assert first.texts == expected
        assert first.num_computed - before <= left, "nothing that came was computed"
        await led.executor.close()
        await asyncio.gather(*(device.alone() for device in devices))
        check(devices)


# Bits


Bits = dict[int, bytes]
"""Of a block: keys, then values, by layer."""


def bits_of(device: TorchGroupDevice, block: int) -> Bits:
    cache = device._model.cache
    return {
        layer: b"".join(side[layer][block].view(torch.uint8).numpy().tobytes() for side in (cache.keys, cache.values))
        for layer in cache.layers
    }


def scribble(device: TorchGroupDevice, rng: np.random.Generator) -> None:
    """Let all blocks hold bits that nothing else holds, numbers or not."""
    for pool in device._model.cache.pools():
        flat = pool.view(-1).view(torch.uint8)
        flat.copy_(torch.from_numpy(rng.integers(0, 256, flat.numel(), dtype=np.uint8)))


def some_kept(device: TorchGroupDevice, rng: np.random.Generator, num_blocks: int, most: int = 12) -> KeptKv:
    """Return some blocks, under names of which others may have the same."""
    count = int(rng.integers(1, most))
    names = tuple(int(number).to_bytes(16, "little") for number in rng.choice(30, count, replace=False))
    return KeptKv(names, rng.choice(num_blocks, count, replace=False).astype(np.int32))


def snapshot(devices: Sequence[TorchGroupDevice], kept: KeptKv) -> dict[bytes, Bits]:
    """Return by name what blocks hold in all layers that these devices have."""
    found: dict[bytes, Bits] = {}
    for name, block in zip(kept.names, kept.ids.tolist(), strict=True):
        found[name] = {layer: bits for device in devices for layer, bits in bits_of(device, block).items()}
    return found


def check_bits(device: TorchGroupDevice, kept: KeptKv, expected: dict[bytes, Bits]) -> None:
    for name, block in zip(kept.names, kept.ids.tolist(), strict=True):
        assert bits_of(device, block) == {layer: expected[name][layer] for layer in device.layers}


class Life:
    """Workers that form groups, merge them, and part, as a seed says, and always know which bits are to be where."""

    def __init__(self, devices: list[TorchGroupDevice], seed: int) -> None:
        self.devices = devices
        self.rng = np.random.default_rng(seed)
        self.groups: list[tuple[list[TorchGroupDevice], Group]] = []
        self.done: Counter[str] = Counter()

    async def step(self) -> None:
        busy = [device for members, _ in self.groups for device in members]
        free = [device for device in self.devices if device not in busy]
        for device in self.devices:
            scribble(device, self.rng)
        if self.groups and self.rng.random() < 0.4:
            await self.part(*self.groups.pop(int(self.rng.integers(len(self.groups)))))
        elif self.groups and free:
            await self.merge(*self.groups.pop(int(self.rng.integers(len(self.groups)))), free[0])
        elif len(free) >= 2:
            await self.gather(free)
        check(self.devices)

    async def gather(self, free: list[TorchGroupDevice]) -> None:
        chosen = [free[i] for i in self.rng.permutation(len(free))[: int(self.rng.integers(2, len(free) + 1))]]
        ends = sorted(int(at) for at in self.rng.choice([1, 2, 3], len(chosen) - 1, replace=False))
        kept = [some_kept(device, self.rng, device.whole_blocks) for device in chosen]
        await self.form(
            chosen, ranges_of(*ends, 4), kept, [([device], each) for device, each in zip(chosen, kept, strict=True)]
        )

    async def merge(self, members: list[TorchGroupDevice], group: Group, new: TorchGroupDevice) -> None:
        """One more comes to a group, and takes a part of the longest stage's layers."""
        longest = max(range(len(members)), key=lambda i: len(members[i].layers))
        layers = members[longest].layers
        if len(layers) < 2:
            self.groups.append((members, group))
            return
        halves = [LayerRange(layers.first, layers.first + 1), LayerRange(layers.first + 1, layers.end)]
        new_first = bool(self.rng.integers(2))
        kept = {id(members[0]): some_kept(members[0], self.rng, group.executor.capacity.num_blocks)}
        kept[id(new)] = some_kept(new, self.rng, new.whole_blocks)
        chosen, ranges = list(members), [device.layers for device in members]
        chosen.insert(longest + (not new_first), new)
        ranges[longest : longest + 1] = halves
        await group.executor.close()
        sources = [([new], kept[id(new)]), (members, kept[id(members[0])])]
        if chosen.index(new) > chosen.index(members[0]):
            sources.reverse()
        await self.form(chosen, ranges, [kept.get(id(device), NOTHING_KEPT) for device in chosen], sources)
        self.done["merge"] += 1

    async def form(
        self,
        chosen: list[TorchGroupDevice],
        ranges: Sequence[LayerRange],
        kept: list[KeptKv],
        sources: Sequence[tuple[list[TorchGroupDevice], KeptKv]],
    ) -> None:
        expected: dict[bytes, Bits] = {}
        for holders, each in sources:
            expected = snapshot(holders, each) | expected
        names = list(dict.fromkeys(name for _, each in sources for name in each.names))
        group = await form(chosen, ranges, kept)
        assert list(group.kept.names) == names
        assert group.kept.ids.tolist() == list(range(len(names)))
        for device in chosen:
            check_bits(device, group.kept, expected)
        self.groups.append((chosen, group))
        self.done["form"] += 1

    async def part(self, members: list[TorchGroupDevice], group: Group) -> None:
        num_blocks = group.executor.capacity.num_blocks
        shares = [some_kept(device, self.rng, num_blocks) for device in members]
        expected = [snapshot(members, share) for share in shares]
        await group.executor.close()
        order = self.rng.permutation(len(members)).tolist()
        calls = {i: Parting(tuple(shares)) if i == 0 else Parting() for i in order}
        told = await asyncio.gather(*(members[i].alone(calls[i]) for i in order))
        for i, led in zip(order, told, strict=True):
            assert led.kept.names == shares[i].names
            assert led.kept.ids.tolist() == list(range(len(shares[i])))
            check_bits(members[i], led.kept, expected[i])
        self.done["part"] += 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", range(2))
async def test_through_random_changes_every_bit_is_where_it_belongs(
    seed: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_wire, "CHUNK_BYTES", 3000)
    async with live_devices(4, dtype=dtype) as devices:
        life = Life(devices, seed)
        for number in range(100):  # how much memory there is differs from run to run, and with it what can be done
            await life.step()
            if number >= 13 and all(life.done[name] for name in ("form", "merge", "part")):
                break
        assert min(life.done[name] for name in ("form", "merge", "part")) > 0, life.done
        for _, group in life.groups:
            await group.executor.close()


# Limits


async def group_with(devices: list[TorchGroupDevice], kept: Sequence[KeptKv]) -> Group:
    group = await form(devices, HALVES, kept)
    check(devices)
    return group


async def test_a_name_that_two_have_goes_once_and_the_first_one_counts() -> None:
    rng = np.random.default_rng(0)
    async with live_devices(2) as devices:
        for device in devices:
            scribble(device, rng)
        one = KeptKv((b"a" * 16, b"b" * 16), np.array([7, 3], np.int32))
        two = KeptKv((b"b" * 16, b"c" * 16), np.array([9, 1], np.int32))
        expected = snapshot(devices[1:], two) | snapshot(devices[:1], one)
        group = await group_with(devices, [one, two])
        assert group.kept.names == (b"a" * 16, b"b" * 16, b"c" * 16)
        for device in devices:
            check_bits(device, group.kept, expected)
        await group.executor.close()


def numbered(count: int, offset: int = 0) -> KeptKv:
    names = tuple((offset + i).to_bytes(16, "little") for i in range(count))
    return KeptKv(names, np.arange(count, dtype=np.int32)[::-1].copy())


async def test_what_the_group_has_no_blocks_for_is_cut_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async with live_devices(2) as devices:
        have = devices[0]._model.info.capacity.num_blocks
        monkeypatch.setattr(devices[1]._model, "blocks_with", lambda _layers: have + 10)
        kept = [numbered(have), numbered(30, offset=10**6)]
        rng = np.random.default_rng(1)
        for device in devices:
            scribble(device, rng)
        expected = snapshot(devices[:1], kept[0]) | snapshot(devices[1:], kept[1])
        group = await group_with(devices, kept)
        assert group.executor.capacity.num_blocks == have + 10
        assert group.kept.names == kept[0].names + kept[1].names[:10]
        for device in devices:
            check_bits(device, group.kept, expected)
        await group.executor.close()


@pytest.mark.parametrize("room", [0, 3])
async def test_kv_is_kept_aside_in_no_more_memory_than_allowed(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for some blocks of four layers, and a bit; in the group each stage has half of them, so twice as many."""
    taken: list[int] = []

    def note(cache: KVCache, ids: np.ndarray[tuple[int], np.dtype[np.int32]]) -> BlockCopies:
        copies = copy_blocks(cache, ids)
        taken.append(copies.num_bytes)
        return copies

    monkeypatch.setattr(live_exchange, "copy_blocks", note)
    model = open_elastic_model(SHAPES["llama"])
    block_bytes = 4 * 2 * model.facts.block_bytes
    model.close()
    exchange_bytes = room * block_bytes + block_bytes // 4
    async with live_devices(2, exchange_bytes=exchange_bytes) as devices:
        rng = np.random.default_rng(2)
        for device in devices:
            scribble(device, rng)
        kept = [numbered(8), numbered(8, offset=100)]
        expected = snapshot(devices[:1], kept[0]) | snapshot(devices[1:], kept[1])
        group = await group_with(devices, kept)
        assert group.kept.names == kept[0].names[:room] + kept[1].names[:room]
        for device in devices:
            check_bits(device, group.kept, expected)
        assert all(num_bytes <= exchange_bytes for num_bytes in taken)
        assert len(taken) == 2 * bool(room)
        await group.executor.close()
        taken.clear()
        shares = (numbered(2), numbered(9, offset=100))
        led = await asyncio.gather(devices[0].alone(Parting(shares)), devices[1].alone(Parting()))
        assert [len(each.kept) for each in led] == [min(2, room), 2 * room - min(2, room)]
        assert sum(taken) <= 2 * exchange_bytes


# Faults


def count_sends(monkeypatch: pytest.MonkeyPatch, at: int, act: object) -> list[int]:
    """Let one of the chunks that are sent be sent by `act(socket, data)`."""
    send, lock, sent = KvSocket.send_chunk, threading.Lock(), [0]

    def counted(self: KvSocket, data: memoryview) -> None:
        with lock:
            sent[0] += 1
            number = sent[0]
        if number == at + 1:
            act(self, data)  # type: ignore[operator]
        else:
            send(self, data)

    monkeypatch.setattr(kv_wire, "CHUNK_BYTES", 3000)
    monkeypatch.setattr(KvSocket, "send_chunk", counted)
    return sent


def damaged(kind: str) -> object:
    def send(self: KvSocket, data: memoryview) -> None:
        number, size, checksum = self._num_sent, len(data), zlib.crc32(data)
        body = bytearray(data)
        if kind == "bytes":
            body[size // 2] ^= 4
        elif kind == "length":
            size -= 1
        elif kind == "number":
            number += 1
        header = bytearray(seal(kv_wire._HEADER.pack(number, size, checksum)))
        if kind == "header":
            header[2] ^= 1
        self._sock.sendall(header)
        self._sock.sendall(body)
        self._num_sent += 1

    return send


async def kept_three(devices: list[TorchGroupDevice]) -> list[KeptKv]:
    rng = np.random.default_rng(3)
    for device in devices:
        scribble(device, rng)
    return [numbered(8, offset=100 * i) for i in range(len(devices))]


async def serves(group: Group) -> None:
    """Check that a group works, though it does not have all KV."""
    assert len(group.kept) < 24
    server = Server(group.executor, range(6))
    await server.serve()
    assert server.texts == await calm()
    await group.executor.close()


async def test_damage_costs_the_kv_and_not_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one chunk, early or late, of any part of it; and of what the leader says to all."""
    async with live_devices(3) as devices:
        for kind, at in [*product(["bytes", "length", "number", "header"], [0, 9]), ("table", 0)]:
            kept = await kept_three(devices)
            expected: dict[bytes, Bits] = {}
            for device, own in zip(devices, kept, strict=True):
                expected |= snapshot([device], own)
            with monkeypatch.context() as patch:
                sent = count_sends(patch, at, damaged(kind))
                if kind == "table":
                    patch.setattr(live_exchange, "pack_table", lambda _table: bytes(99))
                group = await form(devices, ranges_of(1, 2, 4), kept)
            assert sent[0] > at or kind == "table"
            assert len(group.kept) < 24
            assert len(group.coming) in (0, 24), "it may have failed before the group stood"
            for device in devices:
                check_bits(device, group.kept, expected)
            if at:
                await serves(group)
            await group.executor.close()
            await asyncio.gather(*(device.alone() for device in devices))
        group = await form(devices, ranges_of(1, 2, 4), kept)
        assert len(group.kept) == 24
        await group.executor.close()
        with monkeypatch.context() as patch:
            sent = count_sends(patch, 4, damaged("bytes"))
            shares = tuple(KeptKv(group.kept.names[i::3], group.kept.ids[i::3]) for i in range(3))
            partings = [Parting(shares), Parting(), Parting()]
            led = await asyncio.gather(*(device.alone(part) for device, part in zip(devices, partings, strict=True)))
        assert sent[0] > 4
        assert min(len(each.kept) for each in led) == 0, "at least who was sent the damage has nothing"
        assert all(each.kept.names in ((), share.names) for each, share in zip(led, shares, strict=True))


async def test_kv_that_takes_too_long_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    shut = KvSocket.shut
    over = threading.Event()

    def wake(self: KvSocket) -> None:
        over.set()
        shut(self)

    async with live_devices(3, exchange_limit_s=0.3) as devices:
        kept = await kept_three(devices)
        with monkeypatch.context() as patch:
            patch.setattr(KvSocket, "shut", wake)
            count_sends(patch, 5, lambda _sock, _data: over.wait(30))
            group = await form(devices, ranges_of(1, 2, 4), kept)
        assert over.is_set()
        await serves(group)


async def test_memory_that_cannot_be_had_costs_the_kv_and_not_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_cache: KVCache, _ids: object) -> BlockCopies:
        raise MemoryError("no memory")

    async with live_devices(3) as devices:
        kept = await kept_three(devices)
        with monkeypatch.context() as patch:
            patch.setattr(live_exchange, "copy_blocks", fail)
            group = await form(devices, ranges_of(1, 2, 4), kept)
        await serves(group)


@pytest.mark.parametrize("killed", [0, 1, 2])
async def test_a_worker_that_is_gone_in_mid_exchange_fails_the_group_and_the_others_are_whole_again(
    killed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections end while its KV is on the way, and the others wait for that."""
    over, shut, send = threading.Event(), KvSocket.shut, LiveExchange._send

    def never(self: LiveExchange, *args: object) -> None:
        if self._stage == killed:
            over.wait(20)
            raise ConnectionResetError("killed")
        send(self, *args)  # type: ignore[arg-type]

    def wake(self: KvSocket) -> None:
        over.set()
        shut(self)

    async with live_devices(3) as devices:
        kept = await kept_three(devices)
        own = places(devices, ranges_of(1, 2, 4))
        ends: dict[int, list[str | None]] = {1: [], 2: []}
        with monkeypatch.context() as patch:
            patch.setattr(LiveExchange, "_send", never)
            patch.setattr(KvSocket, "shut", wake)
            leading = asyncio.ensure_future(devices[0].lead(own[0], lambda _: None, kept[0]))
            await asyncio.gather(*(devices[i].join(own[i], ends[i].append, kept[i]) for i in (1, 2)))
            led = await leading
            assert led.arrivals is not None
            waiting = asyncio.ensure_future(all_that_comes(led.arrivals))
            await devices[killed].close()
            async with asyncio.timeout(10):
                assert len(await waiting) < 24
                for i in {1, 2} - {killed}:
                    while not ends[i]:
                        await asyncio.sleep(0.001)
        for device in devices[:killed] + devices[killed + 1 :]:
            alone = await device.alone()
            assert alone.kept.names == ()
            server = Server(alone.executor, range(6))
            await server.serve()
            assert server.texts == await calm()
            check([device])


@pytest.mark.parametrize("missing", [0, 1, 2])
async def test_who_does_not_come_to_the_parting_is_not_waited_for(missing: int) -> None:
    async with live_devices(3) as devices:
        kept = await kept_three(devices)
        group = await form(devices, ranges_of(1, 2, 4), kept)
        await group.executor.close()
        for device in devices:
            device._part_limit_s = 0.2
        partings = [Parting(tuple(kept)), Parting(), Parting()]
        led = await asyncio.gather(*(devices[i].alone(partings[i]) for i in range(3) if i != missing))
        assert all(each.kept.names == () for each in led)
        led.append(await devices[missing].alone(partings[missing]))
        assert led[-1].kept.names == ()
        check(devices)


async def test_a_member_that_parts_first_waits_in_its_pipeline_for_the_leader() -> None:
    """Else the leader would hear of a broken group, before it hears that the group is to dissolve."""
    async with live_devices(2) as devices:
        kept = await kept_three(devices)
        broken: list[str | None] = []
        own = places(devices, HALVES)
        leading = asyncio.ensure_future(devices[0].lead(own[0], broken.append, kept[0]))
        await devices[1].join(own[1], lambda _: None, kept[1])
        led = await leading
        assert led.arrivals is not None
        await all_that_comes(led.arrivals)
        executor = led.executor
        parting = asyncio.ensure_future(devices[1].alone(Parting()))
        while not devices[1]._listener._expected:
            await asyncio.sleep(0)
        server = Server(executor, range(6))
        await server.serve()
        assert server.texts == await calm()
        assert broken == []
        await executor.close()
        share = server.engine.leave_executor(0.0)
        assert (await devices[0].alone(Parting((NOTHING_KEPT, share)))).kept.names == ()
        assert (await parting).kept.names == share.names


async def test_a_wrong_number_of_shares_is_refused_before_anything_changes() -> None:
    async with live_devices(2) as devices:
        group = await form(devices, HALVES)
        with pytest.raises(ValueError, match="1 shares for 2 stages"):
            await devices[0].alone(Parting((NOTHING_KEPT,)))
        await serves(group)


async def test_a_member_of_a_group_that_is_not_whole_brings_nothing() -> None:
    """Its other half is elsewhere."""
    async with live_devices(3) as devices:
        kept = await kept_three(devices)
        old = await form(devices[:2], HALVES)
        await old.executor.close()
        group = await form([devices[0], devices[2]], HALVES, [kept[0], kept[2]])
        assert group.kept.names == kept[2].names
        await group.executor.close()


# Copies


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_are_written_back_to_the_bit_and_nowhere_else(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(5)
    pools = [torch.empty((9, 4, 2, 3), dtype=dtype) for _ in range(6)]
    for pool in pools:
        flat = pool.view(-1).view(torch.uint8)
        flat.copy_(torch.from_numpy(rng.integers(0, 256, flat.numel(), dtype=np.uint8)))
    cache = KVCache.over(pools[:3], pools[3:], 9)
    cache.resize(8, (1, 2))
    before = [pool.view(torch.uint8).clone() for pool in pools]
    copies = copy_blocks(cache, np.array([7, 2, 5], np.int32))
    assert copies.num_bytes == 2 * 2 * 3 * 4 * 2 * 3 * dtype.itemsize
    write_block_bytes(cache, 1, 1, 0, copies.bytes_of(1, 1, 1, 3))
    write_block_bytes(cache, 2, 0, 6, copies.bytes_of(2, 0, 0, 2))
    write_block_bytes(cache, 2, 0, 8, copies.bytes_of(2, 0, 1, 1))
    before[4][0], before[4][1] = before[4][2].clone(), before[4][5].clone()
    before[2][6], before[2][7] = before[2][7].clone(), before[2][2].clone()
    assert all(torch.equal(pool.view(torch.uint8), old) for pool, old in zip(pools, before, strict=True))


def test_blocks_that_are_not_there_are_refused() -> None:
    pools = [torch.zeros((4, 2, 1, 2)) for _ in range(2)]
    cache = KVCache.over(pools[:1], pools[1:], 4)
    for ids in ([4], [-1, 2]):
        with pytest.raises(ValueError, match="are not all among 4"):
            copy_blocks(cache, np.array(ids, np.int32))
    for first, size in ((3, 32), (-1, 16), (0, 15)):
        with pytest.raises(ValueError, match="bytes are not blocks"):
            write_block_bytes(cache, 0, 0, first, memoryview(bytearray(size)))
