"""Sketches of prefixes: how they are made from marks, and read (`shared.messages.report_parts.PrefixSketch`)."""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shared.messages.report_parts import MAX_SKETCH_MARKS, PrefixSketch
from shared.prefix_names import NUM_MARKS

Marks = NDArray[np.uint32]
"""[n]; see `shared.prefix_names.mark_of`."""
NO_MARKS: Final = np.zeros(0, dtype=np.uint32)


def sketch_of(marks: Marks, ends: Marks = NO_MARKS, most: int = MAX_SKETCH_MARKS) -> PrefixSketch:
    """Return the sketch of names.

    Args:
        marks: of all names, in any order.
        ends: of those that are listed in any case, fewer than `most`.
        most: that are listed.
    """
    bound = NUM_MARKS
    if marks.size > most:
        smallest = np.partition(marks, most - ends.size)[: most - ends.size + 1]
        bound = int(smallest[-1])
        marks = np.concatenate([smallest[smallest < bound], ends])
    return PrefixSketch(bound=bound, marks=b64encode(np.unique(marks).astype("<u4").tobytes()).decode())


def listed_marks(sketch: PrefixSketch) -> Marks:
    """Return the marks that are listed, ascending.

    Raises:
        ValueError: what is listed are no marks.
    """
    return np.frombuffer(b64decode(sketch.marks, validate=True), dtype="<u4")
