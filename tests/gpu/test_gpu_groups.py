"""Two workers on one card with hard budgets: they drop, exchange KV live or coordinated, and restore under load."""

from __future__ import annotations

import pytest
import torch

from tests.support.gpu import NEEDS_DRIVER, WITH_LIBRARIES
from tests.support.one_device import MARGIN, drop_and_restore

pytestmark = [*WITH_LIBRARIES, NEEDS_DRIVER]

NUM_ROUNDS = 4
LEAK_BYTES = 64 * 2**20
"""Less than one change would leave behind: a stage's parameters and KV are hundreds of MiB."""


def free_bytes() -> int:
    """Return what the driver says is free."""
    return int(torch.cuda.mem_get_info(0)[0])


@pytest.mark.parametrize(("system", "by_pages"), [("kunserve-v1", False), ("kunserve-v2", False), ("kunserve", True)])
async def test_texts_go_on_and_no_memory_of_the_card_is_lost(
    system: str, tmp_path_factory: pytest.TempPathFactory, *, by_pages: bool
) -> None:
    """Texts by the margin oracle; memory by the driver, after each restore and when the workers have ended."""
    before = free_bytes()
    lived = await drop_and_restore(
        tmp_path_factory.mktemp("cluster"),
        tmp_path_factory.mktemp("model"),
        system=system,
        flags=("--device", "cuda", "--dtype", "bfloat16", "--memory", "1536MiB"),
        env={"SLUICE_WORKER_HAND_OVER_PAGES": str(by_pages)},
        num_rounds=NUM_ROUNDS,
        free_bytes=free_bytes,
    )
    assert lived.num_texts == 12 * NUM_ROUNDS
    assert all(margin <= MARGIN for margin in lived.flips), lived.flips
    assert len(lived.changes) == 4 * NUM_ROUNDS
    modes = {"kunserve-v1": {"live"}, "kunserve-v2": {"coordinated"}, "kunserve": set()}
    assert {event["mode"] for event in lived.exchanges} == modes[system]
    assert len(lived.hand_overs) == (2 * NUM_ROUNDS if by_pages else 0), "each stage tells of it"
    first, *later = lived.free_bytes
    assert all(abs(free - first) <= LEAK_BYTES for free in later), lived.free_bytes
    assert abs(free_bytes() - before) <= LEAK_BYTES
