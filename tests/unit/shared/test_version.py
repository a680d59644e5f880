"""The version that services report is the distribution's."""

from __future__ import annotations

from importlib.metadata import version

from shared.version import VERSION


def test_reported_version_is_the_distributions() -> None:
    assert version("sluice") == VERSION
