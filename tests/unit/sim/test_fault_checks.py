"""What is said of an answer that a fault has changed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.fault_checks import assert_same


def answer(text: str = "a" * 50, **changes: Any) -> dict[str, Any]:
    usual = {"status": 200, "error": None, "texts": {0: text}, "finish": {0: "length"}}
    return {**usual, "usage": (3, len(text)), "is_whole": True, **changes}


def test_it_is_said_in_what_an_answer_that_broke_off_is_another() -> None:
    assert_same("fox", answer(), answer())
    broken = answer("a" * 20 + "b" * 9, finish={}, is_whole=False, usage=None, error={"code": "worker_lost"})
    with pytest.raises(AssertionError) as raised:
        assert_same("owl", broken, answer(), "ClientPayloadError")
    lines = str(raised.value).split("\n")
    assert lines[0].startswith("the answer to 'owl' is another: it ended early with {}, without a fault whole with {0:")
    assert lines[0].endswith("the connection ended by ClientPayloadError")
    for key, found, usual in (("texts", "aaabbb", "aaaaaa"), ("error", "worker_lost", "None"), ("usage", "None", "50")):
        assert any(line.startswith("+") and key in line and found in line for line in lines)
        assert any(line.startswith("-") and key in line and usual in line for line in lines)
