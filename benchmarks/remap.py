"""What it costs when pages change hands between parameters and KV.

    python -m benchmarks.remap [--device cuda] [--pages 128] [--rounds 5]

First table: microseconds per page of 2 MiB. "Run" is one call for all pages, side by side; "touch" writes every byte
of a page through a tensor, the first time after it was mapped and again. On the CPU the system finds pages that are
mapped anew one small page (4 KiB) at a time, at the first touch; huge pages in one go, but those are taken when they
are mapped for the first time. Second table: a drop and a restore as a worker carries them out, with
parameters and KV that have been written: planning, mapping, and the first touch of what was gained.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.harness import BestTimes, machine, print_table
from services.worker.memory import holdings
from services.worker.memory.change import plan_change
from services.worker.memory.cuda import CudaMemory
from services.worker.memory.elastic import ElasticMemory, KvShape
from services.worker.memory.layout import MemoryFacts
from services.worker.memory.posix import PosixMemory
from services.worker.memory.ranges import PageId, VirtualMemory
from services.worker.memory.spans import Spans

PAGE = 2 * 2**20
KV = KvShape(16, 8, 128, torch.bfloat16)
"""64 blocks to a page."""
NUM_LAYERS, LAYER_PAGES = 8, 16


def open_backend(device: torch.device, num_pages: int, *, huge: bool = False) -> VirtualMemory:
    """Return a memory of the device."""
    if device.type == "cuda":
        return CudaMemory(PAGE, num_pages, device)
    return PosixMemory(PAGE, num_pages, huge=huge)


def clock_of(device: torch.device) -> BestTimes:
    """Return what times actions on a device."""
    return BestTimes(lambda: torch.cuda.synchronize(device) if device.type == "cuda" else None)


def per_page(device: torch.device, num_pages: int, rounds: int, *, huge: bool) -> list[str]:
    """Return one line of the first table."""
    clock = clock_of(device)
    backend = open_backend(device, num_pages, huge=huge)
    reserved = backend.reserve(num_pages * PAGE)
    pages = [PageId(page) for page in range(num_pages)]
    tensor = reserved.tensor()

    def map_singly() -> None:
        for page in pages:
            reserved.map_run(page * PAGE, [page])

    def unmap_singly() -> None:
        for page in pages:
            reserved.unmap_run(page * PAGE, 1)

    clock.of("taken", lambda: reserved.map_run(0, pages))
    clock.of("written", lambda: tensor.fill_(1))
    reserved.unmap_run(0, num_pages)
    for _ in range(rounds):
        clock.of("map", map_singly)
        clock.of("unmap", unmap_singly)
        reserved.map_run(0, pages)
        clock.of("touch", lambda: tensor.fill_(2))
        clock.of("again", lambda: tensor.fill_(3))
        clock.of("unmap touched", unmap_singly)
        clock.of("map run", lambda: reserved.map_run(0, pages))
        tensor.fill_(4)
        clock.of("unmap run", lambda: reserved.unmap_run(0, num_pages))
    backend.close()
    columns = ("taken", "written", "map", "unmap", "touch", "again", "unmap touched", "map run", "unmap run")
    return clock.texts(*columns, scale=1e6 / num_pages)


def of_layers(device: torch.device, num_dropped: int, rounds: int, *, huge: bool) -> list[str]:
    """Return one line of the second table: drop some layers, and take them back."""
    num_pages = NUM_LAYERS * LAYER_PAGES + 2 * NUM_LAYERS * 4
    sizes = (LAYER_PAGES * PAGE,) * NUM_LAYERS
    facts = MemoryFacts(sizes, 0, 0, 0, KV.block_bytes, PAGE, num_pages, 64 * num_pages)
    memory = ElasticMemory(facts, KV, open_backend(device, num_pages, huge=huge))
    for layer in range(NUM_LAYERS):
        memory.parameters(layer, LAYER_PAGES * PAGE).fill_(1)
    cache = memory.open_kv(4 * 64, 0)
    _fill(memory, cache.keys, cache.values, 0)
    clock, dropped = clock_of(device), range(num_dropped)
    before = memory.num_blocks
    for _ in range(rounds):
        after = holdings.grown(memory.layout, holdings.dropped(memory.layout, memory.holding, dropped, Spans()))
        clock.of("plan", lambda: plan_change(memory.layout, memory.holding, after))  # noqa: B023  called at once
        clock.of("drop", lambda: memory.drop(dropped))
        gained = memory.num_blocks
        clock.of("touch", lambda: _fill(memory, cache.keys, cache.values, before))
        clock.of("restore", lambda: memory.restore(dropped, before))
    memory.close()
    pages = num_dropped * (LAYER_PAGES + 8)
    names = ("plan", "drop", "touch", "restore")
    return [str(pages), f"{before} -> {gained}", *clock.texts(*names)]


def _fill(
    memory: ElasticMemory, keys: tuple[torch.Tensor, ...], values: tuple[torch.Tensor, ...], first_block: int
) -> None:
    for layer in memory.holding.layers:
        for pool in (keys[layer], values[layer]):
            pool[first_block:].fill_(1)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pages", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.set_num_threads(1)
    kinds = {"small pages": False, "huge pages": True} if device.type == "cpu" else {"device": False}
    print_table(
        f"One page of 2 MiB: µs; {arguments.pages} pages, {device} ({machine()})",
        [
            "system",
            "taken",
            "first written",
            "map",
            "unmap",
            "first touch",
            "touch again",
            "unmap after touch",
            "map, run",
            "unmap, run",
        ],
        [[name, *per_page(device, arguments.pages, arguments.rounds, huge=huge)] for name, huge in kinds.items()],
    )
    print_table(
        f"Layers of {LAYER_PAGES} pages, {NUM_LAYERS} in all: ms; {device} ({machine()})",
        ["system", "dropped", "pages", "blocks", "plan", "drop", "first touch of new blocks", "restore"],
        [
            [name, str(count), *of_layers(device, count, arguments.rounds, huge=huge)]
            for name, huge in kinds.items()
            for count in (1, 4)
        ],
    )


if __name__ == "__main__":
    main()
