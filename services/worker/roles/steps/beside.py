"""What `LoadBeside` and `UnloadBeside` have in common: parameters of a group beside those that it computes with.

    stage 0   computes [0, 24), holds [0, 24)   ──load──►   computes [0, 24), holds [0, 48)     with fewer KV blocks
    stage 1   computes [24, 48), …              ◄─unload─   computes [24, 48), …

So that a restore, which follows, has nothing left to load. Source: KunServe v1, section 4.2, v2, section 4.4
(parameters are pulled in the background while the group serves).
"""

from __future__ import annotations

from services.worker.kv_moves.places import GroupFailedError
from services.worker.roles.role import Broken, InGroup, group_of
from services.worker.roles.role_keeper import RoleKeeper
from shared.layers import LayerRange
from shared.messages.plan import LoadBeside, UnloadBeside


def why_not_beside(keeper: RoleKeeper, step: LoadBeside | UnloadBeside, layers: LayerRange) -> str | None:
    """Return why a worker does not come to hold the parameters of some layers in the group that a step names."""
    reason = keeper.why_not(step)
    if reason is not None:
        return reason
    if not is_group(step, group_of(keeper.state)):
        return "what lies beside can change in a group that stands, and this is another one"
    if not isinstance(keeper.state, InGroup):
        why = keeper.state.reason if isinstance(keeper.state, Broken) else "it is about to be whole again"
        return f"its group is over: {why}"
    num_blocks = keeper.device.blocks_beside(layers)
    if num_blocks < step.num_blocks:
        return f"with layers {layers} the memory holds {num_blocks} KV blocks, not {step.num_blocks}"
    return None


def is_group(step: LoadBeside | UnloadBeside, group: InGroup | None) -> bool:
    """Return whether a step is of this group, as it stands. Pure."""
    if group is None:
        return False
    planned = [(worker.worker_id, LayerRange(*worker.held)) for worker in step.stages]
    return planned == [(stage.worker_id, stage.layers) for stage in group.place.stages]


def check_within_limit(keeper: RoleKeeper) -> None:
    """Check that a leader's sequences use no block that may lose its memory.

    Raises:
        GroupFailedError: they do.
    """
    if keeper.role.is_leader and not keeper.machine.engine.blocks.is_within_limit:
        raise GroupFailedError("KV is in use that would lose its memory")
