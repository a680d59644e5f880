"""Tests that run in virtual time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

from sim.virtual_time import run

P = ParamSpec("P")


def in_virtual_time(scenario: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Make a test that runs the scenario on a loop of its own, in virtual time; tasks that it leaves fail it."""

    @functools.wraps(scenario)
    def test(*args: P.args, **kwargs: P.kwargs) -> None:
        run(scenario(*args, **kwargs))

    return test
