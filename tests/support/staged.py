"""Tests that are coroutines, and are run on the virtual clock in what they need."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from sim.virtual_time import run

P = ParamSpec("P")
Stage = TypeVar("Stage")


def played_in(
    open_stage: Callable[[], AbstractAsyncContextManager[Stage]],
) -> Callable[[Callable[Concatenate[Stage, P], Awaitable[None]]], Callable[P, None]]:
    """Have a test be given a stage of its own as its first argument; the others are pytest's."""

    def decorate(test: Callable[Concatenate[Stage, P], Awaitable[None]]) -> Callable[P, None]:
        @wraps(test)
        def run_test(*args: P.args, **kwargs: P.kwargs) -> None:
            async def main() -> None:
                async with open_stage() as stage:
                    await test(stage, *args, **kwargs)

            run(main())

        _, *others = inspect.signature(test).parameters.values()
        run_test.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]  # what pytest has to give
        return run_test

    return decorate
