"""`FormGroup`: this worker becomes a stage of a group; the first one leads it, with the KV of all.

    leader   leaves its executor ─► drops layers, meets the others ─► goes on with the group's executor
    member   releases its requests to the leader ─► drops layers, meets the others ─► computes what the leader says

Source: KunServe v2, section 4.1 (a drop changes page tables and roles between two steps) and 4.2 (KV is exchanged).
"""

from __future__ import annotations

from functools import partial

from services.worker.contract.executor import KvCapacity
from services.worker.kv_moves.places import GroupPlace, StagePlace
from services.worker.roles.role import Role, in_group
from services.worker.roles.role_keeper import RoleKeeper
from services.worker.roles.steps.change import Change
from shared.ids import WorkerId
from shared.layers import LayerRange, check_tiling
from shared.messages.plan import FormGroup, PreparePlan
from shared.sizes import describe_bytes


class Form(Change):
    """See the module."""

    def __init__(self, step: FormGroup, keeper: RoleKeeper) -> None:
        self._step = step
        self._keeper = keeper

    def refusal(self) -> str | None:
        """See `Change`."""
        keeper = self._keeper
        reason = keeper.why_not(self._step)
        if reason is not None:
            return reason
        layers = layers_of(self._step, keeper.worker_id)
        return why_no_stage(keeper.role, self._step, layers, keeper.num_layers) or keeper.device.refusal(layers)

    async def carry_out(self, asked: PreparePlan) -> int:
        """See `Change`."""
        stages = self._step.stages
        places = tuple(StagePlace(stage.worker_id, stage.address, LayerRange(*stage.layers)) for stage in stages)
        index = [stage.worker_id for stage in stages].index(self._keeper.worker_id)
        place = GroupPlace(asked.plan_id, places, index)
        return await (self._join(place) if index else self._lead(place))

    async def _lead(self, place: GroupPlace) -> int:
        keeper = self._keeper
        kept = await keeper.leave(joins=place.plan_id)
        led = await keeper.device.lead(place, partial(keeper.pipeline_ended, place.plan_id), kept)
        keeper.go_on(led, place)
        if led.num_moved_bytes:
            keeper.announce(
                "kv_handed_over",
                f"{describe_bytes(led.num_moved_bytes)} of KV went between {len(place.stages)} workers in "
                f"{len(led.kept)} blocks, in the pages where they lie",
            )
        num_blocks = led.executor.capacity.num_blocks
        keeper.stand(place, num_blocks)
        return num_blocks

    async def _join(self, place: GroupPlace) -> int:
        keeper, machine = self._keeper, self._keeper.machine
        kept = await keeper.leave(joins=place.plan_id)
        keeper.intake.stand_aside()
        machine.engine.registry.release(sorted(machine.engine.registry.row_of.values()), place.stages[0].worker_id)
        machine.engine.enter_executor(KvCapacity(0, machine.engine.config.block_size), 1)
        machine.loop.flush()  # who waits for these sequences hears of it now, not when the group stands
        num_blocks = await keeper.device.join(place, partial(keeper.pipeline_ended, place.plan_id), kept)
        keeper.stand(place, num_blocks)
        return num_blocks


def layers_of(step: FormGroup, worker_id: WorkerId) -> LayerRange:
    """Return what a worker that the step names computes afterwards."""
    return next(LayerRange(*stage.layers) for stage in step.stages if stage.worker_id == worker_id)


def why_no_stage(role: Role, step: FormGroup, layers: LayerRange, num_layers: int) -> str | None:
    """Return why the stages make no group of which a worker of this role is one; None: they do. Pure.

    Args:
        role: what it is; the step was made for it.
        step: that names it.
        layers: its own, afterwards.
        num_layers: of the whole model.
    """
    try:
        check_tiling([LayerRange(*stage.layers) for stage in step.stages], num_layers)
    except ValueError as error:
        return str(error)
    if not role.layers.covers(layers):
        return f"layers {layers} are not all among those held, {role.layers}{in_group(role)}"
    return None
