"""Who may connect: caps in all and per address, and what counts as one address."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.dispatcher.http.doorway import (
    MAX_VISITORS,
    MIN_CONNECTIONS,
    SPARE_FILES,
    Doorway,
    address_of,
    claim_files,
)
from shared.errors import StartupError

NUM_OWN = 11
"""Files that are open at the start."""
RESERVED = NUM_OWN + SPARE_FILES + MAX_VISITORS


def test_the_last_place_of_an_address_is_refused_to_it_and_not_to_others() -> None:
    doorway = Doorway(10, 2)
    assert doorway.enter("a") is None
    assert doorway.enter("a") is None
    refusal = doorway.enter("a")
    assert refusal is not None
    assert (refusal.status, refusal.code, refusal.headers["Retry-After"]) == (429, "too_many_connections", "1")
    assert doorway.enter("b") is None
    assert doorway.num_open == 3


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


class Caller:
    """A visitor that notes when it is sent away."""

    def __init__(self) -> None:
        self.is_gone = False

    def send_away(self) -> None:
        self.is_gone = True


@given(st.permutations(range(41)), st.lists(st.integers(0, 40), max_size=40))
def test_visitors_are_bounded_and_the_last_to_come_stay(first: list[int], then: list[int]) -> None:
    """Against a plain list: a number that is inside leaves by itself, another one comes."""
    doorway = Doorway(1, 1)
    inside: list[Caller] = []
    callers = [Caller() for _ in range(41)]
    for number in (*first, *then):
        caller = callers[number]
        if caller in inside:
            doorway.end_visit(caller)
            inside.remove(caller)
        else:
            caller.is_gone = False
            doorway.visit(caller)
            inside.append(caller)
        gone = inside[:-MAX_VISITORS]
        del inside[:-MAX_VISITORS]
        assert all(each.is_gone for each in gone)
        assert not any(each.is_gone for each in inside)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The limits of files, the last one holds; `NUM_OWN` are open."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: found[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: found.append(new))
    monkeypatch.setattr(Path, "iterdir", lambda _: iter(range(NUM_OWN)))
    return found


@pytest.mark.parametrize(
    ("before", "wanted", "after"),
    [
        ((1024, 4096), 2000, (2000 + RESERVED, 4096)),
        ((1024, 4096), 100_000, (4096, 4096)),
        ((256, 256), 16_384, (256, 256)),
        ((RESERVED + MIN_CONNECTIONS, RESERVED + MIN_CONNECTIONS), 100, (RESERVED + MIN_CONNECTIONS,) * 2),
        ((RESERVED, RESERVED + 3), 3, (RESERVED + 3, RESERVED + 3)),
        ((1024, resource.RLIM_INFINITY), 100_000, (100_000 + RESERVED, resource.RLIM_INFINITY)),
        ((65_536, 65_536), 2000, (65_536, 65_536)),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 2000, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)),
    ],
)
def test_files_are_allowed_for_every_connection_as_far_as_the_system_goes(
    limits: list[tuple[int, int]], before: tuple[int, int], wanted: int, after: tuple[int, int]
) -> None:
    limits.append(before)
    possible = claim_files(wanted)
    assert limits[-1] == after
    assert possible == (wanted if after[0] < 0 else min(wanted, after[0] - RESERVED))


@pytest.mark.parametrize(("limit", "wanted"), [(12, 3), (RESERVED + MIN_CONNECTIONS - 1, 16_384), (RESERVED + 2, 3)])
def test_a_start_with_too_few_files_is_refused_and_told_what_it_takes(
    limits: list[tuple[int, int]], limit: int, wanted: int
) -> None:
    limits.append((limit, limit))
    with pytest.raises(StartupError) as refusal:
        claim_files(wanted)
    needed = RESERVED + min(wanted, MIN_CONNECTIONS)
    assert f"may open {limit} files, and needs {needed}. Start it where `ulimit -Hn` says {needed} or" in str(
        refusal.value
    )
