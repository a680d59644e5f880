"""Live exchange: sequences go on in a group while their KV lies at the workers that had it, and say the same."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import pytest

from services.worker.engine.types import NOTHING_KEPT
from services.worker.groups import kv_wire
from services.worker.groups.device import Led
from services.worker.groups.remote_attention import RemoteAttention
from services.worker.groups.torch_device import TorchGroupDevice
from shared.layers import LayerRange
from shared.systems import KvExchange
from tests.support.exchanged_kv import HALVES, spoil_after_changes
from tests.support.live_groups import SHAPES, check, live_devices, places, ranges_of
from tests.support.long_story import LENGTHS, LONG_SHAPES, HeldKv, LongServer, calm_long_texts
from tests.support.runners import KERNELS, MIB

pytestmark = pytest.mark.kernels
CASES = [
    ("long", "float32", KERNELS),
    ("long", "bfloat16", KERNELS),
    ("long, window", "float32", KERNELS),
    *([("long", "float32", "torch")] if KERNELS != "torch" else []),
]


@pytest.fixture(autouse=True)
def _spoiled(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_after_changes(monkeypatch)
    for name, shape in LONG_SHAPES.items():
        monkeypatch.setitem(SHAPES, name, shape)
    monkeypatch.setattr(kv_wire, "PIECE_BYTES", 64 * 1024)


def long_devices(
    num: int, name: str = "long", **changes: str
) -> contextlib.AbstractAsyncContextManager[list[TorchGroupDevice]]:
    """Return devices that exchange live; `changes` are those of a runner."""
    more: dict[str, Any] = {"memory_bytes": 24 * MIB, **changes}
    return live_devices(num, name, kv_exchange=KvExchange.LIVE, **more)


async def lead(devices: Sequence[TorchGroupDevice], ranges: Sequence[LayerRange], servers: Sequence[LongServer]) -> Led:
    """Let devices become a group that begins to exchange what these servers have computed."""
    own = places(devices, ranges)
    kept = [server.engine.leave_executor(0.0) for server in servers]
    kept += [NOTHING_KEPT] * (len(devices) - len(kept))
    leading = asyncio.ensure_future(devices[0].lead(own[0], lambda _: None, kept[0]))
    await asyncio.gather(*(devices[i].join(own[i], lambda _: None, kept[i]) for i in range(1, len(devices))))
    return await leading


async def take_in(server: LongServer, led: Led) -> None:
    """Tell a server what arrives, until no more does."""
    assert led.arrivals is not None
    async for arrived in led.arrivals.news:
        server.engine.arrived(arrived.blocks)
    server.engine.expect_no_more()


def remotes(devices: Sequence[TorchGroupDevice]) -> list[RemoteAttention]:
    found = [device._exchange_now.remote for device in devices if device._exchange_now is not None]
    return [remote for remote in found if remote is not None]


@pytest.mark.parametrize("ranges", [HALVES, ranges_of(1, 3, 4)], ids=str)
@pytest.mark.parametrize(("name", "dtype", "kernels"), CASES)
async def test_sequences_go_on_before_their_kv_has_moved(
    ranges: Sequence[LayerRange], name: str, dtype: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the last split of each moves at first; then bit by bit the rest, while they are served."""
    expected = await calm_long_texts(name, dtype, kernels)
    async with long_devices(len(ranges), name, dtype=dtype, kernels=kernels) as devices:
        with HeldKv(monkeypatch) as held:
            servers = [LongServer((await device.alone()).executor) for device in devices[:2]]
            servers[0].add([0, 1, 2, 3])
            servers[1].add([4, 5, 6, 7])
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
            while first.engine.stats.num_coming_blocks:
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
            await led.executor.close()
            await asyncio.gather(*(device.alone() for device in devices))
            check(devices)
    assert len(expected) == len(LENGTHS)
