"""Dataclasses that are made with every step or message: frozen to the type checker, ordinary when they run.

A frozen dataclass sets each of its fields by a call of `object.__setattr__`: one with ten fields takes 2.3 µs to make
instead of 0.2, and a step makes about ten of them. mypy refuses an assignment to a field all the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as hot_dataclass
else:
    from dataclasses import dataclass

    def hot_dataclass(*, frozen: bool, slots: bool = True, eq: bool = True):
        """As `dataclass`, of which `frozen` is left to the type checker; equal ones have equal hashes, if it is set."""
        return dataclass(slots=slots, eq=eq, unsafe_hash=frozen and eq)


__all__ = ["hot_dataclass"]
