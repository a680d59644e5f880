"""The KV of a request over real sockets: to the bit, whatever happens to the connection, and nothing is left of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from services.worker.engine.engine import Engine
from services.worker.memory.kv_cache import KVCache
from services.worker.migration.migration import Migration
from services.worker.migration.socket_network import SocketKvNetwork
from services.worker.peers.connect import Peers
from services.worker.sequences.table import Hold
from services.worker.serving.closing import Closing
from shared.cost import CostModel
from shared.ids import RequestId, StreamId, WorkerId
from shared.messages.fetch import Fetch, Fetched, FetchOutcome, FetchReason
from shared.messages.request import PrefixSource
from shared.process.tasks import TaskOwner
from shared.transport.bus import Message
from shared.types import FinishReason
from shared.wire import decode, encode
from tests.support.engine_builders import new_sequence
from tests.support.engine_harness import EngineHarness, make_harness
from tests.support.leaks import whats_open
from tests.support.peers import identity

BLOCK_SIZE, NUM_BLOCKS, NUM_LAYERS = 4, 64, 3
PAIR_BYTES = 2 * BLOCK_SIZE * 2 * 3 * 4
"""Keys and values of a block in one layer."""
NAME = RequestId("r0")
COST = CostModel(g0_s=1.0, b0_s=0.1, g1_s=0.0, b1_s=0.1, d_s=0.0, a_s=0.0)
"""Slow enough to wait for anything."""


class Worker:
    """An engine, keys and values of a model that nobody runs, and the way to others."""

    def __init__(self, index: int, peers: Peers, seed: int) -> None:
        rng = np.random.default_rng([seed, index])
        shape = (NUM_BLOCKS, BLOCK_SIZE, 2, 3)
        pools = [torch.from_numpy(rng.standard_normal(shape).astype(np.float32)) for _ in range(2 * NUM_LAYERS)]
        self.cache = KVCache.over(pools[:NUM_LAYERS], pools[NUM_LAYERS:], NUM_BLOCKS)
        self.worker_id = WorkerId(f"w{index}")
        self.peers = peers
        self.harness: EngineHarness = make_harness(num_blocks=NUM_BLOCKS, max_model_len=200)
        self.failures: list[BaseException] = []
        self.tasks = TaskOwner(lambda _, error: self.failures.append(error))
        self.is_busy = ""
        self.migration = Migration(
            self.engine,
            SocketKvNetwork(peers, lambda: self.cache),
            wake=self.step,
            busy=lambda: self.is_busy,
            is_open=lambda: True,
            closing=Closing(asyncio.get_running_loop().time),
            now=asyncio.get_running_loop().time,
            tasks=self.tasks,
        )
        self.migration.start()

    @property
    def engine(self) -> Engine:
        return self.harness.engine

    def step(self) -> None:
        """Whatever happens, the source goes on by a step, and what it has computed has other contents than before."""
        if self.harness.engine.registry.row_of and not self.harness.flights:
            self.harness.step()

    def contents(self, name: bytes) -> list[torch.Tensor] | None:
        block = self.engine.blocks.index.get(name)
        return None if block is None else [pool[block].clone() for pool in self.cache.pools()]

    async def fetch(self, source: Worker, address: str = "", attempt: int = 1) -> Fetched:
        asked = Fetch(
            request_id=NAME,
            attempt=attempt,
            source=source.worker_id,
            source_address=address or source.peers.address,
            reason=FetchReason.BALANCE,
        )
        message = Message("fetch", encode(asked), "")
        return decode(await self.migration.answer(message), Fetched)

    async def close(self) -> None:
        await self.migration.close()
        await self.tasks.close()


@asynccontextmanager
async def two(seed: int = 0, models: tuple[str, str] = ("0f", "0f")) -> AsyncIterator[tuple[Worker, Worker]]:
    """The first one runs a sequence of some blocks; nothing is open at the end."""
    await asyncio.get_running_loop().getaddrinfo("127.0.0.1", 0)
    before = whats_open()
    peers = [await Peers.open(identity(index, model=model)) for index, model in enumerate(models)]
    source, target = (Worker(index, each, seed) for index, each in enumerate(peers))
    source.harness.add(new_sequence(0, num_prompt=90, max_tokens=60))
    while source.engine.table.num_computed[0] < 90:
        source.harness.step()
    try:
        yield source, target
    finally:
        for worker in (source, target):
            await worker.close()
            assert not worker.failures
            assert not worker.engine.sharing.coming.num_reservations
            assert not worker.engine.blocks.pins.any()
            assert not len(worker.migration.departures)
    assert whats_open() == before


def names_of(source: Worker) -> list[bytes]:
    return list(source.engine.sharing.computed([0]).names)


def check_names(source: Worker, target: Worker) -> int:
    """Check that whatever has a name at the target is what the source has under it; return how many have one."""
    there = 0
    for name in list(target.engine.blocks.index._block_of):
        mine, its = target.contents(name), source.contents(name)
        assert its is not None, "the source keeps what is computed"
        assert mine is not None
        assert all(map(torch.equal, mine, its))
        there += 1
    return there


async def test_a_request_comes_with_all_of_its_full_blocks_to_the_bit() -> None:
    async with two() as (source, target):
        fetched = await target.fetch(source)
        assert fetched.outcome is FetchOutcome.MOVED
        source.harness.settle()
        assert source.harness.stories[1000].finish is FinishReason.RELEASED
        num_full = check_names(source, target)
        assert num_full >= 90 // BLOCK_SIZE
        assert fetched.num_blocks == num_full
        assert target.migration.fetching.num_bytes == num_full * NUM_LAYERS * PAIR_BYTES
        known, text = 90 + len(source.harness.stories[1000].text), source.harness.stories[1000].text
        assert known // BLOCK_SIZE - num_full <= 1
        new = new_sequence(0, num_prompt=90, max_tokens=60)
        again = replace(new, attempt=2, generated=np.array(text, dtype=np.uint32))
        row = target.harness.add(again)
        target.harness.submitted()
        assert target.engine.table.num_computed[row] == num_full * BLOCK_SIZE, "found as any cached prefix"
        assert not target.engine.sharing.coming.num_reservations
        assert target.engine.sharing.coming.num_recomputed == 0
        target.engine.registry.cancel(NAME, 2)
        target.harness.land()


@pytest.mark.parametrize("how", ["", "busy", "gone", "unknown cost"])
async def test_the_prefix_of_a_request_that_has_just_come_comes_to_the_bit_or_is_computed(how: str) -> None:
    async with two() as (source, target):
        target.engine.cost.now = None if how == "unknown cost" else COST
        target.migration.pulls._wake = lambda: None  # until what has come was compared
        asked = PrefixSource(worker_id=source.worker_id, address=source.peers.address, num_tokens=80)
        source.is_busy = "it forms a group" if how == "busy" else ""
        if how == "gone":
            await source.close()
        new = replace(
            new_sequence(1, num_prompt=90, max_tokens=9),
            prompt=source.engine.table.sequence(0).prompt.astype(np.uint32),
        )
        row = target.harness.add(new)
        assert isinstance(row, int)
        target.migration.pulls.begin(row, asked)
        assert bool(target.engine.table.hold[row] & Hold.PULLING) == (how != "unknown cost")
        while len(target.migration.pulls):
            await asyncio.sleep(0.001)
        assert not target.engine.table.hold[row] & Hold.PULLING
        assert check_names(source, target) == (0 if how else 80 // BLOCK_SIZE)
        while target.harness.stories[1001].finish is FinishReason.NONE:
            target.harness.step()
        assert bool(target.engine.totals.num_prefix_cache_hits) == (not how)


async def test_who_waits_in_vain_for_an_answer_asks_for_large_prefixes_only_and_after_a_while_for_all() -> None:
    """400 blocks of a second each are worth it; ten are not, until it was nearly forgotten how long that took."""
    async with two() as (source, target):
        pulls = target.migration.pulls
        target.engine.cost.now, pulls._wake, pulls._asking_s = COST, lambda: None, 30.0
        new = replace(new_sequence(1, num_prompt=90), prompt=source.engine.table.sequence(0).prompt.astype(np.uint32))
        row = target.harness.add(new)
        assert isinstance(row, int)
        asked = PrefixSource(worker_id=source.worker_id, address=source.peers.address, num_tokens=80)
        num_tries = 0
        while not len(pulls):
            pulls.begin(row, asked)
            num_tries += 1
        assert 4 < num_tries < 20
        while len(pulls):
            await asyncio.sleep(0.001)
        assert pulls._asking_s < 1.0
        assert check_names(source, target) == 80 // BLOCK_SIZE


async def test_what_is_there_already_does_not_come_again() -> None:
    async with two() as (source, target):
        first = await target.fetch(source)
        again = replace(new_sequence(0, num_prompt=90, max_tokens=60), attempt=3, stream=StreamId(9999))
        row = source.harness.add(again)
        while source.engine.table.num_computed[row] < 90:
            source.harness.step()
        second = await target.fetch(source, attempt=3)
        assert (first.num_blocks > 20, second.outcome) == (True, FetchOutcome.MOVED)
        assert second.num_blocks <= 1


async def test_another_model_is_refused_and_nothing_changes() -> None:
    async with two(models=("0f", "0e")) as (source, target):
        fetched = await target.fetch(source)
        assert (fetched.outcome, fetched.num_blocks) == (FetchOutcome.REFUSED, 0)
        assert "another model" in fetched.detail
        assert not len(target.engine.blocks.index)
        assert source.harness.live()


async def test_a_source_in_a_plan_refuses_and_one_that_is_gone_is_lost() -> None:
    async with two() as (source, target):
        source.is_busy = "plan 7"
        fetched = await target.fetch(source)
        assert (fetched.outcome, fetched.detail) == (FetchOutcome.REFUSED, "plan 7")
        address = source.peers.address
        await source.migration.close()
        assert (await target.fetch(source, address)).outcome is FetchOutcome.LOST


@asynccontextmanager
async def between(address: str, spoil: Callable[[int, bytes], bytes | None]) -> AsyncIterator[str]:
    """Pass a connection on; what the source says goes through `spoil` (bytes before, part), None: it breaks there."""
    host, _, port = address.rpartition(":")
    pumps: list[asyncio.Task[None]] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_source: bool) -> None:
        seen = 0
        with contextlib.suppress(OSError):
            while data := await reader.read(4096):
                passed = spoil(seen, data) if is_source else data
                seen += len(data)
                if passed is None:
                    break
                writer.write(passed)
                await writer.drain()
        writer.close()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        its_reader, its_writer = await asyncio.open_connection(host, int(port))
        pumps.append(asyncio.create_task(pump(reader, its_writer, is_source=False)))
        pumps.append(asyncio.create_task(pump(its_reader, writer, is_source=True)))

    server = await asyncio.start_server(pass_on, "127.0.0.1", 0)
    try:
        yield "127.0.0.1:" + str(server.sockets[0].getsockname()[1])
    finally:
        server.close()
        await asyncio.gather(*pumps, return_exceptions=True)
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("how", ["cut", "flipped"])
async def test_a_connection_that_breaks_or_lies_leaves_nothing_wrong(how: str, seed: int) -> None:
    """The request goes on at the source; what has come before, piece by piece, has its name and is right."""
    at = int(np.random.default_rng(seed).integers(800, 12_000))

    def spoil(seen: int, data: bytes) -> bytes | None:
        if not seen <= at < seen + len(data):
            return data
        if how == "cut":
            return None
        place = at - seen
        return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]

    async with two(seed) as (source, target), between(source.peers.address, spoil) as address:
        fetched = await target.fetch(source, address)
        if fetched.outcome is FetchOutcome.MOVED:  # all had passed before
            assert at > 9000
        else:
            assert fetched.outcome is FetchOutcome.LOST
            assert source.harness.live()
            assert not target.engine.sharing.coming.num_reservations
        check_names(source, target)
        source.engine.registry.cancel(NAME, 1)


@pytest.mark.parametrize("who", ["source", "target"])
async def test_whoever_changes_its_layers_ends_what_is_under_way_first(who: str) -> None:
    """When `abort` has returned nothing is read or written any more, at either end."""
    reached = asyncio.Event()

    def spoil(seen: int, data: bytes) -> bytes:
        if seen > 4000:
            reached.set()
        return data

    async with two() as (source, target), between(source.peers.address, spoil) as address:
        fetching = asyncio.ensure_future(target.fetch(source, address))
        await reached.wait()
        await (source if who == "source" else target).migration.abort()
        for pool in (source if who == "source" else target).cache.pools():
            pool.fill_(0)
        fetched = await fetching
        assert fetched.outcome in {FetchOutcome.LOST, FetchOutcome.REFUSED, FetchOutcome.MOVED}
        if who == "target" and fetched.outcome is not FetchOutcome.MOVED:
            assert not any(pool.any() for pool in target.cache.pools())
