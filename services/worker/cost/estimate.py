"""What a worker knows of the time that its steps take: one object, which all who price anything read."""

from __future__ import annotations

from typing import Final

from shared.cost import CostModel
from shared.messages.report_parts import DecodeCost

MANY_SEQUENCES: Final = 256
"""That decode in one step: up to here its cost is taken to be a straight line."""


class CostEstimate:
    """The newest cost model of the whole model on this worker's device. Only whoever made it changes it.

    Args:
        now: from the beginning; None: unknown.
    """

    def __init__(self, now: CostModel | None = None) -> None:
        self.now = now
        """None: unknown. Policies get it as an input: one decision sees one model."""

    @property
    def token_s(self) -> float:
        """`CostModel.token_s` as reports say it: 0 if it is unknown."""
        return 0.0 if self.now is None else self.now.token_s

    @property
    def decode_cost(self) -> DecodeCost:
        """What a step of decodes costs, as reports say it."""
        if self.now is None:
            return DecodeCost()
        step_s, many_s = (self.now.step_s(number, 0, 0) for number in (0, MANY_SEQUENCES))
        return DecodeCost(step_s=step_s, sequence_s=(many_s - step_s) / MANY_SEQUENCES, kv_token_s=self.now.d_s)
