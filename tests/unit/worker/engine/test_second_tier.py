"""The host as a second tier of the prefix cache: what the device is about to forget goes there, and is found there."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest

from services.worker.blocks.free_blocks import FreeBlocks
from services.worker.blocks.host_blocks import HostBlocks
from services.worker.blocks.second_tier import about_to_be_lost
from services.worker.engine.stats import take_stats
from services.worker.sequences.table import Hold, Status
from shared.api_keys import Tier
from shared.types import FinishReason
from tests.support.engine_builders import new_sequence
from tests.support.engine_harness import EngineHarness, make_harness

PROMPT = list(range(20, 53))
"""8 full blocks and a token."""


def crowded(tier: Tier = Tier.DEFAULT, **engine: Any) -> EngineHarness:
    """Return an engine of 20 blocks that served the prompt, and others until its KV was forgotten by the device."""
    harness = make_harness(**{"num_blocks": 20, "num_host_blocks": 60} | engine)
    harness.add(new_sequence(0, prompt=PROMPT, max_tokens=2, tier=tier))
    harness.drain()
    for name in range(100, 100 + harness.engine.blocks.num_usable // 5):
        harness.add(new_sequence(name, num_prompt=45, max_tokens=8))
        harness.drain()
    return harness


def asks_again(harness: EngineHarness, name: int = 9, **values: Any) -> int:
    """Ask for the prompt once more; return the tokens that were computed."""
    harness.add(new_sequence(name, prompt=PROMPT, max_tokens=2, **values))
    num_tokens = 0
    while harness.engine.table.num_sequences:
        batch = harness.step()
        num_tokens += 0 if batch is None else int(batch.num_tokens.sum())
    harness.judge()
    return num_tokens


def test_a_prompt_that_the_device_has_forgotten_is_brought_from_the_host() -> None:
    """Of 33 tokens 32 are brought, one is computed, and so is the first of the answer."""
    harness = crowded()
    assert harness.engine.swapping is not None
    assert len(harness.engine.swapping.host.index) > 0
    assert asks_again(harness) == 2
    totals = harness.engine.totals
    assert totals.num_brought_back_tokens == 32
    assert totals.num_prefix_cache_hits == 32
    assert (totals.num_swap_ins, totals.num_preemptions) == (0, 0)
    assert asks_again(harness, 10) == 2, "now the device has it"
    assert harness.engine.totals.num_brought_back_tokens == 32


@pytest.mark.parametrize(
    ("engine", "values"),
    [
        ({"prefix_caching": False}, {}),
        ({"num_host_blocks": 0}, {}),
        ({}, {"salt": "tenant"}),
        ({"block_copy_s": 10.0}, {}),
        ({"cost": None}, {}),
    ],
    ids=["no names", "no host", "another's salt", "a slow link", "no cost"],
)
def test_it_is_computed_where_it_may_not_be_found_or_computing_is_cheaper(
    engine: dict[str, Any], values: dict[str, Any]
) -> None:
    harness = crowded(**engine)
    assert asks_again(harness, **values) == len(PROMPT) + 1
    assert harness.engine.totals.num_brought_back_tokens == 0


def test_only_what_the_device_lacks_is_brought() -> None:
    harness = crowded()
    harness.add(new_sequence(7, prompt=PROMPT[:14], max_tokens=1))
    harness.drain()
    found = harness.engine.totals.num_brought_back_tokens
    assert found == 12
    assert asks_again(harness) == 2
    assert harness.engine.totals.num_brought_back_tokens - found == 20


@pytest.mark.parametrize("tier", [Tier.DEFAULT, Tier.FLEX])
@pytest.mark.parametrize("first", [Tier.DEFAULT, Tier.FLEX])
def test_what_is_brought_is_read_from_the_end_from_which_it_was_filled(first: Tier, tier: Tier) -> None:
    """Best effort fills from the right; the harness checks the order in which a row reads."""
    harness = crowded(first, shares_blocks=True)
    assert asks_again(harness, tier=tier) == 2
    assert harness.engine.totals.num_brought_back_tokens == 32


@pytest.mark.parametrize("is_late", [False, True])
def test_what_several_ask_for_is_brought_once(*, is_late: bool) -> None:
    """The others wait for the copy, whether they come with the first or while it is under way, and share its blocks."""
    harness = crowded(num_blocks=45, num_host_blocks=300)
    for name in (7, 8, 9):
        harness.add(new_sequence(name, prompt=[*PROMPT, name], max_tokens=3))
        if is_late or name == 9:
            assert harness.submit() is None
    assert sum(not copy.to_host for copy in harness.host_copies) == 1
    harness.finish()
    totals = harness.engine.totals
    assert (totals.num_brought_back_tokens, totals.num_prefix_cache_hits) == (32, 3 * 32)


def test_if_the_copy_fails_who_waited_for_it_goes_on() -> None:
    harness = crowded()
    for name in (7, 8):
        harness.add(new_sequence(name, prompt=[*PROMPT, name], max_tokens=3))
    assert harness.submit() is None
    to_host = [copy.to_host for copy in harness.host_copies]
    harness.land_copy(to_host.index(False), done=False)
    harness.finish()
    totals = harness.engine.totals
    assert (totals.num_failed_copies, totals.num_brought_back_tokens) == (1, 0), "what the copy was of may be unsound"


@pytest.mark.parametrize("what", ["fails", "cancel", "pause", "error"])
def test_whatever_becomes_of_who_is_brought_something_the_rest_goes_on(what: str) -> None:
    harness = crowded()
    harness.add(new_sequence(9, prompt=PROMPT, max_tokens=5))
    assert harness.submit() is None
    (copy,) = (copy for copy in harness.host_copies if not copy.to_host)
    row = harness.stories[1009].row
    table = harness.engine.table
    assert (table.status[row], table.hold[row]) == (Status.RUNNING, Hold.SWAPPING)
    if what == "cancel":
        assert harness.cancel(harness.stories[1009])
    elif what == "pause":
        harness.engine.pause(0)
    harness.host_copies = deque_of(harness, copy)
    harness.land_copy(0, done=what != "fails")
    if what == "fails":
        assert table.status[row] == Status.PREEMPTED
        assert harness.engine.totals.num_failed_copies == 1
    harness.engine.resume(0)
    harness.add(new_sequence(10, prompt=PROMPT, max_tokens=5))
    harness.finish()
    finish = harness.stories[1009].finish
    assert finish is (FinishReason.CANCELLED if what == "cancel" else FinishReason.LENGTH)
    assert harness.engine.totals.num_given_up_tokens == 0, "it was nobody's yet"


def deque_of(harness: EngineHarness, first: Any) -> Any:
    return type(harness.host_copies)([first, *(copy for copy in harness.host_copies if copy is not first)])


def test_what_is_about_to_be_lost_is_the_oldest_that_the_host_lacks() -> None:
    """With the blank ones what two steps take; at most half of what is free, of half of the host."""
    harness = make_harness(num_blocks=32, num_host_blocks=60, max_model_len=128)
    device, host = harness.engine.blocks, HostBlocks(60)
    for name in range(4):
        harness.add(new_sequence(name, num_prompt=28, max_tokens=1))
        harness.drain()
        assert about_to_be_lost(device, host, 4, 99).size == min(max(8 - device.num_blank, 0), 8)
    due = about_to_be_lost(device, host, 4, 99)
    assert due.tolist() == device.oldest_kept(8 - device.num_blank).tolist()
    assert due.size > 3
    ids = host.hand_out("test", np.zeros(2, dtype=np.bool_))
    host.name([device.index.name_of(int(block)) for block in due[:2]], ids, None)
    assert about_to_be_lost(device, host, 4, 99).tolist() == due[2:].tolist()
    assert about_to_be_lost(device, host, 4, 1).tolist() == due[2:3].tolist()
    assert about_to_be_lost(device, HostBlocks(6), 4, 99).size == 3
    assert not about_to_be_lost(device, HostBlocks(1), 4, 99).size


@pytest.mark.parametrize("seed", range(20))
def test_free_blocks_are_handed_out_in_the_order_in_which_they_were_put(seed: int) -> None:
    """Those put first come before the others, whatever was taken out between."""
    rng = np.random.default_rng(seed)
    free, queue, out = FreeBlocks(12), deque[int](), list(range(12))
    free.take(12)
    for _ in range(200):
        count = int(rng.integers(0, 4))
        chosen = [out.pop(int(rng.integers(len(out)))) for _ in range(min(count, len(out)))]
        ids = np.array(chosen, np.int32)
        action = rng.integers(4)
        if action == 0:
            free.put_kept_first(ids)
            queue.extendleft(reversed(chosen))
        else:
            free.put_kept(ids)
            queue.extend(chosen)
        if action == 2 and queue:
            block = queue[int(rng.integers(len(queue)))]
            queue.remove(block)
            free.take_out(np.array([block], np.int32))
            out.append(block)
        if action == 3:
            taken, _ = free.take(min(int(rng.integers(0, 5)), len(queue)))
            expected = [queue.popleft() for _ in range(len(taken))]
            assert taken.tolist() == expected
            out += expected
        assert free.kept_ids.tolist() == list(queue)
        most = int(rng.integers(1, 5))
        assert free.oldest_kept(most).tolist() == list(queue)[: len(free.oldest_kept(most))]


def test_copies_ahead_do_not_count_as_asked_for() -> None:
    """They can be had when the copy is done, so nobody takes them for what requests hold or want."""
    harness = crowded()
    harness.add(new_sequence(11, num_prompt=45, max_tokens=8))
    while not harness.host_copies:
        harness.submit()
        harness.land()
    stats, held = take_stats(harness.engine), int(harness.engine.table.held_blocks.sum())
    assert harness.engine.blocks.num_used == held + harness.host_copies[0].device.size
    assert (stats.num_used_blocks, stats.num_demanded_blocks) == (held, 0)
    harness.finish()


@pytest.mark.parametrize("num_host_blocks", [2, 5, 24, 60])
def test_a_host_smaller_than_the_device_does_not_copy_for_ever(num_host_blocks: int) -> None:
    """Once nobody asks for anything, copies come to an end, and so they do if the device keeps more than fits there."""
    harness = make_harness(num_blocks=40, num_host_blocks=num_host_blocks)
    for name in range(8):
        harness.add(new_sequence(name, num_prompt=45, max_tokens=3))
        harness.drain()
    num_copies = 0
    for _ in range(60):
        assert harness.submit() is None
        num_copies += len(harness.host_copies)
        harness.land_copies()
    assert num_copies < 20
    harness.check_empty()
