"""The life that a GPU is to stand, on the CPU: two workers of one device drop and restore in bfloat16."""

from __future__ import annotations

import pytest

from tests.support.one_device import MARGIN, drop_and_restore
from tests.support.seeds import first_of

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("by_pages", first_of([True, False], in_ci=1))
async def test_texts_go_on_through_drops_and_restores_in_bfloat16(
    tmp_path_factory: pytest.TempPathFactory, *, by_pages: bool
) -> None:
    lived = await drop_and_restore(
        tmp_path_factory.mktemp("cluster"),
        tmp_path_factory.mktemp("model"),
        system="kunserve",
        flags=("--dtype", "bfloat16", "--memory", "220MiB"),
        env={"SLUICE_WORKER_MAX_BATCH_TOKENS": "256", "SLUICE_WORKER_HAND_OVER_PAGES": str(by_pages)},
        num_rounds=1,
        free_bytes=lambda: 0,
    )
    assert lived.num_texts == 12
    assert all(margin <= MARGIN for margin in lived.flips)
    assert len(lived.changes) == 4
    assert bool(lived.exchanges) != by_pages
    assert len(lived.hand_overs) == (2 if by_pages else 0), "each stage tells of it"
    assert all(event["num_pages"] > 0 for event in lived.hand_overs)
