"""What a worker's memory holds, as it is reported. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from shared.layers import LayerRange
from shared.messages.report import ElasticFacts


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
