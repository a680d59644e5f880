"""How long workers take to drop layers and become a group, and to be whole instances again.

    python -m benchmarks.group_change [--model DIR] [--dtype bfloat16] [--memory 256MiB] [--stages 2 3] [--rounds 5]

First table: what one worker does by itself, in the thread that changes its memory. "Drop" maps the pages of the dropped
layers to the KV, "open" makes the forward pass over the rest, "restore" maps the pages back and reads the layers from
the checkpoint, which the system has in memory. Second table: whole changes of workers of one process, over sockets of
this machine, as their callers see them: all of them connect, drop and open; the group's first step, in blocks that the
drop has brought; the end of the pipeline; and then all are whole again. Third table: the same with KV that goes along,
from each worker as many blocks as the group and the limit of memory for it (`--exchange-memory`) have room for; "more
per MiB" is the time beyond that of the second table, until all KV has arrived, by the KV of all layers that is kept,
once; the group can serve when it has formed. KV goes in copies over sockets, then in the pages where it lies, which
workers of one device hand over to each other: the same blocks, and all that the group has room for. The least of all
rounds counts.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import DEMO_MODEL, BestTimes, R, machine, print_table
from services.worker.contract.batch import Batch, RowInit, TableDelta
from services.worker.contract.executor import Executor
from services.worker.contract.kept_kv import KeptKv
from services.worker.executor.elastic_model import ElasticModel, load_elastic_model
from services.worker.executor.first_look import RunnerSettings
from services.worker.kv_moves.kv_exchanges import ExchangeParams
from services.worker.kv_moves.kv_table import MAX_EXCHANGED
from services.worker.kv_moves.places import GroupPlace, StagePlace
from services.worker.peers.connect import Peers
from services.worker.peers.greeting import PeerIdentity
from services.worker.roles.device import Led, Parting
from services.worker.roles.torch_device import TorchGroupDevice
from shared.ids import NOBODY, WorkerId
from shared.layers import LayerRange, even_split
from shared.process.config import parse_size
from shared.types import SamplingParams

STEP_TOKENS = 64


class Times(BestTimes):
    """Of actions side by side too."""

    async def of_all(self, name: str, *actions: Coroutine[Any, Any, R]) -> list[R]:
        """Let all act side by side, and keep the time of the whole."""
        began_s = time.perf_counter()
        results = await asyncio.gather(*actions)
        self.note(name, time.perf_counter() - began_s)
        return results


def of_one(model: ElasticModel, layers: LayerRange, rounds: int) -> list[str]:
    """Return a line of the first table."""
    times, num_blocks = Times(), 0
    for _ in range(rounds):
        times.of("drop", lambda: model.keep(layers))
        runner = times.of("open", model.open)
        num_blocks = runner.capacity.num_blocks
        runner.close()
        times.of("restore", model.restore)
        times.of("open whole", model.open).close()
    gone = len(model.whole) - len(layers)
    return [str(layers), str(gone), f"{model.info.capacity.num_blocks} -> {num_blocks}", *times.texts()]


def first_step(executor: Executor) -> Batch:
    """Return a step of one new sequence, in the last blocks: those that the drop has brought."""
    num_blocks = -(-STEP_TOKENS // executor.capacity.block_size)
    index = np.arange(num_blocks, dtype=np.int32)
    last = index + np.int32(executor.capacity.num_blocks - num_blocks)
    return Batch(
        step_id=1,
        rows=np.zeros(1, np.int32),
        num_tokens=np.full(1, STEP_TOKENS, np.int32),
        start=np.zeros(1, np.int32),
        tokens=np.arange(STEP_TOKENS, dtype=np.int32),
        sample=np.ones(1, np.bool_),
        table_delta=TableDelta(np.zeros(num_blocks, np.int32), index, last),
        admits=(RowInit(0, SamplingParams(max_tokens=1, temperature=0.0), STEP_TOKENS),),
    )


def places(devices: list[TorchGroupDevice], plan_id: int) -> list[GroupPlace]:
    """Return the group of the devices as each of them sees it."""
    ranges = even_split(len(devices[0].facts.layer_bytes), len(devices))
    stages = tuple(
        StagePlace(WorkerId(f"w{i}"), device.address, layers)
        for i, (device, layers) in enumerate(zip(devices, ranges, strict=True))
    )
    return [GroupPlace(plan_id, stages, i) for i in range(len(stages))]


async def open_devices(
    settings: RunnerSettings, num_stages: int, exchange_bytes: int, owned: AsyncExitStack, *, by_pages: bool = False
) -> list[TorchGroupDevice]:
    """Return devices that are alone."""
    devices = []
    secret = secrets.token_bytes(32)
    for index in range(num_stages):
        model = load_elastic_model(settings, lambda _done, _what: None)
        peers = await Peers.open(PeerIdentity(WorkerId(f"w{index}"), NOBODY, secret))
        devices.append(TorchGroupDevice(model, peers, ExchangeParams(exchange_bytes, hands_over=by_pages)))
        owned.push_async_callback(devices[-1].close)
        await devices[-1].alone()
    return devices


async def of_group(settings: RunnerSettings, num_stages: int, rounds: int) -> list[str]:
    """Return a line of the second table."""
    times, num_blocks = Times(), 0
    async with AsyncExitStack() as owned:
        devices = await open_devices(settings, num_stages, 0, owned)
        before = devices[0].whole_blocks
        for plan_id in range(1, rounds + 1):
            own = places(devices, plan_id)
            changes: list[Coroutine[Any, Any, Any]] = [devices[0].lead(own[0], lambda _: None)]
            changes += [device.join(place, lambda _: None) for device, place in zip(devices[1:], own[1:], strict=True)]
            executor = (await times.of_all("group", *changes))[0].executor
            num_blocks = executor.capacity.num_blocks
            await times.of_all("first step", _step(executor))
            await times.of_all("end", executor.close())
            await times.of_all("whole again", *(device.alone() for device in devices))
    return [str(num_stages), f"{before} -> {num_blocks}", *times.texts()]


def kept_blocks(stage: int, num_blocks: int) -> KeptKv:
    """Return made-up names of a stage's first blocks."""
    names = tuple((stage * 2**32 + block).to_bytes(16, "little") for block in range(num_blocks))
    return KeptKv(names, np.arange(num_blocks, dtype=np.int32))


