"""KV on the host goes along when live groups form and dissolve; nothing of it is computed twice while it does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch

from services.worker.contract.kept_kv import KeptKv
from services.worker.engine.engine import Engine
from services.worker.engine.invariants import check_engine
from services.worker.executor import model_runner
from services.worker.memory.host_kv import HostKV
from services.worker.roles.device import Parting
from services.worker.roles.torch_device import TorchGroupDevice
from services.worker.scheduling.view import PreemptHow
from shared.layers import LayerRange
from tests.support.engine_builders import engine_config, make_engine
from tests.support.exchanged_kv import BLOCK, HALVES, Server, calm, rows_of, spoil_after_changes
from tests.support.live_groups import check, form, live_devices, ranges_of
from tests.support.runners import KERNELS, MIB

pytestmark = pytest.mark.kernels
HOST_BYTES = MIB


@pytest.fixture(autouse=True)
def _spoiled(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_after_changes(monkeypatch)


async def server_at(device: TorchGroupDevice, names: Sequence[int]) -> Server:
    """Return who serves some requests at a device that is alone, and has swapped nothing yet."""
    executor = (await device.alone()).executor
    assert executor.capacity.host is not None

    def engine_of(num_lanes: int, num_blocks: int) -> Engine:
        config = engine_config(
            max_sequences=8,
            max_batch_tokens=48,
            max_batch_rows=4,
            vocab_size=384,
            block_size=BLOCK,
            num_lanes=num_lanes,
        )
        return make_engine(num_blocks=num_blocks, config=config, host=executor.capacity.host)

    return Server(executor, names, make_engine=engine_of)


async def copied(server: Server) -> int:
    """Let all copies that have begun end; return how many blocks they moved."""
    copies = server.engine.take_copies()
    for copy in copies:
        await server.executor.copy(copy)
        server.engine.copied(copy.copy_id, done=True)
    check_engine(server.engine)
    return sum(copy.device.size for copy in copies)


async def swap_out(server: Server, device: TorchGroupDevice, names: Sequence[int]) -> int:
    """Send running requests to the host, and let nothing of their KV be on the device; return its full blocks."""
    engine = server.engine
    rows = [row for row in rows_of(engine, names) if row in engine.table.running.view]
    sizes = [int(engine.table.num_computed[row]) // BLOCK for row in rows]
    for row in rows:
        engine._transitions.preempt(row, PreemptHow.SWAP)
    assert await copied(server) > 0
    free = np.flatnonzero(engine.blocks.index.is_named & (engine.blocks.refcount == 0)).astype(np.int32)
    engine.blocks.drop_contents(free)
    for pool in device._model.cache.pools():
        pool.index_fill_(0, torch.from_numpy(free.astype(np.int64)), torch.nan)
    return sum(sizes)


async def end(server: Server) -> None:
    """Serve all to the end, with copies between the steps."""
    while server.engine.table.num_sequences:
        num_steps = await server.serve(1)
        assert num_steps + await copied(server), "nobody runs, and nobody comes back"


@pytest.mark.parametrize("ranges", [HALVES, ranges_of(1, 3, 4)], ids=str)
@pytest.mark.parametrize("staged", [False, True])
async def test_what_is_on_the_host_is_there_in_the_group_and_apart_again(
    ranges: Sequence[LayerRange], monkeypatch: pytest.MonkeyPatch, *, staged: bool
) -> None:
    """The first one's requests are on its host when the group forms, some of them on all hosts when it parts."""
    if staged:
        monkeypatch.setattr(model_runner, "HostKV", partial(HostKV, staged=True))
    expected = await calm("llama", "float32", KERNELS)
    async with live_devices(len(ranges), host_memory_bytes=HOST_BYTES) as devices:
        first = await server_at(devices[0], [0, 1, 2])
        await first.serve(3)
        num_full = await swap_out(first, devices[0], [0, 1, 2])
        kept = first.engine.leave_executor(0.0)
        assert len(kept) == num_full > 0
        assert (kept.ids < 0).all()

        group = await form(devices, ranges, [kept])
        assert set(group.kept.names) == set(kept.names)
        first.enter(group.executor, group.kept)
        assert first.engine.swapping is not None
        assert first.engine.swapping.host.num_usable == first.engine.swapping.host.num_free > 0
        await first.serve(2)
        totals = first.engine.totals
        assert totals.num_given_up_tokens < 3 * BLOCK, "the last block of each, which is not full"

        num_full = await swap_out(first, devices[0], [1, 2])
        assert num_full > 0
        kept = first.engine.leave_executor(0.0)
        shares = tuple(first.engine.kept(rows_of(first.engine, each)) for each in ([0, 1, 2], [], []))
        assert int((shares[0].ids < 0).sum()) == num_full
        await group.executor.close()
        partings = [Parting(shares[: len(ranges)]), *[Parting()] * (len(ranges) - 1)]
        alone = await asyncio.gather(*(device.alone(part) for device, part in zip(devices, partings, strict=True)))
        assert alone[0].kept.names == shares[0].names
        before = first.num_computed
        first.enter(alone[0].executor, alone[0].kept)
        left = first.left_to_compute(alone[0].kept, [0, 1, 2])
        await end(first)
        assert first.num_computed - before <= left
        assert first.texts == {each: expected[each] for each in (0, 1, 2)}
        check(devices)


