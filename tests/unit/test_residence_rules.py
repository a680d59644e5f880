"""What a plan asks of a worker whose part in the group stays the same, and the limit under which its leader serves."""

from __future__ import annotations

import asyncio

import pytest

from services.worker.roles.block_limit import BlockLimit, BlocksNeededError
from services.worker.roles.device import GroupPlace, StagePlace
from services.worker.roles.residence import Residence, residence_in, why_not_resident
from shared.ids import WorkerId
from shared.layers import LayerRange
from shared.messages.plan import PlannedGroup, PlannedStage

W0, W1, W2 = (WorkerId(name) for name in ("w0", "w1", "w2"))
WHOLE = (0, 8)
PLACE = GroupPlace(3, "", (StagePlace(W0, "", LayerRange(0, 5)), StagePlace(W1, "", LayerRange(5, 8))), 0)


def stage(worker_id: WorkerId, layers: tuple[int, int], resident: tuple[int, int] | None = None) -> PlannedStage:
    return PlannedStage(worker_id=worker_id, held=layers, layers=layers, resident=resident)


def group(*stages: PlannedStage, num_blocks: int = 9) -> PlannedGroup:
    return PlannedGroup(stages=stages, num_blocks=num_blocks)


def test_a_plan_for_the_group_that_stands_changes_memory_only() -> None:
    loads = group(stage(W0, (0, 5), WHOLE), stage(W1, (5, 8), WHOLE))
    assert residence_in(PLACE, loads, W1) == Residence(LayerRange(0, 8), 9)
    unloads = group(stage(W0, (0, 5)), stage(W1, (5, 8)))
    assert residence_in(PLACE, unloads, W1) == Residence(LayerRange(5, 8), 9)


@pytest.mark.parametrize(
    "other",
    [
        group(stage(W0, (0, 8))),
        group(stage(W0, (0, 5)), stage(W2, (5, 8))),
        group(stage(W1, (0, 5)), stage(W0, (5, 8))),
        group(stage(W0, (0, 4)), stage(W1, (4, 8))),
        group(stage(W0, (0, 5)), stage(W1, (5, 7)), stage(W2, (7, 8))),
    ],
)
def test_a_plan_for_another_group_is_none_of_that_kind(other: PlannedGroup) -> None:
    assert residence_in(PLACE, other, W0) is None
    assert residence_in(None, group(stage(W0, (0, 5)), stage(W1, (5, 8))), W0) is None, "it is alone"


def test_a_worker_takes_what_fits_and_says_what_does_not() -> None:
    asked = group(stage(W0, (0, 5), WHOLE), stage(W1, (5, 8), WHOLE))
    whole = LayerRange(*WHOLE)
    assert why_not_resident(Residence(whole, 9), asked, 8, 9) is None
    assert "holds 8 KV blocks, not 9" in str(why_not_resident(Residence(whole, 9), asked, 8, 8))
    assert "how many" in str(why_not_resident(Residence(whole, 0), asked, 8, 9))
    part = group(stage(W0, (0, 5), WHOLE), stage(W1, (5, 8), (4, 8)))
    assert "only the whole model" in str(why_not_resident(Residence(whole, 9), part, 8, 9)), "another stage's counts"


TOO_FEW = 2


class _Engine:
    """Comes within a limit after so many looks."""

    def __init__(self, num_looks: int) -> None:
        self.limits: list[int | None] = []
        self.memory = self.blocks = self
        self._left = num_looks

    def limit(self, num_blocks: int | None) -> None:
        if num_blocks == TOO_FEW:
            raise ValueError("they are in use")
        self.limits.append(num_blocks)

    @property
    def is_within_limit(self) -> bool:
        self._left -= 1
        return self._left < 0


async def test_a_limit_is_reached_kept_and_gone_back_to() -> None:
    engine, woken = _Engine(3), list[int]()
    limit = BlockLimit(engine, lambda: woken.append(1))  # type: ignore[arg-type]  # all that it needs of one
    given_up: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    await limit.reach(7, given_up)
    limit.go_back()
    assert engine.limits == [7, None], "nothing was kept"
    await limit.reach(6, given_up)
    limit.keep()
    limit.go_back()
    await limit.reach(4, given_up)
    limit.go_back()
    assert engine.limits == [7, None, 6, 4, 6], "the memory beyond 6 is gone"
    limit.lift()
    limit.go_back()
    assert engine.limits[-2:] == [6, None]
    assert len(woken) == len(engine.limits)
    limit.keep()
    await limit.reach(5, given_up)
    limit.keep()
    limit.forget()
    limit.go_back()
    assert engine.limits[-1] == 5, "the engine has forgotten it by itself"


async def test_a_limit_that_is_refused_changes_nothing() -> None:
    engine = _Engine(0)
    limit = BlockLimit(engine, lambda: None)  # type: ignore[arg-type]  # all that it needs of one
    given_up: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    await limit.reach(6, given_up)
    limit.keep()
    with pytest.raises(BlocksNeededError, match="in use"):
        await limit.reach(TOO_FEW, given_up)
    limit.go_back()
    assert engine.limits == [6]


async def test_who_is_given_up_is_not_waited_for() -> None:
    limit = BlockLimit(_Engine(10**9), lambda: None)  # type: ignore[arg-type]  # all that it needs of one
    given_up: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(limit.reach(7, given_up))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    given_up.set_result(False)
    await waiting
