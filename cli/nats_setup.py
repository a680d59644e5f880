"""`sluice nats-setup`: make the buckets of a cluster at a broker that people run themselves.

`sluice up` does the same for the broker that it starts. Nobody else may: see `shared.transport.nats_roles`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Final

from cli.cluster.settings import UpSettings
from cli.exit_codes import DONE, FAILED, REFUSED, CommandError
from cli.signals import StopSignals
from shared.process.log import configure
from shared.process.service_process import ServiceProcess
from shared.subjects import Subjects
from shared.transport.buckets import keep_buckets, make_buckets
from shared.transport.bus import BusError
from shared.transport.nats_bus import NatsBus
from shared.transport.nats_roles import BrokerRole
from shared.transport.nats_server import accepts_connections

WAIT_LIMIT_S: Final = 60.0
"""How long a broker that is not there yet is waited for."""
LOOK_S: Final = 0.2


async def run_nats_setup(settings: UpSettings, *, keep: bool, as_json: bool) -> int:
    """Make what is missing; return the exit code.

    Args:
        settings: where the broker is, who signs in, and of which cluster the buckets are.
        keep: look again every second until Ctrl-C or SIGTERM, as a broker may lose its disk.
        as_json: print the buckets' names as one line of JSON.

    Raises:
        StartupError: there is no broker, or it does not let this user in, or refuses it a subject.
        CommandError: the user is one that makes no buckets, or the broker has no JetStream or no room.
    """
    configure("nats-setup", settings.instance_id, settings.log_level, settings.log_format)
    signals, subjects = StopSignals(lambda: None), Subjects(settings.cluster)
    process = ServiceProcess(BrokerRole.SETUP, settings, signals.stop)
    try:
        await _wait_for(settings.nats_url)
        async with process.bus() as bus:
            _check_user(bus)
            await make_buckets(bus, subjects)
            buckets = list(subjects.buckets())
            sys.stdout.write((json.dumps(buckets) if as_json else "\n".join(buckets)) + "\n")
            sys.stdout.flush()
            process.is_ready = True
            if keep:
                await process.begin(keep_buckets(bus, subjects))
    except BusError as error:
        if process.failure is error:
            raise
        raise CommandError(f"the buckets cannot be made: {error}", "", FAILED) from None
    finally:
        signals.close()
    return DONE


def _check_user(bus: NatsBus) -> None:
    if not bus.makes_buckets:
        hint = "Sign in as 'setup': SLUICE_NATS_USER=setup SLUICE_NATS_PASSWORD_FILE=DIR/setup/password"
        raise CommandError("this user of the broker makes no buckets", hint, REFUSED)


async def _wait_for(url: str) -> None:
    """Return when one of the servers greets, or after the limit: then connecting says what is wrong."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + WAIT_LIMIT_S
    while loop.time() < end_s:
        for one in url.split(","):
            if await asyncio.to_thread(accepts_connections, one):
                return
        await asyncio.sleep(LOOK_S)
