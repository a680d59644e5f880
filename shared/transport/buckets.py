"""How the buckets of a cluster come to be there, and what a service does until they are.

    the set-up user (`sluice up`, `sluice nats-setup`) ──► make_buckets, keep_buckets
    a service                                          ──► open_bucket: waits, and says so

Where users are not the roles' (a broker without any, or somebody's own), the first who opens a bucket makes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, NoReturn, TypeVar

from shared.process.log import get_logger
from shared.subjects import Subjects
from shared.transport.bus import Bus, BusClosedError, BusError, KeyValue
from shared.transport.bus_rules import is_power_of_two

T = TypeVar("T")

LOOK_S: Final = 1.0
"""Pause between two looks at whether the buckets are there."""


async def open_bucket(bus: Bus, bucket: str) -> KeyValue:
    """Return the bucket when it is there, as `when_served`."""
    return await when_served(lambda: bus.key_value(bucket))


async def when_served(ask: Callable[[], Awaitable[T]]) -> T:
    """Return what a bucket answers as soon as it does, however long that takes; meanwhile the log says why it does not.

    It may not be there yet, or the broker's disk may be full, which passes: neither is a reason to end.

    Args:
        ask: called again and again while it raises `BusError`.

    Raises:
        BusClosedError: the bus is closed.
    """
    num_looks = 0
    while True:
        try:
            return await ask()
        except BusClosedError:
            raise
        except BusError as error:
            num_looks += 1
            if is_power_of_two(num_looks):
                get_logger().warning("waiting_for_bucket", error=str(error))
        await asyncio.sleep(LOOK_S)


async def make_buckets(bus: Bus, subjects: Subjects) -> None:
    """Create the cluster's buckets that are not there; those that are stay as they are.

    Raises:
        BusError: the broker has no JetStream or no room, refuses this user, or did not answer.
    """
    for bucket, max_age_s in subjects.buckets().items():
        await bus.key_value(bucket, max_age_s=max_age_s)


async def keep_buckets(bus: Bus, subjects: Subjects) -> NoReturn:
    """Make buckets that are missing again and again: a broker may come back without its disk."""
    num_failures = 0
    while True:
        try:
            if bus.connected:
                await make_buckets(bus, subjects)
        except BusClosedError:
            raise
        except BusError as error:
            num_failures += 1
            if is_power_of_two(num_failures):
                get_logger().warning("buckets_not_made", error=str(error))
        await asyncio.sleep(LOOK_S)
