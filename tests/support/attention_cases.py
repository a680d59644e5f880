"""Ragged rows over a paged cache, and their attention written out: the oracle for attentions of any device."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from services.worker.attention.base import RaggedRows
from services.worker.memory.kv_cache import KVCache
from services.worker.models.spec import ModelSpec, RopeSpec

CPU = torch.device("cpu")


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch compute with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def attention_spec(heads: tuple[int, int, int], windows: tuple[int | None, ...]) -> ModelSpec:
    """Return a model of which only the attention matters.

    Args:
        heads: query heads, key heads, dimensions of a head.
        windows: one for each layer.
    """
    num_heads, num_kv_heads, head_dim = heads
    return ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_layers=len(windows),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=10_000,
        norm_kind="rms",
        norm_bias=False,
        norm_eps=1e-6,
        activation="silu",
        gated_mlp=True,
        position_kind="rope",
        rope=RopeSpec(),
        rotary_dim=head_dim,
        windows=windows,
        tied_embeddings=True,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        head_norm=False,
        eos_token_ids=(),
    )


class AttentionCase:
    """Rows over a cache that is full of NaN wherever nothing was written, with blocks in a random order.

    Args:
        lengths: of each row, the position of its first token and its number of tokens.
    """

    def __init__(
        self,
        spec: ModelSpec,
        lengths: list[tuple[int, int]],
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device = CPU,
        block_size: int = 8,
        seed: int = 0,
    ) -> None:
        self.spec = spec
        generator = torch.Generator().manual_seed(seed)
        blocks = [-(-(start + count) // block_size) for start, count in lengths]
        self.cache = KVCache(spec, sum(blocks) + 1, block_size, dtype, device)
        for pool in (*self.cache.keys, *self.cache.values):
            pool.fill_(torch.nan)
        order = torch.randperm(sum(blocks), generator=generator).to(torch.int32).numpy()
        tables = np.full((len(lengths), max(blocks)), sum(blocks), dtype=np.int32)
        self.written: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in spec.windows]
        """By layer and row: keys and values [num_keys, num_kv_heads, head_dim]"""
        for row, (start, count) in enumerate(lengths):
            tables[row, : blocks[row]], order = np.split(order, [blocks[row]])
            slots = tables[row, : blocks[row], None].astype(np.int64) * block_size + np.arange(block_size)
            shape = (start + count, spec.num_kv_heads, spec.head_dim)
            for layer, rows in enumerate(self.written):
                keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
                rows.append((keys, values))
                sent = torch.from_numpy(slots.ravel()[: start + count]).to(device)
                self.cache.write(layer, sent, keys.to(device), values.to(device))
        starts, counts = (np.array(column, dtype=np.int32) for column in zip(*lengths, strict=True))
        self.rows = RaggedRows(counts, starts, tables)
        width = spec.q_size + 2 * spec.kv_size
        fused = torch.randn((int(counts.sum()), width), generator=generator).to(dtype).to(device)
        self.queries = fused[:, : spec.q_size].unflatten(1, (spec.num_heads, spec.head_dim))
        """[t, num_heads, head_dim], a view of a wider buffer as the decoder's are"""

    def expected(self, layer: int) -> torch.Tensor:
        """In float64 on the CPU: output [t, num_heads * head_dim]."""
        out = []
        window = self.spec.windows[layer]
        for row, (start, count) in enumerate(zip(self.rows.start, self.rows.num_tokens, strict=True)):
            parts = self.written[layer][row]
            keys, values = (part.double().repeat_interleave(self.spec.group_size, dim=1) for part in parts)
            first = self.rows.first_token[row]
            queries = self.queries[first : first + count].cpu().double()
            ends, places = torch.arange(start, start + count)[:, None], torch.arange(start + count)
            seen = places <= ends
            if window is not None:
                seen &= places > ends - window
            scores = torch.einsum("qhd,khd->hqk", queries, keys) / math.sqrt(self.spec.head_dim)
            scores = scores.masked_fill(~seen, -torch.inf)
            out.append(torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), values).flatten(1))
        return torch.cat(out)


def slot_written_out(entry: int, position: int, block_size: int) -> int:
    """Return the slot of a position whose block this entry of a table names."""
    offset = position % block_size
    return entry * block_size + offset if entry >= 0 else ~entry * block_size + block_size - 1 - offset


def turned(case: AttentionCase, seed: int) -> AttentionCase:
    """Return the same rows over another cache, in blocks that are filled from random ends.

    Wherever the last blocks of two rows have room for each other, they are one, filled from both ends.
    """
    rng, size = random.Random(seed), case.cache.block_size
    tables, num_keys = case.rows.tables.copy(), case.rows.num_keys.tolist()
    for row, length in enumerate(num_keys):
        for index in range(-(-length // size)):
            tables[row, index] ^= -rng.randrange(2)
    last = [(row, (length - 1) // size, (length - 1) % size + 1) for row, length in enumerate(num_keys)]
    rng.shuffle(last)
    while last:
        row, index, used = last.pop()
        other = next((each for each in last if each[2] + used <= size), None)
        if other is not None:
            last.remove(other)
            tables[other[:2]] = ~tables[row, index]
    made = copy.copy(case)
    made.rows = RaggedRows(case.rows.num_tokens, case.rows.start, tables)
    made.cache = KVCache(case.spec, case.cache.num_blocks, size, case.cache.keys[0].dtype, case.cache.keys[0].device)
    for pool in made.cache.pools():
        pool.fill_(torch.nan)
    for layer, rows in enumerate(case.written):
        for table, (keys, values) in zip(tables.tolist(), rows, strict=True):
            slots = [slot_written_out(table[p // size], p, size) for p in range(len(keys))]
            sent = torch.tensor(slots, device=made.cache.keys[0].device)
            made.cache.write(layer, sent, keys.to(sent.device), values.to(sent.device))
    return made
