"""Prefixes whose KV several sequences of a worker hold: who moves and has the same one needs that much less room.

    row 0   ▓▓▓▓░░       row 1   ▓▓▓▓▒▒▒      ▓ held by both: their prefix is named after its last block

Pure: it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from services.worker.blocks.kept_blocks import kept_blocks
from services.worker.contract.arrays import I32
from services.worker.contract.kept_kv import KeptKv
from services.worker.engine.engine import Engine
from shared.messages.report_parts import SharedPrefix
from shared.prefix_names import RunName

MAX_PREFIXES: Final = 8
"""Of a report."""


def find_prefix(engine: Engine, names: Sequence[RunName]) -> KeptKv:
    """Return what is here, on the device or on the host, of the first of these blocks of a prompt."""
    on_host = None if engine.swapping is None else engine.swapping.host.index
    return kept_blocks([names], engine.config.block_size, engine.blocks.index, on_host)


def shared_prefix(engine: Engine, rows: list[int]) -> SharedPrefix | None:
    """Return the longest prefix of the choices of one request that other requests hold too.

    Args:
        engine: where they run.
        rows: of these choices.
    """
    blocks, held = engine.blocks, engine.table.held_blocks
    own = np.concatenate([blocks.block_table[row, : held[row]] for row in rows])
    first = blocks.block_table[rows[0], : held[rows[0]]]
    ids, counts = np.unique(own, return_counts=True)
    return _named(engine, first, blocks.refcount[first] > counts[np.searchsorted(ids, first)])


def shared_prefixes(engine: Engine) -> tuple[SharedPrefix, ...]:
    """Return the longest prefixes that several running sequences hold, each once, the longest first."""
    rows, blocks = engine.table.running.view, engine.blocks
    if not rows.size or not engine.config.prefix_caching:
        return ()
    num_held = engine.table.held_blocks[rows]
    ids = blocks.block_table[rows, : int(num_held.max())]
    is_shared = (np.arange(ids.shape[1]) < num_held[:, None]) & (blocks.refcount[ids] > 1)
    found: dict[str, SharedPrefix] = {}
    for place in np.flatnonzero(is_shared.any(axis=1)).tolist():
        prefix = _named(engine, ids[place], is_shared[place])
        if prefix is not None:
            found[prefix.name] = prefix
    return tuple(sorted(found.values(), key=lambda prefix: (-prefix.num_blocks, prefix.name))[:MAX_PREFIXES])


def _named(engine: Engine, ids: I32, is_shared: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> SharedPrefix | None:
    """Return the prefix up to the last of some blocks that is shared and has a name."""
    index = engine.blocks.index
    places = np.flatnonzero(is_shared & index.is_named[ids])
    if not places.size:
        return None
    last = int(places[-1])
    return SharedPrefix(name=index.name_of(int(ids[last])).hex(), num_blocks=last + 1)