async def test_a_group_swaps_to_the_hosts_of_all_its_stages() -> None:
    expected = await calm("llama", "float32", KERNELS)
    async with live_devices(2, host_memory_bytes=HOST_BYTES) as devices:
        first = await server_at(devices[0], range(6))
        first.engine.leave_executor(0.0)
        group = await form(devices, HALVES)
        first.enter(group.executor)
        await first.serve(4)
        assert await swap_out(first, devices[0], range(6)) > 0
        for pool in devices[1]._model.cache.pools():
            pool.fill_(torch.nan)
        computed = first.num_computed
        await end(first)
        assert first.engine.totals.num_recomputed_tokens == 0
        assert first.num_computed > computed
        assert first.texts == expected
        await group.executor.close()


async def test_what_no_buffer_holds_is_computed_again_and_counted() -> None:
    expected = await calm("llama", "float32", KERNELS)
    async with live_devices(2, host_memory_bytes=HOST_BYTES, exchange_bytes=0) as devices:
        first = await server_at(devices[0], [0, 1, 2])
        await first.serve(3)
        tokens = int(first.engine.table.num_computed.sum())
        await swap_out(first, devices[0], [0, 1, 2])
        kept = first.engine.leave_executor(0.0)
        group = await form(devices, HALVES, [kept])
        assert not group.kept.names
        first.enter(group.executor, group.kept)
        await end(first)
        assert first.engine.totals.num_given_up_tokens == first.engine.totals.num_recomputed_tokens == tokens
        assert {name: first.texts[name] for name in (0, 1, 2)} == {name: expected[name] for name in (0, 1, 2)}
        await group.executor.close()


@pytest.mark.parametrize("exchange_bytes", [16 * MIB, 0])
async def test_pages_are_handed_over_where_no_more_comes_along_by_copies(exchange_bytes: int) -> None:
    """What lies on the host is in no page, and stays behind then."""
    expected = await calm("llama", "float32", KERNELS)
    async with live_devices(2, host_memory_bytes=HOST_BYTES, exchange_bytes=exchange_bytes, hands_over=True) as devices:
        first = await server_at(devices[0], [0, 1, 2])
        await first.serve(3)
        running = first.engine.table.running.view
        names = [name for name in (0, 1, 2) if np.isin(rows_of(first.engine, [name]), running).any()]
        await swap_out(first, devices[0], names[1:])
        kept = first.engine.leave_executor(0.0)
        on_device = {name for name, block in zip(kept.names, kept.ids.tolist(), strict=True) if block >= 0}
        assert on_device < set(kept.names)
        group = await form(devices, HALVES, [kept])
        assert set(group.kept.names) == (set(kept.names) if exchange_bytes else on_device)
        first.enter(group.executor, group.kept)
        await end(first)
        assert (first.engine.totals.num_given_up_tokens < 3 * BLOCK) is (exchange_bytes > 0)
        assert {name: first.texts[name] for name in (0, 1, 2)} == {name: expected[name] for name in (0, 1, 2)}
        await group.executor.close()


async def test_ids_below_zero_are_refused_by_who_has_no_such_host_block() -> None:
    """The leader believes what is said to be on a host that is smaller than that."""
    async with live_devices(2, host_memory_bytes=HOST_BYTES) as devices:
        server = await server_at(devices[0], [0])
        host = server.engine.swapping.host.num_usable if server.engine.swapping is not None else 0
        kept = KeptKv((bytes(16),), np.array([-host - 1], np.int32))
        server.engine.leave_executor(0.0)
        group = await form(devices, HALVES, [kept])
        assert not group.kept.names
        await group.executor.close()
