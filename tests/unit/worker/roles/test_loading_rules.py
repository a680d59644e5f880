"""Whose group a plan means that changes only what lies beside, and the limit under which its leader serves."""

from __future__ import annotations

import asyncio

import pytest

from services.worker.kv_moves.places import GroupPlace, StagePlace
from services.worker.roles.block_limit import BlockLimit, BlocksNeededError
from services.worker.roles.role import Member
from services.worker.roles.steps.beside import is_group
from shared.ids import WorkerId
from shared.layers import LayerRange
from shared.messages.plan import LoadBeside, PlannedWorker, UnloadBeside

W0, W1, W2 = (WorkerId(name) for name in ("w0", "w1", "w2"))
STAGES = (StagePlace(W0, "", LayerRange(0, 5)), StagePlace(W1, "", LayerRange(5, 8)))
STANDS = Member(GroupPlace(3, STAGES, 1), 20, 3)


def load(*members: tuple[WorkerId, tuple[int, int]]) -> LoadBeside:
    stages = tuple(PlannedWorker(worker_id=name, held=layers) for name, layers in members)
    return LoadBeside(stages=stages, num_blocks=9)


def test_a_plan_for_the_group_that_stands_changes_memory_only() -> None:
    asked = load((W0, (0, 5)), (W1, (5, 8)))
    assert is_group(asked, STANDS)
    assert is_group(UnloadBeside(stages=asked.stages, num_blocks=9), STANDS)
    assert not is_group(asked, None), "it is alone"


@pytest.mark.parametrize(
    "other",
    [
        load((W0, (0, 5)), (W2, (5, 8))),
        load((W1, (0, 5)), (W0, (5, 8))),
        load((W0, (0, 4)), (W1, (4, 8))),
        load((W0, (0, 5)), (W1, (5, 7)), (W2, (7, 8))),
    ],
)
def test_a_plan_for_another_group_is_none_of_that_kind(other: LoadBeside) -> None:
    assert not is_group(other, STANDS)


TOO_FEW = 2


class _Engine:
    """Comes within a limit after so many looks."""

    def __init__(self, num_looks: int) -> None:
        self.limits: list[int | None] = []
        self.best_effort_gives_way = False
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
