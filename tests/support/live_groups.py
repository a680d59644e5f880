"""Live devices of one process that form groups over real sockets, and what there is to compare them with."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.contract.batch import Batch, BatchOutput
from services.worker.contract.executor import Executor
from services.worker.contract.kept_kv import NOTHING_KEPT, KeptKv
from services.worker.engine.engine import Engine
from services.worker.engine.gate import StepGate
from services.worker.engine.loop import StepLoop
from services.worker.executor import opening
from services.worker.executor.elastic_model import ElasticModel, load_elastic_model
from services.worker.executor.thread import ThreadExecutor
from services.worker.kv_moves.arrivals import Arrivals
from services.worker.kv_moves.kv_exchanges import ExchangeParams
from services.worker.kv_moves.places import GroupPlace, StagePlace
from services.worker.memory.spans import Spans
from services.worker.peers.connect import Peers
from services.worker.roles.device import Led
from services.worker.roles.torch_device import TorchGroupDevice
from services.worker.sequences.events import StepEvents
from shared.layers import LayerRange
from shared.systems import KvExchange
from tests.support.checkpoints import CheckpointShape, stored_checkpoint
from tests.support.engine_builders import engine_config, make_engine, new_sequence
from tests.support.leaks import whats_open
from tests.support.peers import identity
from tests.support.runners import KERNELS, MIB, open_runner, runner_settings

SHAPES = {
    "llama": CheckpointShape(num_layers=4, hidden_size=32, num_heads=2, num_kv_heads=1),
    "tied": CheckpointShape(num_layers=4, hidden_size=32, num_heads=2, num_kv_heads=1, tied=True, seed=4),
    "tied, learned positions": CheckpointShape(family="opt", tied=True, num_layers=4, hidden_size=32, num_heads=2),
    "projected embedding": CheckpointShape(
        family="opt", num_layers=4, hidden_size=32, num_heads=2, extra={"word_embed_proj_dim": 24}
    ),
}
CASES = sorted(
    {
        ("llama", "float32", KERNELS),
        ("llama", "float32", "torch"),
        ("tied", "bfloat16", KERNELS),
        ("projected embedding", "bfloat16", "torch"),
    }
)
"""Models, their types and what computes them."""
LONG = 150
"""Tokens of answers that go on long after a group has begun to break."""
PAGE = 4096
WORKSPACE_BYTES = MIB
"""Less than the least reserve, as is measured in a process that does nothing else."""
_plan_ids = count(1)

Texts = dict[int, list[int]]
OnStep = Callable[[Batch, BatchOutput], None]


def stated_peak(_device: torch.device, action: Callable[[], None]) -> int:
    """Stand in for `peak_bytes`: what it measures is the whole process's, which is that of several workers here."""
    action()
    return WORKSPACE_BYTES


def open_elastic_model(shape: CheckpointShape, folder: Path | None = None, **changes: object) -> ElasticModel:
    """Return a model in small pages, to the bit the same whatever the batch; from a folder, if its own is not to be."""
    _freeze()
    settings = {"page_bytes": PAGE, "memory_bytes": 8 * MIB, "deterministic": True, **changes}
    where = stored_checkpoint(shape)[0] if folder is None else folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "peak_bytes", stated_peak)
        return load_elastic_model(runner_settings(where, **settings), lambda _done, _what: None)


def spoil(model: ElasticModel, first: int = 0) -> None:
    """Write what is no number into all KV from a block on: layers that come back find it in their parameters."""
    memory = model._memory
    blocks = torch.tensor([block for block in memory.usable if block >= first], dtype=torch.int64)
    for layer in memory.holding.layers:
        for pool in memory.kv(layer):
            pool.index_fill_(0, blocks, torch.nan)
    assert memory.usable == Spans.of((0, memory.num_blocks))


def ranges_of(*ends: int) -> tuple[LayerRange, ...]:
    """Return the ranges of stages that end there."""
    return tuple(LayerRange(first, end) for first, end in zip((0, *ends), ends, strict=False))


WHOLE = LayerRange(0, 4)
HALVES = ranges_of(2, 4)


def places(devices: Sequence[TorchGroupDevice], ranges: Sequence[LayerRange]) -> list[GroupPlace]:
    """Return the group of these devices as each of them sees it."""
    stages = tuple(
        StagePlace(device._peers._identity.worker_id, device.address, layers)
        for device, layers in zip(devices, ranges, strict=True)
    )
    plan_id = next(_plan_ids)
    return [GroupPlace(plan_id, stages, i) for i in range(len(stages))]


@dataclass
class Group:
    """A group that came about."""

    executor: Executor
    num_blocks: list[int]
    """As the members say."""
    ends: dict[int, list[str | None]] = field(default_factory=dict)
    """By stage: what `on_end` was called with."""
    kept: KeptKv = NOTHING_KEPT
    """What has arrived at all stages."""
    coming: KeptKv = NOTHING_KEPT
    """What was to arrive."""


