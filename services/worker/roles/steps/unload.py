"""`UnloadBeside`: memory of parameters that the group does not compute with goes back to KV."""

from __future__ import annotations

from services.worker.roles.role_keeper import RoleKeeper
from services.worker.roles.steps.beside import check_within_limit, why_not_beside
from services.worker.roles.steps.change import Change
from shared.messages.plan import PreparePlan, UnloadBeside


class Unload(Change):
    """See the module."""

    done_event = "parameters_beside"

    def __init__(self, step: UnloadBeside, keeper: RoleKeeper) -> None:
        self._step = step
        self._keeper = keeper

    def refusal(self) -> str | None:
        """See `Change`."""
        return why_not_beside(self._keeper, self._step, self._keeper.role.layers)

    async def carry_out(self, asked: PreparePlan) -> int:
        """See `Change`."""
        keeper = self._keeper
        check_within_limit(keeper)
        num_blocks = await keeper.device.reside(keeper.role.layers, self._step.num_blocks)
        keeper.moves.follow_no_more()
        keeper.limit.lift()  # the other stages have given theirs up before
        keeper.hold_beside(num_blocks, asked.plan_id)
        return num_blocks
