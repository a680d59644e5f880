"""How a budget is divided: few measurements, the longest context that fits, and refusals that name what suffices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.memory.budget import (
    MAX_TRIALS,
    Demand,
    Trial,
    divide,
    least_context,
    least_memory,
    longest_context,
    next_context,
)
from services.worker.memory.reserve import MIN_RESERVE_BYTES
from shared.errors import StartupError
from shared.process.config import parse_size

MIB = 2**20
ReserveOf = Callable[[int], int]


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    page_bytes = draw(st.sampled_from([1, 4096, MIB, 2 * MIB]))
    num_pools = 2 * draw(st.integers(1, 40))
    positions = draw(st.integers(1, 200_000))
    return Demand(
        memory_bytes=draw(st.integers(1, 2000 * MIB)),
        parameter_bytes=draw(st.integers(1, 500 * MIB)) // page_bytes * page_bytes,
        bytes_per_block=num_pools * draw(st.integers(1, 64 * 1024)),
        block_size=draw(st.integers(1, 128)),
        max_positions=positions,
        max_model_len=draw(st.none() | st.integers(1, positions)),
        num_pools=num_pools,
        page_bytes=page_bytes,
    )


def reserves() -> st.SearchStrategy[ReserveOf]:
    """What a context takes: a fixed part, one that grows with it, and one that does so above a bound."""

    def build(fixed: int, per_token: int, more: int, bound: int) -> ReserveOf:
        return lambda context: fixed + per_token * context + more * max(context - bound, 0)

    numbers = st.integers(0, 20_000)
    return st.builds(build, st.integers(MIN_RESERVE_BYTES, 100 * MIB), numbers, numbers, st.integers(0, 200_000))


def measured(demand: Demand, reserve_of: ReserveOf) -> list[Trial]:
    """Return the trials of a start."""
    bound = int(reserve_of(least_context(demand)) * 1.1) + 1
    longest, trials = longest_context(demand, bound), list[Trial]()
    while (context := next_context(demand, longest, trials)) is not None:
        assert context not in [trial.context for trial in trials], "nothing is measured twice"
        assert least_context(demand) <= context <= longest
        trials.append(Trial(context, reserve_of(context)))
    return trials


@given(demands(), reserves())
def test_a_division_takes_few_measurements_and_fits(demand: Demand, reserve_of: ReserveOf) -> None:
    try:
        trials = measured(demand, reserve_of)
        reserve_bytes, division = divide(demand, trials)
    except StartupError:
        return
    assert 1 <= len(trials) <= MAX_TRIALS
    assert Trial(division.max_model_len, reserve_bytes) in trials, "what is kept free was measured for that context"
    side_bytes = demand.bytes_per_block // demand.num_pools
    pool_pages = -(-division.num_blocks * side_bytes // demand.page_bytes)
    reserved = -(-reserve_bytes // demand.page_bytes) * demand.page_bytes
    taken = demand.parameter_bytes + reserved + demand.num_pools * pool_pages * demand.page_bytes
    assert taken <= demand.memory_bytes
    assert division.num_blocks * demand.block_size >= division.max_model_len


@given(demands(), st.integers(MIN_RESERVE_BYTES, 100 * MIB), st.integers(0, 20_000))
def test_the_context_is_nearly_the_longest_that_fits(demand: Demand, fixed: int, per_token: int) -> None:
    """Where the reserve grows evenly: what would gain less than 1/32, or a hundredth of the reserve, is not tried."""
    demand = replace(demand, max_model_len=None)
    try:
        _, division = divide(demand, measured(demand, lambda context: fixed + per_token * context))
    except StartupError:
        return
    longer = int(division.max_model_len * 33 / 32) + 2
    reserve_bytes = int((fixed + per_token * longer) * 1.01) + 2
    if longer <= demand.max_positions:
        asked = replace(demand, max_model_len=longer)
        assert least_memory(asked, reserve_bytes) > demand.memory_bytes // demand.page_bytes * demand.page_bytes


def test_a_reserve_that_hovers_about_what_is_left_is_not_measured_for_one_context_after_the_other() -> None:
    """Ten pools of whole pages take 20 MiB or nothing: 12 + 48 are left, and the reserve lies about 48."""
    demand = Demand(80 * MIB, 12 * MIB, 40960, 16, 1024, None, num_pools=10, page_bytes=2 * MIB)
    trials = measured(demand, lambda context: 42 * MIB + 9000 * context)
    assert [trial.context for trial in trials][:2] == [1024, 64]
    assert len(trials) <= 4
    assert 640 < divide(demand, trials)[1].max_model_len < 700, "(48 - 42) MiB / 9000 = 699, and a margin of 1 %"


@given(demands(), reserves())
def test_the_memory_that_a_refusal_names_suffices(demand: Demand, reserve_of: ReserveOf) -> None:
    """Also when the reserve is measured anew and comes out nearly a tenth larger."""
    short = replace(demand, memory_bytes=least_memory(demand, reserve_of(least_context(demand))) - 1)
    with pytest.raises(StartupError) as refused:
        divide(short, measured(short, reserve_of))
    given = replace(demand, memory_bytes=parse_size(refused.value.hint.rpartition("Give at least ")[2]))
    divide(given, measured(given, lambda context: int(reserve_of(context) * 1.099)))


@given(demands(), st.integers(0, 100 * MIB))
def test_the_least_memory_is_enough_and_a_byte_less_is_not(demand: Demand, reserve_bytes: int) -> None:
    trial = Trial(least_context(demand), reserve_bytes)
    least = least_memory(demand, reserve_bytes)
    assert divide(replace(demand, memory_bytes=least), [trial])[1].max_model_len == least_context(demand)
    with pytest.raises(StartupError, match="too small"):
        divide(replace(demand, memory_bytes=least - 1), [trial])