async def lead_and_join(
    devices: Sequence[TorchGroupDevice], ranges: Sequence[LayerRange], kept: Sequence[KeptKv] = ()
) -> tuple[Led, Group]:
    """Let devices become a group, which keep some KV each; return what it leads with, and the group without any KV."""
    own, kept = places(devices, ranges), [*kept, *[NOTHING_KEPT] * (len(devices) - len(kept))]
    ends: dict[int, list[str | None]] = {i: [] for i in range(1, len(devices))}
    leading = asyncio.ensure_future(devices[0].lead(own[0], lambda _: None, kept[0]))
    num_blocks = await asyncio.gather(*(devices[i].join(own[i], ends[i].append, kept[i]) for i in ends))
    led = await leading
    return led, Group(led.executor, num_blocks, ends)


async def form(devices: Sequence[TorchGroupDevice], ranges: Sequence[LayerRange], kept: Sequence[KeptKv] = ()) -> Group:
    """Let devices become a group, which keep some KV each, and wait for that; the leader is told of it first."""
    led, group = await lead_and_join(devices, ranges, kept)
    assert led.kept is NOTHING_KEPT or led.arrivals is None, "it is here, or comes while the group serves"
    if led.arrivals is None:
        return replace(group, kept=led.kept)
    return replace(group, kept=await all_that_comes(led.arrivals), coming=led.arrivals.coming)


async def all_that_comes(arrivals: Arrivals) -> KeptKv:
    """Return what arrives, when no more comes; it is among what was to come, lot for lot from the beginning."""
    found: dict[bytes, int] = {}
    num_bytes = 0
    async for arrived in arrivals.news:
        num_bytes += arrived.num_bytes
        assert arrived.num_blocks == arrivals.num_blocks, "KV lies on the host meanwhile"
        assert not found.keys() & set(arrived.blocks.names), "each once"
        found.update(zip(arrived.blocks.names, arrived.blocks.ids.tolist(), strict=True))
    numbers = dict(zip(arrivals.coming.names, arrivals.coming.ids.tolist(), strict=True))
    assert found.items() <= numbers.items()
    assert num_bytes <= arrivals.num_bytes
    assert num_bytes == arrivals.num_bytes or found.keys() < numbers.keys(), "all bytes are told of"
    names = [name for name in arrivals.coming.names if name in found]
    return KeptKv(tuple(names), np.array([found[name] for name in names], np.int32))


def tokens_of(seed: int, num: int) -> list[int]:
    """Return made-up tokens of a prompt."""
    rng = random.Random(seed)
    return [rng.randrange(3, 384) for _ in range(num)]


def prompt_of(name: int) -> list[int]:
    """Return the prompt of a request; 4 and 5 begin alike."""
    return tokens_of(min(name, 4), 20 + 9 * name)


def add_request(engine: Engine, name: int, prompt: list[int], num_tokens: int, **values: Any) -> None:
    """Let an engine serve a request, which samples if its number is odd; `values` are those of `new_sequence`."""
    new = new_sequence(name, prompt=prompt, max_tokens=num_tokens, seed=name, **values)
    if name % 2:
        object.__setattr__(new, "sampling", new.sampling.model_copy(update={"temperature": 0.8, "top_p": 0.9}))
    assert isinstance(engine.registry.add(new), int)


def new_engine(num_lanes: int, num_blocks: int = 24, **changes: Any) -> Engine:
    """Return an engine of the smallest sizes that still have several rows and chunks in a step, but for changes."""
    config = engine_config(
        max_sequences=8, max_batch_tokens=48, max_batch_rows=4, vocab_size=384, block_size=16, num_lanes=num_lanes
    )
    return make_engine(num_blocks=num_blocks, config=replace(config, **changes))


async def run_engine(
    engine: Engine,
    executor: Executor,
    on_step: OnStep = lambda _batch, _output: None,
    now: Callable[[], float] | None = None,
) -> Texts:
    """Serve what an engine holds to its end, and return the texts by stream; the executor stays open.

    Args:
        engine: holds sequences.
        executor: of it.
        on_step: called with each step that is done.
        now: clock of the engine; None: the loop's.
    """
    texts: Texts = {}

    def say(events: StepEvents) -> None:
        for stream, token in zip(events.stream.tolist(), events.tokens.tolist(), strict=True):
            if token >= 0:
                texts.setdefault(stream, []).append(token)

    loop = StepLoop(engine, executor, say, now or asyncio.get_running_loop().time, StepGate(), on_step=on_step)
    task = asyncio.create_task(loop.run())
    async with asyncio.timeout(30):
        while engine.table.num_sequences and not task.done():
            await asyncio.sleep(0.001)
    loop.close()
    await task
    return texts


async def serve(engine: Engine, executor: Executor, on_step: OnStep, *, num_tokens: int) -> Texts:
    """As `run_engine`, of six requests, two of which share a prompt and some of which sample."""
    for name in range(6):
        add_request(engine, name, prompt_of(name), num_tokens)
    return await run_engine(engine, executor, on_step)


