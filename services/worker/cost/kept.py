"""What steps have cost, kept on the disk for the next start of a worker like this one.

    fit ──► of each kind of step the newest few ──► FOLDER/<digest of the key>.json ──► next start, and what it tries

Steps are kept, not coefficients: the model is fitted again from them, and newer steps take their places one by one, as
they do while the worker runs. Nothing depends on a file: one that is damaged, of another worker or out of date is left
out, and replaced after the next fit. Workers that write at once replace each other's, whole files only.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, ValidationError

from services.worker.cost.steps import MAX_KINDS, PER_KIND, MeasuredStep, StepSample, StepShape, agree
from shared.errors import StartupError
from shared.process.log import get_logger
from shared.reading import InputFile
from shared.types import Value

MAX_FILES: Final = 64
"""Workers of which steps are kept in one folder: beyond, the file goes that was written longest ago."""
MAX_BYTES: Final = 64 * 1024
"""Largest file that is read; those of full samples have a third of it."""
_OURS: Final = re.compile(r"[0-9a-f]{32}\.(json|[a-z0-9_]+\.new)")
"""Names of files here, and of drafts; nothing else in the folder is ever touched."""
_Count = Annotated[int, Field(ge=0, le=2**48)]
_Seconds = Annotated[float, Field(ge=1e-7, le=86_400)]


class CostKey(Value):
    """What a step's cost depends on beside its shape: workers of one key take each other's steps for their own."""

    model: str
    """Digest of its shape: what its parameters are does not matter."""
    dtype: str
    device: str
    """Name of the card or processor."""
    build: str
    """What computes, with its versions and modes."""
    threads: str
    """Of a step on the CPU."""


class _File(Value):
    version: Literal[1] = 1
    key: CostKey
    steps: Annotated[
        tuple[tuple[Annotated[_Count, Field(ge=1)], _Count, _Count, _Seconds], ...],
        Field(max_length=MAX_KINDS * PER_KIND),
    ]
    """Tokens, KV that decodes read, pairs of prefill, seconds: the kind that was seen last at the end."""


class KeptSteps:
    """The file of one key. Its methods block, and raise nothing because of what is on the disk, or is not.

    Args:
        folder: made if it is not there; `~` is the user's home.
        key: of this worker.
    """

    def __init__(self, folder: Path, key: CostKey) -> None:
        self._folder = folder
        self._key = key
        self._name = blake2b(key.model_dump_json().encode(), digest_size=16).hexdigest()
        self._has_warned = False

    def read(self, tried: Sequence[MeasuredStep]) -> list[MeasuredStep]:
        """Return the steps that were written last, in that order; none if there are none of use, which is logged.

        Args:
            tried: steps that were run just now; where most of them say otherwise, what is kept is out of date.
        """
        try:
            file = InputFile(self._folder.expanduser() / f"{self._name}.json", MAX_BYTES, "the file of steps")
            if not file.exists():
                return []
            steps = self._checked(file, tried)
        except (StartupError, RuntimeError) as error:  # the second: nobody knows where the home is
            problem = error.message if isinstance(error, StartupError) else str(error)
            get_logger().warning("kept_steps_not_read", problem=problem, meaning="the worker begins without them")
            return []
        get_logger().info("kept_steps_read", num_steps=len(steps), path=str(file.path))
        return steps

    def _checked(self, file: InputFile, tried: Sequence[MeasuredStep]) -> list[MeasuredStep]:
        try:
            found = _File.model_validate(file.read_json())
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise file.error(f"cannot be used: {where}: {first['msg']}") from None
        if found.key != self._key:
            raise file.error("is of another worker")
        steps = [MeasuredStep(StepShape(*shape), duration_s) for *shape, duration_s in found.steps]
        cost = StepSample(steps).fit()
        if cost is None:
            raise file.error("says too little")
        if not agree(cost, tried):
            raise file.error("is out of date: steps take another time now")
        return steps

    def write(self, steps: Iterable[MeasuredStep]) -> None:
        """Replace the file; a reader sees the one before or this one, never a half. The first failure is logged."""
        try:
            shown = tuple((*step.shape, step.duration_s) for step in steps)
            folder = self._folder.expanduser()
            folder.mkdir(parents=True, exist_ok=True)
            self._replace(folder, _File(key=self._key, steps=shown).model_dump_json())
            _forget_oldest(folder)
        except (OSError, RuntimeError, ValueError) as error:  # the last: a step that no file may have
            if not self._has_warned:
                meaning = "the next start begins without them"
                get_logger().warning("steps_not_kept", folder=str(self._folder), problem=str(error), meaning=meaning)
            self._has_warned = True

    def _replace(self, folder: Path, text: str) -> None:
        descriptor, draft = tempfile.mkstemp(".new", f"{self._name}.", folder)  # of this process alone
        try:
            with open(descriptor, "w", encoding="utf-8") as file:  # noqa: PTH123  a descriptor
                file.write(text)
            os.replace(draft, folder / f"{self._name}.json")  # noqa: PTH105  one text
        except BaseException:
            with suppress(OSError):
                os.unlink(draft)  # noqa: PTH108  one text
            raise


def _forget_oldest(folder: Path) -> None:
    """Remove what is beyond `MAX_FILES`, drafts of processes that died included."""
    with os.scandir(folder) as entries:
        ours = [entry for entry in entries if _OURS.fullmatch(entry.name)]
    if len(ours) <= MAX_FILES:
        return
    for entry in sorted(ours, key=_written_ns)[:-MAX_FILES]:
        with suppress(FileNotFoundError):  # another worker was faster
            os.unlink(entry.path)  # noqa: PTH108  one text


def _written_ns(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_mtime_ns
    except FileNotFoundError:
        return 0
