"""Restarts: pauses grow, patience ends, and calm times are forgiven."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cli.cluster.restart import RestartParams, is_failing, restart_delay_s

PARAMS = RestartParams(first_delay_s=0.2, max_delay_s=1.0, max_exits=5, window_s=60.0)


def test_the_pause_doubles_up_to_its_limit_and_then_patience_ends() -> None:
    exits_s = [10.0, 11.0, 12.0, 13.0, 14.0]
    delays = [restart_delay_s(PARAMS, exits_s[: n + 1], exits_s[n]) for n in range(5)]
    assert delays == [0.2, 0.4, 0.8, 1.0, 1.0]
    assert [is_failing(PARAMS, exits_s[: n + 1], exits_s[n]) for n in range(5)] == [False] * 4 + [True]


def test_exits_outside_the_window_do_not_count() -> None:
    assert restart_delay_s(PARAMS, [0.0, 1.0, 2.0, 3.0, 100.0], 100.0) == 0.2
    assert not is_failing(PARAMS, [0.0, 1.0, 2.0, 3.0, 100.0], 100.0)


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=20).map(sorted))
def test_more_exits_never_shorten_the_pause(exits_s: list[float]) -> None:
    now_s = exits_s[-1]
    fewer = restart_delay_s(PARAMS, exits_s[1:] or exits_s, now_s)
    all_of_them = restart_delay_s(PARAMS, exits_s, now_s)
    assert PARAMS.first_delay_s <= fewer <= all_of_them <= PARAMS.max_delay_s
