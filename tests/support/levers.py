"""A rung of the ladder that helps, at a price."""

from __future__ import annotations

from dataclasses import dataclass

from services.planner.policy.levers.ladder import ClusterSnapshot, Offer


@dataclass(frozen=True)
class FakeLever:
    """It has nothing for workers to do."""

    name: str = "preempt"
    cost_s: float | None = 0.1
    """None: it cannot help."""
    is_standing: bool = False

    def offer(self, snapshot: ClusterSnapshot) -> Offer | None:
        """Help at its price, if it can."""
        return None if self.cost_s is None else Offer(self.cost_s, f"{self.name} helps {len(snapshot.workers)}")
