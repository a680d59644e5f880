"""What a worker says of the prefixes that it holds, so that requests come to where theirs is."""

from __future__ import annotations

from typing import Final

import numpy as np

from services.worker.engine.engine import Engine
from shared.messages.report_parts import MAX_SKETCH_MARKS, PrefixSketch
from shared.prefix_names import mark_of
from shared.prefix_sketch import sketch_of

NUM_ENDS: Final = MAX_SKETCH_MARKS // 2
"""Of sequences, that a sketch lists besides the sample."""


def sketch_prefixes(engine: Engine) -> PrefixSketch | None:
    """Return the sketch of all names whose KV is on the device or on the host; None: requests share no KV here."""
    if not engine.config.prefix_caching:
        return None
    indexes = [engine.blocks.index, *([] if engine.swapping is None else [engine.swapping.host.index])]
    ends = engine.sharing.ends.newest(NUM_ENDS, lambda name: any(index.get(name) is not None for index in indexes))
    marks = np.concatenate([index.marks() for index in indexes])
    return sketch_of(marks, np.array([mark_of(name) for name in ends], dtype=np.uint32))
