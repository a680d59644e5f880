"""Which clusters of this user run on this machine: a file for each, as long as its `sluice up` does.

    sluice up ─ writes, and locks ─► FOLDER/<id>.json ◄─ reads ─ any other command, which needs no URL then

The lock is the kernel's, so it ends with the process, however that ends; a file that nobody locks is removed by whoever
sees it. Before anything is signalled, the process must be the one that was started when the file says. The folder
(`$XDG_RUNTIME_DIR/sluice`, else `~/.cache/sluice/run`) is this user's alone, and links are not followed: files hold the
password of the broker's operator.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import signal
import stat
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from cli.exit_codes import REFUSED, UNREACHABLE, CommandError
from cli.processes import started
from shared.reading import parse_json

DEFAULT_URL: Final = "http://127.0.0.1:8000"
URL_DEFAULT: Final = "[that of the cluster that runs here, else http://127.0.0.1:8000]"
"""What help says of a URL that is not named."""
MAX_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class Run:
    """One cluster."""

    url: str
    """Of the API."""
    cluster: str
    """Name on the bus."""
    nats_url: str
    """With the operator's password, if the broker is the cluster's own."""
    model: str
    workers: int
    log_dir: str
    drain_limit_s: float = 120.0
    """Seconds that running answers get at the end."""
    pid: int = field(default_factory=os.getpid)
    """Of `sluice up`."""
    started: str = field(default_factory=lambda: started(os.getpid()))
    """When that process was, see `processes.started`."""
    since_s: float = field(default_factory=time.time)
    """The same for people, seconds since 1970."""
    id: str = field(default_factory=lambda: secrets.token_hex(4))

    def is_meant_by(self, name: str) -> bool:
        """Return whether a person means this one: by its id, its name, its URL or its port."""
        return name in (self.id, self.cluster, self.url, self.url.rpartition(":")[2])

    def signal(self, number: signal.Signals) -> int:
        """Signal its process; return a descriptor that is readable once that has ended, which the caller closes.

        Raises:
            CommandError: it has ended.
        """
        try:
            process = os.pidfd_open(self.pid)
        except OSError:
            raise self._has_ended() from None
        try:
            if started(self.pid) != self.started:  # looked at once it can be no other one any more
                raise self._has_ended()
            signal.pidfd_send_signal(process, number)
        except OSError:
            os.close(process)
            raise self._has_ended() from None
        except CommandError:
            os.close(process)
            raise
        return process

    def _has_ended(self) -> CommandError:
        return CommandError(f"the cluster at {self.url} has just ended", "", UNREACHABLE)


class RunFile:
    """The file of this process's own cluster."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file = -1

    def write(self, run: Run) -> None:
        """Write and lock it.

        Raises:
            OSError: it cannot be written, or the folder is not this user's alone.
        """
        folder = runs_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_own(folder):
            raise PermissionError(f"{folder} is not a folder of this user alone")
        draft = folder / f".{run.id}"
        self._file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        self._path = folder / f"{run.id}.json"
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            os.write(self._file, json.dumps(asdict(run)).encode())
            draft.rename(self._path)
        finally:
            draft.unlink(missing_ok=True)

    def end(self) -> None:
        """Remove it. Idempotent."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._path = None


def runs_folder() -> Path:
    """Return where the files are."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    try:
        return Path(runtime) / "sluice" if runtime else Path("~/.cache/sluice/run").expanduser()
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir()) / f"sluice-{os.geteuid()}"


def find_runs() -> list[Run]:
    """Return the clusters that run, those that were started first before others; files of others are removed."""
    folder = runs_folder()
    if not _is_own(folder):
        return []
    found = [run for path in folder.glob("*.json") if (run := _read(path)) is not None]
    return sorted(found, key=lambda run: (run.since_s, run.id))


def find_run(name: str | None = None, say_by: str = "its id") -> Run | None:
    """Return the one that is meant; without a name the only one, or None if nothing runs.

    Args:
        name: see `Run.is_meant_by`.
        say_by: how a person says which one is meant.

    Raises:
        CommandError: there are several, or none of this name.
    """
    runs = find_runs()
    meant = [run for run in runs if name is None or run.is_meant_by(name)]
    if len(meant) > 1:
        listed = "; ".join(f"{run.id} ({run.cluster}, {run.url})" for run in meant)
        raise CommandError(
            f"{len(meant)} clusters run here: {listed}", f"Say which by {say_by}", REFUSED, "several_clusters"
        )
    if name is not None and not meant:
        raise CommandError(f"no cluster '{name}' runs here", "`sluice ps` shows those that do", UNREACHABLE)
    return meant[0] if meant else None


def api_url(named: str | None) -> str:
    """Return the URL that was named, else that of the cluster that runs here, else where one usually is.

    Raises:
        CommandError: several run here.
    """
    if named is not None:
        return named
    run = find_run(say_by="--url")
    return DEFAULT_URL if run is None else run.url


def _is_own(folder: Path) -> bool:
    """Return whether it is a folder, and nobody else's; a link is none."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _read(path: Path) -> Run | None:
    """Return the cluster of a file; None, and without the file, if its process is gone."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            fields = parse_json(os.read(file, MAX_BYTES))
            return Run(**fields) if isinstance(fields, dict) else None
        path.unlink(missing_ok=True)
    except (OSError, ValueError, TypeError):
        return None
    finally:
        with suppress(OSError):
            os.close(file)
    return None
