"""Tests that are coroutines, and are run by something that sets up what they need."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
Stage = TypeVar("Stage")


def played_in(
    play: Callable[[Callable[[Stage], Awaitable[None]]], object],
) -> Callable[[Callable[Concatenate[Stage, P], Awaitable[None]]], Callable[P, None]]:
    """Have a test be run by `play`, which gives it its first argument; the others are pytest's."""

    def decorate(test: Callable[Concatenate[Stage, P], Awaitable[None]]) -> Callable[P, None]:
        @wraps(test)
        def run_test(*args: P.args, **kwargs: P.kwargs) -> None:
            play(lambda stage: test(stage, *args, **kwargs))

        _, *others = inspect.signature(test).parameters.values()
        run_test.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]  # what pytest has to give
        return run_test

    return decorate
