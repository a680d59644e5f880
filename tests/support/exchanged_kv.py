"""What tests of exchanged KV share: an engine that is stepped by hand, and the bits of blocks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.contract.executor import Executor
from services.worker.contract.kept_kv import NOTHING_KEPT, KeptKv
from services.worker.engine.engine import Engine
from services.worker.engine.invariants import check_engine
from services.worker.executor.elastic_model import ElasticModel
from services.worker.kv_moves.arrivals import Arrivals
from services.worker.roles.torch_device import TorchGroupDevice
from shared.prefix_names import following_names, root_name
from tests.support import page_cards
from tests.support.live_groups import (
    Group,
    Texts,
    add_request,
    calm_texts,
    live_devices,
    new_engine,
    prompt_of,
    ranges_of,
    spoil,
)
from tests.support.runners import KERNELS

HALVES = ranges_of(2, 4)
BLOCK = 16


def spoil_after_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """After every change, all KV is no number until it is written: what was not moved cannot be read by luck.

    But for what stays where it is when layers are restored of which KV came ahead.
    """
    for name in ("keep", "restore"):
        change = getattr(ElasticModel, name)

        def spoiling(self: ElasticModel, *args: object, change: object = change) -> None:
            ahead = self.ahead()
            change(self, *args)  # type: ignore[operator]
            spoil(self, 0 if ahead is None else ahead.num_blocks)

        monkeypatch.setattr(ElasticModel, name, spoiling)


# Text


@dataclass
class Server:
    """An engine that is stepped by hand, and what it has said.

    Args:
        executor: of the first steps.
        names: of the requests that it serves from the beginning.
        num_tokens: of each answer.
        make_engine: makes one of a number of lanes, and of blocks.
        prompt: of a request.
    """

    executor: Executor
    names: Sequence[int] = ()
    num_tokens: int = 8
    make_engine: Callable[[int, int], Engine] = new_engine
    prompt: Callable[[int], list[int]] = prompt_of
    num_computed: int = 0
    """Tokens in all batches."""
    texts: Texts = field(default_factory=dict)
    starts: dict[int, int] = field(default_factory=dict)
    """Where the first batch of each began since the executor changed."""

    def __post_init__(self) -> None:
        self.engine = self.make_engine(1, self.executor.capacity.num_blocks)
        self.add(self.names)

    def add(self, names: Sequence[int]) -> None:
        """Take requests on, from their prompts."""
        for name in names:
            add_request(self.engine, name, self.prompt(name), self.num_tokens)

    async def serve(self, num_steps: int = 10**9) -> int:
        """Make some steps, or all; return how many there were."""
        for number in range(num_steps):
            batch = self.engine.next_batch(0.0)
            if batch is None:
                return number
            self.num_computed += int(batch.num_tokens.sum())
            for row, start in zip(batch.rows.tolist(), batch.start.tolist(), strict=True):
                self.starts.setdefault(int(self.engine.table.stream[row]) - 1000, start)
            events = self.engine.absorb(batch, await self.executor.submit(batch), 0.0)
            for stream, token in zip(events.stream.tolist(), events.tokens.tolist(), strict=True):
                if token >= 0:
                    self.texts.setdefault(stream - 1000, []).append(token)
            check_engine(self.engine)
        return num_steps

    def enter(self, executor: Executor, kept: KeptKv = NOTHING_KEPT, arrivals: Arrivals | None = None) -> None:
        """Go on elsewhere."""
        self.starts.clear()
        self.executor = executor
        coming, spans = (NOTHING_KEPT, ()) if arrivals is None else (arrivals.coming, arrivals.spans)
        self.engine.enter_executor(executor.capacity, executor.depth, kept, coming, spans)

    def num_cached(self, kept: KeptKv, name: int) -> int:
        """Return how many tokens of a request, as far as it has come, lie in blocks that were kept."""
        tokens = np.array([*prompt_of(name), *self.texts.get(name, [])], np.int32)
        chain = following_names(root_name(""), tokens[:-1].astype(np.int32).tobytes(), BLOCK)
        return BLOCK * next((i for i, each in enumerate(chain) if each not in kept.names), len(chain))

    def left_to_compute(self, kept: KeptKv, names: Sequence[int]) -> int:
        """Return the tokens that have to be computed for some requests if what is kept is used, and nothing twice."""
        return sum(len(prompt_of(name)) + 8 - 1 - self.num_cached(kept, name) for name in names)


async def calm(name: str = "llama", dtype: str = "float32", kernels: str = KERNELS) -> Texts:
    """Return what an undisturbed worker says to each request."""
    return {stream - 1000: text for stream, text in (await calm_texts(name, dtype, kernels)).items()}


def rows_of(engine: Engine, names: Sequence[int]) -> list[int]:
    table = engine.table
    return [row for row in engine.registry.row_of.values() if int(table.stream[row]) - 1000 in names]


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


def snapshot(devices: Sequence[TorchGroupDevice], kept: KeptKv) -> dict[bytes, Bits]:
    """Return by name what blocks hold in all layers that these devices have."""
    found: dict[bytes, Bits] = {}
    for name, block in zip(kept.names, kept.ids.tolist(), strict=True):
        found[name] = {layer: bits for device in devices for layer, bits in bits_of(device, block).items()}
    return found


def snapshot_each(devices: Sequence[TorchGroupDevice], kept: Sequence[KeptKv]) -> dict[bytes, Bits]:
    """Return by name what the blocks hold that each of these devices keeps; the first one that has a name counts."""
    found: dict[bytes, Bits] = {}
    for device, own in zip(devices, kept, strict=True):
        found = snapshot([device], own) | found
    return found


def check_group_bits(devices: Sequence[TorchGroupDevice], group: Group, expected: dict[bytes, Bits]) -> None:
    for device in devices:
        check_bits(device, group.kept, expected)


def check_bits(device: TorchGroupDevice, kept: KeptKv, expected: dict[bytes, Bits]) -> None:
    for name, block in zip(kept.names, kept.ids.tolist(), strict=True):
        assert bits_of(device, block) == {layer: expected[name][layer] for layer in device.layers}


def pages_of_all(devices: Sequence[TorchGroupDevice]) -> set[tuple[int, int]]:
    """Return the pages that devices have, by file and offset: each is one device's."""
    return page_cards.pages_of_all([device._model._memory for device in devices])


def numbered(count: int, offset: int = 0) -> KeptKv:
    names = tuple((offset + i).to_bytes(16, "little") for i in range(count))
    return KeptKv(names, np.arange(count, dtype=np.int32)[::-1].copy())


async def kept_three(devices: list[TorchGroupDevice]) -> list[KeptKv]:
    rng = np.random.default_rng(3)
    for device in devices:
        scribble(device, rng)
    return [numbered(8, offset=100 * i) for i in range(len(devices))]


@asynccontextmanager
async def devices_with_kv(num: int = 3, **changes: Any) -> AsyncIterator[tuple[list[TorchGroupDevice], list[KeptKv]]]:
    """Yield `live_devices` that keep some KV each, and what it is."""
    async with live_devices(num, **changes) as devices:
        yield devices, await kept_three(devices)


async def serves_all(executor: Executor) -> Server:
    """Check what an executor says to six requests."""
    server = Server(executor, range(6))
    await server.serve()
    assert server.texts == await calm()
    return server


async def serves(group: Group) -> None:
    """Check that a group works, though it does not have all KV."""
    assert len(group.kept) < 24
    await serves_all(group.executor)
    await group.executor.close()
