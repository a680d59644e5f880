"""Bodies that are JSON, but so much of it that reading them would hold up the event loop."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.dispatcher.http import body
from services.dispatcher.http.body import parse_object
from services.dispatcher.http.errors import ApiError

MAX_PARTS = 2_000

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text() | st.sampled_from(['a"[', "\\", "{:\\"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


@pytest.fixture(autouse=True)
def few_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "MAX_PARTS", MAX_PARTS)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # it stays as it is
@given(st.dictionaries(st.text(max_size=5), json_values, max_size=5))
def test_what_json_writes_is_read_as_it_was(value: dict[str, object]) -> None:
    assert parse_object(json.dumps(value).encode()) == value


@pytest.mark.parametrize("part", ["[]", "{}", '{"a":[]}', "[[[[]]]]", '"b"', '{"\\\\":"\\"{["}'])
def test_the_last_array_object_or_string_too_many_is_refused(part: str) -> None:
    """The outer ones, `{"a":[…]}`, count three."""
    weight = {"[]": 1, "{}": 1, '{"a":[]}': 3, "[[[[]]]]": 4, '"b"': 1}.get(part, 3)
    most = (MAX_PARTS - 3) // weight
    text = '{"a":[' + ",".join([part] * most) + "%s]}"
    assert len(parse_object((text % "").encode())["a"]) == most
    with pytest.raises(ApiError) as refusal:
        parse_object((text % ("," + part)).encode())
    assert (refusal.value.status, refusal.value.code) == (400, "request_too_large")


def test_what_only_looks_like_them_in_a_text_is_not_counted() -> None:
    text = '[{"\\' * MAX_PARTS
    assert parse_object(json.dumps({"a": text, text[:6]: "b"}).encode()) == {"a": text, text[:6]: "b"}
