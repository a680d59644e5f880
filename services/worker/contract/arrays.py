"""Arrays by what they hold, as engine, executor and links exchange them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]
Bool = NDArray[np.bool_]
Rows = NDArray[np.intp]
AnyRows = Rows | I32
"""As `Rows` they are looked up in half the time."""

EMPTY_I32: I32 = np.zeros(0, dtype=np.int32)
EMPTY_I32.flags.writeable = False
