"""A wall clock that jumps, for processes of their own: a `sitecustomize` that adds an offset from a file to it."""

from __future__ import annotations

import struct
from pathlib import Path

_SITECUSTOMIZE = """
import datetime, struct, time, mmap, pathlib

_file = (pathlib.Path(__file__).parent / "offset").open("rb")
_offset = mmap.mmap(_file.fileno(), 8, access=mmap.ACCESS_READ)
_time, _time_ns, _datetime = time.time, time.time_ns, datetime.datetime

def _jumped_by():
    return struct.unpack("<d", _offset[:8])[0]

class _Jumping(_datetime):
    @classmethod
    def now(cls, tz=None):
        return _datetime.now(tz) + datetime.timedelta(seconds=_jumped_by())

time.time = lambda: _time() + _jumped_by()
time.time_ns = lambda: _time_ns() + int(_jumped_by() * 1e9)
datetime.datetime = _Jumping
"""


class WallClock:
    """The wall clock of every process that has `folder` on its PYTHONPATH.

    Args:
        folder: empty.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder / "offset"
        self._file.write_bytes(bytes(8))
        (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE)

    def jump(self, offset_s: float) -> None:
        """Set the difference to the real time, for all of them at once."""
        with self._file.open("r+b") as file:
            file.write(struct.pack("<d", offset_s))
