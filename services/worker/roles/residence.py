"""Parameters that a group has beside those it computes with: what a plan asks for, and why a worker does not do it.

    stage 0   computes [0, 24), holds [0, 24)   ──load──►   computes [0, 24), holds [0, 48)     with fewer KV blocks
    stage 1   computes [24, 48), …              ◄─unload─   computes [24, 48), …

So that a restore, which follows, has nothing left to load. Pure. Source: KunServe v1, section 4.2, v2, section 4.4
(parameters are pulled in the background while the group serves).
"""

from __future__ import annotations

from dataclasses import dataclass

from services.worker.roles.device import GroupPlace
from shared.ids import WorkerId
from shared.layers import LayerRange
from shared.messages.plan import PlannedGroup
from shared.messages.report import ElasticFacts


@dataclass(frozen=True, slots=True)
class Residence:
    """What a worker's memory is to hold, in the group that stands."""

    layers: LayerRange
    """Of which it has the parameters, or loads them; those that it computes are among them."""
    num_blocks: int
    """KV blocks that every stage has then."""


@dataclass(frozen=True, slots=True)
class Resident:
    """What a worker's memory holds, as it is reported."""

    layers: LayerRange
    """Whose parameters have memory."""
    loaded_ratio: float
    """Share of their bytes that is loaded."""
    param_bytes: int | None = None
    """None: all that it started with."""
    kv_bytes: int | None = None
    """Likewise."""


def resident_in_group(
    facts: ElasticFacts, held: LayerRange, resident: LayerRange, loaded_ratio: float, num_blocks: int
) -> Resident:
    """Return what a stage of a group has.

    Args:
        facts: of its memory.
        held: layers that it computes.
        resident: those whose parameters have memory.
        loaded_ratio: share of these that is loaded.
        num_blocks: KV blocks of the layers that are held.
    """
    num_bytes = sum(facts.layer_bytes[layer] for layer in resident)
    num_layers = len(facts.layer_bytes)
    begin = 0 if resident.first == 0 else facts.last_stage_begin
    end = facts.outer_bytes if resident.end == num_layers else facts.first_stage_end
    if resident.first == 0 or resident.end == num_layers:
        num_bytes += max(end - begin, 0)
    return Resident(resident, loaded_ratio, num_bytes, num_blocks * len(held) * 2 * facts.block_bytes)


def residence_in(place: GroupPlace | None, group: PlannedGroup, worker_id: WorkerId) -> Residence | None:
    """Return what a plan asks of a worker whose part in the group stays the same; None: its part changes.

    Args:
        place: in the group that stands; None: it is alone.
        group: that the plan is for.
        worker_id: its name.
    """
    if place is None or len(group.stages) != len(place.stages):
        return None
    for now, then in zip(place.stages, group.stages, strict=True):
        if now.worker_id != then.worker_id or now.layers != LayerRange(*then.layers):
            return None
    own = next((stage for stage in group.stages if stage.worker_id == worker_id), None)
    if own is None:
        return None
    return Residence(LayerRange(*(own.resident or own.layers)), group.num_blocks)


def why_not_resident(residence: Residence, group: PlannedGroup, num_layers: int, num_blocks: int) -> str | None:
    """Return why a worker does not take a residence, in words; None: it does.

    Args:
        residence: asked for.
        group: that the plan is for.
        num_layers: of the whole model.
        num_blocks: that its memory has room for then.
    """
    whole = LayerRange(0, num_layers)
    if any(stage.resident is not None and LayerRange(*stage.resident) != whole for stage in group.stages):
        return f"only the whole model can be loaded beside, layers {whole}"
    if residence.num_blocks < 1:
        return "the plan does not say how many KV blocks are left"
    if num_blocks < residence.num_blocks:
        return f"with layers {residence.layers} the memory holds {num_blocks} KV blocks, not {residence.num_blocks}"
    return None