async def texts_of(
    executor: Executor, *, num_tokens: int = 8, steps_until: int = 10**9, then: object = None, num_blocks: int = 0
) -> Texts:
    """Serve six requests, and return their texts; see `serve`.

    Args:
        executor: not closed.
        num_tokens: of each answer.
        steps_until: after so many steps `then` is called.
        num_blocks: that may be used; 0: as many as the executor began with.
    """
    engine, num_steps = new_engine(executor.depth, num_blocks or executor.capacity.num_blocks), count(1)

    def note(_batch: object, _output: object) -> None:
        if next(num_steps) == steps_until:
            then()  # type: ignore[operator]

    return await serve(engine, executor, note, num_tokens=num_tokens)


_CALM: dict[tuple[object, ...], Texts] = {}


async def calm_texts(name: str, dtype: str, kernels: str) -> Texts:
    """Return what a worker says that was never disturbed, and has its memory in one piece."""
    key = (name, dtype, kernels)
    if key not in _CALM:
        runner = open_runner(SHAPES[name], deterministic=True, dtype=dtype, kernels=kernels)
        executor = ThreadExecutor(runner, asyncio.get_running_loop())
        _CALM[key] = await texts_of(executor)
        await executor.close()
    return _CALM[key]


async def calm() -> Texts:
    """As `calm_texts`, of the usual model."""
    return await calm_texts("llama", "float32", KERNELS)


@cache
def _freeze() -> None:
    """Let the collector pass over what is there now, which is large: every load has it look at everything."""
    gc.freeze()


@cache
def _warm() -> None:
    """Let what a process opens once be open: it is no leak."""
    open_runner(SHAPES["llama"], deterministic=True).close()


@asynccontextmanager
async def live_devices(
    num: int,
    name: str = "llama",
    *,
    limit_s: float = 5.0,
    wait_s: float = 5.0,
    folder: Path | None = None,
    exchange_bytes: int = 16 * MIB,
    exchange_limit_s: float = 30.0,
    peers_first: bool = False,
    kv_exchange: KvExchange = KvExchange.COORDINATED,
    link_bytes_per_s: float = 0.0,
    hands_over: bool = False,
    **changes: object,
) -> AsyncIterator[list[TorchGroupDevice]]:
    """Yield devices that are whole instances of one model. Afterwards no thread, socket or file of theirs is left."""
    _warm()
    await asyncio.get_running_loop().getaddrinfo("127.0.0.1", 0)  # the loop's own threads come with it
    before = whats_open()
    devices = []
    for index in range(num):
        model = open_elastic_model(SHAPES[name], folder, **changes)
        peers = await Peers.open(identity(index), wait_s=wait_s)
        device = TorchGroupDevice(
            model,
            peers,
            ExchangeParams(exchange_bytes, exchange_limit_s, link_bytes_per_s, kv_exchange, hands_over),
            peers_first=peers_first,
            limit_s=limit_s,
            part_limit_s=20.0,
        )
        devices.append(device)
        await devices[-1].alone()
    try:
        yield devices
    finally:
        for device in devices:
            await device.close()
            await device.close()
    assert whats_open() == before


def check(devices: Sequence[TorchGroupDevice]) -> None:
    """Check the memory of devices, page by page."""
    for device in devices:
        device._model.check_invariants()
        facts, told = device._model.facts, device.facts
        assert (facts.num_pages, facts.max_blocks, facts.layer_bytes) == (
            told.num_pages,
            told.max_blocks,
            told.layer_bytes,
        )
        assert (device.layers, device.resident) == (device._model.layers, device._model.resident)


async def be_alone(*devices: TorchGroupDevice) -> None:
    """Let devices be whole instances again, and look at all there is to see."""
    for device in devices:
        executor = (await device.alone()).executor
        assert isinstance(executor, ThreadExecutor)
        assert executor is (await device.alone()).executor
        assert executor.capacity == device._model.info.capacity
        assert (device.layers, device.resident, device.loaded_ratio) == (WHOLE, WHOLE, 1)
        assert await texts_of(executor) == await calm()
    check(devices)


async def dissolve(executor: Executor, devices: Sequence[TorchGroupDevice]) -> None:
    """End a group in order, and let its devices be whole instances again."""
    await executor.close()
    await asyncio.gather(*(device.alone() for device in devices))
    check(devices)


async def end_and_be_alone(group: Group, devices: Sequence[TorchGroupDevice]) -> None:
    """As `dissolve`, and look at all there is to see; see `be_alone`."""
    await group.executor.close()
    await be_alone(*devices)


async def ended(ends: dict[int, list[str | None]]) -> None:
    """Wait until every member has heard of the end."""
    async with asyncio.timeout(10):
        while not all(ends.values()):
            await asyncio.sleep(0.001)


def unheard(reason: str | None) -> None:
    """Hear of no end: the group did not come about."""
    raise AssertionError(f"a group that did not come about has ended: {reason}")
