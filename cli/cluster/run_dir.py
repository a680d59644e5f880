"""The folder of one run, and the guardian that removes it and kills what is left when `sluice up` is gone."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from shared.errors import StartupError
from shared.reading import check_text

GUARDIAN_END_S = 5.0
LOOK_S = 0.1
"""Pause between two looks at the guardian."""

GUARDIAN = Path(__file__).with_name("guardian.py")


class RunDir:
    """A temporary folder, and the process group that all children of the run join.

    Used as a context manager; when it is left, no process of the group and no file of the folder is left.
    """

    def __init__(self) -> None:
        self.path = Path()
        self._guardian: subprocess.Popen[bytes] | None = None
        self._group = 0

    def group(self) -> int:
        """Return the process group that a child may join now (`process_group=` of `subprocess`).

        A guardian that is gone is replaced first; the group stays while anybody is in it.

        Raises:
            OSError: no process is to be had for another guardian.
        """
        assert self._guardian is not None, "entered"
        if self._guardian.poll() is not None:
            assert self._guardian.stdin is not None, "a pipe"
            self._guardian.stdin.close()
            try:
                self._guardian = self._start_guardian(self._group)
            except PermissionError:  # nobody is left in the group
                self._guard()
        return self._group

    async def keep_guarded(self, show: Callable[[str], None]) -> None:
        """Replace a guardian that ends, until cancelled, and say so."""
        known = self._guardian
        while True:
            await asyncio.sleep(LOOK_S)
            with suppress(OSError):  # another time
                self.group()
            if self._guardian is not known:
                known = self._guardian
                show("the guardian, which ends all others if this process is killed, was gone; there is another one")

    def __enter__(self) -> Self:
        try:
            check_text(tempfile.gettempdir())
            self.path = Path(tempfile.mkdtemp(prefix="sluice-"))
        except OSError as error:
            raise StartupError(f"cannot make a folder for this run ({error.strerror})", "Set TMPDIR") from error
        except ValueError as error:
            said = f"cannot make a folder for this run in {tempfile.gettempdir()}, {error}"
            raise StartupError(said, "Set TMPDIR") from None
        try:
            self._guard()
        except OSError:
            self.path.rmdir()
            raise
        return self

    def _guard(self) -> None:
        """Start a guardian with a group of its own."""
        self._guardian = self._start_guardian(0)
        self._group = self._guardian.pid

    def _start_guardian(self, group: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603  this interpreter and a file of ours
            [sys.executable, "-I", "-S", str(GUARDIAN), str(self.path), str(group)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            process_group=group,
        )

    def __exit__(self, *_exc: object) -> None:
        self.end()

    def end(self) -> None:
        """Kill what is left of the group, and remove the folder. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._guardian is None:
            return
        with suppress(OSError):
            self.group()  # a guardian that is gone kills nobody
        assert self._guardian.stdin is not None, "a pipe"
        self._guardian.stdin.close()
        try:
            self._guardian.wait(GUARDIAN_END_S)
        except subprocess.TimeoutExpired:
            self._guardian.kill()
            self._guardian.wait()
        shutil.rmtree(self.path, ignore_errors=True)
