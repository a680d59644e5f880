"""A campaign of random faults as tests see it: each seed runs once, whoever asks first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

from sim.faults.campaign import SeedReport

NUM_SEEDS = 200


class FaultSeeds:
    """The seeds 0 to NUM_SEEDS - 1.

    Args:
        run: runs one seed.

    Attributes:
        report_of: what came of a seed.
    """

    def __init__(self, run: Callable[[int], SeedReport]) -> None:
        self.report_of = cache(run)

    def check(self, seed: int) -> None:
        """Check that a seed violates nothing."""
        violations = self.report_of(seed).violations
        assert not violations, "\n".join(violations)

    def check_coverage(self, required: Sequence[str]) -> Counter[str]:
        """Check that the seeds together reach some paths; return how often each path was reached."""
        total: Counter[str] = Counter()
        for seed in range(NUM_SEEDS):
            total.update(self.report_of(seed).coverage)
        missing = [path for path in required if not total[path]]
        assert not missing, f"never reached: {missing}"
        return total

    def num_seeds_with(self, *paths: str) -> int:
        """Return how many seeds reach one of some paths at least."""
        return sum(any(self.report_of(seed).coverage[path] for path in paths) for seed in range(NUM_SEEDS))
