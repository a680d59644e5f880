"""The fixtures of the bus contract, for the tests of this folder."""

from tests.support.broker import nats_server, world

__all__ = ["nats_server", "world"]
