"""Places at a worker are shared: whoever comes finds one, and nobody keeps more than others while they wait."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from services.dispatcher.policy.shares import may_wait


@given(st.integers(1, 5), st.integers(8, 64), st.integers(0, 2**32))
def test_those_that_always_have_more_end_with_equal_shares_and_leave_one_free(
    num_groups: int, max_waiting: int, seed: int
) -> None:
    """They come one after the other and always have more; whoever waits begins at random. Nobody is sent away."""
    rng, held = random.Random(seed), Counter[int]()
    for newest in range(num_groups):
        is_first_try = True
        for _ in range(8 * max_waiting):
            groups = list(range(newest + 1))
            if is_first_try:
                assert may_wait(held[newest], held.total(), max_waiting), "whoever comes finds a place"
                is_first_try = False
            while any(may_wait(held[group], held.total(), max_waiting) for group in groups):
                taker = rng.choice([g for g in groups if may_wait(held[g], held.total(), max_waiting)])
                held[taker] += 1
                assert held.total() <= max_waiting
            held[rng.choice(sorted(held.elements()))] -= 1
    while any(may_wait(held[group], held.total(), max_waiting) for group in range(num_groups)):
        held[min(range(num_groups), key=held.__getitem__)] += 1
    share = max_waiting / (num_groups + 1)
    assert all(share - num_groups - 1 <= held[group] <= share + num_groups + 1 for group in range(num_groups))


def test_a_worker_that_does_not_say_how_many_may_wait_refuses_itself() -> None:
    assert may_wait(1000, 1000, 0)
