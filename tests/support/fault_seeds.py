"""A campaign of random faults as tests see it: each seed runs once, whoever asks first.

How many seeds there are is what CI has time for; `make campaign` runs as many as it is told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

from sim.faults.campaign import SeedReport


class FaultSeeds:
    """What came of some seeds.

    Args:
        run: runs one seed.
        seeds: all of them; those at the end reach what the others do not.

    Attributes:
        report_of: what came of a seed.
    """

    def __init__(self, run: Callable[[int], SeedReport], seeds: Sequence[int]) -> None:
        self.report_of = cache(run)
        self._seeds = seeds

    def check(self, seed: int) -> None:
        """Check that a seed violates nothing."""
        violations = self.report_of(seed).violations
        assert not violations, "\n".join(violations)

    def check_coverage(self, required: Sequence[str]) -> Counter[str]:
        """Check that the seeds together reach some paths; return how often each path was reached."""
        total: Counter[str] = Counter()
        for seed in self._seeds:
            total.update(self.report_of(seed).coverage)
        missing = [path for path in required if not total[path]]
        assert not missing, f"never reached: {missing}"
        return total

    def num_seeds_with(self, *paths: str) -> int:
        """Return how many seeds reach one of some paths at least."""
        return sum(any(self.report_of(seed).coverage[path] for path in paths) for seed in self._seeds)
