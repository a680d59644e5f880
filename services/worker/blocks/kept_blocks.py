"""Which blocks hold what sequences can go on with at another executor. Pure.

A sequence's full blocks count from the first one on, as far as each is on the device or on the host:

device   x x x . . x . . .
host     x x x x x . x . x      0 to 6; 0 to 2 are named first, after all rows 3 to 6, of which 5 is on the device
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

import numpy as np

from services.worker.blocks.prefix_index import PrefixIndex
from services.worker.blocks.remote_kv import tail_begin
from services.worker.contract.arrays import I32
from services.worker.contract.kept_kv import KeptKv, as_host_id
from shared.prefix_names import RunName


def kept_blocks(
    rows: Iterable[Sequence[RunName]], block_size: int, device: PrefixIndex, host: PrefixIndex | None
) -> KeptKv:
    """Return the first full blocks of sequences, as far as their contents are on the device or on the host.

    Args:
        rows: names of the full blocks of each sequence, the most wanted sequence first.
        block_size: token slots of a block.
        device: blocks of the device by their names.
        host: likewise; None: there are none.
    """
    found: dict[RunName, int] = {}
    copies: dict[RunName, int] = {}
    tails: dict[RunName, None] = {}
    ends: set[RunName] = set()
    for names in rows:
        ids = device.find(names)
        found.update(zip(names, ids, strict=False))
        more = [] if host is None else _following(device, host, names[len(ids) :])
        copies.update(zip(names[len(ids) :], more, strict=False))
        num_kept = len(ids) + len(more)
        tails |= dict.fromkeys(names[tail_begin(num_kept, block_size) : num_kept])
        ends.update(names[max(num_kept - 1, 0) : num_kept])
    found |= {name: block for name, block in copies.items() if name not in found}
    blocks = np.array(list(found.values()), dtype=np.int32)
    return KeptKv(tuple(found), blocks, _places(found, tails), _places(found, ends))


def _following(device: PrefixIndex, host: PrefixIndex, names: Sequence[RunName]) -> list[int]:
    """Return the ids of the first names' blocks, as `KeptKv` has them, as far as every one has a block."""
    found: list[int] = []
    for name in names:
        block = device.get(name)
        if block is None:
            copy = host.get(name)
            if copy is None:
                break
            block = as_host_id(copy)
        found.append(block)
    return found


def _places(names: Iterable[RunName], marked: Container[RunName]) -> I32:
    return np.array([place for place, name in enumerate(names) if name in marked], dtype=np.int32)
