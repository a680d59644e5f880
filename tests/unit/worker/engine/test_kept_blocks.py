"""What goes along to another executor: chains of blocks from their beginning, the device's before the host's."""

from __future__ import annotations

import numpy as np
import pytest

from services.worker.blocks.kept_blocks import kept_blocks
from services.worker.blocks.prefix_index import PrefixIndex
from services.worker.contract.kept_kv import as_host_id
from services.worker.scheduling.view import PreemptHow
from tests.support.engine_builders import new_sequence
from tests.support.engine_harness import EngineHarness, make_harness

BLOCK = 4


def name_of(chain: int, place: int) -> bytes:
    return bytes([chain, place]) * 8


@pytest.mark.parametrize("seed", range(40))
def test_every_chain_is_kept_as_far_as_each_block_is_somewhere(seed: int) -> None:
    rng = np.random.default_rng(seed)
    device, host = PrefixIndex(200), PrefixIndex(200)
    common = int(rng.integers(4))
    rows = []
    for chain in range(int(rng.integers(1, 5))):
        size = int(rng.integers(0, 12))
        rows.append([name_of(0 if place < common else chain + 1, place) for place in range(size)])
    names = sorted({name for row in rows for name in row})
    for index, share in ((device, rng.random()), (host, rng.random())):
        for block, name in zip(rng.permutation(200).tolist(), names, strict=False):
            if rng.random() < share:
                index.add(name, block)
    kept = kept_blocks(rows, BLOCK, device, host)
    block_of = dict(zip(kept.names, kept.ids.tolist(), strict=True))
    assert len(block_of) == len(kept), "each name once"
    wanted: set[bytes] = set()
    for row in rows:
        for name in row:
            if device.get(name) is None and host.get(name) is None:
                break
            wanted.add(name)
            on_host = host.get(name)
            expected = device.get(name) if on_host is None or device.get(name) is not None else as_host_id(on_host)
            assert block_of[name] == expected
    assert wanted == set(block_of)
    first_chains = [name for row in rows for name in row[: len(device.find(row))]]
    assert list(kept.names)[: len(set(first_chains))] == list(dict.fromkeys(first_chains)), "in order, the device first"
    without = kept_blocks(rows, BLOCK, device, None)
    assert without.names == tuple(dict.fromkeys(first_chains))


def one_on_the_host() -> tuple[EngineHarness, int]:
    """Return an engine of which a sequence of 22 tokens is on the host alone, and its full blocks."""
    harness = make_harness(num_blocks=20, num_host_blocks=20)
    harness.add(new_sequence(0, num_prompt=20, max_tokens=12))
    for _ in range(3):
        harness.step()
    engine, (row,) = harness.engine, harness.engine.table.running.view.tolist()
    num_full = int(engine.table.num_computed[row]) // engine.config.block_size
    engine._transitions.preempt(row, PreemptHow.SWAP)
    for copy in engine.take_copies():
        harness.kv.begin_copy(copy)
        harness.host_copies.append(copy)
    harness.land_copies()
    engine.blocks.drop_contents(np.flatnonzero(engine.blocks.index.is_named).astype(np.int32))
    harness.settle()
    return harness, num_full


@pytest.mark.parametrize("num_carried", [0, 2, 20])
def test_what_was_on_the_host_and_does_not_come_along_is_given_up(num_carried: int) -> None:
    harness, num_full = one_on_the_host()
    (row,) = harness.engine.table.preempted.view.tolist()
    num_tokens = int(harness.engine.table.host_tokens[row])
    kept = harness.change_executor(20, num_carried, 20)
    assert len(kept) == min(num_carried, num_full)
    assert (kept.ids < 0).all()
    assert harness.engine.table.host_tokens[row] == 0
    harness.finish()
    given_up = num_tokens - len(kept) * harness.engine.config.block_size
    assert harness.engine.totals.num_given_up_tokens == harness.engine.totals.num_recomputed_tokens == given_up
    assert harness.engine.totals.num_swap_ins == 0


@pytest.mark.parametrize("num_host_blocks", [0, 7])
def test_the_other_executors_host_is_as_large_as_it_says_and_empty(num_host_blocks: int) -> None:
    harness, _ = one_on_the_host()
    harness.change_executor(20, 20, num_host_blocks)
    assert harness.engine.swapping is not None
    host = harness.engine.swapping.host
    assert (host.num_usable, host.num_free, len(host.index)) == (num_host_blocks, num_host_blocks, 0)
    harness.finish()