async def of_exchange(settings: RunnerSettings, num_stages: int, rounds: int, exchange_bytes: int) -> list[str]:
    """Return a line of the third table: KV goes along, and comes back, in copies."""
    times = Times()
    async with AsyncExitStack() as owned:
        devices = await open_devices(settings, num_stages, exchange_bytes, owned)
        num_kept = _num_kept(devices, exchange_bytes)
        for round_index in range(2 * rounds):
            name = ", with KV" if round_index % 2 else ""
            led, came = await _formed(times, name, devices, round_index + 1, num_kept if name else 0)
            await led.executor.close()
            ids = [came.ids[i::num_stages] for i in range(num_stages)]
            shares = tuple(KeptKv(came.names[i::num_stages], ids[i]) for i in range(num_stages))
            partings = [Parting(shares), *[Parting()] * (num_stages - 1)]
            alone = [device.alone(parting) for device, parting in zip(devices, partings, strict=True)]
            parted = await times.of_all("part" + name, *alone)
            assert sum(len(each.kept) for each in parted) == len(came), "KV was lost"
        kept_mib = num_stages * num_kept * _block_bytes(devices) / 2**20
    more = 1e3 * (times.best_s["part, with KV"] - times.best_s["part"]) / kept_mib
    parted_ms = times.texts("part", "part, with KV")
    return [str(num_stages), "copies", *_forming(times, kept_mib), *parted_ms, f"{more:.3f}"]


async def of_pages(settings: RunnerSettings, num_stages: int, rounds: int, exchange_bytes: int) -> list[str]:
    """Return a line of the third table: KV goes along in its pages.

    Args:
        settings: of the workers.
        num_stages: so many workers.
        rounds: with KV, and without.
        exchange_bytes: as many blocks as by copies in that memory; 0: all that the group has room for.
    """
    times = Times()
    async with AsyncExitStack() as owned:
        devices = await open_devices(settings, num_stages, exchange_bytes, owned, by_pages=True)
        num_kept = _num_kept(devices, exchange_bytes)
        for round_index in range(2 * rounds):
            name = ", with KV" if round_index % 2 else ""
            led, _ = await _formed(times, name, devices, round_index + 1, num_kept if name else 0)
            if not exchange_bytes:
                most = min(led.executor.capacity.num_blocks, MAX_EXCHANGED) // num_stages
                num_kept = min(most, *(device.whole_blocks for device in devices))
            assert led.arrivals is None, "it goes by copies"
            await led.executor.close()
            await asyncio.gather(*(device.alone() for device in devices))
        kept_mib = num_stages * num_kept * _block_bytes(devices) / 2**20
    return [str(num_stages), "pages", *_forming(times, kept_mib), "-", "-", "-"]


