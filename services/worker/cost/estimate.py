"""What a worker knows of the time that its steps take: one object, which all who price anything read."""

from __future__ import annotations

from shared.cost import CostModel


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
