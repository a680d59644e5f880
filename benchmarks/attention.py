"""The native attention kernel by itself: what the code for one size of heads gains, and what memory costs.

    python -m benchmarks.attention [--level avx512bf16] [--threads 1] [--rounds 100]

First table: the same rows by the code that was compiled for the size of their heads and by that for any size, in turn;
the ratio of the best times, above 1 where the own code is faster. Second table: nanoseconds per key and key head of
decodes, by how much memory the keys and values of the step take, each context in blocks all over the pool.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from benchmarks.harness import machine, print_table
from services.worker.attention.base import RaggedRows
from services.worker.attention.native_paged import NativePagedAttention
from services.worker.memory.kv_cache import KVCache
from services.worker.models.spec import ModelSpec
from services.worker.native.library import open_library
from tests.support.attention_cases import attention_spec

HEAD_DIMS = (64, 80, 96, 128, 256)
GROUP, KV_HEADS, BLOCK_SIZE = 4, 2, 16
FITTING = ((4, 192), (64, 192), (256, 192))
"""Rows and context of the second table."""


class Case:
    """Rows of one length over a cache of their own; each computes `num_tokens` tokens from position `start` on."""

    def __init__(
        self, level: str, spec: ModelSpec, dtype: torch.dtype, num_rows: int, start: int, num_tokens: int
    ) -> None:
        library = open_library(level)
        assert library is not None, "make install builds the library"
        blocks = -(-(start + num_tokens) // BLOCK_SIZE)
        self.cache = KVCache(spec, num_rows * blocks, BLOCK_SIZE, dtype, torch.device("cpu"))
        generator = torch.Generator().manual_seed(0)
        for pool in (*self.cache.keys, *self.cache.values):
            pool.copy_(torch.randn(pool.shape, generator=generator))
        tables = torch.randperm(num_rows * blocks, generator=generator).to(torch.int32).reshape(num_rows, blocks)
        starts = np.full(num_rows, start, dtype=np.int32)
        self.rows = RaggedRows(np.full(num_rows, num_tokens, dtype=np.int32), starts, tables.numpy())
        shape = (num_rows * num_tokens, spec.num_heads, spec.head_dim)
        self.queries = torch.randn(shape, generator=generator).to(dtype)
        self.attentions = [
            NativePagedAttention(library, spec, self.cache, num_threads=torch.get_num_threads(), any_head_dim=any_size)
            for any_size in (False, True)
        ]

    def best_s(self, rounds: int) -> list[float]:
        """Return the least seconds that all layers took, by the own code and by that for any size."""
        num_layers = len(self.cache.keys)
        times: list[list[float]] = [[], []]
        for _ in range(rounds):
            for attention, taken in zip(self.attentions, times, strict=True):
                plan = attention.plan(self.rows)
                began_s = time.perf_counter()
                for layer in range(num_layers):
                    attention.attend(plan, layer, self.queries)
                taken.append(time.perf_counter() - began_s)
        return [min(taken) for taken in times]


def own_code(level: str, rounds: int) -> list[list[str]]:
    """Return the first table's lines."""
    lines = []
    for dtype in (torch.bfloat16, torch.float32):
        for head_dim in HEAD_DIMS:
            cells = [str(dtype).removeprefix("torch."), str(head_dim)]
            for group, num_rows, start, num_tokens in ((1, 8, 500, 1), (GROUP, 8, 500, 1), (GROUP, 1, 0, 512)):
                case = Case(
                    level,
                    attention_spec((group * KV_HEADS, KV_HEADS, head_dim), (None,)),
                    dtype,
                    num_rows,
                    start,
                    num_tokens,
                )
                own, of_any = case.best_s(rounds)
                cells.append(f"{own * 1e6:.0f}, {of_any / own:.2f}")
            lines.append(cells)
    return lines


def by_memory(level: str, rounds: int) -> list[list[str]]:
    """Return the second table's lines: 8 layers, heads of 64, two to a key head, as in the checkpoint of 25.7 M."""
    lines = []
    spec = attention_spec((2 * KV_HEADS, KV_HEADS, 64), (None,) * 8)
    for num_rows, context in FITTING:
        case = Case(level, spec, torch.bfloat16, num_rows, context - 1, 1)
        keys = num_rows * context * KV_HEADS * spec.num_layers
        own, _ = case.best_s(rounds)
        mib = case.cache.num_bytes / 2**20
        lines.append([str(num_rows), str(context), f"{mib:.1f}", f"{own * 1e9 / keys:.1f}"])
    return lines


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", default="", help="instruction set; the best one that there is")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=100)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    library = open_library(arguments.level)
    level = "none" if library is None else library.level
    title = f"{level}, {arguments.threads} threads ({machine()})"
    with torch.inference_mode():
        print_table(
            f"Attention by the code for one size of heads: µs, and how much longer that for any size takes; {title}",
            ["dtype", "head_dim", "8 decodes, group 1", f"8 decodes, group {GROUP}", f"prompt of 512, group {GROUP}"],
            own_code(arguments.level, arguments.rounds),
        )
        print_table(
            f"Decodes of bfloat16: {title}",
            ["rows", "context", "keys and values, MiB", "ns per key and key head"],
            by_memory(arguments.level, arguments.rounds),
        )


if __name__ == "__main__":
    main()
