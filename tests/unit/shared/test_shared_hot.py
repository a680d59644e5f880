"""Hot dataclasses: equal, hashable and without a dictionary, as frozen ones are."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from shared.hot import hot_dataclass


@hot_dataclass(frozen=True, slots=True)
class Hot:
    name: str
    number: int = 3


@hot_dataclass(frozen=True, slots=True, eq=False)
class Unequal:
    name: str


@dataclass(frozen=True, slots=True)
class Frozen:
    name: str
    number: int = 3


def test_it_is_a_dataclass_whose_equals_have_equal_hashes() -> None:
    hot, frozen = Hot("a"), Frozen("a")
    assert [field.name for field in fields(hot)] == [field.name for field in fields(frozen)]
    assert hot == Hot("a", 3) != Hot("a", 4)
    assert hash(hot) == hash(Hot("a", 3)) == hash(frozen)
    assert replace(hot, number=5) == Hot("a", 5)
    assert repr(hot) == repr(frozen).replace("Frozen", "Hot")


def test_it_has_no_dictionary_and_may_be_told_to_be_equal_to_itself_only() -> None:
    assert not hasattr(Hot("a"), "__dict__")
    same = Unequal("a")
    assert same == same != Unequal("a")  # noqa: PLR0124
    assert len({same, Unequal("a")}) == 2
