"""Wrong keys: so many from one address are answered, then they are turned away unread. Right keys never are."""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from typing import Final

from services.dispatcher.policy.rates import Bucket, Short, take

BURST: Final = 60
"""Wrong keys that an address may send at once; as many more come back within a minute."""
MAX_ADDRESSES: Final = 4096
"""Addresses that are remembered; of more, the ones that were quiet for longest are forgotten."""
_IPV6_PREFIX: Final = 64
"""Bits of an IPv6 address that name a network; one client may have all addresses in it."""


class WrongKeyThrottle:
    """Counts wrong keys by address. Bounded in memory, whoever asks."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def note(self, address: str, now_s: float) -> float:
        """Count a wrong key and return for how many seconds its sender should wait; 0: it gets an ordinary refusal."""
        network = network_of(address) or address[:64]
        bucket = self._buckets.pop(network, Bucket(BURST, now_s))
        outcome = take(bucket, BURST, 1, now_s)
        self._buckets[network] = bucket if isinstance(outcome, Short) else outcome
        if len(self._buckets) > MAX_ADDRESSES:
            self._buckets.popitem(last=False)
        return (outcome.wait_s or 0.0) if isinstance(outcome, Short) else 0.0


def network_of(address: str) -> str | None:
    """Return whom an address counts for: the IPv4 address, however written, or the IPv6 network; None: neither."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((found, _IPV6_PREFIX), strict=False))
