"""Live exchange: sequences go on in a group while their KV lies at the workers that had it, and say the same."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.attention.base import KeyRanges, RaggedRows
from services.worker.attention.fixed_splits import FixedSplitAttention
from services.worker.attention.remote import new_states
from services.worker.contract.executor import BatchFailedError
from services.worker.engine.stats import take_stats
from services.worker.executor.recent_steps import RecentSteps
from services.worker.kv_moves import exchange_modes, kv_wire, remote_attention
from services.worker.kv_moves.exchange_modes import by_price
from services.worker.kv_moves.kv_table import KvLot, KvTable
from services.worker.kv_moves.remote_attention import RemoteAttention, RemoteParts, RemoteShape
from services.worker.kv_moves.remote_wire import StepRows, pack_rows, unpack_rows
from services.worker.memory.block_copies import BlockCopies
from services.worker.peers.frames import FrameSocket
from services.worker.peers.link_priority import LinkPriority
from services.worker.roles.device import Led
from services.worker.roles.torch_device import TorchGroupDevice
from shared.errors import WireError
from shared.layers import LayerRange
from shared.systems import KvExchange
from tests.support.attention_cases import attention_spec
from tests.support.exchanged_kv import HALVES, Server, spoil_after_changes
from tests.support.late_kv import exchange_of
from tests.support.live_groups import SHAPES, check, dissolve, lead_and_join, live_devices, ranges_of
from tests.support.long_story import LENGTHS, LONG_SHAPES, HeldKv, calm_long_texts, long_server
from tests.support.runners import KERNELS, MIB
from tests.support.seeds import first_of

pytestmark = pytest.mark.kernels
CASES = [
    ("long", "float32", KERNELS),
    ("long", "bfloat16", KERNELS),
    ("long, window", "float32", KERNELS),
    *([("long", "float32", "torch")] if KERNELS != "torch" else []),
]


EIGHT = ((0, 1, 2, 3), (4, 5, 6, 7))
"""Requests that each of two servers has before."""


@pytest.fixture(autouse=True)
def _spoiled(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_after_changes(monkeypatch)
    for name, shape in LONG_SHAPES.items():
        monkeypatch.setitem(SHAPES, name, shape)
    monkeypatch.setattr(kv_wire, "PIECE_BYTES", 64 * 1024)


def long_devices(
    num: int, name: str = "long", kv_exchange: KvExchange = KvExchange.LIVE, **changes: Any
) -> contextlib.AbstractAsyncContextManager[list[TorchGroupDevice]]:
    """Return devices that exchange live; `changes` are those of a runner."""
    more: dict[str, Any] = {"memory_bytes": 24 * MIB, **changes}
    return live_devices(num, name, kv_exchange=kv_exchange, **more)


async def lead(devices: Sequence[TorchGroupDevice], ranges: Sequence[LayerRange], servers: Sequence[Server]) -> Led:
    """Let devices become a group that begins to exchange what these servers have computed."""
    led, _ = await lead_and_join(devices, ranges, [server.engine.leave_executor(0.0) for server in servers])
    return led


async def take_in(server: Server, led: Led) -> None:
    """Tell a server what arrives, until no more does."""
    assert led.arrivals is not None
    async for arrived in led.arrivals.news:
        server.engine.sharing.coming.arrived(arrived.blocks)
    server.engine.sharing.coming.expect_no_more()


async def exchange_by_price(
    devices: Sequence[TorchGroupDevice], names: Sequence[Sequence[int]] = EIGHT
) -> tuple[int, dict[Any, list[int]]]:
    """Return how many lots are live in an exchange of two servers that is begun, served and ended; and the texts.

    Args:
        devices: two.
        names: of the requests that each serves before.
    """
    servers = [
        long_server((await device.alone()).executor, asked) for device, asked in zip(devices, names, strict=True)
    ]
    for server in servers:
        await server.serve(12)
    first = servers[0]
    led = await lead(devices, HALVES, servers)
    assert led.arrivals is not None
    first.enter(led.executor, arrivals=led.arrivals)
    first.add(names[1])
    listening = asyncio.create_task(take_in(first, led))
    await first.serve(1)
    await listening
    await first.serve()
    await dissolve(led.executor, devices)
    return len(led.arrivals.spans), {name: list(text) for name, text in first.texts.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("link_bytes_per_s", "step_s", "names", "modes"),
    first_of(
        [
            (1e5, 1.0, EIGHT, [True, True]),
            (1e15, 1.0, EIGHT, [False, False]),
            (1e5, 0.0235, ([4], [1, 6, 7]), [True, False]),
            (0.0, 1.0, EIGHT, [False, False]),
            (1e5, 0.001, ([4], [1, 6, 7]), [False, False]),
            (1e5, 0.0235, ([1, 6, 7], [4]), [False, True]),
            (1e5, 1.0, ([4], [1, 6, 7]), [True, True]),
        ],
        in_ci=3,
    ),
    ids=str,
)
async def test_what_links_and_steps_cost_decides_whose_kv_is_attended(
    link_bytes_per_s: float,
    step_s: float,
    names: Sequence[Sequence[int]],
    modes: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With steps of a second: these take a millisecond here, and messages as long.

    A long context and short ones could all be attended elsewhere: with quick steps no query is worth its time on the
    link, with slow ones each is; between, one worker is asked while the readers of the other one's KV wait.
    """
    said: list[list[bool]] = []

    def noted(*about: Any) -> Sequence[bool]:
        said.append(list(by_price(*about)))
        return said[-1]

    monkeypatch.setattr(exchange_modes, "by_price", noted)
    monkeypatch.setattr(RecentSteps, "long_s", step_s)
    async with long_devices(2, kv_exchange=KvExchange.BY_PRICE, link_bytes_per_s=link_bytes_per_s) as devices:
        num_sequences, texts = await exchange_by_price(devices, names)
    assert said == [modes]
    assert num_sequences == sum(modes)
    calm = await calm_long_texts("long", "float32", "torch")
    assert texts == {name: calm[name] for name in (*names[0], *names[1])}


