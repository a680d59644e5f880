"""`LoadBeside`: the group's other parameters are loaded while it serves, with fewer KV blocks."""

from __future__ import annotations

from asyncio import Future

from services.worker.roles.role import group_of
from services.worker.roles.role_keeper import RoleKeeper
from services.worker.roles.steps.beside import check_within_limit, is_group, why_not_beside
from services.worker.roles.steps.change import Change
from shared.layers import LayerRange
from shared.messages.plan import LoadBeside, PreparePlan


class LoadChange(Change):
    """See the module."""

    done_event = "parameters_beside"
    readying = "KV was being moved to other blocks"

    def __init__(self, step: LoadBeside, keeper: RoleKeeper) -> None:
        self._step = step
        self._keeper = keeper
        self._whole = LayerRange(0, keeper.num_layers)

    def refusal(self) -> str | None:
        """See `Change`."""
        return why_not_beside(self._keeper, self._step, self._whole)

    async def make_ready(self, limit_s: float, given_up: Future[bool]) -> bool:
        """Let a leader's sequences leave the blocks whose memory goes."""
        del limit_s
        keeper = self._keeper
        if not keeper.role.is_leader or not is_group(self._step, group_of(keeper.state)):
            return False
        await keeper.limit.reach(self._step.num_blocks, given_up)
        return True

    async def carry_out(self, asked: PreparePlan) -> int:
        """See `Change`."""
        keeper, device = self._keeper, self._keeper.device
        check_within_limit(keeper)
        is_ahead = device.blocks_ahead(keeper.role.layers, self._step.num_blocks) > 0
        num_blocks = await device.reside(self._whole, self._step.num_blocks, is_ahead=is_ahead)
        keeper.limit.keep()
        keeper.moves.follow(lambda: device.load_now)
        keeper.hold_beside(num_blocks, asked.plan_id)
        return num_blocks

    def go_back(self) -> None:
        """Use all blocks again, if their memory has stayed."""
        self._keeper.limit.go_back()
