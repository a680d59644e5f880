"""How many instances a load needs: doubling until one number suffices, then bisection. Pure but for its probe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InstancePlan:
    """The answer, and every number that was tried."""

    num_instances: int | None
    """The least number that suffices; None if not even the limit does."""
    shares: dict[int, float]
    """Share of the requests in time, by number of instances."""
    step: int = 1
    """Instances that come and go together."""

    @property
    def share(self) -> float | None:
        """Share in time with that number."""
        return None if self.num_instances is None else self.shares[self.num_instances]

    @property
    def share_below(self) -> float | None:
        """Share in time with the next smaller number; None if there is none."""
        return None if self.num_instances is None else self.shares.get(self.num_instances - self.step)


def plan_instances(
    probe: Callable[[int], float], target_share: float, max_instances: int, step: int = 1
) -> InstancePlan:
    """Return the least number of instances with which enough requests are in time.

    It is the least if more instances never make it worse: that is assumed between the numbers that are tried. The next
    smaller number was always tried, and did not suffice.

    Args:
        probe: returns the share of requests in time with so many instances; called once for each number.
        target_share: what suffices.
        max_instances: the largest number to try, at least `step`.
        step: only multiples of it are tried.
    """
    shares: dict[int, float] = {}

    def suffices(count: int) -> bool:
        share = shares[count * step] = probe(count * step)
        return share >= target_share

    most, too_few, count = max_instances // step, 0, 1
    while not suffices(count):
        if count == most:
            return InstancePlan(None, shares, step)
        too_few, count = count, min(2 * count, most)
    while count - too_few > 1:
        middle = (too_few + count) // 2
        if suffices(middle):
            count = middle
        else:
            too_few = middle
    return InstancePlan(count * step, shares, step)
