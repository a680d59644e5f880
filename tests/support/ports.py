"""Free TCP ports."""

from __future__ import annotations

import contextlib
import os
import random
from itertools import cycle, islice
from typing import Final

from cli.cluster.checks import QUIET_PORTS, find_port
from shared.errors import StartupError

_NUM_SHARES: Final = 8
_SHARE: Final = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _NUM_SHARES
_OWN_PORTS: Final = QUIET_PORTS[_SHARE::_NUM_SHARES]
"""Of this process among those that test at the same time: what one has chosen it may use some seconds later."""
_candidates: Final = islice(cycle(_OWN_PORTS), random.randrange(len(_OWN_PORTS)), None)


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that was free a moment ago; another one at each call.

    No outgoing connection gets it: a client that calls a server which is down could take the server's port itself.
    """
    for port in _candidates:
        with contextlib.suppress(StartupError):
            return find_port("127.0.0.1", port)
    raise AssertionError("candidates never end")
