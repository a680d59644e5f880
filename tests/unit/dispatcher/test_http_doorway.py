"""Who may connect: caps in all and per address, and what counts as one address."""

from __future__ import annotations

import resource

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.dispatcher.http.doorway import (
    RESERVED_FILES,
    Doorway,
    address_of,
    affordable_connections,
    raise_file_limit,
)


def test_the_last_place_of_an_address_is_refused_to_it_and_not_to_others() -> None:
    doorway = Doorway(10, 2)
    assert doorway.enter("a") is None
    assert doorway.enter("a") is None
    refusal = doorway.enter("a")
    assert refusal is not None
    assert (refusal.status, refusal.code, refusal.headers["Retry-After"]) == (429, "too_many_connections", "1")
    assert doorway.enter("b") is None
    assert (doorway.num_open, doorway.num_refused) == (3, 1)


def test_a_full_house_is_full_for_everybody_until_somebody_leaves() -> None:
    doorway = Doorway(2, 2)
    assert [doorway.enter(address) for address in "ab"] == [None, None]
    refusal = doorway.enter("c")
    assert refusal is not None
    assert (refusal.status, refusal.code) == (503, "too_many_connections")
    doorway.leave("a")
    assert doorway.enter("c") is None


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abcd")), max_size=60))
def test_every_address_has_its_share_and_what_left_is_forgotten(events: list[tuple[bool, str]]) -> None:
    """Against a plain list of who is inside."""
    doorway = Doorway(6, 3)
    inside: list[str] = []
    for comes, address in events:
        if comes:
            expected = len(inside) < 6 and inside.count(address) < 3
            assert (doorway.enter(address) is None) is expected
            if expected:
                inside.append(address)
        elif address in inside:
            doorway.leave(address)
            inside.remove(address)
        assert doorway.num_open == len(inside)
    for address in inside:
        doorway.leave(address)
    assert doorway._by_address == {}


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        (("10.0.0.7", 4711), "10.0.0.7"),
        (("::ffff:10.0.0.7", 4711, 0, 0), "10.0.0.7"),
        (("2001:db8:1:2:3:4:5:6", 1, 0, 0), "2001:db8:1:2::/64"),
        (("2001:db8:1:2:ffff::1", 1, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 1, 0, 2), "fe80::/64"),
        ("", "unknown"),
        (None, "unknown"),
        (("/run/socket",), "unknown"),
    ],
)
def test_an_address_is_an_ipv4_address_or_an_ipv6_network(peer: object, expected: str) -> None:
    assert address_of(peer) == expected


@pytest.mark.parametrize(
    ("before", "wanted", "after"),
    [
        ((1024, 4096), 2000, (2000 + RESERVED_FILES, 4096)),
        ((1024, 4096), 100_000, (4096, 4096)),
        ((1024, resource.RLIM_INFINITY), 100_000, (100_000 + RESERVED_FILES, resource.RLIM_INFINITY)),
        ((65_536, 65_536), 2000, (65_536, 65_536)),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 2000, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)),
    ],
)
def test_files_are_allowed_for_every_connection_as_far_as_the_system_goes(
    monkeypatch: pytest.MonkeyPatch, before: tuple[int, int], wanted: int, after: tuple[int, int]
) -> None:
    limits = [before]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))
    raise_file_limit(wanted)
    assert limits[-1] == after
    possible = affordable_connections(wanted)
    assert possible == (wanted if after[0] < 0 else min(wanted, after[0] - RESERVED_FILES))
