"""What is said of an answer that a fault has changed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.fault_checks import TAIL, assert_same


def answer(text: str = "a" * 50, **changes: Any) -> dict[str, Any]:
    logprobs = {0: {"tokens": list(text), "top": [{"x": -1.0}] * len(text)}}
    usual = {"status": 200, "error": None, "texts": {0: text}, "logprobs": logprobs, "finish": {0: "length"}}
    return {**usual, "usage": (3, len(text)), "is_whole": True, **changes}


def test_equal_answers_are_the_same() -> None:
    assert_same("fox", answer(), answer())


def test_it_is_said_from_where_on_a_text_is_another_and_how_both_go_on() -> None:
    with pytest.raises(AssertionError) as raised:
        assert_same("fox", answer("a" * 40 + "b" * 100), answer("a" * 40 + "c" * 70))
    lines = str(raised.value).split("\n")
    assert (
        lines[0]
        == "the answer to 'fox' is another: it ended whole with {0: 'length'}, without a fault whole with {0: 'length'}"
    )
    tails = f"{'b' * TAIL!r} instead of {'c' * TAIL!r}"
    assert lines[1] == f"['texts'][0]: 140 long, without a fault 110; 40 alike, then {tails}"
    assert lines[2].startswith("['logprobs'][0]['tokens']: 140 long, without a fault 110; 40 alike, then ['b', ")
    assert lines[3].startswith("['logprobs'][0]['top']: 140 long, without a fault 110; 110 alike, then [{'x': -1.0}, ")
    assert lines[4:] == ["['usage']: (3, 140) instead of (3, 110)"]


def test_an_answer_that_broke_off_says_how_and_which_keys_it_lacks() -> None:
    broken = answer("a" * 20, finish={}, is_whole=False, usage=None, error={"code": "worker_lost"})
    with pytest.raises(AssertionError) as raised:
        assert_same("owl", broken, answer(), "ClientPayloadError")
    lines = str(raised.value).split("\n")
    assert "it ended early with {}, without a fault whole with {0: 'length'}" in lines[0]
    assert lines[0].endswith("the connection ended by ClientPayloadError")
    assert "['texts'][0]: 20 long, without a fault 50; 20 alike, then '' instead of " + repr("a" * 30) in lines
    assert "['finish'][0]: Ellipsis instead of 'length'" in lines
    assert "['error']: {'code': 'worker_lost'} instead of None" in lines
    assert "['is_whole']: False instead of True" in lines