async def _formed(
    times: Times, name: str, devices: list[TorchGroupDevice], plan_id: int, num_kept: int
) -> tuple[Led, KeptKv]:
    """Let workers form a group with the first blocks of each, and return what has come when all has."""
    kept = [kept_blocks(stage, num_kept) for stage in range(len(devices))]
    own = places(devices, plan_id)
    changes: list[Coroutine[Any, Any, Any]] = [devices[0].lead(own[0], lambda _: None, kept[0])]
    changes += [devices[i].join(own[i], lambda _: None, kept[i]) for i in range(1, len(devices))]
    led: Led = (await times.of_all("form" + name, *changes))[0]
    (came,) = await times.of_all("arrive" + name, _all_that_comes(led))
    assert len(came) == num_kept * len(devices), "KV was lost"
    return led, came


def _forming(times: Times, kept_mib: float) -> list[str]:
    best = times.best_s
    more = 1e3 * (best["form, with KV"] - best["form"] + best["arrive, with KV"]) / kept_mib
    return [f"{kept_mib:.1f}", *times.texts("form", "form, with KV", "arrive, with KV"), f"{more:.3f}"]


def _block_bytes(devices: list[TorchGroupDevice]) -> int:
    facts = devices[0].facts
    return 2 * facts.block_bytes * len(facts.layer_bytes)


def _num_kept(devices: list[TorchGroupDevice], exchange_bytes: int) -> int:
    """Return of how many blocks each worker brings KV, so that all of it can be copied."""
    return min(exchange_bytes // _block_bytes(devices), devices[0].whole_blocks) // len(devices)


async def _all_that_comes(led: Led) -> KeptKv:
    """Return what arrives after a group has formed, when all of it has, or what is there from the beginning."""
    if led.arrivals is None:
        return led.kept
    async for _ in led.arrivals.news:
        pass
    return led.arrivals.coming


async def _step(executor: Executor) -> None:
    await executor.submit(first_step(executor))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--memory", type=parse_size, default=256 * 2**20)
    parser.add_argument("--page-bytes", type=parse_size, default=2 * 2**20)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--exchange-memory", type=parse_size, default=256 * 2**20)
    arguments = parser.parse_args()
    settings = RunnerSettings(
        arguments.model,
        device=arguments.device,
        dtype=arguments.dtype,
        memory_bytes=arguments.memory,
        page_bytes=arguments.page_bytes,
    )
    model = load_elastic_model(settings, lambda _done, _what: None)
    whole = model.whole
    kept = [LayerRange(0, whole.end // 2), LayerRange(whole.end // 2, whole.end), LayerRange(0, 1)]
    name = f"{arguments.model.name}, {arguments.dtype}, pages of {arguments.page_bytes} bytes ({machine()})"
    print_table(
        f"One worker: ms; {name}",
        ["keeps", "layers dropped", "blocks", "drop", "open", "restore", "open whole"],
        [of_one(model, layers, arguments.rounds) for layers in kept],
    )
    model.close()
    print_table(
        f"Groups: ms; {name}",
        ["stages", "blocks", "connect, drop, open", f"first step of {STEP_TOKENS} tokens", "end", "whole again"],
        [asyncio.run(of_group(settings, count, arguments.rounds)) for count in arguments.stages],
    )
    print_table(
        f"KV that goes along: ms; {name}",
        ["stages", "by", "MiB", "form", "with KV", "then arrives", "more per MiB", "part", "with KV", "more per MiB"],
        [
            asyncio.run(line)
            for count in arguments.stages
            for line in (
                of_exchange(settings, count, arguments.rounds, arguments.exchange_memory),
                of_pages(settings, count, arguments.rounds, arguments.exchange_memory),
                of_pages(settings, count, arguments.rounds, 0),
            )
        ],
    )


if __name__ == "__main__":
    main()