def remotes(devices: Sequence[TorchGroupDevice]) -> list[RemoteAttention]:
    found = [device._exchange_now.remote for device in devices if device._exchange_now is not None]
    return [remote for remote in found if remote is not None]


@pytest.mark.slow
@pytest.mark.parametrize("ranges", first_of([(HALVES,), (ranges_of(1, 3, 4),)], in_ci=1), ids=str)
@pytest.mark.parametrize(("name", "dtype", "kernels"), CASES)
async def test_sequences_go_on_before_their_kv_has_moved(
    ranges: Sequence[LayerRange], name: str, dtype: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the last split of each moves at first; then bit by bit the rest, while they are served."""
    expected = await calm_long_texts(name, dtype, kernels)
    async with long_devices(len(ranges), name, dtype=dtype, kernels=kernels) as devices:
        with HeldKv(monkeypatch) as held:
            pairs = zip(devices, EIGHT, strict=False)
            servers = [long_server((await device.alone()).executor, asked) for device, asked in pairs]
            for server in servers:
                await server.serve(12)
            first = servers[0]
            texts = {name: list(text) for name, text in first.texts.items()}
            led = await lead(devices, ranges, servers)
            assert led.arrivals is not None
            assert led.arrivals.spans
            first.enter(led.executor, arrivals=led.arrivals)
            first.add([4, 5, 6, 7])
            listening = asyncio.create_task(take_in(first, led))
            while take_stats(first.engine).num_coming_blocks:
                held.let(6)
                await asyncio.sleep(0.01)
                if not await first.serve(1):
                    await asyncio.sleep(0.01)
            told = sum(len(first.texts[name]) - len(texts[name]) for name in texts)
            asked = sum(remote.num_asked for remote in remotes(devices))
            assert asked, "nobody attended elsewhere"
            assert told, "nobody went on while KV moved"
            held.let()
            await listening
            await first.serve()
            assert first.texts == expected
            for remote in remotes(devices):
                await asyncio.to_thread(remote._server.join, 10)
                assert not remote._kept, "what was kept aside for the others is kept no longer than they ask"
                assert not remote._parts
            await dissolve(led.executor, devices)
    assert len(expected) == len(LENGTHS)


async def half_moved(held: HeldKv, devices: Sequence[TorchGroupDevice]) -> Server:
    """Return a server whose sequences go on in a group while most of their KV is held back."""
    first = long_server((await devices[0].alone()).executor, [1, 3, 4])
    await first.serve(24)
    led = await lead(devices, HALVES, [first])
    first.enter(led.executor, arrivals=led.arrivals)
    listening = asyncio.create_task(take_in(first, led))
    while not sum(remote.num_asked for remote in remotes(devices)):
        held.let(6)
        await asyncio.sleep(0.01)
        await first.serve(1)
    listening.cancel()
    return first


async def goes_on_alone(server: Server, devices: Sequence[TorchGroupDevice], held: HeldKv) -> None:
    """Check that the group is lost, and that its sequences say the same elsewhere."""
    with pytest.raises(BatchFailedError) as lost:
        await server.serve()
    assert lost.value.is_lost
    held.let()
    server.engine = (again := long_server(server.executor)).engine
    alone = await asyncio.gather(*(device.alone() for device in devices))
    again.engine.leave_executor(0.0)
    again.enter(alone[0].executor)
    again.add([1, 3, 4])
    await again.serve()
    expected = await calm_long_texts("long", "float32", KERNELS)
    assert again.texts == {each: expected[each] for each in (1, 3, 4)}
    check(devices)


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", ["the link is cut", "the exchange is cut", "bits flip", "nothing is known of the rows"]
)
async def test_a_group_that_loses_what_it_attends_has_ended(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with long_devices(2) as devices:
        with HeldKv(monkeypatch) as held:
            server = await half_moved(held, devices)
            exchange = exchange_of(devices[1])
            assert exchange.remote is not None
            if what == "the link is cut":
                exchange.remote.shut()
            elif what == "the exchange is cut":
                exchange._undertaking.give_up("a test wants it")
            elif what == "bits flip":
                flip_bits(monkeypatch)
            else:
                monkeypatch.setattr(remote_attention, "pack_rows", lambda rows: pack_rows(rows)[:-4])
            if what == "the exchange is cut":
                held.let()
                while exchange._moving is None or not exchange._moving.done():
                    await asyncio.sleep(0.01)
            await goes_on_alone(server, devices, held)


def flip_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what comes over connections for remote attention: they are urgent, and have checksums."""
    fill = FrameSocket.fill

    def flipping(sock: FrameSocket, view: memoryview) -> None:
        fill(sock, view)
        if sock._urgent is not None and sock._is_checked and len(view) > 100:
            view[50] ^= 8

    monkeypatch.setattr(FrameSocket, "fill", flipping)


# Wire


def some_rows(rng: np.random.Generator, block_size: int, num_blocks: int) -> StepRows:
    count = int(rng.integers(1, 6))
    first = rng.integers(0, 4, count) * 256
    end = first + rng.integers(1, 4, count) * 256
    start = end + rng.integers(0, 300, count)
    size = int((end - first).sum()) // block_size
    columns = (rng.integers(1, 9, count), start, first, end, rng.integers(0, num_blocks, size))
    return StepRows(*(column.astype(np.int32) for column in columns))


@given(seed=st.integers(0, 10**6), cut=st.integers(0, 10**6))
def test_rows_come_as_they_were_sent_and_others_are_refused(seed: int, cut: int) -> None:
    rng = np.random.default_rng(seed)
    rows = some_rows(rng, 16, 40)
    body = pack_rows(rows)
    found = unpack_rows(body, 16, 40)
    for name in ("num_tokens", "start", "first", "end", "places"):
        assert np.array_equal(getattr(found, name), getattr(rows, name))
    wrong = [body[: cut % len(body)], body + b"1234", replace_at(body, 4, -1), replace_at(body, len(body) - 4, 40)]
    for each in wrong:
        with pytest.raises(WireError):
            unpack_rows(each, 16, 40)


def replace_at(body: bytes, at: int, value: int) -> bytes:
    return body[:at] + value.to_bytes(4, "little", signed=True) + body[at + 4 :]


@pytest.mark.slow
async def test_stages_that_ask_each_other_at_once_wait_for_nothing_but_answers() -> None:
    """More than the connection's buffers hold goes both ways at the same time."""
    ends = socket.socketpair()
    shape = RemoteShape(num_heads=8, head_dim=64, block_size=16, num_layers=2, dtype=torch.float32)
    spec = attention_spec((8, 2, 64), (None, None))
    kv = torch.randn(2, 2, 64, 16, 2, 64)
    halves = (LayerRange(0, 1), LayerRange(1, 2))
    lots = tuple(
        KvLot(
            (i,), (0, 1), np.arange(32, dtype=np.int32), 32 * i, tuple(bytes([i, j]) for j in range(32)), is_live=True
        )
        for i in range(2)
    )
    table = KvTable((LayerRange(0, 2), LayerRange(0, 2)), lots)
    stages = []
    for i, sock in enumerate(ends):
        sockets = {1 - i: FrameSocket(sock, is_checked=True, urgent=LinkPriority())}
        parts = RemoteParts(sockets, shape, partial(FixedSplitAttention, spec))
        stages.append(RemoteAttention(i, table, halves[i], {i: BlockCopies(0, kv[:, :, 32 * i : 32 * i + 32])}, parts))
    count = 600
    rows = RaggedRows(np.array([count], np.int32), np.array([512], np.int32), np.zeros((1, 70), np.int32))

    def work(i: int) -> bool:
        stage = stages[i]
        mine = RaggedRows(rows.num_tokens, rows.start, np.arange(70, dtype=np.int32)[None] % 32 + 32 * (1 - i))
        found = stage.rows_of(mine)
        assert found is not None
        queries, expected = torch.randn(count, 8, 64), new_states(count, 8, 64)
        fold = FixedSplitAttention(spec, BlockCopies(0, kv).as_cache(2)).plan_fold(
            KeyRanges(found.rows, found.first, found.end)
        )
        for _ in range(3):
            states = new_states(count, 8, 64)
            stage.ask(found, i, queries, states)
            stage.take()
        fold(i, queries, expected)
        stage.finish()
        return torch.equal(states, expected)

    for stage in stages:
        stage.begin()
    try:
        async with asyncio.timeout(60):
            assert await asyncio.gather(*(asyncio.to_thread(work, i) for i in range(2))) == [True, True]
            for stage in stages:
                await asyncio.to_thread(stage._server.join)
    finally:
        for stage in stages:
            stage.close()
