"""Where the sequences of a group go on when it dissolves: at one of its members, each of which is whole again.

Oldest first, each to the member with most room left, so that what does not fit waits, and the young wait before the
old. Pure. Source: KunServe v1, section 4.2 (live KVCache restore: requests leave the pipeline for one instance); which
request goes where is left open there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

Key = TypeVar("Key")


def share_out(
    sequences: Sequence[Key],
    sizes: Sequence[int],
    num_members: int,
    capacity: int,
    fixed: Mapping[Key, int] = MappingProxyType({}),
) -> list[list[Key]]:
    """Return for each member, the leader first, the sequences that go on there, in the given order.

    Args:
        sequences: [n] by any name, the oldest first.
        sizes: [n] blocks that each of them needs now.
        num_members: of the group.
        capacity: blocks of each member.
        fixed: sequences that have a member already, and keep it.
    """
    shares: list[list[Key]] = [[] for _ in range(num_members)]
    free = [capacity] * num_members
    for sequence, size in zip(sequences, sizes, strict=True):
        if sequence in fixed:
            free[fixed[sequence]] -= size
    for sequence, size in zip(sequences, sizes, strict=True):
        member = fixed.get(sequence)
        if member is None:
            member = max(range(num_members), key=lambda i: (free[i], -i))
            free[member] -= size
        shares[member].append(sequence)
    return shares
