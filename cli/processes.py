"""Processes of this machine as /proc shows them: what runs under an id, and who listens on a port."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_LISTEN: Final = "0A"


def command_line(pid: int) -> list[str]:
    """Return the words with which the process was started; empty if there is none, or it is not ours to see."""
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return []
    return [word.decode(errors="replace") for word in words if word]


def is_running(pid: int) -> bool:
    """Return whether the process exists and has not ended (one that nobody has waited for yet has ended)."""
    try:
        state = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def started(pid: int) -> str:
    """Return when the process was started: the boot of its machine, and the ticks since; empty if it has ended.

    No two processes that ever had one id have the same.
    """
    try:
        ticks = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[19]
        return f"{(_PROC / 'sys/kernel/random/boot_id').read_text().strip()}+{ticks}"
    except OSError:
        return ""


def is_local_address(host: str) -> bool:
    """Return whether the name means this machine: one may only bind to an address of one's own."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind((address[0], 0))
            except OSError:
                continue
            return True
    return False


def listener_on(port: int) -> int | None:
    """Return the process that listens on this TCP port, or None if there is none that this user may see."""
    sockets = {f"socket:[{inode}]" for table in ("tcp", "tcp6") for inode in _listening(_PROC / "net" / table, port)}
    for folder in _PROC.iterdir():
        if folder.name.isdigit() and _holds_any(folder / "fd", sockets):
            return int(folder.name)
    return None


def _listening(table: Path, port: int) -> list[str]:
    """Return the inodes of the sockets in a table of the kernel that listen on the port."""
    try:
        rows = [line.split() for line in table.read_text().splitlines()[1:]]
    except OSError:
        return []
    return [row[9] for row in rows if row[3] == _LISTEN and int(row[1].rpartition(":")[2], 16) == port]


def _holds_any(folder: Path, sockets: set[str]) -> bool:
    try:
        return any(str(link.readlink()) in sockets for link in folder.iterdir())
    except OSError:  # it ended, or belongs to another user
        return False
