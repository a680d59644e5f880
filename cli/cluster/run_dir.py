"""The folder of one run, and the guardian that removes it and kills what is left when `sluice up` is gone."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Self

GUARDIAN_END_S = 5.0

GUARDIAN = Path(__file__).with_name("guardian.py")


class RunDir:
    """A temporary folder, and the process group that all children of the run join.

    Used as a context manager; when it is left, no process of the group and no file of the folder is left.
    """

    def __init__(self) -> None:
        self.path = Path()
        self._guardian: subprocess.Popen[bytes] | None = None

    @property
    def group(self) -> int:
        """Process group for children (`process_group=` of `subprocess`)."""
        assert self._guardian is not None, "entered"
        return self._guardian.pid

    def __enter__(self) -> Self:
        self.path = Path(tempfile.mkdtemp(prefix="sluice-"))
        self._guardian = subprocess.Popen(  # noqa: S603  this interpreter and a file of ours
            [sys.executable, "-I", "-S", str(GUARDIAN), str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            process_group=0,
        )
        return self

    def __exit__(self, *_exc: object) -> None:
        self.end()

    def end(self) -> None:
        """Kill what is left of the group, and remove the folder. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._guardian is None:
            return
        assert self._guardian.stdin is not None, "a pipe"
        self._guardian.stdin.close()
        try:
            self._guardian.wait(GUARDIAN_END_S)
        except subprocess.TimeoutExpired:
            self._guardian.kill()
            self._guardian.wait()
        shutil.rmtree(self.path, ignore_errors=True)
