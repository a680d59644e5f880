"""Which process this is, for people who look from outside: `$SRV.INFO`, reports, `sluice chaos`."""

from __future__ import annotations

import os
import socket


def process_facts() -> dict[str, str]:
    """Return `pid` and `host` of this process, as service metadata: texts."""
    return {"pid": str(os.getpid()), "host": socket.gethostname()}
