"""How fast KV goes to the host and back, against a plain copy of as many bytes.

    python -m benchmarks.host_copy [--device cpu] [--blocks 64,256] [--repeats 9]

Blocks of 16 tokens of Qwen2.5-14B (48 layers, 8 KV heads of 128, bfloat16: 3 MiB each), at random places on both sides.
The plain copy moves one piece of the same size: `Tensor.copy_` on the CPU, from and to pinned memory on a GPU.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.harness import machine
from benchmarks.on_device import seconds
from services.worker.memory.host_kv import HostKV
from services.worker.memory.kv_cache import KVCache

NUM_LAYERS, BLOCK_SHAPE = 48, (16, 8, 128)
"""Of a block in one layer: [block_size, num_kv_heads, head_dim]."""


def opened(num_blocks: int, device: torch.device) -> tuple[KVCache, HostKV]:
    """Return a cache of so many blocks, filled, and host memory of as many."""
    pools = [torch.rand((num_blocks, *BLOCK_SHAPE), device=device).to(torch.bfloat16) for _ in range(2 * NUM_LAYERS)]
    cache = KVCache.over(pools[:NUM_LAYERS], pools[NUM_LAYERS:], num_blocks)
    return cache, HostKV(cache, num_blocks)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--blocks", type=lambda text: [int(part) for part in text.split(",")], default=[64, 256])
    parser.add_argument("--repeats", type=int, default=9)
    chosen = parser.parse_args()
    device = torch.device(chosen.device)
    print(machine() + "\n")
    print("| blocks | MiB | plain, GB/s | to the host, GB/s | of plain | back, GB/s | of plain |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for count in chosen.blocks:
        cache, host = opened(2 * count, device)
        num_bytes = cache.num_bytes // 2
        piece = torch.ones(num_bytes, dtype=torch.uint8, device=device)
        there = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        mine, other = (torch.randperm(2 * count)[:count] for _ in range(2))
        plain, out, back = (
            num_bytes / seconds(device, act, chosen.repeats) / 1e9
            for act in (
                lambda there=there, piece=piece: there.copy_(piece),
                lambda host=host, mine=mine, other=other: host.store(mine, other),
                lambda host=host, mine=mine, other=other: host.fetch(other, mine),
            )
        )
        print(
            f"| {count} | {num_bytes / 2**20:.0f} | {plain:.2f} | {out:.2f} | {out / plain:.0%} "
            f"| {back:.2f} | {back / plain:.0%} |"
        )


if __name__ == "__main__":
    main()
