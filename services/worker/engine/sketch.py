"""What a worker says of the prefixes that it holds, so that requests come to where theirs is."""

from __future__ import annotations

import numpy as np

from services.worker.engine.engine import Engine
from shared.messages.report_parts import PrefixSketch
from shared.prefix_sketch import sketch_of


def sketch_prefixes(engine: Engine) -> PrefixSketch | None:
    """Return the sketch of all names whose KV is on the device or on the host; None: requests share no KV here."""
    if not engine.config.prefix_caching:
        return None
    marks = engine.blocks.index.marks()
    if engine.swapping is not None:
        marks = np.concatenate([marks, engine.swapping.host.index.marks()])
    return sketch_of(marks)
